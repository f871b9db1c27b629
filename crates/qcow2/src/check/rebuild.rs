//! Writes new metadata beside the old one and switches over with one sector.
//!
//! Promises: a crash at any point, or an error, leaves the image as it was or completely repaired:
//! new refcount blocks, a new refcount table, and copies of the L1 table and of those L2 tables
//! whose COPIED flags are wrong go to free clusters; after a barrier the first sector of the header
//! leads to all of them at once. Blocks that are right stay where they are.

use ringdisk_storage::Kind;

use crate::check::bitmaps;
use crate::check::counts::{Counts, REGION_CLUSTERS, Region, Uses};
use crate::check::image::Image;
use crate::check::layout::{COPIED, EntryKind, Layout, OFFSET_MASK};
use crate::check::plan::Plan;
use crate::check::report::CheckHooks;
use crate::check::scan::{Scan, TableUse};
use crate::check::source::{READ_BYTES, Source};
use crate::check::stop::Stop;
use crate::check::tables;
use crate::extensions::{BitmapDirectory, u64_at};
use crate::header::{self, HeaderImage};
use crate::units::{Bytes, HostCluster, HostOffset};

/// Makes refcounts and COPIED flags say what `scan` counted.
///
/// * `clear_dirty`: the dirty bit goes in the same sector.
///
/// Errors: `Full`, `Corrupt` when the image is too long for a refcount table, `Cancelled`, `Io`.
pub(super) async fn rebuild(
    image: Image<'_>,
    scan: &mut Scan,
    clear_dirty: bool,
    hooks: CheckHooks<'_>,
) -> Result<(), Stop> {
    let Image { storage, header, .. } = image;
    let layout = scan.layout;
    let size = layout.cluster_size();
    let mut head = image.head().await?;
    let limit = match storage.kind() {
        Kind::BlockDevice => Some(HostOffset(storage.len()) >> layout.cluster_bits),
        Kind::Regular | Kind::Custom => None,
    };
    let moved = tables_with_wrong_flags(image, scan, hooks).await?;
    let moves_l1 = !moved.is_empty() || has_wrong_l1_flags(scan);
    let l1_bytes = Bytes(u64::from(header.l1_entries) * 8);
    let snapshots = new_snapshot_table(image, scan).await?;

    let bitmaps = bitmaps::new_directory(&image.reader(), header, scan).await?;
    let lost_snapshots = scan.lost_snapshots.len();
    let mut plan = Plan::new(scan, limit);
    plan.retire(header.refcount_table.start, header.refcount_table.len(), 1);
    for table in &moved {
        plan.retire(table.offset, size, table.active());
    }
    if moves_l1 {
        plan.retire(header.l1_table.start, l1_bytes, 1);
    }
    if snapshots.is_some() {
        plan.retire(header.snapshots_offset, plan.scan().snapshot_table_len, 1);
    }
    if let Some(old) = bitmaps.as_ref().and_then(|new| new.old) {
        plan.retire(old.offset, old.len, 1);
    }
    plan.drop_bad_blocks();
    plan.keep_uncovered()?;
    touch_wrong_blocks(image, &mut plan, hooks).await?;
    plan.touch_uncovered();

    let mut moves = Vec::new();
    for table in moved {
        let place = plan.allocate(1, u64::from(table.active()))? << layout.cluster_bits;
        moves.push(Move { table, place });
    }
    let l1_place = match moves_l1 {
        true => Some(plan.allocate(l1_bytes.div_ceil(size).max(1), 1)? << layout.cluster_bits),
        false => None,
    };
    if let Some(bytes) = &snapshots {
        // At most as many as there were.
        let lost = u32::try_from(lost_snapshots).unwrap_or(header.snapshots);
        let left = header.snapshots.saturating_sub(lost);
        set_snapshots(image, &mut plan, &mut head, bytes, left).await?;
    }
    if let Some(new) = &bitmaps {
        set_bitmaps(image, &mut plan, &mut head, new).await?;
    }
    plan.place_blocks()?;
    let (table_at, table_clusters) = plan.place_table()?;
    let table_at = table_at << layout.cluster_bits;

    write_tables(image, &plan, &moves, hooks).await?;
    if let Some(place) = l1_place {
        write_l1(image, &plan, &moves, place).await?;
        head.set_l1_table(place, header.l1_entries);
    }
    write_blocks(image, &plan, hooks).await?;
    let mut table: Vec<u8> = plan.entries.iter().flat_map(|at| at.to_be_bytes()).collect();
    table.resize(usize::try_from(table_clusters * size).map_err(|_| Stop::Memory)?, 0);
    image.write(table_at, &table).await?;
    // At most 8 MiB of table.
    head.set_refcount_table(table_at, u32::try_from(table_clusters).map_err(|_| Stop::Memory)?);
    if clear_dirty {
        head.set_incompatible(head.incompatible() & !header::DIRTY);
    }
    image.switch(&head).await
}

/// Writes the snapshot table, and lets the header name it.
///
/// * `left`: snapshots of it.
async fn set_snapshots(
    image: Image<'_>,
    plan: &mut Plan<'_>,
    head: &mut HeaderImage,
    bytes: &[u8],
    left: u32,
) -> Result<(), Stop> {
    if left == 0 {
        head.set_snapshots(HostOffset(0), 0);
        return Ok(());
    }
    let layout = plan.scan().layout;
    let place = plan.allocate(Bytes::of(bytes.len()).clusters(layout.cluster_bits), 1)?;
    head.set_snapshots(place << layout.cluster_bits, left);
    image.write(place << layout.cluster_bits, bytes).await
}

/// Lets the header name the bitmaps that are left.
async fn set_bitmaps(
    image: Image<'_>,
    plan: &mut Plan<'_>,
    head: &mut HeaderImage,
    new: &bitmaps::NewDirectory,
) -> Result<(), Stop> {
    if new.count == 0 {
        head.set_bitmaps(None)?;
        head.set_autoclear(head.autoclear() & !header::BITMAPS);
        return Ok(());
    }
    let layout = plan.scan().layout;
    let len = Bytes::of(new.bytes.len());
    let offset = plan.allocate(len.clusters(layout.cluster_bits), 1)? << layout.cluster_bits;
    image.write(offset, &new.bytes).await?;
    head.set_bitmaps(Some(BitmapDirectory { count: new.count, offset, len }))?;
    Ok(())
}

/// An L2 table on its way.
struct Move {
    table: TableUse,
    /// Host offset of the copy.
    place: HostOffset,
}

/// What the COPIED flag of an entry for this place must be, now that the refcounts are right.
fn wants_copied(layout: Layout, place: HostOffset, target: impl Fn(HostCluster) -> u64) -> bool {
    layout.external || target(place >> layout.cluster_bits) == 1
}

/// Whether the flags of one cluster's users do not suit its refcount.
fn is_wrong(uses: Uses, refcount: u64) -> bool {
    if refcount == 1 { uses.plain > 0 } else { uses.copied > 0 }
}

/// Whether any flag may be wrong: without reading anything.
fn may_have_wrong_flags(scan: &Scan) -> bool {
    let max = scan.layout.refcount_max();
    let wrong = |uses: Uses| is_wrong(uses, u64::from(uses.total).min(max));
    let in_region = |counts: &Counts, region: u64| match counts.region(region) {
        Region::Empty => false,
        Region::Narrow(bytes) => {
            // No user, or one with the flag.
            bytes.iter().any(|byte| !matches!(byte, 0 | 0x11) && wrong(Uses::from_narrow(*byte)))
        }
        Region::Wide(words) => words.iter().any(|word| wrong(Uses::from_wide(*word))),
    };
    let regions = scan.counts.clusters().0.div_ceil(REGION_CLUSTERS);
    scan.external_flags > 0
        || scan.past_end.values().any(|(copied, _)| *copied > 0)
        || (0..regions).any(|region| in_region(&scan.counts, region))
}

fn has_wrong_l1_flags(scan: &Scan) -> bool {
    let max = scan.layout.refcount_max();
    scan.tables.iter().filter(|table| table.active() > 0).any(|table| {
        let counted = scan.counts.get(table.offset >> scan.layout.cluster_bits).total;
        let uses = Uses { total: counted, copied: table.copied, plain: table.plain };
        is_wrong(uses, u64::from(counted).min(max))
    })
}

/// The active L2 tables that hold a wrong flag.
async fn tables_with_wrong_flags(
    image: Image<'_>,
    scan: &Scan,
    hooks: CheckHooks<'_>,
) -> Result<Vec<TableUse>, Stop> {
    let layout = scan.layout;
    if !may_have_wrong_flags(scan) {
        return Ok(Vec::new());
    }
    let max = layout.refcount_max();
    let target = |cluster| u64::from(scan.counts.get(cluster).total).min(max);
    let candidates = scan.tables.iter().filter(|table| {
        table.active() > 0
            && layout.in_cluster(table.offset) == Bytes::ZERO
            && table.offset.from_start() < layout.file_len
    });
    let mut left = candidates.clone();
    let mut moved = Vec::new();
    image
        .reader()
        .read_all(
            "reading L2 tables",
            candidates.map(|table| (table.offset, layout.cluster_len())),
            |_, bytes| {
                if let Some(table) = left.next()
                    && correct(layout, bytes, target).is_some()
                {
                    moved.push(*table);
                }
                hooks.step(scan.done, scan.total)
            },
        )
        .await?;
    Ok(moved)
}

/// The L2 table with the right flags; `None`: they are right.
fn correct(layout: Layout, bytes: &[u8], target: impl Fn(HostCluster) -> u64) -> Option<Vec<u8>> {
    let step = if layout.extended { 16 } else { 8 };
    let mut corrected: Option<Vec<u8>> = None;
    for at in (0..bytes.len()).step_by(step) {
        let entry = u64_at(bytes, at);
        if entry == 0 || layout.kind(entry) != EntryKind::Allocated {
            continue;
        }
        let wanted = wants_copied(layout, HostOffset(entry & OFFSET_MASK), &target);
        if wanted != (entry & COPIED != 0) {
            let copy = corrected.get_or_insert_with(|| bytes.to_vec());
            copy[at..at + 8].copy_from_slice(&(entry ^ COPIED).to_be_bytes());
        }
    }
    corrected
}

/// The snapshot table with what it lacks.
async fn new_snapshot_table(image: Image<'_>, scan: &Scan) -> Result<Option<Vec<u8>>, Stop> {
    if scan.incomplete_snapshots == 0 && scan.lost_snapshots.is_empty() {
        return Ok(None);
    }
    let header = image.header;
    // At most 64 MiB: bounded when it was read first.
    let len = usize::try_from(scan.snapshot_table_len).map_err(|_| Stop::Memory)?;
    let reader = image.reader();
    let old = reader.read("reading the snapshot table", header.snapshots_offset, len).await?;
    let lost: Vec<u32> = scan.lost_snapshots.iter().map(|(number, _)| *number).collect();
    Ok(Some(tables::completed(&old, header.snapshots, &lost, header.geometry.virtual_size)))
}

/// Compares the blocks that can be read with what they should say.
async fn touch_wrong_blocks(
    image: Image<'_>,
    plan: &mut Plan<'_>,
    hooks: CheckHooks<'_>,
) -> Result<(), Stop> {
    let layout = plan.scan().layout;
    let blocks = plan.blocks();
    let pieces = blocks.iter().map(|(_, at)| (*at, layout.cluster_len()));
    let mut scratch = Vec::new();
    image
        .reader()
        .read_all("reading refcount blocks", pieces, |place, bytes| {
            let (index, _) = blocks[place];
            plan.keep_leaks(index, bytes)?;
            if !plan.is_right(index, bytes, &mut scratch) {
                plan.touch(layout.block_start(index));
            }
            hooks.step(plan.scan().done, plan.scan().total)
        })
        .await
}

async fn write_tables(
    image: Image<'_>,
    plan: &Plan<'_>,
    moves: &[Move],
    hooks: CheckHooks<'_>,
) -> Result<(), Stop> {
    let layout = plan.scan().layout;
    for each in moves {
        hooks.step(plan.scan().done, plan.scan().total)?;
        let len = layout.cluster_len();
        let bytes = image.reader().read("reading an L2 table", each.table.offset, len).await?;
        let bytes = correct(layout, &bytes, |cluster| plan.target(cluster)).unwrap_or(bytes);
        image.write(each.place, &bytes).await?;
    }
    Ok(())
}

async fn write_l1(
    image: Image<'_>,
    plan: &Plan<'_>,
    moves: &[Move],
    place: HostOffset,
) -> Result<(), Stop> {
    let layout = plan.scan().layout;
    // At most 32 MiB: bounded by the header.
    let len = usize::try_from(u64::from(image.header.l1_entries) * 8);
    let len = len.map_err(|_| Stop::Memory)?;
    let start = image.header.l1_table.start;
    let mut l1 = image.reader().read("reading the L1 table", start, len).await?;
    for raw in l1.as_chunks_mut::<8>().0 {
        let entry = u64::from_be_bytes(*raw);
        let offset = HostOffset(entry & OFFSET_MASK);
        if offset == HostOffset(0) {
            continue;
        }
        let new = match moves.binary_search_by_key(&offset, |each| each.table.offset) {
            Ok(at) => moves[at].place,
            Err(_) => offset,
        };
        let copied = plan.target(new >> layout.cluster_bits) == 1;
        let other = entry & !(OFFSET_MASK | COPIED);
        *raw = (other | new.0 | if copied { COPIED } else { 0 }).to_be_bytes();
    }
    l1.resize(l1.len().next_multiple_of(layout.cluster_len()).max(layout.cluster_len()), 0);
    image.write(place, &l1).await
}

/// Writes the new blocks, neighbours in one.
async fn write_blocks(
    image: Image<'_>,
    plan: &Plan<'_>,
    hooks: CheckHooks<'_>,
) -> Result<(), Stop> {
    let mut places: Vec<(HostOffset, u64)> = Vec::new();
    for index in &plan.rewritten {
        let entry = usize::try_from(*index).ok().and_then(|at| plan.entries.get(at));
        places.extend(entry.map(|at| (HostOffset(*at), *index)));
    }
    places.sort_unstable();
    let mut waiting = Vec::new();
    let mut start = HostOffset(0);
    let mut block = Vec::new();
    for (at, index) in places {
        hooks.step(plan.scan().done, plan.scan().total)?;
        let follows = start + Bytes::of(waiting.len()) == at && waiting.len() < READ_BYTES;
        if !follows && !waiting.is_empty() {
            image.write(start, &waiting).await?;
            waiting.clear();
        }
        if waiting.is_empty() {
            start = at;
        }
        plan.fill(index, &mut block);
        waiting.extend_from_slice(&block);
    }
    if waiting.is_empty() { Ok(()) } else { image.write(start, &waiting).await }
}
