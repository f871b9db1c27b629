//! The small process outside of a sandbox.
//!
//! Inside landlock nothing can be unmounted, and files can be removed only where all files of a
//! directory can; and a process that may connect one socket may connect all. So before a process is
//! confined it starts another one, tells it what it will have to do ([`Duties`]), and asks for that
//! when the time has come. Whoever has taken the serving process over can ask for nothing else.
//!
//! Promises: the warden serves nothing, reads and writes no image and holds no descriptor of a
//! mount or of a terminal; it ends with the serving process, however that ends, and does nothing by
//! itself. Signals to the group do not end it before that.
//!
//! Messages over a socket (SOCK_SEQPACKET): duties, then orders; the answer to an order is one
//! letter and words for people, or a descriptor.

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_fuse::mount::{Remover, Unmount};
use ringdisk_fuse::{Error, ErrorKind};
use ringdisk_messages::{Message, Wait};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketType, shutdown};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use super::duties::{
    ABORT, Answer, BUSY, CONNECT, DONE, Duties, FORCE, HEAR, Held, LAZY, MESSAGE_BYTES_MAX, NORMAL,
    SAY, UNLINK, USERS,
};
use super::notify::{self, Speaker};
use crate::notify::Word;
use crate::users::Users;

/// Set in the environment of the warden; its value is the pid of the process that it is for.
const MARK: &str = "RINGDISK_WARDEN_OF";
/// The service manager's socket, which the warden makes its own of.
const MANAGER: &str = "NOTIFY_SOCKET";
/// The serving process's end.
#[derive(Debug)]
pub(crate) struct Warden {
    line: Arc<Line>,
    child: Mutex<Child>,
}

/// One question at a time; words that have no answer come in between.
#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    turn: Mutex<()>,
}

impl Line {
    /// Errors: the warden is gone.
    fn ask(&self, what: u8, name: &[u8]) -> io::Result<Answer> {
        self.ask_with(&[&[what], name].concat(), None)
    }

    /// * `given`: comes with it.
    ///
    /// Errors: the warden is gone.
    fn ask_with(&self, message: &[u8], given: Option<&OwnedFd>) -> io::Result<Answer> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        send_with(&self.socket, &[IoSlice::new(message)], given)?;
        let mut answer = vec![0; MESSAGE_BYTES_MAX];
        let (len, fd) = receive(self.socket.as_fd(), &mut answer)?;
        match answer[..len].split_first() {
            Some((kind, words)) => {
                Ok(Answer { kind: *kind, words: String::from_utf8_lossy(words).into_owned(), fd })
            }
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// One message, and the descriptor that came with it. A length of 0: the other end is closed.
///
/// Errors: a message that is too long; those of recvmsg(2).
fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let message =
        ringdisk_messages::receive(socket, into, Wait::Forever).and_then(Message::whole)?;
    Ok((message.len, message.into_one()))
}

/// Whether an error of [`receive`] is about one message, and the next one may be whole.
fn is_partial(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MSGSIZE | Errno::MFILE))
}

/// Sends an answer.
fn reply(socket: impl AsFd, answer: &Answer) -> io::Result<()> {
    let kind = [answer.kind];
    let pieces = [IoSlice::new(&kind), IoSlice::new(answer.words.as_bytes())];
    send_with(socket, &pieces, answer.fd.as_ref())
}

/// Sends one message, with a descriptor.
fn send_with(socket: impl AsFd, pieces: &[IoSlice<'_>], given: Option<&OwnedFd>) -> io::Result<()> {
    let fds: Vec<_> = given.map(AsFd::as_fd).into_iter().collect();
    ringdisk_messages::send(socket, pieces, &fds, Wait::Forever)?;
    Ok(())
}

impl Remover for Line {
    fn remove(&self, how: Unmount) -> Result<(), Error> {
        let what = match how {
            Unmount::Normal => NORMAL,
            Unmount::Lazy => LAZY,
            Unmount::Force => FORCE,
        };
        match self.ask(what, &[]) {
            Ok(Answer { kind: DONE, .. }) => Ok(()),
            Ok(Answer { kind: BUSY, words, .. }) => Err(Error::new(ErrorKind::Busy, words)),
            Ok(Answer { words, .. }) => Err(Error::new(ErrorKind::System, words)),
            Err(error) => {
                let what = "the process that removes the mount does not answer";
                Err(Error::new(ErrorKind::System, what).source(error))
            }
        }
    }

    fn abort(&self) -> bool {
        self.ask(ABORT, &[]).is_ok_and(|answer| answer.kind == DONE)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the warden")
    }
}

impl Warden {
    /// Starts one.
    ///
    /// Errors: those of the system; without `/proc` it cannot be done.
    pub(super) fn start(duties: &Duties) -> io::Result<Warden> {
        let (ours, theirs) = ringdisk_messages::pair(SocketType::SEQPACKET)?;
        let child = Command::new("/proc/self/exe")
            .arg0("ringdisk-warden")
            .env_clear()
            .env(MARK, std::process::id().to_string())
            .envs(std::env::var_os(MANAGER).map(|name| (MANAGER, name)))
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // The command, and with it our copy of its end, is gone: where nobody reads, this fails.
        for message in duties.messages() {
            send_with(&ours, &[IoSlice::new(&message)], None)?;
        }
        // It has taken hold of what they name, before anything can become another's.
        let mut answer = [0; 1];
        if receive(&ours, &mut answer)?.0 == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = Line { socket: ours, turn: Mutex::new(()) };
        Ok(Warden { line: Arc::new(line), child: Mutex::new(child) })
    }

    /// For the export.
    pub(super) fn remover(&self) -> Arc<dyn Remover> {
        Arc::clone(&self.line) as Arc<dyn Remover>
    }

    /// Gives an order.
    ///
    /// Errors: the warden is gone.
    pub(super) fn ask(&self, what: u8, fields: &[u8]) -> io::Result<Answer> {
        self.line.ask(what, fields)
    }

    /// Passes a user's word on.
    ///
    /// Errors: it is none; the warden is gone.
    pub(super) fn pass_on(&self, word: &OwnedFd) -> io::Result<()> {
        let answer = self.line.ask_with(&[HEAR], Some(word))?;
        if answer.kind == DONE { Ok(()) } else { Err(io::Error::other(answer.words)) }
    }

    /// Removes a file that it was told of. Returns whether it is gone.
    pub(super) fn unlink(&self, path: &Path) -> bool {
        let answer = self.line.ask(UNLINK, path.as_os_str().as_bytes());
        answer.is_ok_and(|answer| answer.kind == DONE)
    }

    /// Who uses the mount. `None`: it does not know of one, or is gone.
    pub(super) fn users(&self) -> Option<Users> {
        let answer = self.line.ask(USERS, &[]).ok().filter(|answer| answer.kind == DONE)?;
        serde_json::from_str(&answer.words).ok()
    }

    /// Connects to a front end that it was told of.
    ///
    /// Errors: nobody listens there, or the warden is gone.
    pub(super) fn connect(&self, path: &Path) -> io::Result<OwnedFd> {
        let answer = self.line.ask(CONNECT, path.as_os_str().as_bytes())?;
        answer.fd.ok_or_else(|| io::Error::other(answer.words))
    }

    /// Lets it tell the service manager something. Does not wait: not for an order that takes its
    /// time either.
    pub(super) fn say(&self, word: Word, text: &str) {
        let order = notify::order(word, text);
        let pieces = [IoSlice::new(&order)];
        let sent = ringdisk_messages::send(&self.line.socket, &pieces, &[], Wait::Never);
        if let Err(errno) = sent {
            tracing::debug!("the warden does not speak to the service manager: {errno}");
        }
    }

    /// Waits until it has ended. What it was told before it does first.
    pub(super) fn end(&self) {
        let _turn = self.line.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = shutdown(&self.line.socket, Shutdown::Both);
        let _ = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// Whether this process was started to be one.
pub(crate) fn is_warden() -> bool {
    let parent = std::os::unix::process::parent_id();
    std::env::var(MARK).is_ok_and(|pid| pid.parse() == Ok(parent))
        && fstat(rustix::stdio::stdin())
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// Is one, until the process that it is for has ended.
pub(crate) fn run() -> u8 {
    let _ = rustix::thread::set_name(c"ringdisk-warden");
    // Away from the terminal's signals; those that a service manager sends to all processes come
    // all the same, and the end of the other one is what counts.
    let _ = rustix::process::setsid();
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let socket = rustix::stdio::stdin();
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let mut duties = Duties::default();
    let mut held: Option<Held> = None;
    let speaker = Speaker::new(std::os::unix::process::parent_id());
    loop {
        let (len, given) = match receive(socket, &mut message) {
            // Of what came only in part nothing is done.
            Err(error) if is_partial(&error) && held.is_some() => {
                if reply(socket, &Answer::refused()).is_err() {
                    return 0;
                }
                continue;
            }
            Ok((0, _)) | Err(_) => return 0,
            Ok(received) => received,
        };
        if let Some(held) = &held {
            if let [SAY, order @ ..] = &message[..len] {
                speaker.say(order);
            } else if message[..len] == [HEAR] {
                if reply(socket, &held.hear(given)).is_err() {
                    return 0;
                }
            } else if reply(socket, &duties.carry_out(&message[..len], held)).is_err() {
                return 0;
            }
        } else if let Some(was_last) = duties.take(&message[..len]) {
            held = was_last.then(|| duties.hold());
            if was_last
                && reply(socket, &Answer { kind: DONE, words: String::new(), fd: None }).is_err()
            {
                return 0;
            }
        } else {
            return 1;
        }
    }
}
