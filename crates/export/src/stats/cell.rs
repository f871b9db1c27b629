//! One counter while its queue thread writes it.
//!
//! Promises: one writer, so plain loads and stores are enough. Any thread may read.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Cell(AtomicU64);

impl Cell {
    /// Adds `n`. The writing thread only.
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed) + n, Relaxed);
    }

    /// Sets it. The writing thread only.
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Reads it. Any thread.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
