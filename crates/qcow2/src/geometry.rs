//! Sizes and shifts of one image, computed once at the open.
//!
//! Promises: pure arithmetic.

use crate::concurrent::slices::SliceIndex;
use crate::limits::SLICE_BYTES_MAX;
use crate::units::{Bytes, GuestCluster, GuestOffset};

/// The numbers that turn a guest offset into indexes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Size of the disk in bytes.
    pub(crate) virtual_size: Bytes,
    /// log2 of the cluster size in bytes.
    pub(crate) cluster_bits: u32,
    /// L2 entries have two words.
    pub(crate) extended: bool,
    /// log2 of the entries of an L2 table.
    pub(crate) table_bits: u32,
    /// log2 of the entries of an L2 slice.
    pub(crate) slice_bits: u32,
}

impl Geometry {
    /// * `cluster_bits`: 9 to 21, checked before.
    pub(crate) fn new(virtual_size: Bytes, cluster_bits: u32, extended: bool) -> Geometry {
        let entry_bits = if extended { 4 } else { 3 };
        let table_bits = cluster_bits - entry_bits;
        let slice_bits = SLICE_BYTES_MAX.ilog2().min(cluster_bits) - entry_bits;
        Geometry { virtual_size, cluster_bits, extended, table_bits, slice_bits }
    }

    /// Cluster size in bytes.
    pub(crate) fn cluster_size(&self) -> Bytes {
        Bytes(1 << self.cluster_bits)
    }

    /// Smallest part of a cluster that an L2 entry can call zero, bytes.
    pub(crate) fn zero_unit(&self) -> Bytes {
        if self.extended { Bytes(1 << (self.cluster_bits - 5)) } else { self.cluster_size() }
    }

    /// Words of one L2 entry.
    pub(crate) fn entry_words(&self) -> usize {
        1 << u32::from(self.extended)
    }

    /// Words of one L2 slice.
    pub(crate) fn slice_words(&self) -> usize {
        self.entry_words() << self.slice_bits
    }

    /// Bytes of one L2 slice.
    pub(crate) fn slice_bytes(&self) -> usize {
        self.slice_words() * 8
    }

    /// Bytes of disk behind one L2 table, as a shift.
    pub(crate) fn table_shift(&self) -> u32 {
        self.cluster_bits + self.table_bits
    }

    /// Entries that the L1 table needs for the whole disk.
    pub(crate) fn l1_entries(&self) -> u64 {
        self.virtual_size.clusters(self.table_shift())
    }

    /// Slices that the disk has, `None` when that does not fit (L1 over its limit).
    pub(crate) fn slices(&self) -> Option<u32> {
        let slices = self.virtual_size.clusters(self.cluster_bits + self.slice_bits);
        u32::try_from(slices).ok().filter(|slices| *slices < u32::MAX)
    }

    /// Index into the L1 table.
    pub(crate) fn l1_index(&self, offset: GuestOffset) -> usize {
        // At most 2^22: the L1 table is at most 32 MiB.
        #[allow(clippy::cast_possible_truncation)]
        let index = (offset.0 >> self.table_shift()) as usize;
        index
    }

    /// Slice that maps `offset`.
    pub(crate) fn slice(&self, offset: GuestOffset) -> SliceIndex {
        // `slices()` fitted when the image was opened.
        #[allow(clippy::cast_possible_truncation)]
        let index = (offset.0 >> (self.cluster_bits + self.slice_bits)) as u32;
        SliceIndex(index)
    }

    /// First guest offset of `slice`.
    pub(crate) fn slice_start(&self, slice: SliceIndex) -> GuestOffset {
        GuestOffset(u64::from(slice.0) << (self.cluster_bits + self.slice_bits))
    }

    /// First guest offset past `slice`.
    pub(crate) fn slice_end(&self, slice: SliceIndex) -> GuestOffset {
        self.slice_start(SliceIndex(slice.0 + 1))
    }

    /// First guest offset past what the L1 entry at `index` maps.
    pub(crate) fn table_end(&self, index: usize) -> GuestOffset {
        GuestOffset((index as u64 + 1) << self.table_shift())
    }

    /// Index of the L2 entry of `cluster` inside its table.
    pub(crate) fn entry_in_table(&self, cluster: GuestCluster) -> usize {
        // At most 2^18.
        #[allow(clippy::cast_possible_truncation)]
        let index = (cluster.0 & ((1 << self.table_bits) - 1)) as usize;
        index
    }

    /// Byte offset of `slice` inside its L2 table.
    pub(crate) fn slice_in_table(&self, slice: SliceIndex) -> Bytes {
        let in_table = u64::from(slice.0) & ((1 << (self.table_bits - self.slice_bits)) - 1);
        in_table * Bytes::of(self.slice_bytes())
    }

    /// Index of the entry of `offset` inside its slice.
    pub(crate) fn entry_in_slice(&self, offset: GuestOffset) -> usize {
        // At most 512.
        #[allow(clippy::cast_possible_truncation)]
        let index = ((offset.0 >> self.cluster_bits) & ((1 << self.slice_bits) - 1)) as usize;
        index
    }

    /// The end of the disk.
    pub(crate) fn end(&self) -> GuestOffset {
        GuestOffset::after(self.virtual_size)
    }

    /// Offset inside the cluster.
    pub(crate) fn in_cluster(&self, offset: GuestOffset) -> Bytes {
        Bytes(offset.0 & (self.cluster_size().0 - 1))
    }
}
