//! The note at a file that its format is raw.
//!
//! A guest may write anything into a disk of which the user said that it is raw: also the header of
//! a qcow2 image that names files of the host. Whoever opens the image next without saying what it
//! is must not follow that header. So the file keeps what was said, in the extended attribute
//! [`NAME`], which no request of a guest or client reaches; copies of the file are without it.
//!
//! Promises: the attribute is set or removed only on a file that is about to be written; nothing of
//! the file's bytes is touched.

use std::os::fd::AsFd;
use std::path::Path;

use ringdisk_ring::Errno;
use rustix::fs::{FileType, XattrFlags, fgetxattr, fremovexattr, fsetxattr, fstat, getxattr};

/// Name of the attribute.
pub(crate) const NAME: &str = "user.ringdisk.format";
/// Its only value.
const RAW: &[u8] = b"raw";

/// Whether somebody said of a file that it is raw. What cannot be read may say so.
pub(crate) fn is_raw(file: impl AsFd) -> bool {
    read(file).unwrap_or(true)
}

fn read(file: impl AsFd) -> Result<bool, Errno> {
    let mut value = [0; RAW.len() + 1];
    said(fgetxattr(file, NAME, &mut value[..]), &value)
}

/// The same of the file that a name leads to.
pub(crate) fn is_raw_at(path: &Path) -> bool {
    let mut value = [0; RAW.len() + 1];
    said(getxattr(path, NAME, &mut value[..]), &value).unwrap_or(true)
}

fn said(len: Result<usize, Errno>, value: &[u8]) -> Result<bool, Errno> {
    match len {
        Ok(len) => Ok(&value[..len] == RAW),
        // No note; a file system without such attributes.
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Notes at a file that it is raw. A device needs no note: nobody guesses that it is anything else.
///
/// Errors: the file system has no such attributes, or no leave or no room for one.
pub(crate) fn set_raw(file: impl AsFd) -> Result<(), Errno> {
    if is_device(&file) || read(&file) == Ok(true) {
        return Ok(());
    }
    fsetxattr(file, NAME, RAW, XattrFlags::empty())
}

/// Takes the note back: the user says now that the file is something else. What cannot be removed
/// makes the next one who guesses ask.
pub(crate) fn remove(file: impl AsFd) {
    if is_raw(&file) {
        let _ = fremovexattr(file, NAME);
    }
}

/// Whether a file is a block device.
pub(crate) fn is_device(file: impl AsFd) -> bool {
    fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
}
