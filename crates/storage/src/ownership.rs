//! Locks and descriptors of storage whose ownership moves: to another host, or to a successor
//! process.
//!
//! Control path. Promises:
//! - Locks are taken and changed on the open file description that I/O uses. So they last as long
//!   as the kernel still runs an operation on it: after a kill, another process gets the lock only
//!   when the last write of the dead process has ended.
//! - While a lock changes, the file is protected at least as the weaker of the two locks protects
//!   it.
//! - After a hand-over one process only unlocks ([`Storage::share_locks`]): a close alone never
//!   takes the locks away from a process that has a duplicate of the descriptor.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_ring::{Errno, Ring};
use rustix::fs::Advice;

use crate::error::Error;
use crate::file::File;
use crate::kinds::{Kind, Lock};
use crate::options::OpenOptions;
use crate::storage::Storage;
use crate::{lock, open};

/// Magic numbers (statfs(2)) of ext2 to ext4, XFS, Btrfs, F2FS, bcachefs and tmpfs.
const LOCAL: [u64; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x0102_1994];

impl Storage {
    /// Takes over a descriptor of another process whose open file description has the lock that
    /// `options` ask for. Its open flags stay as they are, since the other process may still use
    /// it. Neither a failure nor the end of this storage unlocks the file before
    /// [`Storage::share_locks`] says that the other process does not use the locks any more.
    ///
    /// * `name`: for messages.
    /// * `options`: `create` and `create_new` mean nothing here, and `direct` is as the descriptor
    ///   is.
    ///
    /// Errors: as [`Storage::open`].
    pub fn adopt(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<Storage, Error> {
        let unlocked = OpenOptions { lock: Lock::None, direct: false, ..options.clone() };
        let mut file = open::from_fd(fd, name, &unlocked)?;
        file.is_shared = true.into();
        file.held = Mutex::new(lock::adopt(file.borrow(), name, options.lock, options.read_only)?);
        file.lock_twin();
        Ok(Storage::of_file(file))
    }

    /// Changes the lock. Does nothing for storage that is no file.
    ///
    /// Errors: kind `Locked` when another user is in the way, with a message that says who; the
    /// lock is as it was then.
    pub fn set_lock(&self, lock: Lock) -> Result<(), Error> {
        let Some(file) = self.file() else { return Ok(()) };
        file.unlock_twin();
        let changed = {
            let mut held = file.held.lock().unwrap_or_else(PoisonError::into_inner);
            lock::change(file.borrow(), &file.name, *held, lock, file.read_only)
                .map(|new| *held = new)
        };
        file.lock_twin();
        changed
    }

    /// Whether it has this lock. Storage that is no file has any.
    pub fn has_lock(&self, lock: Lock) -> bool {
        self.file().is_none_or(|file| file.held().is(lock, file.read_only))
    }

    /// Whether no other user excludes a lock at this moment. Takes no lock, so it disturbs no
    /// process that is about to take one.
    pub fn may_lock(&self, lock: Lock) -> bool {
        self.file().is_none_or(|file| lock::is_free(file.borrow(), lock, file.read_only))
    }

    /// Tells the holder of the locks that this process waits for them (or no longer waits), so that
    /// the holder may release them by itself ([`Storage::is_wanted`]). Excludes no other user.
    pub fn want(&self, wanted: bool) {
        if let Some(file) = self.file() {
            lock::want(file.borrow(), wanted);
        }
    }

    /// Whether another process waits for the locks of this one. One quick system call; a request to
    /// the server on a network file system.
    pub fn is_wanted(&self) -> bool {
        self.file().is_some_and(|file| lock::is_wanted(file.borrow()))
    }

    /// Says whether another process keeps using these locks, through a duplicate of the descriptor:
    /// the end of this storage does not unlock then.
    pub fn share_locks(&self, shared: bool) {
        if let Some(file) = self.file() {
            file.is_shared.store(shared, Ordering::Release);
            // The second descriptor stays here; its lock must not exclude the other process.
            if shared {
                file.unlock_twin();
            } else {
                file.lock_twin();
            }
        }
    }

    /// A duplicate of the descriptor: the same open file description, with its locks. `None`: no
    /// file.
    ///
    /// Errors: those of dup(2).
    pub fn duplicate(&self) -> Result<Option<OwnedFd>, Errno> {
        self.file().map(|file| rustix::io::fcntl_dupfd_cloexec(file.borrow(), 0)).transpose()
    }

    /// Whether a change whose caller gave up may still happen: then the last write is known to have
    /// ended only when the process has ended.
    pub fn may_change_late(&self) -> bool {
        self.file().is_some_and(|file| file.abandoned.load(Ordering::Acquire))
    }

    /// Makes changes of other hosts visible: drops cached pages where another host may have written
    /// to the file, and asks for its length. Runs on a helper thread.
    ///
    /// Errors: those of fdatasync(2) and fstat(2).
    pub async fn catch_up(self: &Arc<Self>, ring: &Ring) -> Result<(), Errno> {
        if self.file().is_none() {
            return Ok(());
        }
        let storage = Arc::clone(self);
        ring.offload(move || storage.file().map_or(Ok(()), File::catch_up)).await
    }
}

impl File {
    fn catch_up(&self) -> Result<(), Errno> {
        // Another host may have written to a shared disk or file system. The kernel keeps dirty
        // pages of this host, which another process may have left, so they are written first.
        if !self.no_flush && !self.is_on_this_host() {
            if !self.read_only {
                rustix::fs::fdatasync(self.borrow())?;
            }
            // A hint: what has no page cache refuses it.
            let _ = rustix::fs::fadvise(self.borrow(), 0, None, Advice::DontNeed);
        }
        self.refresh_len().map(drop)
    }

    /// Whether the file system is local to this host: all users of the file share its page cache,
    /// which is worth keeping.
    fn is_on_this_host(&self) -> bool {
        let magic = |known: u64| {
            rustix::fs::fstatfs(self.borrow()).is_ok_and(|it| it.f_type.cast_unsigned() == known)
        };
        self.kind == Kind::Regular && LOCAL.into_iter().any(magic)
    }
}
