//! Checks of a mountpoint before anything is mounted on it.
//!
//! Promises: never asks a mount that is already there anything before the mount table has said
//! whose it is, so a dead server cannot make the check hang; changes nothing on disk. What is
//! mounted on is the file that the name means itself: a symbolic link in its place, now or a moment
//! later, could be another user's and lead to any file of the system.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;

use super::AnswerCheck;
use super::table::{self, MountEntry};
use crate::{Error, ErrorKind};

/// Links followed before a name is taken for a loop; the kernel's own limit.
const SYMLINKS_MAX: usize = 40;
/// How long a mount that is there may take to show that its server lives. The rings of one that was
/// killed may hold its device for a while on a busy machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Makes a path of a mount that may be there absolute and free of symbolic links without asking the
/// file itself: only its directory is resolved, and a link in its place is read as a link.
///
/// Errors: [`ErrorKind::NotFound`] if the directory does not exist,
/// [`ErrorKind::PermissionDenied`], [`ErrorKind::System`].
pub fn resolve(path: &Path) -> Result<PathBuf, Error> {
    let mut path = path.to_path_buf();
    for _ in 0..SYMLINKS_MAX {
        let absolute = place(&path)?;
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

/// Makes the path of a new mount absolute: its directory is free of symbolic links. What is in its
/// own place is not looked at.
///
/// Errors: as [`resolve`].
pub fn place(path: &Path) -> Result<PathBuf, Error> {
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
/// Errors: [`ErrorKind::NotFound`], [`ErrorKind::NotRegular`], [`ErrorKind::AlreadyOurs`],
/// [`ErrorKind::Occupied`], [`ErrorKind::Stale`], [`ErrorKind::PermissionDenied`],
/// [`ErrorKind::System`].
pub fn check(path: &Path) -> Result<PathBuf, Error> {
    let absolute = place(path)?;
    if let Some(entry) = table::at(&absolute)? {
        return Err(occupied(&absolute, &entry));
    }
    let kind = fs::symlink_metadata(&absolute).map_err(|error| io_error(&absolute, error))?;
    let kind = kind.file_type();
    if kind.is_file() {
        return Ok(absolute);
    }
    let mut hint = "name a regular file; an empty one is made when there is none".to_owned();
    let what = if kind.is_dir() {
        hint = format!(
            "a disk is served as a file, so name one: `{}`",
            absolute.join("disk.raw").display()
        );
        "a directory"
    } else if kind.is_symlink() {
        if let Ok(target) = fs::read_link(&absolute) {
            let target = absolute.parent().unwrap_or(Path::new("/")).join(target);
            hint = format!("name the file that is meant: {}", target.display());
        }
        "a symbolic link, which a new mount does not follow"
    } else if kind.is_block_device() || kind.is_char_device() {
        "a device"
    } else {
        "not a regular file"
    };
    Err(not_regular(&absolute, what).hint(hint))
}

fn not_regular(mountpoint: &Path, what: &str) -> Error {
    let shown = mountpoint.display();
    Error::new(ErrorKind::NotRegular, format!("mountpoint {shown} is {what}"))
}

/// Holds the file that was checked, whatever becomes of its name and of its directories' meanwhile,
/// to be mounted on.
///
/// * `checked`: as [`check`] gives it.
///
/// Errors: as [`check`]; [`ErrorKind::System`]: a link came into the path.
pub(super) fn hold(checked: &Path) -> Result<OwnedFd, Error> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = match openat2(CWD, checked, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Linux before 5.6, and filters of system calls that do not know it.
        Err(Errno::NOSYS | Errno::PERM) => openat(CWD, checked, flags, Mode::empty()),
        held => held,
    };
    let held = held.map_err(|errno| io_error(checked, errno.into()))?;
    let stat = fstat(&held).map_err(|errno| io_error(checked, errno.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(held),
        _ => Err(not_regular(checked, "not the file any more that it was")),
    }
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

/// Whether the server of a FUSE mount is gone, which shows as ENOTCONN, or as ECONNABORTED to a
/// request that waited meanwhile. One that went before it answered INIT shows as ECONNREFUSED since
/// Linux 7.3; one that was killed with rings shows as ECANCELED to a request that was in them.
///
/// Asked by a process of its own: a server that is stopped keeps that one waiting, in a place where
/// nothing ends it (a thread would hold up the end of this process). Such a server is not gone.
#[must_use]
pub fn is_dead(mountpoint: &Path) -> bool {
    let answer = AnswerCheck::start(mountpoint).ok().and_then(|look| look.answer(ANSWER_TIMEOUT));
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
