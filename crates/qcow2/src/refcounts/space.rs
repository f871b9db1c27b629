//! Sets of host clusters as runs: free space, clusters on hold, metadata.
//!
//! Promises: adjacent runs merge; each operation costs a look-up in a balanced tree. Taking
//! clusters from the front of a run changes it in place, without an allocation. Pure memory.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use super::Run;
use crate::units::HostCluster;

/// Runs that one search for a larger run tries.
const TRIED_RUNS_MAX: usize = 256;

/// A set of clusters.
#[derive(Clone, Debug)]
pub(super) struct RunSet {
    /// Runs by their end (the first cluster behind them), so that taking from the front leaves the
    /// key as it is.
    runs: BTreeMap<HostCluster, Span>,
    /// Runs by the logarithm of their length: whether a search can find anything at all.
    classes: [u32; 64],
    /// End of the run at which the next search begins.
    rover: HostCluster,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    start: HostCluster,
    zeroed: bool,
}

impl RunSet {
    pub(super) fn new() -> RunSet {
        RunSet { runs: BTreeMap::new(), classes: [0; 64], rover: HostCluster(0) }
    }

    /// Runs in the set.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    fn count_class(&mut self, len: u64, up: bool) {
        let class = &mut self.classes[len.max(1).ilog2() as usize];
        *class = if up { class.saturating_add(1) } else { class.saturating_sub(1) };
    }

    fn put(&mut self, end: HostCluster, span: Span) {
        self.count_class(end - span.start, true);
        self.runs.insert(end, span);
    }

    fn drop_run(&mut self, end: HostCluster) {
        if let Some(span) = self.runs.remove(&end) {
            self.count_class(end - span.start, false);
        }
    }

    /// The run with the smallest end behind `cluster`.
    fn behind(&self, cluster: HostCluster) -> Option<(HostCluster, Span)> {
        let (end, span) = self.runs.range((Excluded(cluster), Unbounded)).next()?;
        Some((*end, *span))
    }

    /// The rest of the run that `cluster` is in, from `cluster` on.
    pub(super) fn at(&self, cluster: HostCluster) -> Option<Run> {
        let (end, span) = self.behind(cluster)?;
        (span.start <= cluster).then(|| Run {
            start: cluster,
            count: end - cluster,
            zeroed: span.zeroed,
        })
    }

    /// The first cluster of `start..start + count` that is in the set.
    pub(super) fn first_in(&self, start: HostCluster, count: u64) -> Option<HostCluster> {
        let (_, span) = self.behind(start)?;
        let first = span.start.max(start);
        (first < start.saturating_add(count)).then_some(first)
    }

    /// The run with the lowest clusters.
    pub(super) fn first(&self) -> Option<Run> {
        let (end, span) = self.runs.first_key_value()?;
        Some(Run { start: span.start, count: *end - span.start, zeroed: span.zeroed })
    }

    /// All runs, lowest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().map(|(end, span)| Run {
            start: span.start,
            count: *end - span.start,
            zeroed: span.zeroed,
        })
    }

    /// A run of at least `count` clusters: the first one for a single cluster, else the next one
    /// past the last that was found. Tries a bounded number of runs unless `all`.
    pub(super) fn fit(&mut self, count: u64, all: bool) -> Option<Run> {
        let class = count.max(1).ilog2() as usize;
        if self.classes[class..].iter().all(|runs| *runs == 0) {
            return None;
        }
        if count <= 1 {
            return self.first();
        }
        let tries = if all { usize::MAX } else { TRIED_RUNS_MAX };
        let rover = self.rover;
        let from_rover = self.runs.range(rover..);
        let from_start = self.runs.range(..rover);
        let mut seen = rover;
        let mut found = None;
        for (end, span) in from_rover.chain(from_start).take(tries) {
            seen = *end;
            if *end - span.start >= count {
                found =
                    Some(Run { start: span.start, count: *end - span.start, zeroed: span.zeroed });
                break;
            }
        }
        self.rover = seen;
        found
    }

    /// Adds clusters; those that are in the set already stay there once. Merges with neighbours:
    /// the run is `zeroed` only when all parts are.
    pub(super) fn insert(&mut self, run: Run) {
        if run.count == 0 {
            return;
        }
        let mut start = run.start;
        let mut end = run.start + run.count;
        let mut zeroed = run.zeroed;
        // Everything that overlaps or touches.
        while let Some((other_end, span)) = self.runs.range(start..).next().map(|(e, s)| (*e, *s))
            && span.start <= end
        {
            self.drop_run(other_end);
            start = start.min(span.start);
            end = end.max(other_end);
            zeroed &= span.zeroed;
        }
        self.put(end, Span { start, zeroed });
    }

    /// Takes clusters out; those that are not in the set are ignored.
    pub(super) fn remove(&mut self, start: HostCluster, count: u64) {
        let end = start.saturating_add(count);
        while let Some((other_end, span)) = self.behind(start)
            && span.start < end
        {
            if span.start >= start && end < other_end {
                // The front of a run: in place.
                if let Some(entry) = self.runs.get_mut(&other_end) {
                    entry.start = end;
                }
                self.count_class(other_end - span.start, false);
                self.count_class(other_end - end, true);
                return;
            }
            self.drop_run(other_end);
            if span.start < start {
                self.put(start, span);
            }
            if end < other_end {
                self.put(other_end, Span { start: end, zeroed: span.zeroed });
            }
        }
    }
}
