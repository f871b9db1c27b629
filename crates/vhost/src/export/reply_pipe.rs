//! Replies to a front end that are sent exactly once, whenever the process is killed.
//!
//! Promises: a reply is in a pipe that outlives the process before the state says that its message
//! was carried out, and one system call moves it from the pipe into the socket. So the next process
//! finds it either in the pipe, and sends it, or sent. Control thread; waits as long as it is told.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};

use crate::protocol::{HEADER_BYTES, PAYLOAD_BYTES_MAX};
use crate::{Error, ErrorKind};

/// Longest reply, bytes.
const REPLY_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;

/// The pipe.
#[derive(Debug)]
pub(super) struct ReplyPipe {
    pub(super) read: OwnedFd,
    pub(super) write: OwnedFd,
}

fn failed(errno: Errno) -> Error {
    Error::new(ErrorKind::System, "a reply that is kept").errno(errno)
}

impl ReplyPipe {
    /// Errors: no descriptor is left.
    pub(super) fn make() -> Result<ReplyPipe, Error> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(failed)?;
        Ok(ReplyPipe { read, write })
    }

    /// The pipe of a process before this one. That it does not wait is not believed.
    ///
    /// Errors: it is none.
    pub(super) fn adopt(read: OwnedFd, write: OwnedFd) -> Result<ReplyPipe, Error> {
        for end in [&read, &write] {
            rustix::io::ioctl_fionbio(end, true).map_err(failed)?;
        }
        Ok(ReplyPipe { read, write })
    }

    /// Puts a reply into the pipe, which is empty.
    ///
    /// Errors: there is no room for it.
    pub(super) fn fill(&self, reply: &[u8]) -> Result<(), Error> {
        match retry_on_intr(|| rustix::io::write(&self.write, reply)).map_err(failed)? {
            all if all == reply.len() => Ok(()),
            _ => Err(failed(Errno::NOBUFS)),
        }
    }

    /// Drops what is in the pipe: the message will be carried out again.
    pub(super) fn drain(&self) {
        let mut bytes = [0; REPLY_BYTES_MAX];
        while self.has_some() && matches!(rustix::io::read(&self.read, &mut bytes), Ok(1..)) {}
    }

    fn has_some(&self) -> bool {
        let mut ready = [PollFd::new(&self.read, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut ready, Some(&now)).is_ok() && ready[0].revents().contains(PollFlags::IN)
    }

    /// Sends what is in the pipe.
    ///
    /// * `timeout`: for all of it.
    ///
    /// Errors: the front end does not take it, or has gone.
    pub(super) fn send(&self, socket: BorrowedFd<'_>, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        while self.has_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            // With room for a reply: the socket itself may be one that waits.
            let mut room = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
            let left = Timespec::try_from(left).ok();
            match poll(&mut room, left.as_ref()) {
                Ok(0) => {
                    let message = "the front end does not take the reply";
                    return Err(Error::new(ErrorKind::TimedOut, message));
                }
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno)),
            }
            let (pipe, flags) = (self.read.as_fd(), SpliceFlags::NONBLOCK);
            match splice(pipe, None, socket, None, REPLY_BYTES_MAX, flags) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => {
                    return Err(Error::new(ErrorKind::System, "sending a reply").errno(errno));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// How long one send may take (10 s).
    const SEND_LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn a_reply_is_in_the_pipe_or_sent_and_the_longest_fits() {
        let pipe = ReplyPipe::make().expect("a pipe");
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        for len in [HEADER_BYTES, REPLY_BYTES_MAX] {
            let reply = vec![7; len];
            pipe.fill(&reply).expect("room");
            // As the next process finds it.
            let (read, write) = (pipe.read.try_clone(), pipe.write.try_clone());
            let next = ReplyPipe::adopt(read.expect("a copy"), write.expect("a copy"));
            let next = next.expect("the pipe");
            assert!(next.has_some());
            next.send(ours.as_fd(), SEND_LIMIT).expect("it is taken");
            assert!(!next.has_some());
            let mut sent = vec![0; len];
            theirs.read_exact(&mut sent).expect("all of it");
            assert_eq!(sent, reply);
        }
        pipe.send(ours.as_fd(), SEND_LIMIT).expect("nothing is there");
        pipe.fill(b"of a message that is carried out again").expect("room");
        pipe.drain();
        assert!(!pipe.has_some());
    }

    #[test]
    fn a_pipe_that_waits_and_a_front_end_that_takes_nothing_hold_nothing_up() {
        // As a process may have left them that was taken over.
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        let pipe = ReplyPipe::adopt(read, write).expect("the pipe");
        pipe.drain();
        while pipe.fill(&[0; 4096]).is_ok() {}
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let error = pipe.send(ours.as_fd(), Duration::from_millis(50)).expect_err("full");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(theirs);
        assert!(pipe.send(ours.as_fd(), SEND_LIMIT).is_err());
    }
}
