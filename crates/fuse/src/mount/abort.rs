//! Aborting a connection by fusectl.
//!
//! Promises: numbers of connections are used again, so a number is looked up once, while the mount is known to be ours; what was opened then
//! reaches that connection only, and nothing when it is gone. (The kernel takes the file away from the connection before that goes:
//! `fuse_ctl_remove_conn`.)

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::direct;

/// Where fusectl is mounted.
const FUSECTL_PATH: &str = "/sys/fs/fuse/connections";

/// What aborts one connection.
#[derive(Debug)]
pub struct Abort(File);

impl Abort {
    /// Opens it, where fusectl is mounted, or by a private instance of it (root). `None`: it cannot be had.
    ///
    /// * `connection`: its number, which is not another mount's.
    #[must_use]
    pub fn of(connection: u32) -> Option<Abort> {
        let name = format!("{connection}/abort");
        let mounted = OpenOptions::new().write(true).open(Path::new(FUSECTL_PATH).join(&name));
        mounted.ok().or_else(|| private(&name).ok()).map(Abort)
    }

    /// Tells the kernel. Does nothing to a connection that is gone. Returns whether the kernel was told.
    pub fn abort(&self) -> bool {
        (&self.0).write_all(b"1").is_ok()
    }
}

/// fusectl has one instance per kernel; a detached mount of it serves without being visible to anybody.
fn private(name: &str) -> Result<File, Errno> {
    let root = direct::detached("fusectl")?;
    rustix::fs::openat(root, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

/// The number of the connection that a `/dev/fuse` descriptor belongs to, as the kernel says it (`fuse_connection` in its fdinfo). `None`:
/// an older kernel, no `/proc`, or a descriptor without a connection.
pub(super) fn connection_of(device: BorrowedFd<'_>) -> Option<u32> {
    let path = format!("/proc/self/fdinfo/{}", device.as_raw_fd());
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())
}
