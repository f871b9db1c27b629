//! Messages with descriptors over Unix sockets (`SCM_RIGHTS`, unix(7)): the one place that packs
//! and unpacks them.
//!
//! Promises: a received descriptor is close-on-exec and owned from the first moment, so one that
//! the caller does not want is closed; a message from which the kernel dropped text or descriptors
//! says so; no call raises SIGPIPE, and an interrupted call is made again. Control path: each
//! receive may allocate.
//!
//! ```
//! use std::io::{IoSlice, Read, Write};
//! use std::os::fd::AsFd;
//!
//! use ringdisk_messages::{Wait, pair, receive, send};
//! use rustix::net::SocketType;
//!
//! let (server, client) = pair(SocketType::SEQPACKET)?;
//! let (mut read, write) = std::io::pipe()?;
//! send(&server, &[IoSlice::new(b"a pipe")], &[write.as_fd()], Wait::Forever)?;
//!
//! let mut text = [0; 64];
//! let message = receive(&client, &mut text, Wait::Forever)?.whole()?;
//! assert_eq!(&text[..message.len], b"a pipe");
//! let pipe = message.into_one().expect("one descriptor");
//! drop(write);
//! std::fs::File::from(pipe).write_all(b"hello")?;
//! let mut said = String::new();
//! read.read_to_string(&mut said)?;
//! assert_eq!(said, "hello");
//! # Ok::<(), std::io::Error>(())
//! ```

#![deny(unsafe_code)]

mod peek;
pub mod state;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use peek::{begin_peeking, consume, peek, peek_bytes, peeked};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, sendmsg_addr, socketpair,
};

/// Most descriptors that the kernel lets through with one message (`SCM_MAX_FD` of net/scm.h).
///
/// [`receive`] always has room for all of them: the kernel closes a descriptor for which there is
/// no room, in the thread that receives, and a close may wait for the process that made that
/// descriptor.
pub const DESCRIPTORS_MAX: usize = 253;

/// Room for the descriptors of one message, bytes.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX));

/// Whether a call waits until the socket has a message, or room for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// As long as the socket's own settings say: for ever, or until its timeout.
    Forever,
    /// Not at all, whatever the settings are: another process may share and change them.
    Never,
}

/// A message that [`receive`] got, besides its text.
#[derive(Debug)]
pub struct Message {
    /// Bytes of text. 0 without descriptors: the other side has closed the socket.
    pub len: usize,
    /// The descriptors, in the order of the sender.
    pub descriptors: Vec<OwnedFd>,
    /// The text was longer than the buffer, and its rest is gone (sockets that keep messages
    /// apart).
    pub is_cut: bool,
    /// The kernel dropped descriptors, since this process may not have more.
    pub has_lost: bool,
}

impl Message {
    /// Passes on a message that arrived as it was sent.
    ///
    /// Errors: `EMSGSIZE`: the text was cut; `EMFILE`: descriptors were lost. What did arrive is
    /// closed.
    pub fn whole(self) -> Result<Message, Errno> {
        match (self.is_cut, self.has_lost) {
            (true, _) => Err(Errno::MSGSIZE),
            (_, true) => Err(Errno::MFILE),
            _ => Ok(self),
        }
    }

    /// Whether the other side has closed the socket. (Nobody here sends a message of no bytes.)
    pub fn is_end(&self) -> bool {
        self.len == 0 && self.descriptors.is_empty()
    }

    /// The first descriptor; any others are closed.
    pub fn into_one(self) -> Option<OwnedFd> {
        self.descriptors.into_iter().next()
    }
}

/// Makes two sockets that are connected to one another, both close-on-exec.
///
/// Errors: those of socketpair(2).
pub fn pair(kind: SocketType) -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

/// Receives one message, or of a stream as much as there is, up to the next descriptors.
///
/// * `into`: takes the text; not empty.
///
/// Errors: those of recvmsg(2), such as `EAGAIN` when there is nothing.
pub fn receive(socket: impl AsFd, into: &mut [u8], wait: Wait) -> Result<Message, Errno> {
    receive_as(socket, into, wait, RecvFlags::CMSG_CLOEXEC)
}

/// * `flags`: how, besides whether to wait.
fn receive_as(
    socket: impl AsFd,
    into: &mut [u8],
    wait: Wait,
    flags: RecvFlags,
) -> Result<Message, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = match wait {
        Wait::Forever => flags,
        Wait::Never => flags | RecvFlags::DONTWAIT,
    };
    let mut pieces = [IoSliceMut::new(into)];
    let received = retry_on_intr(|| recvmsg(&socket, &mut pieces, &mut control, flags))?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(Message {
        len: received.bytes,
        descriptors,
        is_cut: received.flags.contains(ReturnFlags::TRUNC),
        has_lost: received.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Sends one message, or the beginning of one over a stream. Returns how many bytes were taken; the
/// descriptors went with the first of them.
///
/// * `text`: at least one byte, where there are descriptors and the socket is a stream.
///
/// Errors: `E2BIG`: more than [`DESCRIPTORS_MAX`] descriptors; those of sendmsg(2), such as
/// `EAGAIN` when there is no room and `EPIPE` when the other side has closed.
pub fn send(
    socket: impl AsFd,
    text: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    wait: Wait,
) -> Result<usize, Errno> {
    retry_on_intr(|| {
        with_rights(descriptors, |control| sendmsg(&socket, text, control, flags(wait)))
    })
}

/// As [`send`], to the socket that has an address (datagrams).
///
/// Errors: as there, and those of a socket that is not there.
pub fn send_to(
    socket: impl AsFd,
    address: &SocketAddrUnix,
    text: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
    wait: Wait,
) -> Result<usize, Errno> {
    retry_on_intr(|| {
        with_rights(descriptors, |control| {
            sendmsg_addr(&socket, address, text, control, flags(wait))
        })
    })
}

/// Calls `send` with the control message for these descriptors.
fn with_rights(
    descriptors: &[BorrowedFd<'_>],
    send: impl FnOnce(&mut SendAncillaryBuffer<'_, '_, '_>) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(Errno::TOOBIG);
    }
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG);
    }
    send(&mut control)
}

fn flags(wait: Wait) -> SendFlags {
    match wait {
        Wait::Forever => SendFlags::NOSIGNAL,
        Wait::Never => SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    }
}

#[cfg(test)]
mod tests;
