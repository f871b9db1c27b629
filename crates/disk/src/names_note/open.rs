//! The note of an open file, by its descriptor, also one that was opened with `O_PATH`.
//!
//! Promises: errors are those of the system calls, also where a file system keeps no notes: the
//! server and its helper process, which both change notes by this, differ in what these mean.

use std::fs::File;
use std::os::fd::AsRawFd;

use ringdisk_ring::Errno;

use super::{ATTRIBUTE, with_line};
use crate::xattr::link;

/// The note; `None`: there is none.
///
/// Errors: those of getxattr(2); EINVAL: it is no text.
pub fn note_of(file: &impl AsRawFd) -> Result<Option<String>, Errno> {
    let value = ATTRIBUTE.get_at(&link(file.as_raw_fd()))?;
    value.map(|value| String::from_utf8(value).map_err(|_| Errno::INVAL)).transpose()
}

/// Sets the note.
///
/// Errors: those of setxattr(2).
pub fn set_note(file: &impl AsRawFd, text: &str) -> Result<(), Errno> {
    ATTRIBUTE.set_at(&link(file.as_raw_fd()), text.as_bytes())
}

/// Changes the note before or after the header changes. A file without a note, which was never
/// served in a sandbox, gets none before.
///
/// * `line`: of the new header.
/// * `is_done`: the header has the new names; before that the note holds the old and the new ones,
///   on stable storage: flushing the header that follows does not write attributes.
///
/// Errors: those of getxattr(2), setxattr(2), open(2) and fsync(2).
pub fn change_note(file: &impl AsRawFd, line: &str, is_done: bool) -> Result<(), Errno> {
    if is_done {
        return set_note(file, line);
    }
    let Some(before) = note_of(file)? else { return Ok(()) };
    set_note(file, &with_line(&before, line))?;
    let synced = File::open(link(file.as_raw_fd())).and_then(|file| file.sync_all());
    synced.map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
}
