//! The system calls of this crate that no safe wrapper has: ioctls of `/dev/fuse`, and fork(2).
//!
//! Promises: each descriptor returned is bound to the same connection as the one given,
//! close-on-exec and nonblocking.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode, Setter};
use rustix::process::Pid;

use super::device;
use crate::abi::flags::{DEV_IOC_BACKING_OPEN, DEV_IOC_CLONE};

/// Opens `/dev/fuse` anew and binds it to the connection of `device`.
///
/// The input queue is shared among clones, but a reply must be written to the descriptor that read
/// the request.
///
/// Errors: those of opening `/dev/fuse` (EACCES when the first descriptor came from `fusermount3`
/// and we are not privileged), EPERM if `device` is not mounted yet. Source:
/// `include/uapi/linux/fuse.h`, FUSE_DEV_IOC_CLONE.
pub fn clone_device(device: impl AsFd) -> Result<OwnedFd, Errno> {
    let raw = u32::try_from(device.as_fd().as_raw_fd()).map_err(|_| Errno::BADF)?;
    let clone = device::open_raw()?;
    // SAFETY: FUSE_DEV_IOC_CLONE reads one u32 through its argument, and Setter passes a pointer to
    // a u32 that lives for the call. The number encodes direction "read" although the kernel only
    // reads; it is taken from the interface header as it is.
    unsafe { ioctl::ioctl(&clone, Setter::<{ DEV_IOC_CLONE }, u32>::new(raw))? };
    Ok(clone)
}

/// `struct fuse_backing_map`.
#[repr(C)]
struct BackingMap {
    fd: i32,
    /// Must be 0.
    flags: u32,
    /// Must be 0.
    padding: u64,
}

struct BackingOpen(BackingMap);

// SAFETY: FUSE_DEV_IOC_BACKING_OPEN reads a `fuse_backing_map` through its argument, which lives in
// `self` for the call, writes nothing, and returns a positive number.
unsafe impl Ioctl for BackingOpen {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        DEV_IOC_BACKING_OPEN
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> rustix::io::Result<u32> {
        u32::try_from(out).map_err(|_| Errno::INVAL)
    }
}

/// Gives the connection of `device` a regular file; the answer is its number in OPEN replies. The
/// kernel keeps the file until the connection ends.
///
/// Errors: EPERM without CAP_SYS_ADMIN or when passthrough was not negotiated, ELOOP for a file on
/// a stacked file system, EOPNOTSUPP for a kernel without it. Source: `include/uapi/linux/fuse.h`,
/// FUSE_DEV_IOC_BACKING_OPEN.
pub fn open_backing(device: impl AsFd, file: impl AsFd) -> Result<u32, Errno> {
    let map = BackingMap { fd: file.as_fd().as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: see the implementation of the request.
    unsafe { ioctl::ioctl(device, BackingOpen(map)) }
}

/// Starts a process that asks the server for the attributes of `path` and ends with the errno,
/// or 0. It has none of our descriptors, and of our memory a copy, in which rings and large buffers
/// are not (`MADV_DONTFORK`).
///
/// Errors: those of fork(2).
pub(super) fn stat_in_a_process(path: &CStr) -> Result<Pid, Errno> {
    // Attributes that the kernel has cached say nothing about the server.
    const FLAGS: i32 = libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_FORCE_SYNC;
    // SAFETY: the child of a process with threads may call async-signal-safe functions only:
    // close_range, statx and _exit are bare system calls. `status` is plain memory that statx(2)
    // fills, and `path` lives in the copy of this stack. errno is the child's own.
    let pid = unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::syscall(libc::SYS_close_range, 0u32, u32::MAX, 0u32);
            let mut status = std::mem::zeroed::<libc::statx>();
            let (path, status) = (path.as_ptr(), &raw mut status);
            let mask = libc::STATX_BASIC_STATS;
            let asked = libc::syscall(libc::SYS_statx, libc::AT_FDCWD, path, FLAGS, mask, status);
            libc::_exit(if asked == 0 { 0 } else { *libc::__errno_location() });
        }
        pid
    };
    if pid < 0 {
        return Err(last_error());
    }
    // Not 0 either: that is the child, which has ended.
    Pid::from_raw(pid).ok_or(Errno::AGAIN)
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN)
}
