//! Counters of one ring: written by its thread, read by any.
//!
//! Promises: a single writer, so a count is a plain load and store without read-modify-write, and
//! the block has its own cache lines, so that counting touches no shared line.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter with one writing thread.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Ring thread only.
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counters of one ring since its start.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    pub(crate) enters: Counter,
    pub(crate) sqes: Counter,
    pub(crate) cqes: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) polls_paid: Counter,
    pub(crate) naps: Counter,
    pub(crate) polls_missed: Counter,
    pub(crate) queue_full: Counter,
    pub(crate) slots_full: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) fixed: Counter,
}

/// Values of [`Counters`] at one moment; each is a count since the start of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountersSnapshot {
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Submission entries handed to the kernel.
    pub sqes: u64,
    /// Completion entries taken.
    pub cqes: u64,
    /// Enters that were willing to sleep.
    pub sleeps: u64,
    /// Number of polls that found work before their budget ran out.
    pub polls_paid: u64,
    /// Number of timed sleeps in place of polling.
    pub naps: u64,
    /// Number of polls that ended without finding work.
    pub polls_missed: u64,
    /// Submissions forced early because the submission queue was full.
    pub queue_full: u64,
    /// Operations that had to wait for a free slot.
    pub slots_full: u64,
    /// Operations whose future was dropped in flight.
    pub cancelled: u64,
    /// Reads and writes of registered memory, whose pages the kernel did not have to look up.
    pub fixed: u64,
}

impl Counters {
    /// Reads all counters. Any thread; the values are not of one instant.
    pub fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            enters: self.enters.get(),
            sqes: self.sqes.get(),
            cqes: self.cqes.get(),
            sleeps: self.sleeps.get(),
            polls_paid: self.polls_paid.get(),
            naps: self.naps.get(),
            polls_missed: self.polls_missed.get(),
            queue_full: self.queue_full.get(),
            slots_full: self.slots_full.get(),
            cancelled: self.cancelled.get(),
            fixed: self.fixed.get(),
        }
    }
}
