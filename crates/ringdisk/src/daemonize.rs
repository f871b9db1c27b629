//! Into the background.
//!
//! Promises: the parent returns when the mount answers, with 0; a start-up that fails ends the
//! parent with the child's exit code, after the child has said why on the standard error that both
//! share. No fork of a running program: the program is started anew, in a session of its own.
//!
//! The child's standard input is the write end of a pipe; one byte on it means "ready". The
//! standard streams are then let go, except those that are regular files (a log).

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::fs::{FileType, fstat};

use crate::report::{Exit, Failure, words};

/// Set in the child's environment. Its value is the parent's pid.
const MARK: &str = "RINGDISK_BACKGROUND_OF";

/// What the child writes when it serves.
const READY: u8 = b'R';

/// Whether we are the child.
pub(crate) fn is_child() -> bool {
    std::env::var_os(MARK)
        .is_some_and(|mark| mark.to_str().and_then(|pid| pid.parse().ok()) == Some(parent_pid()))
        && is_pipe(rustix::stdio::stdin())
}

fn parent_pid() -> u32 {
    std::os::unix::process::parent_id()
}

/// Starts the child with our own arguments and waits until it is ready or has failed. Returns the
/// exit code.
///
/// Errors: the program cannot be started anew, or its child was killed.
pub(crate) fn run_child() -> Result<u8, Failure> {
    let cannot =
        |error: &io::Error| Failure::system("cannot go into the background", error, Exit::General);
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|errno| cannot(&errno.into()))?;
    let mut arguments = std::env::args_os();
    let name = arguments.next();
    let mut child = Command::new("/proc/self/exe")
        .arg0(name.as_deref().unwrap_or(OsStr::new("ringdisk")))
        .args(arguments)
        .env(MARK, std::process::id().to_string())
        .stdin(Stdio::from(write))
        .spawn()
        .map_err(|error| {
            cannot(&error).hint("/proc must be mounted for --daemonize; or run in the foreground")
        })?;
    let mut byte = [0];
    if File::from(read).read_exact(&mut byte).is_ok() && byte == [READY] {
        return Ok(Exit::Clean.code());
    }
    let status = child.wait().map_err(|error| cannot(&error))?;
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

/// The child's way to say that it is ready.
#[derive(Debug)]
pub(crate) struct Background {
    pipe: OwnedFd,
}

impl Background {
    /// Makes the child a session of its own and takes the pipe from standard input.
    ///
    /// Errors: those of the system.
    pub(crate) fn enter() -> Result<Background, Failure> {
        let enter = || -> io::Result<OwnedFd> {
            // Only a process group's leader is refused, and a child is none.
            let _ = rustix::process::setsid();
            // Started through /proc/self/exe we would be "exe" in lists of processes.
            let _ = rustix::thread::set_name(c"ringdisk");
            let pipe = io::stdin().as_fd().try_clone_to_owned()?;
            rustix::stdio::dup2_stdin(null()?)?;
            Ok(pipe)
        };
        let pipe = enter().map_err(|error| {
            Failure::new(Exit::General, format!("cannot go into the background: {}", words(&error)))
        })?;
        Ok(Background { pipe })
    }

    /// Lets the parent return and lets go of what ties us to where we were started.
    pub(crate) fn ready(self) {
        let_go();
        // A parent that was killed meanwhile changes nothing: we serve.
        let _ = File::from(self.pipe).write_all(&[READY]);
    }
}

/// Lets go of what ties us to where we were started.
pub(crate) fn let_go() {
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

fn is_pipe(fd: impl AsFd) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
}

fn is_regular(fd: impl AsFd) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}
