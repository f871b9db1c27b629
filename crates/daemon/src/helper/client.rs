//! The confined process's side: asks its helper for what it may not do itself.
//!
//! Promises: one request at a time, from any thread; a helper that is gone is an error, never a
//! wait. Words for the service manager have no answer and do not wait.

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_fuse::mount::{Remover, Unmount};
use ringdisk_fuse::{Error, ErrorKind};
use ringdisk_messages::Wait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

use super::answer::{Answer, BUSY, DONE};
use super::tasks::{
    ABORT, CONNECT, FORCE, HEAR, LAZY, MESSAGE_BYTES_MAX, NORMAL, Tasks, UNLINK, USERS,
};
use super::wire::{receive, send};
use super::{inherited, manager, process};
use crate::mount_users::Users;
use crate::notify::Word;

/// The helper, as the confined process sees it.
#[derive(Debug)]
pub struct Helper {
    line: Arc<Line>,
    /// `None`: the helper process is the parent, which ends after this process.
    child: Mutex<Option<Child>>,
}

/// One question at a time; words that have no answer come in between.
#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    turn: Mutex<()>,
}

impl Line {
    /// Errors: the helper is gone.
    fn ask(&self, what: u8, name: &[u8]) -> io::Result<Answer> {
        self.ask_with(&[&[what], name].concat(), None)
    }

    /// * `given`: comes with it.
    ///
    /// Errors: the helper is gone.
    fn ask_with(&self, message: &[u8], given: Option<&OwnedFd>) -> io::Result<Answer> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.socket, &[IoSlice::new(message)], given)?;
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
        f.write_str("the helper")
    }
}

impl Helper {
    /// Gives these tasks to the helper process that has started this server, else to a new one.
    ///
    /// Errors: those of the system; without `/proc` it cannot be done.
    pub fn start(tasks: &Tasks) -> io::Result<Helper> {
        let of_parent = inherited::take().map(|line| Helper::with(line, None, tasks));
        match of_parent {
            Some(Ok(helper)) => return Ok(helper),
            Some(Err(error)) => tracing::warn!("the parent does not help: {error}"),
            None => {}
        }
        let (socket, child) = process::start()?;
        Helper::with(socket, Some(child), tasks)
    }

    /// Gives tasks to the process at the other end of a socket.
    fn with(socket: OwnedFd, child: Option<Child>, tasks: &Tasks) -> io::Result<Helper> {
        // Where nobody reads, this fails: no copy of the other end is left here.
        for message in tasks.messages() {
            send(&socket, &[IoSlice::new(&message)], None)?;
        }
        // It has taken hold of what they name, before anything can become another's.
        if receive(&socket, &mut [0])?.0 == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = Line { socket, turn: Mutex::new(()) };
        Ok(Helper { line: Arc::new(line), child: Mutex::new(child) })
    }

    /// For the export.
    pub fn remover(&self) -> Arc<dyn Remover> {
        Arc::clone(&self.line) as Arc<dyn Remover>
    }

    /// Gives an order.
    ///
    /// Errors: the helper is gone.
    pub fn ask(&self, what: u8, fields: &[u8]) -> io::Result<Answer> {
        self.line.ask(what, fields)
    }

    /// Passes a user's word on. Gives device and inode number of the file that the helper holds
    /// because of it: the target of a mirror.
    ///
    /// Errors: it is none; the helper is gone.
    pub fn pass_on(&self, word: &OwnedFd) -> io::Result<Option<(u64, u64)>> {
        let answer = self.line.ask_with(&[HEAR], Some(word))?;
        if answer.kind != DONE {
            return Err(io::Error::other(answer.words));
        }
        let mut numbers = answer.words.split(' ').map(|number| number.parse().ok());
        Ok(numbers.next().flatten().zip(numbers.next().flatten()))
    }

    /// Removes a file that it was told of. Returns whether it is gone.
    pub fn unlink(&self, path: &Path) -> bool {
        let answer = self.line.ask(UNLINK, path.as_os_str().as_bytes());
        answer.is_ok_and(|answer| answer.kind == DONE)
    }

    /// Who uses the mount. `None`: it does not know of one, or is gone.
    pub fn users(&self) -> Option<Users> {
        let answer = self.line.ask(USERS, &[]).ok().filter(|answer| answer.kind == DONE)?;
        serde_json::from_str(&answer.words).ok()
    }

    /// Connects to a front end that it was told of.
    ///
    /// Errors: nobody listens there, or the helper is gone.
    pub fn connect(&self, path: &Path) -> io::Result<OwnedFd> {
        let answer = self.line.ask(CONNECT, path.as_os_str().as_bytes())?;
        answer.fd.ok_or_else(|| io::Error::other(answer.words))
    }

    /// Lets it tell the service manager something. Does not wait: not for an order that takes its
    /// time either.
    pub fn say(&self, word: Word, text: &str) {
        let order = manager::order(word, text);
        let pieces = [IoSlice::new(&order)];
        let sent = ringdisk_messages::send(&self.line.socket, &pieces, &[], Wait::Never);
        if let Err(errno) = sent {
            tracing::debug!("the helper does not speak to the service manager: {errno}");
        }
    }

    /// Whether its end of the socket is closed.
    pub(crate) fn is_gone(&self) -> bool {
        let mut socket = [PollFd::new(&self.line.socket, PollFlags::empty())];
        let now = Timespec::default();
        poll(&mut socket, Some(&now)).is_ok() && socket[0].revents().contains(PollFlags::HUP)
    }

    /// Waits until it has ended, if it is a process for this one only. What it was told before it
    /// does first.
    pub fn end(&self) {
        let _turn = self.line.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = shutdown(&self.line.socket, Shutdown::Both);
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = child.as_mut().map(Child::wait);
    }
}
