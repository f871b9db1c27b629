//! The end of a transaction: everything it wrote becomes durable, then the header names it.
//!
//! Promises: one write of the first sector of the header makes the change true. Before it every
//! error leaves the old state on stable storage; after it errors cost space only.

use ringdisk_storage::Kind;

use super::Transaction;
use crate::engine::Discard;
use crate::error::Error;
use crate::header::{BITMAPS, RAW_EXTERNAL};
use crate::refcounts::{DirtyTable, Run};
use crate::units::{HostCluster, HostOffset};

impl Transaction<'_> {
    /// Makes the change true. The caller has written everything that the new header refers to,
    /// and has set its fields.
    ///
    /// Errors: `Io`; `Corrupt` when what it has freed is still named. The old state is on stable
    /// storage then. Only when the header can neither be written nor be taken back it is not known
    /// whether the old or the new state is there; both are whole.
    pub(in crate::ops) async fn commit(self) -> Result<(), Error> {
        self.commit_or_tell().await.map_err(|(error, _)| error)
    }

    /// As [`commit`](Transaction::commit). An error comes with whether the old state is known to be
    /// there.
    pub(in crate::ops) async fn commit_or_tell(mut self) -> Result<(), (Error, bool)> {
        self.refuse_lost().await.map_err(|error| (error, true))?;
        self.prepare().await.map_err(|error| (error, true))?;
        let known = self.header.autoclear() & (BITMAPS | RAW_EXTERNAL);
        self.header.set_autoclear(known);
        if let Err(errno) = self.header.write_all(self.ring, &self.file).await {
            // A write that failed, or one that was not flushed, may have got there all the same.
            let is_back = self.old_header.restore(self.ring, &self.file).await.is_ok();
            let doing = match is_back {
                true => "writing the header",
                false => {
                    "writing the header (it is not known whether the old or the new one is there)"
                }
            };
            return Err((self.io(doing, errno), is_back));
        }
        self.punch().await;
        if self.shorten {
            self.cut_file().await;
        }
        Ok(())
    }

    /// Brings all that the new header will refer to to stable storage.
    async fn prepare(&mut self) -> Result<(), Error> {
        if !self.settle().await? {
            return Ok(());
        }
        let DirtyTable::Whole { offset, bytes, clusters, .. } = self.write_counts().await? else {
            // Blocks have moved: without their table the new header would name blocks that are
            // given up.
            return Err(self.corrupt("the refcount table did not move with its blocks"));
        };
        let run = Run::new(offset >> self.geometry.cluster_bits, clusters);
        self.write_run(run, &bytes, "the refcount table").await?;
        // At most 8 MiB.
        self.header.set_refcount_table(offset, u32::try_from(clusters).unwrap_or(u32::MAX));
        self.flush().await
    }

    /// From now on refcount blocks are overwritten: for a change that only takes references away,
    /// none of which is needed by anything on stable storage any more. It ends with
    /// [`finish_in_place`](Transaction::finish_in_place).
    pub(in crate::ops) fn stay_in_place(&mut self) {
        self.in_place = true;
    }

    /// No refcount block is written before the end: it is not known yet whether the change will be
    /// made. Memory: the blocks that change (32 MiB for 1 TiB in clusters of 64 KiB with counts of
    /// 16 bits).
    pub(in crate::ops) fn keep_in_memory(&mut self) {
        self.in_memory = true;
    }

    /// Makes the reference counts durable and gives back the space of what they freed.
    pub(in crate::ops) async fn finish_in_place(mut self) -> Result<(), Error> {
        // First, so that there is room when the counts lie in holes of the file. Nothing refers to
        // the clusters any more.
        self.punch().await;
        self.write_counts().await?;
        self.flush().await?;
        if self.file.kind() != Kind::BlockDevice {
            self.cut_file().await;
        }
        Ok(())
    }

    /// A barrier.
    pub(in crate::ops) async fn flush(&self) -> Result<(), Error> {
        self.file.flush(self.ring).await.map_err(|errno| self.io("flushing it", errno))
    }

    /// Afterwards the file ends past the last cluster in use.
    pub(in crate::ops) fn shorten_file(&mut self) {
        self.shorten = self.file.kind() != Kind::BlockDevice;
    }

    /// Where the file has to end for all clusters that were ever counted.
    pub(in crate::ops) fn end_of_clusters(&self) -> HostOffset {
        self.counts.end() << self.geometry.cluster_bits
    }

    /// Cuts the file past the last cluster in use. A failure costs space only.
    async fn cut_file(&mut self) {
        let mut end = self.counts.end();
        while end > HostCluster(1) && self.is_unused(end - 1).await.is_ok_and(|is_unused| is_unused)
        {
            end = end - 1;
        }
        let len = (end << self.geometry.cluster_bits).0;
        if len < self.file.len() {
            // Not so on a block device.
            let _ = self.file.set_len(self.ring, len).await;
        }
    }

    /// Gives the space of freed clusters back. A failure costs space only.
    async fn punch(&mut self) {
        if self.discard == Discard::Ignore {
            return;
        }
        let mut runs = std::mem::take(&mut self.freed);
        runs.sort_unstable_by_key(|run| run.start);
        runs.dedup_by(|next, run| {
            let adjacent = run.end() == next.start;
            run.count += if adjacent { next.count } else { 0 };
            adjacent
        });
        let bits = self.geometry.cluster_bits;
        for run in runs {
            let (offset, len) = (run.start << bits, run.count << bits);
            let punched = self.file.discard(self.ring, offset.0, len).await;
            if punched.is_err() {
                return;
            }
        }
    }
}
