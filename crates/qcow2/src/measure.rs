//! The space that a new image will take.
//!
//! Promises: pure arithmetic; the numbers of `qemu-img measure`, to the byte. They are upper
//! bounds: metadata is counted for a fully allocated disk, and every cluster that data touches.

use crate::bitmaps;
use crate::create::{CreateOptions, Preallocation, check_layout};
use crate::error::{Error, ErrorKind};
use crate::info::Info;
use crate::limits::{L1_BYTES_MAX, SECTOR};
use crate::units::{Bytes, GuestOffset};

/// Sizes in bytes, with the names of `qemu-img`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// For what the source holds.
    pub required: Bytes,
    /// When everything is written.
    pub fully_allocated: Bytes,
    /// For the bitmaps of the source, besides. `None`: source or target cannot have bitmaps.
    pub bitmaps: Option<Bytes>,
}

/// The space that a disk of `size` bytes takes as a raw file.
///
/// Errors: `InvalidRequest` when the size is not below 2^63.
pub fn measure_raw(file: &str, size: Bytes) -> Result<Measurement, Error> {
    let size = rounded(file, size)?;
    Ok(Measurement { required: size, fully_allocated: size, bitmaps: None })
}

/// Adds up the space that a disk takes as a qcow2 image.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    cluster_size: Bytes,
    version: u32,
    fully_allocated: Bytes,
    /// Size of the disk in bytes, rounded up to a cluster.
    disk_bytes: Bytes,
    data_bytes: Bytes,
    /// Everything before this offset is counted.
    counted: GuestOffset,
    /// All of the disk counts, whatever it holds.
    all: bool,
    bitmaps: Option<Bytes>,
}

impl Measure {
    /// * `file`: name for messages.
    /// * `options`: of the new image; the names of files do not matter.
    /// * `has_source`: there is a disk to be converted, whose data follows by
    ///   [`data`](Measure::data). With a backing file all of it counts: it is not known what the
    ///   two have in common.
    ///
    /// Errors: `InvalidRequest` for a cluster size or refcount width that no image can have;
    /// `TooLarge`.
    pub fn new(file: &str, options: &CreateOptions, has_source: bool) -> Result<Measure, Error> {
        check_layout(file, options)?;
        let size = rounded(file, options.size)?;
        let cluster_size = options.cluster_size;
        let entry_bytes = Bytes(if options.extended_l2 { 16 } else { 8 });
        let too_large = || {
            Error::new(
                ErrorKind::TooLarge,
                file,
                format!("a disk of {size} bytes is too large for clusters of {cluster_size} bytes"),
                "try larger clusters (option cluster_size)",
            )
        };
        let disk_bytes = size.checked_next_multiple_of(cluster_size).ok_or_else(too_large)?;
        let l2_tables = (disk_bytes / cluster_size).div_ceil(cluster_size / entry_bytes);
        if Bytes(l2_tables * 8) > L1_BYTES_MAX {
            return Err(too_large());
        }
        let l1_bytes = Bytes(l2_tables * 8).next_multiple_of(cluster_size);
        let tables = cluster_size + l2_tables * cluster_size + l1_bytes;
        let clusters = (tables + disk_bytes) / cluster_size;
        let counts = refcount_clusters(clusters, cluster_size, options.refcount_bits);
        let reserved = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full);
        Ok(Measure {
            cluster_size,
            version: options.version,
            fully_allocated: tables + counts * cluster_size + disk_bytes,
            disk_bytes,
            data_bytes: Bytes::ZERO,
            counted: GuestOffset::ZERO,
            all: reserved || has_source && options.backing_file.is_some(),
            bitmaps: None,
        })
    }

    /// Counts a range of the source that is allocated and does not read as zeroes for sure. In
    /// order; ranges past the end of the disk do not count.
    pub fn data(&mut self, offset: GuestOffset, len: Bytes) {
        let end = offset.saturating_add(len).min(GuestOffset::after(self.disk_bytes));
        if offset >= end {
            return;
        }
        let start = offset.align_down(self.cluster_size).max(self.counted);
        let end = end.next_multiple_of(self.cluster_size);
        self.data_bytes += end.saturating_sub(start);
        self.counted = self.counted.max(end);
    }

    /// Counts the bitmaps of the source, a qcow2 image. Inconsistent ones are not copied.
    pub fn bitmaps(&mut self, source: &Info) {
        if self.version < 3 || source.version < 3 {
            return;
        }
        let (mut bytes, mut directory_bytes) = (Bytes::ZERO, Bytes::ZERO);
        for bitmap in source.bitmaps.iter().filter(|bitmap| !bitmap.in_use) {
            let bits = source.virtual_size.div_ceil(bitmap.granularity_bytes);
            let clusters = Bytes(bits.div_ceil(8)).div_ceil(self.cluster_size);
            bytes += clusters * self.cluster_size;
            bytes += Bytes(clusters * 8).next_multiple_of(self.cluster_size);
            directory_bytes += bitmaps::entry_bytes(bitmap.name.len());
        }
        self.bitmaps = Some(bytes + directory_bytes.next_multiple_of(self.cluster_size));
    }

    /// The sum.
    pub fn finish(&self) -> Measurement {
        let data_bytes = if self.all { self.disk_bytes } else { self.data_bytes };
        Measurement {
            required: self.fully_allocated - self.disk_bytes + data_bytes,
            fully_allocated: self.fully_allocated,
            bitmaps: self.bitmaps,
        }
    }
}

fn rounded(file: &str, size: Bytes) -> Result<Bytes, Error> {
    let rounded = size.checked_next_multiple_of(SECTOR);
    rounded.filter(|size| i64::try_from(size.0).is_ok()).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidRequest,
            file,
            format!("a disk of {size} bytes: sizes must be below 2^63"),
            "choose a smaller size",
        )
    })
}

/// Clusters of the refcount table and blocks that count `clusters` others and themselves.
fn refcount_clusters(clusters: u64, cluster_size: Bytes, refcount_bits: u32) -> u64 {
    let block_entries = cluster_size.0 * 8 / u64::from(refcount_bits);
    let mut counts = 0;
    loop {
        let blocks = (clusters + counts).div_ceil(block_entries);
        let table = Bytes(blocks * 8).div_ceil(cluster_size);
        // Grows, by less each time.
        if blocks + table == counts {
            return counts;
        }
        counts = blocks + table;
    }
}

#[cfg(test)]
mod tests {
    use super::{Measure, refcount_clusters};
    use crate::create::CreateOptions;
    use crate::units::{Bytes, GuestOffset};

    #[test]
    fn refcounts_count_themselves() {
        // 32768 counts in a block: the block and the table make it two.
        assert_eq!(refcount_clusters(32766, Bytes(65536), 16), 2);
        assert_eq!(refcount_clusters(32767, Bytes(65536), 16), 3);
        assert_eq!(refcount_clusters(0, Bytes(65536), 16), 0);
    }

    #[test]
    fn each_cluster_that_data_touches_counts_once() {
        let options = CreateOptions { size: Bytes(1 << 20), ..CreateOptions::default() };
        let mut measure = Measure::new("x", &options, true).expect("plain options");
        let empty = measure.finish().required;
        for (offset, len) in [(0, 1), (5, 10), (65535, 2), (200_000, 0), (300_000, 9 << 20)] {
            measure.data(GuestOffset(offset), Bytes(len));
        }
        let clusters = 2 + (16 - 4);
        assert_eq!(measure.finish().required, empty + Bytes(clusters * 65536));
    }
}
