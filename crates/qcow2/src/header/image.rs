//! The header as bytes: read, changed field by field, and laid out again when an extension or a
//! name changes.
//!
//! Promises: what is not changed stays byte for byte, unknown extensions included. Setters change
//! memory only; [`write_first_sector`](HeaderImage::write_first_sector) and
//! [`write_all`](HeaderImage::write_all) (module `write`) bring it to the file. Source: qcow2
//! specification, "Header" and "Header extensions".

use std::ops::Range;

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use super::{LENGTH_V2, MAGIC, Subject};
use crate::error::{Error, ErrorKind};
use crate::extensions::{
    self, BACKING_FORMAT, BITMAPS, BitmapDirectory, DATA_FILE, FEATURE_NAMES, FILLER, u32_at,
    u64_at,
};
use crate::info::{CompressionType, FeatureClass};
use crate::limits::SECTOR_LEN;
use crate::table;
use crate::units::{Bytes, HostOffset};

/// Bytes that are read first: enough for the first cluster of most images.
const FIRST_READ_BYTES: Bytes = Bytes(64 << 10);
/// Length of the headers that we make: with the compression type, and padded.
const LENGTH_NEW: u32 = 112;
/// Images with clusters up to this size get no feature names: they would leave no room for names of
/// files.
const NO_FEATURE_NAMES_CLUSTER_BITS: u32 = 12;

/// Positions of the fields.
pub(super) const BACKING_FILE_AT: usize = 8;
const BACKING_FILE_LEN_AT: usize = 16;
const CLUSTER_BITS_AT: usize = 20;
const SIZE_AT: usize = 24;
const L1_ENTRIES_AT: usize = 36;
const L1_OFFSET_AT: usize = 40;
const REFCOUNT_TABLE_AT: usize = 48;
const REFCOUNT_TABLE_CLUSTERS_AT: usize = 56;
const SNAPSHOTS_AT: usize = 60;
const SNAPSHOTS_OFFSET_AT: usize = 64;
const INCOMPATIBLE_AT: usize = 72;
const COMPATIBLE_AT: usize = 80;
const AUTOCLEAR_AT: usize = 88;
const REFCOUNT_ORDER_AT: usize = 96;
const HEADER_LENGTH_AT: usize = 100;
const COMPRESSION_AT: usize = 104;

/// Names of the feature bits that we know, as QEMU writes them.
const NAMES: [(FeatureClass, u8, &str); 8] = [
    (FeatureClass::Incompatible, 0, "dirty bit"),
    (FeatureClass::Incompatible, 1, "corrupt bit"),
    (FeatureClass::Incompatible, 2, "external data file"),
    (FeatureClass::Incompatible, 3, "compression type"),
    (FeatureClass::Incompatible, 4, "extended L2 entries"),
    (FeatureClass::Compatible, 0, "lazy refcounts"),
    (FeatureClass::Autoclear, 0, "bitmaps"),
    (FeatureClass::Autoclear, 1, "raw external data"),
];

/// What never changes in the life of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewHeader<'a> {
    /// Name of the file, for messages.
    pub(crate) file: &'a str,
    /// 2 or 3.
    pub(crate) version: u32,
    /// 9 to 21.
    pub(crate) cluster_bits: u32,
    /// 0 to 6; 4 in version 2.
    pub(crate) refcount_order: u32,
    /// Zlib in version 2.
    pub(crate) compression: CompressionType,
}

/// One extension: type and content.
pub(super) type Extension = (u32, Vec<u8>);

/// The header, its extensions and the name of the backing file.
#[derive(Clone, Debug)]
pub(crate) struct HeaderImage {
    /// Name of the image file.
    file: String,
    /// The first cluster as far as it is used, rounded up to [`SECTOR_LEN`].
    pub(super) bytes: Vec<u8>,
    pub(super) extensions: Vec<Extension>,
    /// Where the extensions lie, end mark included.
    pub(super) chain: Range<usize>,
    pub(super) backing_file: Option<Vec<u8>>,
    /// Extensions or names behind the first sector changed since the header was read.
    pub(super) laid_out: bool,
}

impl HeaderImage {
    /// Reads the header of `file` and checks it like a check does: what a repair can make right is
    /// accepted.
    ///
    /// Errors: those of [`parse_for_check`](super::parse_for_check), and `Io`.
    pub(crate) async fn read(ring: &Ring, file: &Storage) -> Result<HeaderImage, Error> {
        let mut head = start_of(ring, file, FIRST_READ_BYTES).await?;
        let wanted = super::wanted_bytes(&head).filter(|_| super::is_qcow2(&head));
        if let Some(wanted) = wanted
            && wanted > FIRST_READ_BYTES
        {
            head = start_of(ring, file, wanted).await?;
        }
        HeaderImage::parse(&head, Subject { name: file.name(), len: Bytes(file.len()) })
    }

    /// Takes the first cluster (all of a shorter file).
    ///
    /// Errors: those of [`parse_for_check`](super::parse_for_check).
    pub(crate) fn parse(head: &[u8], subject: Subject<'_>) -> Result<HeaderImage, Error> {
        let header = super::parse_for_check(head, subject)?;
        let cluster = &head[..head.len().min(1 << header.geometry.cluster_bits)];
        // `parse` found both inside the cluster.
        let name_at = usize::try_from(u64_at(head, BACKING_FILE_AT)).unwrap_or(0);
        let name = header.backing_file.as_ref().map(|name| name_at..name_at + name.len());
        let start = header.header_length as usize;
        let end = super::extensions_end(u64_at(head, BACKING_FILE_AT), cluster.len());
        let (extensions, chain_len) = extensions::raw(cluster.get(start..end).unwrap_or_default());
        let chain = start..start + chain_len;
        let used = name.map_or(chain.end, |name| name.end.max(chain.end));
        let mut bytes = cluster[..used.min(cluster.len())].to_vec();
        bytes.resize(used.next_multiple_of(SECTOR_LEN), 0);
        // What the sector holds behind the used part stays too.
        let keep = bytes.len().min(cluster.len());
        bytes[used..keep].copy_from_slice(&cluster[used..keep]);
        Ok(HeaderImage {
            file: subject.name.to_owned(),
            bytes,
            extensions,
            chain,
            backing_file: header.backing_file,
            laid_out: false,
        })
    }

    /// A header without tables, features and names, except for the feature names that QEMU writes.
    pub(crate) fn new(new: &NewHeader<'_>) -> HeaderImage {
        let length = if new.version == 2 { LENGTH_V2 } else { LENGTH_NEW };
        let mut header = HeaderImage {
            file: new.file.to_owned(),
            bytes: vec![0; SECTOR_LEN],
            extensions: Vec::new(),
            chain: length as usize..length as usize,
            backing_file: None,
            laid_out: true,
        };
        header.put_u32(0, MAGIC);
        header.put_u32(4, new.version);
        header.put_u32(CLUSTER_BITS_AT, new.cluster_bits);
        if new.version >= 3 {
            header.put_u32(REFCOUNT_ORDER_AT, new.refcount_order);
            header.put_u32(HEADER_LENGTH_AT, length);
            header.bytes[COMPRESSION_AT] = u8::from(new.compression == CompressionType::Zstd);
            if new.compression == CompressionType::Zstd {
                header.set_incompatible(super::COMPRESSION_TYPE);
            }
            if new.cluster_bits > NO_FEATURE_NAMES_CLUSTER_BITS {
                header.extensions.push((FEATURE_NAMES, feature_names()));
            }
        }
        // The names need 512 bytes of a cluster of at least 8192.
        if let Some(bytes) = header.arrange(&header.extensions) {
            header.adopt(bytes);
        }
        header
    }

    /// The header parsed and checked again, as it would be after a write.
    ///
    /// * `len`: length of the file in bytes.
    ///
    /// Errors: those of [`parse`](super::parse).
    #[cfg(test)]
    pub(crate) fn header(&self, len: Bytes, writable: bool) -> Result<super::Header, Error> {
        super::parse(&self.bytes, Subject { name: &self.file, len }, writable)
    }

    pub(crate) fn version(&self) -> u32 {
        u32_at(&self.bytes, 4)
    }

    pub(crate) fn cluster_bits(&self) -> u32 {
        u32_at(&self.bytes, CLUSTER_BITS_AT)
    }

    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> Bytes {
        Bytes(u64_at(&self.bytes, SIZE_AT))
    }

    pub(crate) fn set_size(&mut self, bytes: Bytes) {
        self.put_u64(SIZE_AT, bytes.0);
    }

    /// Host offset and entries of the active L1 table.
    pub(crate) fn l1_table(&self) -> (HostOffset, u32) {
        (HostOffset(u64_at(&self.bytes, L1_OFFSET_AT)), u32_at(&self.bytes, L1_ENTRIES_AT))
    }

    pub(crate) fn set_l1_table(&mut self, offset: HostOffset, entries: u32) {
        self.put_u64(L1_OFFSET_AT, offset.0);
        self.put_u32(L1_ENTRIES_AT, entries);
    }

    /// Host offset and clusters of the refcount table.
    pub(crate) fn refcount_table(&self) -> (HostOffset, u32) {
        let clusters = u32_at(&self.bytes, REFCOUNT_TABLE_CLUSTERS_AT);
        (HostOffset(u64_at(&self.bytes, REFCOUNT_TABLE_AT)), clusters)
    }

    pub(crate) fn set_refcount_table(&mut self, offset: HostOffset, clusters: u32) {
        self.put_u64(REFCOUNT_TABLE_AT, offset.0);
        self.put_u32(REFCOUNT_TABLE_CLUSTERS_AT, clusters);
    }

    /// Host offset of the snapshot table and number of snapshots.
    pub(crate) fn snapshots(&self) -> (HostOffset, u32) {
        (HostOffset(u64_at(&self.bytes, SNAPSHOTS_OFFSET_AT)), u32_at(&self.bytes, SNAPSHOTS_AT))
    }

    pub(crate) fn set_snapshots(&mut self, offset: HostOffset, count: u32) {
        self.put_u64(SNAPSHOTS_OFFSET_AT, offset.0);
        self.put_u32(SNAPSHOTS_AT, count);
    }

    /// The feature bits; 0 in version 2, where setting them does nothing.
    pub(crate) fn incompatible(&self) -> u64 {
        self.bits(INCOMPATIBLE_AT)
    }

    pub(crate) fn set_incompatible(&mut self, bits: u64) {
        self.set_bits(INCOMPATIBLE_AT, bits);
    }

    pub(crate) fn set_compatible(&mut self, bits: u64) {
        self.set_bits(COMPATIBLE_AT, bits);
    }

    pub(crate) fn autoclear(&self) -> u64 {
        self.bits(AUTOCLEAR_AT)
    }

    pub(crate) fn set_autoclear(&mut self, bits: u64) {
        self.set_bits(AUTOCLEAR_AT, bits);
    }

    /// Name of the backing file.
    pub(crate) fn backing_file(&self) -> Option<&[u8]> {
        self.backing_file.as_deref()
    }

    /// Sets or removes the name of the backing file and its format.
    ///
    /// Errors: `InvalidRequest` when the first cluster has no room; nothing changed then.
    pub(crate) fn set_backing_file(
        &mut self,
        name: Option<&[u8]>,
        format: Option<&str>,
    ) -> Result<(), Error> {
        let old = std::mem::replace(&mut self.backing_file, name.map(<[u8]>::to_vec));
        let format = format.filter(|_| name.is_some()).map(|format| format.as_bytes().to_vec());
        let done = self.set_extension(BACKING_FORMAT, format);
        if done.is_err() {
            self.backing_file = old;
        }
        done
    }

    /// Sets or removes the name of the external data file. Errors: as
    /// [`set_backing_file`](HeaderImage::set_backing_file).
    pub(crate) fn set_data_file(&mut self, name: Option<&[u8]>) -> Result<(), Error> {
        self.set_extension(DATA_FILE, name.map(<[u8]>::to_vec))
    }

    /// Where the bitmap directory lies. The autoclear bit says whether it may be believed.
    pub(crate) fn bitmaps(&self) -> Option<BitmapDirectory> {
        let (_, data) = self.extensions.iter().find(|(kind, _)| *kind == BITMAPS)?;
        BitmapDirectory::parse(data)
    }

    /// Sets or removes the bitmaps extension; the autoclear bit is the caller's. Errors: as
    /// [`set_backing_file`](HeaderImage::set_backing_file).
    pub(crate) fn set_bitmaps(&mut self, directory: Option<BitmapDirectory>) -> Result<(), Error> {
        self.set_extension(BITMAPS, directory.map(|directory| directory.to_bytes().to_vec()))
    }

    /// Replaces, adds or removes one extension and lays everything out again.
    fn set_extension(&mut self, kind: u32, data: Option<Vec<u8>>) -> Result<(), Error> {
        let mut extensions = self.extensions.clone();
        let place = extensions.iter().position(|(other, _)| *other == kind);
        match (data, place) {
            (Some(data), Some(place)) => extensions[place].1 = data,
            // In front, where later changes stay inside the first sector.
            (Some(data), None) => extensions.insert(0, (kind, data)),
            (None, Some(place)) => drop(extensions.remove(place)),
            (None, None) => {}
        }
        extensions.retain(|(kind, _)| *kind != FILLER);
        let mut arranged = self.arrange(&extensions);
        if arranged.is_none() {
            // The names of feature bits are there for people only.
            extensions.retain(|(kind, _)| *kind != FEATURE_NAMES);
            arranged = self.arrange(&extensions);
        }
        let Some(bytes) = arranged else {
            return Err(Error::new(
                ErrorKind::InvalidRequest,
                &self.file,
                "the first cluster has no room for the names and extensions of the header",
                "use a shorter name, or an image with larger clusters",
            ));
        };
        self.extensions = extensions;
        self.adopt(bytes);
        Ok(())
    }

    /// The header with `extensions` and the name behind it. `None`: they do not fit.
    fn arrange(&self, extensions: &[Extension]) -> Option<Vec<u8>> {
        let mut bytes = self.bytes[..self.chain.start].to_vec();
        bytes.extend(chain(extensions));
        let name = self.backing_file.as_deref().unwrap_or_default();
        let place = if name.is_empty() { 0 } else { bytes.len() };
        bytes.extend_from_slice(name);
        put_name(&mut bytes, place, name.len());
        if bytes.len() > 1 << self.cluster_bits() {
            return None;
        }
        bytes.resize(bytes.len().next_multiple_of(SECTOR_LEN), 0);
        Some(bytes)
    }

    fn adopt(&mut self, bytes: Vec<u8>) {
        self.chain.end = self.chain.start + chain(&self.extensions).len();
        // A change inside the first sector is written like any other field.
        self.laid_out |= self.bytes[SECTOR_LEN..] != bytes[SECTOR_LEN..];
        self.bytes = bytes;
    }

    /// Where the name of the backing file lies.
    pub(super) fn name(&self) -> Range<usize> {
        let start = usize::try_from(u64_at(&self.bytes, BACKING_FILE_AT)).unwrap_or(0);
        start..start + self.backing_file.as_ref().map_or(0, Vec::len)
    }

    fn bits(&self, at: usize) -> u64 {
        if self.version() >= 3 { u64_at(&self.bytes, at) } else { 0 }
    }

    fn set_bits(&mut self, at: usize, bits: u64) {
        if self.version() >= 3 {
            self.put_u64(at, bits);
        }
    }

    fn put_u32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    fn put_u64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }
}

/// The extensions as bytes, each padded to 8, with the end mark.
pub(super) fn chain(extensions: &[Extension]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, data) in extensions {
        bytes.extend_from_slice(&kind.to_be_bytes());
        // Inside one cluster, or it does not fit anyway.
        bytes.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes.extend_from_slice(&[0; 8]);
    bytes
}

/// Sets offset and length of the name of the backing file.
pub(super) fn put_name(bytes: &mut [u8], at: usize, len: usize) {
    bytes[BACKING_FILE_AT..BACKING_FILE_LEN_AT].copy_from_slice(&(at as u64).to_be_bytes());
    // At most 1023: longer ones do not pass the callers.
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    bytes[BACKING_FILE_LEN_AT..BACKING_FILE_LEN_AT + 4].copy_from_slice(&len.to_be_bytes());
}

fn feature_names() -> Vec<u8> {
    let mut table = Vec::new();
    for (class, bit, name) in NAMES {
        let class = match class {
            FeatureClass::Incompatible => 0,
            FeatureClass::Compatible => 1,
            FeatureClass::Autoclear => 2,
        };
        table.extend_from_slice(&[class, bit]);
        table.extend_from_slice(name.as_bytes());
        table.resize(table.len().next_multiple_of(extensions::FEATURE_NAME_BYTES), 0);
    }
    table
}

/// The first `len` bytes of the file, or all of it.
async fn start_of(ring: &Ring, file: &Storage, len: Bytes) -> Result<Vec<u8>, Error> {
    // At most 2 MiB, the largest cluster.
    let len = usize::try_from(len.min(Bytes(file.len()))).unwrap_or(0);
    table::read(ring, file, HostOffset(0), len, "the qcow2 header").await
}
