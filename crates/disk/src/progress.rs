//! How far a long operation is, and the way to end it early.
//!
//! Promises: three atomics, so any thread may look or cancel at any time; nothing here locks,
//! allocates or blocks. The operation itself looks at [`Progress::check`] between two steps, so a
//! cancelled one ends after the step that is under way, with every image as sound as it found it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringdisk_ring::Errno;

/// Progress of one operation. Shared in an `Arc` with whoever shows or cancels it.
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

    /// Work that is done, bytes; at most [`Progress::total`] once the total is known.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Work that there is, bytes; may grow while clients make more. 0: not known yet.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Part that is done, 0.0 to 1.0; 0.0 while the total is not known.
    #[allow(clippy::cast_precision_loss)] // Shown to people.
    pub fn fraction(&self) -> f64 {
        match self.total() {
            0 => 0.0,
            total => (self.done() as f64 / total as f64).min(1.0),
        }
    }

    /// Asks the operation to end early. Any thread, also a signal handler's.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked to end early.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Between two steps of the operation. Errors: `ECANCELED` when it was asked to end.
    pub fn check(&self) -> Result<(), Errno> {
        if self.is_cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Sets the work that there is, bytes.
    pub fn set_total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// More work came, bytes.
    pub fn add_total(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// More work is done, bytes.
    pub fn add_done(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sets the work that is done, bytes.
    pub fn set_done(&self, bytes: u64) {
        self.done.store(bytes, Ordering::Relaxed);
    }

    /// All is done.
    pub fn finish(&self) {
        self.set_done(self.total());
    }
}
