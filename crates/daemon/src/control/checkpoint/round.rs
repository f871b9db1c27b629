//! The client's side of a checkpoint: brings the servers of all its disks to one instant.
//!
//! Promises: all disks have the checkpoint afterwards, or none has; when a step fails, or this
//! process dies, the servers let their disks go at once. No disk is held while another one is still
//! being prepared. Blocks its thread; each wait has a limit.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_disk::Progress;
use ringdisk_messages::{Wait, pair, receive};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::FsWord;
use rustix::io::{retry_on_intr, write};
use rustix::net::{SendFlags, SocketType, send};
use serde_json::Value;

use crate::control::client::{Client, Timeout};
use crate::control::protocol::Command;
use crate::control::protocol::checkpoint::{Begin, DRAIN_MAX, HOLD_MAX, STEP_MAX, Step};
use crate::failure::{Exit, Failure};

/// How often a signal is looked for while a server says nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A server may be late by so much: it has the limit of its own step.
const LATE: Duration = Duration::from_secs(1);
/// An answer may take so long when everything was said.
const ANSWER: Duration = Duration::from_secs(20);
/// Type of the file systems of FUSE (linux/magic.h).
const FUSE_SUPER_MAGIC: FsWord = 0x6573_5546;

/// A disk of a checkpoint.
#[derive(Debug)]
pub struct Part {
    /// Its server.
    pub client: Client,
    /// What it is asked for.
    pub begin: Begin,
    /// The fleecing file.
    pub fleece: OwnedFd,
    /// Where readers are served; empty where another disk of the process has the sockets.
    pub listeners: Vec<OwnedFd>,
}

/// A disk that has its checkpoint.
#[derive(Debug)]
pub struct Begun {
    /// Its server.
    pub client: Client,
    /// What it was asked for.
    pub begin: Begin,
    /// Bytes of the disk.
    pub size: u64,
    /// Requests of its clients waited so long at most.
    pub paused: Duration,
    /// A leased checkpoint ends when this is closed.
    pub lease: OwnedFd,
}

/// A server on its way.
struct Server {
    client: Client,
    begin: Begin,
    steps: OwnedFd,
    target: String,
    /// It has said why it does not go on, and says nothing more.
    has_refused: bool,
}

/// Makes a fleecing file: it has no name, so it is gone when nobody has it open.
///
/// Errors: the directory cannot be used.
pub fn fleecing_file(directory: &Path) -> Result<OwnedFd, Failure> {
    let shown = directory.display();
    let cannot = |error: &io::Error| {
        let doing = format!("cannot make a fleecing file in '{shown}'");
        Failure::system(doing, error, Exit::Storage).hint("--fleece-dir names another directory")
    };
    let file = tempfile::tempfile_in(directory).map_err(|error| cannot(&error))?;
    let system = rustix::fs::fstatfs(&file).map_err(|errno| cannot(&errno.into()))?;
    if system.f_type == FUSE_SUPER_MAGIC {
        return Err(Failure::new(
            Exit::Usage,
            format!("'{shown}' lies on a FUSE file system: a server could wait for itself there"),
        )
        .hint("--fleece-dir names another directory"));
    }
    Ok(file.into())
}

/// Bytes that are free where the fleecing files are.
///
/// Errors: those of statvfs(3).
pub fn free_bytes(directory: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(directory)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Begins a checkpoint of all these disks at one instant.
///
/// * `progress`: when it is cancelled, the checkpoint is given up.
///
/// Errors: why it is not there, with the name of the disk; no disk has it then.
pub fn begin(parts: Vec<Part>, progress: &Progress) -> Result<Vec<Begun>, Failure> {
    let system =
        |error: &io::Error| Failure::system("cannot begin a checkpoint", error, Exit::General);
    let verdict = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let verdict = verdict.map_err(|errno| system(&errno.into()))?;
    let mut servers = Vec::with_capacity(parts.len());
    for Part { mut client, begin, fleece, listeners } in parts {
        let (steps, theirs) = pair(SocketType::SEQPACKET).map_err(|errno| system(&errno.into()))?;
        let mut given = vec![theirs.as_fd(), verdict.as_fd(), fleece.as_fd()];
        given.extend(listeners.iter().map(AsFd::as_fd));
        let target = client.target_name().to_owned();
        client.ask(&Command::CheckpointBegin(Box::new(begin.clone())), &given)?;
        servers.push(Server { client, begin, steps, target, has_refused: false });
    }
    let steps = [
        (None, Step::Prepared, STEP_MAX),
        (Some(Step::Hold), Step::Held, DRAIN_MAX + LATE),
        (Some(Step::Freeze), Step::Frozen, HOLD_MAX),
        (Some(Step::Go), Step::Waiting, STEP_MAX),
        (Some(Step::Serve), Step::Ready, STEP_MAX),
    ];
    for (say, hear, limit) in steps {
        if let Err(failure) = step(&mut servers, say, hear, limit, progress) {
            give_up(servers);
            return Err(failure);
        }
    }
    retry_on_intr(|| write(&verdict, &1u64.to_ne_bytes()))
        .map_err(|errno| system(&errno.into()))?;
    let mut begun = Vec::with_capacity(servers.len());
    for Server { mut client, begin, steps, target, .. } in servers {
        // It stays whatever the user says meanwhile.
        let answer = client.answer(&Progress::new(), Timeout::Answer(ANSWER));
        let value = answer.map_err(|failure| failure.context(format!("'{target}'")))?;
        let number = |key| value.get(key).and_then(Value::as_u64).unwrap_or_default();
        let (size, paused) = (number("size"), Duration::from_micros(number("paused-us")));
        begun.push(Begun { client, begin, size, paused, lease: steps });
    }
    Ok(begun)
}

/// Says one step to all servers, and waits until all have answered it.
fn step(
    servers: &mut [Server],
    say: Option<Step>,
    hear: Step,
    limit: Duration,
    progress: &Progress,
) -> Result<(), Failure> {
    let deadline = Instant::now() + limit;
    if let Some(say) = say {
        for server in servers.iter() {
            // One that is gone is heard of below.
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let _ = send(&server.steps, &[say.letter()], flags);
        }
    }
    servers.iter_mut().try_for_each(|server| server.hear(hear, deadline, limit, progress))
}

impl Server {
    /// Waits for a step.
    ///
    /// Errors: what the server says instead.
    fn hear(
        &mut self,
        step: Step,
        deadline: Instant,
        limit: Duration,
        progress: &Progress,
    ) -> Result<(), Failure> {
        loop {
            if progress.is_cancelled() {
                return Err(Failure::new(Exit::General, "the checkpoint was given up"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let target = &self.target;
                let text = format!("'{target}' did not come to the instant within {limit:?}");
                return Err(Failure::new(Exit::Timeout, text)
                    .hint("its storage may be slow, or its server stopped; try it again later"));
            }
            let wait = Timespec::try_from(left.min(POLL_INTERVAL)).ok();
            let mut ready = [PollFd::new(&self.steps, PollFlags::IN)];
            match poll(&mut ready, wait.as_ref()) {
                Ok(0) | Err(_) => continue,
                Ok(_) => {}
            }
            let mut letter = [0; 2];
            let heard = receive(&self.steps, &mut letter, Wait::Never);
            return match heard {
                Ok(message) if message.len == 1 && letter[0] == step.letter() => Ok(()),
                _ => Err(self.refusal()),
            };
        }
    }

    /// Why the server has left the steps.
    fn refusal(&mut self) -> Failure {
        self.has_refused = true;
        let answer = self.client.answer(&Progress::new(), Timeout::Answer(ANSWER));
        let failure = answer.err().unwrap_or_else(|| {
            Failure::new(Exit::General, "the server did not keep to the steps of a checkpoint")
        });
        failure.context(format!("'{}'", self.target))
    }
}

/// Lets all servers go, and waits until they have undone what they did.
fn give_up(servers: Vec<Server>) {
    let waiting = servers.into_iter().filter(|server| !server.has_refused);
    // All hear of it before the first one is waited for.
    let clients: Vec<Client> = waiting.map(|server| server.client).collect();
    for mut client in clients {
        let _ = client.answer(&Progress::new(), Timeout::Answer(HOLD_MAX + LATE));
    }
}
