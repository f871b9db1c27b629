//! Reference counts of host clusters, and the free space that follows from them.
//!
//! Promises: pure memory, never async, never blocks, no I/O. A call that needs a refcount block
//! that is not in memory changes nothing and says what is missing ([`Blocked`]); the caller brings
//! it and calls again. Allocating one cluster from a free run or at the end of the file reads
//! one count and allocates no memory. A cluster that is marked as metadata, or that an L2 entry
//! names which was loaded, is never handed out, whatever the counts say. Memory is bounded: clean
//! blocks beyond [`REFCOUNT_CACHE_BYTES`] are dropped, and so are free runs beyond
//! [`FREE_RUNS_MAX`] (their blocks are searched again).
//!
//! One thread at a time: the engine keeps it behind a mutex.
//!
//! How free space is found: nothing is known when an image is opened. A cursor walks over the
//! clusters from 0; each allocation that no known run serves searches the rest of one block, and
//! then goes to the end of the file, so no request waits for a search of the whole image.
//!
//! Source: qcow2 specification, "Host cluster management".

mod allocate;
mod blocks;
mod grow;
mod marks;
#[cfg(test)]
mod model;
mod named_clusters;
mod space;
#[cfg(test)]
mod tests;
mod width;

use std::cell::Cell;

use crate::limits::REFCOUNT_TABLE_BYTES_MAX;
#[cfg(doc)]
use crate::limits::{FREE_RUNS_MAX, REFCOUNT_CACHE_BYTES};
use crate::sync::{self, Arc};
use crate::units::{Bytes, HostCluster, HostOffset};

pub(crate) use blocks::{DirtyRefcounts, DirtyTable};
pub(crate) use marks::Marks;

use blocks::Block;
pub(crate) use named_clusters::Named;
use space::RunSet;
use width::Width;

/// Bits of a host offset that the format has room for.
const OFFSET_BITS: u32 = 56;

/// Why a call could not finish. It changed nothing that counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// The refcount block with this index must be loaded: read a cluster at
    /// [`block_offset`](Refcounts::block_offset), then [`put_block`](Refcounts::put_block).
    Load(u32),
    /// No block covers the cluster: [`begin_block`](Refcounts::begin_block), write a cluster of
    /// zeroes, [`finish_block`](Refcounts::finish_block).
    Create(u32),
    /// There is no room: the storage cannot grow, or the refcount table is at its limit. `ENOSPC`.
    Full,
    /// A count is at the maximum of its width.
    Overflow,
    /// The image contradicts itself: it is to be marked as corrupt. The text says how.
    Corrupt(String),
}

/// Adjacent host clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first cluster.
    pub(crate) start: HostCluster,
    /// Clusters.
    pub(crate) count: u64,
    /// Known to read as zeroes.
    pub(crate) zeroed: bool,
}

impl Run {
    /// The first cluster past the run.
    pub(crate) fn end(&self) -> HostCluster {
        self.start + self.count
    }

    /// Clusters from `start` on, of whose content nothing is known.
    pub(crate) fn new(start: HostCluster, count: u64) -> Run {
        Run { start, count, zeroed: false }
    }

    /// All its clusters.
    pub(crate) fn clusters(&self) -> impl DoubleEndedIterator<Item = HostCluster> + use<> {
        self.start.up_to(self.end())
    }
}

/// What [`Refcounts::new`] is made of.
#[derive(Debug)]
pub(crate) struct RefcountParts {
    /// log2 of the cluster size in bytes.
    pub(crate) cluster_bits: u32,
    /// log2 of the bits of a count.
    pub(crate) refcount_order: u32,
    /// The refcount table: host offsets of the blocks, 0 where there is none. Checked: aligned,
    /// inside the file, no duplicates.
    pub(crate) table: Vec<HostOffset>,
    /// Where the table lies.
    pub(crate) table_offset: HostOffset,
    /// Clusters that the table has on disk.
    pub(crate) table_clusters: u64,
    /// Length of the file in bytes.
    pub(crate) file_len: Bytes,
    /// A write past the end makes the file longer (not so on a block device).
    pub(crate) can_grow: bool,
    /// What lies past the end reads as zeroes once the file has grown over it.
    pub(crate) reads_zero_past_end: bool,
    /// Size of the disk in clusters: what the file may grow to.
    pub(crate) disk_clusters: u64,
}

/// Refcount table, cache of refcount blocks, free space.
pub(crate) struct Refcounts {
    cluster_bits: u32,
    /// log2 of the counts in a block.
    block_bits: u32,
    width: Width,
    /// Host offset of each block, 0 where there is none. May be longer than the table on disk.
    table: Vec<HostOffset>,
    /// Where the table lies on disk.
    table_run: Run,
    /// The table has moved to `table_run` and is not written there yet; this is its old
    /// place.
    moved_from: Option<Run>,
    /// The blocks in memory; as long as `table`.
    blocks: Vec<Option<Box<Block>>>,
    /// Blocks in memory.
    cached: usize,
    /// Blocks to write.
    dirty: Vec<u32>,
    /// Entries of the table to write.
    dirty_entries: Vec<u32>,
    /// Counts calls that finished; the time of the cache.
    now: Cell<u64>,
    /// Count 0, allocatable.
    free: RunSet,
    /// Count 0, not allocatable: freed and not released yet, or a refcount block in the making.
    held: RunSet,
    /// Clusters that must never be handed out.
    metadata: RunSet,
    /// The same, for threads that do not have the lock.
    marks: Arc<Marks>,
    /// Clusters that L2 entries name, as far as those were loaded: not free.
    named: Named,
    /// All clusters from here on were never handed out. Free if their count is 0.
    end: HostCluster,
    /// First cluster that cannot be had.
    limit: HostCluster,
    can_grow: bool,
    /// Clusters from `end` on read as zeroes.
    end_zeroed: bool,
    /// Below: every free cluster is in `free` or `held`. At most `end`.
    cursor: HostCluster,
    /// Free runs below the cursor were forgotten: once it is at the end, it begins again.
    forgotten: bool,
}

impl Refcounts {
    /// Marks the header, the table and its blocks as metadata; the caller marks what else it knows.
    pub(crate) fn new(parts: RefcountParts) -> Refcounts {
        let RefcountParts { cluster_bits, mut table, file_len, can_grow, .. } = parts;
        let width = Width::new(parts.refcount_order);
        let entries = (parts.table_clusters << cluster_bits) / 8;
        // At most 2^20: the table is at most 8 MiB.
        table.resize(usize::try_from(entries).unwrap_or(0), HostOffset(0));
        let limit_of_format = HostCluster(1 << (OFFSET_BITS - cluster_bits));
        let (end, limit) = if can_grow {
            (HostCluster(file_len.clusters(cluster_bits)), limit_of_format)
        } else {
            let clusters = (HostOffset::after(file_len) >> cluster_bits).min(limit_of_format);
            (clusters, clusters)
        };
        // A quarter more than the disk for tables and snapshots.
        let room = end.0.max(parts.disk_clusters.saturating_add(parts.disk_clusters / 4));
        let mut refcounts = Refcounts {
            cluster_bits,
            block_bits: width.block_bits(cluster_bits),
            width,
            table_run: Run::new(parts.table_offset >> cluster_bits, parts.table_clusters),
            moved_from: None,
            blocks: std::iter::repeat_with(|| None).take(table.len()).collect(),
            cached: 0,
            dirty: Vec::new(),
            dirty_entries: Vec::new(),
            now: Cell::new(1),
            free: RunSet::new(),
            held: RunSet::new(),
            metadata: RunSet::new(),
            marks: Arc::new(Marks::new(room.min(limit.0))),
            named: Named::default(),
            end,
            limit,
            can_grow,
            end_zeroed: can_grow && parts.reads_zero_past_end,
            cursor: HostCluster(0),
            forgotten: false,
            table,
        };
        refcounts.mark_metadata(HostCluster(0), 1);
        refcounts.mark_metadata(refcounts.table_run.start, refcounts.table_run.count);
        for index in 0..refcounts.table.len() {
            let offset = refcounts.table[index];
            if offset != HostOffset(0) {
                refcounts.mark_metadata(offset >> cluster_bits, 1);
            }
        }
        refcounts
    }

    /// The count of `cluster`; 0 where no block covers it.
    ///
    /// Errors: `Load`.
    pub(crate) fn get(&self, cluster: HostCluster) -> Result<u64, Blocked> {
        let (index, entry) = self.place(cluster);
        match self.cached_block(index)? {
            Some(block) => Ok(self.width.get(&block.bytes, entry)),
            None => Ok(0),
        }
    }

    /// Adds one to each count of `start..start + count`, or to none.
    ///
    /// A range that takes more blocks than the cache holds makes it larger for that long: callers
    /// split large ranges.
    ///
    /// Errors: `Load`, `Create`, `Full`, `Overflow`.
    pub(crate) fn increment(&mut self, start: HostCluster, count: u64) -> Result<(), Blocked> {
        let max = self.width.max();
        let mut unused = false;
        self.each_entry(start, count, |value, _| {
            unused |= value == 0;
            if value < max { Ok(()) } else { Err(Blocked::Overflow) }
        })?;
        self.change(start, count, |value| value + 1);
        if unused {
            self.free.remove(start, count);
        }
        self.reach(start, count);
        Ok(())
    }

    /// As [`increment`](Refcounts::increment) for clusters that are in use already.
    ///
    /// Errors: `Load`, `Overflow`; `Corrupt` when a count is 0.
    pub(crate) fn share(&mut self, start: HostCluster, count: u64) -> Result<(), Blocked> {
        let max = self.width.max();
        let unused = |cluster: HostCluster| {
            Blocked::Corrupt(format!("host cluster {cluster} is in use, but its refcount is 0"))
        };
        self.each_entry(start, count, |value, cluster| match value {
            0 => Err(unused(cluster)),
            value if value < max => Ok(()),
            _ => Err(Blocked::Overflow),
        })
        .map_err(|blocked| match blocked {
            Blocked::Create(_) | Blocked::Full => unused(start),
            other => other,
        })?;
        self.change(start, count, |value| value + 1);
        Ok(())
    }

    /// Takes one from each count of `start..start + count`, or from none. Clusters that reach 0 are
    /// added to `freed`; they are not allocatable before [`release`](Refcounts::release).
    ///
    /// Errors: `Load`; `Corrupt` when a count is 0 already.
    pub(crate) fn decrement(
        &mut self,
        start: HostCluster,
        count: u64,
        freed: &mut Vec<Run>,
    ) -> Result<(), Blocked> {
        let none = |cluster: HostCluster| {
            Blocked::Corrupt(format!("the refcount of host cluster {cluster} would fall below 0"))
        };
        self.each_entry(
            start,
            count,
            |value, cluster| {
                if value > 0 { Ok(()) } else { Err(none(cluster)) }
            },
        )
        .map_err(|blocked| match blocked {
            Blocked::Create(_) | Blocked::Full => none(start),
            other => other,
        })?;
        self.change(start, count, |value| value - 1);
        self.reach(start, count);
        let mut cluster = start;
        while cluster < start + count {
            // All blocks are there.
            let zeroes = self.free_from(cluster, start + count - cluster);
            if zeroes == 0 {
                cluster += 1;
                continue;
            }
            self.held.insert(Run::new(cluster, zeroes));
            match freed.last_mut() {
                Some(run) if run.end() == cluster && !run.zeroed => run.count += zeroes,
                _ => freed.push(Run::new(cluster, zeroes)),
            }
            cluster += zeroes;
        }
        Ok(())
    }

    /// Takes back what [`allocate`](Refcounts::allocate) gave and that was never linked: counts go
    /// from 1 to 0 and the clusters are allocatable at once. No I/O into them is in flight.
    ///
    /// * `zeroed`: they still read as zeroes.
    ///
    /// A cluster whose block is not in memory any more stays allocated: a leak, nothing worse.
    pub(crate) fn give_back(&mut self, start: HostCluster, count: u64, zeroed: bool) {
        for cluster in start.up_to(start.saturating_add(count)) {
            if self.get(cluster) == Ok(1) {
                self.named.remove(cluster, 1);
                self.change(cluster, 1, |_| 0);
                self.add_free(Run { start: cluster, count: 1, zeroed });
            }
        }
    }

    /// Makes clusters allocatable that [`decrement`](Refcounts::decrement) freed: their unlinking
    /// is durable and no request uses them any more.
    ///
    /// * `run.zeroed`: they were punched and read as zeroes.
    pub(crate) fn release(&mut self, run: Run) {
        self.held.remove(run.start, run.count);
        self.named.remove(run.start, run.count);
        self.add_free(run);
    }

    /// As [`allocate`](Refcounts::allocate), of clusters for metadata: they are marked in the same
    /// step. In two steps with the lock free in between, a slice that is loaded meanwhile and names
    /// one of them would let data be written there.
    pub(crate) fn allocate_metadata(
        &mut self,
        count: u64,
        goal: Option<HostCluster>,
        contiguous: bool,
    ) -> Result<Run, Blocked> {
        let run = self.allocate(count, goal, contiguous)?;
        self.mark_metadata(run.start, run.count);
        Ok(run)
    }

    /// Never hands these out. Marks do not count: marked twice is marked.
    pub(crate) fn mark_metadata(&mut self, start: HostCluster, count: u64) {
        self.metadata.insert(Run::new(start, count));
        self.marks.set(start, count);
    }

    /// An L2 entry names these clusters: they are not free before they were
    /// [released](Refcounts::release).
    pub(crate) fn note_named(&mut self, start: HostCluster, count: u64) {
        self.named.insert(start, count);
    }

    /// As [`note_named`](Refcounts::note_named), by an entry for data.
    pub(crate) fn note_data(&mut self, start: HostCluster, count: u64) {
        self.named.insert(start, count);
        let mut at = start;
        let end = start.saturating_add(count);
        while let Some(cluster) = self.metadata.first_in(at, end.saturating_sub(at)) {
            self.named.insert_contested(cluster);
            at = cluster + 1;
        }
    }

    /// Whether an entry for data was seen to name this cluster of metadata.
    pub(crate) fn is_contested(&self, cluster: HostCluster) -> bool {
        self.named.is_contested(cluster)
    }

    /// All tables were read.
    pub(crate) fn all_named(&mut self) {
        self.named.complete();
    }

    /// Whether all tables were read, since when only what is counted was named.
    pub(crate) fn knows_all_named(&self) -> bool {
        self.named.is_complete()
    }

    /// Whether an L2 entry is known to name a cluster. One that was freed is not named any more.
    pub(crate) fn is_named(&self, cluster: HostCluster) -> bool {
        self.named.first_in(cluster, 1).is_some() && self.held.at(cluster).is_none()
    }

    /// The first cluster of `start..start + count` that was freed and not
    /// [released](Refcounts::release) yet.
    pub(crate) fn first_held(&self, start: HostCluster, count: u64) -> Option<HostCluster> {
        self.held.first_in(start, count)
    }

    /// The clusters that L2 entries name, for the next open of the same file. Freed clusters that
    /// only wait until they may be used again are not named any more.
    pub(crate) fn named(&self) -> Named {
        let mut named = self.named.clone();
        self.held.iter().for_each(|run| named.remove(run.start, run.count));
        named
    }

    /// What L2 entries named counts for nothing.
    pub(crate) fn forget_named(&mut self) {
        self.named = Named::default();
    }

    /// What the image was known to name when it was open before.
    pub(crate) fn add_named(&mut self, named: Named) {
        self.named.add_all(named);
    }

    /// The marks of metadata, for threads that do not have the lock.
    pub(crate) fn marks(&self) -> Arc<Marks> {
        Arc::clone(&self.marks)
    }

    /// They are ordinary clusters again. Before they are released.
    pub(crate) fn unmark_metadata(&mut self, start: HostCluster, count: u64) {
        self.metadata.remove(start, count);
        self.marks.clear(start, count);
    }

    /// Searches for free clusters below `end`, as far as there is memory for them.
    ///
    /// Errors: `Load`.
    pub(crate) fn search_below(&mut self, end: HostCluster) -> Result<(), Blocked> {
        while self.cursor < end && self.scan()? {}
        Ok(())
    }

    /// Whether `cluster` is marked.
    pub(crate) fn is_metadata(&self, cluster: HostCluster) -> bool {
        self.metadata.at(cluster).is_some()
    }

    /// The first marked cluster of `start..start + count`: the overlap check before a write.
    pub(crate) fn first_metadata(&self, start: HostCluster, count: u64) -> Option<HostCluster> {
        self.metadata.first_in(start, count)
    }

    /// First cluster that was never handed out and that nothing refers to: where the file ends or
    /// will end.
    pub(crate) fn end(&self) -> HostCluster {
        self.end
    }

    /// Block index, and entry inside the block.
    fn place(&self, cluster: HostCluster) -> (u64, usize) {
        // At most 2^24 counts in a block.
        #[allow(clippy::cast_possible_truncation)]
        let entry = (cluster.0 & ((1 << self.block_bits) - 1)) as usize;
        (cluster.0 >> self.block_bits, entry)
    }

    /// The first cluster that the block with this index counts.
    fn block_start(&self, index: u64) -> HostCluster {
        HostCluster(index << self.block_bits)
    }

    /// Most entries that the table can have.
    fn table_entries_max() -> u64 {
        REFCOUNT_TABLE_BYTES_MAX / Bytes(8)
    }

    /// Runs `test` on each count of the range, all of whose blocks must be there.
    fn each_entry(
        &self,
        start: HostCluster,
        count: u64,
        mut test: impl FnMut(u64, HostCluster) -> Result<(), Blocked>,
    ) -> Result<(), Blocked> {
        let end = start.checked_add(count).filter(|end| *end <= self.limit).ok_or(Blocked::Full)?;
        let mut cluster = start;
        while cluster < end {
            let (index, entry) = self.place(cluster);
            let Some(block) = self.cached_block(index)? else { return Err(self.missing(index)) };
            let here = (end - cluster).min((1 << self.block_bits) - entry as u64);
            // Inside one block.
            #[allow(clippy::cast_possible_truncation)]
            for (at, entry) in (entry..entry + here as usize).enumerate() {
                test(self.width.get(&block.bytes, entry), cluster + at as u64)?;
            }
            cluster += here;
        }
        Ok(())
    }

    /// Changes each count of the range, all of whose blocks are there (those that are not are left
    /// alone), and makes the blocks dirty.
    fn change(&mut self, start: HostCluster, count: u64, new: impl Fn(u64) -> u64) {
        let width = self.width;
        let mut cluster = start;
        while cluster < start + count {
            let (index, entry) = self.place(cluster);
            let here = (start + count - cluster).min((1 << self.block_bits) - entry as u64);
            // Inside one block.
            #[allow(clippy::cast_possible_truncation)]
            let entries = entry..entry + here as usize;
            self.edit(index, entries.clone(), |bytes| {
                for entry in entries {
                    let value = new(width.get(bytes, entry));
                    width.set(bytes, entry, value);
                }
            });
            cluster += here;
        }
        self.now.set(self.now.get() + 1);
    }

    /// The end lies behind everything that has a count. What is skipped is searched later.
    fn reach(&mut self, start: HostCluster, count: u64) {
        self.end = self.end.max(start + count);
    }

    /// Remembers free clusters, or that they must be searched again when too many are known.
    fn add_free(&mut self, run: Run) {
        if self.free.len() >= crate::limits::FREE_RUNS_MAX {
            self.cursor = self.cursor.min(run.start);
        } else {
            self.free.insert(run);
        }
    }
}

impl std::fmt::Debug for Refcounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refcounts")
            .field("table", &self.table_run)
            .field("cached_blocks", &self.cached)
            .field("free_runs", &self.free.len())
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}
