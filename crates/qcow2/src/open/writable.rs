//! Opens an image for writing: reads the refcount table, marks metadata, loads bitmaps that record.
//!
//! Promises: writes nothing; all metadata is marked before the first cluster is allocated.

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use super::Found;
use crate::bitmaps::Recording;
use crate::engine::OpenOptions;
use crate::engine::{Engine, EngineOptions};
use crate::entry::{COPIED, OFFSET_MASK};
use crate::error::Error;
use crate::header::{HeaderImage, LAZY_REFCOUNTS};
use crate::refcounts::{RefcountParts, Refcounts};
use crate::sync::Ordering;
use crate::table;
use crate::units::{Bytes, HostOffset};

/// Bits 0 to 8 of a refcount table entry, which are reserved.
const TABLE_RESERVED: u64 = 0x1ff;

/// Makes the engine of a writable image.
///
/// Errors: `Corrupt` for a refcount table that cannot be right; `Io`.
pub(super) async fn engine(
    ring: &Ring,
    file: &Storage,
    options: &OpenOptions,
    found: Found<'_>,
) -> Result<Engine, Error> {
    let header = found.header;
    let bits = header.geometry.cluster_bits;
    let table = refcount_table(ring, file, &found).await?;
    let grows = crate::engine::grows_with_zeroes(file);
    let mut refcounts = Refcounts::new(RefcountParts {
        cluster_bits: bits,
        refcount_order: header.refcount_order,
        table: table.clone(),
        table_offset: header.refcount_table.start,
        table_clusters: u64::from(header.refcount_table_clusters),
        file_len: Bytes(file.len()),
        can_grow: grows,
        reads_zero_past_end: grows,
        disk_clusters: header.geometry.virtual_size.div_ceil(header.geometry.cluster_size()),
    });
    let overlap = mark_metadata(&mut refcounts, &found, &table);
    let image = HeaderImage::read(ring, file).await?;
    let recording = Recording::load(ring, file, header, found.bitmaps).await?;
    let lazy = options.lazy_refcounts.unwrap_or(header.compatible & LAZY_REFCOUNTS != 0);
    let options = EngineOptions {
        discard: options.discard,
        discard_no_unref: options.discard_no_unref,
        lazy_refcounts: lazy && header.version >= 3,
    };
    Ok(Engine::new(file, refcounts, image, recording, options, overlap))
}

/// Reads the refcount table and checks its entries.
async fn refcount_table(
    ring: &Ring,
    file: &Storage,
    found: &Found<'_>,
) -> Result<Vec<HostOffset>, Error> {
    let region = found.header.refcount_table;
    // At most 8 MiB: checked in the header.
    let len = usize::try_from(region.len()).unwrap_or(0);
    let bytes = table::read(ring, file, region.start, len, "the refcount table").await?;
    let mut entries: Vec<HostOffset> =
        table::words_of(&bytes).into_iter().map(HostOffset).collect();
    entries.resize(len / 8, HostOffset(0));
    let cluster_size = found.header.geometry.cluster_size();
    for (index, entry) in entries.iter().enumerate() {
        if *entry == HostOffset(0) {
            continue;
        }
        let bad = entry.0 & TABLE_RESERVED != 0 || !entry.is_multiple_of(cluster_size);
        if bad || entry.0 >= file.len() {
            return Err(Error::corrupt(
                file.name(),
                format!(
                    "entry {index} of the refcount table is {entry:#x}: unaligned or past the \
                     end of the file"
                ),
            ));
        }
    }
    let mut sorted: Vec<HostOffset> =
        entries.iter().copied().filter(|entry| *entry != HostOffset(0)).collect();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::corrupt(
            file.name(),
            format!("two entries of the refcount table name the block at {:#x}", pair[0]),
        ));
    }
    Ok(entries)
}

/// Tells the allocator what it must never hand out. The answer says where two things lie on one
/// another.
fn mark_metadata(
    refcounts: &mut Refcounts,
    found: &Found<'_>,
    blocks: &[HostOffset],
) -> Option<String> {
    let header = found.header;
    let bits = header.geometry.cluster_bits;
    let cluster_size = header.geometry.cluster_size();
    let mut overlap = None;
    for block in blocks.iter().filter(|block| **block != HostOffset(0)) {
        let (start, end) = (header.l1_table.start, header.l1_table.end);
        if *block < end && *block + cluster_size > start {
            overlap = Some(format!("the refcount block at {block:#x} lies on the L1 table"));
        }
    }
    let mut mark = |refcounts: &mut Refcounts, start: HostOffset, len: Bytes, what: &str| {
        let (first, count) = (start >> bits, len.div_ceil(cluster_size));
        if count > 0 {
            if let Some(cluster) = refcounts.first_metadata(first, count) {
                overlap.get_or_insert_with(|| {
                    format!("{what} at {start:#x} lies on other metadata at {:#x}", cluster << bits)
                });
            }
            refcounts.mark_metadata(first, count);
        }
    };
    mark(refcounts, header.l1_table.start, Bytes(u64::from(header.l1_entries) * 8), "the L1 table");
    if let Some(directory) = &header.extensions.bitmaps {
        mark(refcounts, directory.offset, directory.len, "the bitmap directory");
    }
    for snapshot in found.snapshots {
        let len = Bytes(u64::from(snapshot.l1_entries) * 8);
        mark(refcounts, snapshot.l1_table_offset, len, "the L1 table of a snapshot");
    }
    let region = found.snapshot_region;
    mark(refcounts, region.start, region.len(), "the snapshot table");
    // Entries of several parts of the disk may name one table, if none of them says that it is its
    // own: it is copied before it changes.
    let entries = found.l1.iter().map(|entry| entry.load(Ordering::Relaxed));
    let mut tables: Vec<u64> = entries
        .filter(|entry| {
            let table = entry & OFFSET_MASK;
            table != 0 && table.is_multiple_of(cluster_size.0)
        })
        .map(|entry| entry & (OFFSET_MASK | COPIED))
        .collect();
    tables.sort_unstable_by_key(|entry| (entry & OFFSET_MASK, entry & COPIED));
    // Once each where no entry for it has the flag.
    tables.dedup_by(|next, first| next == first && *next & COPIED == 0);
    for entry in tables {
        mark(refcounts, HostOffset(entry & OFFSET_MASK), cluster_size, "an L2 table");
    }
    overlap
}
