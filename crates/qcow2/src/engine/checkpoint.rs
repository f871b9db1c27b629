//! Makes changes durable, batched, in an order that survives a crash at any point.
//!
//! Promises: a flush that succeeds made everything durable that was answered before it. One
//! checkpoint serves all flushes that wait for it, and needs two barriers for any number of changes
//! (three when the refcount table has to learn of a new block). It visits what is dirty and nothing
//! else. Requests go on meanwhile.
//!
//! The order: copies of all dirty L2 slices and L1 entries are taken; reference counts are written;
//! *barrier*; the copies are written; *barrier*. What a copy links was written before the copy was
//! taken, so the first barrier covers it. Counts may be written at any time: in memory they are
//! never lower than what the tables on disk or in memory refer to. So a crash leaves leaked
//! clusters at most.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use futures_util::stream;
use rustix::io::Errno;

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use super::{Discard, Qcow2};
use crate::concurrent::region::Region;
use crate::concurrent::registry::{Claim, Registry};
use crate::concurrent::slices::DirtySlice;
use crate::concurrent::unlinked::{Unlinked, UnlinkedClusters};
use crate::entry::REFCOUNT_TABLE;
use crate::header::HeaderImage;
use crate::limits::DIRTY_SLICES_MAX;
use crate::refcounts::{DirtyRefcounts, DirtyTable, Run};
use crate::sync::{AtomicBool, AtomicU64, Ordering, lock};
use crate::table::bytes_of;
use crate::units::{Bytes, HostCluster, HostOffset};

/// Longest write of neighbouring slices.
const WRITE_BYTES_MAX: usize = 256 << 10;
/// Clusters that are counted down under one lock: some 10 µs.
const REAP_AT_ONCE: u64 = 512;
/// Metadata writes in flight.
const WRITES_AT_ONCE: usize = 16;

/// Whether changes should be written although no flush has asked for it yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteBack {
    /// No.
    Nothing,
    /// Within a second or so, so that a crash of the process loses little.
    Soon,
    /// At once: much is dirty.
    Now,
}

/// The flushes that wait, and the checkpoint that runs.
pub(super) struct Checkpoints {
    /// Held by the one that runs.
    gate: Registry,
    /// Flushes so far.
    wanted: AtomicU64,
    /// Flushes that are served.
    served: AtomicU64,
    /// A write-back was announced and has not begun.
    announced: AtomicBool,
    /// The same, for one that is to begin at once.
    urgent: AtomicBool,
}

impl Checkpoints {
    pub(super) fn new() -> Checkpoints {
        Checkpoints {
            gate: Registry::new(),
            wanted: AtomicU64::new(0),
            served: AtomicU64::new(0),
            announced: AtomicBool::new(false),
            urgent: AtomicBool::new(false),
        }
    }
}

/// What one checkpoint writes. Dropped before the end (an error, a request that went away), all of
/// it is dirty again; what it had begun to write lands before the next one writes there
/// ([`metadata`](super::metadata)).
struct Work<'a> {
    image: &'a Qcow2,
    unlinked: Unlinked,
    slices: Vec<DirtySlice>,
    l1: Vec<(usize, u64)>,
    counts: Option<DirtyRefcounts>,
    done: bool,
}

impl Qcow2 {
    /// Makes everything durable that was answered before.
    ///
    /// Errors: those of the storage. After `EIO` every later flush is `EIO` too; after `ENOSPC` a
    /// later one may succeed.
    pub async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        let Ok(engine) = self.engine() else { return Ok(()) };
        let ticket = engine.checkpoints.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let _claim = engine.checkpoints.gate.claim(0, 1).await;
        self.check_flushable()?;
        if engine.checkpoints.served.load(Ordering::SeqCst) >= ticket {
            return Ok(());
        }
        let serves = engine.checkpoints.wanted.load(Ordering::SeqCst);
        self.run_checkpoint(ring, false).await?;
        engine.checkpoints.served.store(serves, Ordering::SeqCst);
        Ok(())
    }

    /// Makes every mapping durable that a request could have seen before this call: a process that
    /// opens the image after this one was killed finds it. Costs two loads when nothing changed
    /// since the last checkpoint; otherwise as [`flush`](Qcow2::flush), which all that wait share.
    ///
    /// Errors: as [`flush`](Qcow2::flush).
    pub async fn flush_mapping(&self, ring: &Ring) -> Result<(), Errno> {
        let Ok(engine) = self.engine() else { return Ok(()) };
        if engine.settled.load(Ordering::SeqCst) == engine.changed.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.flush(ring).await
    }

    /// Writes what is dirty, and makes freed clusters usable as far as possible.
    pub(crate) async fn checkpoint(&self, ring: &Ring) -> Result<(), Errno> {
        let _gate = self.checkpoint_gate().await;
        self.checkpoint_in_gate(ring).await
    }

    /// As [`checkpoint`](Qcow2::checkpoint), with all reference counts.
    pub(crate) async fn checkpoint_all(&self, ring: &Ring) -> Result<(), Errno> {
        let _claim = self.engine()?.checkpoints.gate.claim(0, 1).await;
        self.check_flushable()?;
        self.run_checkpoint(ring, true).await
    }

    /// Writes everything, frees what is to be freed, and writes the reference counts that follow
    /// from that.
    pub(crate) async fn settle(&self, ring: &Ring) -> Result<(), Errno> {
        let engine = self.engine()?;
        self.checkpoint_all(ring).await?;
        // No request uses the image now, so what requests left behind is free, unless a write of a
        // request that was dropped may still land there: that is leaked.
        let abandoned = std::mem::take(&mut *lock(&engine.abandoned));
        let is_safe = !engine.write_abandoned.load(Ordering::Acquire);
        let abandoned = if is_safe { abandoned } else { Vec::new() };
        let mut freed = Vec::new();
        for (start, count) in abandoned {
            self.change_refcount(ring, start, count, false, &mut freed).await?;
        }
        self.release(ring, freed).await;
        // One more round for what the first one freed, and one for its counts.
        for _ in 0..3 {
            if !engine.unlinked.is_busy() && !self.space()?.is_dirty() {
                break;
            }
            self.checkpoint_all(ring).await?;
        }
        Ok(())
    }

    /// Whether, and how soon, [`write_back`](Qcow2::write_back) should be called. Says so once for
    /// each call that is needed. For every request that changed something; any thread.
    pub fn wants_write_back(&self) -> WriteBack {
        let Ok(engine) = self.engine() else { return WriteBack::Nothing };
        let points = &engine.checkpoints;
        if points.announced.load(Ordering::Relaxed) && points.urgent.load(Ordering::Relaxed) {
            return WriteBack::Nothing;
        }
        let dirty = self.slices.dirty_hint();
        if dirty >= DIRTY_SLICES_MAX && !points.urgent.swap(true, Ordering::Relaxed) {
            return WriteBack::Now;
        }
        let frees = engine.unlinked.is_busy() && !engine.write_abandoned.load(Ordering::Relaxed);
        let waits = dirty > 0 || frees;
        let helps = || !engine.closed.load(Ordering::Relaxed) && self.check_sound().is_ok();
        if waits && helps() && !points.announced.swap(true, Ordering::Relaxed) {
            return WriteBack::Soon;
        }
        WriteBack::Nothing
    }

    /// Writes what is dirty. A failure shows at the next flush.
    pub async fn write_back(&self, ring: &Ring) {
        let Ok(engine) = self.engine() else { return };
        engine.checkpoints.announced.store(false, Ordering::Relaxed);
        engine.checkpoints.urgent.store(false, Ordering::Relaxed);
        if engine.closed.load(Ordering::Relaxed) {
            return;
        }
        // It is remembered, and every flush says so.
        let _ = self.checkpoint(ring).await;
    }

    /// Checkpoints, and requests that free clusters, take turns.
    pub(super) async fn checkpoint_gate(&self) -> Option<Claim<'_>> {
        Some(self.engine().ok()?.checkpoints.gate.claim(0, 1).await)
    }

    /// As [`checkpoint`](Qcow2::checkpoint), called by the holder of the gate.
    pub(super) async fn checkpoint_in_gate(&self, ring: &Ring) -> Result<(), Errno> {
        self.check_flushable()?;
        self.run_checkpoint(ring, false).await
    }

    fn check_flushable(&self) -> Result<(), Errno> {
        self.check_sound().map_err(|_| Errno::IO)
    }

    /// The caller holds the gate.
    async fn run_checkpoint(&self, ring: &Ring, all_counts: bool) -> Result<(), Errno> {
        let result = self.run_steps(ring, all_counts).await;
        if let Err(errno) = result {
            self.note_flush_failure(errno);
        }
        result
    }

    async fn run_steps(&self, ring: &Ring, all_counts: bool) -> Result<(), Errno> {
        let engine = self.engine()?;
        let lazy = engine.options.lazy_refcounts && !all_counts;
        // Before the copies are taken: each of these changes is in them, or in an earlier
        // checkpoint.
        let changed = engine.changed.load(Ordering::SeqCst);
        let mut work = self.take_work();
        let links = work.slices.iter().any(|slice| slice.links) || !work.l1.is_empty();
        if links && !lazy || all_counts {
            work.counts = self.take_counts(ring).await?;
        }
        if let Some(counts) = &work.counts {
            self.write_counts(ring, counts).await?;
        }
        let external = self.info.external_data_file;
        if external {
            self.barrier(ring, self.data_storage()).await?;
        }
        if links {
            self.barrier(ring, &self.file).await?;
        }
        let changes = !work.slices.is_empty() || !work.l1.is_empty();
        self.write_tables(ring, &work).await?;
        if changes || work.counts.is_some() || !external {
            self.barrier(ring, &self.file).await?;
        }
        work.finish();
        // Checkpoints take turns, so this only grows.
        engine.settled.store(changed, Ordering::SeqCst);
        self.reap(ring).await;
        Ok(())
    }

    /// Copies the reference counts that are dirty. All of them fit into the refcount table: a block
    /// that is made while the table grows is seen under the same lock.
    async fn take_counts(&self, ring: &Ring) -> Result<Option<DirtyRefcounts>, Errno> {
        loop {
            self.grow_refcount_table(ring).await?;
            let mut space = self.space()?;
            if space.table_wants().is_none() {
                return Ok(space.is_dirty().then(|| space.take_dirty()));
            }
        }
    }

    /// Copies everything that is dirty. What was unlinked is taken first, so the copies of the
    /// tables hold those changes.
    fn take_work(&self) -> Work<'_> {
        let mut work = Work {
            image: self,
            unlinked: Vec::new(),
            slices: Vec::new(),
            l1: Vec::new(),
            counts: None,
            done: false,
        };
        if let Ok(engine) = self.engine() {
            work.unlinked = engine.unlinked.take_fresh();
            work.slices = self.slices.take_dirty(usize::MAX);
            let mut l1_dirty = lock(&engine.l1_dirty);
            let dirty: BTreeSet<usize> = std::mem::take(&mut l1_dirty);
            let value = |index: usize| Some((index, self.l1.get(index)?.load(Ordering::Acquire)));
            work.l1 = dirty.into_iter().filter_map(value).collect();
        }
        work
    }

    /// A flush of the storage. One that fails is remembered whatever it says: what it was to make
    /// durable may be lost.
    async fn barrier(&self, ring: &Ring, storage: &Storage) -> Result<(), Errno> {
        let result = storage.flush(ring).await;
        if let Err(errno) = result {
            self.note_lost(errno);
        }
        result
    }

    /// Writes refcount blocks, and the table where it changes.
    async fn write_counts(&self, ring: &Ring, counts: &DirtyRefcounts) -> Result<(), Errno> {
        let writes = counts.blocks.iter().map(|block| (block.offset, &block.bytes[..]));
        self.write_each(ring, writes.collect()).await?;
        match &counts.table {
            DirtyTable::None => {}
            DirtyTable::Entries(entries) => {
                // A block that the table names has to be there.
                self.barrier(ring, &self.file).await?;
                let start = lock(&self.engine()?.header).refcount_table().0;
                for (index, value) in entries {
                    let at = start + Bytes(u64::from(*index) * 8);
                    self.write_metadata(ring, at, &value.0.to_be_bytes()).await?;
                }
            }
            DirtyTable::Whole { offset, bytes, clusters, old: _ } => {
                self.write_each(ring, vec![(*offset, &bytes[..])]).await?;
                self.barrier(ring, &self.file).await?;
                let clusters_u32 = u32::try_from(*clusters).map_err(|_| Errno::FBIG)?;
                self.change_header(ring, |header| {
                    header.set_refcount_table(*offset, clusters_u32);
                })
                .await?;
                let region = Region { start: *offset, end: *offset + Bytes::of(bytes.len()) };
                self.rules.metadata[REFCOUNT_TABLE].set(region);
            }
        }
        Ok(())
    }

    /// Writes the copies of slices and L1 entries.
    async fn write_tables(&self, ring: &Ring, work: &Work<'_>) -> Result<(), Errno> {
        let mut pieces: Vec<(HostOffset, Vec<u8>)> =
            Vec::with_capacity(work.slices.len() + work.l1.len());
        for dirty in &work.slices {
            let start = self.geometry.slice_start(dirty.slice);
            // A dirty slice has a table: it was loaded from it.
            let table = self.table_offset(self.geometry.l1_index(start))?.ok_or(Errno::IO)?;
            let at = table + self.geometry.slice_in_table(dirty.slice);
            pieces.push((at, bytes_of(&dirty.words)));
        }
        let l1 = lock(&self.engine()?.header).l1_table().0;
        for (index, value) in &work.l1 {
            pieces.push((l1 + Bytes(*index as u64 * 8), value.to_be_bytes().to_vec()));
        }
        pieces.sort_unstable_by_key(|(offset, _)| *offset);
        let mut merged: Vec<(HostOffset, Vec<u8>)> = Vec::with_capacity(pieces.len());
        for (offset, bytes) in pieces {
            match merged.last_mut() {
                Some((start, run))
                    if *start + Bytes::of(run.len()) == offset
                        && run.len() + bytes.len() <= WRITE_BYTES_MAX =>
                {
                    run.extend_from_slice(&bytes);
                }
                _ => merged.push((offset, bytes)),
            }
        }
        self.write_each(ring, merged.iter().map(|(at, bytes)| (*at, &bytes[..])).collect()).await
    }

    /// Writes pieces of metadata, several at once; waits for all of them also when one fails.
    async fn write_each(&self, ring: &Ring, pieces: Vec<(HostOffset, &[u8])>) -> Result<(), Errno> {
        let writes = pieces.into_iter().map(|(at, bytes)| self.write_metadata(ring, at, bytes));
        let results = stream::iter(writes).buffer_unordered(WRITES_AT_ONCE);
        results.fold(Ok(()), |all, one| async move { all.and(one) }).await
    }

    /// Gets a place for a larger refcount table, when one is needed.
    async fn grow_refcount_table(&self, ring: &Ring) -> Result<(), Errno> {
        let engine = self.engine()?;
        loop {
            let Some(clusters) = self.space()?.table_wants() else { return Ok(()) };
            let run = self.allocate(ring, clusters, None, true).await?;
            let mut space = self.space()?;
            // The place may itself have needed more blocks than the table was to hold.
            if space.table_wants() == Some(clusters) {
                let skipped = space.move_table(run.start, run.count);
                drop(space);
                if let Some(skipped) = skipped {
                    engine.unlinked.unlink(skipped.start, skipped.count);
                }
            } else {
                space.give_back(run.start, run.count, false);
            }
        }
    }

    /// Changes the first sector of the header and makes that durable.
    ///
    /// Errors: those of the storage. The old header is on stable storage then; where that cannot be
    /// had either, the image is not closed for a change until a later write of the header succeeds.
    pub(crate) async fn change_header(
        &self,
        ring: &Ring,
        change: impl FnOnce(&mut HeaderImage),
    ) -> Result<(), Errno> {
        let engine = self.engine()?;
        let _claim = engine.header_write.claim(0, 1).await;
        let old = lock(&engine.header).clone();
        let mut header = old.clone();
        change(&mut header);
        let written = async {
            self.write_header(ring, &header).await?;
            self.barrier(ring, &self.file).await
        };
        if let Err(errno) = written.await {
            let is_unknown = old.restore(ring, &self.file).await.is_err();
            engine.header_unknown.store(is_unknown, Ordering::Release);
            return Err(errno);
        }
        engine.header_unknown.store(false, Ordering::Release);
        *lock(&engine.header) = header;
        Ok(())
    }

    /// Frees the clusters that no request can be using any more. A failure leaks them.
    pub(super) async fn reap(&self, ring: &Ring) {
        let Ok(engine) = self.engine() else { return };
        let over = engine.unlinked.take_passed(|mark| engine.graces.passed(mark));
        if over.is_empty() {
            return;
        }
        let mut passed = Passed { unlinked: &engine.unlinked, left: over };
        let mut freed = Vec::new();
        while let Some((start, count)) = passed.next_part() {
            let result = self.change_refcount(ring, start, count, false, &mut freed).await;
            if result.is_err() {
                tracing::debug!(%start, count, "host clusters that are not used stay allocated");
            }
            passed.part_is_done(count);
            // A discard of a whole disk frees millions: requests must not wait for that.
            ring.yield_now().await;
        }
        self.release(ring, freed).await;
    }

    /// Makes clusters allocatable whose reference count became 0, and gives their space back.
    pub(crate) async fn release(&self, ring: &Ring, mut freed: Vec<Run>) {
        let Ok(engine) = self.engine() else { return };
        freed.sort_unstable_by_key(|run| run.start);
        let mut merged: Vec<Run> = Vec::with_capacity(freed.len());
        for run in freed {
            match merged.last_mut() {
                Some(last) if last.end() == run.start => last.count += run.count,
                _ => merged.push(run),
            }
        }
        let bits = self.geometry.cluster_bits;
        for mut run in merged {
            let (offset, len) = (run.start << bits, Bytes::of_clusters(run.count, bits));
            self.decompressor.forget(offset..offset + len);
            engine.packer.forget(run, bits);
            run.zeroed = engine.options.discard == Discard::Unmap
                && self.file.discard(ring, offset.0, len.0).await.is_ok()
                && super::group::grows_with_zeroes(&self.file);
            let Ok(mut space) = self.space() else { return };
            space.unmark_metadata(run.start, run.count);
            space.release(run);
            drop(space);
            engine.times_freed.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Work<'_> {
    /// Everything is on stable storage.
    fn finish(&mut self) {
        self.done = true;
        self.image.slices.written(&self.slices, true);
        if let (Some(counts), Ok(mut space)) = (&self.counts, self.image.space()) {
            space.written(counts, true);
        }
        if let Ok(engine) = self.image.engine() {
            let mut unlinked = std::mem::take(&mut self.unlinked);
            if let Some(DirtyRefcounts { table: DirtyTable::Whole { old, .. }, .. }) = &self.counts
            {
                unlinked.push((old.start, old.count));
            }
            engine.unlinked.durable(engine.graces.mark(), unlinked);
        }
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        self.image.slices.written(&self.slices, false);
        if let (Some(counts), Ok(mut space)) = (&self.counts, self.image.space()) {
            space.written(counts, false);
        }
        if let Ok(engine) = self.image.engine() {
            lock(&engine.l1_dirty).extend(self.l1.iter().map(|(index, _)| *index));
            engine.unlinked.put_back(std::mem::take(&mut self.unlinked));
        }
    }
}

/// Clusters that no request can be using any more, while their counts go down. What is left when
/// this is dropped, with the ring of its task, is taken again by the next one.
struct Passed<'a> {
    unlinked: &'a UnlinkedClusters,
    left: Unlinked,
}

impl Passed<'_> {
    /// The first host cluster and the number of clusters of a part of at most [`REAP_AT_ONCE`].
    fn next_part(&self) -> Option<(HostCluster, u64)> {
        let (start, count) = *self.left.last()?;
        Some((start, count.min(REAP_AT_ONCE)))
    }

    /// * `count`: of the part.
    fn part_is_done(&mut self, count: u64) {
        if let Some((start, left)) = self.left.last_mut() {
            (*start, *left) = (*start + count, left.saturating_sub(count));
            if *left == 0 {
                self.left.pop();
            }
        }
    }
}

impl Drop for Passed<'_> {
    fn drop(&mut self) {
        self.unlinked.put_back_passed(std::mem::take(&mut self.left));
    }
}
