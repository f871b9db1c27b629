//! Connects to a server, in bounded time.
//!
//! Promises: every call has a deadline, whatever the peer does, except the look-up of a host's
//! name, which is made once, when the export is opened. Blocks: for control threads and threads
//! made for it, never a queue thread.

use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_ring::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

use super::address::NbdServer;
use crate::endpoint::NbdEndpoint;
use crate::opener::Opener;

/// How often a Unix socket whose queue of clients is full is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The endpoints of a server, the one to try first in front. Blocks for the look-up of a name.
///
/// Errors: no such host.
pub(super) fn endpoints(server: &NbdServer) -> std::io::Result<Vec<NbdEndpoint>> {
    match server {
        NbdServer::Unix(path) => Ok(vec![NbdEndpoint::Unix(std::path::absolute(path)?)]),
        NbdServer::Tcp(host, port) => {
            let found = (host.as_str(), *port).to_socket_addrs()?;
            Ok(found.map(NbdEndpoint::Tcp).collect())
        }
    }
}

/// A socket that is used by blocking calls with a common deadline.
#[derive(Debug)]
pub(super) struct Timed {
    pub(super) socket: OwnedFd,
    pub(super) deadline: Instant,
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

    /// Reads until `bytes` is full.
    ///
    /// Errors: `ECONNRESET` at the end of the stream too; `ETIMEDOUT`.
    pub(super) fn read(&self, mut bytes: &mut [u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match recv(&self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Errno::CONNRESET),
                Ok((count, _)) => bytes = bytes.split_at_mut(count).1,
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Writes all.
    ///
    /// Errors: the socket's; `ETIMEDOUT`.
    pub(super) fn write(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => bytes = bytes.split_at(count).1,
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
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
    let timed = Timed { socket, deadline };
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
