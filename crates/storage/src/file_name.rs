//! Whether a file that is open still has its name.
//!
//! A deleted file works as before while it is open, and is gone with its last descriptor. Code that
//! records the name of a file somewhere, or moves data into the file, has to know that.
//!
//! Promises: a few quick system calls, none of which asks the server of a FUSE file system (which
//! may be this process) for anything. Control path.

use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, makedev};

use crate::file::File;
use crate::kinds::Kind;
use crate::storage::Storage;

/// What became of the name of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameLost {
    /// The file has no name at all any more: it is gone when it is closed.
    Deleted,
    /// There is no file of that name; this one has another name.
    Renamed,
    /// The name leads to another file.
    Replaced,
}

impl Storage {
    /// What became of the name `path`, under which this file was opened. `None`: it still leads
    /// here. Storage that is no file has no name to lose.
    ///
    /// * `path`: absolute.
    pub fn name_lost(&self, path: &Path) -> Option<NameLost> {
        self.file().and_then(|file| lost(file, path))
    }
}

fn lost(file: &File, path: &Path) -> Option<NameLost> {
    let is_device = file.kind == Kind::BlockDevice;
    if !is_device && rustix::fs::fstat(file.borrow()).is_ok_and(|stat| stat.st_nlink == 0) {
        return Some(NameLost::Deleted);
    }
    // The server of the file system is not asked: the kernel answers with what it has cached.
    let flags = AtFlags::STATX_DONT_SYNC;
    let found = match rustix::fs::statx(CWD, path, flags, StatxFlags::TYPE | StatxFlags::INO) {
        Ok(found) => Some(found),
        // The file system, or a sandbox, refuses the answer: nothing is known.
        Err(errno) if errno != rustix::io::Errno::NOENT && errno != rustix::io::Errno::NOTDIR => {
            return None;
        }
        Err(_) => None,
    };
    let identity = found.map(|found| match is_device {
        true => (makedev(found.stx_rdev_major, found.stx_rdev_minor), 0),
        false => (makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
    });
    if identity == Some(file.identity) {
        return None;
    }
    // A disk may be mounted over its own image: the kernel still knows the name below the mount.
    let link = format!("/proc/self/fd/{}", file.borrow().as_raw_fd());
    let known = rustix::fs::readlink(link, Vec::new());
    let is_covered =
        known.is_ok_and(|known| known.as_bytes() == path.as_os_str().as_encoded_bytes());
    match identity {
        _ if is_covered => None,
        Some(_) => Some(NameLost::Replaced),
        None => Some(NameLost::Renamed),
    }
}
