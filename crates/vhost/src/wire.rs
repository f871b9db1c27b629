//! Bytes and descriptors through a Unix stream socket.
//!
//! Promises: never blocks in the socket, whatever its flags are (a description may be shared with
//! another process); descriptors that arrive are close-on-exec, owned from the first moment on, and
//! answered for by this machine's kernel alone.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringdisk_messages::Wait;
use rustix::io::Errno;

use crate::closing::Held;
use crate::descriptor_check::vet;

/// The result of one read from a socket.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Bytes; 0: the other side has closed.
    pub(crate) bytes: usize,
    /// There were more descriptors than fit, or than we may open.
    pub(crate) truncated: bool,
    /// The kind of a descriptor that was refused, since another process may answer for it.
    pub(crate) foreign: Option<&'static str>,
}

/// Takes bytes into `into` (not empty) and descriptors after those in `fds`.
///
/// Errors: EAGAIN when there is nothing.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    fds: &mut Vec<Held>,
) -> Result<Piece, Errno> {
    let message = ringdisk_messages::receive(socket, into, Wait::Never)?;
    let mut foreign = None;
    for fd in message.descriptors {
        match vet(fd) {
            Ok(fd) => fds.push(Held::from(fd)),
            Err(name) => foreign = Some(name),
        }
    }
    Ok(Piece { bytes: message.len, truncated: message.has_lost, foreign })
}

/// Sends some of `bytes`, with `fds` at the first of them. Returns how many; the descriptors went
/// with them.
///
/// Errors: EAGAIN when nothing fits; EPIPE when the other side has closed.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[OwnedFd]) -> Result<usize, Errno> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    ringdisk_messages::send(socket, &[IoSlice::new(bytes)], &fds, Wait::Never)
}
