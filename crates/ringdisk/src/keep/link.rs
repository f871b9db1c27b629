//! Between the process that keeps a mount and the one that serves it: a socket pair, whose end is
//! the serving process's standard input.
//!
//! Promises: no descriptor goes to any other process; everything received is close-on-exec; when
//! one of the two ends, however, the other sees the end of the socket. To the serving process goes
//! one message, the parked descriptors with their names (`FDNAMES=a:b`); from it come those of
//! sd_notify(3).

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ringdisk_messages::{Message, Wait, pair};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::SocketType;

use crate::notify::Notify;
use crate::report::{Exit, Failure};

/// Set in the environment of the serving process; its value is the pid of the one that keeps the
/// mount.
const MARK: &str = "RINGDISK_KEPT_BY";
/// Set when a service manager listens to the parent.
const MANAGED: &str = "RINGDISK_MANAGED";
/// Longest message, bytes: names of all descriptors, or a line about a mount with a long path.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// Descriptors with their names.
pub(crate) type Named = Vec<(String, OwnedFd)>;

/// What came over the socket.
#[derive(Debug)]
pub(crate) enum Received {
    /// Text and descriptors.
    Message(String, Vec<OwnedFd>),
    /// Nothing at the moment.
    Nothing,
    /// The other process is gone.
    End,
}

/// Whether this process was started to serve a mount that its parent keeps.
pub(crate) fn is_child() -> bool {
    let parent = std::os::unix::process::parent_id();
    std::env::var(MARK).is_ok_and(|pid| pid.parse() == Ok(parent)) && has_socket()
}

/// Whether it was started so, and its parent is gone already.
pub(crate) fn is_orphan() -> bool {
    std::env::var_os(MARK).is_some() && has_socket() && !is_child()
}

/// Whether a service manager waits for the end of this process, or of the one that keeps its mount.
pub(crate) fn is_managed() -> bool {
    ["NOTIFY_SOCKET", MANAGED].iter().any(|name| std::env::var_os(name).is_some())
}

fn has_socket() -> bool {
    fstat(rustix::stdio::stdin())
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// Starts the program anew, with our own arguments, to serve. Gives our end of the socket, which
/// does not block.
///
/// * `directory`: where the arguments are to be understood.
/// * `parked`: what the process before it has left.
///
/// Errors: those of the system; without `/proc` it cannot be done.
pub(crate) fn spawn(
    directory: &Path,
    parked: &[(String, OwnedFd)],
) -> io::Result<(OwnedFd, Child)> {
    let (ours, theirs) = pair(SocketType::SEQPACKET)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    let names: Vec<&str> = parked.iter().map(|(name, _)| name.as_str()).collect();
    let descriptors: Vec<BorrowedFd<'_>> = parked.iter().map(|(_, fd)| fd.as_fd()).collect();
    send(ours.as_fd(), &format!("FDNAMES={}", names.join(":")), &descriptors)?;
    let mut arguments = std::env::args_os();
    let name = arguments.next();
    let child = Command::new("/proc/self/exe")
        .arg0(name.as_deref().unwrap_or(OsStr::new("ringdisk")))
        .args(arguments)
        .current_dir(directory)
        .env(MARK, std::process::id().to_string())
        // It talks to us.
        .env_remove("NOTIFY_SOCKET")
        .env_remove("FDSTORE")
        .envs(is_managed().then_some((MANAGED, "1")))
        .stdin(Stdio::from(theirs))
        .spawn()?;
    Ok((ours, child))
}

/// Takes the socket from standard input, and what is parked.
///
/// Errors: those of the system; the process that keeps the mount is gone.
pub(crate) fn enter() -> Result<(Notify, OwnedFd, Named), Failure> {
    let enter = || -> io::Result<_> {
        // Started through /proc/self/exe we would be "exe" in lists of processes.
        let _ = rustix::thread::set_name(c"ringdisk");
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(null)?;
        let Received::Message(text, descriptors) = receive(socket.as_fd())? else {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        };
        let names = text.strip_prefix("FDNAMES=").unwrap_or_default().split(':');
        let parked = names.map(str::to_owned).zip(descriptors).collect();
        Ok((Notify::over(socket.try_clone()?), socket, parked))
    };
    enter().map_err(|error| {
        Failure::system(
            "nothing is heard from the process that keeps the mount",
            &error,
            Exit::General,
        )
    })
}

/// Waits until the other process is gone.
pub(crate) fn wait_for_end(socket: &OwnedFd) {
    while !matches!(receive(socket.as_fd()), Ok(Received::End) | Err(_)) {}
}

/// Sends one message.
///
/// Errors: those of sendmsg(2).
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    text: &str,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let pieces = [IoSlice::new(text.as_bytes())];
    ringdisk_messages::send(socket, &pieces, descriptors, Wait::Forever)?;
    Ok(())
}

/// Receives one message.
///
/// Errors: EMFILE when descriptors were lost; those of recvmsg(2), but for a socket that does not
/// block and has nothing.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<Received> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let message = loop {
        let received = ringdisk_messages::receive(socket, &mut bytes, Wait::Forever);
        match received.and_then(Message::whole) {
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET) => return Ok(Received::End),
            // No process of this version sends one, and the next one counts.
            Err(Errno::MSGSIZE) => tracing::warn!("a message that is too long is left out"),
            message => break message?,
        }
    };
    if message.is_end() {
        return Ok(Received::End);
    }
    let text = String::from_utf8_lossy(bytes.get(..message.len).unwrap_or_default()).into_owned();
    Ok(Received::Message(text, message.descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockets() -> (OwnedFd, OwnedFd) {
        pair(SocketType::SEQPACKET).expect("sockets")
    }

    #[test]
    fn descriptors_arrive_with_the_text_and_the_end_is_seen() {
        let (ours, theirs) = sockets();
        let file = tempfile::tempfile().expect("file");
        send(ours.as_fd(), "FDNAMES=a:b", &[file.as_fd(), file.as_fd()]).expect("send");
        drop(ours);
        let Received::Message(text, descriptors) = receive(theirs.as_fd()).expect("receive") else {
            panic!("no message");
        };
        assert_eq!((text.as_str(), descriptors.len()), ("FDNAMES=a:b", 2));
        assert!(matches!(receive(theirs.as_fd()).expect("receive"), Received::End));
        wait_for_end(&theirs);
    }

    #[test]
    fn a_socket_that_does_not_block_says_that_there_is_nothing() {
        let (ours, _theirs) = sockets();
        rustix::io::ioctl_fionbio(&ours, true).expect("a setting");
        assert!(matches!(receive(ours.as_fd()).expect("receive"), Received::Nothing));
    }
}
