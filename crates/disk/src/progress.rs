//! Progress of a long operation, and its cancellation.
//!
//! Promises: three atomics, so any thread may look or cancel at any time; nothing here locks,
//! allocates or blocks. The operation calls [`Progress::check`] between two steps, so a cancelled
//! operation ends after the present step, and leaves every image as sound as before.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringdisk_ring::Errno;

/// Progress of one operation. Shared in an `Arc` with the threads that show or cancel it.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
}

impl Progress {
    /// Nothing done of nothing.
    pub fn new() -> Progress {
        Progress::default()
    }

    /// Finished work, bytes; at most [`Progress::total`] once the total is known.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Total work, bytes; may grow while clients write. 0: not known yet.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Finished part, 0.0 to 1.0; 0.0 while the total is not known.
    #[allow(clippy::cast_precision_loss)] // Shown to people.
    pub fn fraction(&self) -> f64 {
        match self.total() {
            0 => 0.0,
            total => (self.done() as f64 / total as f64).min(1.0),
        }
    }

    /// Cancels the operation. For any thread, also from a signal handler.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Called between two steps of the operation. Errors: `ECANCELED` when it was cancelled.
    pub fn check(&self) -> Result<(), Errno> {
        if self.is_cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Sets the total work, bytes.
    pub fn set_total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// Adds to the total work, bytes.
    pub fn add_total(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds to the finished work, bytes.
    pub fn add_done(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sets the finished work, bytes.
    pub fn set_done(&self, bytes: u64) {
        self.done.store(bytes, Ordering::Relaxed);
    }

    /// Marks all work as finished.
    pub fn finish(&self) {
        self.set_done(self.total());
    }
}
