//! Ends a mount of any process, by its path.
//!
//! Promises: nothing that is served is touched. A server that stands still can keep the process
//! that takes its mount away waiting in the kernel, where no signal ends it (with rings, until the
//! server runs again); so a child process does that ([`Role::Detach`]), and this one ends in time.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use ringdisk_disk::Progress;
use ringdisk_export::retry_while;
use ringdisk_fuse::mount::{MountEntry, Unmount, mountpoint, table, unmount};
use ringdisk_fuse::{Error, ErrorKind};
use ringdisk_messages::Wait;

use crate::control::client::{Client, Timeout};
use crate::control::protocol::Command as Request;
use crate::control::registry;
use crate::failure::{Exit, Failure};
use crate::helper::start::{Role, take_socket};
use crate::mount_lock;
use crate::mount_users::{self, Place};
use crate::run_as;
use crate::terminal::{self, shell_word, visible};

/// How a mount is ended.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Although it is in use; it ends when its last user closes it.
    pub lazy: bool,
    /// Now; requests in flight fail.
    pub force: bool,
    /// How long that may take, and its server to end.
    pub timeout: Duration,
}

/// The mounts of this user, or of all users for root; the last one first, as it may lie on another
/// one.
///
/// Errors: there is no mount table.
pub fn all() -> Result<Vec<PathBuf>, Failure> {
    Ok(mounts_of(registry::user(), table::ours()?))
}

fn mounts_of(user: u32, mut mounts: Vec<MountEntry>) -> Vec<PathBuf> {
    mounts.retain(|mount| user == 0 || registry::owner_of(mount) == Some(user));
    mounts.into_iter().rev().map(|mount| mount.mountpoint).collect()
}

/// Takes a mount away, and waits until its server has flushed, let go of the image and ended. Gives
/// the exit code.
///
/// Errors: nothing of ours is mounted there, it is in use, or the system does not allow it; it
/// takes longer than `--timeout`; what the server said of its end.
pub fn end(how: How, path: &Path) -> Result<u8, Failure> {
    // Resolved before the mount goes: afterwards the name may lead elsewhere.
    let mountpoint = mountpoint::resolve(path)?;
    let end = Instant::now() + how.timeout;
    let server = ask(&mountpoint, (how.timeout / NAMES_PART).min(NAMES_WAIT));
    let flags = match (how.lazy, how.force) {
        (true, _) => Unmount::Lazy,
        (_, true) => Unmount::Force,
        _ => Unmount::Normal,
    };
    match start(flags, &mountpoint) {
        Ok(child) => match wait(child, end) {
            Some(0) => {}
            // It has said why.
            Some(code) => return Ok(code),
            None => return Err(late(&mountpoint, how.timeout)),
        },
        Err(error) => {
            tracing::debug!("no process that waits for the unmount: {error}");
            detach(&mountpoint, flags)?;
        }
    }
    if flags == Unmount::Lazy {
        return Ok(Exit::Clean.code());
    }
    let left = |least| end.saturating_duration_since(Instant::now()).max(least);
    if !mount_lock::wait(&mountpoint, left(WAIT_MIN)) {
        return Err(still_there(&mountpoint, how.timeout));
    }
    let Some(mut server) = server else {
        note_leftover(&mountpoint);
        return Ok(Exit::Clean.code());
    };
    match server.wait_for_end(left(SAID), how.force, &Progress::new()) {
        Some(Err(failure)) => Err(failure),
        Some(Ok(())) => Ok(Exit::Clean.code()),
        // Where the lock could not be had, it says nothing of the server.
        None => Err(still_there(&mountpoint, how.timeout)),
    }
}

/// Says that an empty file stays where a mount was whose server did not answer: most likely that
/// one was killed, and had made it.
fn note_leftover(mountpoint: &Path) {
    let is_free = table::at(mountpoint).is_ok_and(|mount| mount.is_none());
    let meta = std::fs::symlink_metadata(mountpoint);
    if is_free && meta.is_ok_and(|meta| meta.is_file() && meta.len() == 0) {
        let shown = shell_word(&mountpoint.display().to_string());
        terminal::note(format_args!(
            "the server of this mount did not answer, so the empty file below it is left: `rm \
             {shown}` removes it"
        ));
    }
}

/// The mount has gone, and who served it has not.
fn still_there(mountpoint: &Path, limit: Duration) -> Failure {
    let shown = mountpoint.display();
    let text = format!("{shown} is unmounted, but its server has not ended within {limit:?}");
    Failure::new(Exit::Timeout, text)
        .hint("it may still be writing to the image, or be stopped; --timeout waits longer")
}

/// How long one listens at least to what the server says of its end.
const SAID: Duration = Duration::from_secs(1);

/// How long the server may take to say whether its images still have their names.
const NAMES_WAIT: Duration = Duration::from_millis(500);

/// Of a short `--timeout`, the question takes one part in so many: the rest is for the unmount
/// itself, also where the server stands still.
const NAMES_PART: u32 = 4;

/// Says which images have lost their names: what a deleted one holds is gone when its server ends.
/// Gives the connection, on which the server says at last how it has ended. Where it does not
/// answer nothing is said.
fn ask(mountpoint: &Path, limit: Duration) -> Option<Client> {
    let deadline = Instant::now() + limit;
    let mut client = Client::reach(mountpoint, limit).ok()?;
    let stats = client
        .greet(deadline, limit)
        .and_then(|()| client.call(&Request::Stats, &Progress::new(), Timeout::Answer(limit)));
    let Ok(stats) = stats else { return Some(client) };
    let layers = stats["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    for lost in layers.iter().filter_map(|layer| layer["name-lost"].as_str()) {
        terminal::warn(visible(lost));
    }
    Some(client)
}

/// What is left of the time for the server's end at least.
const WAIT_MIN: Duration = Duration::from_millis(100);

/// How a mount is ended, in the message to the process that does it.
const WORDS: [(u8, Unmount); 3] =
    [(b'N', Unmount::Normal), (b'L', Unmount::Lazy), (b'F', Unmount::Force)];
/// Longest message, bytes: a letter and a path.
const MESSAGE_BYTES_MAX: usize = 1 + 4096;

/// Starts the process that takes the mount away.
///
/// * `mountpoint`: absolute.
///
/// Errors: no socket, no process; without `/proc` it cannot be done.
fn start(how: Unmount, mountpoint: &Path) -> io::Result<Child> {
    let (mut command, socket) = Role::Detach.command()?;
    let letter = WORDS.iter().filter(|(_, word)| *word == how).map(|(letter, _)| *letter);
    let letter: Vec<u8> = letter.collect();
    let pieces = [IoSlice::new(&letter), IoSlice::new(mountpoint.as_os_str().as_bytes())];
    ringdisk_messages::send(&socket, &pieces, &[], Wait::Never)?;
    command.arg0("ringdisk").spawn()
}

/// Takes the mount away that the parent names. Gives the exit code; what goes wrong has been said.
pub fn run_detacher() -> u8 {
    let asked = || -> io::Result<(Unmount, PathBuf)> {
        let mut message = [0; MESSAGE_BYTES_MAX];
        let len = ringdisk_messages::receive(take_socket()?, &mut message, Wait::Never)?.whole()?;
        let asked = message.get(..len.len).and_then(|message| message.split_first());
        let (letter, path) = asked.ok_or(io::ErrorKind::InvalidData)?;
        let how = WORDS.iter().find(|(word, _)| word == letter);
        let (_, how) = how.ok_or(io::ErrorKind::InvalidData)?;
        Ok((*how, PathBuf::from(OsStr::from_bytes(path))))
    };
    let detached = asked()
        .map_err(|error| Failure::system("what is to be unmounted", &error, Exit::General))
        .and_then(|(how, mountpoint)| detach(&mountpoint, how));
    match detached {
        Ok(()) => Exit::Clean.code(),
        Err(failure) => {
            terminal::complain(&failure);
            failure.code()
        }
    }
}

/// Waits for a process; gives its exit code. `None`: it takes longer.
fn wait(mut child: Child, end: Instant) -> Option<u8> {
    let limit = end.saturating_duration_since(Instant::now());
    let ended = || child.try_wait().ok().flatten();
    let status = retry_while(limit, POLL_INTERVAL, Option::is_none, ended)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Some(code.unwrap_or(Exit::General.code()))
}

/// The kernel waits for the server.
fn late(mountpoint: &Path, limit: Duration) -> Failure {
    let shown = mountpoint.display();
    let is_there = table::at(mountpoint).is_ok_and(|mount| mount.is_some_and(|m| m.is_ours()));
    let what = if is_there { "is not unmounted" } else { "is unmounted, but not let go of" };
    let text = format!(
        "{shown} {what} within {limit:?}: the kernel waits for its server, which does not run"
    );
    Failure::new(Exit::Timeout, text).hint(
        "it may be stopped (`kill -CONT` lets it go on) or waiting for its storage; the \
            unmount goes on by itself",
    )
}

fn detach(mountpoint: &Path, how: Unmount) -> Result<(), Failure> {
    while_busy(|| unmount(mountpoint, how)).map_err(|error| {
        let is_busy = error.kind() == ErrorKind::Busy;
        let entry = table::at(mountpoint).ok().flatten();
        let entry = entry.filter(MountEntry::is_ours);
        let may_fail = matches!(error.kind(), ErrorKind::Busy | ErrorKind::PermissionDenied);
        if let Some(owner) = entry.as_ref().and_then(another_users).filter(|_| may_fail) {
            let shown = mountpoint.display();
            let text = format!("{shown} is a mount of {owner}, not yours");
            return Failure::new(Exit::Permission, text).hint("its owner can end it, and root");
        }
        let number = entry.and_then(|entry| entry.connection());
        let failure = Failure::from(error);
        match number.filter(|_| is_busy) {
            Some(number) => {
                let users = mount_users::look(&Place::of(mountpoint, number)).text(None);
                let shown = mountpoint.display();
                Failure::new(failure.exit, format!("{shown} is in use by {users}")).hint(
                    "close it there; or give --lazy, and it ends when they have closed it, \
                        or --force, and they get errors",
                )
            }
            None => failure,
        }
    })
}

/// The user whose mount this is, where that is another one than ours. `None`: it is ours, or we are
/// root.
fn another_users(mount: &MountEntry) -> Option<String> {
    let user = registry::user();
    let owner = registry::owner_of(mount).filter(|owner| user != 0 && *owner != user)?;
    let name = run_as::user_name(owner);
    Some(name.map_or_else(|| format!("user {owner}"), |name| format!("user {name}")))
}

/// How long a mount may be in use by a client that is about to close it: a program that has just
/// ended, or the server's own look at a mount that has just begun.
const BUSY_TIMEOUT: Duration = Duration::from_millis(300);

/// How often that is tried again.
const AGAIN: Duration = Duration::from_millis(10);

/// How often one looks for the end of a process.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Tries again for a moment while the mount is busy.
fn while_busy(unmount: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let is_busy = |result: &Result<(), Error>| {
        result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy)
    };
    retry_while(BUSY_TIMEOUT, AGAIN, is_busy, unmount)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_busy_mount_is_tried_again_and_other_errors_are_not() {
        let mut left = 3;
        let result = while_busy(|| {
            left -= 1;
            if left > 0 { Err(Error::new(ErrorKind::Busy, "busy")) } else { Ok(()) }
        });
        assert!(result.is_ok());
        let mut calls = 0;
        let refused = while_busy(|| {
            calls += 1;
            Err(Error::new(ErrorKind::PermissionDenied, "no"))
        });
        assert!(refused.is_err());
        assert_eq!(calls, 1);
    }

    #[test]
    fn all_mounts_are_those_of_the_user_and_for_root_those_of_all() {
        let mount = |path: &str, user: u32| MountEntry {
            id: 1,
            parent: 0,
            device: (0, 1),
            mountpoint: PathBuf::from(path),
            options: String::new(),
            fstype: String::from("fuse.ringdisk"),
            source: "image".into(),
            super_options: format!("rw,user_id={user},group_id=0"),
        };
        let mounts = || vec![mount("/a", 0), mount("/b", 1000), mount("/c", 1000)];
        assert_eq!(mounts_of(1000, mounts()), ["/c", "/b"].map(PathBuf::from));
        assert_eq!(mounts_of(0, mounts()), ["/c", "/b", "/a"].map(PathBuf::from));
        assert!(mounts_of(7, mounts()).is_empty());
    }

    #[test]
    fn a_process_that_takes_too_long_is_left() {
        let child = |words: &[&str]| Command::new(words[0]).args(&words[1..]).spawn();
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(wait(child(&["sh", "-c", "exit 5"]).expect("sh"), soon), Some(5));
        let mut slow = child(&["sleep", "600"]).expect("sleep");
        let pid = rustix::process::Pid::from_child(&slow);
        assert!(slow.try_wait().expect("a child").is_none());
        assert_eq!(wait(slow, Instant::now()), None);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}
