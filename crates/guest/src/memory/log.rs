//! The log of a live migration: one bit for each page of the guest that was written.
//!
//! Promises: pages are marked after they were written and before the guest learns of it, so the
//! front end, which clears a bit and then copies the page, misses no write. Any thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::Error;

use super::access::RingMemory;
use super::mapping::Mapping;

/// Bytes of the guest for each bit (vhost-user specification, "Migration").
const PAGE_BYTES: u64 = 4096;
/// Largest log, bytes: a bit for each page of a guest's 52 bits of addresses would be 128 GiB; this
/// is one of 16 TiB.
const LOG_BYTES_MAX: u64 = 1 << 29;

/// A log in memory of the front end.
#[derive(Debug)]
pub struct Log {
    bits: RingMemory,
    fd: OwnedFd,
    offset: u64,
}

impl Log {
    /// Maps a log (SET_LOG_BASE).
    ///
    /// * `size`: bytes; `offset`: where it begins in the file, bytes.
    ///
    /// Errors: it is empty or larger than any guest needs; as for a region of memory.
    pub fn map(fd: OwnedFd, size: u64, offset: u64) -> Result<Arc<Log>, Error> {
        if size > LOG_BYTES_MAX {
            return Err(Error::BadRange { guest_addr: 0, size });
        }
        let bits = RingMemory::new(&Mapping::new(fd.as_fd(), offset, size)?, 0);
        Ok(Arc::new(Log { bits, fd, offset }))
    }

    /// Marks the pages of these bytes. Pages past the end of the log are not the front end's to
    /// migrate.
    pub fn mark(&self, guest_addr: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|more| guest_addr.saturating_add(more)) else {
            return;
        };
        let end = self.bits.len() as u64 * 8;
        let (first, last) =
            (guest_addr / PAGE_BYTES, (last / PAGE_BYTES).min(end.saturating_sub(1)));
        if first >= end {
            return;
        }
        let (first_byte, last_byte) = (first / 8, last / 8);
        for byte in first_byte..=last_byte {
            let from = if byte == first_byte { first % 8 } else { 0 };
            let to = if byte == last_byte { last % 8 } else { 7 };
            let bits = (0xff_u8 << from) & (0xff_u8 >> (7 - to));
            // The log's length is a `usize`, and `byte` lies in it.
            self.bits.set_bits(usize::try_from(byte).unwrap_or(usize::MAX), bits);
        }
    }

    /// Bytes of the log.
    pub fn size(&self) -> u64 {
        self.bits.len() as u64
    }

    /// Where it begins in its file, bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The file that it is mapped from.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether a part of it was found gone.
    pub fn is_lost(&self) -> bool {
        self.bits.is_lost()
    }
}
