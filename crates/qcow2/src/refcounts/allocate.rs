//! Finding free clusters.
//!
//! Promises: an allocation searches the rest of one refcount block at most, unless the storage
//! cannot grow. The order: the place that the caller asks for; a known free run; a run that the
//! search of one block finds; the end of the file. Where the storage cannot grow: a shorter run,
//! and a search of all blocks.

use super::space::RunSet;
use super::{Blocked, Refcounts, Run};
use crate::limits::FREE_RUNS_MAX;
use crate::units::HostCluster;

impl Refcounts {
    /// Allocates up to `count` adjacent clusters, at least one: their counts go from 0 to 1.
    ///
    /// * `goal`: cluster at which the run should start if that is free.
    /// * `contiguous`: exactly `count`, or nothing.
    ///
    /// Errors: `Load`, `Create`, `Full`; `Corrupt` when a free cluster is marked as metadata or an
    /// L2 entry names it.
    pub(crate) fn allocate(
        &mut self,
        count: u64,
        goal: Option<HostCluster>,
        contiguous: bool,
    ) -> Result<Run, Blocked> {
        let count = count.max(1);
        if let Some(goal) = goal {
            if let Some(run) = self.free.at(goal)
                && (!contiguous || run.count >= count)
            {
                return self.take(run, count, contiguous);
            }
            if self.can_grow && goal == self.end {
                return self.take_end(count, contiguous);
            }
        }
        if let Some(run) = self.free.fit(count, false) {
            return self.take(run, count, contiguous);
        }
        if self.scan()?
            && let Some(run) = self.free.fit(count, false)
        {
            return self.take(run, count, contiguous);
        }
        if self.can_grow {
            return self.take_end(count, contiguous);
        }
        loop {
            if let Some(run) = self.free.fit(count, true) {
                return self.take(run, count, contiguous);
            }
            if !contiguous && let Some(run) = self.free.first() {
                return self.take(run, count, false);
            }
            if self.free.len() >= FREE_RUNS_MAX {
                // None of them is long enough: forgotten until this search is over.
                self.free = RunSet::new();
                self.forgotten = true;
            }
            if !self.scan()? {
                return Err(Blocked::Full);
            }
        }
    }

    /// Searches the rest of the block at the cursor. `false`: there was nothing left to search, or
    /// too many runs are known already.
    ///
    /// Errors: `Load`.
    pub(super) fn scan(&mut self) -> Result<bool, Blocked> {
        if self.cursor >= self.end {
            if std::mem::take(&mut self.forgotten) {
                self.cursor = HostCluster(0);
            }
            return Ok(false);
        }
        if self.free.len() >= FREE_RUNS_MAX {
            return Ok(false);
        }
        let (index, entry) = self.place(self.cursor);
        let block_start = self.block_start(index);
        let block_end = (block_start + (1 << self.block_bits)).min(self.end);
        let mut found: Vec<Run> = Vec::new();
        match self.cached_block(index)? {
            None => found.push(Run::new(self.cursor, block_end - self.cursor)),
            Some(block) => {
                // Inside one block.
                #[allow(clippy::cast_possible_truncation)]
                let to = (block_end - block_start) as usize;
                let mut at = entry;
                while at < to {
                    let start = self.width.next_zero(&block.bytes, at, to);
                    at = self.width.next_used(&block.bytes, start, to);
                    if at > start {
                        let (start, at) = (start as u64, at as u64);
                        let count = at - start;
                        found.push(Run::new(block_start + start, count));
                    }
                }
            }
        }
        for run in found {
            self.add_unheld(run);
        }
        self.cursor = block_end;
        Ok(true)
    }

    /// Adds what is neither held nor known already.
    fn add_unheld(&mut self, run: Run) {
        let mut start = run.start;
        while start < run.end() {
            let left = run.end() - start;
            let held = self.held.first_in(start, left).unwrap_or(run.end());
            let known = self.free.first_in(start, left).unwrap_or(run.end());
            let stop = held.min(known);
            self.free.insert(Run::new(start, stop - start));
            let skip = |run: Option<Run>| run.map_or(0, |run| run.count);
            let behind = skip(self.held.at(stop)).max(skip(self.free.at(stop)));
            start = stop + if stop < run.end() { behind.max(1) } else { 0 };
        }
    }

    /// Allocates from the front of a free run.
    fn take(&mut self, run: Run, count: u64, contiguous: bool) -> Result<Run, Blocked> {
        let count = self.usable(run.start, count.min(run.count), contiguous)?;
        let used = |_, cluster: HostCluster| {
            Blocked::Corrupt(format!("host cluster {cluster} was free and has a refcount now"))
        };
        self.each_entry(run.start, count, |value, cluster| {
            if value == 0 { Ok(()) } else { Err(used(value, cluster)) }
        })?;
        self.refuse_named(run.start, count)?;
        self.change(run.start, count, |_| 1);
        self.free.remove(run.start, count);
        Ok(Run { start: run.start, count, zeroed: run.zeroed })
    }

    /// Allocates at the end of the file.
    fn take_end(&mut self, count: u64, contiguous: bool) -> Result<Run, Blocked> {
        loop {
            let start = self.end;
            let count = count.min(self.limit.saturating_sub(start));
            if count == 0 {
                return Err(Blocked::Full);
            }
            let count = self.usable(start, count, contiguous)?;
            let free = self.free_from(start, count);
            // A cluster past the end of the file that a wrong entry names has no content, and gets
            // none: it stays a hole.
            let free = self.named.first_in(start, free).map_or(free, |named| named - start);
            if free == 0 || (contiguous && free < count) {
                // Clusters past the end are counted or named already: leave them out.
                self.skip_to(start + free + 1);
                self.free.insert(Run { start, count: free, zeroed: self.end_zeroed });
                continue;
            }
            self.change(start, free, |_| 1);
            self.skip_to(start + free);
            return Ok(Run { start, count: free, zeroed: self.end_zeroed });
        }
    }

    /// Moves the end to where everything before is known.
    fn skip_to(&mut self, end: HostCluster) {
        if self.cursor >= self.end {
            self.cursor = end;
        }
        self.end = end;
    }

    /// For clusters whose counts are 0, before they are taken. Errors: `Corrupt` when an L2 entry
    /// names one of them.
    fn refuse_named(&self, start: HostCluster, count: u64) -> Result<(), Blocked> {
        match self.named.first_in(start, count) {
            None => Ok(()),
            Some(cluster) => Err(Blocked::Corrupt(format!(
                "an L2 entry names host cluster {cluster}, but its refcount is 0"
            ))),
        }
    }

    /// How many of the clusters have their blocks in memory: all of them when `contiguous`.
    ///
    /// Errors: `Load`, `Create`, `Full` when that is none; `Corrupt` when metadata lies there.
    fn usable(&self, start: HostCluster, count: u64, contiguous: bool) -> Result<u64, Blocked> {
        if let Some(cluster) = self.metadata.first_in(start, count) {
            return Err(Blocked::Corrupt(format!(
                "host cluster {cluster} holds metadata that is in use, but its refcount is 0"
            )));
        }
        let end = start + count;
        let mut cluster = start;
        while cluster < end {
            let (index, _) = self.place(cluster);
            let blocked = match self.cached_block(index) {
                Ok(Some(_)) => None,
                Ok(None) => Some(self.missing(index)),
                Err(blocked) => Some(blocked),
            };
            match blocked {
                Some(_) if cluster > start && !contiguous => return Ok(cluster - start),
                Some(blocked) => return Err(blocked),
                None => cluster = self.block_start(index + 1),
            }
        }
        Ok(count)
    }

    /// How many clusters from `start` on have a count of 0, up to `count`. All blocks are there.
    pub(super) fn free_from(&self, start: HostCluster, count: u64) -> u64 {
        let mut free = 0;
        while free < count {
            let (index, entry) = self.place(start + free);
            let Ok(Some(block)) = self.cached_block(index) else { break };
            let here = (count - free).min((1 << self.block_bits) - entry as u64);
            // Inside one block.
            #[allow(clippy::cast_possible_truncation)]
            let to = entry + here as usize;
            let at = self.width.next_used(&block.bytes, entry, to);
            free += (at - entry) as u64;
            if at < to {
                break;
            }
        }
        free
    }
}
