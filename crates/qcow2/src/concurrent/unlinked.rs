//! Host clusters that were unlinked and may not be used again yet.
//!
//! Promises: a cluster leaves here only when its unlink is on stable storage and a grace period has
//! passed since, so neither a crash nor a request that is still in flight can mix it with what is
//! stored there next.

use super::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::units::HostCluster;

/// Reference counts that are to go down by one: first host cluster and number of clusters.
pub(crate) type Unlinked = Vec<(HostCluster, u64)>;

/// The clusters on their way to being free.
#[derive(Default)]
pub(crate) struct UnlinkedClusters {
    state: Mutex<State>,
    /// Whether anything is here; read without the lock.
    busy: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Unlinked in memory.
    fresh: Unlinked,
    /// Unlinked on stable storage, with the moment when that was known.
    durable: Vec<(u64, Unlinked)>,
}

impl UnlinkedClusters {
    /// `count` references to clusters from `start` on, one each, are gone from the tables in
    /// memory. Called after the change of the table.
    pub(crate) fn unlink(&self, start: HostCluster, count: u64) {
        let mut state = lock(&self.state);
        match state.fresh.last_mut() {
            Some((last, length)) if *last + *length == start => *length += count,
            _ => state.fresh.push((start, count)),
        }
        self.busy.store(1, Ordering::Relaxed);
    }

    /// All that is unlinked in memory; what is dirty after this call holds those changes.
    pub(crate) fn take_fresh(&self) -> Unlinked {
        std::mem::take(&mut lock(&self.state).fresh)
    }

    /// Takes back what could not be made durable.
    pub(crate) fn put_back(&self, mut unlinked: Unlinked) {
        let mut state = lock(&self.state);
        state.fresh.append(&mut unlinked);
        self.busy.store(1, Ordering::Relaxed);
    }

    /// The unlinks are on stable storage.
    ///
    /// * `mark`: this moment, of [`Graces`](super::grace::Graces).
    pub(crate) fn durable(&self, mark: u64, unlinked: Unlinked) {
        if !unlinked.is_empty() {
            lock(&self.state).durable.push((mark, unlinked));
        }
    }

    /// Takes the clusters that no request can be using any more.
    pub(crate) fn take_passed(&self, passed: impl Fn(u64) -> bool) -> Unlinked {
        let mut state = lock(&self.state);
        let mut done = Vec::new();
        state.durable.retain_mut(|(mark, unlinked)| {
            let over = passed(*mark);
            if over {
                done.append(unlinked);
            }
            !over
        });
        if state.durable.is_empty() && state.fresh.is_empty() {
            self.busy.store(0, Ordering::Relaxed);
        }
        done
    }

    /// Takes back what [`UnlinkedClusters::take_passed`] gave.
    #[cfg_attr(test, allow(dead_code))] // Threads of the model end no ring in the middle.
    pub(crate) fn put_back_passed(&self, unlinked: Unlinked) {
        if !unlinked.is_empty() {
            // A mark of before the first request: it has passed for every later one.
            lock(&self.state).durable.push((0, unlinked));
            self.busy.store(1, Ordering::Relaxed);
        }
    }

    /// Whether clusters wait here whose unlinking is not on stable storage.
    pub(crate) fn has_fresh(&self) -> bool {
        !lock(&self.state).fresh.is_empty()
    }

    /// Whether clusters wait here. No lock; may be outdated.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) != 0
    }
}
