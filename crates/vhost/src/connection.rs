//! The socket of one front end: whole messages in, replies out.
//!
//! Promises: one message at a time, bounded in bytes and descriptors; a front end that stops in the
//! middle of a message, or does not take a reply, ends its connection when its time is up; how long
//! one may be silent between messages is the caller's to say. Reads never go past the end of a
//! message, so descriptors always belong to the message that they came with. Used by the control
//! thread, which waits here.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::closing::{Held, is_socket};
use crate::protocol::{FDS_MAX, HEADER_BYTES, Header, PAYLOAD_BYTES_MAX, Reply, Request};
use crate::wire;
use crate::{Error, ErrorKind};

mod peek;

pub(crate) use peek::unconsumed;

/// The result of waiting on a connection.
#[derive(Debug)]
pub enum Received {
    /// A message, whole.
    Message {
        /// Its header; nothing of it but the size was checked.
        header: Header,
        /// `header.size` bytes.
        payload: Vec<u8>,
        /// Its descriptors. Dropping the last descriptor of a socket may block.
        fds: Vec<OwnedFd>,
    },
    /// The front end closed the connection between two messages.
    Closed,
    /// The eventfd was signalled, and still is.
    Woken,
    /// Nothing came for as long as was waited, and no message is half here.
    Silence,
}

/// The connection of a front end.
#[derive(Debug)]
pub struct Connection {
    socket: Held,
    /// Bytes and descriptors of the message that is arriving.
    bytes: Vec<u8>,
    fds: Vec<Held>,
    started: Option<Instant>,
    /// Messages are recorded elsewhere before they are taken out of the socket.
    is_kept: bool,
}

/// The result of a poll of the sockets.
enum Ready {
    Socket,
    Woken,
    Late,
}

impl Connection {
    /// * `socket`: a connected Unix stream socket, blocking or not.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Connection {
        Connection::of(socket.into())
    }

    /// As [`Connection::new`].
    pub(crate) fn of(socket: Held) -> Connection {
        Connection { socket, bytes: Vec::new(), fds: Vec::new(), started: None, is_kept: false }
    }

    /// Waits for the next message. After [`Received::Woken`] it may be called again and goes on
    /// where it was.
    ///
    /// * `wake`: an eventfd that ends the waiting; it comes before messages, and is not read.
    /// * `timeout`: from the first byte of a message to its last.
    /// * `silence`: how long to wait for the first byte; `None`: for ever.
    ///
    /// Errors: the message is too large, has too many descriptors, or ends too early or too late;
    /// the connection is of no use then.
    pub fn receive(
        &mut self,
        wake: BorrowedFd<'_>,
        timeout: Duration,
        silence: Option<Duration>,
    ) -> Result<Received, Error> {
        if self.is_kept {
            return self.look(wake, timeout, silence);
        }
        let quiet_until = silence.map(|silence| Instant::now() + silence);
        loop {
            let need = self.need()?;
            if self.bytes.len() == need {
                return self.take();
            }
            let deadline = self.started.map(|started| started + timeout).or(quiet_until);
            match wait(self.socket.as_fd(), PollFlags::IN, Some(wake), deadline)? {
                Ready::Woken => return Ok(Received::Woken),
                Ready::Late if self.started.is_none() => return Ok(Received::Silence),
                Ready::Late => return Err(self.stopped_in_the_middle()),
                Ready::Socket => {}
            }
            if !self.read(need)? {
                return Ok(Received::Closed);
            }
        }
    }

    /// Sends a reply.
    ///
    /// * `timeout`: for all of it.
    ///
    /// Errors: the front end does not take it, or has gone.
    pub fn send(&self, reply: &Reply, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        let (mut bytes, mut fds) = (reply.bytes(), reply.fds());
        while !bytes.is_empty() {
            match wire::send(self.socket.as_fd(), bytes, fds) {
                Ok(sent) => (bytes, fds) = (&bytes[sent..], &[]),
                Err(Errno::AGAIN) => {
                    let socket = self.socket.as_fd();
                    if let Ready::Late = wait(socket, PollFlags::OUT, None, Some(deadline))? {
                        let message = "the front end does not take the reply";
                        return Err(Error::new(ErrorKind::TimedOut, message));
                    }
                }
                Err(errno) => {
                    return Err(Error::new(ErrorKind::System, "sending a reply").errno(errno));
                }
            }
        }
        Ok(())
    }

    /// The front end sees the end of the connection now, however long its closing takes. Another
    /// process that has the socket can use it no longer either.
    pub(crate) fn end(&self) {
        self.socket.end();
    }

    /// Whether no part of a message has arrived, so that another process can go on with the socket.
    #[must_use]
    pub fn is_between_messages(&self) -> bool {
        self.bytes.is_empty() && self.fds.is_empty()
    }

    /// The socket, for another process to go on with.
    ///
    /// Errors: part of a message has arrived; the connection is given back.
    pub fn into_socket(self) -> Result<OwnedFd, Connection> {
        if self.bytes.is_empty() && self.fds.is_empty() {
            Ok(self.socket.into_fd())
        } else {
            Err(self)
        }
    }

    pub(crate) fn socket(&self) -> &Held {
        &self.socket
    }

    fn header(&self) -> Option<Header> {
        self.bytes.first_chunk().map(Header::parse)
    }

    /// The message that is arriving, as errors name it.
    fn name(&self) -> String {
        let request = self.header().map(|header| header.request);
        match request.map(|number| (Request::from_number(number), number)) {
            None => "header".to_owned(),
            Some((Some(request), _)) => request.name().to_owned(),
            Some((None, number)) => format!("request {number}"),
        }
    }

    /// How many bytes the message has, as far as is known.
    fn need(&self) -> Result<usize, Error> {
        let Some(header) = self.header() else { return Ok(HEADER_BYTES) };
        let size = header.size as usize;
        if size > PAYLOAD_BYTES_MAX {
            let name = self.name();
            let message = format!(
                "{name}: payload of {size} bytes, at most {PAYLOAD_BYTES_MAX} are possible"
            );
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        Ok(HEADER_BYTES + size)
    }

    /// Reads what there is, up to `need` bytes. Returns whether the connection still stands.
    fn read(&mut self, need: usize) -> Result<bool, Error> {
        let had = self.bytes.len();
        self.bytes.resize(need, 0);
        let got = wire::receive(self.socket.as_fd(), &mut self.bytes[had..], &mut self.fds);
        let bytes = got.as_ref().map_or(0, |piece| piece.bytes);
        self.bytes.truncate(had + bytes);
        if let Ok(piece) = &got {
            self.check_fds(piece.truncated || self.fds.len() > FDS_MAX, piece.foreign)?;
        }
        match got {
            Ok(piece) if piece.bytes == 0 && had == 0 => Ok(false),
            Ok(piece) if piece.bytes == 0 => Err(ended_in_the_middle(&self.name())),
            Ok(_) => {
                self.started.get_or_insert_with(Instant::now);
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(true),
            // A front end that died with replies of ours unread.
            Err(Errno::CONNRESET) if had == 0 => Ok(false),
            Err(errno) => {
                Err(Error::new(ErrorKind::System, "reading from the front end").errno(errno))
            }
        }
    }

    fn stopped_in_the_middle(&self) -> Error {
        let message = format!("{}: stopped in the middle of it", self.name());
        Error::new(ErrorKind::TimedOut, message)
    }

    /// Errors: descriptors of a message were lost, or one is not taken.
    ///
    /// * `too_many`: more came than may.
    /// * `foreign`: what one is that another process may answer for.
    fn check_fds(&self, too_many: bool, foreign: Option<&str>) -> Result<(), Error> {
        let name = self.name();
        if too_many {
            let message = format!("{name}: more descriptors than {FDS_MAX}, or than we may open");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        let Some(what) = foreign else { return Ok(()) };
        let message = format!(
            "{name}: a descriptor of {what} is not taken: the process behind it could hold up \
             every use of it"
        );
        Err(Error::new(ErrorKind::Protocol, message).hint(
            "memory of a guest is a memfd or a file on tmpfs, hugetlbfs, ext4, xfs or btrfs (QEMU: \
             memory-backend-memfd,share=on); what \
             wakes a process is an eventfd or a pipe",
        ))
    }

    /// Errors: there is a socket where none belongs.
    fn take(&mut self) -> Result<Received, Error> {
        let Some(header) = self.header() else {
            return Err(Error::new(ErrorKind::Protocol, "a message without a header"));
        };
        if !may_bring_sockets(&header) && self.fds.iter().any(is_socket) {
            let message = format!("{}: a socket is not taken", self.name());
            return Err(Error::new(ErrorKind::Protocol, message).hint(
                "what wakes a process is an eventfd or a pipe: a socket may hold descriptors that \
                 take long to close",
            ));
        }
        let payload = self.bytes.split_off(HEADER_BYTES);
        self.bytes.clear();
        self.started = None;
        let fds = std::mem::take(&mut self.fds).into_iter().map(Held::into_fd).collect();
        Ok(Received::Message { header, payload, fds })
    }
}

fn ended_in_the_middle(name: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("{name}: the connection ended in the middle of it"))
}

/// Whether a message is about a socket: the channel on which we speak first, or one through which
/// the state goes.
fn may_bring_sockets(header: &Header) -> bool {
    let request = Request::from_number(header.request);
    matches!(request, Some(Request::SetBackendReqFd | Request::SetDeviceStateFd))
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits until the socket is ready or `wake`, if there is one, is readable.
///
/// * `deadline`: `None`: forever.
fn wait(
    socket: impl AsFd,
    flags: PollFlags,
    wake: Option<BorrowedFd<'_>>,
    deadline: Option<Instant>,
) -> Result<Ready, Error> {
    let socket = socket.as_fd();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [
            PollFd::from_borrowed_fd(socket, flags),
            PollFd::from_borrowed_fd(wake.unwrap_or(socket), PollFlags::IN),
        ];
        // Without an eventfd only the first of them counts.
        let count = 1 + usize::from(wake.is_some());
        match poll(&mut fds[..count], timeout.as_ref()) {
            Ok(0) => return Ok(Ready::Late),
            Ok(_) if count == 2 && !fds[1].revents().is_empty() => return Ok(Ready::Woken),
            Ok(_) => return Ok(Ready::Socket),
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(Error::new(ErrorKind::System, "waiting for the front end").errno(errno));
            }
        }
    }
}

#[cfg(test)]
mod tests;
