//! Opens an image: reads the header, the directories and the L1 table.
//!
//! Promises: every size that the image names is bounded before memory is asked for it; names of a
//! backing file or data file are not followed.

mod writable;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::bitmaps;
use crate::check;
use crate::compressed::Decompressor;
use crate::concurrent::loads_in_flight::Flights;
use crate::concurrent::region::Region;
use crate::concurrent::slices::SliceCache;
use crate::engine::{OpenOptions, Qcow2};
use crate::entry::Rules;
use crate::error::{Error, ErrorKind};
use crate::header::{self, Header, Subject};
use crate::info::{Bitmap, Info, Snapshot};
use crate::limits::METADATA_CACHE_BYTES;
use crate::snapshots;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, zeroed_words};
use crate::table;
use crate::units::{Bytes, HostOffset};

/// Bytes that are read first: enough for the whole first cluster in most images.
const FIRST_READ_BYTES: Bytes = Bytes(64 << 10);
/// Piece in which the L1 table is read.
const L1_PIECE_BYTES: usize = 1 << 20;

impl Qcow2 {
    /// Opens the image in `file`. Reads the header, the snapshot table, the bitmap directory and
    /// the L1 table; does not follow the names of a backing file or data file.
    ///
    /// Errors: every kind of [`ErrorKind`]; the message names the file, the field and its value.
    pub async fn open(
        ring: &Ring,
        file: Arc<Storage>,
        options: &OpenOptions,
    ) -> Result<Qcow2, Error> {
        let writable = options.writable && !options.header_only && options.snapshot.is_none();
        let mut header = read_header(ring, &file, writable).await?;
        if writable && header.incompatible & header::DIRTY != 0 {
            check::rebuild_refcounts(ring, &file, &header).await?;
            header = read_header(ring, &file, true).await?;
        }
        let (snapshots, snapshot_region, bitmaps, l1) = if options.header_only {
            (Vec::new(), Region::default(), Vec::new(), Box::default())
        } else {
            let (snapshots, region) = snapshots::read(ring, &file, &header).await?;
            let bitmaps = match &options.snapshot {
                None => bitmaps::read(ring, &file, &header).await?,
                Some(choice) => {
                    choice.look_into(&mut header, &snapshots, &file)?;
                    Vec::new()
                }
            };
            (snapshots, region, bitmaps, read_l1(ring, &file, &header).await?)
        };

        let geometry = header.geometry;
        let external = header.incompatible & header::EXTERNAL_DATA != 0;
        let metadata = [header.l1_table, header.refcount_table, snapshot_region];
        let cap = options.metadata_cache_bytes.unwrap_or(METADATA_CACHE_BYTES);
        let slices = geometry
            .slices()
            .and_then(|slices| SliceCache::new(slices, geometry.slice_words(), cap))
            .ok_or_else(|| no_memory(&file, "the metadata cache"))?;
        let cluster_size = 1usize << geometry.cluster_bits;
        let engine = if writable {
            let found = Found {
                header: &header,
                l1: &l1,
                snapshots: &snapshots,
                snapshot_region,
                bitmaps: &bitmaps,
            };
            Some(Box::new(writable::engine(ring, &file, options, found).await?))
        } else {
            None
        };
        Ok(Qcow2 {
            rules: Rules::new(&geometry, header.version, external, metadata),
            decompressor: Decompressor::new(header.compression, cluster_size),
            info: info(header, snapshots, bitmaps),
            file,
            data_file: None,
            geometry,
            l1,
            slices,
            loads: Flights::new(),
            engine,
            named: Mutex::default(),
            options: options.clone(),
        })
    }
}

/// What the open has read.
struct Found<'a> {
    header: &'a Header,
    l1: &'a [AtomicU64],
    snapshots: &'a [Snapshot],
    snapshot_region: Region,
    bitmaps: &'a [Bitmap],
}

fn no_memory(file: &Storage, what: &str) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        file.name(),
        format!("there is not enough memory for {what}"),
        "lower the cap of the metadata cache, or give the process more memory",
    )
}

async fn read_header(ring: &Ring, file: &Storage, writable: bool) -> Result<Header, Error> {
    let mut head = read_start(ring, file, FIRST_READ_BYTES).await?;
    let wanted = header::wanted_bytes(&head).filter(|_| header::is_qcow2(&head));
    if let Some(wanted) = wanted
        && wanted > FIRST_READ_BYTES
    {
        head = read_start(ring, file, wanted).await?;
    }
    header::parse(&head, Subject { name: file.name(), len: Bytes(file.len()) }, writable)
}

/// The first `len` bytes of the file, or all of it.
async fn read_start(ring: &Ring, file: &Storage, len: Bytes) -> Result<Vec<u8>, Error> {
    // At most 2 MiB, the largest cluster.
    let len = usize::try_from(len.min(Bytes(file.len()))).unwrap_or(0);
    table::read(ring, file, HostOffset(0), len, "the qcow2 header").await
}

/// The L1 table, as far as the disk needs it.
async fn read_l1(ring: &Ring, file: &Storage, header: &Header) -> Result<Box<[AtomicU64]>, Error> {
    // At most 2^22: checked against the limit in the header.
    let entries = usize::try_from(header.geometry.l1_entries()).unwrap_or(0);
    // The table of a snapshot may be shorter than its disk: the rest is not allocated.
    let held = entries.min(header.l1_entries as usize);
    let l1 = zeroed_words(entries).ok_or_else(|| no_memory(file, "the L1 table"))?;
    let buf = IoBuf::new(L1_PIECE_BYTES.min((entries * 8).next_multiple_of(4096).max(4096)), 4096);
    let mut bytes = vec![0; buf.len()];
    let mut offset = header.l1_table.start;
    for piece in l1[..held].chunks(buf.len() / 8) {
        let len = piece.len() * 8;
        let target = buf.slice(0..len);
        let done = file
            .read(ring, offset.0, &target)
            .await
            .map_err(|errno| Error::io(file.name(), "reading the L1 table", errno))?;
        if done < len {
            return Err(Error::corrupt(file.name(), "the file ends inside the L1 table"));
        }
        target.copy_to_slice(0, &mut bytes[..len]);
        for (entry, raw) in piece.iter().zip(bytes.as_chunks::<8>().0) {
            let value = u64::from_be_bytes(*raw);
            // Untouched pages of an empty table take no memory.
            if value != 0 {
                entry.store(value, Ordering::Relaxed);
            }
        }
        offset += Bytes::of(len);
    }
    Ok(l1)
}

fn info(header: Header, snapshots: Vec<Snapshot>, bitmaps: Vec<Bitmap>) -> Info {
    let has = |bit: u64| header.incompatible & bit != 0;
    let external_data_file = has(header::EXTERNAL_DATA);
    Info {
        version: header.version,
        cluster_bits: header.geometry.cluster_bits,
        virtual_size: header.geometry.virtual_size,
        refcount_bits: 1 << header.refcount_order,
        header_length: header.header_length,
        backing_file: header.backing_file,
        backing_format: header.extensions.backing_format,
        external_data_file,
        data_file: header.extensions.data_file.filter(|_| external_data_file),
        data_file_raw: external_data_file && header.autoclear & header::RAW_EXTERNAL != 0,
        compression: header.compression,
        extended_l2: has(header::EXTENDED_L2),
        lazy_refcounts: header.compatible & header::LAZY_REFCOUNTS != 0,
        dirty: has(header::DIRTY),
        corrupt: has(header::CORRUPT),
        incompatible_features: header.incompatible,
        compatible_features: header.compatible,
        autoclear_features: header.autoclear,
        feature_names: header.extensions.feature_names,
        snapshots,
        bitmaps,
        unknown_extensions: header.extensions.unknown,
        l1_entries: header.l1_entries,
        l1_table_offset: header.l1_table.start,
        refcount_table_offset: header.refcount_table.start,
        refcount_table_clusters: header.refcount_table_clusters,
    }
}
