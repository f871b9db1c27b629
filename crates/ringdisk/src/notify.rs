//! Tells a service manager how we are.
//!
//! Promises: never blocks for long, and says nothing about a failure but where descriptors are to be kept; without
//! `NOTIFY_SOCKET` nothing is done. The parent that keeps a mount is told in the same words.
//! Source: the datagram protocol of sd_notify(3): newline-separated assignments.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with,
};

use crate::keep::send_over;

/// How long whoever keeps descriptors may take to do so.
const BARRIER: Duration = Duration::from_secs(5);
/// Pause before a full queue is tried again.
const FULL: Duration = Duration::from_millis(5);

/// The variable that says that a stop waits for users; service managers ignore names that begin with X_.
pub(crate) const IN_USE: &str = "X_RINGDISK_IN_USE";

/// Who listens.
#[derive(Debug)]
enum Target {
    Manager(OwnedFd, SocketAddrUnix),
    /// The parent, over a socket pair.
    Holder(OwnedFd),
}

/// The service manager, if one listens.
#[derive(Debug)]
pub(crate) struct Notify {
    target: Option<Target>,
}

impl Notify {
    /// Takes the socket's name from the environment.
    pub(crate) fn from_environment() -> Notify {
        Notify::to(std::env::var_os("NOTIFY_SOCKET").as_deref())
    }

    /// * `name`: a path, or `@` and an abstract name; `None` and other kinds: nobody listens.
    fn to(name: Option<&OsStr>) -> Notify {
        let target = name.and_then(address).and_then(|address| {
            // A full queue must not hold up the start or the end of a mount.
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).ok()?;
            Some(Target::Manager(socket, address))
        });
        Notify { target }
    }

    /// Talks to the parent that keeps the mount.
    pub(crate) fn over(socket: OwnedFd) -> Notify {
        Notify { target: Some(Target::Holder(socket)) }
    }

    /// Gives a descriptor away, to be had back by the next process of this service.
    ///
    /// * `name`: without colons and control characters.
    ///
    /// Errors: nobody listens, or not within 5 s.
    pub(crate) fn store(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // Never polled: a poll of /dev/fuse would be woken by each request of each client.
        self.deliver(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &[descriptor])
    }

    /// The descriptors of this name are kept no longer.
    pub(crate) fn unstore(&self, name: &str) {
        // Not lost in a full queue: what stays behind would be taken for a mount by the next process.
        let told = self.deliver(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]);
        if let Err(error) = told.as_ref()
            && self.target.is_some()
        {
            tracing::debug!("the service manager was not told to forget '{name}': {error}");
        }
    }

    /// Waits until all that was sent has been dealt with.
    ///
    /// Errors: that takes longer than 5 s.
    pub(crate) fn barrier(&self) -> io::Result<()> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        self.deliver("BARRIER=1", &[write.as_fd()])?;
        drop(write);
        // They close it.
        let timeout = Timespec { tv_sec: BARRIER.as_secs().cast_signed(), tv_nsec: 0 };
        let mut fds = [PollFd::new(&read, PollFlags::empty())];
        match retry_on_intr(|| poll(&mut fds, Some(&timeout)))? {
            0 => Err(Errno::TIMEDOUT.into()),
            _ => Ok(()),
        }
    }

    /// We serve: requests are answered from now on.
    pub(crate) fn ready(&self, status: &str) {
        // The main process is ours also when a parent started us in the background.
        self.send(&format!("READY=1\nMAINPID={}\nSTATUS={}", std::process::id(), one_line(status)));
    }

    /// What we are doing, for people.
    pub(crate) fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// We are about to end.
    pub(crate) fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={}", one_line(status)));
    }

    /// We were told to stop, and go on until our users are gone. The parent that keeps the mount starts another process if we die.
    pub(crate) fn in_use(&self, status: &str) {
        self.send(&format!("{IN_USE}=1\nSTATUS={}", one_line(status)));
    }

    fn send(&self, message: &str) {
        if self.target.is_some()
            && let Err(error) = self.try_send(message, &[])
        {
            tracing::debug!("the service manager was not told: {error}");
        }
    }

    /// Sends, and waits for a while when their queue is full.
    fn deliver(&self, message: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let end = Instant::now() + BARRIER;
        loop {
            match self.try_send(message, descriptors) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                    std::thread::sleep(FULL);
                }
                result => return result,
            }
        }
    }

    fn try_send(&self, message: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let (socket, address) = match &self.target {
            None => return Err(Errno::NOTCONN.into()),
            Some(Target::Holder(socket)) => return send_over(socket.as_fd(), message, descriptors),
            Some(Target::Manager(socket, address)) => (socket, address),
        };
        // One descriptor at a time: each has a name of its own.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::TOOBIG.into());
        }
        let pieces = [IoSlice::new(message.as_bytes())];
        sendmsg_addr(socket, address, &pieces, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// A line break would begin another assignment.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// The address of a socket name.
fn address(name: &OsStr) -> Option<SocketAddrUnix> {
    match name.as_bytes() {
        [b'@', rest @ ..] if !rest.is_empty() => SocketAddrUnix::new_abstract_name(rest).ok(),
        [b'/', ..] => SocketAddrUnix::new(name.as_bytes()).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let len = socket.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    #[test]
    fn a_path_socket_hears_ready_and_stopping() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("notify");
        let server = UnixDatagram::bind(&path).expect("bind");
        let notify = Notify::to(Some(path.as_os_str()));
        notify.ready("serving\nEVIL=1");
        notify.stopping("bye");
        let ready = receive(&server);
        assert!(ready.starts_with("READY=1\nMAINPID="), "{ready}");
        assert!(ready.ends_with("STATUS=serving EVIL=1"), "{ready}");
        assert_eq!(receive(&server), "STOPPING=1\nSTATUS=bye");
    }

    #[test]
    fn an_abstract_socket_hears_status() {
        let name = format!("ringdisk-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("address");
        let server = UnixDatagram::bind_addr(&address).expect("bind");
        Notify::to(Some(OsStr::new(&format!("@{name}")))).status("halted");
        assert_eq!(receive(&server), "STATUS=halted");
    }

    #[test]
    fn nobody_and_rubbish_are_ignored() {
        for name in [None, Some(""), Some("@"), Some("vsock:2:1"), Some("/nowhere/socket")] {
            Notify::to(name.map(OsStr::new)).ready("x");
        }
        assert!(Notify::to(None).store("x", rustix::stdio::stdin()).is_err());
        assert!(Notify::to(None).barrier().is_err());
    }
}
