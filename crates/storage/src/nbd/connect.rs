//! Connects to a server, in bounded time.
//!
//! Promises: every call has a deadline, whatever the peer does, except the look-up of a host's
//! name, which is made once, when the export is opened. Blocks: for control threads and threads
//! made for it, never a queue thread.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_ring::Errno;
use ringdisk_tls::{ClientTls, StreamError, TlsStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

use crate::endpoint::NbdEndpoint;
use crate::opener::Opener;

/// How often a Unix socket whose queue of clients is full is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A socket that is used by blocking calls with a common deadline.
#[derive(Debug)]
pub(super) struct Timed {
    pub(super) socket: OwnedFd,
    pub(super) deadline: Instant,
    /// All is encrypted from now on.
    pub(super) tls: Option<TlsStream>,
}

/// The socket of a [`Timed`] for TLS: each call has its deadline.
struct Raw<'a>(&'a Timed);

impl Read for Raw<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        Ok(self.0.receive(to)?)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(self.0.send(from)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Errors of reading and writing over TLS.
fn of_io(error: &io::Error) -> StreamError {
    match error.raw_os_error() {
        Some(code) => StreamError::Socket(Errno::from_raw_os_error(code)),
        None => StreamError::Tls(error.to_string()),
    }
}

impl Timed {
    /// Connects to the first endpoint that takes the connection. Where this process may not
    /// connect, `opener` does it.
    ///
    /// Errors: the last endpoint's; `ETIMEDOUT`.
    pub(super) fn connect(
        endpoints: &[NbdEndpoint],
        opener: Option<&Arc<dyn Opener>>,
        deadline: Instant,
    ) -> Result<Timed, Errno> {
        let mut result = Err(Errno::ADDRNOTAVAIL);
        for endpoint in endpoints {
            result = connect_one(endpoint, opener, deadline);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    fn wait(&self, flags: PollFlags) -> Result<(), Errno> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&left)) {
            Ok(0) => Err(Errno::TIMEDOUT),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Shakes hands by TLS; all is encrypted from then on.
    ///
    /// Errors: the server's certificate is not good, or it refuses this client; as
    /// [`Timed::read`].
    pub(super) fn encrypt(&mut self, tls: &ClientTls) -> Result<(), StreamError> {
        self.tls = Some(tls.connect(&mut Raw(self))?);
        Ok(())
    }

    /// Receives some bytes; 0: the end of the stream.
    fn receive(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match recv(&self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
                Ok((count, _)) => return Ok(count),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Sends some bytes.
    fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        loop {
            match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => return Ok(count),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Reads until `bytes` is full.
    ///
    /// Errors: `ECONNRESET` at the end of the stream too; `ETIMEDOUT`; those of TLS.
    pub(super) fn read(&self, mut bytes: &mut [u8]) -> Result<(), StreamError> {
        while !bytes.is_empty() {
            let count = match &self.tls {
                None => self.receive(bytes)?,
                Some(tls) => {
                    let mut raw = Raw(self);
                    tls.blocking(&mut raw).read(bytes).map_err(|error| of_io(&error))?
                }
            };
            if count == 0 {
                return Err(Errno::CONNRESET.into());
            }
            bytes = bytes.split_at_mut(count).1;
        }
        Ok(())
    }

    /// Writes all.
    ///
    /// Errors: the socket's; `ETIMEDOUT`.
    pub(super) fn write(&self, mut bytes: &[u8]) -> Result<(), StreamError> {
        while !bytes.is_empty() {
            let count = match &self.tls {
                None => self.send(bytes)?,
                Some(tls) => {
                    let mut raw = Raw(self);
                    tls.blocking(&mut raw).write(bytes).map_err(|error| of_io(&error))?
                }
            };
            bytes = bytes.split_at(count).1;
        }
        Ok(())
    }
}

fn connect_one(
    endpoint: &NbdEndpoint,
    opener: Option<&Arc<dyn Opener>>,
    deadline: Instant,
) -> Result<Timed, Errno> {
    let socket = loop {
        let begun = endpoint.begin().or_else(|errno| match (errno, opener) {
            // A sandbox: seccomp answers ENOSYS, landlock EACCES.
            (Errno::NOSYS | Errno::ACCESS | Errno::PERM, Some(opener)) => opener.connect(endpoint),
            _ => Err(errno),
        });
        match begun {
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(RETRY_INTERVAL),
            Err(Errno::INTR) => {}
            begun => break begun?,
        }
    };
    let timed = Timed { socket, deadline, tls: None };
    timed.wait(PollFlags::OUT)?;
    match sockopt::socket_error(&timed.socket)? {
        Ok(()) => {}
        Err(errno) => return Err(errno),
    }
    // A ring reads and writes without waiting on a socket that is not in blocking mode.
    let flags = rustix::fs::fcntl_getfl(&timed.socket)?;
    rustix::fs::fcntl_setfl(&timed.socket, flags - rustix::fs::OFlags::NONBLOCK)?;
    Ok(timed)
}
