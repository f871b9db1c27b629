//! Block sizes and limits, for a device that shows the disk to a guest.
//!
//! Promises: every size is a power of two, or a multiple of one; requests that do not fit the
//! limits still work.

// Sector of partition tables and of QEMU's counts, too.
pub use ringdisk_qcow2::limits::SECTOR as SECTOR_BYTES;
use ringdisk_qcow2::{Bytes, Info};
use ringdisk_storage::DeviceLimits;

use crate::Disk;
use crate::options::Discard;

/// The smallest block, bytes.
const BLOCK_MIN: u32 = 512;
/// Block of a disk that is stored nowhere, bytes.
const NULL_BLOCK: u32 = 4096;
/// The largest discard, bytes: a guest that discards a whole disk does so in pieces that other
/// requests can get between.
const DISCARD_MAX: Bytes = Bytes(1 << 30);
/// The largest request for zeroes, bytes: where they must be written this takes a moment on any
/// disk.
const ZEROES_MAX: Bytes = Bytes(64 << 20);

/// Block sizes, limits and abilities of a disk. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLimits {
    /// The smallest block that the storage can write without reading first: a power of two, at
    /// least 512. A device may show a smaller one.
    pub logical_block: u32,
    /// The block that a write should fill and start at: a power of two, at least the logical block.
    pub physical_block: u32,
    /// The smallest request that is efficient.
    pub min_io: u32,
    /// The request size that is best; 0: none is known.
    pub opt_io: u32,
    /// Discards may be tried. Storage may still refuse them (EOPNOTSUPP).
    pub can_discard: bool,
    /// Discards free space in whole units of this size, on multiples of it; the rest of a discard
    /// may stay allocated.
    pub discard_align: u32,
    /// The largest discard to be sent at once; a multiple of `discard_align`.
    pub discard_max: Bytes,
    /// Zeroes may be written without sending them.
    pub can_write_zeroes: bool,
    /// Such zeroes may give space back.
    pub zeroes_may_unmap: bool,
    /// The largest range of zeroes to be sent at once.
    pub zeroes_max: Bytes,
}

impl Disk {
    /// Block sizes and limits as the images are at this moment. Blocks for a few reads of `/sys`:
    /// control path, and before a sandbox hides that.
    pub fn block_limits(&self) -> BlockLimits {
        let graph = self.graph();
        let top = graph.top();
        let writable = !self.is_read_only();
        let Some(storage) = top.data_storage() else {
            return BlockLimits {
                logical_block: BLOCK_MIN,
                physical_block: NULL_BLOCK,
                min_io: NULL_BLOCK,
                opt_io: 0,
                can_discard: false,
                discard_align: NULL_BLOCK,
                discard_max: DISCARD_MAX,
                can_write_zeroes: writable,
                zeroes_may_unmap: false,
                zeroes_max: ZEROES_MAX,
            };
        };
        let below = storage.device_limits();
        let discards = self.policy().discard == Discard::Unmap && writable;
        let info = top.qcow2().map(|image| image.info());
        // An image can free clusters for its own use, whatever the storage can do.
        let can_discard = discards && (below.can_discard || info.is_some());
        let discard_align = info.map_or(below.discard_align, |info| unit(info, below));
        let max = below.discard_max.filter(|_| info.is_none());
        let max = max.map_or(DISCARD_MAX, |max| Bytes(max).min(DISCARD_MAX));
        let align = Bytes::from(discard_align);
        BlockLimits {
            logical_block: if self.cache().direct() { below.logical_block } else { BLOCK_MIN },
            physical_block: below.physical_block,
            min_io: below.min_io,
            opt_io: below.opt_io,
            can_discard,
            discard_align,
            discard_max: max.align_down(align).max(align),
            can_write_zeroes: writable,
            zeroes_may_unmap: can_discard,
            zeroes_max: ZEROES_MAX,
        }
    }
}

/// The unit that a qcow2 image can free: a cluster, or a subcluster where it has them.
fn unit(info: &Info, below: DeviceLimits) -> u32 {
    let cluster = u32::try_from(info.cluster_size()).unwrap_or(1 << 21);
    let unit = if info.extended_l2 { cluster / 32 } else { cluster };
    unit.max(below.logical_block).max(BLOCK_MIN)
}
