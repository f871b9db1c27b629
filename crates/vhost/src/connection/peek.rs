//! Messages that are looked at first and taken out of the socket only when they were recorded
//! elsewhere.
//!
//! Promises: as [`Connection::receive`]; besides, nothing is taken before [`Connection::consume`],
//! so a process that has the socket after this one was killed finds all that was not taken, and
//! knows how much of the recorded message was ([`unconsumed`]). Control thread.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ringdisk_messages::{begin_peeking, consume, peek, peek_bytes, peeked};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{Connection, Ready, Received, ended_in_the_middle, wait};
use crate::closing::Held;
use crate::descriptor_check::vet;
use crate::protocol::{FDS_MAX, HEADER_BYTES, PAYLOAD_BYTES_MAX};
use crate::{Error, ErrorKind};

/// The socket reports a message that is half here all the time: it is looked at so often.
const HALF: Duration = Duration::from_millis(2);

/// How much of the recorded message is still in the socket, bytes.
pub(crate) fn unconsumed(socket: &Held) -> Result<usize, Error> {
    peeked(socket).map(Option::unwrap_or_default).map_err(failed)
}

fn failed(errno: Errno) -> Error {
    Error::new(ErrorKind::System, "looking at the socket of the front end").errno(errno)
}

impl Connection {
    /// A connection whose messages are looked at before they are taken.
    ///
    /// Errors: the socket cannot count what was looked at.
    pub(crate) fn kept(socket: Held) -> Result<Connection, Error> {
        if peeked(&socket).map_err(failed)?.is_none() {
            begin_peeking(&socket).map_err(failed)?;
        }
        Ok(Connection { is_kept: true, ..Connection::of(socket) })
    }

    /// Takes the message that was looked at out of the socket, or what is left of it there.
    ///
    /// Errors: it is not there any more.
    pub(crate) fn consume(&self, bytes: usize) -> Result<(), Error> {
        consume(&self.socket, bytes).map_err(failed)
    }

    /// As [`Connection::receive`].
    pub(super) fn look(
        &mut self,
        wake: BorrowedFd<'_>,
        timeout: Duration,
        silence: Option<Duration>,
    ) -> Result<Received, Error> {
        let quiet_until = silence.map(|silence| Instant::now() + silence);
        loop {
            let deadline = self.started.map(|started| started + timeout).or(quiet_until);
            match wait(&self.socket, PollFlags::IN, Some(wake), deadline)? {
                Ready::Woken => return Ok(Received::Woken),
                Ready::Late if self.started.is_none() => return Ok(Received::Silence),
                Ready::Late => return Err(self.stopped_in_the_middle()),
                Ready::Socket => {}
            }
            match self.look_at_all()? {
                Looked::Closed => return Ok(Received::Closed),
                Looked::Whole => return self.take(),
                Looked::Nothing => {}
                Looked::Half => {
                    let started = *self.started.get_or_insert_with(Instant::now);
                    if started.elapsed() > timeout {
                        return Err(self.stopped_in_the_middle());
                    }
                    let mut fds = [PollFd::from_borrowed_fd(wake, PollFlags::IN)];
                    let _ = poll(&mut fds, Timespec::try_from(HALF).ok().as_ref());
                }
            }
        }
    }

    /// Looks whether a message is here, whole, and gets a copy of it if so.
    fn look_at_all(&mut self) -> Result<Looked, Error> {
        // Without descriptors first: each look at those makes copies.
        let mut bytes = [0; HEADER_BYTES + PAYLOAD_BYTES_MAX];
        let mut had = 0;
        let mut need = HEADER_BYTES;
        while had < need {
            match peek_bytes(&self.socket, had, &mut bytes[had..need]) {
                Ok(0) if had == 0 => return Ok(Looked::Closed),
                Ok(0) => {
                    self.bytes.extend_from_slice(&bytes[..had]);
                    return Err(ended_in_the_middle(&self.name()));
                }
                Ok(more) => had += more,
                Err(Errno::AGAIN) if had == 0 => return Ok(Looked::Nothing),
                Err(Errno::AGAIN) => return Ok(Looked::Half),
                Err(Errno::CONNRESET) if had == 0 => return Ok(Looked::Closed),
                Err(errno) => return Err(failed(errno)),
            }
            if had == HEADER_BYTES && need == HEADER_BYTES {
                self.bytes.extend_from_slice(&bytes[..had]);
                let sized = self.need();
                if sized.is_ok() {
                    self.bytes.clear();
                }
                need = sized?;
            }
        }
        while self.bytes.len() < need {
            let had = self.bytes.len();
            self.bytes.resize(need, 0);
            let message = peek(&self.socket, had, &mut self.bytes[had..]).map_err(failed)?;
            self.bytes.truncate(had + message.len);
            let (mut foreign, count) = (None, message.descriptors.len() + self.fds.len());
            for fd in message.descriptors {
                match vet(fd) {
                    Ok(fd) => self.fds.push(Held::from(fd)),
                    Err(name) => foreign = Some(name),
                }
            }
            self.check_fds(message.has_lost || count > FDS_MAX, foreign)?;
        }
        Ok(Looked::Whole)
    }
}

/// What a look found.
enum Looked {
    Nothing,
    /// A part of a message.
    Half,
    Whole,
    Closed,
}
