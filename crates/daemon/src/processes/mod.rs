//! The disks that are served on this machine: every serving process of a user, or of all users for
//! root, with its clients and its health; dead mounts and sockets that were left, with the command
//! that clears each away.
//!
//! Promises: a server that stands still, or lies, costs a bounded time and nothing else; no file
//! that is served is touched, but for a mount whose server does not listen: a child process looks
//! whether that one is dead. What another user may not see is left out. Any thread; takes up to
//! some seconds.

mod entry;
mod text;

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use ringdisk_fuse::mount::{MountEntry, mountpoint, table};
use serde_json::Value;

use crate::control::ask_all::{self, Answer, Asked};
use crate::control::protocol::Command;
use crate::control::registry::{self, Found, owner_of};
use crate::failure::Failure;
use crate::mount_users::{self, Place};

pub use entry::{Entry, State};
pub use text::{jobs as text_jobs, problems, table as text_table};

/// How long servers may take to answer one question (2 s).
pub const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Every control socket of this user, or of all for root, with what its server says to `command`.
pub fn ask_all(command: &Command, limit: Duration) -> Vec<(Found, Asked)> {
    let found = registry::all(registry::user() == 0);
    let paths: Vec<&Path> = found.iter().map(|found| found.path.as_path()).collect();
    let asked = ask_all::ask(&paths, command, limit);
    found.into_iter().zip(asked).collect()
}

/// All disks, and what was left of some.
///
/// * `look_for_users`: of mounts, which takes a look at every process.
///
/// Errors: there is no mount table.
pub fn list(look_for_users: bool) -> Result<Vec<Entry>, Failure> {
    let user = registry::user();
    let mut mounts = table::ours()?;
    mounts.retain(|mount| user == 0 || owner_of(mount) == Some(user));
    let answered = ask_all(&Command::Describe, ANSWER_LIMIT);
    let mut entries = Vec::new();
    let mut served = HashSet::new();
    for (found, asked) in answered {
        let is_mounted = |mount: &&MountEntry| mount.connection() == found.connection;
        let mount = found.connection.and_then(|_| mounts.iter().find(is_mounted));
        if matches!(asked.answer, Answer::Dead) && mount.is_some() {
            // It is listed with its mount.
            continue;
        }
        if !matches!(asked.answer, Answer::Dead | Answer::Unreachable(_)) {
            served.extend(found.connection);
        }
        entries.extend(Entry::of_socket(&found, &asked, mount));
    }
    let unserved = |mount: &&MountEntry| mount.connection().is_none_or(|it| !served.contains(&it));
    for mount in mounts.iter().filter(unserved) {
        // Bind mounts of one file are one disk.
        if entries.iter().any(|entry| entry.is_of(mount)) {
            continue;
        }
        entries.push(Entry::of_mount(mount, mountpoint::is_dead(&mount.mountpoint)));
    }
    if look_for_users {
        add_users(&mut entries);
    }
    entries.sort_by(|a, b| a.place.cmp(&b.place));
    Ok(entries)
}

/// Looks who uses the mounts.
fn add_users(entries: &mut [Entry]) {
    let mounts: Vec<&mut Entry> =
        entries.iter_mut().filter(|entry| entry.connection.is_some() && entry.is_alive()).collect();
    let place =
        |entry: &&mut Entry| Place::of(Path::new(&entry.place), entry.connection.unwrap_or(0));
    let places: Vec<Place> = mounts.iter().map(place).collect();
    if places.is_empty() {
        return;
    }
    for (entry, users) in mounts.into_iter().zip(mount_users::look_at_all(places)) {
        entry.users = users.names();
    }
}

/// For programs.
pub fn to_json(entries: &[Entry]) -> Value {
    entries.iter().map(Entry::to_json).collect()
}

#[cfg(test)]
mod tests;
