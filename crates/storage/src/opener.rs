//! Opening what this process may not open itself.
//!
//! A process in a sandbox may open the files that it had when it entered, and no others: a file
//! that was made since cannot be opened again by any name, not even through a descriptor. A process
//! outside opens it and passes the descriptor on; this is the interface to it.
//!
//! Promises: control path only; each call may block for as long as the file system takes.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;

use crate::endpoint::NbdEndpoint;

/// Opens files for a process that may not open them itself.
pub trait Opener: Debug + Send + Sync {
    /// Makes an empty file, open for reading and writing, with the mode of
    /// [`OpenOptions::create_new`](crate::OpenOptions::create_new).
    ///
    /// Errors: those of open(2); EACCES where the opener does not make such files.
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
    /// Errors: those of setxattr(2); EACCES where the opener keeps no note of that file; EPERM
    /// where the line names a file that the opener does not know; EKEYREJECTED where no user asks
    /// for it; ENOSYS without a process that could do it.
    fn note(&self, file: BorrowedFd<'_>, line: &[u8], is_done: bool) -> Result<(), Errno>;

    /// Makes the names of a directory durable.
    ///
    /// Errors: those of fsync(2), as there.
    fn sync(&self, directory: &Path) -> Result<(), Errno>;

    /// Begins to connect to the server of an NBD export, as [`NbdEndpoint::begin`] does.
    ///
    /// Errors: those of connect(2); EACCES where the opener does not connect to that server.
    fn connect(&self, endpoint: &NbdEndpoint) -> Result<OwnedFd, Errno> {
        let _ = endpoint;
        Err(Errno::ACCESS)
    }
}
