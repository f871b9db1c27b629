//! The synchronisation primitives of `handoff.rs` and `mailbox.rs`.
//!
//! Promises: no panic on poison. The model test (`model/`) builds the same source files on
//! simulated primitives.

pub(crate) use std::sync::{Arc, Mutex};

/// Locks, and goes on after a panic of another holder: nothing under these locks is left half done
/// by one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
