//! The simulated primitives: what `crate::sync` gives, in the types of the model checker.
//!
//! Promises: the same names and signatures as the real ones, so that the source files of the model
//! are built on them unchanged.

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
pub(crate) use shuttle::sync::{Arc, Mutex};

/// As `crate::sync::zeroed_words`. An `Option` as there.
#[allow(clippy::unnecessary_wraps)]
pub(crate) fn zeroed_words(count: usize) -> Option<Box<[AtomicU64]>> {
    Some((0..count).map(|_| AtomicU64::new(0)).collect())
}

/// As `crate::sync::zeroed_bytes`.
#[allow(clippy::unnecessary_wraps)]
pub(crate) fn zeroed_bytes(count: usize) -> Option<Box<[AtomicU8]>> {
    Some((0..count).map(|_| AtomicU8::new(0)).collect())
}

/// As `crate::sync::lock`.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> shuttle::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// As `crate::sync::spin`: lets the other thread run.
pub(crate) fn spin() {
    shuttle::thread::yield_now();
}
