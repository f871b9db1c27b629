//! Simulated primitives in place of `crate::sync`.
//!
//! Promises: the same names and signatures as there, so that the source files of the model are
//! built on them unchanged.

pub(crate) use shuttle::sync::{Arc, Mutex};

/// As the real one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> shuttle::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
