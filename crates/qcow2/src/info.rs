//! What an image says about itself, for `info` and for the disk layer that opens the files it
//! names.
//!
//! Promises: plain values.

use crate::units::{Bytes, HostOffset};

/// How the compressed clusters of an image are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompressionType {
    /// Raw deflate (the specification calls it zlib).
    Zlib,
    /// Zstandard frames.
    Zstd,
}

impl CompressionType {
    /// The name that `qemu-img` uses.
    pub fn name(self) -> &'static str {
        match self {
            CompressionType::Zlib => "zlib",
            CompressionType::Zstd => "zstd",
        }
    }
}

/// The three classes of feature bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FeatureClass {
    /// A reader that does not know the bit must not open the image.
    Incompatible,
    /// A reader may ignore the bit.
    Compatible,
    /// A writer that does not know the bit clears it.
    Autoclear,
}

/// One line of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// Class of the bit.
    pub class: FeatureClass,
    /// Number of the bit, 0 to 63.
    pub bit: u8,
    /// The name, as the program that made the image wrote it.
    pub name: String,
}

/// One internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Unique id, usually a decimal number.
    pub id: String,
    /// Name that the user gave.
    pub name: String,
    /// Seconds since 1970 (UTC) when it was taken.
    pub date_seconds: u32,
    /// Nanoseconds to be added to `date_seconds`.
    pub date_nanoseconds: u32,
    /// Run time of the guest until the snapshot, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Size of the saved machine state in bytes, 0 when there is none.
    pub vm_state_bytes: Bytes,
    /// Size of the disk when the snapshot was taken, in bytes.
    pub disk_bytes: Option<Bytes>,
    /// Instruction counter of the guest, where the image records one.
    pub instruction_count: Option<u64>,
    /// Host offset of the L1 table of the snapshot. Not checked: only listed here.
    pub l1_table_offset: HostOffset,
    /// Entries of that table.
    pub l1_entries: u32,
}

/// One persistent bitmap (its contents are not read).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Name that the user gave.
    pub name: String,
    /// Bytes of disk for each bit: a power of two.
    pub granularity_bytes: Bytes,
    /// Its contents cannot be trusted: it was in use when the image was last closed, or it has
    /// flags or extra data that ringdisk does not know.
    pub in_use: bool,
    /// It records writes whenever the image is open for writing.
    pub auto: bool,
    /// Host offset of the bitmap table.
    pub table_offset: HostOffset,
    /// Entries of the bitmap table.
    pub table_entries: u32,
}

/// A header extension that ringdisk does not know, kept as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownExtension {
    /// Type number.
    pub kind: u32,
    /// Contents without padding.
    pub data: Vec<u8>,
}

/// Everything the header, its extensions and the directories say.
#[derive(Clone, Debug)]
pub struct Info {
    /// 2 or 3.
    pub version: u32,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// Size of the disk in bytes; not always a multiple of 512.
    pub virtual_size: Bytes,
    /// Width of a reference count: 1, 2, 4, … 64.
    pub refcount_bits: u32,
    /// Bytes of the header: 72 in version 2, at least 104 in version 3.
    pub header_length: u32,
    /// Name of the backing file as it is in the image: a path, relative to the image, or a name
    /// with a prefix such as `json:`. Bytes, because Linux file names are bytes. No NUL inside,
    /// never empty.
    pub backing_file: Option<Vec<u8>>,
    /// Format of the backing file, where recorded.
    pub backing_format: Option<String>,
    /// Guest data lies in another file: [`set_data_file`](crate::Qcow2::set_data_file) has to be
    /// called before anything can be read.
    pub external_data_file: bool,
    /// Name of the external data file, where recorded. No NUL inside, never empty.
    pub data_file: Option<Vec<u8>>,
    /// The external data file is the plain contents of the disk.
    pub data_file_raw: bool,
    /// How compressed clusters are compressed.
    pub compression: CompressionType,
    /// L2 entries have 128 bits and 32 subclusters.
    pub extended_l2: bool,
    /// Reference counts may lag behind while `dirty` is set.
    pub lazy_refcounts: bool,
    /// Not closed cleanly: reference counts may be wrong, the mapping is right.
    pub dirty: bool,
    /// Marked as corrupt by the program that last wrote it.
    pub corrupt: bool,
    /// The 64 incompatible feature bits.
    pub incompatible_features: u64,
    /// The 64 compatible feature bits.
    pub compatible_features: u64,
    /// The 64 autoclear feature bits.
    pub autoclear_features: u64,
    /// Names of feature bits, as recorded in the image.
    pub feature_names: Vec<FeatureName>,
    /// Internal snapshots in the order of the table.
    pub snapshots: Vec<Snapshot>,
    /// Persistent bitmaps, where the image says that they are consistent with the data.
    pub bitmaps: Vec<Bitmap>,
    /// Header extensions that ringdisk does not know.
    pub unknown_extensions: Vec<UnknownExtension>,
    /// Entries of the L1 table.
    pub l1_entries: u32,
    /// Host offset of the L1 table.
    pub l1_table_offset: HostOffset,
    /// Host offset of the refcount table.
    pub refcount_table_offset: HostOffset,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
}

impl Info {
    /// Cluster size in bytes: 512 to 2 MiB, a power of two.
    pub fn cluster_size(&self) -> Bytes {
        Bytes(1 << self.cluster_bits)
    }

    /// The `compat` value that `qemu-img` prints: `0.10` for version 2, `1.1` for version 3.
    pub fn compat(&self) -> &'static str {
        if self.version == 2 { "0.10" } else { "1.1" }
    }
}
