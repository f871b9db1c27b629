//! FALLOCATE.
//!
//! Promises: nothing is written where a mode is refused; a range that was punched or zeroed reads
//! as zeroes.

use ringdisk_disk::Bytes;
use ringdisk_ring::{Errno, Ring};

use super::{ClientResize, FILE_BYTES_MAX, FileServer};
use crate::abi::FallocateIn;

const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.unsigned_abs();
const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.unsigned_abs();
const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.unsigned_abs();
const PUNCH_AND_KEEP: u32 = PUNCH_HOLE | KEEP_SIZE;
const ZERO_AND_KEEP: u32 = ZERO_RANGE | KEEP_SIZE;

impl FileServer {
    /// Grows the disk, punches holes, or zeroes a range.
    ///
    /// - no flag: at or past the end the disk grows and the space is reserved; before it,
    ///   EOPNOTSUPP: a disk does not reserve space.
    /// - `PUNCH_HOLE | KEEP_SIZE`: never by writing zeroes; past the end nothing happens.
    /// - `ZERO_RANGE`: grows past the end, with `KEEP_SIZE` it does not.
    /// - any other combination: EOPNOTSUPP.
    ///
    /// Errors: EACCES on a read-only export; EINVAL for an empty range; EFBIG; EPERM where a disk
    /// that is not growable would grow; EOPNOTSUPP also where the disk cannot; those of the disk.
    pub(super) async fn fallocate(&self, ring: &Ring, argument: &FallocateIn) -> Result<(), Errno> {
        if self.read_only {
            return Err(Errno::ACCESS);
        }
        let FallocateIn { offset, length, mode, .. } = *argument;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        let end =
            offset.checked_add(length).filter(|end| *end <= FILE_BYTES_MAX).ok_or(Errno::FBIG)?;
        // The kernel may have written past the end that was known.
        let size = self.disk.follow_length(ring).await?;
        match mode {
            0 if offset >= size.0 => {
                self.check_growable()?;
                let _by_client = ClientResize::begin(self);
                self.disk.allocate(ring, offset, Bytes(length)).await
            }
            PUNCH_AND_KEEP => self.disk.punch(ring, offset, Bytes(length)).await,
            ZERO_RANGE => {
                if end > size.0 {
                    self.check_growable()?;
                    self.grow(ring, end).await?;
                }
                self.zero(ring, offset, length).await
            }
            ZERO_AND_KEEP => self.zero(ring, offset, length).await,
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Errors: EPERM unless clients may make the disk larger.
    fn check_growable(&self) -> Result<(), Errno> {
        if self.growable { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Zeroes stay allocated, as ZERO_RANGE promises.
    async fn zero(&self, ring: &Ring, offset: u64, length: u64) -> Result<(), Errno> {
        self.disk.write_zeroes(ring, offset, Bytes(length), false).await
    }
}
