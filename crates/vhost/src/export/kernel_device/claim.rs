//! A block device that belongs to the kernel's threads: no other process may have it exclusively,
//! and nothing of it is in the page cache.
//!
//! Bios go past the page cache of the device. What others have written through it before must be on
//! the device first, and what they have read must not be found there later. Mounted file systems,
//! volume managers and others that claim devices (O_EXCL) are kept out by a claim of our own; a
//! program that just opens the device cannot be.
//!
//! Promises: control thread; the claim lasts until the descriptor that is returned is closed. A
//! device that cannot be had so is refused with the reason.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Advice, Mode, OFlags, fadvise, fsync, open};
use rustix::io::Errno;

/// Claims a block device until what is given is dropped.
///
/// Errors: it is in use; those of open(2) and fsync(2). Without `/proc` there is no way to it.
pub(in crate::export) fn claim(device: BorrowedFd<'_>) -> Result<OwnedFd, String> {
    // The device itself, whatever has its name now.
    let path = format!("/proc/self/fd/{}", device.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
    let claim = open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::BUSY => String::from(
            "the device is mounted, or another process has it exclusively (lsblk and `fuser -v` \
             tell who)",
        ),
        _ => format!("the device cannot be claimed: {errno}"),
    })?;
    let dropped = fsync(&claim).and_then(|()| fadvise(&claim, 0, None, Advice::DontNeed));
    dropped.map_err(|errno| format!("the page cache of the device cannot be written: {errno}"))?;
    Ok(claim)
}
