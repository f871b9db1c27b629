//! The shadow transaction: everything that changes is written to free clusters, then one write of
//! the first sector of the header makes it true.
//!
//! Promises: a crash leaves the old state or the new one, with leaked clusters at most.
//!
//! How: changed refcount blocks move to free clusters, each at most once; that takes clusters and
//! gives others back, which changes further blocks, so it is repeated until nothing is left that
//! has changed and not moved. The refcount table follows. Everything is written, a barrier, the
//! header, a barrier. Clusters whose count fell to 0 are not used again inside the transaction, so
//! what the old state refers to stays as it is.
//!
//! Memory: changed blocks are written to their new places when they are more than
//! [`SPILL_BYTES`], or than the metadata cache may have; nothing refers to them yet.

mod commit;

use std::collections::HashSet;
use std::sync::PoisonError;

use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::engine::Engine;
use crate::engine::{Discard, Qcow2};
use crate::error::{Error, ErrorKind};
use crate::geometry::Geometry;
use crate::header::{HeaderImage, write_bytes};
use crate::refcounts::{Blocked, DirtyRefcounts, DirtyTable, Refcounts, Run};
use crate::sync::Arc;
use crate::table;
use crate::units::{Bytes, HostCluster, HostOffset};

/// Changed refcount blocks in memory before they are written, at most.
const SPILL_BYTES: usize = 8 << 20;
/// Tables are written in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;

/// One change of an image on its way.
pub(super) struct Transaction<'a> {
    pub(super) ring: &'a Ring,
    pub(super) file: Arc<Storage>,
    pub(super) geometry: Geometry,
    pub(super) version: u32,
    /// Guest data lies in another file.
    pub(super) external: bool,
    /// The header as it will be.
    pub(super) header: HeaderImage,
    /// The header as it is.
    old_header: HeaderImage,
    counts: &'a mut Refcounts,
    /// Refcount blocks that lie at new places already.
    moved: HashSet<u32>,
    /// Metadata that lies elsewhere now and is still counted.
    replaced: Vec<Run>,
    /// Clusters that nothing refers to once the header is switched.
    freed: Vec<Run>,
    /// Some of them held data, or bits of a bitmap.
    freed_data: bool,
    /// The file ends past the last cluster in use afterwards.
    shorten: bool,
    /// Refcount blocks that count nothing are given up.
    pub(super) drop_blocks: bool,
    discard: Discard,
    /// Changed refcount blocks are written where they are.
    in_place: bool,
    /// They are not written before the end, however many they are.
    in_memory: bool,
    /// Bytes of changed blocks from which on they are written.
    spill_bytes: usize,
}

impl<'a> Transaction<'a> {
    /// On an image that was closed.
    ///
    /// Errors: `InvalidRequest` when it is open for reading only.
    pub(super) fn begin(ring: &'a Ring, image: &'a mut Qcow2) -> Result<Transaction<'a>, Error> {
        let name = image.file.name().to_owned();
        let cap = image.options.metadata_cache_bytes.and_then(|cap| usize::try_from(cap).ok());
        let spill_bytes = cap.unwrap_or(SPILL_BYTES).min(SPILL_BYTES);
        let Qcow2 { engine, file, geometry, info, .. } = image;
        let Some(engine) = engine.as_deref_mut() else {
            return Err(Error::new(
                ErrorKind::InvalidRequest,
                &name,
                "the image is open for reading only",
                "open it for writing",
            ));
        };
        let Engine { refcounts, header, options, .. } = engine;
        let header = header.get_mut().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Transaction {
            ring,
            file: Arc::clone(file),
            geometry: *geometry,
            version: info.version,
            external: info.external_data_file,
            old_header: header.clone(),
            header,
            counts: refcounts.get_mut().unwrap_or_else(PoisonError::into_inner),
            moved: HashSet::new(),
            replaced: Vec::new(),
            freed: Vec::new(),
            freed_data: false,
            shorten: false,
            drop_blocks: false,
            discard: options.discard,
            in_place: false,
            in_memory: false,
            spill_bytes,
        })
    }

    pub(super) fn cluster_bytes(&self) -> usize {
        1 << self.geometry.cluster_bits
    }

    pub(super) fn corrupt(&self, reason: impl Into<String>) -> Error {
        Error::corrupt(self.file.name(), reason)
    }

    pub(super) fn io(&self, doing: &str, errno: Errno) -> Error {
        Error::io(self.file.name(), doing, errno)
    }

    /// Takes up to `count` free clusters, exactly so many if `contiguous`.
    pub(super) async fn allocate(&mut self, count: u64, contiguous: bool) -> Result<Run, Error> {
        let run = self.ask(|counts| counts.allocate(count, None, contiguous)).await?;
        self.spill_some().await?;
        Ok(run)
    }

    /// The count of a cluster.
    pub(super) async fn count(&mut self, cluster: HostCluster) -> Result<u64, Error> {
        match self.counts.get(cluster) {
            Ok(count) => Ok(count),
            Err(_) => self.ask(|counts| counts.get(cluster)).await,
        }
    }

    /// Whether nothing uses a cluster: it is not counted, and no table is known to name it.
    pub(super) async fn is_unused(&mut self, cluster: HostCluster) -> Result<bool, Error> {
        Ok(self.count(cluster).await? == 0 && !self.counts.is_named(cluster))
    }

    /// One reference more to each cluster of a run that is in use.
    pub(super) async fn share(&mut self, start: HostCluster, count: u64) -> Result<(), Error> {
        self.ask(|counts| counts.share(start, count)).await?;
        self.spill_some().await
    }

    /// One reference less.
    async fn unref(&mut self, start: HostCluster, count: u64) -> Result<(), Error> {
        let mut freed = std::mem::take(&mut self.freed);
        let result = self.ask(|counts| counts.decrement(start, count, &mut freed)).await;
        self.freed = freed;
        result?;
        self.spill_some().await
    }

    /// One reference less to data, or to the bits of a bitmap.
    ///
    /// Errors: `Corrupt`, also when metadata lies there, which would be given up with it.
    pub(super) async fn unref_data(&mut self, start: HostCluster, count: u64) -> Result<(), Error> {
        if let Some(cluster) = self.counts.first_metadata(start, count) {
            return Err(self.corrupt(format!(
                "an entry for data names host cluster {cluster}, which holds metadata"
            )));
        }
        self.unref(start, count).await?;
        self.freed_data |= self.first_freed(start, count).is_some();
        Ok(())
    }

    /// Whether anything was freed so far.
    pub(super) fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    /// Whether any of that was data, or bits of a bitmap.
    pub(super) fn has_freed_data(&self) -> bool {
        self.freed_data
    }

    /// The first cluster of `start..start + count` that was freed.
    pub(super) fn first_freed(&self, start: HostCluster, count: u64) -> Option<HostCluster> {
        self.counts.first_held(start, count)
    }

    /// One reference less to metadata that a new copy has taken the place of. What an entry for
    /// data names stays counted, and belongs to that entry from now on.
    pub(super) async fn unref_metadata(
        &mut self,
        start: HostCluster,
        count: u64,
    ) -> Result<(), Error> {
        self.counts.unmark_metadata(start, count);
        let mut at = start;
        while at < start + count {
            let is_free_to_go = |cluster: &HostCluster| !self.counts.is_contested(*cluster);
            let run = at.up_to(start + count).take_while(is_free_to_go).count() as u64;
            if run > 0 {
                self.unref(at, run).await?;
            }
            at += run + 1;
        }
        Ok(())
    }

    /// As [`unref_metadata`](Transaction::unref_metadata) for an L2 table that others may use too.
    pub(super) async fn unref_shared_metadata(
        &mut self,
        cluster: HostCluster,
    ) -> Result<(), Error> {
        if self.counts.is_contested(cluster) {
            return Ok(());
        }
        // Tables of snapshots are not marked, so it is not known whether an entry for data names
        // them.
        let was_marked = self.counts.is_metadata(cluster);
        self.unref(cluster, 1).await?;
        if self.count(cluster).await? == 0 {
            self.counts.unmark_metadata(cluster, 1);
            self.freed_data |= !was_marked;
        }
        Ok(())
    }

    /// From now on no cluster of the run is taken for something new, whatever its count says: a
    /// table that is on stable storage names it.
    pub(super) fn note_named(&mut self, start: HostCluster, count: u64) {
        self.counts.note_named(start, count);
    }

    /// As [`note_named`](Transaction::note_named), by an entry for data.
    pub(super) fn note_data(&mut self, start: HostCluster, count: u64) {
        self.counts.note_data(start, count);
    }

    /// All that is on stable storage was noted.
    pub(super) fn all_named(&mut self) {
        self.counts.all_named();
    }

    /// Whether all was noted, by this change or by one before it.
    pub(super) fn knows_all_named(&self) -> bool {
        self.counts.knows_all_named()
    }

    /// Nothing is named any more.
    pub(super) fn forget_named(&mut self) {
        self.counts.forget_named();
    }

    /// Reads one cluster of metadata.
    pub(super) async fn read_cluster(
        &self,
        offset: HostOffset,
        what: &str,
    ) -> Result<Vec<u8>, Error> {
        self.read(offset, self.cluster_bytes(), what).await
    }

    /// Reads `len` bytes of the image file. Errors: `Corrupt` when it ends before.
    pub(super) async fn read(
        &self,
        offset: HostOffset,
        len: usize,
        what: &str,
    ) -> Result<Vec<u8>, Error> {
        let bytes = table::read(self.ring, &self.file, offset, len, what).await?;
        if bytes.len() < len {
            return Err(self.corrupt(format!("the file ends inside {what} at {offset:#x}")));
        }
        Ok(bytes)
    }

    /// Writes `bytes` into new adjacent clusters, padded with zeroes. Returns the run.
    pub(super) async fn write_new(&mut self, bytes: &[u8], what: &str) -> Result<Run, Error> {
        let clusters = bytes.len().div_ceil(self.cluster_bytes()).max(1);
        let run = self.allocate(clusters as u64, true).await?;
        self.write_run(run, bytes, what).await?;
        Ok(run)
    }

    /// Fills the clusters of `run`, which belong to this transaction, with `bytes` and zeroes.
    pub(super) async fn write_run(&self, run: Run, bytes: &[u8], what: &str) -> Result<(), Error> {
        let cluster_bytes = self.cluster_bytes();
        let len = bytes.len().next_multiple_of(cluster_bytes).max(cluster_bytes);
        let piece_bytes = PIECE_BYTES.max(cluster_bytes).min(len);
        let buf = IoBuf::new(piece_bytes, 4096);
        let start = run.start << self.geometry.cluster_bits;
        for at in (0..len).step_by(piece_bytes) {
            let piece = buf.slice(0..piece_bytes.min(len - at));
            let data = bytes.get(at..bytes.len().min(at + piece.len())).unwrap_or_default();
            piece.slice(data.len()..piece.len()).fill(0);
            piece.slice(0..data.len()).copy_from_slice(0, data);
            self.file
                .write_all(self.ring, (start + Bytes::of(at)).0, &piece)
                .await
                .map_err(|errno| self.io(&format!("writing {what}"), errno))?;
        }
        Ok(())
    }

    /// Asks `question`, and does what it needs, until it has an answer.
    async fn ask<T>(
        &mut self,
        mut question: impl FnMut(&mut Refcounts) -> Result<T, Blocked>,
    ) -> Result<T, Error> {
        loop {
            match question(self.counts) {
                Ok(answer) => return Ok(answer),
                Err(Blocked::Load(index)) => self.load(index).await?,
                Err(Blocked::Create(index)) => self.create(index).await?,
                Err(other) => return Err(self.blocked(other)),
            }
        }
    }

    fn blocked(&self, blocked: Blocked) -> Error {
        match blocked {
            Blocked::Overflow => Error::new(
                ErrorKind::InvalidRequest,
                self.file.name(),
                "a cluster would be referred to more often than the image can count",
                "delete snapshots, or copy the image into one with a larger refcount_bits",
            ),
            Blocked::Corrupt(reason) => self.corrupt(reason),
            _ => self.io("allocating space in it", Errno::NOSPC),
        }
    }

    async fn load(&mut self, index: u32) -> Result<(), Error> {
        let Some(offset) = self.counts.block_offset(index) else {
            return Err(self.corrupt(format!("refcount block {index} is gone")));
        };
        let len = self.cluster_bytes();
        let mut bytes = table::read(self.ring, &self.file, offset, len, "a refcount block").await?;
        // The file may end inside the block: what is not there counts nothing.
        bytes.resize(len, 0);
        self.counts.put_block(index, &bytes);
        Ok(())
    }

    async fn create(&mut self, index: u32) -> Result<(), Error> {
        match self.counts.begin_block(index) {
            Ok(cluster) => {
                self.counts.finish_block(index, cluster);
                self.moved.insert(index);
                Ok(())
            }
            Err(Blocked::Load(index)) => self.load(index).await,
            Err(other) => Err(self.blocked(other)),
        }
    }

    async fn spill_some(&mut self) -> Result<(), Error> {
        let bytes = self.counts.dirty_blocks().len() * self.cluster_bytes();
        if bytes > self.spill_bytes && !self.in_memory { self.spill().await } else { Ok(()) }
    }

    /// Writes changed blocks to their new places.
    async fn spill(&mut self) -> Result<(), Error> {
        if !self.in_place {
            self.move_blocks().await?;
        }
        // The table is written in the end, as a whole.
        let dirty = self.counts.take_dirty_blocks();
        self.write_dirty(dirty).await.map(drop)
    }

    /// Gives every changed block a new place.
    async fn move_blocks(&mut self) -> Result<(), Error> {
        let mut at = 0;
        while let Some(index) = self.counts.dirty_blocks().get(at).copied() {
            at += 1;
            if self.counts.block_offset(index).is_some() && self.moved.insert(index) {
                let run = self.ask(|counts| counts.allocate(1, None, true)).await?;
                if let Some(old) = self.counts.move_block(index, run.start) {
                    self.replaced.push(Run::new(old, 1));
                }
            }
        }
        Ok(())
    }

    /// Writes the blocks that have changed, and returns the table, if it has.
    async fn write_counts(&mut self) -> Result<DirtyTable, Error> {
        let dirty = self.counts.take_dirty();
        self.write_dirty(dirty).await
    }

    async fn write_dirty(&mut self, dirty: DirtyRefcounts) -> Result<DirtyTable, Error> {
        let mut result = Ok(());
        for block in &dirty.blocks {
            result = write_bytes(self.ring, &self.file, block.offset, &block.bytes).await;
            if result.is_err() {
                break;
            }
        }
        self.counts.written(&dirty, result.is_ok());
        result.map_err(|errno| self.io("writing refcount blocks", errno))?;
        Ok(dirty.table)
    }

    /// Finds places for all reference counts that have changed. Returns whether any has.
    async fn settle(&mut self) -> Result<bool, Error> {
        let old_table = self.counts.table_run();
        let mut table_moved = false;
        if !self.counts.is_dirty() && self.moved.is_empty() {
            return Ok(false);
        }
        loop {
            self.move_blocks().await?;
            if let Some(run) = self.replaced.pop() {
                self.unref_metadata(run.start, run.count).await?;
                continue;
            }
            let wants = self.counts.table_wants();
            if table_moved && wants.is_none() {
                if self.drop_blocks && self.drop_empty_blocks().await? {
                    continue;
                }
                return Ok(true);
            }
            let clusters = wants.unwrap_or(old_table.count);
            let run = self.allocate(clusters, true).await?;
            if self.counts.table_wants().is_some_and(|wants| wants > clusters) {
                // Allocating made new blocks.
                self.counts.give_back(run.start, run.count, false);
                continue;
            }
            if let Some(skipped) = self.counts.move_table(run.start, run.count) {
                // Nothing was written there, and nothing names it.
                self.counts.unmark_metadata(skipped.start, skipped.count);
                self.counts.give_back(skipped.start, skipped.count, false);
            }
            if !table_moved {
                self.replaced.push(old_table);
            }
            table_moved = true;
        }
    }

    /// Gives up refcount blocks that count nothing. Returns whether there were any.
    async fn drop_empty_blocks(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for index in 0..self.counts.table_len() {
            let Some((cluster, counted)) = self.ask(|counts| counts.drop_block(index)).await?
            else {
                continue;
            };
            any = true;
            if self.counts.is_contested(cluster) {
                continue;
            }
            if counted {
                self.unref(cluster, 1).await?;
            } else {
                self.freed.push(Run::new(cluster, 1));
            }
        }
        Ok(any)
    }

    /// From now on free clusters below `end` are taken first.
    pub(super) async fn search_below(&mut self, end: HostCluster) -> Result<(), Error> {
        self.ask(|counts| counts.search_below(end)).await
    }

    /// Where refcount blocks and the refcount table lie, as cluster numbers.
    pub(super) fn refcount_clusters(&self) -> Vec<HostCluster> {
        let table = self.counts.table_run();
        let offsets = (0..self.counts.table_len()).filter_map(|i| self.counts.block_offset(i));
        let blocks = offsets.map(|offset| offset >> self.geometry.cluster_bits);
        table.clusters().chain(blocks).collect()
    }

    /// Refcount blocks, and the table, that lie at or behind `cluster` move, all others only if
    /// they change.
    pub(super) async fn move_blocks_behind(&mut self, cluster: HostCluster) -> Result<(), Error> {
        let bits = self.geometry.cluster_bits;
        for index in 0..self.counts.table_len() {
            if self.counts.block_offset(index).is_some_and(|offset| offset >> bits >= cluster) {
                self.ask(|counts| counts.touch_block(index)).await?;
                self.spill_some().await?;
            }
        }
        // The table moves where any block does.
        let is_still = self.counts.dirty_blocks().is_empty() && self.moved.is_empty();
        if self.counts.table_run().end() > cluster && is_still {
            let first = (0..self.counts.table_len())
                .find(|index| self.counts.block_offset(*index).is_some());
            if let Some(index) = first {
                self.ask(|counts| counts.touch_block(index)).await?;
            }
        }
        Ok(())
    }
}
