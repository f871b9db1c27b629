//! The note at a file that its format is raw.
//!
//! Promises: the attribute is set or removed only on a file that is about to be written; no byte of
//! the file is touched.
//!
//! A guest may write anything into a disk that the user called raw, also the header of a qcow2
//! image that names files of the host. A program that opens the image later without a format must
//! not follow that header. So the file keeps what the user said in an extended attribute
//! (`user.ringdisk.format`), which no request of a guest or client reaches; a copy of the file does
//! not have it.

use std::os::fd::AsFd;
use std::path::Path;

use ringdisk_ring::{Errno, Fd};
use ringdisk_storage::{Kind, Storage};
use rustix::fs::{FileType, fstat};

use crate::xattr::{Attribute, link};

/// The only value.
const RAW: &[u8] = b"raw";
/// The attribute. Read with one byte more than its value, so that a longer one is seen.
pub(crate) const FORMAT: Attribute = Attribute::new("user.ringdisk.format", RAW.len() + 1);

/// Whether a file is noted as raw. A note that cannot be read counts as one.
pub(crate) fn is_raw(file: impl AsFd) -> bool {
    is_value_raw(FORMAT.get(file)).unwrap_or(true)
}

/// As [`is_raw`], for the file that a name leads to.
pub(crate) fn is_raw_at(path: &Path) -> bool {
    is_value_raw(FORMAT.get_at(path)).unwrap_or(true)
}

fn is_value_raw(value: Result<Option<Vec<u8>>, Errno>) -> Result<bool, Errno> {
    match value {
        Ok(value) => Ok(value.as_deref() == Some(RAW)),
        // A file system without such attributes, or a sandbox without the call.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Notes at a file that it is raw. A device needs no note: a probe never takes it for more than its
/// bytes.
///
/// Errors: the file system has no such attributes, or refuses this one, or has no space for it.
pub(crate) fn set_raw(file: impl AsFd) -> Result<(), Errno> {
    if is_device(&file) || is_value_raw(FORMAT.get(&file)) == Ok(true) {
        return Ok(());
    }
    FORMAT.set(file, RAW)
}

/// As [`set_raw`], for an open storage.
///
/// Errors: as there.
pub(crate) fn set_raw_of(file: &Storage) -> Result<(), Errno> {
    let path = match file.raw_fd() {
        _ if file.kind() == Kind::BlockDevice => return Ok(()),
        Some(Fd::Raw(fd)) => link(fd),
        _ => return Err(Errno::OPNOTSUPP),
    };
    if is_value_raw(FORMAT.get_at(&path)) == Ok(true) {
        return Ok(());
    }
    FORMAT.set_at(&path, RAW)
}

/// Removes the note: the user states another format now. A note that cannot be removed makes the
/// next open without a format ask the user.
pub(crate) fn remove(file: impl AsFd) {
    if is_raw(&file) {
        let _ = FORMAT.remove(file);
    }
}

/// Whether a file is a block device.
pub(crate) fn is_device(file: impl AsFd) -> bool {
    fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
}
