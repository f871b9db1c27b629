//! Starts this program anew, as a process of another role, with a socket to its parent.
//!
//! Promises: the child's standard input is its end of a socket that keeps messages apart, and no
//! other descriptor goes to it; when one of the two ends, however, the other sees the end of the
//! socket. A process takes a role only from its own parent: the mark in its environment has that
//! one's pid, so children that inherit the mark are not meant. No fork of a running program.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, parent_id};
use std::process::{Child, Command, Stdio};

use rustix::fs::{FileType, fstat};
use rustix::net::SocketType;

/// Set in the environment of a child: its role and the pid of its parent, as `helper:1234`.
const MARK: &str = "RINGDISK_STARTED_AS";

/// What a process is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It carries out the requests of its parent, which is confined.
    Helper,
    /// It serves a mount or disks that its parent, the helper process, keeps.
    Kept,
    /// It runs in the background, and its parent ends when it is ready.
    Background,
    /// It serves a device of the kernel that its parent connects.
    Device,
    /// It takes a mount out of the tree, and may have to wait in the kernel for that.
    Detach,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Helper => "helper",
            Role::Kept => "kept",
            Role::Background => "background",
            Role::Device => "device",
            Role::Detach => "detach",
        }
    }

    /// Whether this process was started in this role, by the process that is its parent now.
    pub fn is_ours(self) -> bool {
        self.parent().is_some_and(|parent| parent == parent_id())
    }

    /// Whether this process was started in this role, and its parent is gone already.
    pub fn is_orphaned(self) -> bool {
        self.parent().is_some_and(|parent| parent != parent_id())
    }

    /// The pid of the process that started this one in this role.
    fn parent(self) -> Option<u32> {
        let mark = std::env::var(MARK).ok()?;
        let parent = mark.strip_prefix(self.name())?.strip_prefix(':')?.parse().ok()?;
        has_socket().then_some(parent)
    }

    /// The command that starts this program in this role, and the parent's end of the socket. The
    /// child sees the end of the socket only when the command, which has the child's end, is
    /// dropped.
    ///
    /// Errors: no socket.
    pub fn command(self) -> io::Result<(Command, OwnedFd)> {
        let (ours, theirs) = ringdisk_messages::pair(SocketType::SEQPACKET)?;
        let mut command = Command::new("/proc/self/exe");
        command
            .env(MARK, format!("{}:{}", self.name(), std::process::id()))
            .stdin(Stdio::from(theirs));
        Ok((command, ours))
    }

    /// Starts this program in this role, with the arguments of this process. Gives the parent's end
    /// of the socket, and the child.
    ///
    /// * `prepare`: for what else the child gets, and for what is said to it first over that
    ///   socket.
    ///
    /// Errors: no socket, no process; without `/proc` it cannot be done.
    pub fn start_again(
        self,
        prepare: impl FnOnce(&mut Command, &OwnedFd) -> io::Result<()>,
    ) -> io::Result<(OwnedFd, Child)> {
        let (mut command, ours) = self.command()?;
        let mut arguments = std::env::args_os();
        let name = arguments.next();
        command.arg0(name.as_deref().unwrap_or(OsStr::new("ringdisk"))).args(arguments);
        prepare(&mut command, &ours)?;
        let child = command.spawn()?;
        Ok((ours, child))
    }
}

fn has_socket() -> bool {
    fstat(rustix::stdio::stdin())
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// The child's end of the socket, whose place as standard input `/dev/null` takes.
///
/// Errors: no descriptor is left; no `/dev/null`.
pub fn take_socket() -> io::Result<OwnedFd> {
    // Started through /proc/self/exe a process would be "exe" in lists of processes.
    let _ = rustix::thread::set_name(c"ringdisk");
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(null)?;
    Ok(socket)
}
