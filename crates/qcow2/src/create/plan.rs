//! Plans a new image: checks the options and places every table.
//!
//! Promises: pure, no I/O; a plan is an image that opens. Order in the file: header, refcount
//! table, refcount blocks, L1 table, and with preallocation the L2 tables and the data, so that
//! metadata lies together and data is one run.

use crate::create::{CreateOptions, Preallocation};
use crate::entry::COPIED;
use crate::error::{Error, ErrorKind};
use crate::header::EXTENDED_L2_CLUSTER_BITS_MIN;
use crate::info::CompressionType;
use crate::limits::{
    CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, FILE_NAME_BYTES_MAX, L1_BYTES_MAX,
    REFCOUNT_TABLE_BYTES_MAX, SECTOR,
};
use crate::units::{Bytes, HostCluster};

/// Longest name of a backing format that QEMU reads.
const FORMAT_BYTES_MAX: usize = 15;

/// Where everything lies. Counts and positions in clusters, unless they say otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Size of the disk in bytes.
    pub(super) size: Bytes,
    pub(super) cluster_bits: u32,
    pub(super) refcount_order: u32,
    pub(super) preallocation: Preallocation,
    /// Bytes of an L2 entry.
    pub(super) entry_bytes: Bytes,
    pub(super) refcount_table_clusters: u64,
    pub(super) refcount_blocks: u64,
    pub(super) l1_entries: u64,
    pub(super) l2_tables: u64,
    /// Clusters of data that the L2 tables name: in this file, or in the data file.
    pub(super) data_clusters: u64,
    pub(super) external: bool,
}

impl Plan {
    /// Errors: `InvalidRequest` for options that no image can have, `TooLarge` for a size that the
    /// tables cannot describe.
    pub(super) fn new(file: &str, options: &CreateOptions) -> Result<Plan, Error> {
        let refuse = |reason: String, advice: &'static str| {
            Error::new(ErrorKind::InvalidRequest, file, reason, advice)
        };
        check_features(options).map_err(|(reason, advice)| refuse(reason, advice))?;
        check_names(options).map_err(|(reason, advice)| refuse(reason, advice))?;
        let largest = Bytes(i64::MAX.unsigned_abs());
        let size = options.size.checked_next_multiple_of(SECTOR).filter(|size| *size <= largest);
        let Some(size) = size else {
            return Err(refuse(
                format!("a disk of {} bytes: sizes must be below 2^63", options.size),
                "choose a smaller size",
            ));
        };

        let cluster_bits = options.cluster_size.ilog2();
        let entry_bytes = Bytes(if options.extended_l2 { 16 } else { 8 });
        let table_bytes = options.cluster_size / entry_bytes * options.cluster_size;
        let l1_entries = size.div_ceil(table_bytes);
        if Bytes(l1_entries * 8) > L1_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                file,
                format!(
                    "a disk of {size} bytes is too large for qcow2 with clusters of {} bytes (at \
                     most {} bytes)",
                    options.cluster_size,
                    u128::from(table_bytes.0) * u128::from(L1_BYTES_MAX / Bytes(8)),
                ),
                "try larger clusters (option cluster_size), or a smaller size",
            ));
        }
        let preallocation = match options.preallocation {
            // A reader that ignores the metadata and one that follows it see the same.
            Preallocation::Off if options.data_file_raw => Preallocation::Metadata,
            other => other,
        };
        let allocated = preallocation != Preallocation::Off;
        let external = options.data_file.is_some();
        let mut plan = Plan {
            size,
            cluster_bits,
            refcount_order: options.refcount_bits.ilog2(),
            preallocation,
            entry_bytes,
            refcount_table_clusters: 1,
            refcount_blocks: 1,
            l1_entries,
            l2_tables: if allocated { l1_entries } else { 0 },
            data_clusters: if allocated { size.div_ceil(options.cluster_size) } else { 0 },
            external,
        };
        plan.count_refcounts();
        if Bytes::of_clusters(plan.refcount_table_clusters, cluster_bits) > REFCOUNT_TABLE_BYTES_MAX
        {
            return Err(Error::new(
                ErrorKind::TooLarge,
                file,
                format!(
                    "a preallocated disk of {size} bytes needs a refcount table over the limit of \
                     {REFCOUNT_TABLE_BYTES_MAX} bytes"
                ),
                "try larger clusters (option cluster_size), or leave preallocation off",
            ));
        }
        Ok(plan)
    }

    /// Finds how many refcount blocks count everything, themselves included.
    fn count_refcounts(&mut self) {
        loop {
            let blocks = self.clusters().0.div_ceil(self.block_entries());
            let table = Bytes(blocks * 8).clusters(self.cluster_bits);
            if blocks == self.refcount_blocks && table == self.refcount_table_clusters {
                return;
            }
            // Both only grow, by less each time.
            self.refcount_blocks = blocks;
            self.refcount_table_clusters = table;
        }
    }

    pub(super) fn cluster_size(&self) -> Bytes {
        Bytes(1 << self.cluster_bits)
    }

    /// Clusters that one refcount block counts.
    pub(super) fn block_entries(&self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order
    }

    pub(super) fn first_block(&self) -> HostCluster {
        HostCluster(1 + self.refcount_table_clusters)
    }

    pub(super) fn l1_start(&self) -> HostCluster {
        self.first_block() + self.refcount_blocks
    }

    pub(super) fn l2_start(&self) -> HostCluster {
        self.l1_start() + Bytes(self.l1_entries * 8).clusters(self.cluster_bits)
    }

    /// Where data begins; the file has metadata only before this.
    pub(super) fn data_start(&self) -> HostCluster {
        self.l2_start() + self.l2_tables
    }

    /// The first cluster past the image file.
    pub(super) fn clusters(&self) -> HostCluster {
        self.data_start() + if self.external { 0 } else { self.data_clusters }
    }

    /// An entry of the refcount table.
    pub(super) fn refcount_table_word(&self, index: u64) -> u64 {
        if index < self.refcount_blocks {
            ((self.first_block() + index) << self.cluster_bits).0
        } else {
            0
        }
    }

    /// An entry of the L1 table.
    pub(super) fn l1_word(&self, index: u64) -> u64 {
        if index < self.l2_tables {
            ((self.l2_start() + index) << self.cluster_bits).0 | COPIED
        } else {
            0
        }
    }

    /// A word of the L2 tables, which follow one another.
    pub(super) fn l2_word(&self, index: u64) -> u64 {
        // The second word of an extended entry stays 0: space is there, and reads go to the backing
        // file as if it were not.
        let offset = Bytes(index * 8);
        let entry = offset / self.entry_bytes;
        let second = !offset.is_multiple_of(self.entry_bytes);
        if second || entry >= self.data_clusters {
            return 0;
        }
        let first = if self.external { HostCluster(0) } else { self.data_start() };
        ((first + entry) << self.cluster_bits).0 | COPIED
    }
}

/// Reason and advice.
type Refusal = (String, &'static str);

/// The sizes that everything else follows from. The words follow `qemu-img`.
pub(super) fn check_layout(options: &CreateOptions) -> Result<(), Refusal> {
    let CreateOptions { cluster_size, refcount_bits, version, .. } = *options;
    let range = Bytes(1 << CLUSTER_BITS_MIN)..=Bytes(1 << CLUSTER_BITS_MAX);
    if !cluster_size.is_power_of_two() || !range.contains(&cluster_size) {
        return Err((
            format!("cluster_size is {cluster_size}: must be a power of two from 512 to 2048k"),
            "64k suits most disks",
        ));
    }
    if !refcount_bits.is_power_of_two() || refcount_bits > 64 {
        return Err((
            format!("refcount_bits is {refcount_bits}: must be a power of two up to 64"),
            "16 suits most disks",
        ));
    }
    if !(2..=3).contains(&version) {
        return Err((
            format!("version {version} of qcow2 is not known"),
            "use compat=1.1 (version 3) or compat=0.10 (version 2)",
        ));
    }
    if version < 3 && refcount_bits != 16 {
        return Err(needs_v3("a refcount_bits other than 16"));
    }
    if options.extended_l2 && cluster_size < Bytes(1 << EXTENDED_L2_CLUSTER_BITS_MIN) {
        return Err((
            format!("extended_l2 needs clusters of at least 16384 bytes, not {cluster_size}"),
            "use larger clusters (option cluster_size)",
        ));
    }
    Ok(())
}

fn needs_v3(what: &str) -> Refusal {
    (format!("{what} needs compatibility level 1.1 or above"), "leave it out, or use compat=1.1")
}

/// What may go together.
fn check_features(options: &CreateOptions) -> Result<(), Refusal> {
    check_layout(options)?;
    let newer = [
        (options.lazy_refcounts, "lazy_refcounts"),
        (options.extended_l2, "extended_l2"),
        (options.compression != CompressionType::Zlib, "a compression_type other than zlib"),
        (options.data_file.is_some(), "an external data file"),
    ];
    if options.version < 3
        && let Some((_, what)) = newer.iter().find(|(asked, _)| *asked)
    {
        return Err(needs_v3(what));
    }
    if options.data_file_raw && options.data_file.is_none() {
        return Err(("data_file_raw needs data_file".into(), "name the data file"));
    }
    if options.keep_data_file && options.data_file.is_none() {
        return Err((
            "Must not use 'keep_data_file=on' without 'data_file'".into(),
            "name the data file",
        ));
    }
    let shows_all = match options.preallocation {
        Preallocation::Metadata => true,
        Preallocation::Off => options.data_file_raw,
        Preallocation::Falloc | Preallocation::Full => false,
    };
    if options.keep_data_file && !shows_all {
        return Err((
            "'keep_data_file=on' requires 'preallocation=metadata' or 'data_file_raw=on', or the \
             file contents will not be visible"
                .into(),
            "add one of them, without preallocation=falloc or full",
        ));
    }
    if options.data_file_raw && options.backing_file.is_some() {
        return Err((
            "a backing file and data_file_raw cannot be used at the same time".into(),
            "leave one of them out",
        ));
    }
    if options.preallocation != Preallocation::Off
        && options.backing_file.is_some()
        && !options.extended_l2
    {
        return Err((
            "a backing file and preallocation can only be used at the same time with extended_l2"
                .into(),
            "leave one of them out, or add extended_l2",
        ));
    }
    Ok(())
}

fn check_names(options: &CreateOptions) -> Result<(), Refusal> {
    let names = [("backing file", &options.backing_file), ("data file", &options.data_file)];
    for (what, name) in names {
        let Some(name) = name else { continue };
        if name.is_empty() || name.len() > FILE_NAME_BYTES_MAX || name.contains(&0) {
            return Err((
                format!(
                    "the name of the {what} has {} bytes: it must have 1 to \
                     {FILE_NAME_BYTES_MAX} and no NUL",
                    name.len()
                ),
                "use another name, for example one relative to the image",
            ));
        }
    }
    let Some(format) = &options.backing_format else { return Ok(()) };
    if options.backing_file.is_none() {
        return Err((
            "a backing format cannot be used without a backing file".into(),
            "name the backing file",
        ));
    }
    if format.is_empty() || format.len() > FORMAT_BYTES_MAX || format.contains('\0') {
        return Err((
            format!("the backing format '{format}' must have 1 to {FORMAT_BYTES_MAX} bytes"),
            "most backing files are raw or qcow2",
        ));
    }
    Ok(())
}
