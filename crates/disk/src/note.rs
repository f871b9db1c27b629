//! The note at a file that its format is raw.
//!
//! A guest may write anything into a disk of which the user said that it is raw: also the header of a qcow2 image that names files of the
//! host. Whoever opens the image next without saying what it is must not follow that header. So the file keeps what was said, in the
//! extended attribute [`NAME`], which no request of a guest or client reaches; copies of the file are without it.
//!
//! Promises: the attribute is set or removed only on a file that is about to be written; nothing of the file's bytes is touched.

use std::os::fd::AsFd;

use ringdisk_ring::Errno;
use rustix::fs::{FileType, XattrFlags, fgetxattr, fremovexattr, fsetxattr, fstat};

/// Name of the attribute.
pub(crate) const NAME: &str = "user.ringdisk.format";
/// Its only value.
const RAW: &[u8] = b"raw";

/// Whether somebody said of a file that it is raw.
pub(crate) fn is_raw(file: impl AsFd) -> bool {
    let mut value = [0; RAW.len() + 1];
    fgetxattr(file, NAME, &mut value[..]).is_ok_and(|len| &value[..len] == RAW)
}

/// Notes at a file that it is raw. A device needs no note: nobody guesses that it is anything else.
///
/// Errors: the file system has no such attributes, or no leave or no room for one.
pub(crate) fn set_raw(file: impl AsFd) -> Result<(), Errno> {
    if is_device(&file) || is_raw(&file) {
        return Ok(());
    }
    fsetxattr(file, NAME, RAW, XattrFlags::empty())
}

/// Takes the note back: the user says now that the file is something else. What cannot be removed makes the next one who guesses ask.
pub(crate) fn remove(file: impl AsFd) {
    if is_raw(&file) {
        let _ = fremovexattr(file, NAME);
    }
}

/// Whether a file is a block device.
pub(crate) fn is_device(file: impl AsFd) -> bool {
    fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
}
