//! Opening `/dev/fuse`.
//!
//! Promises: descriptors are close-on-exec and nonblocking; a missing or forbidden device gives a
//! message that says what to do.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, major, minor, open};
use rustix::io::Errno;

use crate::{Error, ErrorKind};

/// Where the kernel offers FUSE.
pub const DEVICE_PATH: &str = "/dev/fuse";

/// Opens the device; errors are those of `open(2)`.
pub(crate) fn open_raw() -> Result<OwnedFd, Errno> {
    open(DEVICE_PATH, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
}

/// Number of the device: that of misc devices, and FUSE's among them (Documentation/admin-guide,
/// devices.txt).
const DEVICE_NUMBER: (u32, u32) = (10, 229);

/// Whether a descriptor is one of this device.
#[must_use]
pub fn is_device(descriptor: &OwnedFd) -> bool {
    fstat(descriptor).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
            && (major(stat.st_rdev), minor(stat.st_rdev)) == DEVICE_NUMBER
    })
}

/// Makes reads of a descriptor return when there is no request.
///
/// Errors: those of fcntl(2).
pub fn set_nonblocking(descriptor: &OwnedFd) -> Result<(), Errno> {
    fcntl_setfl(descriptor, fcntl_getfl(descriptor)? | OFlags::NONBLOCK)
}

/// Opens the device for a mount of our own.
///
/// Errors: [`ErrorKind::DeviceMissing`], [`ErrorKind::DeviceForbidden`], [`ErrorKind::System`].
pub(crate) fn open_for_mount() -> Result<OwnedFd, Error> {
    open_raw().map_err(open_error)
}

/// Explains why the device could not be opened.
pub(crate) fn open_error(errno: Errno) -> Error {
    match errno {
        Errno::NOENT => Error::new(
            ErrorKind::DeviceMissing,
            format!(
                "{DEVICE_PATH} does not \
            exist"
            ),
        )
        .hint(
            "load the driver with `modprobe fuse`; in a container, pass the device in \
                (`--device /dev/fuse`)",
        ),
        Errno::NODEV | Errno::NXIO => Error::new(
            ErrorKind::DeviceMissing,
            format!(
                "{DEVICE_PATH} has no driver behind \
                it"
            ),
        )
        .hint("load it with `modprobe fuse`"),
        Errno::ACCESS | Errno::PERM => Error::new(
            ErrorKind::DeviceForbidden,
            format!(
                "{DEVICE_PATH} may not be \
                opened"
            ),
        )
        .errno(errno)
        .hint(
            "let every user open it with `chmod 666 /dev/fuse` (the usual setting), run as \
                 root, or \
                     in a container pass the device in (`--device /dev/fuse`)",
        ),
        _ => Error::new(ErrorKind::System, format!("cannot open {DEVICE_PATH}")).errno(errno),
    }
}
