//! Making ranges read as zeroes, and giving their space back.
//!
//! Promises: whole clusters (subclusters where the image has them) change in the tables only; parts
//! of one are written as zeroes unless they are zeroes already. Only requests for the same clusters
//! wait. Space is freed after the change is on stable storage and no request uses it any more.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::{Kind, Storage};

use super::action::{Words, bitmap};
use super::below::Below;
use super::space::ALIGN;
use super::write::Chunk;
use super::{Discard, Qcow2};
use crate::entry::{COMPRESSED, OFFSET_MASK, Rules, ZERO};
use crate::units::{Bytes, GuestOffset, HostOffset};

/// Zeroes that are written where the image has no better way go in pieces of this size.
pub(super) const PIECE_BYTES: Bytes = Bytes(1 << 20);

/// What happens to the space of zeroed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    /// It stays reserved.
    Keep,
    /// It is given back.
    Free,
    /// The cluster keeps its place, the host file does not.
    Punch,
}

/// What one chunk of clusters needs.
struct Change {
    entries: Vec<Words>,
    changed: bool,
    /// Ranges to punch now: first byte and length.
    punch: Vec<(HostOffset, Bytes)>,
    /// Clusters (index in the chunk) that the tables cannot zero.
    by_hand: Vec<usize>,
}

impl Qcow2 {
    /// Makes a range read as zeroes.
    ///
    /// * `offset`, `len`: bytes; cut at the end of the disk.
    /// * `may_unmap`: the space may be given back.
    ///
    /// Errors: as [`write`](Qcow2::write); a part may have been zeroed.
    pub async fn write_zeroes<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
        may_unmap: bool,
        below: &B,
    ) -> Result<(), Errno> {
        let space = if may_unmap { Space::Free } else { Space::Keep };
        self.clear(ring, offset, len, space, below).await
    }

    /// Gives the space of a range back, which reads as zeroes afterwards. Does nothing when the
    /// image is open with [`Discard::Ignore`].
    ///
    /// Errors: as [`write`](Qcow2::write).
    pub async fn discard<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
        below: &B,
    ) -> Result<(), Errno> {
        let options = self.engine()?.options;
        if options.discard == Discard::Ignore {
            return Ok(());
        }
        let keep_place = options.discard_no_unref && self.info.version >= 3;
        let space = if keep_place { Space::Punch } else { Space::Free };
        self.clear(ring, offset, len, space, below).await
    }

    async fn clear<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
        space: Space,
        below: &B,
    ) -> Result<(), Errno> {
        let len = len.min(self.geometry.end().saturating_sub(offset));
        if len == Bytes::ZERO {
            return Ok(());
        }
        self.begin_change(ring, offset, len).await?;
        self.check_sound()?;
        let end = offset + len;
        let unit = self.geometry.zero_unit();
        let first = offset.next_multiple_of(unit);
        // The end of the disk counts as the end of its cluster.
        let last = if end == self.geometry.end() { end } else { end.align_down(unit) };
        if first >= last {
            return self.zero_part(ring, offset, end, below).await;
        }
        self.zero_part(ring, offset, first, below).await?;
        let mut at = first;
        while at < last {
            at = self.clear_chunk(ring, at, last, space, below).await?;
            // Other requests of this thread go on during a discard of a whole disk.
            ring.yield_now().await;
        }
        self.zero_part(ring, last, end, below).await
    }

    /// Zeroes less than a cluster, by writing unless it is zero already. A data file that is a raw
    /// image may still hold what was written while the cluster was cleared.
    async fn zero_part<B: Below>(
        &self,
        ring: &Ring,
        mut start: GuestOffset,
        end: GuestOffset,
        below: &B,
    ) -> Result<(), Errno> {
        while start < end {
            let extent = self.map(ring, start, end - start).await?;
            let len = extent.len.min(PIECE_BYTES);
            if self.info.data_file_raw || !self.reads_zero(start, len, below) {
                // At most PIECE_BYTES.
                let zeroes = IoBuf::new(usize::try_from(len).map_err(|_| Errno::NOMEM)?, ALIGN);
                self.write_fully(ring, start, &zeroes, below).await?;
            }
            start += len;
        }
        Ok(())
    }

    async fn write_fully<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
        below: &B,
    ) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            let rest = buf.slice(done..buf.len());
            match self.write_some(ring, offset + Bytes::of(done), &rest, below).await? {
                0 => return Err(Errno::IO),
                written => done += written,
            }
        }
        Ok(())
    }

    /// Clears whole units from `at` on, up to the end of their slice (or of their table, when there
    /// is none and nothing below). Returns where it stopped.
    async fn clear_chunk<B: Below>(
        &self,
        ring: &Ring,
        at: GuestOffset,
        last: GuestOffset,
        space: Space,
        below: &B,
    ) -> Result<GuestOffset, Errno> {
        let bits = self.geometry.cluster_bits;
        let slice = self.geometry.slice(at);
        let end = self.geometry.slice_end(slice).min(last);
        let index = self.geometry.l1_index(at);
        if self.table_offset(index)?.is_none() {
            let end = self.geometry.table_end(index).min(last);
            if !self.may_show(at, end - at, below) && !self.info.data_file_raw {
                return Ok(end);
            }
        }
        let chunk = Chunk { slice, start: at, end };
        let (end, by_hand) = {
            let (first, past) = (at >> bits, ((end - Bytes(1)) >> bits) + 1);
            let _claim = self.engine()?.clusters.claim(first.0, past.0).await;
            self.clear_claimed(ring, chunk, space, below).await?
        };
        for (start, end) in by_hand {
            self.zero_part(ring, start, end, below).await?;
        }
        Ok(end)
    }

    /// Returns where it stopped (before a damaged entry), and the ranges of the disk that have to
    /// be written as zeroes.
    pub(super) async fn clear_claimed<B: Below>(
        &self,
        ring: &Ring,
        mut chunk: Chunk,
        space: Space,
        below: &B,
    ) -> Result<(GuestOffset, Vec<(GuestOffset, GuestOffset)>), Errno> {
        let bits = self.geometry.cluster_bits;
        self.ensure_table(ring, self.geometry.l1_index(chunk.start)).await?;
        let first = self.geometry.entry_in_slice(chunk.start);
        let count = self.geometry.entry_in_slice(chunk.end - Bytes(1)) - first + 1;
        let mut entries = self.entries(ring, chunk.slice, first, count).await?;
        let sound = self.leading_sound(ring, chunk.start, &entries).await?;
        if sound < count {
            entries.truncate(sound);
            chunk.end = ((chunk.start >> bits) + sound as u64) << bits;
        }
        let count = sound;
        let part = |index: usize| {
            let start = ((chunk.start >> bits) + index as u64) << bits;
            (start, chunk.start.max(start), chunk.end.min(start + Bytes::of_clusters(1, bits)))
        };
        let mut change = Change {
            entries: entries.clone(),
            changed: false,
            punch: Vec::new(),
            by_hand: Vec::new(),
        };
        for index in 0..count {
            let (start, from, to) = part(index);
            // The last cluster of the disk may be cut.
            let whole_end = to == self.geometry.end();
            let to = if whole_end { self.geometry.cluster_size() } else { to - start };
            self.clear_cluster(&mut change, index, (start, from - start, to), space, below);
        }
        if self.info.data_file_raw {
            // The data file by itself has to read like the disk.
            let len = chunk.end - chunk.start;
            let unmap = space != Space::Keep;
            self.data_storage().write_zeroes(ring, chunk.start.0, len.0, unmap, true).await?;
        } else {
            for (host, len) in &change.punch {
                // That it stays allocated is no harm.
                let _ = punch(self.data_storage(), ring, *host, *len).await;
            }
        }
        if change.changed {
            self.set_entries(ring, chunk.slice, first, &change.entries, false).await?;
            for (old, new) in entries.iter().zip(&change.entries) {
                if self.rules.reference(*old) != self.rules.reference(*new) {
                    self.unlink_all(&[*old])?;
                }
            }
        }
        let ranges = change.by_hand.into_iter().map(part).map(|(_, from, to)| (from, to));
        Ok((chunk.end, ranges.collect()))
    }

    /// Decides what the entry at `index` becomes.
    ///
    /// * `range`: first byte of the cluster on the disk; first and last (exclusive) byte to clear
    ///   in the cluster.
    fn clear_cluster<B: Below>(
        &self,
        change: &mut Change,
        index: usize,
        range: (GuestOffset, Bytes, Bytes),
        space: Space,
        below: &B,
    ) {
        let (start, from, to) = range;
        let cluster_size = self.geometry.cluster_size();
        let old = change.entries[index];
        let host = self.rules.host(old);
        let own = Rules::is_own(old);
        let empty = old.entry & !ZERO == 0 && host.is_none() && old.bitmap == 0;
        let covered = self.geometry.end().min(start + cluster_size) - start;
        let may_show = || self.may_show(start, covered, below);
        if empty && !self.rules.is_zero(old) && !may_show() {
            return;
        }
        let new = if self.geometry.extended {
            self.clear_subclusters(old, from, to, space)
        } else if self.info.version < 3 {
            // No flag says "zeroes": only nothing over nothing reads so.
            (space != Space::Keep && !may_show()).then(Words::default)
        } else {
            let keeps = own && host.is_some() && space != Space::Free;
            let pinned = own && host.is_some() && self.info.data_file_raw;
            let entry = if keeps || pinned { old.entry | ZERO } else { ZERO };
            Some(Words { entry, bitmap: 0 })
        };
        let Some(new) = new else {
            if !empty || may_show() {
                change.by_hand.push(index);
            }
            return;
        };
        if let Some(host) = host.filter(|_| own) {
            let external = self.info.external_data_file && space == Space::Free;
            if space == Space::Punch || external {
                change.punch.push((host + from, to.min(covered) - from));
            }
        }
        change.changed |= new != old;
        change.entries[index] = new;
    }

    /// What an extended entry becomes; `None`: it cannot say so.
    fn clear_subclusters(&self, old: Words, from: Bytes, to: Bytes, space: Space) -> Option<Words> {
        let shift = self.geometry.cluster_bits - 5;
        let (first, count) = (from >> shift, (to - from) >> shift);
        let touched = (u32::MAX >> (32 - count.clamp(1, 32))) << first;
        let whole = touched == u32::MAX;
        let own = Rules::is_own(old) && self.rules.host(old).is_some();
        if old.entry & COMPRESSED != 0 {
            return whole.then(|| Words { entry: 0, bitmap: bitmap(0, u32::MAX) });
        }
        // The two halves.
        #[allow(clippy::cast_possible_truncation)]
        let (allocated, zeroes) =
            (old.bitmap as u32 & !touched, (old.bitmap >> 32) as u32 | touched);
        let keeps = own && (space != Space::Free || self.info.data_file_raw);
        let entry = if allocated == 0 && !keeps { 0 } else { old.entry };
        debug_assert!(entry != 0 || allocated == 0, "{OFFSET_MASK:#x}");
        Some(Words { entry, bitmap: bitmap(allocated, zeroes) })
    }
}

/// Gives the space of clusters back whose old entries a power cut may still bring back: they read
/// as zeroes afterwards, also on a block device, of which a plain discard may leave bytes that
/// were never written.
///
/// Errors: `EOPNOTSUPP` where the device has no zeroes without a transfer.
async fn punch(storage: &Storage, ring: &Ring, host: HostOffset, len: Bytes) -> Result<(), Errno> {
    match storage.kind() {
        Kind::BlockDevice => storage.write_zeroes(ring, host.0, len.0, true, false).await,
        _ => storage.discard(ring, host.0, len.0).await,
    }
}
