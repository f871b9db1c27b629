//! The header: parsed from bytes, every field checked; changed and written in the modules below.
//!
//! Promises: a header that comes out of [`parse`] has sizes within [`limits`](crate::limits),
//! tables that are aligned, inside the file and apart from one another, and no feature that we do
//! not know. Source: qcow2 specification, "Header".

mod image;
#[cfg(test)]
mod tests;
mod write;

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::concurrent::region::Region;
use crate::error::{Error, ErrorKind};
use crate::extensions::{self, Extensions};
use crate::geometry::Geometry;
use crate::info::{CompressionType, FeatureClass, FeatureName};
use crate::limits::{
    CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, FILE_NAME_BYTES_MAX, L1_BYTES_MAX,
    REFCOUNT_TABLE_BYTES_MAX, SNAPSHOT_ENTRY_BYTES_MIN, SNAPSHOTS_MAX,
};
use crate::units::{Bytes, HostOffset};

pub(crate) use image::{HeaderImage, NewHeader};
pub(crate) use write::write_bytes;

/// "QFI\xfb".
const MAGIC: u32 = 0x5146_49fb;
/// Bytes of the header of version 2, and least of version 3.
const LENGTH_V2: u32 = 72;
const LENGTH_V3: u32 = 104;
/// Position of the compression type, present when the header is longer than [`LENGTH_V3`].
const COMPRESSION_TYPE_AT: usize = 104;
/// Incompatible feature bits.
pub(crate) const DIRTY: u64 = 1 << 0;
pub(crate) const CORRUPT: u64 = 1 << 1;
pub(crate) const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
pub(crate) const EXTENDED_L2: u64 = 1 << 4;
const KNOWN_INCOMPATIBLE: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;
/// Compatible feature bits.
pub(crate) const LAZY_REFCOUNTS: u64 = 1 << 0;
/// Autoclear feature bits.
pub(crate) const BITMAPS: u64 = 1 << 0;
pub(crate) const RAW_EXTERNAL: u64 = 1 << 1;
/// The autoclear bits that we keep true. A program clears all others before it changes the image.
pub(crate) const KNOWN_AUTOCLEAR: u64 = BITMAPS | RAW_EXTERNAL;
/// Extended L2 needs subclusters of at least 512 bytes.
pub(crate) const EXTENDED_L2_CLUSTER_BITS_MIN: u32 = 14;

/// Header of version 2, as on disk.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct HeadV2 {
    magic: U32,
    version: U32,
    backing_file_offset: U64,
    backing_file_size: U32,
    cluster_bits: U32,
    size: U64,
    crypt_method: U32,
    l1_size: U32,
    l1_table_offset: U64,
    refcount_table_offset: U64,
    refcount_table_clusters: U32,
    nb_snapshots: U32,
    snapshots_offset: U64,
}

/// What version 3 adds, as on disk.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct HeadV3 {
    incompatible_features: U64,
    compatible_features: U64,
    autoclear_features: U64,
    refcount_order: U32,
    header_length: U32,
}

const _: () = assert!(size_of::<HeadV2>() == LENGTH_V2 as usize);
const _: () = assert!(size_of::<HeadV2>() + size_of::<HeadV3>() == LENGTH_V3 as usize);

/// A header that passed all checks.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) geometry: Geometry,
    pub(crate) header_length: u32,
    pub(crate) refcount_order: u32,
    pub(crate) compression: CompressionType,
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) l1_table: Region,
    pub(crate) l1_entries: u32,
    pub(crate) refcount_table: Region,
    pub(crate) refcount_table_clusters: u32,
    pub(crate) snapshots: u32,
    pub(crate) snapshots_offset: HostOffset,
    pub(crate) backing_file: Option<Vec<u8>>,
    pub(crate) extensions: Extensions,
}

/// Whether `head`, the first bytes of a file, starts like a qcow2 image (of any version).
pub fn is_qcow2(head: &[u8]) -> bool {
    head.starts_with(&MAGIC.to_be_bytes())
}

/// The file that a message is about.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    /// Its name as the user knows it.
    pub(crate) name: &'a str,
    /// Its length in bytes.
    pub(crate) len: Bytes,
}

impl Subject<'_> {
    /// A header field with a value that the specification forbids.
    fn field(&self, field: &str, value: impl std::fmt::Display, rule: &str) -> Error {
        Error::corrupt(self.name, format!("qcow2 header field {field} is {value}: {rule}"))
    }
}

/// Bytes at the start of the file that [`parse`] wants: the first cluster, in which everything
/// that the header names by offset lies. `None` when that is not known yet; `parse` then says
/// why.
pub(crate) fn wanted_bytes(head: &[u8]) -> Option<Bytes> {
    let (v2, _) = HeadV2::read_from_prefix(head).ok()?;
    let cluster_bits = v2.cluster_bits.get();
    (CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits).then(|| Bytes(1 << cluster_bits))
}

/// What a header is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Read,
    /// A corrupt image is refused.
    Write,
    /// What a repair can make right is no reason to stop: no refcount table, a bitmaps extension
    /// that cannot be understood, the mark of a raw data file without a data file.
    Check,
}

/// Parses and checks a header.
///
/// * `head`: the first [`wanted_bytes`] of the file, or all of a shorter file.
/// * `writable`: a corrupt image is refused.
///
/// Errors: every kind but `Io`.
pub(crate) fn parse(head: &[u8], subject: Subject<'_>, writable: bool) -> Result<Header, Error> {
    parse_for(head, subject, if writable { Purpose::Write } else { Purpose::Read })
}

/// As [`parse`], and accepts what a repair can make right.
///
/// Errors: as there.
pub(crate) fn parse_for_check(head: &[u8], subject: Subject<'_>) -> Result<Header, Error> {
    parse_for(head, subject, Purpose::Check)
}

fn parse_for(head: &[u8], subject: Subject<'_>, purpose: Purpose) -> Result<Header, Error> {
    let (v2, v3) = heads(head, subject)?;
    let version = v2.version.get();
    let cluster_bits = v2.cluster_bits.get();
    if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
        return Err(subject.field("cluster_bits", cluster_bits, "must be 9 to 21"));
    }
    refuse_encryption(v2.crypt_method.get(), subject)?;

    let cluster_size = Bytes(1 << cluster_bits);
    let first_cluster = &head[..head.len().min(1 << cluster_bits)];
    let header_length = v3.map_or(LENGTH_V2, |v3| v3.header_length.get());
    check_header_length(header_length, version, first_cluster.len(), subject)?;
    let backing_file = backing_file(&v2, cluster_size, first_cluster, header_length, subject)?;
    let extensions_end = extensions_end(v2.backing_file_offset.get(), first_cluster.len());
    let area = first_cluster.get(header_length as usize..extensions_end).unwrap_or_default();
    let mut extensions = extensions::parse(area, subject.name)?;
    if let Some(reason) = extensions.bitmaps_bad.take_if(|_| purpose != Purpose::Check) {
        return Err(bad_bitmaps(subject.name, reason));
    }

    let incompatible = v3.map_or(0, |v3| v3.incompatible_features.get());
    refuse_unknown_features(incompatible, &extensions.feature_names, subject)?;
    let autoclear = v3.map_or(0, |v3| v3.autoclear_features.get());
    refuse_damage(incompatible, autoclear, subject, purpose)?;
    let extended = incompatible & EXTENDED_L2 != 0;
    if extended && cluster_bits < EXTENDED_L2_CLUSTER_BITS_MIN {
        return Err(subject.field(
            "cluster_bits",
            cluster_bits,
            "must be at least 14 with extended L2 entries",
        ));
    }
    let compression = compression(incompatible, first_cluster, header_length, subject)?;
    let refcount_order = v3.map_or(4, |v3| v3.refcount_order.get());
    if refcount_order > 6 {
        return Err(subject.field("refcount_order", refcount_order, "must be 0 to 6"));
    }

    let size = Bytes(v2.size.get());
    if i64::try_from(size.0).is_err() {
        return Err(subject.field("size", size, "must be below 2^63"));
    }
    let geometry = Geometry::new(size, cluster_bits, extended);
    let l1_table = l1_table(&v2, &geometry, subject)?;
    let refcount_table = refcount_table(&v2, cluster_size, subject, purpose)?;
    if l1_table.start < refcount_table.end && refcount_table.start < l1_table.end {
        return Err(subject.field(
            "l1_table_offset",
            format!("{:#x}", l1_table.start),
            "the L1 table overlaps the refcount table",
        ));
    }
    check_snapshots(&v2, cluster_size, subject)?;
    Ok(Header {
        version,
        geometry,
        header_length,
        refcount_order,
        compression,
        incompatible,
        compatible: v3.map_or(0, |v3| v3.compatible_features.get()),
        autoclear,
        l1_table,
        l1_entries: v2.l1_size.get(),
        refcount_table,
        refcount_table_clusters: v2.refcount_table_clusters.get(),
        snapshots: v2.nb_snapshots.get(),
        snapshots_offset: HostOffset(v2.snapshots_offset.get()),
        backing_file: backing_file.map(|(_, name)| name),
        extensions,
    })
}

/// Where the area of the header extensions ends: before the name of the backing file.
///
/// * `backing_file_offset`: as in the header, checked by [`backing_file`]; 0: there is no name.
/// * `cluster_len`: bytes of the first cluster that are there.
fn extensions_end(backing_file_offset: u64, cluster_len: usize) -> usize {
    match usize::try_from(backing_file_offset) {
        Ok(0) | Err(_) => cluster_len,
        Ok(offset) => offset.min(cluster_len),
    }
}

/// The bitmaps of an image cannot be found; everything else may be sound.
pub(crate) fn bad_bitmaps(file: &str, reason: impl Into<String>) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        file,
        reason,
        "the data is not affected: `ringdisk check --repair all` removes bitmaps that cannot be \
         read",
    )
}

fn truncated(subject: Subject<'_>, what: &str, needed: u64) -> Error {
    Error::corrupt(
        subject.name,
        format!("{what} ends at byte {needed}, but the file has only {} bytes", subject.len),
    )
}

/// The two parts of the header.
///
/// Errors: no qcow2 image; a version that is not known; a shorter file.
fn heads(head: &[u8], subject: Subject<'_>) -> Result<(HeadV2, Option<HeadV3>), Error> {
    if !is_qcow2(head) {
        return Err(Error::new(
            ErrorKind::NotQcow2,
            subject.name,
            "not a qcow2 image: it does not start with the bytes 51 46 49 fb",
            "name the right format (`--format raw` for a plain disk image)",
        ));
    }
    let Ok((v2, after_v2)) = HeadV2::read_from_prefix(head) else {
        return Err(truncated(subject, "the header", u64::from(LENGTH_V2)));
    };
    let version = v2.version.get();
    if !(2..=3).contains(&version) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            subject.name,
            format!("qcow2 header field version is {version}: only 2 and 3 are known"),
            "convert the image with the program that made it",
        ));
    }
    let v3 = if version == 3 { Some(head_v3(after_v2, subject)?) } else { None };
    Ok((v2, v3))
}

/// Errors: feature bits say that the image is damaged, or contradict one another.
fn refuse_damage(
    incompatible: u64,
    autoclear: u64,
    subject: Subject<'_>,
    purpose: Purpose,
) -> Result<(), Error> {
    if purpose == Purpose::Write && incompatible & CORRUPT != 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            subject.name,
            "the image is marked as corrupt (incompatible feature bit 1), so it is not opened for \
             writing",
            "open it read-only to save its data, or repair it with `ringdisk check --repair all`",
        ));
    }
    if autoclear & RAW_EXTERNAL != 0
        && incompatible & EXTERNAL_DATA == 0
        && purpose != Purpose::Check
    {
        return Err(Error::new(
            ErrorKind::Corrupt,
            subject.name,
            "the header says that the data file is a raw image (autoclear feature bit 1), but not \
             that there is a data file (incompatible feature bit 2)",
            "look at it with `ringdisk check`; `--repair all` clears bit 1 where the rest of the \
             image is sound without a data file",
        ));
    }
    Ok(())
}

fn head_v3(after_v2: &[u8], subject: Subject<'_>) -> Result<HeadV3, Error> {
    match HeadV3::read_from_prefix(after_v2) {
        Ok((v3, _)) => Ok(v3),
        Err(_) => Err(truncated(subject, "the header", u64::from(LENGTH_V3))),
    }
}

fn refuse_encryption(method: u32, subject: Subject<'_>) -> Result<(), Error> {
    let name = match method {
        0 => return Ok(()),
        1 => "AES",
        2 => "LUKS",
        _ => "unknown",
    };
    Err(Error::new(
        ErrorKind::Encrypted,
        subject.name,
        format!("the image is encrypted (header field crypt_method is {method}, {name})"),
        "ringdisk cannot decrypt images yet: make a decrypted copy with `qemu-img convert`",
    ))
}

fn check_header_length(
    length: u32,
    version: u32,
    first_cluster: usize,
    subject: Subject<'_>,
) -> Result<(), Error> {
    let fits = length as usize <= first_cluster;
    if version == 3 && (length < LENGTH_V3 || !length.is_multiple_of(8) || !fits) {
        return Err(subject.field(
            "header_length",
            length,
            "must be a multiple of 8, at least 104, and inside the first cluster",
        ));
    }
    Ok(())
}

/// Offset and bytes of the name of the backing file.
fn backing_file(
    v2: &HeadV2,
    cluster_size: Bytes,
    first_cluster: &[u8],
    header_length: u32,
    subject: Subject<'_>,
) -> Result<Option<(usize, Vec<u8>)>, Error> {
    let offset = v2.backing_file_offset.get();
    let len = v2.backing_file_size.get() as usize;
    if offset == 0 {
        return Ok(None);
    }
    // Also without a name: the extensions end there, so that a wrong offset would hide some of
    // them.
    let end = if len == 0 { cluster_size + Bytes(1) } else { cluster_size };
    if offset < u64::from(header_length) || offset >= end.0 {
        return Err(subject.field(
            "backing_file_offset",
            offset,
            "must be behind the header and inside the first cluster",
        ));
    }
    if len == 0 {
        return Ok(None);
    }
    // Below the cluster size.
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    if len > FILE_NAME_BYTES_MAX {
        return Err(subject.field("backing_file_size", len, "must be at most 1023"));
    }
    let Some(name) = start.checked_add(len).and_then(|end| first_cluster.get(start..end)) else {
        return Err(subject.field(
            "backing_file_size",
            len,
            "the name of the backing file must end inside the first cluster and the file",
        ));
    };
    if name.contains(&0) {
        return Err(Error::corrupt(
            subject.name,
            "the name of the backing file has a NUL byte in it",
        ));
    }
    Ok(Some((start, name.to_vec())))
}

fn refuse_unknown_features(
    incompatible: u64,
    names: &[FeatureName],
    subject: Subject<'_>,
) -> Result<(), Error> {
    let unknown = incompatible & !KNOWN_INCOMPATIBLE;
    if unknown == 0 {
        return Ok(());
    }
    let bits: Vec<String> = (0..64u8)
        .filter(|bit| unknown >> bit & 1 != 0)
        .map(|bit| {
            names
                .iter()
                .find(|name| name.class == FeatureClass::Incompatible && name.bit == bit)
                .map_or_else(
                    || format!("bit {bit} (no name recorded)"),
                    |name| format!("'{}' (bit {bit})", name.name),
                )
        })
        .collect();
    Err(Error::new(
        ErrorKind::Unsupported,
        subject.name,
        format!(
            "the image needs incompatible features that ringdisk does not know: {}",
            bits.join(", ")
        ),
        "open it with the program that made it, or make a plain copy there (`qemu-img convert`)",
    ))
}

fn compression(
    incompatible: u64,
    first_cluster: &[u8],
    header_length: u32,
    subject: Subject<'_>,
) -> Result<CompressionType, Error> {
    let recorded = if header_length > LENGTH_V3 {
        first_cluster.get(COMPRESSION_TYPE_AT).copied().unwrap_or(0)
    } else {
        0
    };
    let flagged = incompatible & COMPRESSION_TYPE != 0;
    match (recorded, flagged) {
        (0, false) => Ok(CompressionType::Zlib),
        (1, true) => Ok(CompressionType::Zstd),
        (0 | 1, _) => Err(subject.field(
            "compression_type",
            recorded,
            "it must be other than 0 exactly when incompatible feature bit 3 is set",
        )),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            subject.name,
            format!("compression type {recorded} is not known (0 is zlib, 1 is zstd)"),
            "make a plain copy with the program that made the image (`qemu-img convert`)",
        )),
    }
}

/// Checks a table that the header names: aligned, behind the header. `end` of the result is
/// rounded up to a cluster.
fn table(
    field: &str,
    offset: u64,
    bytes: Bytes,
    cluster_size: Bytes,
    subject: Subject<'_>,
) -> Result<Region, Error> {
    let shown = format!("{offset:#x}");
    let start = HostOffset(offset);
    if !start.is_multiple_of(cluster_size) {
        return Err(subject.field(field, shown, "must be a multiple of the cluster size"));
    }
    if bytes == Bytes::ZERO {
        return Ok(Region::default());
    }
    if start < HostOffset::after(cluster_size) {
        return Err(subject.field(field, shown, "the table overlaps the header"));
    }
    // `bytes` is at most 64 MiB here, so only the offset can overflow.
    let end = start.checked_add(bytes).map(HostOffset::from_start);
    let end = end.and_then(|end| end.checked_next_multiple_of(cluster_size));
    match end {
        Some(end) if i64::try_from(end.0).is_ok() => {
            Ok(Region { start, end: HostOffset::after(end) })
        }
        _ => Err(subject.field(field, shown, "the table ends beyond 2^63")),
    }
}

fn l1_table(v2: &HeadV2, geometry: &Geometry, subject: Subject<'_>) -> Result<Region, Error> {
    let entries = v2.l1_size.get();
    let bytes = Bytes(u64::from(entries) * 8);
    if bytes > L1_BYTES_MAX {
        return Err(Error::too_large(
            subject.name,
            format!(
                "qcow2 header field l1_size is {entries}: an L1 table of {bytes} bytes is over \
                 the limit of {L1_BYTES_MAX}"
            ),
        ));
    }
    let needed = geometry.l1_entries();
    if u64::from(entries) < needed {
        return Err(subject.field(
            "l1_size",
            entries,
            &format!("a disk of {} bytes needs at least {needed} entries", geometry.virtual_size),
        ));
    }
    let offset = v2.l1_table_offset.get();
    let region = table("l1_table_offset", offset, bytes, geometry.cluster_size(), subject)?;
    if (region.start + bytes).from_start() > subject.len {
        return Err(truncated(subject, "the L1 table", (region.start + bytes).0));
    }
    Ok(region)
}

fn refcount_table(
    v2: &HeadV2,
    cluster_size: Bytes,
    subject: Subject<'_>,
    purpose: Purpose,
) -> Result<Region, Error> {
    let clusters = v2.refcount_table_clusters.get();
    let bytes = u64::from(clusters) * cluster_size;
    if clusters == 0 {
        if purpose == Purpose::Check {
            return Ok(Region::default());
        }
        return Err(Error::new(
            ErrorKind::Corrupt,
            subject.name,
            "qcow2 header field refcount_table_clusters is 0: the image has no reference counts",
            "the data is not affected: `ringdisk check --repair all` makes new ones",
        ));
    }
    if bytes > REFCOUNT_TABLE_BYTES_MAX {
        return Err(Error::too_large(
            subject.name,
            format!(
                "qcow2 header field refcount_table_clusters is {clusters}: a table of {bytes} \
                 bytes is over the limit of {REFCOUNT_TABLE_BYTES_MAX}"
            ),
        ));
    }
    let offset = v2.refcount_table_offset.get();
    let region = table("refcount_table_offset", offset, bytes, cluster_size, subject)?;
    if region.start.from_start() >= subject.len {
        return Err(truncated(subject, "the refcount table", region.end.0));
    }
    Ok(region)
}

/// The table itself is read and bounded by [`snapshots`](crate::snapshots).
fn check_snapshots(v2: &HeadV2, cluster_size: Bytes, subject: Subject<'_>) -> Result<(), Error> {
    let count = v2.nb_snapshots.get();
    if count > SNAPSHOTS_MAX {
        return Err(Error::too_large(
            subject.name,
            format!(
                "qcow2 header field nb_snapshots is {count}: more than the limit of \
                 {SNAPSHOTS_MAX}"
            ),
        ));
    }
    let bytes = u64::from(count) * Bytes::of(SNAPSHOT_ENTRY_BYTES_MIN);
    let offset = v2.snapshots_offset.get();
    let region = table("snapshots_offset", offset, bytes, cluster_size, subject)?;
    if (region.start + bytes).from_start() > subject.len {
        return Err(truncated(subject, "the snapshot table", (region.start + bytes).0));
    }
    Ok(())
}
