//! Upper bounds of all sizes that an image chooses.
//!
//! Promises: they are checked before memory is allocated. The bounds on tables are those that QEMU
//! uses, so an image that it accepts is not refused here for its size.

use crate::units::Bytes;

/// Bytes of a sector: the unit of disk sizes and of the lengths of compressed clusters, and what a
/// disk writes in one piece or not at all.
pub const SECTOR: Bytes = Bytes(512);
/// The same as a length in memory.
pub(crate) const SECTOR_LEN: usize = 512;
/// Smallest `cluster_bits` of the specification: clusters of 512 bytes.
pub const CLUSTER_BITS_MIN: u32 = 9;
/// Largest `cluster_bits`: clusters of 2 MiB.
pub const CLUSTER_BITS_MAX: u32 = 21;
/// Largest L1 table: 32 MiB = 4 Mi entries, which is 2 PiB of disk with clusters of 64 KiB.
pub const L1_BYTES_MAX: Bytes = Bytes(32 << 20);
/// Largest refcount table: 8 MiB.
pub const REFCOUNT_TABLE_BYTES_MAX: Bytes = Bytes(8 << 20);
/// Most internal snapshots.
pub const SNAPSHOTS_MAX: u32 = 65_536;
/// Bytes of an entry of the snapshot table without extra data, id and name.
pub(crate) const SNAPSHOT_ENTRY_BYTES_MIN: usize = 40;
/// Largest snapshot table: 65536 snapshots with 1 KiB each.
pub const SNAPSHOT_TABLE_BYTES_MAX: Bytes = Bytes(SNAPSHOTS_MAX as u64 * 1024);
/// Most extra data of one snapshot (24 bytes are defined today).
pub const SNAPSHOT_EXTRA_BYTES_MAX: u32 = 1024;
/// Most persistent bitmaps.
pub const BITMAPS_MAX: u32 = 65_535;
/// Largest bitmap directory: 65535 bitmaps with 1 KiB each, rounded up.
pub const BITMAP_DIRECTORY_BYTES_MAX: Bytes = Bytes(64 << 20);
/// Longest name of one bitmap.
pub const BITMAP_NAME_BYTES_MAX: u32 = 1023;
/// Largest contents of one bitmap: the bound of QEMU. 16 TiB of disk with a granularity of 4 KiB.
pub const BITMAP_BYTES_MAX: Bytes = Bytes(512 << 20);
/// Memory for the bitmaps that record writes, for each image: 16 bitmaps of a disk of 4 TiB with a
/// granularity of 64 KiB.
pub const RECORDED_BITMAPS_BYTES_MAX: Bytes = Bytes(128 << 20);
/// Longest name of a backing file or data file, the limit of the specification.
pub const FILE_NAME_BYTES_MAX: usize = 1023;
/// Longest name of a backing format ("vpc", "qcow2"; the longest that QEMU knows has 11 letters):
/// what QEMU accepts.
pub const FORMAT_NAME_BYTES_MAX: usize = 15;
/// Most header extensions; real images have fewer than ten.
pub const EXTENSIONS_MAX: usize = 256;
/// Most feature names: three kinds of 64 bits each.
pub const FEATURE_NAMES_MAX: usize = 3 * 64;
/// L2 tables are cached in slices of this size, or of a cluster where clusters are smaller. One
/// page: 512 entries, 32 MiB of disk with clusters of 64 KiB.
pub const SLICE_BYTES_MAX: usize = 4096;
/// Default cap of the metadata cache. All L2 tables of a 1 TiB disk with clusters of 64 KiB:
/// 1 TiB / 64 KiB * 8 bytes. Only the parts that were used take memory.
pub const METADATA_CACHE_BYTES: Bytes = Bytes(128 << 20);
/// Memory for clusters that were decompressed recently or ahead of a reader, for each image: 256
/// clusters of 64 KiB, enough for 8 sequential readers with [`READ_AHEAD_BYTES`] each.
pub const RECENT_CLUSTERS_BYTES: usize = 16 << 20;
/// At least this many decompressed clusters are kept (16 MiB with clusters of 2 MiB).
pub const RECENT_CLUSTERS_MIN: usize = 8;
/// At most this many, so that a look-up among them stays short (about 100 ns).
pub const RECENT_CLUSTERS_MAX: usize = 256;
/// Most bytes of disk that are decompressed ahead of one sequential reader: work for 32 CPUs with
/// clusters of 64 KiB.
pub const READ_AHEAD_BYTES: usize = 2 << 20;
/// Most bytes of the image file that are read at once for several compressed clusters.
pub const COMPRESSED_READ_BYTES: Bytes = Bytes(1 << 20);
/// Clusters up to this size are decompressed at once: that takes less time (about 10 µs) than to
/// go to a helper thread and back.
pub const INLINE_DECOMPRESSION_BYTES: usize = 4096;
/// Memory for refcount blocks, for each image: 256 blocks of 64 KiB, which count 512 GiB.
pub const REFCOUNT_CACHE_BYTES: usize = 16 << 20;
/// Most runs of free clusters that are remembered, for each image: about 3 MiB.
pub const FREE_RUNS_MAX: usize = 1 << 16;
/// So many dirty L2 slices are written back at once: 8 MiB with slices of 4 KiB.
pub const DIRTY_SLICES_MAX: u64 = 2048;
/// Memory that a check may take for counting: one byte for each cluster in use, so 128 TiB in
/// clusters of 64 KiB.
pub const CHECK_BYTES_MAX: Bytes = Bytes(2 << 30);
/// Bytes of L1 tables of snapshots, and of bitmap tables, that a check reads: far more than any
/// real image has (2000 snapshots with the largest L1 table), so that a sparse file full of
/// references to the same holes ends.
pub const CHECK_TABLES_BYTES_MAX: Bytes = Bytes(64 << 30);
/// Entries for places past the end of the file whose flags a check remembers one by one: 32 MiB.
pub const CHECK_PAST_END_MAX: usize = 1 << 19;
