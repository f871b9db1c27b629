//! Files by their names, with the numbers that say whether a name still leads to the same file.
//!
//! Promises: a file is opened by its name only if it has these numbers still.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, makedev, statx};

/// Device and inode number.
pub(crate) type Id = (u64, u64);

/// A file by its name, with device and inode number: what has taken its name since is another one.
pub type Named = (PathBuf, (u64, u64));

/// A file or directory as it is now.
pub fn named(path: PathBuf) -> Option<Named> {
    let meta = fs::metadata(&path).ok()?;
    Some((path, (meta.dev(), meta.ino())))
}

/// Keeps the numbers of a file from being given to another one: a descriptor that nothing can be
/// read or written by. `None`: its name leads to something else, as that of a mountpoint does,
/// which would be in use then; or there is no descriptor left.
pub fn pin(path: &Path, id: (u64, u64)) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    // What is mounted there may not answer yet, so nothing is asked of it.
    let quietly = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let now = statx(&file, "", quietly, StatxFlags::INO).ok()?;
    ((makedev(now.stx_dev_major, now.stx_dev_minor), now.stx_ino) == id).then_some(file)
}
