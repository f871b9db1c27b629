//! The socket to a helper process that runs already: the one that keeps a mount or disks
//! (`--keep-mount`, `serve --keep`) has started this server, and carries out its tasks, too.
//!
//! Promises: the line is used once, for the tasks of this process, before it is confined; where it
//! is not used, it stays that of a process which is not confined. Main thread, at the start.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// This process's end of the socket.
static LINE: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// The helper process has given this end of a socket; at its other end it waits for tasks.
pub(crate) fn put(line: OwnedFd) {
    *LINE.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
}

/// Takes it. `None`: no helper process has given one, or it was taken.
pub(super) fn take() -> Option<OwnedFd> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner).take()
}
