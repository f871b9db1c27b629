//! The numbers of one image that every step of a check needs.
//!
//! Promises: pure arithmetic.

use crate::header::{self, Header};
use crate::limits::SECTOR;
use crate::units::{Bytes, HostCluster, HostOffset};

pub(super) use crate::entry::{COMPRESSED, COPIED, OFFSET_MASK, ZERO};

/// Bits of an L1 entry that must be zero.
pub(super) const L1_RESERVED: u64 = !(OFFSET_MASK | COPIED);
/// Bits of a standard L2 entry that must be zero in every version; see
/// [`Layout::has_reserved_zero`] for one more.
pub(super) const L2_RESERVED: u64 = !(OFFSET_MASK | COPIED | COMPRESSED | ZERO);
/// Bits of an entry of the refcount table that must be zero.
pub(super) const BLOCK_RESERVED: u64 = 0x1ff;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) cluster_bits: u32,
    /// log2 of the bits of a refcount.
    pub(super) refcount_order: u32,
    /// L2 entries have two words.
    pub(super) extended: bool,
    /// Data lies in another file.
    pub(super) external: bool,
    pub(super) version: u32,
    /// Length of the file in bytes, rounded up to a sector as QEMU sees it.
    pub(super) file_len: Bytes,
    /// The same, as it is.
    pub(super) exact_len: Bytes,
    /// Length of the external data file in bytes, where that is known.
    pub(super) data_len: Option<Bytes>,
}

impl Layout {
    pub(super) fn new(header: &Header, file_len: Bytes) -> Layout {
        Layout {
            cluster_bits: header.geometry.cluster_bits,
            refcount_order: header.refcount_order,
            extended: header.incompatible & header::EXTENDED_L2 != 0,
            external: header.incompatible & header::EXTERNAL_DATA != 0,
            version: header.version,
            file_len: file_len.checked_next_multiple_of(SECTOR).unwrap_or(file_len),
            exact_len: file_len,
            data_len: None,
        }
    }

    /// Cluster size in bytes.
    pub(super) fn cluster_size(&self) -> Bytes {
        Bytes(1 << self.cluster_bits)
    }

    /// The same as a length in memory.
    pub(super) fn cluster_len(&self) -> usize {
        1 << self.cluster_bits
    }

    /// The first cluster past the file. The file may have a part of its last cluster only.
    pub(super) fn clusters(&self) -> HostCluster {
        HostCluster(self.file_len.clusters(self.cluster_bits))
    }

    /// Index of the refcount block that counts a cluster.
    pub(super) fn block_of(&self, cluster: HostCluster) -> u64 {
        cluster.0 >> self.block_bits()
    }

    /// The first cluster that the refcount block with this index counts.
    pub(super) fn block_start(&self, index: u64) -> HostCluster {
        HostCluster(index << self.block_bits())
    }

    /// Number of the count of a cluster inside its refcount block.
    pub(super) fn in_block(&self, cluster: HostCluster) -> usize {
        // At most 2^24 counts in a block.
        #[allow(clippy::cast_possible_truncation)]
        let index = (cluster.0 & ((1 << self.block_bits()) - 1)) as usize;
        index
    }

    /// Offset inside a cluster.
    pub(super) fn in_cluster(&self, offset: HostOffset) -> Bytes {
        Bytes(offset.0 & (self.cluster_size().0 - 1))
    }

    /// Whether the range may be there: the file may end inside its last cluster, so that up to one
    /// cluster may be missing.
    pub(super) fn may_be_there(&self, offset: HostOffset, len: Bytes) -> bool {
        offset
            .checked_add(len)
            .is_some_and(|end| end.from_start() < self.file_len.saturating_add(self.cluster_size()))
    }

    /// Largest refcount that can be stored.
    pub(super) fn refcount_max(&self) -> u64 {
        u64::MAX >> (64 - (1u32 << self.refcount_order))
    }

    /// log2 of the clusters that one refcount block covers.
    pub(super) fn block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Bytes of disk that one L2 table maps.
    pub(super) fn table_bytes(&self) -> Bytes {
        let entry_bits = if self.extended { 4 } else { 3 };
        Bytes(1 << (2 * self.cluster_bits - entry_bits))
    }

    /// Place and length in bytes of a compressed cluster.
    pub(super) fn compressed(&self, entry: u64) -> (HostOffset, Bytes) {
        let offset_bits = 62 - (self.cluster_bits - 8);
        let offset = HostOffset(entry & ((1 << offset_bits) - 1));
        let sectors = ((entry & (COMPRESSED - 1)) >> offset_bits) + 1;
        (offset, sectors * SECTOR - offset % SECTOR)
    }
}

/// What an L2 entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    Compressed,
    /// Has a place in the file: data, zeroes or both.
    Allocated,
    /// No place, nothing allocated; reads as zeroes or as the backing file.
    Unallocated,
}

impl Layout {
    /// Whether `entry` has the zero flag where that means nothing and must not be set: in version
    /// 2, and beside a bitmap of subclusters. A reader then does not know what the entry says.
    /// `qemu-img check` does not look for it.
    pub(super) fn has_reserved_zero(&self, entry: u64) -> bool {
        entry & (COMPRESSED | ZERO) == ZERO && (self.version < 3 || self.extended)
    }

    /// What `entry` is, whatever else may be wrong with it.
    pub(super) fn kind(&self, entry: u64) -> EntryKind {
        if entry & COMPRESSED != 0 {
            return EntryKind::Compressed;
        }
        let zero = entry & ZERO != 0 && !self.extended;
        // Offset 0 is a place like any other in an external data file; the COPIED flag decides.
        let somewhere = entry & OFFSET_MASK != 0 || (!zero && self.external && entry & COPIED != 0);
        if somewhere { EntryKind::Allocated } else { EntryKind::Unallocated }
    }
}
