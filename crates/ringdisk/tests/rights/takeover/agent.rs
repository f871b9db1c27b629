//! An attacker who has taken a confined process over, as far as its descriptors reach.
//!
//! The process is stopped, and its descriptors are copied from outside (pidfd_getfd(2)): the very
//! sockets and memory that it has, so what is written and sent is what the process itself could
//! write and send. What differs: a message would carry the credentials of this test, if a
//! receiver asked for them, which none does.

use std::fs::{self, File};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::process::{self, until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, recv, send,
    sendmsg, sockopt,
};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};

/// How long a helper may take to answer.
const LIMIT: Duration = Duration::from_secs(20);

/// An attacker in a process.
pub(crate) struct Agent {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Agent {
    /// Takes a process over: its own code runs no more.
    pub(crate) fn over(pid: u32) -> Agent {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
        process::stop(pid);
        Agent { pid, pidfd }
    }

    /// Copies of its descriptors that `/proc` calls so, in the order of their numbers.
    pub(crate) fn all(&self, is_meant: impl Fn(&str) -> bool) -> Vec<OwnedFd> {
        let directory = format!("/proc/{}/fd", self.pid);
        let mut numbers: Vec<i32> = fs::read_dir(&directory)
            .expect("it lives")
            .flatten()
            .filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
            .collect();
        numbers.sort_unstable();
        let named = numbers.into_iter().filter(|number| {
            let link = fs::read_link(Path::new(&directory).join(number.to_string()));
            link.is_ok_and(|link| is_meant(&link.to_string_lossy()))
        });
        named
            .map(|number| {
                pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty()).expect("root may")
            })
            .collect()
    }

    /// Its memory for the next process: what the images are.
    pub(crate) fn memory(&self) -> File {
        self.memory_named("/memfd:ringdisk-state")
    }

    /// Its memory for the next process: how the export of a kept disk is.
    pub(crate) fn export(&self) -> File {
        self.memory_named("/memfd:ringdisk-export")
    }

    fn memory_named(&self, start: &str) -> File {
        let all = self.all(|name| name.starts_with(start));
        File::from(all.into_iter().next().expect("something that is kept"))
    }

    /// Its lines to helpers, in the order in which it got them: sockets of messages, made by the
    /// process with this pid.
    fn lines(&self, maker: Pid) -> impl Iterator<Item = OwnedFd> {
        let is_line = move |socket: &OwnedFd| {
            sockopt::socket_type(socket) == Ok(SocketType::SEQPACKET)
                && sockopt::socket_peercred(socket).is_ok_and(|peer| peer.pid == maker)
        };
        let sockets = self.all(|name| name.starts_with("socket:"));
        sockets.into_iter().filter(is_line)
    }

    fn line(&self, maker: Pid) -> OwnedFd {
        self.lines(maker).next().expect("a line to a helper")
    }

    /// Its line to the helper process, which it made itself: no parent keeps what it serves.
    pub(crate) fn helper(&self) -> OwnedFd {
        self.line(self.pid)
    }

    /// Its line to the process that keeps the mount, which that one made.
    pub(crate) fn helper_that_keeps(&self, helper: u32) -> OwnedFd {
        self.line(i32::try_from(helper).ok().and_then(Pid::from_raw).expect("a process"))
    }

    /// Its line to the helper process, which is the one that keeps the mount, and made it.
    pub(crate) fn helper_in(&self, helper: u32) -> OwnedFd {
        let number = |line: &OwnedFd| fstat(line).expect("a socket").st_ino;
        let maker = i32::try_from(helper).ok().and_then(Pid::from_raw).expect("a process");
        let (mut lines, first) = (self.lines(maker), number(&self.helper_that_keeps(helper)));
        lines.find(|line| number(line) != first).expect("a line to the helper")
    }

    /// The process dies.
    pub(crate) fn dies(self) {
        kill_process(self.pid, Signal::KILL).expect("it is there");
        let gone = || (!Path::new(&format!("/proc/{}/fd/0", self.pid)).exists()).then_some(());
        until(LIMIT, gone).expect("it dies");
    }

    /// It goes on as if nothing had been.
    pub(crate) fn goes_on(self) {
        kill_process(self.pid, Signal::CONT).expect("it is there");
    }
}

/// Gives an order to a helper process. Returns the letter of the answer; `None`: the helper process
/// is gone.
pub(crate) fn order(line: &OwnedFd, what: u8, name: &[u8]) -> Option<u8> {
    send(line, &[&[what], name].concat(), SendFlags::NOSIGNAL).ok()?;
    let mut ready = [PollFd::new(line, PollFlags::IN)];
    let limit = Timespec::try_from(LIMIT).expect("a time");
    assert_eq!(poll(&mut ready, Some(&limit)), Ok(1), "no answer to {}", what.escape_ascii());
    let mut answer = [0; 8192];
    let (len, _) = recv(line, &mut answer[..], RecvFlags::empty()).ok()?;
    answer[..len].first().copied()
}

/// Sends a message with descriptors.
pub(crate) fn give(line: &OwnedFd, text: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    sendmsg(line.as_fd(), &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL).expect("sent");
}
