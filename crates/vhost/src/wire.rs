//! Bytes and descriptors through a Unix stream socket.
//!
//! Promises: never blocks in the socket, whatever its flags are (a description may be shared with
//! another process); descriptors that arrive are close-on-exec, owned from the first moment on, and
//! answered for by this machine's kernel alone.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::closing::Held;
use crate::vet::vet;

/// Descriptors that the kernel lets through with one message (`SCM_MAX_FD` of net/scm.h). There is
/// room for all: those for which there is none are closed by the receiver of the message, and
/// would have to be waited for.
const SENT_MAX: usize = 253;
/// Room for the descriptors of one message.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(SENT_MAX));

/// What one look at a socket found.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Bytes; 0: the other side has closed.
    pub(crate) bytes: usize,
    /// There were more descriptors than fit, or than we may open.
    pub(crate) truncated: bool,
    /// What a descriptor is that was not taken, since another process may answer for it.
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
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut iov = [IoSliceMut::new(into)];
    let got = rustix::io::retry_on_intr(|| recvmsg(socket, &mut iov, &mut control, flags))?;
    let mut foreign = None;
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(rights) = message else { continue };
        for fd in rights {
            match vet(fd) {
                Ok(fd) => fds.push(Held::from(fd)),
                Err(name) => foreign = Some(name),
            }
        }
    }
    let truncated = got.flags.contains(ReturnFlags::CTRUNC);
    Ok(Piece { bytes: got.bytes, truncated, foreign })
}

/// Sends some of `bytes`, with `fds` at the first of them. Returns how many; the descriptors went
/// with them.
///
/// Errors: EAGAIN when nothing fits; EPIPE when the other side has closed.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[OwnedFd]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))
}
