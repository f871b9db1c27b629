//! Lines over a socket, on a ring.
//!
//! Promises: nothing here blocks the ring's thread; a line is at most as long as the caller says;
//! a peer that stops in the middle of a line, or does not read, is given up after [`LINE_TIMEOUT`].

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringdisk_messages::{Wait, receive};
use ringdisk_ring::{Errno, Fd, POLL_IN, Ring};
use rustix::net::{SendFlags, send};

/// `POLLOUT` (poll(2)).
const POLL_OUT: u32 = 0x4;
/// Nothing but what comes unasked: `POLLHUP` and `POLLERR`. A peer that only said all it has to say
/// (a shell's pipe) still waits for the answer.
const POLL_PEER_GONE: u32 = 0;

/// How long a peer may take for the rest of a line, or to take what we send.
pub(super) const LINE_TIMEOUT: Duration = Duration::from_secs(10);

/// Descriptors of a request that are kept until it is read; further ones are closed.
pub(super) const GIVEN_MAX: usize = 16;

/// Bytes taken at once.
const PIECE: usize = 4096;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Lines {
    socket: OwnedFd,
    /// What came and is not a whole line yet.
    buffer: Vec<u8>,
    longest: usize,
    /// Descriptors that came with it, at most [`GIVEN_MAX`].
    given: Vec<OwnedFd>,
}

/// How waiting for a line ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Without its end.
    Whole(Vec<u8>),
    /// Longer than allowed, or begun and never ended.
    Bad(&'static str),
    /// The peer is gone.
    End,
}

impl Lines {
    /// * `longest`: bytes of a line.
    ///
    /// Errors: those of the socket.
    pub(super) fn new(stream: UnixStream, longest: usize) -> std::io::Result<Lines> {
        stream.set_nonblocking(true)?;
        Ok(Lines { socket: stream.into(), buffer: Vec::new(), longest, given: Vec::new() })
    }

    fn fd(&self) -> Fd {
        Fd::of(&self.socket)
    }

    /// The next line. Waits for its beginning as long as it takes.
    pub(super) async fn next(&mut self, ring: &Ring) -> Line {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                return Line::Whole(line);
            }
            if self.buffer.len() > self.longest {
                return Line::Bad("the line is too long");
            }
            let poll = ring.poll(self.fd(), POLL_IN);
            let ready = if self.buffer.is_empty() {
                poll.await
            } else {
                match ring.within(LINE_TIMEOUT, poll).await {
                    Ok(ready) => ready,
                    Err(_) => return Line::Bad("the rest of the line did not come"),
                }
            };
            if ready.is_err() || !self.take() {
                return Line::End;
            }
        }
    }

    /// The descriptors that came since this was asked, in the order of the sender.
    pub(super) fn given(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.given)
    }

    /// Takes what is there. `false`: the peer is gone.
    fn take(&mut self) -> bool {
        let mut piece = [0; PIECE];
        match receive(&self.socket, &mut piece, Wait::Never) {
            Ok(received) if received.len == 0 => false,
            Ok(received) => {
                self.buffer.extend_from_slice(piece.get(..received.len).unwrap_or_default());
                let room = GIVEN_MAX.saturating_sub(self.given.len());
                self.given.extend(received.descriptors.into_iter().take(room));
                true
            }
            Err(errno) => errno == Errno::AGAIN,
        }
    }

    /// Sends a line; `text` has no line break.
    ///
    /// Errors: the peer is gone or does not read.
    pub(super) async fn send(&self, ring: &Ring, text: &str) -> Result<(), Errno> {
        let line = format!("{text}\n");
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            match send(self.socket.as_fd(), rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let poll = ring.poll(self.fd(), POLL_OUT);
                    ring.within(LINE_TIMEOUT, poll).await.map_err(|_| Errno::TIMEDOUT)??;
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Whether the peer has read most of what was sent.
    pub(super) async fn has_room(&self, ring: &Ring) -> bool {
        ring.within(Duration::ZERO, ring.poll(self.fd(), POLL_OUT)).await.is_ok()
    }

    /// Sends a line if there is room for all of it now; else it is left out.
    pub(super) async fn send_if_room(&self, ring: &Ring, text: &str) -> Result<(), Errno> {
        if self.has_room(ring).await { self.send(ring, text).await } else { Ok(()) }
    }

    /// Waits until the peer has closed its end altogether.
    pub(super) async fn gone(&self, ring: &Ring) {
        let _ = ring.poll(self.fd(), POLL_PEER_GONE).await;
    }
}
