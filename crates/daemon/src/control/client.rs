//! The client's side: finds the server of a mount and asks it for one thing.
//!
//! Promises: nothing is sent to a socket of a user other than the mount's owner or root; another
//! user's server says nothing that counts as ours: no exit code; a server that sends rubbish or
//! lines without end is an error; a server that takes long can be left at any time, which cancels
//! what it does for us. Nothing that is served is touched, so a server that stands still keeps
//! no client waiting: what is mounted where is read from the mount table, and each of its answers
//! has a limit; commands that take long by themselves have one for a server that is stopped.

mod failures;
mod find;
mod moved_job;

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringdisk_disk::{Bytes, Progress};
use ringdisk_fuse::mount::table::MountEntry;
use ringdisk_fuse::mount::{mountpoint, table};
use ringdisk_messages::Wait;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, pidfd_open};
use serde_json::Value;

use crate::control::protocol::jobs::JobCommand;
use crate::control::protocol::{Command, REPLY_BYTES_MAX, Reply, VERSION};
use crate::control::registry::{
    Found, connect_now, is_served, name_of_mount, name_of_path, owner_of, user,
};
use crate::failure::{Exit, Failure};
use crate::helper::approval::{self, Allows};

use failures::{dead, gone, is_stopped, late, left, rubbish};
use find::{is_address, is_left, open, socket, stale, started};

/// How often a signal is looked for while the server says nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How long a server may take to answer unless the user says otherwise: the thread that does has
/// nothing else to do.
pub const ANSWER: Duration = Duration::from_secs(5);
/// Pause before a server is tried again to which too many others want to talk.
const FULL: Duration = Duration::from_millis(20);

/// How long the next process of a disk may take to answer, and to go on with its jobs.
const NEXT: Duration = Duration::from_secs(60);

/// How long a server may take to be gone after its last word.
const GONE: Duration = Duration::from_secs(60);

/// How long one waits for an answer.
#[derive(Clone, Copy, Debug)]
pub enum Timeout {
    /// At most so long.
    Answer(Duration),
    /// As long as the server works at it; so long where it stands still (stopped by a signal, or by
    /// a debugger).
    Work(Duration),
}

/// A connection to the server of a mount or of a disk for virtual machines.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// The server, if it can be seen.
    process: Option<OwnedFd>,
    buffer: Vec<u8>,
    /// The server has promised to say how it ends.
    tells_end: bool,
    /// The server is root's or our own user's.
    is_trusted: bool,
    /// Of a mount; absolute, without symbolic links.
    pub mountpoint: Option<PathBuf>,
    /// Servers that have ended while a job was waited for.
    losses: u32,
    /// As the user named it.
    target_name: String,
}

impl Client {
    /// Connects to the server of the mount at `path`, or of the disk with this socket or address.
    ///
    /// * `limit`: for the server to take us.
    ///
    /// Errors: nothing of ours is served there, its server has no control socket, or does not
    /// answer us.
    pub fn connect(path: &Path, limit: Duration) -> Result<Client, Failure> {
        let deadline = Instant::now() + limit;
        let mut client = Client::open(path, limit, mountpoint::is_dead)?;
        client.greet(deadline, limit)?;
        Ok(client)
    }

    /// Connects to the server behind a control socket that was found ([`super::registry::all`]).
    ///
    /// * `shown`: the disk, for people.
    ///
    /// Errors: the server is gone, another user's, or does not answer us.
    pub fn at(found: &Found, target_name: &str, limit: Duration) -> Result<Client, Failure> {
        let stream = connect_now(&found.path).map_err(|error| {
            let doing = format!("cannot reach the server of '{target_name}'");
            Failure::system(doing, &error, Exit::Mountpoint)
        })?;
        let server = socket_peercred(stream.as_fd()).ok().map(|server| server.uid);
        if !server.is_some_and(|it| it.is_root() || [found.owner, user()].contains(&it.as_raw())) {
            let text = format!("another user's process listens on '{}'", found.path.display());
            return Err(Failure::new(Exit::Permission, text));
        }
        let mut client = Client::of(stream, None, target_name.to_owned(), limit);
        client.greet(Instant::now() + limit, limit)?;
        Ok(client)
    }

    /// As [`Client::connect`], without waiting for the server to say anything: it may stand still.
    ///
    /// Errors: as there.
    pub fn reach(path: &Path, limit: Duration) -> Result<Client, Failure> {
        // Whether the mount is dead is not asked: while nobody serves it that would be one more
        // client, which keeps the mount in use.
        Client::open(path, limit, |_| false)
    }

    /// * `is_dead_mount`: asked of a mount without a server, for the message.
    fn open(
        path: &Path,
        limit: Duration,
        is_dead_mount: impl Fn(&Path) -> bool,
    ) -> Result<Client, Failure> {
        let target_name = path.display();
        let deadline = Instant::now() + limit;
        // The mount table first: a look at the file itself would wait for a server that is stopped.
        let mountpoint = mountpoint::resolve(path);
        let mount = match &mountpoint {
            Ok(mountpoint) => table::at(mountpoint)?.filter(MountEntry::is_ours),
            Err(_) => None,
        };
        let is_mount = mount.is_some() || mountpoint.as_ref().is_ok_and(|path| is_served(path));
        let (name, owner) = match (&mount, &mountpoint) {
            (Some(mount), _) => (name_of_mount(mount.device), owner_of(mount).unwrap_or_else(user)),
            // It has left the tree, or is covered.
            (None, Ok(mountpoint)) if is_mount => (name_of_path(mountpoint), user()),
            // Only now: the file of a mount is not looked at.
            _ => match (socket(path), mountpoint.as_ref()) {
                (Some(socket), _) => socket,
                (None, _) if is_address(path) => {
                    return Err(Failure::new(
                        Exit::Mountpoint,
                        format!("no ringdisk of this user serves NBD clients at '{target_name}'"),
                    )
                    .hint("`ringdisk ps` lists what is served"));
                }
                (None, Err(_)) => {
                    mountpoint?;
                    return Err(Failure::new(
                        Exit::Mountpoint,
                        format!("no such path: '{target_name}'"),
                    ));
                }
                (None, Ok(_)) => {
                    return Err(Failure::new(
                        Exit::Mountpoint,
                        format!("no disk of ringdisk is mounted on '{target_name}'"),
                    )
                    .hint("`ringdisk ps` lists what is served"));
                }
            },
        };
        let is_dead = || mount.is_some() && mountpoint.as_deref().is_ok_and(&is_dead_mount);
        let stream = open(&name, owner, deadline).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused if is_dead() => {
                dead(path, started(&name, owner))
            }
            io::ErrorKind::WouldBlock => late(&target_name.to_string(), limit, None),
            io::ErrorKind::NotFound if !is_mount && is_left(path) => stale(path),
            io::ErrorKind::NotFound => Failure::new(
                Exit::Mountpoint,
                format!(
                    "the server of '{target_name}' has no control socket that can be found from \
                     here"
                ),
            )
            .hint("it may have been started with another XDG_RUNTIME_DIR, or by an older version"),
            io::ErrorKind::ConnectionRefused if !is_mount => stale(path),
            _ => Failure::system(
                format!("cannot reach the server of '{target_name}'"),
                &error,
                Exit::Mountpoint,
            ),
        })?;
        let mountpoint = mountpoint.ok().filter(|_| is_mount);
        Ok(Client::of(stream, mountpoint, target_name.to_string(), limit))
    }

    /// A connection that nothing was said on yet.
    fn of(
        stream: UnixStream,
        mountpoint: Option<PathBuf>,
        target_name: String,
        limit: Duration,
    ) -> Client {
        // What we send fits into the socket's buffer; never for ever.
        let _ = stream.set_write_timeout(Some(limit));
        let server = socket_peercred(stream.as_fd()).ok();
        let is_trusted =
            server.is_some_and(|server| server.uid.is_root() || server.uid.as_raw() == user());
        let process = server.and_then(|server| pidfd_open(server.pid, PidfdFlags::empty()).ok());
        let (buffer, tells_end) = (Vec::new(), false);
        Client {
            stream,
            process,
            buffer,
            tells_end,
            is_trusted,
            mountpoint,
            losses: 0,
            target_name,
        }
    }

    /// Hears what the server says at first.
    ///
    /// Errors: it does not until the deadline, or speaks another language.
    pub fn greet(&mut self, deadline: Instant, limit: Duration) -> Result<(), Failure> {
        let whose = format!("the server of '{}'", self.target_name);
        let line = match self.line(|| Instant::now() >= deadline) {
            Err(_) if Instant::now() >= deadline => return Err(self.late(limit)),
            line => line.map_err(|failure| failure.context(whose.clone()))?,
        };
        match Reply::read(&line) {
            Some(Reply::Greeting { protocol, tells_end }) if protocol == u64::from(VERSION) => {
                self.tells_end = tells_end;
                Ok(())
            }
            Some(Reply::Greeting { .. }) => Err(Failure::new(
                Exit::Unsupported,
                format!("{whose}: it speaks another version of the control protocol"),
            )
            .hint("use the ringdisk that it was started with, or start it again with this one")),
            Some(Reply::Refused { text, .. }) => {
                Err(Failure::new(Exit::Locked, text).context(whose))
            }
            _ => Err(rubbish().context(whose)),
        }
    }

    /// Asks for one thing and waits for the answer.
    ///
    /// * `progress`: is kept up to date; when it is cancelled, we leave.
    ///
    /// Errors: the server's, with its exit code; ours when it cannot be understood or is gone, or
    /// does not answer in time.
    pub fn call(
        &mut self,
        command: &Command,
        progress: &Progress,
        timeout: Timeout,
    ) -> Result<Value, Failure> {
        self.call_with(command, &[], progress, timeout)
    }

    /// As [`Client::call`], with descriptors before those of the user's word.
    ///
    /// Errors: as there.
    pub fn call_with(
        &mut self,
        command: &Command,
        given: &[BorrowedFd<'_>],
        progress: &Progress,
        timeout: Timeout,
    ) -> Result<Value, Failure> {
        // A next process may have another job of the same name by then.
        let token = match command {
            Command::Job(JobCommand::Wait(named)) => self.token_of(&named.id, progress, timeout)?,
            _ => None,
        };
        let line = format!("{}\n", command.line());
        // Kept until the answer is here.
        let lasts = command.needs_word_later();
        let sent = self.send(&line, given, command.allows(), lasts);
        let _word = sent.map_err(|error| gone(&error))?;
        let told = match (self.answer(progress, timeout), command) {
            // Its server may have been replaced, and waiting changes nothing.
            (Err(failure), Command::Job(JobCommand::Wait(named)))
                if failure.exit == Exit::Halted && !progress.is_cancelled() =>
            {
                return self.wait_again((&named.id, token), failure, progress, timeout);
            }
            (told, _) => told?,
        };
        match told["id"].as_str().filter(|_| told["state"] == "moved") {
            Some(id) => {
                let token = told["token"].as_str().map(str::to_owned).or(token);
                self.follow_job((id, token), command, progress, timeout)
            }
            None => Ok(told),
        }
    }

    /// Asks for one thing, with descriptors; [`Client::answer`] waits for the answer.
    ///
    /// Errors: the server is gone.
    pub fn ask(&mut self, command: &Command, given: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let line = format!("{}\n", command.line());
        let pieces = [IoSlice::new(line.as_bytes())];
        let sent = ringdisk_messages::send(&self.stream, &pieces, given, Wait::Forever);
        let sent = sent.map_err(|errno| gone(&errno.into()))?;
        let rest = line.as_bytes().get(sent..).unwrap_or_default();
        self.stream.write_all(rest).map_err(|error| gone(&error))
    }

    /// Waits for the answer to what was asked last.
    ///
    /// * `progress`: as for [`Client::call`].
    ///
    /// Errors: as there.
    pub fn answer(&mut self, progress: &Progress, timeout: Timeout) -> Result<Value, Failure> {
        let (Timeout::Answer(limit) | Timeout::Work(limit)) = timeout;
        let server = self.server();
        let begun = Instant::now();
        // When it was last seen to run.
        let mut ran = begun;
        let mut is_late = || match timeout {
            Timeout::Answer(limit) => begun.elapsed() >= limit,
            Timeout::Work(limit) => {
                if !server.is_some_and(is_stopped) {
                    ran = Instant::now();
                }
                ran.elapsed() >= limit
            }
        };
        loop {
            let mut late = false;
            let line = self.line(|| {
                late = is_late();
                late || progress.is_cancelled()
            });
            let line = match line {
                Err(_) if late && !progress.is_cancelled() => return Err(self.late(limit)),
                line => line?,
            };
            match Reply::read(&line) {
                Some(Reply::Done(value)) => return Ok(value),
                Some(Reply::Progress { done, total }) => {
                    progress.set_total(Bytes(total));
                    progress.set_done(Bytes(done));
                }
                Some(Reply::Refused { text, hint, exit }) => {
                    let mut failure = Failure::new(Exit::General, text);
                    if let Some(hint) = hint {
                        failure = failure.hint(hint);
                    }
                    return Err(failure.with_code(self.code_of(exit)));
                }
                // The end of the connection follows.
                Some(Reply::Greeting { .. } | Reply::Ended { .. } | Reply::Event(_)) => {}
                None => return Err(rubbish()),
            }
            if progress.is_cancelled() {
                return Err(left());
            }
            if is_late() {
                return Err(self.late(limit));
            }
        }
    }

    /// Follows the events of the disk until the server ends, or `progress` is cancelled.
    ///
    /// * `tell`: gets each; `false`: it wants no more.
    ///
    /// Errors: the server refuses; it is gone without a word.
    pub fn follow(
        &mut self,
        progress: &Progress,
        mut tell: impl FnMut(&Value) -> bool,
    ) -> Result<(), Failure> {
        let line = format!("{}\n", Command::Events.line());
        self.send(&line, &[], None, false).map_err(|error| gone(&error))?;
        loop {
            let line = match self.line(|| progress.is_cancelled()) {
                Err(_) if progress.is_cancelled() => return Ok(()),
                line => line?,
            };
            match Reply::read(&line) {
                Some(Reply::Event(event)) if !tell(&event) => return Ok(()),
                Some(Reply::Refused { text, .. }) => {
                    let failure = Failure::new(Exit::General, text);
                    return Err(failure.hint("the server may be of an older version"));
                }
                Some(Reply::Ended { .. }) => return Ok(()),
                Some(_) => {}
                None => return Err(rubbish()),
            }
            if progress.is_cancelled() {
                return Ok(());
            }
        }
    }

    /// Sends a line.
    ///
    /// * `before`: descriptors that come first.
    /// * `allows`: with the user's word that this may be done, which lasts until what is returned
    ///   is dropped.
    /// * `lasts`: the server gets the user's end, too: the word lasts until it closes that, since
    ///   the command goes on when we have left.
    fn send(
        &mut self,
        line: &str,
        before: &[BorrowedFd<'_>],
        allows: Option<Allows>,
        lasts: bool,
    ) -> io::Result<Option<OwnedFd>> {
        let word = allows.map(|allows| approval::give(&allows)).transpose()?;
        let mut descriptors = before.to_vec();
        if let Some((kept, given)) = &word {
            descriptors.push(given.as_fd());
            descriptors.extend(lasts.then(|| kept.as_fd()));
        }
        if descriptors.is_empty() {
            return self.stream.write_all(line.as_bytes()).map(|()| None);
        }
        let pieces = [IoSlice::new(line.as_bytes())];
        let sent = ringdisk_messages::send(&self.stream, &pieces, &descriptors, Wait::Forever)?;
        self.stream.write_all(line.as_bytes().get(sent..).unwrap_or_default())?;
        Ok(word.map(|(kept, _)| kept))
    }

    /// The exit code of a failure that the server tells of. Scripts act upon codes, so another
    /// user's server has no say.
    fn code_of(&self, said: Option<u8>) -> u8 {
        let known = said.filter(|code| self.is_trusted && Exit::is_failure(*code));
        known.unwrap_or(Exit::General.code())
    }

    /// The mount, socket or address, as the user named it.
    pub fn target_name(&self) -> &str {
        &self.target_name
    }

    /// Its number, where it can be seen.
    pub fn server(&self) -> Option<i32> {
        let server = socket_peercred(self.stream.as_fd()).ok()?;
        Some(server.pid.as_raw_nonzero().get())
    }

    /// The server takes too long.
    fn late(&self, limit: Duration) -> Failure {
        late(&self.target_name, limit, self.server())
    }

    /// Waits until the server has ended, at most for `time`. `None`: it has not.
    ///
    /// * `forced`: it was told to end while it is in use, so that is no failure.
    /// * `progress`: when it is cancelled, we leave.
    ///
    /// Errors (inside): how it said that it ended, with its exit code; or it was killed.
    pub fn wait_for_end(
        &mut self,
        time: Duration,
        forced: bool,
        progress: &Progress,
    ) -> Option<Result<(), Failure>> {
        let end = Instant::now() + time;
        let mut said = None;
        loop {
            let mut late = false;
            let line = self.line(|| {
                late = Instant::now() >= end || progress.is_cancelled();
                late
            });
            match line.as_deref().map(Reply::read) {
                Ok(Some(Reply::Ended { exit, text })) => said = Some((exit, text)),
                Ok(Some(Reply::Greeting { tells_end, .. })) => self.tells_end = tells_end,
                Ok(_) => {}
                Err(_) if late && said.is_none() => return None,
                Err(_) => break,
            }
            // A server that says one thing after the other has not ended either; nor is it listened
            // to for ever after it has said so.
            if Instant::now() >= end || progress.is_cancelled() {
                match said {
                    None => return None,
                    Some(_) => break,
                }
            }
        }
        Some(match said {
            Some((0, _)) => Ok(()),
            Some((exit, _)) if forced && exit == Exit::Forced.code() => Ok(()),
            Some((exit, text)) => Err(Failure::new(Exit::General, text)
                .with_code(self.code_of(Some(exit)))
                .context(format!("the server of '{}' has ended", self.target_name))),
            None if self.tells_end => Err(Failure::new(
                Exit::Halted,
                format!("the server of '{}' was killed, or crashed", self.target_name),
            )
            .hint(
                "what was written since the last flush may be lost, unless another process goes \
                on (--keep-mount)",
            )),
            None => Ok(()),
        })
    }

    /// Waits, after the end of the connection, until the process is gone, and everything that it
    /// held.
    pub fn wait_for_exit(&self) {
        let Some(process) = &self.process else { return };
        let limit = Timespec::try_from(GONE).ok();
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        let _ = retry_on_intr(|| poll(&mut fds, limit.as_ref()));
    }

    /// The next line.
    ///
    /// * `leave`: asked whenever nothing came for a while, or no end of a line.
    fn line(&mut self, mut leave: impl FnMut() -> bool) -> Result<Vec<u8>, Failure> {
        let _ = self.stream.set_read_timeout(Some(POLL_INTERVAL));
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.buffer, rest));
            }
            if self.buffer.len() > REPLY_BYTES_MAX {
                return Err(rubbish());
            }
            let mut piece = [0; 8192];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(gone(&io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.buffer.extend_from_slice(piece.get(..count).unwrap_or_default());
                    // Bytes that come one by one, without an end, are no answer.
                    if !self.buffer.contains(&b'\n') && leave() {
                        return Err(left());
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::Interrupted => {
                        if leave() {
                            return Err(left());
                        }
                    }
                    _ => return Err(gone(&error)),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests;
