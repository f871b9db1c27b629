//! Flag bits of the FUSE protocol, as far as an export reads or writes them.
//!
//! Promises: constants only. INIT flags are 64 bits wide: the upper half travels in `flags2`.

/// INIT: readahead is sent as background requests.
pub const INIT_ASYNC_READ: u64 = 1 << 0;
/// INIT: O_TRUNC is left to OPEN. We never set it: the kernel would believe the file to be empty
/// until the next GETATTR.
pub const INIT_ATOMIC_O_TRUNC: u64 = 1 << 3;
/// INIT: buffered writes may be larger than a page.
pub const INIT_BIG_WRITES: u64 = 1 << 5;
/// INIT: a change of mtime or size drops cached pages.
pub const INIT_AUTO_INVAL_DATA: u64 = 1 << 12;
/// INIT: O_DIRECT and asynchronous I/O is split and sent as background requests. Without it all
/// direct I/O runs at depth 1.
pub const INIT_ASYNC_DIO: u64 = 1 << 15;
/// INIT: the kernel buffers writes.
pub const INIT_WRITEBACK_CACHE: u64 = 1 << 16;
/// INIT: look-ups run in parallel.
pub const INIT_PARALLEL_DIROPS: u64 = 1 << 18;
/// INIT: after an abort, reading the device gives ECONNABORTED instead of ENODEV.
pub const INIT_ABORT_ERROR: u64 = 1 << 21;
/// INIT: `max_pages` is valid.
pub const INIT_MAX_PAGES: u64 = 1 << 22;
/// INIT: a change of size does not drop cached pages.
pub const INIT_EXPLICIT_INVAL_DATA: u64 = 1 << 25;
/// INIT: the server clears set-user-id and set-group-id bits where the kernel asks for it.
pub const INIT_HANDLE_KILLPRIV_V2: u64 = 1 << 28;
/// INIT: `flags2` is valid.
pub const INIT_EXT: u64 = 1 << 30;
/// INIT: shared mappings of FOPEN_DIRECT_IO files are allowed.
pub const INIT_DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
/// INIT: the kernel can send unanswered requests again.
pub const INIT_HAS_RESEND: u64 = 1 << 39;
/// INIT: requests may travel through io_uring.
pub const INIT_OVER_IO_URING: u64 = 1 << 41;
/// INIT: opens may name a file that the kernel reads and writes itself.
pub const INIT_PASSTHROUGH: u64 = 1 << 37;
/// INIT: buffer pools and zero-copy exist.
pub const INIT_HAS_IO_URING_BUFPOOL: u64 = 1 << 43;

/// OPEN reply: this open file bypasses the page cache.
pub const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// OPEN reply: opening does not drop cached pages.
pub const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// OPEN reply: closing sends no FLUSH.
pub const FOPEN_NOFLUSH: u32 = 1 << 5;
/// OPEN reply: direct writes inside the file run in parallel; only with [`FOPEN_DIRECT_IO`].
pub const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
/// OPEN reply: the kernel reads and writes the file named by `backing_id` itself.
pub const FOPEN_PASSTHROUGH: u32 = 1 << 7;
/// OPEN reply: READ and WRITE of this open file use pages of the client where the queue can (Linux
/// 7.3).
pub const FOPEN_IO_URING_ZERO_COPY: u32 = 1 << 8;

/// SETATTR: mode is set.
pub const FATTR_MODE: u32 = 1 << 0;
/// SETATTR: uid is set.
pub const FATTR_UID: u32 = 1 << 1;
/// SETATTR: gid is set.
pub const FATTR_GID: u32 = 1 << 2;
/// SETATTR: size is set.
pub const FATTR_SIZE: u32 = 1 << 3;
/// SETATTR: atime is set.
pub const FATTR_ATIME: u32 = 1 << 4;
/// SETATTR: mtime is set.
pub const FATTR_MTIME: u32 = 1 << 5;
/// SETATTR: fh is set: the change came through an open file (ftruncate, fchmod).
pub const FATTR_FH: u32 = 1 << 6;
/// SETATTR: atime becomes the current time.
pub const FATTR_ATIME_NOW: u32 = 1 << 7;
/// SETATTR: mtime becomes the current time.
pub const FATTR_MTIME_NOW: u32 = 1 << 8;
/// SETATTR: `lock_owner` is set.
pub const FATTR_LOCKOWNER: u32 = 1 << 9;
/// SETATTR: ctime is set.
pub const FATTR_CTIME: u32 = 1 << 10;
/// SETATTR: clear set-user-id and set-group-id bits.
pub const FATTR_KILL_SUIDGID: u32 = 1 << 11;

/// WRITE: sent from the page cache (shared mapping), not by a `write(2)`.
pub const WRITE_CACHE: u32 = 1 << 0;
/// WRITE: clear set-user-id and set-group-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// OPEN: clear set-user-id and set-group-id bits.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;

/// Notification code: drop cached attributes and pages of an inode.
pub const NOTIFY_INVAL_INODE: i32 = 2;
/// Notification code: send unanswered requests again.
pub const NOTIFY_RESEND: i32 = 7;

/// `FUSE_DEV_IOC_CLONE`: binds a fresh `/dev/fuse` descriptor to the connection of another.
pub const DEV_IOC_CLONE: u32 = 0x8004_e500;
/// `FUSE_DEV_IOC_BACKING_OPEN`: gives the connection a file for [`FOPEN_PASSTHROUGH`].
pub const DEV_IOC_BACKING_OPEN: u32 = 0x4010_e501;
