//! Waiting for locks of images that another process still holds: one that was killed a moment ago,
//! or the source of a migration.
//!
//! Promises: a waiting task holds none of the locks, so it hinders no other process; the wait ends
//! in time, and its error names the process that has the lock. A waiting task blocks no thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, OpenOptions, Storage};

use super::of_storage;
use crate::{Error, ErrorKind};

/// How often a lock is tried: a disk serves no request while it moves.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A wait for locks, with its timeout.
#[derive(Debug)]
pub(crate) struct LockWait {
    whole: Duration,
    end: Option<Instant>,
    /// The caller was dropped.
    is_over: Arc<AtomicBool>,
}

/// Ends the wait of a task when its caller is dropped.
#[derive(Debug)]
pub(crate) struct EndOfWait(Arc<AtomicBool>);

impl Drop for EndOfWait {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl LockWait {
    /// A wait that begins now.
    pub(crate) fn new(whole: Duration) -> LockWait {
        // A time that overflows never comes.
        LockWait { whole, end: Instant::now().checked_add(whole), is_over: Arc::default() }
    }

    /// A guard whose drop ends the wait early.
    pub(crate) fn end_early(&self) -> EndOfWait {
        EndOfWait(Arc::clone(&self.is_over))
    }

    /// Waits for one interval. False: the time is up.
    async fn pause(&self, ring: &Ring) -> bool {
        let left =
            self.end.map_or(RETRY_INTERVAL, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() || self.is_over.load(Ordering::Acquire) {
            return false;
        }
        ring.sleep(left.min(RETRY_INTERVAL)).await;
        !self.is_over.load(Ordering::Acquire)
    }

    /// Adds to an error that this process waited.
    fn explain(&self, error: Error) -> Error {
        if self.whole.is_zero() {
            return error;
        }
        error.context(format!("waited {:?} for the lock", self.whole))
    }
}

/// Opens a descriptor as storage, and waits for its lock.
///
/// Errors: as [`Storage::from_fd`].
pub(super) async fn open_waiting(
    ring: &Ring,
    fd: OwnedFd,
    name: &str,
    options: &OpenOptions,
    wait: &LockWait,
) -> Result<Arc<Storage>, Error> {
    // Only the kind and the alignment of the file are read before it is locked.
    let unlocked = OpenOptions { lock: Lock::None, ..options.clone() };
    let storage = Storage::from_fd(fd, name, &unlocked).map_err(|error| of_storage(&error))?;
    let storages = [Arc::new(storage)];
    lock_all(ring, &storages, options.lock, Lock::None, wait).await?;
    let [storage] = storages;
    let failed = |errno| Error::os(format!("cannot find the length of '{name}'"), errno);
    let asked = Arc::clone(&storage);
    ring.offload(move || asked.refresh_len()).await.map_err(failed)?;
    Ok(storage)
}

/// Takes the locks of all files, or of none.
///
/// * `without`: the lock that they return to when not all can be taken.
///
/// Errors: `Locked` when the time is up; `Cancelled`.
pub(crate) async fn lock_all(
    ring: &Ring,
    storages: &[Arc<Storage>],
    lock: Lock,
    without: Lock,
    wait: &LockWait,
) -> Result<(), Error> {
    loop {
        // First a test that takes nothing: two waiting processes would otherwise refuse each other,
        // and refuse a third one that is about to take the lock.
        if storages.iter().all(|storage| storage.may_lock(lock))
            && try_all(storages, lock, without).is_ok()
        {
            return Ok(());
        }
        if !wait.pause(ring).await {
            if wait.is_over.load(Ordering::Acquire) {
                // No caller would use the locks.
                return Err(Error::new(ErrorKind::Cancelled, "nobody waits for the disk any more"));
            }
            // Once more, for the reason in the error.
            let tried = try_all(storages, lock, without);
            return tried.map_err(|error| wait.explain(error));
        }
    }
}

fn try_all(storages: &[Arc<Storage>], lock: Lock, without: Lock) -> Result<(), Error> {
    for (index, storage) in storages.iter().enumerate() {
        if let Err(error) = storage.set_lock(lock) {
            give_back(&storages[..index], without);
            return Err(of_storage(&error));
        }
    }
    Ok(())
}

/// Lowers the locks of files. Only a process with an exclusive lock can refuse a lower lock, and
/// then no lock is kept.
pub(crate) fn give_back(storages: &[Arc<Storage>], lock: Lock) {
    for storage in storages {
        if storage.set_lock(lock).is_err() {
            let _ = storage.set_lock(Lock::None);
        }
    }
}
