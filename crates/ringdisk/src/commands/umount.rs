//! `ringdisk umount`: ends a mount of any process, by its path.
//!
//! Promises: nothing that is served is touched. A server that stands still can keep the process
//! that takes its mount away waiting in the kernel, where no signal ends it (with rings, until the
//! server runs again); so a child process does that, and this one ends in time.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use ringdisk_daemon::control::client::{Client, Timeout};
use ringdisk_daemon::control::protocol::Command as Request;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::mount_lock;
use ringdisk_daemon::mount_users::{self, Place};
use ringdisk_daemon::run_as;
use ringdisk_daemon::terminal::{self, shell_word, visible};
use ringdisk_disk::Progress;
use ringdisk_fuse::mount::{MountEntry, Unmount, mountpoint, table, unmount};
use ringdisk_fuse::{Error, ErrorKind};

use crate::cli::UmountArgs;

/// Ends the mounts that are named, or all. Gives the exit code: of several mounts the first one
/// that is a failure.
///
/// Errors: as [`end`]; of several mounts each has been said before the next one is ended.
pub(crate) fn run(args: &UmountArgs) -> Result<u8, Failure> {
    let mountpoints = if args.all { all()? } else { args.mountpoints.clone() };
    if let [only] = mountpoints.as_slice() {
        return end(args, only);
    }
    if mountpoints.is_empty() {
        terminal::note("there is no mount that could be ended");
    }
    let mut first = Exit::Clean.code();
    for path in &mountpoints {
        let code = end(args, path).unwrap_or_else(|failure| {
            terminal::complain(&failure);
            failure.code()
        });
        first = if first == Exit::Clean.code() { code } else { first };
    }
    Ok(first)
}

/// The mounts of this user, or of all users for root; the last one first, as it may lie on another
/// one.
///
/// Errors: there is no mount table.
fn all() -> Result<Vec<PathBuf>, Failure> {
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
fn end(args: &UmountArgs, path: &Path) -> Result<u8, Failure> {
    // Resolved before the mount goes: afterwards the name may lead elsewhere.
    let mountpoint = mountpoint::resolve(path)?;
    let end = Instant::now() + args.timeout;
    let server = match args.only_detach {
        true => None,
        false => ask(&mountpoint, (args.timeout / NAMES_PART).min(NAMES_WAIT)),
    };
    let how = match (args.lazy, args.force) {
        (true, _) => Unmount::Lazy,
        (_, true) => Unmount::Force,
        _ => Unmount::Normal,
    };
    match (args.only_detach, start(args, &mountpoint)) {
        (false, Some(child)) => match wait(child, end) {
            Some(0) => {}
            // It has said why.
            Some(code) => return Ok(code),
            None => return Err(late(&mountpoint, args.timeout)),
        },
        _ => detach(&mountpoint, how)?,
    }
    if args.only_detach || how == Unmount::Lazy {
        return Ok(Exit::Clean.code());
    }
    let left = |least| end.saturating_duration_since(Instant::now()).max(least);
    if !mount_lock::wait(&mountpoint, left(WAIT_MIN)) {
        return Err(still_there(&mountpoint, args.timeout));
    }
    let Some(mut server) = server else {
        note_leftover(&mountpoint);
        return Ok(Exit::Clean.code());
    };
    match server.wait_for_end(left(SAID), args.force, &Progress::new()) {
        Some(Err(failure)) => Err(failure),
        Some(Ok(())) => Ok(Exit::Clean.code()),
        // Where the lock could not be had, it says nothing of the server.
        None => Err(still_there(&mountpoint, args.timeout)),
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

/// Starts the process that takes the mount away. `None`: it cannot be started, or we are it.
fn start(args: &UmountArgs, mountpoint: &Path) -> Option<Child> {
    if args.only_detach {
        return None;
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ringdisk").args(["umount", "--only-detach"]);
    command.args(args.lazy.then_some("--lazy")).args(args.force.then_some("--force"));
    command.arg("--").arg(mountpoint).spawn().ok()
}

/// Waits for a process; gives its exit code. `None`: it takes longer.
fn wait(mut child: Child, end: Instant) -> Option<u8> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                let code = status.code().and_then(|code| u8::try_from(code).ok());
                return Some(code.unwrap_or(Exit::General.code()));
            }
            _ if Instant::now() >= end => return None,
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
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
fn while_busy(mut unmount: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let end = Instant::now() + BUSY_TIMEOUT;
    loop {
        match unmount() {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                thread::sleep(AGAIN);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
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
