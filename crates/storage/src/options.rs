//! How to open storage, and what to do where this process may not open a file itself.
//!
//! Promises: the [`Opener`] is asked only after the kernel has refused (EACCES), so without a
//! sandbox nothing changes. Control path; each call may block for as long as the file system takes.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::kinds::Lock;
use crate::opener::Opener;

/// How to open a file or a block device. `Default`: read and write, buffered, locked like QEMU,
/// never created.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Open for reading only; nothing is ever written.
    pub read_only: bool,
    /// Bypass the page cache (O_DIRECT).
    pub direct: bool,
    /// Flushes do nothing: for data that is not needed after a crash of the machine.
    pub no_flush: bool,
    /// What other programs may do with the image meanwhile.
    pub lock: Lock,
    /// Make an empty file (mode 0644 less umask) when there is none.
    pub create: bool,
    /// Make an empty file; fail when there is one.
    pub create_new: bool,
    /// Opens files for this process where it may not open them itself.
    pub opener: Option<Arc<dyn Opener>>,
}

impl OpenOptions {
    /// The opener, when the kernel has refused this process.
    fn after(&self, errno: Errno) -> Option<&Arc<dyn Opener>> {
        self.opener.as_ref().filter(|_| errno == Errno::ACCESS)
    }

    /// Returns `result`; where that was refused, [`OpenOptions::opener`] makes the file.
    pub(crate) fn or_make(
        &self,
        result: Result<OwnedFd, Errno>,
        path: &Path,
    ) -> Result<OwnedFd, Errno> {
        result.or_else(|errno| self.after(errno).ok_or(errno)?.make(path))
    }

    /// Returns `result`; where that was refused, [`OpenOptions::opener`] opens the file.
    pub(crate) fn or_again(
        &self,
        result: Result<OwnedFd, Errno>,
        file: BorrowedFd<'_>,
        read_only: bool,
    ) -> Result<OwnedFd, Errno> {
        result.or_else(|errno| self.after(errno).ok_or(errno)?.again(file, read_only))
    }

    /// Removes a file that was made with these options and shall not stay.
    ///
    /// * `identity`: device and inode.
    ///
    /// Errors: those of unlink(2).
    pub fn remove_made(&self, path: &Path, identity: (u64, u64)) -> Result<(), Errno> {
        rustix::fs::unlink(path).or_else(|errno| self.after(errno).ok_or(errno)?.remove(identity))
    }

    /// Makes the names of a directory durable. A file system that has no such thing is no error.
    ///
    /// Errors: those of open(2) and fsync(2).
    pub fn sync_directory(&self, directory: &Path) -> Result<(), Errno> {
        sync_directory(directory).or_else(|errno| self.after(errno).ok_or(errno)?.sync(directory))
    }
}

/// Makes the names of a directory durable, where that means something.
fn sync_directory(directory: &Path) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(CWD, directory, flags, Mode::empty())?;
    match rustix::fs::fsync(&directory) {
        // A file system that has no such thing.
        Err(Errno::INVAL) => Ok(()),
        result => result,
    }
}
