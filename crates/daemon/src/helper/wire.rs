//! Requests and replies between a confined process and its helper, over a socket that keeps
//! messages apart (SOCK_SEQPACKET).
//!
//! Promises: a message that did not arrive whole is an error, so nothing is done by half of it.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};

use ringdisk_messages::{Message, Wait};
use rustix::io::Errno;

use super::answer::Answer;

/// One message, and the descriptor that came with it. A length of 0: the other end is closed.
///
/// Errors: those of recvmsg(2); see [`is_partial`].
pub(super) fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let message =
        ringdisk_messages::receive(socket, into, Wait::Forever).and_then(Message::whole)?;
    Ok((message.len, message.into_one()))
}

/// Whether an error of [`receive`] is about one message, and the next one may be whole.
pub(super) fn is_partial(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MSGSIZE | Errno::MFILE))
}

/// Sends a reply.
pub(super) fn reply(socket: impl AsFd, answer: &Answer) -> io::Result<()> {
    let kind = [answer.kind];
    let pieces = [IoSlice::new(&kind), IoSlice::new(answer.words.as_bytes())];
    send(socket, &pieces, answer.fd.as_ref())
}

/// Sends one message, with a descriptor.
pub(super) fn send(
    socket: impl AsFd,
    pieces: &[IoSlice<'_>],
    given: Option<&OwnedFd>,
) -> io::Result<()> {
    let fds: Vec<_> = given.map(AsFd::as_fd).into_iter().collect();
    ringdisk_messages::send(socket, pieces, &fds, Wait::Forever)?;
    Ok(())
}
