//! The successor: asks for an export, and takes it.
//!
//! Promises: only a process of our user or of root is asked; whatever goes wrong before it has
//! given the export up leaves it there.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringdisk_export::HandOverState;
use ringdisk_storage::Storage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, pidfd_open};

use super::link::Refusal;
use super::{ASK, ClientView, FORCE, GO, Kind, READY, STEP, STOP, is_trusted, link};
use crate::control::jobs::{HandedJob, handed_job};
use crate::control::registry::{candidates, connect_now, user};
use crate::failure::{Exit, Failure};
use crate::keep::succession::{self, Succession};
use crate::stopping::Stop;

/// The old process flushes its disk while the guest still works, and then stands still for as long
/// as it allows itself (`ringdisk_vhost`, `export/hand_over.rs`): 30 s.
const HANDED: Duration = Duration::from_secs(40);
/// A process whose sockets are closed is gone after this time at the latest: it only has memory to
/// give back.
const GONE: Duration = Duration::from_secs(2);

/// A process that was killed has ended this long after its sockets were closed, on most machines.
const ENDING: Duration = Duration::from_millis(200);

/// How often a process that waits for the answer notes that there is none yet.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long the old process may take to say that it has given the export up, which it had begun to
/// do when this one gave up waiting.
const LAST_WORD: Duration = Duration::from_millis(500);

/// The old process, which stands still until this is dropped.
#[derive(Debug)]
pub struct Offer {
    kind: Kind,
    /// Of each disk.
    jobs: Vec<Vec<HandedJob>>,
    /// To go on with the export, where another process may start one that does.
    right: Option<Succession>,
    stream: UnixStream,
    process: Old,
}

/// The old process, which does not serve this disk any longer.
#[derive(Debug)]
pub struct Predecessor {
    stream: UnixStream,
    /// Of each disk.
    jobs: Vec<Vec<HandedJob>>,
    /// `None`: the system does not tell.
    pid: Option<u32>,
    stop: Option<Stop>,
}

/// A process that served a disk and has not ended.
#[derive(Debug)]
pub struct Lingering {
    /// Its pid; `None`: the system does not tell.
    pub pid: Option<u32>,
}

impl Lingering {
    /// Those of these files that it still has open, as far as this process may look.
    ///
    /// * `files`: device and inode.
    pub fn has_open(&self, files: &[(u64, u64)]) -> Vec<PathBuf> {
        let entries = self.pid.and_then(|pid| fs::read_dir(format!("/proc/{pid}/fd")).ok());
        let open = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        let is_ours = |path: &PathBuf| {
            let meta = fs::metadata(path);
            meta.is_ok_and(|meta| files.contains(&Storage::identity_of(&meta)))
        };
        let mut names: Vec<_> =
            open.filter(is_ours).filter_map(|path| fs::read_link(path).ok()).collect();
        names.sort();
        names.dedup();
        names
    }
}

/// Asks the process that serves a disk for it. Its clients wait from now on.
///
/// * `kind`: what is asked for.
/// * `path`: of the vhost-user socket or the mountpoint, for messages.
/// * `socket`: name of the socket for the successor.
/// * `view`: what this process would show to the clients.
///
/// Errors: no process serves there; it cannot be had now, or never; clients have been shown
/// something else.
pub fn ask(
    kind: Kind,
    path: &Path,
    socket: &str,
    view: &ClientView,
) -> Result<(HandOverState, Offer), Failure> {
    let name = path.display();
    let found = candidates(socket, user());
    let stream = connect(&found, is_trusted).ok_or_else(|| kind.no_predecessor(path))?;
    let mut process = Old::of(&stream);
    let doing = || format!("the process that serves '{name}' did not hand it over");
    let failed = |error: io::Error| match is_end(&error) {
        true => Failure::new(Exit::General, format!("{}: the connection has ended", doing()))
            .hint("if it has ended, start without --upgrade"),
        false => Failure::system(doing(), &error, Exit::General),
    };
    stream.set_write_timeout(Some(STEP)).map_err(failed)?;
    (&stream).write_all(&[ASK]).map_err(failed)?;
    link::send_view(&stream, view).map_err(failed)?;
    let end = Instant::now() + HANDED;
    process.since = still_serves(&stream, end);
    let left = end.saturating_duration_since(Instant::now());
    match link::receive(&stream, left).map_err(failed)? {
        Ok(mut state) => {
            stream.set_read_timeout(Some(STEP)).map_err(failed)?;
            let cannot = |why| {
                let text = format!("its jobs cannot be taken over: {why}");
                Failure::new(Exit::Unsupported, text)
                    .hint("it goes on as before; wait for its jobs, or cancel them")
            };
            let right = succession::unpack(&mut state).map_err(|why| {
                Failure::new(Exit::Unsupported, format!("{}: {why}", doing()))
                    .hint("it goes on as before")
            })?;
            let mut jobs = Vec::new();
            for disk in (0..view.each().count()).rev() {
                jobs.insert(0, handed_job::unpack(&mut state, disk).map_err(cannot)?);
            }
            Ok((state, Offer { kind, jobs, right, stream, process }))
        }
        Err(Refusal::Now(why)) => Err(Failure::new(Exit::General, format!("{}: {why}", doing()))
            .hint("it goes on as before; try again later")),
        Err(Refusal::Unlike(why)) => {
            let (who, sees) = (kind.clients(), kind.what_clients_see());
            let text = format!("{}: {who} would find another disk: {why}", doing());
            Err(Failure::new(Exit::Usage, text).hint(format!(
                "it goes on as before; --upgrade takes the words that it was started with, and \
                 {sees} \
                 changes only when it is stopped and started anew",
            )))
        }
        Err(Refusal::Never { why, hint }) => {
            let failure = Failure::new(Exit::Unsupported, format!("{}: {why}", doing()));
            Err(failure.hint(format!("it goes on as before; {hint}")))
        }
    }
}

/// Waits for the first byte of the answer, and gives a moment at which the old process had not sent
/// it yet. (A moment after the first byte would not do: this process may have been stopped by a
/// signal meanwhile, and the old one gone on.)
fn still_serves(stream: &UnixStream, end: Instant) -> Instant {
    loop {
        let now = Instant::now();
        let left = end.saturating_duration_since(now).min(POLL_INTERVAL);
        let mut fds = [PollFd::new(stream, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) if !left.is_zero() => {}
            _ => return now,
        }
    }
}

/// Connects to the first process that listens and is to be believed.
fn connect(places: &[PathBuf], is_trusted: fn(&UnixStream) -> bool) -> Option<UnixStream> {
    places.iter().find_map(|place| {
        // Without waiting: a process of another user may have a name that is looked at.
        let stream = connect_now(place).ok()?;
        if is_trusted(&stream) {
            return Some(stream);
        }
        // A process that plants the name would get our clients, and we its image.
        tracing::warn!("'{}' belongs to another user and is passed over", place.display());
        None
    })
}

impl Offer {
    /// The jobs of a disk.
    ///
    /// * `disk`: its number.
    pub fn jobs(&self, disk: usize) -> &[HandedJob] {
        self.jobs.get(disk).map_or(&[], Vec::as_slice)
    }

    /// What tells whether the old process is there, also after [`Offer::take`].
    pub fn old_process(&self) -> OldProcess {
        let pidfd = self.process.pidfd.as_ref().and_then(|pidfd| pidfd.try_clone().ok());
        OldProcess { pidfd, is_kept: self.right.is_some() }
    }

    /// Everything is prepared: the old process ends, and its successor goes on.
    ///
    /// An old process that is killed instead of answering goes on as little as one that has
    /// answered: everything that it had is here, as it was when it stood still.
    ///
    /// Errors: the old process goes on, or another one that its helper process has started.
    pub fn take(mut self) -> Result<Predecessor, Failure> {
        let mut take = || -> io::Result<()> {
            self.stream.write_all(&[READY])?;
            let mut word = [0];
            if let Err(late) = self.stream.read_exact(&mut word) {
                if is_end(&late) {
                    return Err(late);
                }
                // From here on the old process sees that nobody waits, unless it had seen before
                // that this one does.
                self.stream.shutdown(Shutdown::Write)?;
                self.stream.set_read_timeout(Some(LAST_WORD))?;
                self.stream.read_exact(&mut word).map_err(|_| late)?;
            }
            if word == [GO] { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
        };
        if let Err(error) = take() {
            if !(is_end(&error) && self.process.died_while_it_stood_still()) {
                let doing = format!("the {} was not handed over in time", self.kind.noun());
                return Err(Failure::system(doing, &error, Exit::General));
            }
            tracing::warn!(
                "the old process ended while it handed the {} over; it is served here",
                self.kind.noun()
            );
        }
        if !self.right.as_ref().is_none_or(Succession::claim) {
            let (noun, old) = (self.kind.noun(), "the process that served it was killed meanwhile");
            let text = format!("the {noun} was not handed over: {old}, and the next one goes on");
            return Err(Failure::new(Exit::General, text).hint("try it again"));
        }
        let (stream, pid) = (self.stream, self.process.pid);
        Ok(Predecessor { stream, jobs: self.jobs, pid, stop: None })
    }
}

/// The old process of a hand-over that may have failed.
#[derive(Debug)]
pub struct OldProcess {
    /// `None`: the system does not tell.
    pidfd: Option<OwnedFd>,
    /// Its helper process starts another one when it dies.
    is_kept: bool,
}

impl OldProcess {
    /// Whether it, or another one that its helper process starts, may serve what was not handed
    /// over. Waits for a moment: one that was killed closes its sockets first.
    pub fn may_serve(&self) -> bool {
        let is_there = |pidfd: &OwnedFd| !has_ended(pidfd, ENDING);
        self.is_kept || self.pidfd.as_ref().is_none_or(is_there)
    }
}

/// Whether the other side has closed the socket.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// The process on the other side of a socket.
#[derive(Debug)]
struct Old {
    /// `None`: the system does not tell, as of a process in another container.
    pidfd: Option<OwnedFd>,
    pid: Option<u32>,
    /// A moment before it sent its state. It stands still for [`STEP`] after that at least.
    since: Instant,
}

impl Old {
    fn of(stream: &UnixStream) -> Old {
        let peer = socket_peercred(stream).ok();
        let pidfd = peer.and_then(|peer| pidfd_open(peer.pid, PidfdFlags::empty()).ok());
        let pid = peer.map(|peer| peer.pid.as_raw_nonzero().get().cast_unsigned());
        Old { pidfd, pid, since: Instant::now() }
    }

    /// Whether it is gone, and has served nothing since it stood still: it goes on by itself after
    /// [`STEP`] only. Its socket is closed.
    fn died_while_it_stood_still(&self) -> bool {
        let Some(pidfd) = self.pidfd.as_ref().filter(|_| self.since.elapsed() < STEP) else {
            return false;
        };
        has_ended(pidfd, GONE)
    }
}

/// Waits for the end of a process. Returns whether it has come.
fn has_ended(pidfd: &OwnedFd, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

impl Predecessor {
    /// The jobs of a disk, which go on here; once.
    ///
    /// * `disk`: its number.
    pub fn take_jobs(&mut self, disk: usize) -> Vec<HandedJob> {
        self.jobs.get_mut(disk).map(std::mem::take).unwrap_or_default()
    }

    /// The stop that it was told to make while it handed the export over, as far as it has said so
    /// ([`Predecessor::wait`]).
    pub fn stop(&self) -> Option<Stop> {
        self.stop
    }

    /// Waits until the old process is gone, or has removed what it had of this disk: names are free
    /// then.
    ///
    /// * `since`: when one began to wait, for the first disk of all. A process of an earlier
    ///   version that goes on with other disks says nothing, and guests are served without a
    ///   sandbox meanwhile.
    ///
    /// Returns it where it has done neither in time: it may have been taken over, and keeps what it
    /// has open.
    pub fn wait(&mut self, since: Instant) -> Option<Lingering> {
        let mut word = [0];
        loop {
            // No time at all would be no limit.
            let left = STEP.saturating_sub(since.elapsed()).max(Duration::from_millis(1));
            let lingering = Some(Lingering { pid: self.pid });
            if self.stream.set_read_timeout(Some(left)).is_err() {
                return lingering;
            }
            match self.stream.read(&mut word) {
                // The kernel cleans up the ring that the disk was opened on, and interrupts this
                // thread for that.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_end(&error) => return None,
                Err(_) => return lingering,
                Ok(1) if word == [STOP] => self.stop = Some(Stop::Clean),
                Ok(1) if word == [FORCE] => self.stop = Some(Stop::AtOnce),
                Ok(_) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests;
