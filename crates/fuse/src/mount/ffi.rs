//! The one system call of this crate that no safe wrapper has: the CLONE ioctl of `/dev/fuse`.
//!
//! Promises: each descriptor returned is bound to the same connection as the one given, close-on-exec and nonblocking.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{self, Setter};

use super::device;
use crate::abi::flags::DEV_IOC_CLONE;

/// Opens `/dev/fuse` anew and binds it to the connection of `device`.
///
/// The input queue is shared among clones, but a reply must be written to the descriptor that read the request.
///
/// Errors: those of opening `/dev/fuse` (EACCES when the first descriptor came from `fusermount3` and we are not privileged),
/// EPERM if `device` is not mounted yet.
/// Source: `include/uapi/linux/fuse.h`, FUSE_DEV_IOC_CLONE.
pub fn clone_device(device: impl AsFd) -> Result<OwnedFd, Errno> {
    let raw = u32::try_from(device.as_fd().as_raw_fd()).map_err(|_| Errno::BADF)?;
    let clone = device::open_raw()?;
    // SAFETY: FUSE_DEV_IOC_CLONE reads one u32 through its argument, and Setter passes a pointer to a u32 that lives for the call.
    // The number encodes direction "read" although the kernel only reads; it is taken from the interface header as it is.
    unsafe { ioctl::ioctl(&clone, Setter::<{ DEV_IOC_CLONE }, u32>::new(raw))? };
    Ok(clone)
}
