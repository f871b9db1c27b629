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
/// Longer than any piece in which the kernel keeps what was sent: 32 KiB, and what fits into a page
/// (net/unix/af_unix.c, `unix_stream_sendmsg`), for pages of 64 KiB.
const PIECE_BYTES_MAX: usize = 256 << 10;

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
    // The kernel goes on to the first descriptors that there are, also past the last byte that it
    // gives.
    let is_whole = message.len == into.len() && !message.descriptors.is_empty();
    if is_whole && are_of_later_bytes(socket.as_fd(), from, message.len)? {
        message.descriptors.clear();
    }
    begin_at(&socket, from + message.len)?;
    Ok(message)
}

/// Whether the first descriptors that there are came with bytes after these.
///
/// The kernel keeps what was sent in pieces, and only the first byte of a piece has descriptors. A
/// look ends with a piece that has some; so the last piece of a long look is the one that has them,
/// if any has, and they are ours if it begins before our end.
fn are_of_later_bytes(socket: BorrowedFd<'_>, from: usize, len: usize) -> Result<bool, Errno> {
    let mut bytes = vec![0; len + 1];
    if peek_bytes(socket, from, &mut bytes)? == len {
        return Ok(false);
    }
    bytes.resize(len + PIECE_BYTES_MAX, 0);
    let end = peek_bytes(socket, from, &mut bytes)?;
    Ok(last_piece(socket, from, &mut bytes[..end - 1])? >= len)
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

/// Where the piece begins that the byte behind these is in, bytes after `from`; 0 also for a piece
/// that begins before.
///
/// The kernel stops at a piece that it cannot give whole as far as there is room. So the room ends
/// with a byte to which nothing can be written.
#[allow(unsafe_code)]
fn last_piece(socket: BorrowedFd<'_>, from: usize, into: &mut [u8]) -> Result<usize, Errno> {
    begin_at(socket, from)?;
    let mut pieces = [
        libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() },
        libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 },
    ];
    // SAFETY: zeroes are a value of this struct: no address, no room for control messages.
    let mut head: libc::msghdr = unsafe { std::mem::zeroed() };
    head.msg_iov = pieces.as_mut_ptr();
    head.msg_iovlen = pieces.len();
    // SAFETY: the descriptor is borrowed for the call. The kernel writes to `into`, which is
    // borrowed for writing and has the length that is given, and cannot write to address 0, which
    // is never mapped in a process of ours.
    let bytes = unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut head, libc::MSG_PEEK | libc::MSG_DONTWAIT)
    };
    match usize::try_from(bytes) {
        Ok(bytes) => Ok(bytes),
        Err(_) if last_error() == Errno::FAULT => Ok(0),
        Err(_) => Err(last_error()),
    }
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
        let cases: [(Pieces, usize); 12] = [
            (&[(b"headtail", 0), (b"next", 1)], 0),
            (&[(b"headtail", 0), (b"next", 0), (b"more", 1)], 0),
            (&[(b"headtail", 1), (b"next", 2)], 1),
            (&[(b"head", 1), (b"tail", 0), (b"next", 2)], 1),
            (&[(b"head", 0), (b"tail", 2), (b"next", 1)], 2),
            (&[(b"head", 0), (b"tail", 0), (b"next", 1)], 0),
            (&[(b"head", 1), (b"tail", 1)], 2),
            // Two messages that were sent as one, and what follows.
            (&[(b"headtailnext", 1)], 1),
            (&[(b"headtailnext", 1), (b"more", 2)], 1),
            (&[(b"headtailnext", 0), (b"more", 1)], 0),
            (&[(b"head", 0), (b"tailnext", 2), (b"m", 1)], 2),
            (&[(b"head", 1), (b"tailnext", 0), (b"m", 2)], 1),
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
    fn of_two_messages_that_were_sent_as_one_the_first_has_the_descriptors() {
        let file = tempfile::tempfile().expect("a file");
        let (ours, theirs) = pair(SocketType::STREAM).expect("sockets");
        begin_peeking(&ours).expect("a stream socket");
        let both = [IoSlice::new(b"first"), IoSlice::new(b"other")];
        send(&theirs, &both, &[file.as_fd()], Wait::Never).expect("room");
        send(&theirs, &[IoSlice::new(b"third")], &[file.as_fd(); 2], Wait::Never).expect("room");
        for (word, count) in [(b"first", 1), (b"other", 0), (b"third", 2)] {
            let mut bytes = [0; 5];
            let message = peek(&ours, 0, &mut bytes).expect("a message");
            assert_eq!((&bytes, message.descriptors.len()), (word, count));
            consume(&ours, bytes.len()).expect("it is there");
        }
    }

    #[test]
    fn descriptors_behind_more_bytes_than_a_piece_has_are_found() {
        let file = tempfile::tempfile().expect("a file");
        for (first, later) in [(1, 0), (0, 1), (1, 1)] {
            let (ours, theirs) = pair(SocketType::STREAM).expect("sockets");
            begin_peeking(&ours).expect("a stream socket");
            let long = vec![7; 60_000];
            let fds = |count| vec![file.as_fd(); count];
            let sent = send(&theirs, &[IoSlice::new(&long)], &fds(first), Wait::Never);
            assert_eq!(sent, Ok(long.len()));
            send(&theirs, &[IoSlice::new(b"x")], &fds(later), Wait::Never).expect("room");
            let message = peek(&ours, 0, &mut [0; 100]).expect("a message");
            assert_eq!((message.len, message.descriptors.len()), (100, first));
        }
    }

    #[test]
    fn a_socket_that_counts_nothing_says_so() {
        let (ours, _theirs) = pair(SocketType::STREAM).expect("sockets");
        assert_eq!(peeked(&ours), Ok(None));
        assert_eq!(consume(&ours, 1), Err(Errno::AGAIN));
    }
}
