//! An open regular file or block device: its properties, length and flush.
//!
//! Promises: shared by all queue threads; the data path writes nothing here except the length (when
//! it changes), so the cache lines stay shared. Reading is in `read`, writing in `write`, holes and
//! space in `space`.

use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ringdisk_ring::{Errno, Fd, Ring};

use crate::block_locks::BlockLocks;
use crate::buffer_probe;
use crate::kinds::{Kind, Limits};
use crate::lock::Held;
use crate::retry::{Retry, is_passing, once};

/// The largest offset that the kernel takes (loff_t); also keeps -1, "current position" for
/// io_uring, out.
pub(crate) const OFFSET_MAX: u64 = i64::MAX as u64;

/// How often a length is asked for that changes meanwhile.
const ASKS_MAX: u32 = 4;

/// Checks that a request ends at an offset that exists. Errors: `EINVAL`.
pub(crate) fn end_of(offset: u64, len: u64) -> Result<u64, Errno> {
    offset.checked_add(len).filter(|&end| end <= OFFSET_MAX).ok_or(Errno::INVAL)
}

#[derive(Debug)]
pub(crate) struct File {
    pub(crate) name: String,
    /// The descriptor of `owner`, so that an operation does not follow the reference.
    pub(crate) fd: Fd,
    pub(crate) kind: Kind,
    pub(crate) read_only: bool,
    /// Flushes do nothing.
    pub(crate) no_flush: bool,
    pub(crate) limits: Limits,
    /// Bytes. Only a hint for anything but this process: others can change the file.
    pub(crate) len: AtomicU64,
    /// Coordinates writes where they have to be whole blocks; otherwise `None`.
    pub(crate) gate: Option<BlockLocks>,
    /// The same file without O_DIRECT, for the piece of a block at the end of a regular file whose
    /// length is no multiple of the block. It is another open file description and has the same
    /// lock, so that the locks of a process that is killed outlive its last write this way, too.
    pub(crate) buffered_twin: Option<OwnedFd>,
    /// Whether the page cache may hold what was written.
    pub(crate) uses_page_cache: AtomicBool,
    /// First flush that failed, as an errno; 0: none.
    pub(crate) flush_failed: AtomicI32,
    /// A block device that cannot zero a range by itself: as `/sys` said at the open, or as the
    /// device has answered since.
    pub(crate) refuses_holes: AtomicBool,
    pub(crate) identity: (u64, u64),
    /// Changed on the control path only.
    pub(crate) held: Mutex<Held>,
    /// Another process has the locks too, by a duplicate of the descriptor: closing must not
    /// unlock.
    pub(crate) is_shared: AtomicBool,
    /// Set when the future of a change was dropped while the kernel was at it: the change may
    /// still happen.
    pub(crate) abandoned: AtomicBool,
    /// Whether O_DIRECT either takes memory of any alignment or refuses it: found out once.
    pub(crate) pages: OnceLock<bool>,
    /// Last field: closed after everything else is gone. Shared with helper threads.
    pub(crate) owner: Arc<OwnedFd>,
}

impl File {
    pub(crate) fn borrow(&self) -> BorrowedFd<'_> {
        self.owner.as_fd()
    }

    /// Whether pages of a client may be read into and written from as they are.
    pub(crate) fn takes_client_pages(&self) -> bool {
        !self.limits.direct || self.pages.get() == Some(&true)
    }

    /// As [`crate::Storage::probe_client_pages`].
    pub(crate) fn probe_client_pages(&self) -> bool {
        !self.limits.direct
            || *self
                .pages
                .get_or_init(|| buffer_probe::are_safe(self.borrow(), self.len(), self.limits))
    }

    /// The lock that is held.
    pub(crate) fn held(&self) -> Held {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the second descriptor the lock of the first. Called after each search for locks of
    /// other users, since the second descriptor would be found as one.
    pub(crate) fn lock_twin(&self) {
        if let Some(twin) = &self.buffered_twin {
            self.held().copy_to(twin.as_fd());
        }
    }

    /// Removes the lock of the second descriptor, before a search for locks of other users.
    pub(crate) fn unlock_twin(&self) {
        if let Some(twin) = &self.buffered_twin {
            self.held().release(twin.as_fd());
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// The file reaches at least to `end` now.
    pub(crate) fn has_grown_to(&self, end: u64) {
        // Looked at first: the line stays shared while nothing grows.
        if end > self.len() {
            self.len.fetch_max(end, Ordering::Relaxed);
        }
    }

    /// Asks the system for the length. One system call (fstat or lseek), which can block on a
    /// network file system: not for threads of a queue.
    pub(crate) fn refresh_len(&self) -> Result<u64, Errno> {
        let before = self.len();
        let len = real_len(self.borrow(), self.kind)?;
        self.note_len(before, len);
        Ok(len)
    }

    /// As [`refresh_len`](File::refresh_len), on a helper thread.
    pub(crate) async fn ask_len(&self, ring: &Ring) -> Result<u64, Errno> {
        for _ in 0..ASKS_MAX {
            let before = self.len();
            let (owner, kind) = (Arc::clone(&self.owner), self.kind);
            let len = ring.offload(move || real_len(owner.as_fd(), kind)).await?;
            if self.len() == before {
                self.note_len(before, len);
                return Ok(len);
            }
            // The length changed meanwhile, perhaps after the system was asked.
        }
        // The length changes all the time: what this process knows is as good.
        Ok(self.len())
    }

    /// Takes over the length that the system reported.
    ///
    /// * `before`: the length as this process knew it before it asked.
    fn note_len(&self, before: u64, len: u64) {
        if len >= before {
            // A write that ended since may have made it longer still.
            self.len.fetch_max(len, Ordering::Relaxed);
        } else {
            // Shorter only if nothing has grown meanwhile.
            let order = (Ordering::Relaxed, Ordering::Relaxed);
            let _ = self.len.compare_exchange(before, len, order.0, order.1);
        }
    }

    /// Errors: `EROFS` when open for reading only.
    pub(crate) fn check_writable(&self) -> Result<(), Errno> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// Makes all completed writes durable, down to the device (fdatasync).
    ///
    /// Errors: those of the kernel. After a failure all later flushes fail too, and so do those
    /// that run at the same time. With the page cache a later success would be wrong: the kernel
    /// drops pages that it could not write and marks them clean. With O_DIRECT the kernel may
    /// report an error to one of several flushes only, and a device that failed to empty its cache
    /// may have lost what was in it. Only `ENOSPC` and `EDQUOT` with O_DIRECT are not remembered:
    /// they lose nothing that was written.
    pub(crate) async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        if self.read_only || self.no_flush {
            return Ok(());
        }
        self.write_back(ring).await
    }

    /// As [`flush`](File::flush), also where flushes do nothing.
    pub(crate) async fn write_back(&self, ring: &Ring) -> Result<(), Errno> {
        match self.flush_failed.load(Ordering::Relaxed) {
            0 => {}
            errno => return Err(Errno::from_raw_os_error(errno)),
        }
        let mut retry = Retry::default();
        loop {
            match once(ring.fsync(self.fd, true)).await {
                // The kernel reports an error to one of several flushes that run at once.
                Ok(_) => match self.flush_failed.load(Ordering::Relaxed) {
                    0 => return Ok(()),
                    errno => return Err(Errno::from_raw_os_error(errno)),
                },
                Err(errno) if is_passing(errno) && Box::pin(retry.after(ring, errno)).await => {}
                Err(errno) => {
                    self.note_flush_failure(errno);
                    return Err(errno);
                }
            }
        }
    }

    fn note_flush_failure(&self, errno: Errno) {
        let full = matches!(errno, Errno::NOSPC | Errno::DQUOT);
        let nothing_lost = full && !self.uses_page_cache.load(Ordering::Relaxed);
        // A flush that this process cancelled, or that was never made, says nothing.
        if errno == Errno::CANCELED || is_passing(errno) || nothing_lost {
            return;
        }
        let order = (Ordering::Relaxed, Ordering::Relaxed);
        let noted = self.flush_failed.compare_exchange(0, errno.raw_os_error(), order.0, order.1);
        if noted.is_ok() {
            tracing::error!(
                "'{}': a flush failed ({errno}), so what was written since the flush before may \
                 be lost; no flush succeeds until the file is opened again: look at the disk that \
                 holds it",
                self.name
            );
        }
    }

    /// Bytes that the file takes on its file system; a block device takes all its bytes.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        match (self.kind, rustix::fs::fstat(self.borrow())) {
            // st_blocks counts 512 bytes whatever the block size (stat(2)).
            (Kind::Regular, Ok(stat)) => u64::try_from(stat.st_blocks).unwrap_or(0) * 512,
            _ => self.len(),
        }
    }
}

/// Sets a flag unless it is forgotten.
struct Abandon<'a>(&'a AtomicBool);

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl File {
    /// Awaits an operation that changes the file, and notes it when the caller gives up meanwhile.
    pub(crate) async fn change<F: Future>(&self, operation: F) -> F::Output {
        let abandon = Abandon(&self.abandoned);
        let output = operation.await;
        std::mem::forget(abandon);
        output
    }
}

impl Drop for File {
    /// Unlocks at once: a ring may keep its reference on the file, and with it the locks, for some
    /// time after its last operation. Not when a change may still be under way: then the image
    /// stays locked until the kernel is done with it. Not when another process goes on with these
    /// locks.
    fn drop(&mut self) {
        if *self.abandoned.get_mut() {
            return;
        }
        self.unlock_twin();
        if !*self.is_shared.get_mut() {
            self.held().release(self.borrow());
        }
    }
}

/// Length of an open file or block device, in bytes.
pub(crate) fn real_len(fd: BorrowedFd<'_>, kind: Kind) -> Result<u64, Errno> {
    match kind {
        Kind::BlockDevice => rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)),
        _ => rustix::fs::fstat(fd).map(|stat| u64::try_from(stat.st_size).unwrap_or(0)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use ringdisk_ring::Errno;

    use crate::{OpenOptions, open};

    #[test]
    fn a_flush_that_found_no_space_is_remembered_where_pages_can_be_lost() {
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            let directory = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = directory.path().join("image");
            std::fs::write(&path, [1; 4096]).unwrap();
            for direct in [false, true] {
                let options = OpenOptions { direct, ..OpenOptions::default() };
                let file = open::open(&path, &options).unwrap();
                file.note_flush_failure(errno);
                let remembered = file.flush_failed.load(Ordering::Relaxed);
                assert_eq!(remembered, if direct { 0 } else { errno.raw_os_error() });
                file.note_flush_failure(Errno::CANCELED);
                file.note_flush_failure(Errno::IO);
                assert_ne!(file.flush_failed.load(Ordering::Relaxed), 0);
            }
        }
    }

    #[test]
    fn an_older_look_at_the_length_takes_nothing_back() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 4096]).unwrap();
        let file = open::open(&path, &OpenOptions::default()).unwrap();
        // Another process has cut the file, …
        file.note_len(4096, 1000);
        assert_eq!(file.len(), 1000);
        // … and two lengths that were asked for then arrive after a write.
        file.has_grown_to(8192);
        file.note_len(1000, 500);
        assert_eq!(file.len(), 8192);
        file.note_len(1000, 4096);
        assert_eq!(file.len(), 8192);
        file.note_len(8192, 9000);
        assert_eq!(file.len(), 9000);
    }
}
