//! Where front ends come from: a listening socket, one connection, or a socket of theirs.
//!
//! Promises: control thread; asking for the next front end never waits for one. Where none can be
//! accepted (no descriptor is left) accepting pauses, longer each time up to a limit, and the log
//! hears of it once a minute at most.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::options::{Connector, Listen};
use crate::closing::{Held, is_full};
use crate::{Error, ErrorKind};

/// First pause after a failure to accept a front end that waits; each one is twice as long as the
/// one before, up to the last.
const TRY_FIRST: Duration = Duration::from_millis(100);
const TRY_LAST: Duration = Duration::from_secs(1);
/// The log is told of such failures so often at most.
const TELL: Duration = Duration::from_secs(60);

/// Where the front ends of an export come from.
#[derive(Debug)]
pub(super) enum FrontEndSource {
    /// They connect to a socket on which this process listens.
    Listens(Listener),
    /// One connection, the only one of this export.
    One(Option<Held>),
    /// This process connects to a socket on which the front end listens.
    Connects(PathBuf, Connector),
}

impl FrontEndSource {
    /// Errors: the socket is none that can be used.
    pub(super) fn open(listen: Listen, connector: Connector) -> Result<FrontEndSource, Error> {
        match listen {
            Listen::Listener(listener) => {
                let cannot = |errno| {
                    Error::new(ErrorKind::Socket, "the listening socket cannot be used")
                        .errno(errno)
                };
                rustix::io::ioctl_fionbio(&listener, true).map_err(cannot)?;
                Ok(FrontEndSource::Listens(Listener { socket: listener.into(), trouble: None }))
            }
            Listen::Stream(stream) => Ok(FrontEndSource::One(Some(stream.into()))),
            Listen::Connect(path) => Ok(FrontEndSource::Connects(path, connector)),
        }
    }

    /// How long accepting pauses after a failure; the socket would report the same front end all
    /// the time.
    pub(super) fn closed_for(&self) -> Option<Duration> {
        let FrontEndSource::Listens(Listener { trouble: Some(trouble), .. }) = self else {
            return None;
        };
        let left = trouble.again.saturating_duration_since(Instant::now());
        Some(left).filter(|left| !left.is_zero())
    }

    /// Whether a front end waits to be accepted.
    pub(super) fn has_next(&self) -> bool {
        let FrontEndSource::Listens(listener) = self else { return false };
        let mut comes = [PollFd::new(&listener.socket, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut comes, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// The next front end, if one is there; never blocks for long.
    ///
    /// Errors: there will be none any more.
    pub(super) fn next(&mut self) -> Result<Option<Held>, Error> {
        match self {
            FrontEndSource::Listens(listener) => Ok(listener.accept()),
            FrontEndSource::One(stream) => match stream.take() {
                Some(stream) => Ok(Some(stream)),
                None => Err(Error::new(ErrorKind::Socket, "the front end has gone")),
            },
            FrontEndSource::Connects(path, connector) => match connector.connect(path) {
                Ok(stream) => Ok(Some(stream.into())),
                Err(error) => {
                    tracing::debug!("{}: {error}", path.display());
                    Ok(None)
                }
            },
        }
    }
}

/// A socket that front ends connect to.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: Held,
    trouble: Option<Trouble>,
}

/// Front ends cannot be accepted, most likely because no descriptor is left.
#[derive(Debug)]
struct Trouble {
    /// When to try again.
    again: Instant,
    pause: Duration,
    /// When it was last logged.
    logged_at: Instant,
}

impl Listener {
    /// A front end that has connected, unless there is trouble.
    fn accept(&mut self) -> Option<Held> {
        let now = Instant::now();
        if self.trouble.as_ref().is_some_and(|trouble| now < trouble.again) {
            return None;
        }
        if is_full() {
            self.is_in_trouble(now, &"sockets of earlier ones are not closed yet");
            return None;
        }
        match accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(stream) => {
                self.trouble = None;
                Some(stream.into())
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
            Err(errno) => {
                self.is_in_trouble(now, &errno);
                None
            }
        }
    }

    fn is_in_trouble(&mut self, now: Instant, why: &dyn std::fmt::Display) {
        let (trouble, is_logged) = Trouble::after(self.trouble.take(), now);
        if is_logged {
            tracing::warn!(
                "a front end waits and cannot be accepted: {why}; this is tried again every {:?}",
                TRY_LAST
            );
        }
        self.trouble = Some(trouble);
    }
}

impl Trouble {
    /// One more failure. Returns whether to log it, too.
    fn after(before: Option<Trouble>, now: Instant) -> (Trouble, bool) {
        let Some(before) = before else {
            return (Trouble { again: now + TRY_FIRST, pause: TRY_FIRST, logged_at: now }, true);
        };
        let pause = (before.pause * 2).min(TRY_LAST);
        let is_logged = now.saturating_duration_since(before.logged_at) >= TELL;
        let logged_at = if is_logged { now } else { before.logged_at };
        (Trouble { again: now + pause, pause, logged_at }, is_logged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_tried_again_ever_more_rarely_and_told_once_a_minute() {
        let mut now = Instant::now();
        let (mut trouble, mut tries, mut logged) = (None, 0, 0);
        let end = now + TELL * 10 - TRY_LAST;
        while now < end {
            let (next, is_logged) = Trouble::after(trouble.take(), now);
            assert!(next.again > now && next.again <= now + TRY_LAST);
            now = next.again;
            trouble = Some(next);
            tries += 1;
            logged += u32::from(is_logged);
        }
        assert_eq!(logged, 10);
        assert!((600..610).contains(&tries), "{tries}");
    }

    #[test]
    fn front_ends_that_wait_are_seen_and_taken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut source =
            FrontEndSource::open(Listen::Listener(listener.into()), Connector::default()).unwrap();
        assert!(!source.has_next() && source.next().unwrap().is_none());
        let _front = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(source.has_next());
        // As if accept(2) had just failed.
        let FrontEndSource::Listens(listener) = &mut source else { panic!("it listens") };
        listener.trouble = Some(Trouble::after(None, Instant::now()).0);
        assert!(source.closed_for().is_some() && source.next().unwrap().is_none());
        std::thread::sleep(TRY_FIRST);
        assert!(source.closed_for().is_none() && source.next().unwrap().is_some());
        assert!(!source.has_next());
    }
}
