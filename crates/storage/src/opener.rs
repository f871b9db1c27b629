//! Opening what this process may not open itself.
//!
//! A process in a sandbox may open the files that it had when it entered, and no others: a file
//! that was made since cannot be opened again by any name, not even through a descriptor. Somebody
//! outside does that, and passes the descriptor on.
//!
//! Control path; each call may block for as long as the file system takes. Promises: nobody is
//! asked before the kernel has refused (EACCES), so without a sandbox all is as it was.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use crate::{OpenOptions, Storage, open};

/// Somebody who opens files for a process that may not.
pub trait Opener: Debug + Send + Sync {
    /// Makes an empty file, open for reading and writing, with the mode of
    /// [`OpenOptions::create_new`].
    ///
    /// Errors: those of open(2); EACCES where that is not his to do.
    fn make(&self, path: &Path) -> Result<OwnedFd, Errno>;

    /// Opens a file once more: another open file description of the same file.
    ///
    /// * `file`: a descriptor of it; `O_PATH` will do.
    ///
    /// Errors: as there.
    fn again(&self, file: BorrowedFd<'_>, read_only: bool) -> Result<OwnedFd, Errno>;

    /// Removes a file that was made here, if its name still leads to it.
    ///
    /// * `identity`: device and inode.
    ///
    /// Errors: those of unlink(2), as there.
    fn remove(&self, identity: (u64, u64)) -> Result<(), Errno>;

    /// Changes the note of an image of the files that its header names (`ringdisk-disk`,
    /// `names_note`).
    ///
    /// * `file`: a descriptor of it.
    /// * `line`: what the header will name, or names.
    /// * `is_done`: the header names it; before that the note holds both.
    ///
    /// Errors: those of setxattr(2); EACCES where that is not his to do.
    fn note(&self, file: BorrowedFd<'_>, line: &[u8], is_done: bool) -> Result<(), Errno>;

    /// Makes the names of a directory durable.
    ///
    /// Errors: those of fsync(2), as there.
    fn sync(&self, directory: &Path) -> Result<(), Errno>;
}

impl OpenOptions {
    /// Somebody to ask, when this process was refused.
    fn after(&self, errno: Errno) -> Option<&Arc<dyn Opener>> {
        self.opener.as_ref().filter(|_| errno == Errno::ACCESS)
    }

    /// As `result`; where that was refused, the file is made by [`OpenOptions::opener`].
    pub(crate) fn or_make(
        &self,
        result: Result<OwnedFd, Errno>,
        path: &Path,
    ) -> Result<OwnedFd, Errno> {
        result.or_else(|errno| self.after(errno).ok_or(errno)?.make(path))
    }

    /// As `result`; where that was refused, the file is opened by [`OpenOptions::opener`].
    pub(crate) fn or_again(
        &self,
        result: Result<OwnedFd, Errno>,
        file: BorrowedFd<'_>,
        read_only: bool,
    ) -> Result<OwnedFd, Errno> {
        result.or_else(|errno| self.after(errno).ok_or(errno)?.again(file, read_only))
    }

    /// Has the note of an image changed by [`OpenOptions::opener`] ([`Opener::note`]). Storage of
    /// other kinds has none.
    ///
    /// Errors: as there; ENOSYS where nobody can be asked.
    pub fn note_outside(&self, file: &Storage, line: &[u8], is_done: bool) -> Result<(), Errno> {
        let Some(file) = file.file() else { return Ok(()) };
        self.opener.as_ref().ok_or(Errno::NOSYS)?.note(file.borrow(), line, is_done)
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
        open::sync_directory(directory)
            .or_else(|errno| self.after(errno).ok_or(errno)?.sync(directory))
    }
}
