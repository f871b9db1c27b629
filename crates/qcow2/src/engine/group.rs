//! Writes neighbouring clusters together: plan, get space, store, link.
//!
//! Promises: clusters of a group are neighbours on the disk and in the storage, and between them
//! lies nothing but data, so a group is one write, with what is copied before and behind it. Space
//! that was taken is linked, given back, or (when the request is dropped in the middle) kept out of
//! use until the image is closed.

use std::ops::Range;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::action::{Action, Copy, Words};
use super::below::Below;
use super::write::{Place, Written};
use crate::entry::COPIED;
use crate::refcounts::Run;
use crate::sync::lock;
use crate::units::{Bytes, GuestOffset, HostCluster, HostOffset};

/// How the clusters of a group are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    InPlace,
    Reuse,
    Fresh,
}

/// What one cluster needs.
struct Need {
    kind: Kind,
    /// Where the cluster begins; 0 for a fresh one.
    host: HostOffset,
    copy: Copy,
}

/// What is stored in one piece.
pub(super) struct Piece {
    /// First byte on the disk of the first cluster.
    pub(super) base: GuestOffset,
    /// Where that lies.
    pub(super) host: HostOffset,
    /// Bytes from `base` on that get their old content, before the data.
    pub(super) head: Range<Bytes>,
    /// Bytes from `base` on that get their old content, behind the data.
    pub(super) tail: Range<Bytes>,
}

impl Qcow2 {
    /// Writes the data of as many of `entries` as go together.
    ///
    /// * `entries`: those of the clusters from `place` on; claimed by the caller.
    /// * `goal`: host cluster where new ones would go best.
    /// * `buf`: the data of the chunk.
    pub(super) async fn write_group<B: Below>(
        &self,
        ring: &Ring,
        place: Place,
        entries: &[Words],
        goal: Option<HostCluster>,
        buf: &IoBuf,
        below: &B,
    ) -> Result<Written, Errno> {
        let bits = self.geometry.cluster_bits;
        let chunk = place.chunk;
        let base = ((chunk.start >> bits) + place.skipped as u64) << bits;
        let first = self.need(entries, place, 0);
        let mut count = 1;
        while count < entries.len() {
            let next = self.need(entries, place, count);
            let adjacent = next.kind == Kind::Fresh
                || next.host == first.host + Bytes::of_clusters(count as u64, bits);
            let gap = !next.copy.head.is_empty()
                || !self.need(entries, place, count - 1).copy.tail.is_empty();
            if next.kind != first.kind || !adjacent || gap {
                break;
            }
            count += 1;
        }
        let (run, reserved) = match first.kind {
            Kind::Fresh => self.space_for(ring, base, count as u64, goal).await?,
            // Its content is anything, so what is not data has to be written.
            _ => {
                let run = Run::new(first.host >> bits, count as u64);
                (run, Reserved { image: self, run: None })
            }
        };
        // At most `count`.
        let count = usize::try_from(run.count).unwrap_or(count).min(count);
        let host = run.start << bits;
        let last = self.need(entries, place, count - 1);
        let last_base = Bytes::of_clusters(count as u64 - 1, bits);
        let tail = last_base + last.copy.tail.start..last_base + last.copy.tail.end;
        let mut piece = Piece { base, host, head: first.copy.head, tail };
        if run.zeroed {
            self.leave_out_zeroes(&mut piece, below);
        }
        let start = chunk.start.max(base);
        let end = chunk.end.min(base + Bytes::of_clusters(count as u64, bits));
        // Inside the chunk, which the buffer holds.
        let inside = |at: GuestOffset| usize::try_from(at - chunk.start).unwrap_or(usize::MAX);
        let data = buf.slice(inside(start)..inside(end));
        let write = self.begin_data_write(self.enter());
        let stored = self.store(ring, &piece, start - base, &data, below).await;
        write.end();
        if let Err(errno) = stored {
            reserved.give_back();
            return Err(errno);
        }
        if first.kind != Kind::InPlace {
            let entry = |index: usize| Words {
                entry: (host + Bytes::of_clusters(index as u64, bits)).0 | COPIED,
                bitmap: self.need(entries, place, index).copy.bitmap,
            };
            let new: Vec<Words> = (0..count).map(entry).collect();
            if let Err(errno) = self.set_entries(ring, chunk.slice, place.index, &new, true).await {
                reserved.give_back();
                return Err(errno);
            }
            reserved.linked();
            if first.kind == Kind::Fresh {
                self.unlink_all(&entries[..count])?;
            }
        }
        Ok(Written { host, clusters: count })
    }

    /// What the cluster at `index` of `entries` needs.
    fn need(&self, entries: &[Words], place: Place, index: usize) -> Need {
        let bits = self.geometry.cluster_bits;
        let chunk = place.chunk;
        let start = ((chunk.start >> bits) + (place.skipped + index) as u64) << bits;
        let from = chunk.start.saturating_sub(start);
        let to = self.geometry.cluster_size().min(chunk.end - start);
        match self.rules.action(entries[index], from, to) {
            Action::InPlace { host } => {
                let copy = Copy { head: from..from, tail: to..to, bitmap: 0 };
                Need { kind: Kind::InPlace, host, copy }
            }
            Action::Reuse { host, copy } => Need { kind: Kind::Reuse, host, copy },
            Action::Fresh { copy } => Need { kind: Kind::Fresh, host: HostOffset(0), copy },
        }
    }

    /// Gets space for up to `count` clusters that begin at `base` on the disk.
    async fn space_for(
        &self,
        ring: &Ring,
        base: GuestOffset,
        count: u64,
        goal: Option<HostCluster>,
    ) -> Result<(Run, Reserved<'_>), Errno> {
        if self.info.external_data_file {
            // Data lies in the data file where it lies on the disk.
            let storage = self.data_storage();
            let host = HostOffset(base.0);
            let zeroed = host.0 >= storage.len() && grows_with_zeroes(storage);
            let start = host >> self.geometry.cluster_bits;
            return Ok((Run { start, count, zeroed }, Reserved { image: self, run: None }));
        }
        let run = self.allocate_or_reclaim(ring, count, goal).await?;
        let reserved = Reserved { image: self, run: Some(run) };
        self.reach(ring, run.end()).await;
        Ok((run, reserved))
    }

    /// What the entries referred to is not referred to any more. After the entries were changed.
    pub(super) fn unlink_all(&self, entries: &[Words]) -> Result<(), Errno> {
        let engine = self.engine()?;
        for words in entries {
            if let Some(old) = self.rules.reference(*words) {
                engine.unlinked.unlink(old.start, old.count);
            }
        }
        Ok(())
    }
}

/// Whether what lies past the end of a storage reads as zeroes once it has grown over it.
pub(crate) fn grows_with_zeroes(storage: &ringdisk_storage::Storage) -> bool {
    storage.kind() != ringdisk_storage::Kind::BlockDevice
}

/// Clusters that are allocated and not linked yet.
pub(super) struct Reserved<'a> {
    pub(super) image: &'a Qcow2,
    pub(super) run: Option<Run>,
}

impl Reserved<'_> {
    /// They are linked.
    pub(super) fn linked(mut self) {
        self.run = None;
    }

    /// They are not needed, and no I/O to them is under way.
    pub(super) fn give_back(mut self) {
        if let (Some(run), Ok(mut space)) = (self.run.take(), self.image.space()) {
            space.give_back(run.start, run.count, false);
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        // The request was dropped: its write may still land there.
        if let (Some(run), Ok(engine)) = (self.run, self.image.engine()) {
            lock(&engine.abandoned).push((run.start, run.count));
        }
    }
}
