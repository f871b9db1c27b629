//! The synchronisation primitives of `shards.rs`.
//!
//! Promises: none of these functions panics on poison. The model test (`model/`) builds the same
//! source file on simulated primitives.

pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
pub(crate) use std::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use std::sync::{MutexGuard, PoisonError, TryLockError};

/// Locks, and goes on after a panic of another holder: nothing under these locks is left half done
/// by one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A read guard, unless a writer holds the lock. Never waits.
pub(crate) fn try_read<T>(lock: &RwLock<T>) -> Option<RwLockReadGuard<'_, T>> {
    match lock.try_read() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A write guard, unless a reader or writer holds the lock. Never waits.
pub(crate) fn try_write<T>(lock: &RwLock<T>) -> Option<RwLockWriteGuard<'_, T>> {
    match lock.try_write() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
