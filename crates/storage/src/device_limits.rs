//! Block sizes and discard limits of a storage, for exports that present it as a disk to a guest.
//!
//! Promises: where nothing is known, the values are ones that every guest can use. Control path: a
//! few small reads below `/sys`.

use crate::kinds::Kind;
use crate::storage::Storage;
use crate::sysfs::queue_number;

/// Sector size where none is reported, bytes.
const SECTOR: u32 = 512;
/// The largest block that is passed on, bytes: larger ones (a stripe that is called a block)
/// confuse guests.
const BLOCK_MAX: u32 = 1 << 16;

/// Block sizes, and what a discard can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The smallest unit that can be written without reading first, bytes: a power of two, at
    /// least 512.
    pub logical_block: u32,
    /// The unit that is written at once inside, bytes: a power of two, at least the logical block.
    pub physical_block: u32,
    /// The smallest request that is efficient, bytes; at least the physical block.
    pub min_io: u32,
    /// The request size that is best (a stripe), bytes; 0: none is known.
    pub opt_io: u32,
    /// Discards may be tried: a file system may still refuse them.
    pub can_discard: bool,
    /// Discards that do not fill units of so many bytes may do nothing; at least the logical block.
    pub discard_align: u32,
    /// The largest discard, bytes; `None`: no limit.
    pub discard_max: Option<u64>,
}

impl Storage {
    /// The block sizes and discard limits. Blocks for a few reads of `/sys`.
    pub fn device_limits(&self) -> DeviceLimits {
        let limits = self.limits();
        let logical = limits.offset_align.max(SECTOR);
        let plain = DeviceLimits {
            logical_block: logical,
            physical_block: logical,
            min_io: logical,
            opt_io: 0,
            can_discard: self.may_discard(),
            discard_align: limits.discard_align.max(logical),
            discard_max: None,
        };
        match (self.kind(), self.identity()) {
            (Kind::Regular, _) => {
                // The block of the file system: what a smaller write makes it read first.
                let block = block_size(Some(u64::from(limits.optimal_transfer.min(4096))), logical);
                let align = plain.discard_align.max(block);
                DeviceLimits { physical_block: block, min_io: block, discard_align: align, ..plain }
            }
            (Kind::BlockDevice, Some((device, _))) if self.nbd_address().is_none() => {
                of_device(device, plain)
            }
            _ => plain,
        }
    }
}

/// A power of two between the smallest one that is possible and [`BLOCK_MAX`].
fn block_size(said: Option<u64>, least: u32) -> u32 {
    said.and_then(|said| u32::try_from(said).ok())
        .filter(|said| said.is_power_of_two() && *said <= BLOCK_MAX)
        .map_or(least, |said| said.max(least))
}

fn of_device(device: u64, plain: DeviceLimits) -> DeviceLimits {
    let number = |name: &str| queue_number(device, name);
    let logical = block_size(number("logical_block_size"), plain.logical_block);
    let physical = block_size(number("physical_block_size"), logical);
    let size = |name: &str| number(name).and_then(|size| u32::try_from(size).ok()).unwrap_or(0);
    let granularity = size("discard_granularity");
    // Without /sys the device is asked when a discard comes.
    let most = number("discard_max_bytes");
    DeviceLimits {
        logical_block: logical,
        physical_block: physical,
        min_io: size("minimum_io_size").max(physical),
        opt_io: size("optimal_io_size"),
        can_discard: plain.can_discard && most != Some(0),
        discard_align: granularity.max(logical),
        discard_max: most.filter(|most| *most > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenOptions;

    #[test]
    fn regular_file_has_sizes_that_a_guest_can_use() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let storage = Storage::open(file.path(), &OpenOptions::default()).unwrap();
        let limits = storage.device_limits();
        assert_eq!(limits.logical_block, 512);
        assert_eq!(limits.physical_block, 4096);
        assert!(limits.can_discard);
        assert_eq!((limits.discard_align, limits.discard_max), (4096, None));
    }

    #[test]
    fn odd_block_sizes_are_not_believed() {
        assert_eq!(block_size(Some(4096), 512), 4096);
        assert_eq!(block_size(Some(3000), 512), 512);
        assert_eq!(block_size(Some(1 << 20), 512), 512);
        assert_eq!(block_size(Some(512), 4096), 4096);
        assert_eq!(block_size(None, 4096), 4096);
    }
}
