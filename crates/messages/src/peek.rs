//! Looking at what a stream socket has received without taking it.
//!
//! Promises: bytes and descriptors that were looked at stay in the socket until [`consume`] takes
//! them, and the kernel counts, with the socket and not with the process, how many of them were
//! looked at and not taken (`SO_PEEK_OFF`, socket(7)). So when a process is killed, another one
//! that has the socket knows exactly how far it got. Nothing here waits.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, recv};

use crate::{Message, Wait, receive_as};

/// Bytes that one call of [`consume`] takes at most at once.
const CHUNK: usize = 4096;

/// Counts what is looked at from now on; nothing counts as looked at yet.
///
/// Errors: those of setsockopt(2).
pub fn begin_peeking(socket: impl AsFd) -> Result<(), Errno> {
    set_offset(socket.as_fd(), 0)
}

/// Bytes that were looked at and not taken. `None`: they are not counted.
///
/// Errors: those of getsockopt(2).
pub fn peeked(socket: impl AsFd) -> Result<Option<usize>, Errno> {
    offset(socket.as_fd()).map(|offset| usize::try_from(offset).ok())
}

/// Looks at bytes that were not taken, and at the descriptors that came with them: as much as there
/// is, up to the end of the bytes that came with the first descriptors. The descriptors are copies.
/// All up to the end of this counts as looked at.
///
/// * `from`: bytes to pass over.
/// * `into`: not empty.
///
/// Errors: those of recvmsg(2), such as `EAGAIN` when there is nothing more.
pub fn peek(socket: impl AsFd, from: usize, into: &mut [u8]) -> Result<Message, Errno> {
    begin_at(&socket, from)?;
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK;
    let mut message = receive_as(&socket, into, Wait::Never, flags)?;
    // The kernel goes on to the first descriptors that there are, also behind the last byte that it
    // gives. Bytes without descriptors are read on to the next ones, others are not.
    let is_whole = message.len == into.len() && !message.descriptors.is_empty();
    if is_whole && peek_bytes(&socket, from, &mut vec![0; message.len + 1])? > message.len {
        message.descriptors.clear();
    }
    begin_at(&socket, from + message.len)?;
    Ok(message)
}

/// As [`peek`], without descriptors. Returns how many bytes there were.
///
/// Errors: as there.
pub fn peek_bytes(socket: impl AsFd, from: usize, into: &mut [u8]) -> Result<usize, Errno> {
    begin_at(&socket, from)?;
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    retry_on_intr(|| recv(&socket, &mut *into, flags)).map(|(_, bytes)| bytes)
}

/// The next look begins there.
fn begin_at(socket: impl AsFd, from: usize) -> Result<(), Errno> {
    set_offset(socket.as_fd(), libc::c_int::try_from(from).map_err(|_| Errno::OVERFLOW)?)
}

/// Takes bytes that were looked at, and drops them with their descriptors.
///
/// Errors: those of recv(2); the socket has fewer.
pub fn consume(socket: impl AsFd, mut bytes: usize) -> Result<(), Errno> {
    let mut dropped = [0; CHUNK];
    while bytes > 0 {
        let into = &mut dropped[..bytes.min(CHUNK)];
        match retry_on_intr(|| recv(&socket, &mut *into, RecvFlags::DONTWAIT))?.1 {
            0 => return Err(Errno::CONNRESET),
            taken => bytes -= taken,
        }
    }
    Ok(())
}

#[allow(unsafe_code)]
fn set_offset(socket: BorrowedFd<'_>, offset: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the descriptor is borrowed for the call, and the kernel reads the size of one int
    // from an int on this stack.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            std::ptr::from_ref(&offset).cast(),
            LEN,
        )
    };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

#[allow(unsafe_code)]
fn offset(socket: BorrowedFd<'_>) -> Result<libc::c_int, Errno> {
    let (mut offset, mut len): (libc::c_int, _) = (-1, LEN);
    // SAFETY: the descriptor is borrowed for the call, and the kernel writes at most `len` bytes,
    // the size of one int, to an int on this stack.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            std::ptr::from_mut(&mut offset).cast(),
            std::ptr::from_mut(&mut len),
        )
    };
    if result == 0 { Ok(offset) } else { Err(last_error()) }
}

/// Bytes of the option.
#[allow(clippy::cast_possible_truncation, reason = "the size of an int")]
const LEN: libc::socklen_t = size_of::<libc::c_int>() as libc::socklen_t;

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use rustix::net::SocketType;

    use super::*;
    use crate::{pair, send};

    #[test]
    fn what_is_looked_at_stays_and_is_counted_until_it_is_taken() {
        let (ours, theirs) = pair(SocketType::STREAM).expect("sockets");
        begin_peeking(&ours).expect("a stream socket");
        let file = tempfile::tempfile().expect("a file");
        send(
            &theirs,
            &[IoSlice::new(b"head"), IoSlice::new(b"tail")],
            &[file.as_fd()],
            Wait::Never,
        )
        .expect("room");
        send(&theirs, &[IoSlice::new(b"next")], &[], Wait::Never).expect("room");
        let mut bytes = [0; 8];
        assert_eq!(peek_bytes(&ours, 0, &mut bytes[..4]), Ok(4));
        assert_eq!(peeked(&ours), Ok(Some(4)));
        let message = peek(&ours, 0, &mut bytes).expect("a message");
        assert_eq!((message.len, message.descriptors.len(), &bytes), (8, 1, b"headtail"));
        assert_eq!(peeked(&ours), Ok(Some(8)));
        consume(&ours, 3).expect("they are there");
        assert_eq!(peeked(&ours), Ok(Some(5)));
        consume(&ours, 5).expect("they are there");
        assert_eq!(peeked(&ours), Ok(Some(0)));
        let message = peek(&ours, 0, &mut bytes[..4]).expect("a message");
        assert_eq!((message.len, message.descriptors.len(), &bytes[..4]), (4, 0, &b"next"[..]));
        assert_eq!(peek(&ours, 4, &mut bytes).expect_err("no more"), Errno::AGAIN);
    }

    #[test]
    fn descriptors_are_those_of_the_bytes_and_not_of_later_ones() {
        let file = tempfile::tempfile().expect("a file");
        // Pieces as they are sent, each with descriptors or without; how many the first 8 bytes
        // have.
        type Pieces = &'static [(&'static [u8], usize)];
        let cases: [(Pieces, usize); 7] = [
            (&[(b"headtail", 0), (b"next", 1)], 0),
            (&[(b"headtail", 0), (b"next", 0), (b"more", 1)], 0),
            (&[(b"headtail", 1), (b"next", 2)], 1),
            (&[(b"head", 1), (b"tail", 0), (b"next", 2)], 1),
            (&[(b"head", 0), (b"tail", 2), (b"next", 1)], 2),
            (&[(b"head", 0), (b"tail", 0), (b"next", 1)], 0),
            (&[(b"head", 1), (b"tail", 1)], 2),
        ];
        for (pieces, expected) in cases {
            let (ours, theirs) = pair(SocketType::STREAM).expect("sockets");
            begin_peeking(&ours).expect("a stream socket");
            for (bytes, count) in pieces {
                let fds = vec![file.as_fd(); *count];
                send(&theirs, &[IoSlice::new(bytes)], &fds, Wait::Never).expect("room");
            }
            let (mut bytes, mut had, mut fds) = ([0; 8], 0, 0);
            while had < 8 {
                let message = peek(&ours, had, &mut bytes[had..]).expect("all is there");
                had += message.len;
                fds += message.descriptors.len();
            }
            assert_eq!((&bytes, fds), (b"headtail", expected), "{pieces:?}");
            assert_eq!(peeked(&ours), Ok(Some(8)));
        }
    }

    #[test]
    fn a_socket_that_counts_nothing_says_so() {
        let (ours, _theirs) = pair(SocketType::STREAM).expect("sockets");
        assert_eq!(peeked(&ours), Ok(None));
        assert_eq!(consume(&ours, 1), Err(Errno::AGAIN));
    }
}
