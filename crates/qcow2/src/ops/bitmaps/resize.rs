//! Persistent bitmaps when the size of the disk changes: as many bits as the disk now needs, new
//! ones set; and when metadata moves to the front of the file.
//!
//! Promises: no change is forgotten. New bits are set, since the disk may have been larger before,
//! when the backup was made that the bitmap belongs to: what was cut off then reads as zeroes now,
//! and that is a change. A backup that copies by the bitmap copies some zeroes too many where the
//! disk was never larger.
//!
//! Source: qcow2 specification, "Bitmaps".

use std::collections::HashSet;

use crate::bitmaps::directory::{self, Entry};
use crate::bitmaps::tables;
use crate::entry::OFFSET_MASK;
use crate::error::{Error, ErrorKind};
use crate::extensions::BitmapDirectory;
use crate::header::BITMAPS;
use crate::limits::{BITMAP_BYTES_MAX, RECORDED_BITMAPS_BYTES_MAX};
use crate::refcounts::Run;
use crate::table::{bytes_of, words_of};
use crate::units::{Bytes, HostCluster, HostOffset};

use super::super::cluster_kind::ClusterKind;
use super::super::transaction::Transaction;

/// A table entry: no cluster, all bits are set.
const ALL_SET: u64 = 1;

/// Resizes all bitmaps of the image from a disk of `old` bytes to one of `new` bytes.
///
/// Errors: `Corrupt`; `InvalidRequest` when a bitmap would be too large.
pub(in crate::ops) async fn resize(
    tx: &mut Transaction<'_>,
    old: Bytes,
    new: Bytes,
) -> Result<(), Error> {
    let Some(directory) = directory_of(tx) else { return Ok(()) };
    let cluster_size = tx.geometry.cluster_size();
    let mut entries = directory::read(tx.ring, &tx.file, directory, cluster_size).await?;
    check_room(tx, &entries, old, new)?;
    let mut changed = false;
    for entry in &mut entries {
        changed |= resize_one(tx, entry, old, new).await?;
    }
    if changed {
        put_directory(tx, &entries, directory).await?;
    }
    Ok(())
}

/// The directory, where the image says that it may be believed.
fn directory_of(tx: &Transaction<'_>) -> Option<BitmapDirectory> {
    let valid = tx.header.autoclear() & BITMAPS != 0;
    tx.header.bitmaps().filter(|directory| valid && directory.count > 0)
}

/// Calls `found` with the clusters that bitmaps have: directory, tables, bits. A bitmap that cannot
/// be read is left out: it has nothing to lose. Tables do not overlap, so no more bytes of them are
/// read than the file has.
///
/// Returns whether all were read. Errors: `Io`; those of `found`.
pub(in crate::ops) async fn walk<'a>(
    tx: &mut Transaction<'a>,
    mut found: impl FnMut(&mut Transaction<'a>, ClusterKind, Run) -> Result<(), Error>,
) -> Result<bool, Error> {
    let Some(directory) = directory_of(tx) else { return Ok(true) };
    let own = tx.clusters_of(directory.offset, directory.len);
    found(tx, ClusterKind::Table, own)?;
    let cluster_size = tx.geometry.cluster_size();
    let entries = match directory::read(tx.ring, &tx.file, directory, cluster_size).await {
        Err(error) if error.kind() == ErrorKind::Io => return Err(error),
        Err(_) => return Ok(false),
        Ok(entries) => entries,
    };
    let (mut seen, mut left, mut all) = (HashSet::new(), Bytes(tx.file.len()), true);
    for entry in &entries {
        if !seen.insert((entry.table_offset, entry.table_entries)) {
            continue;
        }
        let len = Bytes(u64::from(entry.table_entries) * 8);
        let Some(rest) = left.checked_sub(len) else {
            all = false;
            continue;
        };
        left = rest;
        let table = match table_of(tx, entry).await {
            Err(error) if error.kind() == ErrorKind::Io => return Err(error),
            Err(_) => {
                all = false;
                continue;
            }
            Ok(table) => table,
        };
        let run = tx.clusters_of(entry.table_offset, len);
        found(tx, ClusterKind::Table, run)?;
        for word in table {
            if let Some(start) = cluster_of(tx, word) {
                found(tx, ClusterKind::Data, Run::new(start, 1))?;
            }
        }
    }
    Ok(all)
}

/// Gives what bitmaps have at or behind the cluster `end` new places.
///
/// Errors: `Corrupt`, `Io`.
pub(in crate::ops) async fn move_behind(
    tx: &mut Transaction<'_>,
    end: HostCluster,
) -> Result<(), Error> {
    let Some(directory) = directory_of(tx) else { return Ok(()) };
    let mut entries =
        directory::read(tx.ring, &tx.file, directory, tx.geometry.cluster_size()).await?;
    let own = tx.clusters_of(directory.offset, directory.len);
    let mut changed = own.end() > end;
    for entry in &mut entries {
        let mut table = table_of(tx, entry).await?;
        let run = tx.clusters_of(entry.table_offset, Bytes(u64::from(entry.table_entries) * 8));
        let mut moves = run.end() > end;
        for word in &mut table {
            let Some(cluster) = cluster_of(tx, *word).filter(|cluster| *cluster >= end) else {
                continue;
            };
            let content = tx.read_cluster(HostOffset(*word & OFFSET_MASK), "a bitmap").await?;
            let new = tx.write_new(&content, "a bitmap").await?;
            *word = (new.start << tx.geometry.cluster_bits).0;
            tx.unref_data(cluster, 1).await?;
            moves = true;
        }
        if moves {
            let new = tx.write_new(&bytes_of(&table), "a bitmap table").await?;
            tx.unref_metadata(run.start, run.count).await?;
            entry.table_offset = new.start << tx.geometry.cluster_bits;
            changed = true;
        }
    }
    if changed {
        put_directory(tx, &entries, directory).await?;
    }
    Ok(())
}

/// Writes the directory to a new place.
async fn put_directory(
    tx: &mut Transaction<'_>,
    entries: &[Entry],
    old: BitmapDirectory,
) -> Result<(), Error> {
    let bytes = directory::to_bytes(entries);
    let run = tx.write_new(&bytes, "the bitmap directory").await?;
    let offset = run.start << tx.geometry.cluster_bits;
    let len = Bytes::of(bytes.len());
    tx.header.set_bitmaps(Some(BitmapDirectory { offset, len, ..old }))?;
    let old = tx.clusters_of(old.offset, old.len);
    tx.unref_metadata(old.start, old.count).await
}

/// The words of the table of a bitmap.
async fn table_of(tx: &Transaction<'_>, entry: &Entry) -> Result<Vec<u64>, Error> {
    let len = Bytes(u64::from(entry.table_entries) * 8);
    if len > BITMAP_BYTES_MAX || !entry.table_offset.is_multiple_of(tx.geometry.cluster_size()) {
        return Err(tx.corrupt("the table of a bitmap is too large or not aligned"));
    }
    // Bounded by the limit.
    let len = usize::try_from(len).unwrap_or(0);
    Ok(words_of(&tx.read(entry.table_offset, len, "a bitmap table").await?))
}

/// The cluster that a word of such a table names.
fn cluster_of(tx: &Transaction<'_>, word: u64) -> Option<HostCluster> {
    let cluster = HostOffset(word & OFFSET_MASK) >> tx.geometry.cluster_bits;
    (cluster != HostCluster(0)).then_some(cluster)
}

/// Refuses a size with which the bitmaps that record now would not fit into memory any more.
fn check_room(
    tx: &Transaction<'_>,
    entries: &[Entry],
    old: Bytes,
    new: Bytes,
) -> Result<(), Error> {
    let fits = |size: Bytes| tables::recording_bytes(entries, size) <= RECORDED_BITMAPS_BYTES_MAX;
    if !fits(old) || fits(new) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidRequest,
        tx.file.name(),
        format!(
            "with {new} bytes of disk the bitmaps that record would take more than {} MiB of \
             memory",
            RECORDED_BITMAPS_BYTES_MAX >> 20
        ),
        "disable or remove bitmaps with a small granularity first",
    ))
}

/// Resizes one bitmap. Returns whether its directory entry changed.
async fn resize_one(
    tx: &mut Transaction<'_>,
    bitmap: &mut Entry,
    old: Bytes,
    new: Bytes,
) -> Result<bool, Error> {
    let (offset, entries) = (bitmap.table_offset, bitmap.table_entries);
    // At most 63, or the directory would not have been read.
    let granularity_bits = u32::from(bitmap.granularity_bits);
    let bits_per_cluster = tx.geometry.cluster_size().0 * 8;
    let bits = |size: Bytes| size.clusters(granularity_bits);
    let needed = |size: Bytes| bits(size).div_ceil(bits_per_cluster);
    if needed(old) != u64::from(entries) {
        return Err(
            tx.corrupt(format!("a bitmap has a table of {entries} entries, which is wrong"))
        );
    }
    let wanted = needed(new);
    if Bytes(bits(new).div_ceil(8)) > BITMAP_BYTES_MAX || wanted == 0 {
        return Err(Error::new(
            ErrorKind::InvalidRequest,
            tx.file.name(),
            format!("a bitmap cannot have {} bits", bits(new)),
            "remove the bitmap first",
        ));
    }
    // Both below 2^27.
    let (entries, wanted) = (entries as usize, usize::try_from(wanted).unwrap_or(0));
    let raw = tx.read(offset, entries * 8, "a bitmap table").await?;
    let mut table = words_of(&raw);
    let before = table.clone();
    for entry in table.iter().skip(wanted) {
        if let Some(cluster) = cluster_of(tx, *entry) {
            tx.unref_data(cluster, 1).await?;
        }
    }
    table.truncate(wanted);
    clear_behind(tx, &mut table, bits(old.min(new)), bits_per_cluster).await?;
    table.resize(wanted, 0);
    if new > old {
        set_behind(tx, &mut table, old >> granularity_bits, bits(new), bits_per_cluster).await?;
    }
    if table == before {
        return Ok(false);
    }
    let run = tx.write_new(&bytes_of(&table), "a bitmap table").await?;
    let old_run = tx.clusters_of(offset, Bytes(entries as u64 * 8));
    tx.unref_metadata(old_run.start, old_run.count).await?;
    bitmap.table_offset = run.start << tx.geometry.cluster_bits;
    bitmap.table_entries = u32::try_from(wanted).unwrap_or(0);
    Ok(true)
}

/// Clears the bits behind `bits` in the last cluster that is partly in use.
async fn clear_behind(
    tx: &mut Transaction<'_>,
    table: &mut [u64],
    bits: u64,
    bits_per_cluster: u64,
) -> Result<(), Error> {
    // Below 2^27 entries; below 2^24 bits.
    let kept = usize::try_from(bits % bits_per_cluster).unwrap_or(0);
    let index = usize::try_from(bits / bits_per_cluster).unwrap_or(usize::MAX);
    let Some(entry) = table.get_mut(index).filter(|entry| **entry != 0 && kept != 0) else {
        return Ok(());
    };
    let offset = HostOffset(*entry & OFFSET_MASK);
    let old = match offset {
        HostOffset(0) if *entry == ALL_SET => vec![0xff; tx.cluster_bytes()],
        HostOffset(0) => return Ok(()),
        offset => tx.read_cluster(offset, "a bitmap").await?,
    };
    let mut content = old.clone();
    content[kept.div_ceil(8)..].fill(0);
    if !kept.is_multiple_of(8) {
        content[kept / 8] &= (1 << (kept % 8)) - 1;
    }
    if content != old {
        let run = tx.write_new(&content, "a bitmap").await?;
        *entry = (run.start << tx.geometry.cluster_bits).0;
        if offset != HostOffset(0) {
            tx.unref_data(offset >> tx.geometry.cluster_bits, 1).await?;
        }
    }
    Ok(())
}

/// Sets the bits from `first` on; `count`: bits that there are.
async fn set_behind(
    tx: &mut Transaction<'_>,
    table: &mut [u64],
    first: u64,
    count: u64,
    bits_per_cluster: u64,
) -> Result<(), Error> {
    // Below 2^27 entries; below 2^24 bits.
    let kept = usize::try_from(first % bits_per_cluster).unwrap_or(0);
    let index = usize::try_from(first / bits_per_cluster).unwrap_or(usize::MAX);
    let whole = if kept == 0 { index } else { index.saturating_add(1) };
    for entry in table.iter_mut().skip(whole) {
        let cluster = cluster_of(tx, *entry);
        *entry = ALL_SET;
        if let Some(cluster) = cluster {
            tx.unref_data(cluster, 1).await?;
        }
    }
    let Some(entry) = table.get_mut(index).filter(|entry| kept != 0 && **entry != ALL_SET) else {
        return Ok(());
    };
    let offset = HostOffset(*entry & OFFSET_MASK);
    let mut content = match offset {
        HostOffset(0) => vec![0; tx.cluster_bytes()],
        offset => tx.read_cluster(offset, "a bitmap").await?,
    };
    let left = (count - index as u64 * bits_per_cluster).min(bits_per_cluster);
    for bit in kept..usize::try_from(left).unwrap_or(0) {
        content[bit / 8] |= 1 << (bit % 8);
    }
    let run = tx.write_new(&content, "a bitmap").await?;
    *entry = (run.start << tx.geometry.cluster_bits).0;
    if offset != HostOffset(0) {
        tx.unref_data(offset >> tx.geometry.cluster_bits, 1).await?;
    }
    Ok(())
}
