//! FUSE wire structures and numbers, as far as a single-file export needs them.
//!
//! Promises: every structure has the size and the offsets of the public interface header (asserted
//! when this crate is compiled), contains no padding that is not named, and is plain data: any
//! bytes are a valid value. All fields are in host byte order, which is what the kernel uses on
//! `/dev/fuse`.
//!
//! Source: `include/uapi/linux/fuse.h` (offered under BSD-2-Clause), protocol 7.46. Names follow
//! that header; an `In` structure comes from the kernel, an `Out` structure goes to it.

#![allow(
    missing_debug_implementations,
    reason = "the derives of zerocopy make hidden marker types; our own structures have Debug"
)]

use std::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub mod flags;
pub mod opcode;
pub mod uring;

/// Protocol major version that we speak.
pub const KERNEL_VERSION: u32 = 7;
/// Highest protocol minor version whose structures are described here (7.46 is Linux 7.3).
pub const KERNEL_MINOR_VERSION: u32 = 46;
/// Oldest protocol minor version that we accept; 7.23 brought the 64-byte INIT reply (Linux 3.15).
pub const KERNEL_MINOR_VERSION_MIN: u32 = 23;
/// Node id of the root inode, which is the only inode of an export: the file itself.
pub const ROOT_ID: u64 = 1;
/// Smallest buffer that a `read` of `/dev/fuse` accepts, in bytes.
pub const MIN_READ_BUFFER: usize = 8192;

/// Bytes of the header of each request.
pub const IN_HEADER_BYTES: usize = size_of::<InHeader>();
/// Bytes of the header of each reply.
pub const OUT_HEADER_BYTES: usize = size_of::<OutHeader>();
/// Offset of the data of a WRITE from the start of its frame: header and `WriteIn`.
pub const WRITE_DATA_OFFSET: usize = IN_HEADER_BYTES + size_of::<WriteIn>();
/// Bytes at the start of a frame that hold the header and the arguments of every request we parse;
/// SETATTR has the most (40 + 88). What follows is WRITE data, names, or the list of a
/// BATCH_FORGET, which are not parsed.
pub const REQUEST_HEAD_BYTES: usize = IN_HEADER_BYTES + size_of::<SetattrIn>();

/// Declares one wire structure: plain data, C layout, zero by default.
macro_rules! wire {
    ($(#[$meta:meta])* $name:ident,
    $bytes:literal { $($(#[$field_meta:meta])* $field:ident: $type:ty = $offset:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable,
        KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);
        $(const _: () = assert!(offset_of!($name, $field) == $offset);)*
    };
}

wire! {
    /// Header of every request.
    InHeader, 40 {
        /// Length of the whole frame in bytes, this header included.
        len: u32 = 0,
        /// Operation, see [`opcode`].
        opcode: u32 = 4,
        /// Identity of the request; the reply carries it back.
        unique: u64 = 8,
        /// Inode; always [`ROOT_ID`] on an export.
        nodeid: u64 = 16,
        /// Filesystem user id of the caller.
        uid: u32 = 24,
        /// Filesystem group id of the caller.
        gid: u32 = 28,
        /// Process id of the caller, 0 when it is not visible to the server.
        pid: u32 = 32,
        /// Length of extensions after the arguments, in units of 8 bytes.
        total_extlen: u16 = 36,
        /// Zero.
        padding: u16 = 38,
    }
}

wire! {
    /// Header of every reply and notification.
    OutHeader, 16 {
        /// Length of the whole frame in bytes, this header included.
        len: u32 = 0,
        /// 0 or a negated errno above -512; for a notification its code.
        error: i32 = 4,
        /// `unique` of the request, 0 for a notification.
        unique: u64 = 8,
    }
}

wire! {
    /// INIT request, 64 bytes since 7.36. Older kernels send the first 16 only; the rest then
    /// counts as 0.
    InitIn, 64 {
        /// Major version of the kernel.
        major: u32 = 0,
        /// Minor version of the kernel.
        minor: u32 = 4,
        /// Readahead that the kernel would like, bytes.
        max_readahead: u32 = 8,
        /// Flags 0..31 that the kernel offers.
        flags: u32 = 12,
        /// Flags 32..63 that the kernel offers, shifted down.
        flags2: u32 = 16,
        /// Zero.
        unused: [u32; 11] = 20,
    }
}

wire! {
    /// INIT reply.
    InitOut, 64 {
        /// Major version of the server, must be 7.
        major: u32 = 0,
        /// Minor version of the server.
        minor: u32 = 4,
        /// Readahead allowed, bytes; can only lower the kernel's value.
        max_readahead: u32 = 8,
        /// Flags 0..31 that both sides use.
        flags: u32 = 12,
        /// Background requests in flight before submitters sleep; 0 keeps the kernel's 12.
        max_background: u16 = 16,
        /// Background requests in flight before readahead is dropped; 0 keeps the kernel's 9.
        congestion_threshold: u16 = 18,
        /// Largest WRITE, bytes.
        max_write: u32 = 20,
        /// Granularity of time stamps, nanoseconds.
        time_gran: u32 = 24,
        /// Pages per request (with MAX_PAGES).
        max_pages: u16 = 28,
        /// For DAX only.
        map_alignment: u16 = 30,
        /// Flags 32..63 that both sides use, shifted down; read only with INIT_EXT.
        flags2: u32 = 32,
        /// For PASSTHROUGH only.
        max_stack_depth: u32 = 36,
        /// Seconds until the kernel aborts the connection over one unanswered request; 0 = never.
        request_timeout: u16 = 40,
        /// Zero.
        unused: [u16; 11] = 42,
    }
}

wire! {
    /// Attributes of an inode.
    Attr, 88 {
        /// Inode number.
        ino: u64 = 0,
        /// Size, bytes.
        size: u64 = 8,
        /// Allocated space, units of 512 bytes.
        blocks: u64 = 16,
        /// Last access, seconds.
        atime: u64 = 24,
        /// Last change of data, seconds.
        mtime: u64 = 32,
        /// Last change of attributes, seconds.
        ctime: u64 = 40,
        /// Nanoseconds of `atime`.
        atimensec: u32 = 48,
        /// Nanoseconds of `mtime`.
        mtimensec: u32 = 52,
        /// Nanoseconds of `ctime`.
        ctimensec: u32 = 56,
        /// File type and permissions.
        mode: u32 = 60,
        /// Number of links.
        nlink: u32 = 64,
        /// Owner.
        uid: u32 = 68,
        /// Group.
        gid: u32 = 72,
        /// Device number, 0 for a regular file.
        rdev: u32 = 76,
        /// Preferred size of I/O, bytes, a power of two.
        blksize: u32 = 80,
        /// `FUSE_ATTR_*`.
        flags: u32 = 84,
    }
}

wire! {
    /// GETATTR request.
    GetattrIn, 16 {
        /// Bit 0: `fh` is valid.
        getattr_flags: u32 = 0,
        /// Zero.
        dummy: u32 = 4,
        /// Open file.
        fh: u64 = 8,
    }
}

wire! {
    /// Reply to GETATTR and SETATTR.
    AttrOut, 104 {
        /// Seconds for which the attributes may be cached.
        attr_valid: u64 = 0,
        /// Nanoseconds of the same.
        attr_valid_nsec: u32 = 8,
        /// Zero.
        dummy: u32 = 12,
        /// The attributes.
        attr: Attr = 16,
    }
}

wire! {
    /// SETATTR request.
    SetattrIn, 88 {
        /// Which fields are set, `FATTR_*` of [`flags`].
        valid: u32 = 0,
        /// Zero.
        padding: u32 = 4,
        /// Open file (with FATTR_FH).
        fh: u64 = 8,
        /// New size, bytes.
        size: u64 = 16,
        /// Owner of locks.
        lock_owner: u64 = 24,
        /// New access time, seconds.
        atime: u64 = 32,
        /// New time of change, seconds.
        mtime: u64 = 40,
        /// New time of attribute change, seconds.
        ctime: u64 = 48,
        /// Nanoseconds of `atime`.
        atimensec: u32 = 56,
        /// Nanoseconds of `mtime`.
        mtimensec: u32 = 60,
        /// Nanoseconds of `ctime`.
        ctimensec: u32 = 64,
        /// New permissions.
        mode: u32 = 68,
        /// Zero.
        unused4: u32 = 72,
        /// New owner.
        uid: u32 = 76,
        /// New group.
        gid: u32 = 80,
        /// Zero.
        unused5: u32 = 84,
    }
}

wire! {
    /// OPEN request.
    OpenIn, 8 {
        /// Flags of `open(2)`.
        flags: u32 = 0,
        /// `FUSE_OPEN_*`.
        open_flags: u32 = 4,
    }
}

wire! {
    /// OPEN reply.
    OpenOut, 16 {
        /// Handle that later requests carry.
        fh: u64 = 0,
        /// `FOPEN_*` of [`flags`].
        open_flags: u32 = 8,
        /// For PASSTHROUGH only.
        backing_id: u32 = 12,
    }
}

wire! {
    /// RELEASE request (the last close of an open file).
    ReleaseIn, 24 {
        /// Handle.
        fh: u64 = 0,
        /// Flags of `open(2)`.
        flags: u32 = 8,
        /// `FUSE_RELEASE_*`.
        release_flags: u32 = 12,
        /// Owner of locks.
        lock_owner: u64 = 16,
    }
}

wire! {
    /// FLUSH request (each close of a descriptor).
    FlushIn, 24 {
        /// Handle.
        fh: u64 = 0,
        /// Zero.
        unused: u32 = 8,
        /// Zero.
        padding: u32 = 12,
        /// Owner of locks.
        lock_owner: u64 = 16,
    }
}

wire! {
    /// READ request.
    ReadIn, 40 {
        /// Handle.
        fh: u64 = 0,
        /// First byte.
        offset: u64 = 8,
        /// Bytes wanted.
        size: u32 = 16,
        /// `FUSE_READ_*`.
        read_flags: u32 = 20,
        /// Owner of locks.
        lock_owner: u64 = 24,
        /// Flags of the open file.
        flags: u32 = 32,
        /// Zero.
        padding: u32 = 36,
    }
}

wire! {
    /// WRITE request; `size` bytes of data follow it.
    WriteIn, 40 {
        /// Handle.
        fh: u64 = 0,
        /// First byte.
        offset: u64 = 8,
        /// Bytes of data.
        size: u32 = 16,
        /// `WRITE_*` of [`flags`].
        write_flags: u32 = 20,
        /// Owner of locks.
        lock_owner: u64 = 24,
        /// Flags of the open file, with O_DSYNC and O_SYNC of this very write.
        flags: u32 = 32,
        /// Zero.
        padding: u32 = 36,
    }
}

wire! {
    /// WRITE reply.
    WriteOut, 8 {
        /// Bytes written.
        size: u32 = 0,
        /// Zero.
        padding: u32 = 4,
    }
}

wire! {
    /// STATFS reply.
    StatfsOut, 80 {
        /// Size of the filesystem in `frsize` units.
        blocks: u64 = 0,
        /// Free blocks.
        bfree: u64 = 8,
        /// Free blocks for unprivileged users.
        bavail: u64 = 16,
        /// Inodes.
        files: u64 = 24,
        /// Free inodes.
        ffree: u64 = 32,
        /// Preferred size of I/O, bytes.
        bsize: u32 = 40,
        /// Longest file name, bytes.
        namelen: u32 = 44,
        /// Size of a block, bytes.
        frsize: u32 = 48,
        /// Zero.
        padding: u32 = 52,
        /// Zero.
        spare: [u32; 6] = 56,
    }
}

wire! {
    /// FSYNC request.
    FsyncIn, 16 {
        /// Handle.
        fh: u64 = 0,
        /// Bit 0: data only.
        fsync_flags: u32 = 8,
        /// Zero.
        padding: u32 = 12,
    }
}

wire! {
    /// FALLOCATE request.
    FallocateIn, 32 {
        /// Handle.
        fh: u64 = 0,
        /// First byte.
        offset: u64 = 8,
        /// Bytes.
        length: u64 = 16,
        /// `FALLOC_FL_*`.
        mode: u32 = 24,
        /// Zero.
        padding: u32 = 28,
    }
}

wire! {
    /// LSEEK request; the kernel sends SEEK_DATA and SEEK_HOLE only.
    LseekIn, 24 {
        /// Handle.
        fh: u64 = 0,
        /// Where to start, bytes.
        offset: u64 = 8,
        /// `SEEK_*`.
        whence: u32 = 16,
        /// Zero.
        padding: u32 = 20,
    }
}

wire! {
    /// LSEEK reply.
    LseekOut, 8 {
        /// Position found, bytes.
        offset: u64 = 0,
    }
}

wire! {
    /// INTERRUPT request; never answered.
    InterruptIn, 8 {
        /// `unique` of the request that its caller no longer waits for.
        unique: u64 = 0,
    }
}

wire! {
    /// FORGET request; never answered.
    ForgetIn, 8 {
        /// Look-ups to forget.
        nlookup: u64 = 0,
    }
}

wire! {
    /// BATCH_FORGET request; `count` pairs of (nodeid, nlookup) follow. Never answered.
    BatchForgetIn, 8 {
        /// Number of pairs.
        count: u32 = 0,
        /// Zero.
        dummy: u32 = 4,
    }
}

wire! {
    /// Notification: drop cached attributes, and pages in a range, of one inode.
    NotifyInvalInodeOut, 24 {
        /// Inode.
        ino: u64 = 0,
        /// First byte; negative: attributes only.
        off: i64 = 8,
        /// Bytes; 0 or less: up to the end.
        len: i64 = 16,
    }
}

const _: () = assert!(WRITE_DATA_OFFSET == 80);
const _: () = assert!(REQUEST_HEAD_BYTES == 128);
