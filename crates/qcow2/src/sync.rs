//! Atomics and locks, in one place.
//!
//! Promises: code that threads share takes its primitives from here alone, so that the model test
//! (`model/`) can build the same source files on simulated ones.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use zerocopy::FromZeros;

/// `count` zeroed words, straight from the allocator: pages that are never touched take no memory.
/// `None` when the allocator refuses.
pub(crate) fn zeroed_words(count: usize) -> Option<Box<[AtomicU64]>> {
    <[AtomicU64]>::new_box_zeroed_with_elems(count).ok()
}

/// As [`zeroed_words`], for bytes.
pub(crate) fn zeroed_bytes(count: usize) -> Option<Box<[AtomicU8]>> {
    <[AtomicU8]>::new_box_zeroed_with_elems(count).ok()
}

/// Locks, and goes on after a panic of another holder: nothing under these locks is left half done
/// by one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits a moment for another thread that is in the middle of a few stores.
pub(crate) fn spin() {
    std::hint::spin_loop();
}
