//! Checks of a mountpoint before anything is mounted on it.
//!
//! Promises: never asks a mount that is already there anything before the mount table has said whose it is, so a dead server
//! cannot make the check hang; changes nothing on disk.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;

use super::FirstLook;
use super::table::{self, MountEntry};
use crate::error::{Error, ErrorKind};

/// Links followed before a name is taken for a loop; the kernel's own limit.
const SYMLINKS_MAX: usize = 40;
/// How long a mount that is there may take to show that its server lives. The rings of one that was killed may hold its
/// device for a while on a busy machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Makes a path absolute and free of symbolic links without asking the file itself: only its directory is resolved, and a link in
/// its place is read as a link.
///
/// Errors: [`ErrorKind::NotFound`] if the directory does not exist, [`ErrorKind::PermissionDenied`], [`ErrorKind::System`].
pub fn resolve(path: &Path) -> Result<PathBuf, Error> {
    let mut path = path.to_path_buf();
    for _ in 0..SYMLINKS_MAX {
        let absolute = resolve_directory(&path)?;
        if table::at(&absolute)?.is_some() {
            return Ok(absolute);
        }
        match fs::read_link(&absolute) {
            Ok(target) => path = absolute.parent().unwrap_or(Path::new("/")).join(target),
            // Not a link, or not there: both are for the caller to judge.
            Err(_) => return Ok(absolute),
        }
    }
    Err(Error::new(ErrorKind::System, format!("mountpoint {}", path.display())).errno(Errno::LOOP))
}

fn resolve_directory(path: &Path) -> Result<PathBuf, Error> {
    let Some(name) = path.file_name() else {
        // "/", ".." or the like: a directory in any case.
        return fs::canonicalize(path).map_err(|error| io_error(path, error));
    };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let directory = fs::canonicalize(directory).map_err(|error| io_error(path, error))?;
    Ok(directory.join(name))
}

/// Checks that an export can be mounted on `path` and gives its absolute name.
///
/// Errors: [`ErrorKind::NotFound`], [`ErrorKind::NotRegular`], [`ErrorKind::AlreadyOurs`], [`ErrorKind::Occupied`],
/// [`ErrorKind::Stale`], [`ErrorKind::PermissionDenied`], [`ErrorKind::System`].
pub fn check(path: &Path) -> Result<PathBuf, Error> {
    let absolute = resolve(path)?;
    if let Some(entry) = table::at(&absolute)? {
        return Err(occupied(&absolute, &entry));
    }
    let shown = absolute.display();
    let metadata = fs::metadata(&absolute).map_err(|error| io_error(&absolute, error))?;
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(absolute);
    }
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_block_device() || kind.is_char_device() {
        "a device"
    } else {
        "not a regular file"
    };
    let hint = if kind.is_dir() {
        format!(
            "a disk is served as a file, so name one: `{}`",
            absolute.join("disk.raw").display()
        )
    } else {
        "name a regular file; an empty one is made when there is none".to_owned()
    };
    Err(Error::new(ErrorKind::NotRegular, format!("mountpoint {shown} is {what}")).hint(hint))
}

/// Explains which mount is in the way.
fn occupied(mountpoint: &Path, entry: &MountEntry) -> Error {
    let shown = mountpoint.display();
    if !entry.is_ours() {
        let message = format!(
            "mountpoint {shown} already has {} ({}) mounted on it",
            entry.source.display(),
            entry.fstype
        );
        return Error::new(ErrorKind::Occupied, message)
            .hint(format!("choose another file, or unmount it first: `umount {shown}`"));
    }
    if is_dead(mountpoint) {
        let message = format!(
            "mountpoint {shown} still carries the mount of a ringdisk that is gone ({})",
            entry.source.display()
        );
        return Error::new(ErrorKind::Stale, message)
            .hint(format!("remove it: `ringdisk umount {shown}`"));
    }
    let message =
        format!("mountpoint {shown} already serves {} (ringdisk)", entry.source.display());
    Error::new(ErrorKind::AlreadyOurs, message)
        .hint(format!("stop it first: `ringdisk umount {shown}`, or choose another file"))
}

/// Whether the server of a FUSE mount is gone, which shows as ENOTCONN, or as ECONNABORTED to a request that waited meanwhile. One that
/// went before it answered INIT shows as ECONNREFUSED since Linux 7.3; one that was killed with rings shows as ECANCELED to a request
/// that was in them.
///
/// Asked by a process of its own: a server that is stopped keeps that one waiting, in a place where nothing ends it (a thread would hold up
/// the end of this process). Such a server is not gone.
pub(crate) fn is_dead(mountpoint: &Path) -> bool {
    let answer = FirstLook::start(mountpoint).ok().and_then(|look| look.answer(ANSWER_TIMEOUT));
    matches!(
        answer,
        Some(Err(Errno::NOTCONN | Errno::CONNABORTED | Errno::CONNREFUSED | Errno::CANCELED))
    )
}

fn io_error(path: &Path, error: io::Error) -> Error {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::NotFound => {
            Error::new(ErrorKind::NotFound, format!("mountpoint {shown} does not exist"))
                .hint(format!("make an empty file there: `touch {shown}`"))
        }
        io::ErrorKind::PermissionDenied => {
            Error::new(ErrorKind::PermissionDenied, format!("mountpoint {shown}"))
                .source(error)
                .hint("choose a file that you may write")
        }
        io::ErrorKind::NotADirectory => Error::new(
            ErrorKind::NotFound,
            format!("mountpoint {shown}: a part of the path is not a directory"),
        )
        .source(error),
        _ => Error::new(ErrorKind::System, format!("mountpoint {shown}")).source(error),
    }
}
