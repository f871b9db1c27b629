//! The configuration space (virtio 1.3, section 5.2.4).
//!
//! Promises: pure; the space is always [`SPACE_BYTES`] long, little-endian, and zeroes behind the
//! fields. No limit in it is larger than what the device takes. Allocates nothing.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, KnownLayout};

use super::SECTOR_BYTES;

/// Offset of `writeback`, the only field that a driver writes.
pub(crate) const WRITEBACK_AT: u32 = 32;
/// Bytes that a front end may ask for: the whole space of a virtio device in vhost-user
/// (`VHOST_USER_MAX_CONFIG_SIZE`). Those behind the fields are 0.
pub(crate) const SPACE_BYTES: usize = 256;
/// Segments of a discard or of a request to write zeroes.
pub(crate) const RANGES_MAX: u32 = 64;
/// Sectors of such a segment: 1 GiB, so that one request does not keep others waiting for long.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 21;

/// `struct virtio_blk_config`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Fields {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    cylinders: U16,
    heads: u8,
    sectors: u8,
    blk_size: U32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: U16,
    opt_io_size: U32,
    writeback: u8,
    unused0: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
    max_secure_erase_sectors: U32,
    max_secure_erase_seg: U32,
    secure_erase_sector_alignment: U32,
    zoned: [u8; 24],
}

const _: () = assert!(size_of::<Fields>() == 96 && std::mem::offset_of!(Fields, writeback) == 32);

/// What a device tells of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// Data segments of a request at most.
    pub(crate) seg_max: u32,
    /// Logical block size, bytes; a power of two from 512.
    pub(crate) logical_block: u32,
    /// Physical block size, bytes; a power of two from the logical one.
    pub(crate) physical_block: u32,
    /// Smallest transfers that suit the storage, bytes.
    pub(crate) min_transfer: u32,
    /// Transfers that suit it best, bytes; 0: not known.
    pub(crate) optimal_transfer: u32,
    /// Alignment of discards that free something, bytes.
    pub(crate) discard_align: u32,
    /// Bytes of one discard at most, and of one range of zeroes.
    pub(crate) discard_max: u64,
    pub(crate) zeroes_max: u64,
    pub(crate) queues: u16,
    /// Zeroes that are written may free space.
    pub(crate) may_unmap: bool,
}

impl Config {
    /// The configuration space as it is now.
    ///
    /// * `size`: of the disk, bytes; a part of a logical block at the end is not shown.
    /// * `write_cache`: whether writes are durable only after a flush.
    pub(crate) fn space(&self, size: u64, write_cache: bool) -> [u8; SPACE_BYTES] {
        let logical = u64::from(self.logical_block);
        let sectors_of =
            |bytes: u32| u32::try_from(u64::from(bytes) / SECTOR_BYTES).unwrap_or(1).max(1);
        let blocks_of = |bytes: u32| bytes / self.logical_block;
        let fields = Fields {
            capacity: U64::new(size / logical * logical / SECTOR_BYTES),
            seg_max: U32::new(self.seg_max),
            blk_size: U32::new(self.logical_block),
            physical_block_exp: u8::try_from((self.physical_block / self.logical_block).ilog2())
                .unwrap_or(0),
            min_io_size: U16::new(u16::try_from(blocks_of(self.min_transfer)).unwrap_or(u16::MAX)),
            opt_io_size: U32::new(blocks_of(self.optimal_transfer)),
            writeback: u8::from(write_cache),
            num_queues: U16::new(self.queues),
            max_discard_sectors: U32::new(self.range_sectors(self.discard_max)),
            max_discard_seg: U32::new(RANGES_MAX),
            discard_sector_alignment: U32::new(sectors_of(
                self.discard_align.max(self.logical_block),
            )),
            max_write_zeroes_sectors: U32::new(self.range_sectors(self.zeroes_max)),
            max_write_zeroes_seg: U32::new(RANGES_MAX),
            write_zeroes_may_unmap: u8::from(self.may_unmap),
            ..Fields::default()
        };
        let mut space = [0; SPACE_BYTES];
        space[..size_of::<Fields>()].copy_from_slice(fields.as_bytes());
        space
    }
}

impl Config {
    /// Sectors of the longest range that drivers are told of, whatever for.
    pub(crate) fn longest_range_sectors(&self) -> u32 {
        self.range_sectors(self.discard_max).max(self.range_sectors(self.zeroes_max))
    }

    /// A limit of the disk as drivers are told it: whole logical blocks, in sectors.
    fn range_sectors(&self, bytes: u64) -> u32 {
        let blocks = (bytes / u64::from(self.logical_block)).max(1);
        let sectors = blocks * u64::from(self.logical_block) / SECTOR_BYTES;
        u32::try_from(sectors).unwrap_or(RANGE_SECTORS_MAX).min(RANGE_SECTORS_MAX)
    }
}

#[cfg(test)]
mod tests;
