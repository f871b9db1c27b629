//! The primitives that threads share, in one place: the model test (`model/`) builds the same
//! source files on simulated ones.

pub(crate) use std::sync::{Arc, Mutex};

/// Locks, and goes on after a panic of another holder: nothing under these locks is left half done
/// by one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
