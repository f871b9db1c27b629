//! Where the control socket of a disk is, from what a user calls the disk.
//!
//! Promises: a server is believed only if it is the owner's or root's; nothing that is served is
//! touched.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use rustix::net::sockopt::socket_peercred;

use super::FULL;
use crate::control::address;
use crate::control::registry::{candidates, connect_now, name_of_disk, real_path, user};
use crate::failure::{Exit, Failure};
use crate::terminal::shell_word;

/// The name of the control socket of the disk whose vhost-user socket this may be, and its owner.
/// `None`: it is none.
pub(super) fn socket(path: &Path) -> Option<(String, u32)> {
    let ours = |name: String| {
        let is_there = candidates(&name, user()).iter().any(|path| path.exists());
        is_there.then(|| (name, user()))
    };
    let real = real_path(path).ok();
    match real.as_deref().map(|real| (real, fs::symlink_metadata(real))) {
        Some((real, Ok(meta))) => {
            meta.file_type().is_socket().then(|| (name_of_disk(real), meta.uid()))
        }
        // The front end makes the socket (--connect), and has not; or it is no path.
        absent => {
            let by_path = absent.and_then(|(real, _)| ours(name_of_disk(real)));
            by_path.or_else(|| ours(name_of_disk(&address::name_of(path)?)))
        }
    }
}

/// Whether it is HOST:PORT and no file.
pub(super) fn is_address(path: &Path) -> bool {
    address::name_of(path).is_some() && fs::symlink_metadata(path).is_err()
}

/// Where the control socket may be: a front end that makes the vhost-user socket may be another
/// user's than the server.
pub(super) fn places(name: &str, owner: u32) -> Vec<PathBuf> {
    let mut places = candidates(name, owner);
    if owner != user() {
        places.extend(candidates(name, user()));
    }
    places
}

/// Connects to the first control socket of this name that is there and whose server is the owner's
/// or root's.
///
/// Errors: `WouldBlock` when it does not take us until the deadline.
pub(super) fn open(name: &str, owner: u32, deadline: Instant) -> io::Result<UnixStream> {
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    let connect = |path: &Path| loop {
        match connect_now(path) {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                std::thread::sleep(FULL);
            }
            connected => return connected,
        }
    };
    for path in places(name, owner) {
        match connect(&path) {
            Ok(stream) => {
                let server = socket_peercred(stream.as_fd())?.uid;
                if server.is_root() || [owner, user()].contains(&server.as_raw()) {
                    return Ok(stream);
                }
                tracing::warn!("'{}' belongs to user {}", path.display(), server.as_raw());
            }
            // Only the first reason that is one is worth telling.
            Err(error) if why.kind() == io::ErrorKind::NotFound => why = error,
            Err(_) => {}
        }
    }
    Err(why)
}

/// When a server made its control socket, if that is still there.
pub(super) fn started(name: &str, owner: u32) -> Option<SystemTime> {
    let modified = |path: PathBuf| fs::symlink_metadata(path).and_then(|meta| meta.modified()).ok();
    places(name, owner).into_iter().find_map(modified)
}

/// Whether a socket is there that nobody listens to.
pub(super) fn is_left(path: &Path) -> bool {
    // A name without a directory, too.
    let connected = real_path(path).and_then(|real| connect_now(&real));
    connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// The server that made a socket is gone.
pub(super) fn stale(path: &Path) -> Failure {
    let shown = path.display().to_string();
    let gone = Failure::new(Exit::Mountpoint, format!("the server of '{shown}' is gone"));
    if is_address(path) {
        return gone.hint("start it anew: nothing is left of it but its control socket");
    }
    gone.hint(format!(
        "the next `ringdisk serve` with this socket replaces it; `rm {}` removes it",
        shell_word(&shown)
    ))
}
