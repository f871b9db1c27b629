//! Waiting for locks that somebody else still has: of a process that was killed a moment ago, or of
//! the source of a migration.
//!
//! Promises: while it waits it holds nothing of what it waits for, so it is in nobody's way; it
//! ends in time, and says then who has the lock. A waiting task blocks no thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, OpenOptions, Storage};

use super::of_storage;
use crate::{Error, ErrorKind};

/// How often a lock is looked at: a disk that moves stands still meanwhile.
const LOOK: Duration = Duration::from_millis(10);

/// How long somebody waits.
#[derive(Debug)]
pub(crate) struct Patience {
    whole: Duration,
    end: Option<Instant>,
    /// The caller has gone away.
    is_over: Arc<AtomicBool>,
}

/// Ends the wait of a task when its caller goes away.
#[derive(Debug)]
pub(crate) struct EndOfPatience(Arc<AtomicBool>);

impl Drop for EndOfPatience {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Patience {
    /// From now on.
    pub(crate) fn new(whole: Duration) -> Patience {
        // A time that cannot be said never comes.
        Patience { whole, end: Instant::now().checked_add(whole), is_over: Arc::default() }
    }

    /// What ends it early.
    pub(crate) fn end_early(&self) -> EndOfPatience {
        EndOfPatience(Arc::clone(&self.is_over))
    }

    /// Waits a little. False: the time is up.
    async fn wait(&self, ring: &Ring) -> bool {
        let left = self.end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() || self.is_over.load(Ordering::Acquire) {
            return false;
        }
        ring.sleep(left.min(LOOK)).await;
        !self.is_over.load(Ordering::Acquire)
    }

    /// Says that it was waited.
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
    patience: &Patience,
) -> Result<Arc<Storage>, Error> {
    // Nothing of the file but its kind and its alignment is looked at before it is locked.
    let unlocked = OpenOptions { lock: Lock::None, ..options.clone() };
    let storage = Storage::from_fd(fd, name, &unlocked).map_err(|error| of_storage(&error))?;
    let storages = [Arc::new(storage)];
    lock_all(ring, &storages, options.lock, Lock::None, patience).await?;
    let [storage] = storages;
    let failed = |errno| Error::os(format!("cannot find the length of '{name}'"), errno);
    let asked = Arc::clone(&storage);
    ring.offload(move || asked.refresh_len()).await.map_err(failed)?;
    Ok(storage)
}

/// Takes the locks of all files, or of none.
///
/// * `without`: what they go back to where not all can be had.
///
/// Errors: `Locked` when the time is up; `Cancelled`.
pub(crate) async fn lock_all(
    ring: &Ring,
    storages: &[Arc<Storage>],
    lock: Lock,
    without: Lock,
    patience: &Patience,
) -> Result<(), Error> {
    loop {
        // First without taking anything: two that wait for the same lock would refuse each other,
        // and one who is about to take it would be refused by us.
        if storages.iter().all(|storage| storage.may_lock(lock))
            && try_all(storages, lock, without).is_ok()
        {
            return Ok(());
        }
        if !patience.wait(ring).await {
            if patience.is_over.load(Ordering::Acquire) {
                // Nobody would use what could be had now.
                return Err(Error::new(ErrorKind::Cancelled, "nobody waits for the disk any more"));
            }
            // Once more, for the reason.
            let tried = try_all(storages, lock, without);
            return tried.map_err(|error| patience.explain(error));
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

/// Lowers the locks of files; what is lower cannot be refused but by somebody who shares with
/// nobody, and then nothing is held.
pub(crate) fn give_back(storages: &[Arc<Storage>], lock: Lock) {
    for storage in storages {
        if storage.set_lock(lock).is_err() {
            let _ = storage.set_lock(Lock::None);
        }
    }
}
