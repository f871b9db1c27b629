//! Where front ends come from: a listening socket, one connection, or a socket of theirs.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::options::{Connector, Listen};
use crate::{Error, ErrorKind};

/// A source of front ends.
#[derive(Debug)]
pub(super) enum Door {
    /// We listen.
    Listens(OwnedFd),
    /// The one that there will ever be.
    One(Option<OwnedFd>),
    /// We go to them.
    Connects(PathBuf, Connector),
}

impl Door {
    /// Errors: the socket is none that can be used.
    pub(super) fn open(listen: Listen, connector: Connector) -> Result<Door, Error> {
        match listen {
            Listen::Listener(listener) => {
                let cannot = |errno| {
                    Error::new(ErrorKind::Socket, "the listening socket cannot be used")
                        .errno(errno)
                };
                rustix::io::ioctl_fionbio(&listener, true).map_err(cannot)?;
                Ok(Door::Listens(listener))
            }
            Listen::Stream(stream) => Ok(Door::One(Some(stream))),
            Listen::Connect(path) => Ok(Door::Connects(path, connector)),
        }
    }

    /// Whether one waits that could be taken now.
    pub(super) fn has_next(&self) -> bool {
        let Door::Listens(listener) = self else { return false };
        let mut comes = [PollFd::new(listener, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut comes, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// The next front end, if one is there; never blocks for long.
    ///
    /// Errors: there will be none any more.
    pub(super) fn next(&mut self) -> Result<Option<OwnedFd>, Error> {
        match self {
            Door::Listens(listener) => Ok(accept(listener)),
            Door::One(stream) => match stream.take() {
                Some(stream) => Ok(Some(stream)),
                None => Err(Error::new(ErrorKind::Socket, "the front end has gone")),
            },
            Door::Connects(path, connector) => match connector.connect(path) {
                Ok(stream) => Ok(Some(stream)),
                Err(error) => {
                    tracing::debug!("{}: {error}", path.display());
                    Ok(None)
                }
            },
        }
    }
}

/// A front end that has connected.
fn accept(listener: &OwnedFd) -> Option<OwnedFd> {
    match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(stream) => Some(stream),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
        Err(errno) => {
            tracing::warn!("a front end could not be accepted: {errno}");
            None
        }
    }
}
