//! Plans new refcount structures beside the old ones.
//!
//! Promises: nothing that the image refers to is given away: new structures lie in clusters that
//! neither the old state nor the new one uses otherwise, nor any entry that points past the end
//! of the file. Pure memory; ends, since every block is planned once.

use std::collections::{BTreeMap, BTreeSet};

use crate::check::counts::{REGION_CLUSTERS, Region};
use crate::check::layout::{BLOCK_RESERVED, Layout};
use crate::check::refcount;
use crate::check::scan::Scan;
use crate::check::stop::Stop;
use crate::limits::REFCOUNT_TABLE_BYTES_MAX;
use crate::units::{Bytes, HostCluster, HostOffset};

/// Most clusters that are kept though nothing refers to them: about 48 MiB of memory.
const KEPT_MAX: usize = 1 << 20;

/// New places and what they make of the refcounts.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    scan: &'a mut Scan,
    layout: Layout,
    /// Clusters that are in use besides those that were counted, with their refcounts: mostly those
    /// of new structures.
    fresh: BTreeMap<HostCluster, u64>,
    /// Clusters of structures that the new state does without. The old state needs them to the end.
    held: BTreeSet<HostCluster>,
    /// Entries of the new refcount table.
    pub(super) entries: Vec<u64>,
    /// Blocks that are written anew.
    pub(super) rewritten: BTreeSet<u64>,
    queue: Vec<u64>,
    /// No single free cluster lies before this one.
    cursor: HostCluster,
    /// Clusters of a storage that cannot grow.
    limit: Option<HostCluster>,
}

impl<'a> Plan<'a> {
    /// * `limit`: clusters that fit on a storage that cannot grow.
    pub(super) fn new(scan: &'a mut Scan, limit: Option<HostCluster>) -> Plan<'a> {
        let layout = scan.layout;
        // What belongs to a structure that reaches past the end was not counted, and must stay.
        let kept: BTreeMap<HostCluster, u64> = scan
            .past_end
            .keys()
            .filter(|at| **at < layout.clusters() && scan.counts.get(**at).total == 0)
            .map(|at| (*at, 1))
            .collect();
        let mut plan = Plan {
            entries: scan.blocks.clone(),
            scan,
            layout,
            fresh: BTreeMap::new(),
            held: BTreeSet::new(),
            rewritten: BTreeSet::new(),
            queue: Vec::new(),
            cursor: HostCluster(0),
            limit,
        };
        for cluster in kept.keys() {
            plan.touch(*cluster);
        }
        plan.fresh = kept;
        plan
    }

    /// The refcount that a cluster gets.
    pub(super) fn target(&self, cluster: HostCluster) -> u64 {
        let counted = || u64::from(self.scan.counts.get(cluster).total);
        self.fresh.get(&cluster).copied().unwrap_or_else(counted).min(self.layout.refcount_max())
    }

    /// Drops `count` references to each cluster of a structure that moves.
    pub(super) fn retire(&mut self, offset: HostOffset, len: Bytes, count: u32) {
        // What lies past the end was not counted.
        if len == Bytes::ZERO || !self.layout.may_be_there(offset, len) {
            return;
        }
        let bits = self.layout.cluster_bits;
        let (first, last) = (offset >> bits, (offset + len - Bytes(1)) >> bits);
        for cluster in first.up_to(last + 1) {
            self.scan.counts.take_back(cluster, count);
            self.held.insert(cluster);
        }
    }

    /// Finds `count` neighbouring clusters and gives each `refcount`.
    ///
    /// Errors: `Full` when the storage cannot grow.
    pub(super) fn allocate(&mut self, count: u64, refcount: u64) -> Result<HostCluster, Stop> {
        let mut start = self.cursor;
        let mut at = start;
        while at - start < count {
            if self.limit.is_some_and(|limit| at >= limit) {
                return Err(Stop::Full);
            }
            if self.is_free(at) {
                at += 1;
                continue;
            }
            let next = match at >= self.layout.clusters() {
                // What lies in between is not known.
                true => (at + 1).max(self.scan.past_end_unknown_to),
                false => at + 1,
            };
            if at == self.cursor {
                self.cursor = next;
            }
            at = next;
            start = at;
        }
        self.fresh.extend(start.up_to(start + count).map(|cluster| (cluster, refcount)));
        for cluster in start.up_to(start + count) {
            self.touch(cluster);
        }
        Ok(start)
    }

    fn is_free(&self, cluster: HostCluster) -> bool {
        let known = cluster < self.layout.clusters() || cluster >= self.scan.past_end_unknown_to;
        known
            && self.scan.counts.get(cluster).total == 0
            && !self.scan.past_end.contains_key(&cluster)
            && !self.held.contains(&cluster)
            && !self.fresh.contains_key(&cluster)
    }

    /// The block of this cluster has to be written anew.
    pub(super) fn touch(&mut self, cluster: HostCluster) {
        let index = self.layout.block_of(cluster);
        if self.rewritten.insert(index) {
            self.queue.push(index);
        }
    }

    /// Blocks that cannot be used go.
    pub(super) fn drop_bad_blocks(&mut self) {
        let size = self.layout.cluster_size();
        for index in 0..self.entries.len() {
            let entry = self.entries[index];
            if entry == 0 || self.good_block(entry) {
                continue;
            }
            self.entries[index] = 0;
            let named = HostOffset(entry & !BLOCK_RESERVED);
            if self.is_counted(entry) {
                self.retire(HostOffset(entry), size, 1);
            } else if self.layout.in_cluster(named) == Bytes::ZERO {
                // Until the header leads to the new table, counts are read from there.
                self.held.insert(named >> self.layout.cluster_bits);
            }
        }
    }

    /// Whether the scan counted this entry as a reference.
    fn is_counted(&self, entry: u64) -> bool {
        entry & BLOCK_RESERVED == 0
            && self.layout.in_cluster(HostOffset(entry)) == Bytes::ZERO
            && HostOffset(entry) >> self.layout.cluster_bits < self.layout.clusters()
    }

    fn good_block(&self, entry: u64) -> bool {
        self.is_counted(entry)
            && self.scan.counts.get(HostOffset(entry) >> self.layout.cluster_bits).total == 1
    }

    /// Keeps the clusters that a block counts and nothing refers to, where entries are damaged that
    /// may have named them. To be called for each block that can be read, before anything is
    /// allocated.
    ///
    /// Errors: `Memory`.
    pub(super) fn keep_leaks(&mut self, index: u64, block: &[u8]) -> Result<(), Stop> {
        if !self.scan.keeps_leaks() {
            return Ok(());
        }
        let order = self.layout.refcount_order;
        let first = self.layout.block_start(index);
        let last = self.layout.clusters().min(self.layout.block_start(index + 1));
        for cluster in first.up_to(last) {
            let stored = refcount::get(block, order, self.layout.in_block(cluster));
            if stored > 0 {
                self.keep(cluster, stored)?;
            }
        }
        Ok(())
    }

    /// As [`keep_leaks`](Plan::keep_leaks) for the clusters whose refcounts cannot be read: any of
    /// them may be what a damaged entry should name.
    ///
    /// Errors: `Memory`.
    pub(super) fn keep_uncovered(&mut self) -> Result<(), Stop> {
        if self.scan.damaged == 0 {
            return Ok(());
        }
        let end = self.layout.clusters();
        for index in 0..end.0.div_ceil(1 << self.layout.block_bits()) {
            if self.entry(index) == 0 {
                let (first, last) =
                    (self.layout.block_start(index), self.layout.block_start(index + 1).min(end));
                for cluster in first.up_to(last) {
                    self.keep(cluster, 1)?;
                }
            }
        }
        Ok(())
    }

    fn keep(&mut self, cluster: HostCluster, refcount: u64) -> Result<(), Stop> {
        let free = self.scan.counts.get(cluster).total == 0
            && !self.held.contains(&cluster)
            && !self.fresh.contains_key(&cluster);
        if free {
            if self.fresh.len() >= KEPT_MAX {
                return Err(Stop::Memory);
            }
            self.fresh.insert(cluster, refcount);
            if self.entry(self.layout.block_of(cluster)) == 0 {
                self.touch(cluster);
            }
        }
        Ok(())
    }

    /// Blocks that can be read: number and host offset, in their order.
    pub(super) fn blocks(&self) -> Vec<(u64, HostOffset)> {
        let entries = self.entries.iter().enumerate();
        let named = entries.filter(|(_, at)| **at != 0);
        named.map(|(index, at)| (index as u64, HostOffset(*at))).collect()
    }

    /// Whether a block says what it should.
    pub(super) fn is_right(&self, index: u64, block: &[u8], scratch: &mut Vec<u8>) -> bool {
        self.fill(index, scratch);
        scratch == block
    }

    /// Every cluster in use needs a block.
    pub(super) fn touch_uncovered(&mut self) {
        let end = self.scan.counts.clusters();
        for region in 0..end.0.div_ceil(REGION_CLUSTERS) {
            if matches!(self.scan.counts.region(region), Region::Empty) {
                continue;
            }
            let mut cluster = HostCluster(region * REGION_CLUSTERS);
            let stop = end.min(cluster + REGION_CLUSTERS);
            while cluster < stop {
                let index = self.layout.block_of(cluster);
                let next = self.layout.block_start(index + 1);
                let known = self.entry(index) != 0 || self.rewritten.contains(&index);
                if !known && cluster.up_to(stop.min(next)).any(|at| self.target(at) > 0) {
                    self.touch(cluster);
                }
                cluster = next;
            }
        }
    }

    fn entry(&self, index: u64) -> u64 {
        usize::try_from(index).ok().and_then(|at| self.entries.get(at)).copied().unwrap_or(0)
    }

    /// Gives every block that is written anew a place, and those that this touches.
    ///
    /// Errors: `Full`.
    pub(super) fn place_blocks(&mut self) -> Result<(), Stop> {
        let size = self.layout.cluster_size();
        while let Some(index) = self.queue.pop() {
            let old = self.entry(index);
            if old != 0 {
                self.retire(HostOffset(old), size, 1);
                self.touch(HostOffset(old) >> self.layout.cluster_bits);
            }
            let place = usize::try_from(index).map_err(|_| Stop::Memory)?;
            if Bytes(place as u64 * 8) >= REFCOUNT_TABLE_BYTES_MAX {
                return Err(Stop::Corrupt(format!(
                    "the image is so long that a refcount table of {REFCOUNT_TABLE_BYTES_MAX} \
                     bytes cannot cover it"
                )));
            }
            if self.entries.len() <= place {
                self.entries.resize(place + 1, 0);
            }
            let cluster = self.allocate(1, 1)?;
            self.entries[place] = (cluster << self.layout.cluster_bits).0;
        }
        Ok(())
    }

    /// Gives the refcount table a place: first cluster and number of clusters.
    ///
    /// Errors: `Full`, `Corrupt` when it would be larger than allowed.
    pub(super) fn place_table(&mut self) -> Result<(HostCluster, u64), Stop> {
        let per_cluster = self.layout.cluster_size() / Bytes(8);
        let max = REFCOUNT_TABLE_BYTES_MAX / self.layout.cluster_size();
        loop {
            let needed = (self.entries.len() as u64).div_ceil(per_cluster);
            if needed > max {
                return Err(Stop::Corrupt(format!(
                    "the refcount table would need more than {REFCOUNT_TABLE_BYTES_MAX} bytes"
                )));
            }
            // Room for half as much again, so that the image can grow.
            let clusters = (needed + needed / 2).clamp(1, max);
            let start = self.allocate(clusters, 1)?;
            self.place_blocks()?;
            if (self.entries.len() as u64).div_ceil(per_cluster) <= clusters {
                return Ok((start, clusters));
            }
            for cluster in start.up_to(start + clusters) {
                self.fresh.remove(&cluster);
            }
        }
    }

    /// What a block has to say.
    pub(super) fn fill(&self, index: u64, block: &mut Vec<u8>) {
        block.clear();
        block.resize(self.layout.cluster_len(), 0);
        let order = self.layout.refcount_order;
        let max = self.layout.refcount_max();
        let (first, last) = (self.layout.block_start(index), self.layout.block_start(index + 1));
        let counts = &self.scan.counts;
        let mut start = first;
        while start < last.min(counts.clusters()) {
            let region = start.0 / REGION_CLUSTERS;
            let stop = last.min(HostCluster((region + 1) * REGION_CLUSTERS));
            if !matches!(counts.region(region), Region::Empty) {
                for cluster in start.up_to(stop) {
                    let total = u64::from(counts.get(cluster).total).min(max);
                    if total > 0 {
                        refcount::set(block, order, self.layout.in_block(cluster), total);
                    }
                }
            }
            start = stop;
        }
        for (cluster, count) in self.fresh.range(first..last) {
            refcount::set(block, order, self.layout.in_block(*cluster), (*count).min(max));
        }
    }

    pub(super) fn scan(&self) -> &Scan {
        self.scan
    }
}
