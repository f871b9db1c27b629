//! Aborting a connection by fusectl.
//!
//! Promises: numbers of connections are used again, so a number is looked up once, while the mount
//! is known to be ours; what was opened then reaches that connection only, and nothing when it is
//! gone. (The kernel takes the file away from the connection before that goes:
//! `fuse_ctl_remove_conn`.)

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::direct;

/// Where fusectl is mounted.
const FUSECTL_PATH: &str = "/sys/fs/fuse/connections";

/// What aborts one connection, and tells whether it is there still.
#[derive(Debug)]
pub struct Abort {
    abort: File,
    /// The connection's directory.
    directory: OwnedFd,
}

impl Abort {
    /// Opens it, where fusectl is mounted, or by a private instance of it (root). `None`: it cannot
    /// be had.
    ///
    /// * `connection`: its number, which is not another mount's.
    #[must_use]
    pub fn of(connection: u32) -> Option<Abort> {
        let mounted = || {
            let root = open(CWD, FUSECTL_PATH, OFlags::PATH | OFlags::DIRECTORY)?;
            Abort::below(root.as_fd(), connection)
        };
        // fusectl has one instance per kernel; a detached mount of it serves without being visible
        // to users.
        let private = || Abort::below(direct::detached("fusectl")?.as_fd(), connection);
        mounted().or_else(|_: Errno| private()).ok()
    }

    fn below(root: BorrowedFd<'_>, connection: u32) -> Result<Abort, Errno> {
        let directory = open(root, &connection.to_string(), OFlags::PATH | OFlags::DIRECTORY)?;
        let abort = open(directory.as_fd(), "abort", OFlags::WRONLY)?;
        Ok(Abort { abort: abort.into(), directory })
    }

    /// Tells the kernel. Does nothing to a connection that is gone. Returns whether the kernel was
    /// told.
    pub fn abort(&self) -> bool {
        (&self.abort).write_all(b"1").is_ok()
    }

    /// Whether the file system of the connection is there still, mounted or in use; if that cannot
    /// be told, it is. As long as it is, no other mount has its number: the kernel takes the
    /// connection out of fusectl first (`fuse_sb_destroy`), and then this directory holds nothing,
    /// or a file that is empty (`fuse_conn_waiting_read`).
    #[must_use]
    pub fn is_there(&self) -> bool {
        match open(self.directory.as_fd(), "waiting", OFlags::RDONLY) {
            Ok(waiting) => File::from(waiting).read(&mut [0; 16]).map_or(true, |len| len > 0),
            Err(errno) => errno != Errno::NOENT,
        }
    }
}

fn open(at: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(at, path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// The number of the connection that a `/dev/fuse` descriptor belongs to, as the kernel says it
/// (`fuse_connection` in its fdinfo). `None`: an older kernel, no `/proc`, or a descriptor without
/// a connection.
pub(super) fn connection_of(device: BorrowedFd<'_>) -> Option<u32> {
    let path = format!("/proc/self/fdinfo/{}", device.as_raw_fd());
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())
}
