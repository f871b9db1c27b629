//! The few system calls that rustix does not wrap: OFD byte locks, two ioctls of block devices and
//! two of files; and the local time of the C library.
//!
//! Promises: the only unsafe code of this crate; each function is one call, of the system on a
//! borrowed descriptor or of the C library, with memory that lives on this stack. The lock calls
//! never wait (`F_OFD_SETLK`, not `SETLKW`); [`discard`] can take long, so ring threads call it
//! through `Ring::offload` only.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// `BLKDISCARD`: `_IO(0x12, 119)`, argument: two u64, start and length in bytes.
/// Source: include/uapi/linux/fs.h.
const BLKDISCARD: libc::Ioctl = 0x1277;
/// `BLKROGET`: `_IO(0x12, 94)`, argument: an int that gets 0 or 1.
const BLKROGET: libc::Ioctl = 0x125e;

fn one_byte(kind: libc::c_int, byte: u32) -> libc::flock {
    // SAFETY: `flock` is plain integers, for which all zero bits is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // The constants are 0, 1 and 2.
    #[allow(clippy::cast_possible_truncation)]
    {
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
    }
    lock.l_start = i64::from(byte);
    lock.l_len = 1;
    // OFD commands insist on l_pid = 0 (fcntl(2)).
    lock
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Takes a shared OFD lock on one byte; the open file description owns it until its last
/// descriptor is closed. Needs a descriptor that is open for reading. Does not wait.
///
/// Errors: `EAGAIN`/`EACCES` when another description has the byte locked exclusively, `EBADF` on a
/// descriptor without read access, `EINVAL`, `ENOLCK` or `EOPNOTSUPP` where files cannot be locked.
pub(crate) fn lock_shared(fd: BorrowedFd<'_>, byte: u32) -> Result<(), Errno> {
    set_lock(fd, libc::F_RDLCK, byte)
}

/// Gives the byte back. Errors: as [`lock_shared`].
pub(crate) fn unlock(fd: BorrowedFd<'_>, byte: u32) -> Result<(), Errno> {
    set_lock(fd, libc::F_UNLCK, byte)
}

fn set_lock(fd: BorrowedFd<'_>, kind: libc::c_int, byte: u32) -> Result<(), Errno> {
    let lock = one_byte(kind, byte);
    // SAFETY: F_OFD_SETLK reads one `flock`, which lives across the call; the descriptor is
    // borrowed, hence open.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether another open file description holds any lock on the byte.
///
/// Errors: as [`lock_shared`].
pub(crate) fn is_locked_by_others(fd: BorrowedFd<'_>, byte: u32) -> Result<bool, Errno> {
    let mut lock = one_byte(libc::F_WRLCK, byte);
    // SAFETY: F_OFD_GETLK reads and writes one `flock`, which lives across the call; the descriptor
    // is borrowed, hence open.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result == 0 { Ok(i32::from(lock.l_type) != libc::F_UNLCK) } else { Err(last_error()) }
}

/// Discards bytes of a block device; what they read as afterwards is up to the device.
///
/// Errors: `EOPNOTSUPP` when the device cannot, `EINVAL` unless both numbers are multiples of the
/// logical block size and inside the device, `EPERM`/`EBADF` without write access.
pub(crate) fn discard(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64, which live across the call; the descriptor is borrowed.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether a block device is set read-only. Errors: `ENOTTY` when it is no block device.
pub(crate) fn is_read_only_device(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut value: libc::c_int = 0;
    // SAFETY: BLKROGET writes one int, which lives across the call; the descriptor is borrowed.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKROGET, &raw mut value) };
    if result == 0 { Ok(value != 0) } else { Err(last_error()) }
}

/// `struct fsxattr`, 28 bytes. Source: include/uapi/linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Fsxattr {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}

/// `FS_IOC_FSGETXATTR`: `_IOR('X', 31, struct fsxattr)`.
const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
/// `FS_IOC_FSSETXATTR`: `_IOW('X', 32, struct fsxattr)`.
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
/// `FS_XFLAG_EXTSIZE`: the extent size counts.
const FS_XFLAG_EXTSIZE: u32 = 0x800;

/// Asks the file system to make space for a file in extents of this size; a hint.
///
/// * `bytes`: a multiple of the block size of the file system.
///
/// Errors: `EOPNOTSUPP`, `ENOTTY` and `EINVAL` where the file system has no such hint, or not for
/// this file.
pub(crate) fn set_extent_size(fd: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    let mut attributes = Fsxattr::default();
    // SAFETY: FS_IOC_FSGETXATTR writes one `fsxattr`, which lives across the call; the descriptor
    // is borrowed.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) };
    if result != 0 {
        return Err(last_error());
    }
    attributes.flags |= FS_XFLAG_EXTSIZE;
    attributes.extent_size = bytes;
    // SAFETY: FS_IOC_FSSETXATTR reads one `fsxattr`, which lives across the call; the descriptor is
    // borrowed.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// How many seconds the local time (`TZ`, or `/etc/localtime`) was ahead of UTC.
///
/// * `at`: seconds since 1970.
pub fn local_offset(at: i64) -> i64 {
    let time: libc::time_t = at;
    // SAFETY: `tm` is plain integers and a pointer that may be null, for which all zero bits is a
    // value.
    let mut local: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: localtime_r reads one `time_t` and writes one `tm`; both live across the call. It is
    // safe beside other threads as long as none changes the environment, which none does.
    let result = unsafe { libc::localtime_r(&raw const time, &raw mut local) };
    if result.is_null() { 0 } else { local.tm_gmtoff }
}
