//! What one run of the simulation is: the image, its clients, their luck. All of it follows from
//! the seed.

use ringdisk_qcow2::{Bytes, Discard, OpenOptions};
use ringdisk_testkit::layout::Shape;
use ringdisk_testkit::oracle::{Below, SECTOR};
use ringdisk_testkit::sim::Prng;

/// Bytes of each region that the clients use: enough for conflicts, little enough to be judged
/// quickly.
const REGION_BYTES: u64 = 160 << 10;

/// Clusters of an L1 table that nearly fill a refcount table of one cluster, which can count 64 *
/// 64 clusters, where clusters have 512 bytes and counts 64 bits: 63 blocks and some other clusters
/// come to it.
const NEARLY_FULL_L1: u64 = 3900;

/// Which operations that need the image for themselves happen between two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Between {
    /// None: one stream only.
    Nothing,
    /// Close and open again.
    Reopen,
    /// Internal snapshots are made, applied and deleted.
    Snapshots,
    /// The disk grows and shrinks.
    Resize,
    /// Both.
    Both,
}

/// What the image is stored on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A file through the page cache: it grows with each write.
    #[default]
    File,
    /// A regular file with direct I/O: space is reserved ahead of the writes, and cut off at the
    /// close.
    Direct,
    /// A block device with room for everything, and old bytes everywhere.
    Device,
    /// A block device that gets full: clients are told that there is no space, and nothing else.
    FullDevice,
}

/// What a test wants of its runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) between: Option<Between>,
    pub(crate) lazy: bool,
    pub(crate) data_file: bool,
    pub(crate) backing: bool,
    pub(crate) compressed: bool,
    pub(crate) bitmap: bool,
    /// So much is in use that the refcount table has to grow soon.
    pub(crate) full_table: bool,
    pub(crate) medium: Medium,
    /// The external data file has to be a raw image at every moment.
    pub(crate) data_raw: bool,
    /// What happens between two streams happens on the open image, with all that it has not written
    /// yet.
    pub(crate) live: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) shape: Shape,
    pub(crate) below: Below,
    pub(crate) between: Between,
    /// Tasks that work on the image at once.
    pub(crate) clients: u64,
    /// Operations of each in a stream.
    pub(crate) operations: u64,
    /// Streams, one after the other, with `between` in between.
    pub(crate) streams: u64,
    /// Writes of parts of a sector happen.
    pub(crate) odd: bool,
    pub(crate) compressed: bool,
    /// A bitmap records all writes.
    pub(crate) bitmap: bool,
    pub(crate) options: OpenOptions,
    /// Storage operations of a thousand that are held back.
    pub(crate) held_per_mille: u64,
    /// What the image is stored on.
    pub(crate) medium: Medium,
    /// Changes between streams are made on the open image.
    pub(crate) live: bool,
    /// Bytes that are used.
    pub(crate) regions: Vec<std::ops::Range<u64>>,
}

impl Config {
    pub(crate) fn new(seed: u64, wanted: Wanted) -> Config {
        let mut prng = Prng::new(seed ^ 0x00c0_ffee);
        let extended = prng.below(5) == 0 && !wanted.full_table;
        let version = if prng.below(6) == 0 && !extended { 2 } else { 3 };
        let needs_3 = wanted.lazy || wanted.data_file || wanted.bitmap || wanted.full_table;
        let version = if needs_3 { 3 } else { version };
        let cluster_bits = cluster_bits(&mut prng, &wanted, extended);
        let refcount_order = refcount_order(&mut prng, &wanted, version);
        let entry = if extended { 16 } else { 8 };
        let covers = ((1u64 << cluster_bits) / entry) << cluster_bits;
        // Some L2 tables; the end is inside a cluster.
        let mut size = covers * (2 + prng.below(if cluster_bits < 12 { 12 } else { 2 }))
            + covers / 2
            + SECTOR * 3;
        if wanted.full_table {
            // A cluster of the L1 table has 64 entries.
            size += (NEARLY_FULL_L1 + 25 * prng.below(4)) * 64 * covers;
        }
        let below = match wanted.backing {
            false => Below::NOTHING,
            true => {
                Below { disk: 1, len: [size / 2 + 700, size, size + 4096][index(&mut prng, 3)] }
            }
        };
        let shape = Shape {
            version,
            cluster_bits,
            refcount_order,
            size,
            extended,
            zstd: wanted.compressed && version == 3 && prng.coin(),
            lazy: wanted.lazy,
            data_file: wanted.data_file.then(|| "image.data".to_owned()),
            data_file_raw: wanted.data_raw,
            backing: wanted.backing.then(|| ("base".to_owned(), "raw".to_owned())),
            refcount_table_clusters: 1,
        };
        let small_cache = prng.below(3) == 0;
        let on_device = matches!(wanted.medium, Medium::Device | Medium::FullDevice);
        let options = OpenOptions {
            writable: true,
            metadata_cache_bytes: small_cache.then_some(Bytes::ZERO),
            discard: if prng.below(5) == 0 { Discard::Ignore } else { Discard::Unmap },
            // What a device leaves of a discard may be anything.
            discard_no_unref: prng.below(6) < if on_device { 3 } else { 1 },
            ..OpenOptions::default()
        };
        Config {
            seed,
            regions: regions(&mut prng, size, 1 << cluster_bits, covers),
            shape,
            below,
            between: wanted.between.unwrap_or(Between::Nothing),
            clients: 1 + prng.below(8),
            operations: 10 + prng.below(80),
            streams: if wanted.between.is_some() { 3 } else { 1 },
            odd: prng.below(3) == 0,
            compressed: wanted.compressed,
            bitmap: wanted.bitmap,
            options,
            held_per_mille: [300, 700, 950][index(&mut prng, 3)],
            medium: wanted.medium,
            live: wanted.live,
        }
    }

    pub(crate) fn cluster(&self) -> u64 {
        1 << self.shape.cluster_bits
    }
}

fn cluster_bits(prng: &mut Prng, wanted: &Wanted, extended: bool) -> u32 {
    match prng.below(10) {
        _ if wanted.full_table => 9,
        _ if extended => 14 + u32::from(prng.below(4) == 0),
        0..=3 => 9,
        4 | 5 => 10,
        6 | 7 => 12,
        8 => 13,
        _ => 16,
    }
}

fn refcount_order(prng: &mut Prng, wanted: &Wanted, version: u32) -> u32 {
    let snapshots = matches!(wanted.between, Some(Between::Snapshots | Between::Both));
    match (version, prng.below(8)) {
        (2, _) => 4,
        _ if wanted.full_table => 6,
        // Pieces of compressed data share a cluster, and each snapshot counts all of them again:
        // small counts cannot.
        (_, 0..3) if snapshots && wanted.compressed => 4,
        (_, 0) if !snapshots && !wanted.compressed => 0,
        (_, 1) => 1 + u32::from(snapshots),
        (_, 2) => 3,
        (_, 3) => 6,
        (_, 4) => 5,
        _ => 4,
    }
}

pub(crate) fn index(prng: &mut Prng, bound: u64) -> usize {
    usize::try_from(prng.below(bound)).unwrap_or(0)
}

/// The start of the disk, a border between two L2 tables, some other places, and the end.
fn regions(prng: &mut Prng, size: u64, cluster: u64, covers: u64) -> Vec<std::ops::Range<u64>> {
    let len = (REGION_BYTES / 5).max(2 * cluster).min(covers) / cluster * cluster;
    let border = covers * (1 + prng.below(size / covers));
    let border = (border - len / 2 / cluster * cluster).min(size - len);
    let other = prng.below(size - len) / cluster * cluster;
    vec![0..len, border..border + len, other..other + len, size - len..size]
}
