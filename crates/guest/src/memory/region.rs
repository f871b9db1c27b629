//! A region of a guest's memory, as the front end announces it.
//!
//! Promises: it stays mapped as long as a buffer of it lives.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringdisk_ring::{IoBuf, SharedMemory};

use crate::Error;

use super::mapping::Mapping;

/// Memory of one guest, all regions together, bytes: 4 TiB. A process has 128 TiB of addresses (47
/// bits), which its disks share: 16 of them fit even while each maps a new table beside the old
/// one.
pub const MEMORY_BYTES_MAX: u64 = 1 << 42;

/// A region of memory, mapped. Threads make buffers of it each for themselves; it is unmapped when
/// the last of these is gone too.
#[derive(Debug)]
pub struct Region {
    guest_addr: u64,
    user_addr: u64,
    size: u64,
    mmap_offset: u64,
    /// For the hand-over of the memory to a successor.
    fd: OwnedFd,
    mapping: Arc<Mapping>,
    shared: Arc<SharedMemory>,
}

impl Region {
    /// Maps a region (vhost-user specification, "Memory region description").
    ///
    /// * `guest_addr`: of the guest; `user_addr`: of the same byte in the front end.
    /// * `size`: bytes, of any alignment; `mmap_offset`: where it begins in the file, also of any.
    ///
    /// Errors: an empty or too large range, or one over the end of the addresses; a file that is
    /// none, or too short; no memory.
    pub fn map(
        fd: OwnedFd,
        guest_addr: u64,
        user_addr: u64,
        size: u64,
        mmap_offset: u64,
    ) -> Result<Arc<Region>, Error> {
        let runs_over = |start: u64| start.checked_add(size).is_none();
        if size == 0 || size > MEMORY_BYTES_MAX || runs_over(guest_addr) || runs_over(user_addr) {
            return Err(Error::BadRange { guest_addr, size });
        }
        let mapping = Mapping::new(fd.as_fd(), mmap_offset, size)?;
        let keep = Box::new(Arc::clone(&mapping));
        // SAFETY: the range is mapped for reading and writing while `keep` lives; no reference to
        // its bytes is ever made here, and faults in it are survived.
        let shared = unsafe { SharedMemory::foreign(mapping.start(), mapping.len(), keep) };
        Ok(Arc::new(Region { guest_addr, user_addr, size, mmap_offset, fd, mapping, shared }))
    }

    /// First address of the guest.
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Address of its first byte in the front end.
    pub fn user_addr(&self) -> u64 {
        self.user_addr
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where it begins in its file, bytes.
    pub fn mmap_offset(&self) -> u64 {
        self.mmap_offset
    }

    /// The file that it is mapped from.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Address of its first byte in this process: for a kernel that is told where the memory is,
    /// never to follow.
    pub fn address(&self) -> usize {
        self.mapping.start().addr()
    }

    /// All of it as a buffer of the calling thread.
    pub fn buffer(&self) -> IoBuf {
        self.shared.buffer()
    }

    /// As memory that rings register.
    pub fn shared(&self) -> &Arc<SharedMemory> {
        &self.shared
    }

    /// Whether a part of it was found gone (its file was truncated); from there on it reads as
    /// zeroes and the guest does not see writes of this process.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// First address after it. Does not overflow: `map` has seen to that.
    pub(super) fn guest_end(&self) -> u64 {
        self.guest_addr + self.size
    }

    /// Whether two regions have an address of the guest in common. Addresses of the front end may
    /// be: its memory can be seen by the guest at two places.
    pub(super) fn overlaps(&self, other: &Region) -> bool {
        self.guest_addr < other.guest_end() && other.guest_addr < self.guest_end()
    }
}
