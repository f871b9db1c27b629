//! Grace periods: tell when no request can use an old mapping any more.
//!
//! A cluster that was unlinked may still be read or written by a request that looked before. Such a
//! request holds a [`Grace`] from before its look-up until its I/O has ended. [`Graces::mark`]
//! names a moment, and [`Graces::passed`] says whether every request that began before it has
//! ended.
//!
//! Promises: entering and leaving are two atomic operations on a cache line that threads do not
//! share (up to [`SHARDS`] threads), no lock, no allocation. No thread waits: the owner of a
//! cluster that is to be reused asks again later.
//!
//! How: requests count themselves under the parity of the epoch that they saw. The epoch moves from
//! e to e + 1 only when no request of e - 1 is left, so at any time only two epochs have requests.
//! A request that saw e looks again after it has counted itself: if the epoch has moved it starts
//! over, so a count is never added to an epoch that was found empty. Both sides need one total
//! order of "count, then look at the epoch" and "move the epoch, then look at the counts", hence
//! SeqCst.

use std::cell::Cell;

use super::sync::{AtomicU64, Ordering};

/// Counters; more threads than that share some.
const SHARDS: usize = 32;

/// One pair of counters on cache lines of its own (two, because CPUs fetch lines in pairs).
#[repr(align(128))]
struct Shard([AtomicU64; 2]);

/// The grace periods of one image.
pub(crate) struct Graces {
    epoch: AtomicU64,
    shards: Box<[Shard]>,
}

/// A request in flight.
#[derive(Debug)]
pub struct Grace<'a> {
    /// `None` for an image that never changes.
    count: Option<&'a AtomicU64>,
}

impl Grace<'_> {
    /// For images that never change.
    pub(crate) fn none() -> Grace<'static> {
        Grace { count: None }
    }
}

impl Drop for Grace<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.count {
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Graces {
    pub(crate) fn new() -> Graces {
        let shard = |_| Shard([AtomicU64::new(0), AtomicU64::new(0)]);
        Graces { epoch: AtomicU64::new(0), shards: (0..SHARDS).map(shard).collect() }
    }

    /// A request begins; it ends when the answer is dropped (on any thread).
    pub(crate) fn enter(&self) -> Grace<'_> {
        let shard = &self.shards[own_shard()];
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let count = &shard.0[usize::from(epoch % 2 == 1)];
            count.fetch_add(1, Ordering::SeqCst);
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return Grace { count: Some(count) };
            }
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// This moment, for [`passed`](Graces::passed).
    pub(crate) fn mark(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Whether every request that had begun before `mark` has ended. Moves the epoch on when it
    /// can.
    pub(crate) fn passed(&self, mark: u64) -> bool {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch >= mark + 2 {
                return true;
            }
            // Of the epochs up to `epoch - 1` only that one may have requests.
            if !self.is_empty(epoch.wrapping_sub(1)) {
                return false;
            }
            if epoch == mark + 1 {
                return true;
            }
            let moved =
                self.epoch.compare_exchange(epoch, epoch + 1, Ordering::SeqCst, Ordering::SeqCst);
            // Another thread may have moved it: look again.
            let _ = moved;
        }
    }

    /// Whether no request of this epoch's parity is in flight.
    fn is_empty(&self, epoch: u64) -> bool {
        let parity = usize::from(epoch % 2 == 1);
        self.shards.iter().all(|shard| shard.0[parity].load(Ordering::SeqCst) == 0)
    }
}

/// The shard of this thread.
fn own_shard() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % SHARDS);
        }
        own.get()
    })
}
