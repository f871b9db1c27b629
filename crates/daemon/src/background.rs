//! Into the background.
//!
//! Promises: the parent returns when the mount answers, with 0; a start-up that fails ends the
//! parent with the child's exit code, after the child has said why on the standard error that both
//! share. No fork of a running program: the program is started anew, in a session of its own.
//!
//! One byte over the socket to the parent means "ready". The standard streams are then let go,
//! except those that are regular files (a log).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

use rustix::fs::{FileType, fstat};

use crate::failure::{Exit, Failure, words};
use crate::helper::start::{Role, take_socket};
use crate::log_target;

/// What the child writes when it serves.
const READY: u8 = b'R';

/// What came of a child that was started.
#[derive(Debug)]
pub enum Started {
    /// It serves.
    Ready(Child),
    /// It ended before that.
    Ended(ExitStatus),
}

/// Starts a child with our own arguments and waits until it is ready or has failed.
///
/// Errors: the program cannot be started anew.
pub fn start(role: Role) -> io::Result<Started> {
    let (socket, mut child) = role.start_again(|_, _| Ok(()))?;
    let mut byte = [0];
    if File::from(socket).read_exact(&mut byte).is_ok() && byte == [READY] {
        return Ok(Started::Ready(child));
    }
    child.wait().map(Started::Ended)
}

/// Starts the child with our own arguments and waits until it is ready or has failed. Returns the
/// exit code.
///
/// Errors: the program cannot be started anew, or its child was killed.
pub fn run_child() -> Result<u8, Failure> {
    let started = start(Role::Background).map_err(|error| {
        Failure::system("cannot go into the background", &error, Exit::General)
            .hint("/proc must be mounted for --daemonize; or run in the foreground")
    })?;
    let status = match started {
        Started::Ready(_) => return Ok(Exit::Clean.code()),
        Started::Ended(status) => status,
    };
    match status.code().map(u8::try_from) {
        // It ended well before it was ready: stopped by a signal. That is no mount.
        Some(Ok(0)) => Ok(Exit::General.code()),
        Some(Ok(code)) => Ok(code),
        _ => Err(Failure::new(
            Exit::General,
            format!(
                "the background process was killed by signal {} before the mount was ready",
                status.signal().unwrap_or(0)
            ),
        )),
    }
}

/// What a process does that was asked to serve in the background.
#[derive(Debug)]
pub enum Turn {
    /// It serves; with a way to say that it is ready, where its parent waits for that.
    Serves(Option<Background>),
    /// Its child serves, or has failed; the exit code.
    Parent(u8),
}

impl Turn {
    /// Finds out whether this process is the one that serves; else starts that.
    ///
    /// * `is_kept`: the helper process that keeps what this one serves is its parent, and is in the
    ///   background already.
    /// * `start`: starts the child, such as [`run_child`].
    ///
    /// Errors: those of `start`, and of [`Background::enter`].
    pub fn take(
        is_kept: bool,
        start: impl FnOnce() -> Result<u8, Failure>,
    ) -> Result<Turn, Failure> {
        if is_kept && Role::Kept.is_ours() {
            return Ok(Turn::Serves(None));
        }
        if Role::Background.is_ours() || Role::Device.is_ours() {
            return Background::enter().map(|background| Turn::Serves(Some(background)));
        }
        start().map(Turn::Parent)
    }
}

/// Refuses sockets of a service manager, which a child in the background does not get.
///
/// Errors: there are some.
pub fn refuse_passed_sockets() -> Result<(), Failure> {
    let is_ours = |pid: String| pid == std::process::id().to_string();
    if !std::env::var("LISTEN_PID").is_ok_and(is_ours) {
        return Ok(());
    }
    Err(Failure::new(
        Exit::Usage,
        "a process in the background does not get the sockets of the service manager",
    )
    .hint("leave --daemonize out; the manager waits for Type=notify"))
}

/// The child's way to say that it is ready.
#[derive(Debug)]
pub struct Background {
    socket: OwnedFd,
}

impl Background {
    /// Makes the child a session of its own and takes the socket from standard input.
    ///
    /// Errors: those of the system.
    pub fn enter() -> Result<Background, Failure> {
        let enter = || -> io::Result<OwnedFd> {
            // Only a process group's leader is refused, and a child is none.
            let _ = rustix::process::setsid();
            take_socket()
        };
        let socket = enter().map_err(|error| {
            Failure::new(Exit::General, format!("cannot go into the background: {}", words(&error)))
        })?;
        Ok(Background { socket })
    }

    /// Tells the parent, and keeps the standard streams, which are its own, too.
    pub fn ready_here(self) {
        log_target::begin();
        self.report_ready();
    }

    /// Lets the parent return and lets go of what ties us to where we were started.
    pub fn ready(self) {
        let_go();
        self.report_ready();
    }

    fn report_ready(self) {
        // A parent that was killed meanwhile changes nothing: we serve.
        let _ = File::from(self.socket).write_all(&[READY]);
    }
}

/// Lets go of what ties us to where we were started.
pub fn let_go() {
    log_target::begin();
    let let_go = || -> io::Result<()> {
        let null = null()?;
        if !is_regular(rustix::stdio::stdout()) {
            rustix::stdio::dup2_stdout(&null)?;
        }
        if !is_regular(rustix::stdio::stderr()) {
            rustix::stdio::dup2_stderr(&null)?;
        }
        // The directory we were started in may be unmounted now.
        rustix::process::chdir("/")?;
        Ok(())
    };
    if let Err(error) = let_go() {
        tracing::warn!("not everything of the parent could be let go: {error}");
    }
}

fn null() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}

fn is_regular(fd: impl AsFd) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}
