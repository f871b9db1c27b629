//! Where the buffers of a queue thread are, for `ringdisk topology`.
//!
//! Promises: a buffer is added once, when it is made, so no request takes the lock. Control path.

use std::sync::{Mutex, PoisonError};

/// Addresses and bytes of the buffers of one thread, which it adds itself.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<(usize, usize)>>);

impl Buffers {
    /// Adds a buffer. Any thread, once for each buffer.
    pub(crate) fn add(&self, start: usize, len_bytes: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((start, len_bytes));
    }

    /// All that were added.
    pub(crate) fn all(&self) -> Vec<(usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
