//! Tells a service manager how we are.
//!
//! Promises: never blocks for long, and says nothing about a failure but where descriptors are to
//! be kept; without `NOTIFY_SOCKET` nothing is done. The helper process that keeps a mount is told
//! in the same words. Inside a sandbox the helper process speaks ([`crate::helper::manager`]), and
//! descriptors are not given away any more. Source: the datagram protocol of sd_notify(3):
//! newline-separated assignments.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::parent_id;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringdisk_messages::Wait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, UCred, connect, send, sendmsg, sendmsg_addr, socket_with, socketpair,
};
use rustix::process::{Pid, getgid, getuid};

pub mod watch;

/// How long the process that keeps descriptors may take to take them.
const BARRIER: Duration = Duration::from_secs(5);
/// Pause before a full queue is tried again.
const FULL: Duration = Duration::from_millis(5);
/// Longest text of one message, bytes. Managers read 4096 bytes of a whole one.
const TEXT_BYTES_MAX: usize = 1024;

/// The variable that says that a stop waits for users; service managers ignore names that begin
/// with X_.
pub const IN_USE: &str = "X_RINGDISK_IN_USE";

/// The variable that says that what another process served is ours.
pub const TOOK_OVER: &str = "X_RINGDISK_TOOK_OVER";

/// The variable that says that another process serves from now on.
pub const HANDED_OVER: &str = "X_RINGDISK_HANDED_OVER";

/// What the names of descriptors that are kept for us begin with.
pub const DESCRIPTORS: &str = "ringdisk-";

/// Whether a name may be that of one of our descriptors.
fn tells_descriptor(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    name.strip_prefix(DESCRIPTORS)
        .is_some_and(|rest| !rest.is_empty() && rest.chars().all(is_plain))
}

/// All that is said, with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// We serve: requests are answered from now on.
    Ready,
    /// What we are doing, for people.
    Status,
    /// We are about to end.
    Stopping,
    /// We were told to stop, and go on until our users are gone.
    InUse,
    /// We have taken over what another process served.
    TookOver,
    /// Another process serves what we served, and we are about to end.
    HandedOver,
    /// The descriptors of this name are kept no longer.
    Forget,
    /// We live, which the manager's watchdog waits for. The text is its time (µs), where the
    /// manager may not know it any more.
    Alive,
}

impl Word {
    const ALL: [Word; 8] = [
        Word::Ready,
        Word::Status,
        Word::Stopping,
        Word::InUse,
        Word::TookOver,
        Word::HandedOver,
        Word::Forget,
        Word::Alive,
    ];

    /// For a request to the helper process.
    pub fn letter(self) -> u8 {
        match self {
            Word::Ready => b'R',
            Word::Status => b'S',
            Word::Stopping => b'E',
            Word::InUse => b'U',
            Word::TookOver => b'T',
            Word::HandedOver => b'H',
            Word::Forget => b'F',
            Word::Alive => b'A',
        }
    }

    /// The word of a letter.
    pub fn of(letter: u8) -> Option<Word> {
        Word::ALL.into_iter().find(|word| word.letter() == letter)
    }

    /// A text of one line, which begins no other assignment, and of bounded length.
    pub fn bounded(self, text: &str) -> String {
        let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let end = (0..=line.len().min(TEXT_BYTES_MAX)).rev().find(|at| line.is_char_boundary(*at));
        line.truncate(end.unwrap_or(0));
        line
    }

    /// The message. `None`: the name of a descriptor that is none of ours.
    ///
    /// * `main`: pid of the process that serves, also when a parent started it in the background.
    fn message(self, main: u32, text: &str) -> Option<String> {
        let text = self.bounded(text);
        Some(match self {
            Word::Ready => format!("READY=1\nMAINPID={main}\nSTATUS={text}"),
            Word::Status => format!("STATUS={text}"),
            Word::Stopping => format!("STOPPING=1\nSTATUS={text}"),
            Word::InUse => format!("{IN_USE}=1\nSTATUS={text}"),
            Word::TookOver => format!("{TOOK_OVER}=1\nSTATUS={text}"),
            Word::HandedOver => format!("{HANDED_OVER}=1\nSTATUS={text}"),
            Word::Forget if !tells_descriptor(&text) => return None,
            Word::Forget => format!("FDSTOREREMOVE=1\nFDNAME={text}"),
            Word::Alive => match text.parse::<u64>() {
                Ok(usec) => format!("WATCHDOG_USEC={usec}\nWATCHDOG=1"),
                Err(_) => String::from("WATCHDOG=1"),
            },
        })
    }
}

/// Lets another process say a word.
type Say = fn(Word, &str);

/// Who listens.
#[derive(Debug)]
enum Target {
    Manager(OwnedFd, SocketAddrUnix),
    /// The helper process that has started this server, over a socket pair.
    HelperProcess(OwnedFd),
    /// The manager, through the helper process.
    Helper(Say),
    /// The same, but that we are ready is said over this socket, which is connected to the manager,
    /// and goes with it.
    HelperLater(OwnedFd, Say),
}

/// The service manager, if one listens.
#[derive(Debug)]
pub struct Notify {
    target: Mutex<Option<Target>>,
    /// The process that is spoken of, if it is not this one.
    other: Option<u32>,
}

impl Notify {
    /// Takes the socket's name from the environment.
    pub fn from_environment() -> Notify {
        Notify::to(std::env::var_os("NOTIFY_SOCKET").as_deref())
    }

    /// The same for another process, which is our parent: as if that one spoke, where we may do
    /// that.
    pub fn in_the_name_of(pid: u32) -> Notify {
        Notify { other: Some(pid), ..Notify::from_environment() }
    }

    fn new(target: Option<Target>) -> Notify {
        Notify { target: Mutex::new(target), other: None }
    }

    /// * `name`: a path, or `@` and an abstract name; `None` and other kinds: nobody listens.
    fn to(name: Option<&OsStr>) -> Notify {
        Notify::new(name.and_then(address).and_then(|address| {
            // A full queue must not hold up the start or the end of a mount.
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).ok()?;
            Some(Target::Manager(socket, address))
        }))
    }

    /// Talks to the helper process that keeps the mount.
    pub fn over(socket: OwnedFd) -> Notify {
        Notify::new(Some(Target::HelperProcess(socket)))
    }

    fn is(&self, wanted: impl Fn(Option<&Target>) -> bool) -> bool {
        wanted(self.target.lock().unwrap_or_else(PoisonError::into_inner).as_ref())
    }

    /// The helper process speaks to the service manager from now on, and the socket is closed: at
    /// once, or, where the manager would not take its word for ours, when we have said that we are
    /// ready.
    ///
    /// * `say`: asks the helper process to say a word.
    pub fn leave_to_helper(&self, say: Say) {
        let mut target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        let (socket, address) = match target.take() {
            Some(Target::Manager(socket, address)) => (socket, address),
            other => {
                *target = other;
                return;
            }
        };
        // Inside, a socket with an abstract name is reached only by who was connected before.
        let is_ours_to_say = !speaks_for(Pid::INIT) && connect(&socket, &address).is_ok();
        *target = Some(match is_ours_to_say {
            true => Target::HelperLater(socket, say),
            false => Target::Helper(say),
        });
    }

    /// Gives a descriptor away, to be had back by the next process of this service.
    ///
    /// * `name`: without colons and control characters.
    ///
    /// Errors: nobody listens, or not within 5 s.
    pub fn store(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // Never polled: a poll of /dev/fuse would be woken by each request of each client.
        self.deliver(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &[descriptor])
    }

    /// The descriptors of this name are kept no longer.
    pub fn unstore(&self, name: &str) {
        self.say(Word::Forget, name);
    }

    /// Waits until all that was sent has been dealt with.
    ///
    /// Errors: that takes longer than 5 s; the helper process speaks for us.
    pub fn barrier(&self) -> io::Result<()> {
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
    pub fn ready(&self, status: &str) {
        self.say(Word::Ready, status);
    }

    /// What we are doing, for people.
    pub fn status(&self, status: &str) {
        self.say(Word::Status, status);
    }

    /// We are about to end.
    pub fn stopping(&self, status: &str) {
        self.say(Word::Stopping, status);
    }

    /// We were told to stop, and go on until our users are gone. The helper process that keeps the
    /// mount starts another process if we die.
    pub fn in_use(&self, status: &str) {
        self.say(Word::InUse, status);
    }

    fn helper(&self) -> Option<Say> {
        match &*self.target.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Target::Helper(say) | Target::HelperLater(_, say)) => Some(*say),
            _ => None,
        }
    }

    /// Says one word.
    pub fn say(&self, word: Word, text: &str) {
        if self.is(|target| target.is_none()) {
            return;
        }
        if word == Word::Ready && self.say_last(text) {
            return;
        }
        if let Some(say) = self.helper() {
            return say(word, text);
        }
        let Some(message) = word.message(self.other.unwrap_or_else(std::process::id), text) else {
            return;
        };
        let told = match word {
            // Not lost in a full queue: what stays behind would be taken for a mount by the next
            // process.
            Word::Forget => self.deliver(&message, &[]),
            _ => self.try_send(&message, &[]),
        };
        if let Err(error) = told {
            tracing::debug!("the service manager was not told: {error}");
        }
    }

    /// Says that we are ready over a socket that is kept for this, and closes it. Returns whether
    /// there is one.
    fn say_last(&self, text: &str) -> bool {
        let mut target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Target::HelperLater(socket, say)) = &*target else { return false };
        let mut message = Word::Ready.message(std::process::id(), text).unwrap_or_default();
        if watch::wanted().is_some() {
            // It may not hear the helper process, and would wait in vain. If it does hear it, that
            // one says the time again.
            message.push_str("\nWATCHDOG_USEC=0");
        }
        let told = retry_on_intr(|| send(socket, message.as_bytes(), SendFlags::NOSIGNAL));
        if let Err(errno) = told {
            tracing::debug!("the service manager was not told: {errno}");
        }
        *target = Some(Target::Helper(*say));
        true
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
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        let (socket, address) = match &*target {
            None | Some(Target::Helper(_) | Target::HelperLater(..)) => {
                return Err(Errno::NOTCONN.into());
            }
            Some(Target::HelperProcess(socket)) => {
                let pieces = [IoSlice::new(message.as_bytes())];
                ringdisk_messages::send(socket, &pieces, descriptors, Wait::Forever)?;
                return Ok(());
            }
            Some(Target::Manager(socket, address)) => (socket, address),
        };
        let name = match self.other {
            // That process is gone, and its pid may be another's.
            Some(other) if parent_id() != other => return Err(Errno::SRCH.into()),
            other => other.and_then(|other| Pid::from_raw(other.cast_signed())),
        };
        let pieces = [IoSlice::new(message.as_bytes())];
        if let Some(pid) = name {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
            let mut control = in_the_name_of(pid, &mut space);
            match sendmsg_addr(socket, address, &pieces, &mut control, SendFlags::NOSIGNAL) {
                // Not for us: it is heard if the manager hears all processes of the service.
                Err(Errno::PERM) => {}
                sent => return Ok(sent.map(|_| ())?),
            }
        }
        ringdisk_messages::send_to(socket, address, &pieces, descriptors, Wait::Never)?;
        Ok(())
    }
}

/// Credentials that name another process.
fn in_the_name_of(
    pid: Pid,
    space: &mut [MaybeUninit<u8>],
) -> SendAncillaryBuffer<'_, 'static, 'static> {
    let mut control = SendAncillaryBuffer::new(space);
    control.push(SendAncillaryMessage::ScmCredentials(UCred { pid, uid: getuid(), gid: getgid() }));
    control
}

/// Whether this process may speak in the name of another one: `CAP_SYS_ADMIN` where that one's
/// number counts. Tried on itself.
fn speaks_for(pid: Pid) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok((ours, _theirs)) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
    else {
        return false;
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut control = in_the_name_of(pid, &mut space);
    sendmsg(&ours, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL).is_ok()
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
mod tests;
