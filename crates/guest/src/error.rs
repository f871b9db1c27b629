//! Errors of control threads: mapping memory, changing tables, starting queues.
//!
//! Promises: each message names the object, the reason and the numbers.

use std::fmt;

use rustix::io::Errno;

/// Why memory could not be mapped, a table not be changed or a queue not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    System {
        /// What was being done, as "map memory of the guest".
        doing: &'static str,
        /// The error of the system.
        errno: Errno,
    },
    /// The descriptor is no regular file (memfd, tmpfs, hugetlbfs): a device or a pipe is no memory
    /// of a guest.
    NotMemory,
    /// The file ends before the memory that was announced.
    FileTooShort {
        /// Length of the file, bytes.
        file_bytes: u64,
        /// Where the memory would end in it, bytes.
        end_bytes: u64,
    },
    /// The region is empty, too large, or runs over the end of an address space.
    BadRange {
        /// First address of the guest.
        guest_addr: u64,
        /// Bytes.
        size: u64,
    },
    /// The table has its maximum of regions.
    TooManyRegions {
        /// How many.
        limit: usize,
    },
    /// All regions together are larger than the limit.
    TooMuchMemory {
        /// All of them, bytes.
        size: u64,
        /// The limit, bytes.
        limit: u64,
    },
    /// The region overlaps another one.
    Overlap {
        /// First address of the guest.
        guest_addr: u64,
        /// Bytes.
        size: u64,
    },
    /// There is no such region to remove.
    NoSuchRegion {
        /// First address of the guest.
        guest_addr: u64,
        /// Bytes.
        size: u64,
    },
    /// An area of a queue does not lie inside one region.
    NotInMemory {
        /// Address in the front end.
        user_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// An area of a queue is not aligned as the specification says, or not long enough.
    BadArea {
        /// Which one: "descriptors", "driver area", "device area".
        area: &'static str,
    },
    /// A size that no queue of this layout can have.
    BadQueueSize {
        /// The size, descriptors.
        size: u32,
    },
    /// A base that no queue of this size can have.
    BadBase {
        /// The base.
        base: u32,
    },
    /// The inflight area does not fit the queues, or is no such area.
    BadInflight {
        /// What is wrong with it.
        why: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Error::System { doing, errno } => write!(f, "could not {doing}: {errno}"),
            Error::NotMemory => write!(
                f,
                "the descriptor is no memory of a guest: a memfd or a file on tmpfs or hugetlbfs \
                 is needed \
                 (QEMU: memory-backend-memfd,share=on)"
            ),
            Error::FileTooShort { file_bytes, end_bytes } => {
                write!(f, "the file of the memory has {file_bytes} bytes, {end_bytes} are needed")
            }
            Error::BadRange { guest_addr, size } => {
                write!(f, "{size:#x} bytes at {guest_addr:#x} are no region of memory")
            }
            Error::TooManyRegions { limit } => {
                write!(f, "more than {limit} regions of memory are not taken")
            }
            Error::TooMuchMemory { size, limit } => {
                write!(f, "the guest has {size:#x} bytes of memory, at most {limit:#x} are mapped")
            }
            Error::Overlap { guest_addr, size } => {
                write!(f, "the region of {size:#x} bytes at {guest_addr:#x} overlaps another one")
            }
            Error::NoSuchRegion { guest_addr, size } => {
                write!(f, "there is no region of {size:#x} bytes at {guest_addr:#x}")
            }
            Error::NotInMemory { user_addr, len } => write!(
                f,
                "{len} bytes of a queue at {user_addr:#x} do not lie inside one region of memory"
            ),
            Error::BadArea { area } => {
                write!(f, "the {area} of a queue are not aligned or too short")
            }
            Error::BadQueueSize { size } => write!(f, "no queue has {size} descriptors"),
            Error::BadBase { base } => write!(f, "no such queue begins at {base:#x}"),
            Error::BadInflight { why } => write!(f, "the inflight area cannot be used: {why}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::System { errno, .. } => Some(errno),
            _ => None,
        }
    }
}
