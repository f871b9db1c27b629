//! The note of an image, where this process may not change it itself.
//!
//! Promises: nothing is changed here; the [`Opener`](crate::Opener) outside the sandbox is asked.
//! Control path.

use rustix::io::Errno;

use crate::options::OpenOptions;
use crate::storage::Storage;

impl OpenOptions {
    /// Has the note of an image changed by [`OpenOptions::opener`]
    /// ([`Opener::note`](crate::Opener::note)). Storage of other kinds has none.
    ///
    /// Errors: as there; ENOSYS where there is no opener.
    pub fn note_outside(&self, file: &Storage, line: &[u8], is_done: bool) -> Result<(), Errno> {
        let Some(file) = file.file() else { return Ok(()) };
        self.opener.as_ref().ok_or(Errno::NOSYS)?.note(file.borrow(), line, is_done)
    }
}
