//! LSEEK for SEEK_DATA and SEEK_HOLE; the kernel does the other kinds itself.
//!
//! Promises: the answer comes from the block status of the disk; the end of the disk counts as a
//! hole.

use ringdisk_disk::Bytes;
use ringdisk_ring::{Errno, Ring};

use super::FileServer;
use crate::abi::{LseekIn, LseekOut};

const SEEK_DATA: u32 = libc::SEEK_DATA.unsigned_abs();
const SEEK_HOLE: u32 = libc::SEEK_HOLE.unsigned_abs();

impl FileServer {
    /// Finds the next data or hole at or after a position.
    ///
    /// Errors: ENXIO at or past the end, and for SEEK_DATA if only holes follow; EINVAL for another
    /// `whence`; those of the disk.
    pub(super) async fn seek(&self, ring: &Ring, argument: &LseekIn) -> Result<LseekOut, Errno> {
        let wants_data = match argument.whence {
            SEEK_DATA => true,
            SEEK_HOLE => false,
            _ => return Err(Errno::INVAL),
        };
        // The kernel may have written past the end that was known.
        let size = self.disk.follow_length(ring).await?;
        if argument.offset >= size.0 {
            return Err(Errno::NXIO);
        }
        let mut at = argument.offset;
        while at < size.0 {
            let status = self.disk.block_status(ring, at, size - Bytes(at)).await?;
            if status.len.is_zero() {
                // The disk has shrunk meanwhile.
                break;
            }
            if status.is_data() == wants_data {
                return Ok(LseekOut { offset: at });
            }
            at += status.len.0;
        }
        if wants_data {
            return Err(Errno::NXIO);
        }
        Ok(LseekOut { offset: at.min(size.0) })
    }
}
