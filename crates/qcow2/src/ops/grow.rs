//! Fills the part of the disk that a resize adds: zeroes over a longer backing file, the last
//! cluster of the old disk, preallocation.
//!
//! Promises: what is added reads as zeroes.

use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::create::Preallocation;
use crate::engine::Qcow2;
use crate::engine::below::Below;
use crate::entry::{COMPRESSED, COPIED, OFFSET_MASK, ZERO};
use crate::error::Error;
use crate::refcounts::Run;
use crate::run::ExtentKind;
use crate::sync::{Arc, Ordering};
use crate::table;
use crate::units::{Bytes, GuestCluster, GuestOffset, HostOffset};

use super::active::Active;
use super::transaction::Transaction;

/// Zeroes are written in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;
/// All subclusters of an extended entry are allocated, or zero.
const ALL_ALLOCATED: u64 = 0xffff_ffff;
const ALL_ZERO: u64 = ALL_ALLOCATED << 32;

/// What a resize adds.
pub(super) struct Growth<'a> {
    /// Old and new end of the disk.
    pub(super) old: GuestOffset,
    pub(super) size: GuestOffset,
    pub(super) preallocation: Preallocation,
    pub(super) data_file: Option<Arc<Storage>>,
    /// Asked between two steps: whether to give up.
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

/// New contents of the last cluster of the old disk.
pub(super) struct Tail {
    /// A whole cluster: the disk up to the old end, then zeroes.
    content: Vec<u8>,
}

impl Qcow2 {
    /// Looks up the last cluster of the disk, which growing reads when it is not a whole one.
    ///
    /// Errors: `Corrupt` when it cannot be right, `Io`.
    pub(super) async fn meet_tail(&self, ring: &Ring) -> Result<(), Error> {
        let size = self.geometry.end();
        if self.geometry.in_cluster(size) == Bytes::ZERO {
            return Ok(());
        }
        let looked_up = self.map(ring, size - Bytes(1), Bytes(1)).await;
        match (self.fault(), looked_up) {
            (Some(reason), _) => Err(Error::corrupt(self.file.name(), reason)),
            (None, Err(errno)) => Err(self.tail_io(errno)),
            (None, Ok(_)) => Ok(()),
        }
    }

    /// What the last cluster must hold when the disk grows; `None`: what is behind the old end
    /// reads as zeroes anyway.
    ///
    /// * `reserve`: it must also have a place of its own, so that a write behind the old end need
    ///   not look for one.
    pub(super) async fn tail<B: Below>(
        &self,
        ring: &Ring,
        below: &B,
        reserve: bool,
    ) -> Result<Option<Tail>, Error> {
        let size = self.geometry.end();
        let start = size - self.geometry.in_cluster(size);
        if start == size {
            return Ok(None);
        }
        let has_place = !reserve || self.own_place(ring, start).await?.is_some();
        if has_place && self.tail_is_zero(ring, start, below).await? {
            return Ok(None);
        }
        let buf = IoBuf::new(self.cluster_bytes(), 4096);
        buf.fill(0);
        let mut at = start;
        while at < size {
            let extent =
                self.map(ring, at, size - at).await.map_err(|errno| self.tail_io(errno))?;
            // Inside one cluster.
            let from = usize::try_from(at - start).unwrap_or(0);
            let len = usize::try_from(extent.len).unwrap_or(0);
            let piece = buf.slice(from..from + len);
            let result = match extent.kind {
                ExtentKind::Data { offset } => {
                    self.data_storage().read(ring, offset.0, &piece).await.map(drop)
                }
                ExtentKind::Compressed(cluster) => {
                    self.read_compressed(ring, cluster, at, &piece).await
                }
                ExtentKind::Unallocated => below.read(ring, at, &piece).await,
                ExtentKind::Zero { .. } => Ok(()),
            };
            result.map_err(|errno| self.tail_io(errno))?;
            at += extent.len;
        }
        Ok(Some(Tail { content: buf.to_vec() }))
    }

    /// Where the cluster of `start` is, if it is not shared and may be written in place.
    async fn own_place(
        &self,
        ring: &Ring,
        start: GuestOffset,
    ) -> Result<Option<HostOffset>, Error> {
        let (entry, _) = self.entry_on_disk(ring, start).await?;
        let host = HostOffset(entry & OFFSET_MASK);
        let is_own = entry & COPIED != 0 && entry & COMPRESSED == 0;
        let is_place = host != HostOffset(0) || self.info.external_data_file;
        Ok((is_own && is_place).then_some(host))
    }

    /// Takes space for the rest of the last cluster, which has a place but may be a hole of the
    /// file. What lies there belongs to no cluster, and reads as zeroes afterwards. (In an external
    /// data file the resize of that file does this.)
    ///
    /// * `size`: new end of the disk.
    pub(super) async fn reserve_tail(
        &self,
        ring: &Ring,
        size: GuestOffset,
        mode: Preallocation,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let old = self.geometry.end();
        let in_use = self.geometry.in_cluster(old);
        let full = match mode {
            Preallocation::Off | Preallocation::Metadata => return Ok(()),
            Preallocation::Falloc => false,
            Preallocation::Full => true,
        };
        if in_use == Bytes::ZERO || self.data_file.is_some() {
            return Ok(());
        }
        let Some(host) = self.own_place(ring, old - in_use).await? else { return Ok(()) };
        let (offset, len) =
            (host + in_use, (self.geometry.cluster_size() - in_use).min(size - old));
        let done = if full {
            write_zero_bytes(ring, &self.file, offset, len, cancelled).await
        } else {
            self.file.write_zeroes(ring, offset.0, len.0, false, true).await
        };
        done.map_err(|errno| Error::io(self.file.name(), "preparing space in it", errno))
    }

    fn tail_io(&self, errno: Errno) -> Error {
        Error::io(self.file.name(), "reading the last cluster of the disk", errno)
    }

    /// Whether the rest of the last cluster, past the end of the disk, reads as zeroes.
    async fn tail_is_zero<B: Below>(
        &self,
        ring: &Ring,
        start: GuestOffset,
        below: &B,
    ) -> Result<bool, Error> {
        let size = self.geometry.end();
        let (entry, bitmap) = self.entry_on_disk(ring, start).await?;
        let cluster_bytes = self.cluster_bytes();
        // Below a cluster.
        let in_use = usize::try_from(size - start).unwrap_or(0);
        let buf = IoBuf::new(cluster_bytes, 4096);
        buf.fill(0);
        if entry & COMPRESSED != 0 {
            let extent =
                self.map(ring, start, Bytes(1)).await.map_err(|errno| self.tail_io(errno))?;
            if let ExtentKind::Compressed(cluster) = extent.kind {
                self.read_compressed(ring, cluster, start, &buf)
                    .await
                    .map_err(|errno| self.tail_io(errno))?;
            }
            return Ok(buf.to_vec()[in_use..].iter().all(|byte| *byte == 0));
        }
        let host = HostOffset(entry & OFFSET_MASK);
        let external = self.info.external_data_file;
        let present = host != HostOffset(0) || external && entry & COPIED != 0;
        let zero_flag = !self.geometry.extended && self.info.version >= 3 && entry & ZERO != 0;
        if zero_flag {
            return Ok(true);
        }
        if present {
            let storage = self.data_storage();
            storage.read(ring, host.0, &buf).await.map_err(|errno| self.tail_io(errno))?;
        }
        let content = buf.to_vec();
        let (step, allocated, zeroes) = if self.geometry.extended {
            (cluster_bytes / 32, bitmap & ALL_ALLOCATED, bitmap >> 32)
        } else {
            (cluster_bytes, if present { ALL_ALLOCATED } else { 0 }, 0)
        };
        for from in (0..cluster_bytes).step_by(step) {
            let (first, end) = (from.max(in_use), from + step);
            let bit = from / step;
            if first >= end || zeroes >> bit & 1 != 0 {
                continue;
            }
            let zero = if allocated >> bit & 1 != 0 {
                content[first..end].iter().all(|byte| *byte == 0)
            } else {
                !below.has_data(start + Bytes::of(first), Bytes::of(end - first))
            };
            if !zero {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The words of the L2 entry of `offset` as they are on disk; of a closed image, so they are
    /// right.
    async fn entry_on_disk(&self, ring: &Ring, offset: GuestOffset) -> Result<(u64, u64), Error> {
        let corrupt = |_| Error::corrupt(self.file.name(), "an L1 entry cannot be right");
        let l1 = self.l1.get(self.geometry.l1_index(offset));
        let entry = l1.map_or(0, |entry| entry.load(Ordering::Acquire));
        let Some(l2) = self.rules.l2_table(entry, Bytes(self.file.len())).map_err(corrupt)? else {
            return Ok((0, 0));
        };
        let index = self.geometry.entry_in_table(offset >> self.geometry.cluster_bits);
        let entry_bytes = self.geometry.entry_words() * 8;
        let at = l2 + Bytes::of(index * entry_bytes);
        let bytes = table::read(ring, &self.file, at, entry_bytes, "an L2 table").await?;
        let words = table::words_of(&bytes);
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        Ok((word(0), word(1)))
    }
}

impl Active {
    /// Takes away everything past the last cluster of a disk that ends at `size`.
    pub(super) async fn cut(
        &mut self,
        tx: &mut Transaction<'_>,
        size: GuestOffset,
    ) -> Result<(), Error> {
        let end = GuestCluster(size.from_start().clusters(tx.geometry.cluster_bits));
        // At most 2^22 tables.
        let table = usize::try_from(end.0 >> tx.geometry.table_bits).unwrap_or(usize::MAX);
        let entries = tx.geometry.entry_in_table(end);
        let kept_words = entries * tx.geometry.entry_words();
        for index in table + usize::from(entries > 0)..self.l1.len() {
            self.drop_table(tx, index).await?;
        }
        if entries == 0 {
            return Ok(());
        }
        let Some(mut words) = self.table(tx, table).await? else { return Ok(()) };
        if words[kept_words..].iter().any(|word| *word != 0) {
            self.unref_entries(tx, &words[kept_words..]).await?;
            words[kept_words..].fill(0);
            self.replace(tx, table, &words).await?;
        }
        Ok(())
    }
}

impl Growth<'_> {
    /// Makes the entries of the part that is added.
    pub(super) async fn run<B: Below>(
        &self,
        tx: &mut Transaction<'_>,
        active: &mut Active,
        tail: Option<Tail>,
        below: &B,
    ) -> Result<(), Error> {
        if let Some(tail) = tail {
            self.put_tail(tx, active, &tail).await?;
        }
        let cluster_size = tx.geometry.cluster_size();
        let first = GuestCluster(self.old.from_start().div_ceil(cluster_size));
        let end = GuestCluster(self.size.from_start().div_ceil(cluster_size));
        let per_table = 1u64 << tx.geometry.table_bits;
        let mut cluster = first;
        while cluster < end {
            let stop = GuestCluster((cluster.0 / per_table + 1) * per_table).min(end);
            let rest = (end - cluster) * cluster_size;
            if self.preallocation == Preallocation::Off
                && !below.has_data(cluster << tx.geometry.cluster_bits, rest)
            {
                break;
            }
            self.fill_table(tx, active, cluster, stop, below).await?;
            if (self.cancelled)() {
                return Err(tx.io("growing it", Errno::CANCELED));
            }
            cluster = stop;
        }
        // What is counted must not lie past the end of the file. Without preallocation that is
        // data of version 2 only, which has no other way to say "zeroes" over a longer backing
        // file.
        let len = tx.end_of_clusters().from_start();
        let file_len = Bytes(tx.file.len());
        let has_data = self.preallocation != Preallocation::Off || tx.version < 3;
        if has_data && file_len < len {
            // Only that: the last cluster may be one of the old disk, of which the file holds the
            // beginning.
            let from = file_len.max(len - cluster_size);
            let grown = tx.file.write_zeroes(tx.ring, from.0, (len - from).0, true, true);
            grown.await.map_err(|errno| tx.io("growing it", errno))?;
        }
        Ok(())
    }

    /// The clusters `first..end` of one L2 table.
    async fn fill_table<B: Below>(
        &self,
        tx: &mut Transaction<'_>,
        active: &mut Active,
        first: GuestCluster,
        end: GuestCluster,
        below: &B,
    ) -> Result<(), Error> {
        let geometry = tx.geometry;
        let words_per_entry = geometry.entry_words();
        let index = geometry.l1_index(first << geometry.cluster_bits);
        let table = active.table(tx, index).await?;
        let mut words = table.unwrap_or_else(|| vec![0; words_per_entry << geometry.table_bits]);
        let mut changed = false;
        let mut cluster = first;
        while cluster < end {
            let at = cluster << geometry.cluster_bits;
            let off = self.preallocation == Preallocation::Off;
            let (count, entry) = if off && !below.has_data(at, geometry.cluster_size()) {
                cluster += 1;
                continue;
            } else if off && tx.version >= 3 {
                (1, (ZERO, ALL_ZERO))
            } else if self.data_file.is_some() {
                (1, (at.0 | COPIED, ALL_ALLOCATED))
            } else {
                let wanted = if off { 1 } else { end - cluster };
                let run = tx.allocate(wanted, false).await?;
                let zeroed = self.prepare(tx, run).await?;
                let flag = if zeroed || geometry.extended { 0 } else { ZERO };
                let host = run.start << geometry.cluster_bits;
                let bitmap = if zeroed { ALL_ALLOCATED } else { ALL_ZERO };
                (run.count, (host.0 | COPIED | flag, bitmap))
            };
            for step in 0..count {
                let word = geometry.entry_in_table(cluster + step) * words_per_entry;
                if geometry.extended {
                    // The zero flag of a standard entry has no meaning here.
                    words[word] = (entry.0 & !ZERO) + (step << geometry.cluster_bits);
                    words[word + 1] = entry.1;
                } else {
                    words[word] = entry.0 + (step << geometry.cluster_bits);
                }
            }
            changed = true;
            cluster += count;
        }
        if changed {
            active.replace(tx, index, &words).await?;
        }
        Ok(())
    }

    /// Prepares new clusters for data. Returns whether they read as zeroes; else their entries must
    /// say so.
    async fn prepare(&self, tx: &Transaction<'_>, run: Run) -> Result<bool, Error> {
        let bits = tx.geometry.cluster_bits;
        let (offset, len) = (run.start << bits, Bytes::of_clusters(run.count, bits));
        let result = match self.preallocation {
            Preallocation::Metadata | Preallocation::Off if run.zeroed => return Ok(true),
            Preallocation::Metadata if tx.version >= 3 => return Ok(false),
            Preallocation::Metadata | Preallocation::Off => {
                tx.file.write_zeroes(tx.ring, offset.0, len.0, true, true).await
            }
            Preallocation::Falloc => {
                tx.file.write_zeroes(tx.ring, offset.0, len.0, false, true).await
            }
            Preallocation::Full => {
                write_zero_bytes(tx.ring, &tx.file, offset, len, self.cancelled).await
            }
        };
        result.map_err(|errno| tx.io("preparing space in it", errno))?;
        Ok(true)
    }

    async fn put_tail(
        &self,
        tx: &mut Transaction<'_>,
        active: &mut Active,
        tail: &Tail,
    ) -> Result<(), Error> {
        let geometry = tx.geometry;
        let start = self.old - geometry.in_cluster(self.old);
        let index = geometry.l1_index(start);
        let words_per_entry = geometry.entry_words();
        let table = active.table(tx, index).await?;
        let mut words = table.unwrap_or_else(|| vec![0; words_per_entry << geometry.table_bits]);
        let word = geometry.entry_in_table(start >> geometry.cluster_bits) * words_per_entry;
        let old = words[word];
        let host = if let Some(data) = &self.data_file {
            // In place: no request sees what lies past the end, and the rest is what it was.
            let present = old & (OFFSET_MASK | COPIED) != 0;
            let host = HostOffset(if present { old & OFFSET_MASK } else { start.0 });
            // Not past the new end, which may be in the same cluster: the file has the size of the
            // disk.
            let len = usize::try_from(self.size - start).unwrap_or(usize::MAX);
            let content = &tail.content[..len.min(tail.content.len())];
            let buf = IoBuf::new(content.len(), 4096);
            buf.copy_from_slice(0, content);
            let written = data.write_all(tx.ring, host.0, &buf).await;
            written.map_err(|errno| tx.io("writing its data file", errno))?;
            data.flush(tx.ring).await.map_err(|errno| tx.io("flushing its data file", errno))?;
            host
        } else {
            active.unref_entries(tx, &words[word..word + words_per_entry]).await?;
            tx.write_new(&tail.content, "the last cluster").await?.start << geometry.cluster_bits
        };
        words[word] = host.0 | COPIED;
        if geometry.extended {
            words[word + 1] = ALL_ALLOCATED;
        }
        active.replace(tx, index, &words).await
    }
}

/// Writes zeroes as data, so that the space is taken.
///
/// Errors: `ECANCELED` when `cancelled` says so; those of the storage.
pub(super) async fn write_zero_bytes(
    ring: &Ring,
    file: &Storage,
    offset: HostOffset,
    len: Bytes,
    cancelled: &dyn Fn() -> bool,
) -> Result<(), Errno> {
    let piece = usize::try_from(len).unwrap_or(PIECE_BYTES).clamp(1, PIECE_BYTES);
    let zeroes = IoBuf::new(piece, 4096);
    zeroes.fill(0);
    let mut done = Bytes::ZERO;
    while done < len {
        if cancelled() {
            return Err(Errno::CANCELED);
        }
        let now = usize::try_from(len - done).unwrap_or(piece).min(piece);
        file.write_all(ring, (offset + done).0, &zeroes.slice(0..now)).await?;
        done += Bytes::of(now);
    }
    Ok(())
}
