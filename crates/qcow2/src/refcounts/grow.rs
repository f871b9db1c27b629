//! New refcount blocks, and a larger refcount table.
//!
//! Promises: a place is marked as metadata before anything is written there. Where a new block
//! lies: the block of the clusters at the end of the file covers itself, as its first cluster.
//! Another one (a long run that reaches over several blocks, or storage that cannot grow) lies in a
//! free cluster that an existing block covers, so that long runs can be adjacent even where a block
//! covers few clusters.

use super::{Blocked, Refcounts, Run};
use crate::units::{HostCluster, HostOffset};

/// Free runs that one search for a place tries.
const TRIED_RUNS_MAX: usize = 64;

impl Refcounts {
    /// Reserves a host cluster for a new block. The caller writes a cluster of zeroes there and
    /// calls [`finish_block`](Refcounts::finish_block), or [`abort_block`](Refcounts::abort_block).
    /// One at a time for each index.
    ///
    /// Errors: `Load` when there is a block by now; `Full`; `Corrupt`.
    pub(crate) fn begin_block(&mut self, index: u32) -> Result<HostCluster, Blocked> {
        if self.block_offset(index).is_some() {
            return Err(Blocked::Load(index));
        }
        if u64::from(index) >= Refcounts::table_entries_max() {
            return Err(Blocked::Full);
        }
        let first = self.block_start(index.into());
        let past = first.saturating_add(1 << self.block_bits).min(self.limit);
        let covers_end = self.can_grow && (first..past).contains(&self.end);
        if !covers_end {
            match self.place_elsewhere() {
                Ok(Some(cluster)) => return Ok(cluster),
                Err(Blocked::Corrupt(reason)) => return Err(Blocked::Corrupt(reason)),
                // Not worth a detour: it can cover itself.
                Ok(None) | Err(_) => {}
            }
        }
        let cluster = if covers_end { self.end } else { first };
        // Nothing has a count in there; what is marked or held is in use all the same.
        let cluster = cluster
            .up_to(past)
            .find(|cluster| {
                !self.is_metadata(*cluster)
                    && self.held.at(*cluster).is_none()
                    && self.named.first_in(*cluster, 1).is_none()
            })
            .ok_or(Blocked::Full)?;
        self.free.remove(cluster, 1);
        self.held.insert(Run::new(cluster, 1));
        self.mark_metadata(cluster, 1);
        if cluster >= self.end {
            self.reach(cluster, 1);
        }
        Ok(cluster)
    }

    /// A cluster for a block that an existing block covers, counted there already; `None` when
    /// there is none at hand.
    fn place_elsewhere(&mut self) -> Result<Option<HostCluster>, Blocked> {
        let at_hand = self.free.iter().take(TRIED_RUNS_MAX).map(|run| run.start).find(|cluster| {
            let (index, _) = self.place(*cluster);
            matches!(self.cached_block(index), Ok(Some(_))) && !self.is_metadata(*cluster)
        });
        if let Some(cluster) = at_hand {
            return self.allocate_marked(cluster).map(Some);
        }
        if self.can_grow {
            return self.allocate_marked(self.end).map(Some);
        }
        Ok(None)
    }

    /// Takes a cluster and marks it before anything is written there.
    fn allocate_marked(&mut self, goal: HostCluster) -> Result<HostCluster, Blocked> {
        let run = self.allocate(1, Some(goal), true)?;
        self.mark_metadata(run.start, 1);
        Ok(run.start)
    }

    /// A new block was written as zeroes at `cluster`, which
    /// [`begin_block`](Refcounts::begin_block) gave. The table in memory names it from now on.
    pub(crate) fn finish_block(&mut self, index: u32, cluster: HostCluster) {
        if self.block_offset(index).is_some() {
            self.abort_block(index, cluster);
            return;
        }
        let slot = index as usize;
        if slot >= self.table.len() {
            self.table.resize(slot + 1, HostOffset(0));
            self.blocks.resize_with(slot + 1, || None);
        }
        self.table[slot] = cluster << self.cluster_bits;
        self.dirty_entries.push(index);
        self.mark_metadata(cluster, 1);
        let bytes = vec![0; 1 << self.cluster_bits].into_boxed_slice();
        self.keep(index, bytes, true);
        // Makes the block dirty also when it does not cover itself.
        self.edit(u64::from(index), 0..1, |_| ());
        if self.held.at(cluster).is_some() {
            self.held.remove(cluster, 1);
            self.change(cluster, 1, |_| 1);
        }
    }

    /// The block with this index, which is in memory, lies at `cluster` from now on, and is written
    /// there as a whole. Returns its old cluster, which is still counted and marked.
    pub(crate) fn move_block(&mut self, index: u32, cluster: HostCluster) -> Option<HostCluster> {
        let old = self.block_offset(index)?;
        self.table[index as usize] = cluster << self.cluster_bits;
        self.dirty_entries.push(index);
        self.mark_metadata(cluster, 1);
        self.write_whole(index);
        Some(old >> self.cluster_bits)
    }

    /// Takes the block with this index out of the table if it counts nothing but perhaps itself.
    /// Returns its cluster, and whether another block still counts that.
    ///
    /// Errors: `Load`.
    pub(crate) fn drop_block(
        &mut self,
        index: u32,
    ) -> Result<Option<(HostCluster, bool)>, Blocked> {
        let Some(offset) = self.block_offset(index) else { return Ok(None) };
        let cluster = offset >> self.cluster_bits;
        let Some(block) = self.cached_block(u64::from(index))? else { return Ok(None) };
        let (covering, own) = self.place(cluster);
        let covers_itself = covering == u64::from(index);
        let entries = 1 << self.block_bits;
        let first = self.width.next_used(&block.bytes, 0, entries);
        let behind = if covers_itself && first == own {
            self.width.next_used(&block.bytes, first + 1, entries)
        } else {
            first
        };
        if behind < entries {
            return Ok(None);
        }
        self.table[index as usize] = HostOffset(0);
        self.blocks[index as usize] = None;
        self.cached -= 1;
        self.dirty_entries.push(index);
        self.unmark_metadata(cluster, 1);
        if covers_itself {
            self.held.insert(Run::new(cluster, 1));
        }
        Ok(Some((cluster, !covers_itself)))
    }

    /// A new block is not wanted any more, or could not be written.
    pub(crate) fn abort_block(&mut self, _index: u32, cluster: HostCluster) {
        self.unmark_metadata(cluster, 1);
        if self.held.at(cluster).is_some() {
            self.release(Run::new(cluster, 1));
        } else {
            self.give_back(cluster, 1, false);
        }
    }

    /// Where the table lies on disk, or will lie.
    pub(crate) fn table_run(&self) -> Run {
        self.table_run
    }

    /// Clusters that a table needs which holds all blocks, when the one on disk is too short. The
    /// caller allocates that many adjacent ones, asks again (the allocation may have made more
    /// blocks), and calls [`move_table`](Refcounts::move_table).
    pub(crate) fn table_wants(&self) -> Option<u64> {
        if self.table.len() <= self.table_capacity() {
            return None;
        }
        let cluster_size = 1u64 << self.cluster_bits;
        // Half as much again, so that it does not move for each block.
        let entries = (self.table.len() as u64 + self.table.len() as u64 / 2)
            .min(Refcounts::table_entries_max());
        Some((entries * 8).div_ceil(cluster_size))
    }

    /// The table lies at `start` from now on, which the caller has allocated;
    /// [`take_dirty`](Refcounts::take_dirty) gives all of it. Returns a place that it was to move
    /// to before: the caller frees it once the move is on stable storage (an attempt that failed
    /// may have named it).
    #[must_use]
    pub(crate) fn move_table(&mut self, start: HostCluster, clusters: u64) -> Option<Run> {
        let old = std::mem::replace(&mut self.table_run, Run::new(start, clusters));
        self.mark_metadata(start, clusters);
        let skipped = self.moved_from.is_some().then_some(old);
        self.moved_from.get_or_insert(old);
        if self.table.len() < self.table_capacity() {
            let capacity = self.table_capacity();
            self.table.resize(capacity, HostOffset(0));
            self.blocks.resize_with(capacity, || None);
        }
        skipped
    }
}
