//! Repair: what is done about what a check found, and in which order.
//!
//! Promises:
//! - It ends: at most [`ROUNDS_MAX`] rounds, each of which must find less wrong than the one
//!   before.
//! - A crash at any point, and any error, leaves an image that is no worse than before. Leaks are
//!   taken back where each sector of a refcount block is right by itself; entries of L2 tables are
//!   emptied one sector at a time; everything else is made new beside the old (module `rebuild`).
//! - Nothing that might still be of use is given up: only L2 entries that no reader could serve,
//!   snapshots whose L1 table cannot be where they say, and bitmaps that cannot be read.
//! - While an L1 or L2 entry is damaged, leaked clusters stay: they may be what the entry should
//!   name. So they do where an entry names a cluster that is counted as free or as another's, in an
//!   image that was closed cleanly, and where a snapshot is removed: to the end of the repair,
//!   which says so.
//! - A repair of leaks gives nothing back while there are errors.
//! - Where an entry names metadata, or a table is cut, nothing is changed at all (module
//!   `overlaps`).
//! - Nor where the header says that the data is in another file and names none: by that one bit
//!   everything that the image holds would be given back and overwritten.
//! - While counts do not fit into the refcounts, those are left alone.

use crate::check::bitmaps;
use crate::check::compare::{self, Compared};
use crate::check::counts;
use crate::check::image::Image;
use crate::check::layout::{BLOCK_RESERVED, COPIED, ZERO};
use crate::check::rebuild::rebuild;
use crate::check::refcount;
use crate::check::report::{CheckHooks, CheckReport, MESSAGES_MAX};
use crate::check::scan::{Fixable, Scan};
use crate::check::source::Source;
use crate::check::stop::Stop;
use crate::check::{Repair, examine, read_header};
use crate::error::Error;
use crate::extensions::u64_at;
use crate::header;
use crate::limits::{SECTOR, SECTOR_LEN};
use crate::units::{Bytes, HostCluster, HostOffset};

/// Most rounds: one for entries, one for refcounts, and two for what only shows then.
const ROUNDS_MAX: u32 = 4;
/// Most runs of clusters that are given back to the file system after a repair.
const PUNCHED_RUNS_MAX: usize = 1 << 16;
/// What an entry of an extended L2 table says when all its subclusters read as zeroes.
const ALL_ZEROES: u64 = 0xffff_ffff << 32;

/// Checks and repairs.
///
/// * `data_len`: length of the external data file in bytes, where that is known.
///
/// Errors: those of a check; `Full`, `Io` when the repair could not be written.
pub(super) async fn repair(
    ring: &ringdisk_ring::Ring,
    (storage, data_len): (&ringdisk_storage::Storage, Option<Bytes>),
    what: Repair,
    hooks: CheckHooks<'_>,
) -> Result<CheckReport, Stop> {
    let reader = crate::check::source::Reader { ring, storage, data_len };
    let mut header = read_header(&reader, storage.name()).await?;
    let (first, mut scan, mut compared) = examine(&reader, &header, hooks).await?;
    // What was not closed cleanly has refcounts that are too low without any wrong entry.
    let low = compared.suspect && !first.dirty;
    // Damaged entries too: one that points past the end is inside of a file that a repair has made
    // longer.
    let suspect = low || scan.damaged > 0 || scan.has_lost_snapshots();
    scan.suspect = suspect;
    let mut report = first.clone();
    let mut actions: Vec<String> = Vec::new();
    for _ in 0..ROUNDS_MAX {
        let image = Image { ring, storage, header: &header, data_len };
        let old_head = image.head().await?;
        let old_len = Bytes(storage.len());
        let action = match round(image, &report, &mut scan, compared, what, hooks).await {
            Ok(Some(action)) => action,
            Ok(None) => break,
            Err(stop) => {
                image.cut(old_len).await;
                return Err(stop);
            }
        };
        drop(scan);
        let new_header = read_header(&reader, storage.name()).await?;
        let before = report;
        (report, scan, compared) = examine(&reader, &new_header, hooks).await?;
        scan.suspect = suspect;
        if report.corruptions > before.corruptions {
            // A damaged table that names other metadata can appear worse after that moved. The
            // old structures are still there.
            image.switch(&old_head).await?;
            image.cut(old_len).await;
            header = read_header(&reader, storage.name()).await?;
            (report, scan, compared) = examine(&reader, &header, hooks).await?;
            scan.suspect = suspect;
            actions.push(
                "Not repaired: what could be changed would make it look worse, so it is as it was"
                    .to_owned(),
            );
            break;
        }
        header = new_header;
        actions.extend(action.lines().map(str::to_owned));
        if wrong(&report) >= wrong(&before) {
            break;
        }
    }
    let only_raw_mark = what == Repair::All && scan.raw_without_data && report.corruptions == 1;
    let errors = report.corruptions > compared.wrong_flags;
    actions.extend(why_not(&scan, &report, what, errors).filter(|_| !only_raw_mark));
    drop(scan);
    if only_raw_mark {
        let image = Image { ring, storage, header: &header, data_len };
        let mut head = image.head().await?;
        head.set_autoclear(head.autoclear() & !header::RAW_EXTERNAL);
        image.switch(&head).await?;
        header = read_header(&reader, storage.name()).await?;
        (report, _, _) = examine(&reader, &header, hooks).await?;
        actions.push("Repaired: the mark of a raw data file is removed".to_owned());
    }
    if report.corruptions == 0 && report.check_errors == 0 {
        let image = Image { ring, storage, header: &header, data_len };
        if clear_marks(image).await? {
            report.dirty = false;
            report.marked_corrupt = false;
        }
    }
    Ok(summary(first, report, actions))
}

/// What a repair has left as it is, and why.
///
/// * `errors`: more is wrong than leaks and flags.
fn why_not(scan: &Scan, report: &CheckReport, what: Repair, errors: bool) -> Option<String> {
    let way_out = "`ringdisk convert --salvage` saves what can be read";
    if scan.unknown {
        Some(format!(
            "Not repaired: what the missing part of a table refers to is not known, so nothing is \
             changed or given back; {way_out}"
        ))
    } else if scan.nameless_data && !report.is_clean() {
        Some(
            "Not repaired: the header says that the data is in a data file (incompatible feature \
             bit 2), and names none; if the data is in the image, that bit is wrong, and a repair \
             that believed it would give all of it back. Name the data file with \
             `qemu-img amend -o data_file=FILE`, or clear the bit"
                .to_owned(),
        )
    } else if !scan.overlaps.is_empty() {
        Some(format!(
            "Not repaired: entries name metadata, and what they should name may be among the \
             leaked clusters, so nothing is changed or given back; {way_out}"
        ))
    } else if scan.damaged > 0 && report.leaks > 0 {
        Some(format!(
            "Not repaired: {} leaked clusters are kept, as they may be what the damaged entries \
             should name; {way_out}",
            report.leaks
        ))
    } else if scan.suspect && what == Repair::All && report.leaks > 0 {
        Some(format!(
            "Not repaired: {} leaked clusters are kept, as they may be what was lost (an \
             entry named a cluster that was counted as free or as another's, or a snapshot could \
             not be read); look at the disk, then `--repair leaks` gives them back",
            report.leaks
        ))
    } else if what == Repair::Leaks && errors && report.leaks > 0 {
        Some(format!(
            "Not repaired: {} leaked clusters are kept while there are errors, as they may be \
             what a wrong entry should name; `--repair all` repairs what can be",
            report.leaks
        ))
    } else if what == Repair::All && (report.corruptions > 0 || report.check_errors > 0) {
        Some(format!(
            "Not repaired: nobody knows what the entries that are left should say; {way_out}"
        ))
    } else {
        None
    }
}

/// A measure of damage that each round must bring down. What was an error may have become a leak.
fn wrong(report: &CheckReport) -> (u64, u64) {
    (report.corruptions.saturating_add(report.check_errors), report.leaks)
}

/// One step towards a sound image; says what it did. `None`: nothing can be done.
async fn round(
    image: Image<'_>,
    report: &CheckReport,
    scan: &mut Scan,
    compared: Compared,
    what: Repair,
    hooks: CheckHooks<'_>,
) -> Result<Option<String>, Stop> {
    if scan.unknown || scan.nameless_data || !scan.overlaps.is_empty() || report.is_clean() {
        return Ok(None);
    }
    if what == Repair::All && !scan.fixable.is_empty() {
        // Boxed, as are others below: futures in futures get too deep for the compiler.
        let said = Box::pin(fix_entries(image, scan)).await?;
        if !said.is_empty() {
            return Ok(Some(said.join("\n")));
        }
    }
    let wants_rebuild = compared.too_low
        || compared.wrong_flags > 0
        || compared.leaks_with_flags
        || scan.blocks_broken
        || scan.incomplete_snapshots > 0
        || !scan.lost_snapshots.is_empty()
        || !scan.lost_bitmaps.is_empty();
    let may_rebuild = match what {
        Repair::Nothing => false,
        // Flags are made right too when nothing else is wrong: QEMU does so, and a leak may need
        // it.
        Repair::Leaks => report.corruptions == compared.wrong_flags,
        Repair::All => true,
    };
    if wants_rebuild && may_rebuild && !scan.overflow {
        rebuild(image, scan, what == Repair::All, hooks).await?;
        let mut text = "Repaired: the refcount structures were written anew".to_owned();
        for (_, name) in &scan.lost_snapshots {
            text +=
                &format!("\nRepaired: snapshot {name} is removed, as its L1 table cannot be read");
        }
        for said in scan.lost_bitmaps.said() {
            text += &format!("\n{said}");
        }
        if scan.incomplete_snapshots > 0 {
            text += "\nRepaired: the snapshot table has the extra data that it should have";
        }
        return Ok(Some(text));
    }
    let errors = report.corruptions > compared.wrong_flags;
    let may_free = what == Repair::All || (what == Repair::Leaks && !errors);
    if report.leaks > 0 && may_free && !scan.keeps_leaks() {
        let freed = take_leaks_back(image, scan, report.corruptions == 0, hooks).await?;
        if freed > 0 {
            return Ok(Some(format!("Repaired: {freed} leaked clusters are free again")));
        }
    }
    Ok(None)
}

/// Makes the L2 entries right that can be, one by one, and empties those of which nothing can be
/// kept. Returns what was done.
async fn fix_entries(image: Image<'_>, scan: &mut Scan) -> Result<Vec<String>, Stop> {
    let layout = scan.layout;
    let (mut emptied, mut moved) = (0u64, 0u64);
    let mut said = Vec::new();
    let mut fixable = std::mem::take(&mut scan.fixable);
    fixable.sort_unstable_by_key(|each| (each.table, each.index));
    for Fixable { table, index, place } in fixable {
        // Where something else lies too, a write could only make it worse.
        let cluster = table >> layout.cluster_bits;
        let known = scan.tables.binary_search_by_key(&table, |known| known.offset);
        let uses = known.map_or(0, |at| scan.tables[at].total());
        if layout.in_cluster(table) != Bytes::ZERO || uses != scan.counts.get(cluster).total {
            continue;
        }
        if emptied + moved == 0 {
            image.clear_unknown().await?;
            // The disk changes, and no bitmap records it.
            said.extend(Box::pin(bitmaps::distrust(image, scan)).await?);
        }
        let entry_len = Bytes(if layout.extended { 16 } else { 8 });
        let offset = table + u64::from(index) * entry_len;
        let sector = offset.align_down(SECTOR);
        let mut content = image.reader().read("reading an L2 table", sector, SECTOR_LEN).await?;
        // Inside the sector: entries do not cross sectors.
        let at = usize::try_from(offset - sector).unwrap_or(0);
        let zero_flag = if layout.version >= 3 { ZERO } else { 0 };
        let (entry, bitmap) = match place {
            Some(place) => {
                moved += 1;
                let zero = if layout.extended { 0 } else { u64_at(&content, at) & zero_flag };
                (place.0 | COPIED | zero, u64_at(&content, at + 8))
            }
            None => {
                emptied += 1;
                if layout.extended { (0, ALL_ZEROES) } else { (zero_flag, 0) }
            }
        };
        content[at..at + 8].copy_from_slice(&u64::to_be_bytes(entry));
        if layout.extended {
            content[at + 8..at + 16].copy_from_slice(&u64::to_be_bytes(bitmap));
        }
        image.write(sector, &content).await?;
    }
    image.flush().await?;
    if emptied > 0 {
        said.push(format!("Repaired: {emptied} broken L2 entries read as zeroes now"));
    }
    if moved > 0 {
        said.push(format!(
            "Repaired: {moved} L2 entries name their own place of the data file now"
        ));
    }
    Ok(said)
}

/// Lowers refcounts that are too high, in place, where that leaves every flag right. Returns the
/// number of clusters.
///
/// * `punch`: gives the space of clusters that are free then back to the file system.
async fn take_leaks_back(
    image: Image<'_>,
    scan: &Scan,
    punch: bool,
    hooks: CheckHooks<'_>,
) -> Result<u64, Stop> {
    let layout = scan.layout;
    let (order, max) = (layout.refcount_order, layout.refcount_max());
    let end = compare::end_of(scan);
    let mut freed = 0;
    let mut runs: Vec<(HostCluster, u64)> = Vec::new();
    for (index, entry) in scan.blocks.iter().enumerate() {
        let first = layout.block_start(index as u64);
        let at = HostOffset(*entry);
        let good = *entry != 0
            && entry & BLOCK_RESERVED == 0
            && layout.in_cluster(at) == Bytes::ZERO
            && scan.counts.get(at >> layout.cluster_bits).total == 1;
        if !good || first >= end {
            continue;
        }
        hooks.step(scan.done, scan.total)?;
        let len = layout.cluster_len();
        let mut block = image.reader().read("reading a refcount block", at, len).await?;
        let before = freed;
        for cluster in first.up_to(end.min(layout.block_start(index as u64 + 1))) {
            let place = layout.in_block(cluster);
            let stored = refcount::get(&block, order, place);
            let uses = scan.counts.get(cluster);
            let counted = u64::from(uses.total).min(max);
            let kept = scan.past_end.contains_key(&cluster);
            if stored <= counted || kept || counts::needs_flags(uses, counted) {
                continue;
            }
            refcount::set(&mut block, order, place, counted);
            freed += 1;
            if counted == 0 {
                add_to(&mut runs, cluster);
            }
        }
        if freed > before {
            if before == 0 {
                image.clear_unknown().await?;
            }
            image.write(at, &block).await?;
        }
    }
    image.flush().await?;
    if punch {
        for (start, count) in runs {
            let (offset, len) = (start << layout.cluster_bits, count << layout.cluster_bits);
            // Only a matter of space: not every storage can.
            let _ = image.storage.discard(image.ring, offset.0, len).await;
        }
    }
    Ok(freed)
}

fn add_to(runs: &mut Vec<(HostCluster, u64)>, cluster: HostCluster) {
    if let Some((start, count)) = runs.last_mut()
        && *start + *count == cluster
    {
        *count += 1;
    } else if runs.len() < PUNCHED_RUNS_MAX {
        runs.push((cluster, 1));
    }
}

/// Takes the marks off a sound image. Returns whether there were any.
async fn clear_marks(image: Image<'_>) -> Result<bool, Stop> {
    let marks = header::DIRTY | header::CORRUPT;
    if image.header.incompatible & marks == 0 {
        return Ok(false);
    }
    let mut head = image.head().await?;
    head.set_incompatible(head.incompatible() & !marks);
    image.switch(&head).await?;
    Ok(true)
}

/// The last report, with what became of the first.
fn summary(first: CheckReport, last: CheckReport, actions: Vec<String>) -> CheckReport {
    let mut report = CheckReport {
        corruptions_fixed: first.corruptions.saturating_sub(last.corruptions),
        leaks_fixed: first.leaks.saturating_sub(last.leaks),
        ..last
    };
    if actions.is_empty() {
        return report;
    }
    let left = std::mem::replace(&mut report.messages, first.messages);
    let left_out = std::mem::replace(&mut report.messages_left_out, first.messages_left_out);
    // What was done has to be among them.
    let more = report.messages.split_off(report.messages.len().min(MESSAGES_MAX / 2));
    report.messages_left_out = report.messages_left_out.saturating_add(more.len() as u64);
    let heading = (!left.is_empty()).then(|| "Left after the repair:".to_owned());
    for text in actions.into_iter().chain(heading).chain(left) {
        report.say(|| text);
    }
    report.messages_left_out = report.messages_left_out.saturating_add(left_out);
    report
}

/// Makes the refcounts of an image right that was not closed cleanly, and takes the dirty bit off:
/// when it is opened for writing.
///
/// Errors: `Corrupt` when the refcounts cannot be made right; those of a repair. The image is then
/// as it was.
pub(super) async fn rebuild_dirty(image: Image<'_>, hooks: CheckHooks<'_>) -> Result<(), Stop> {
    let (report, mut scan, compared) = examine(&image.reader(), image.header, hooks).await?;
    // What an unreadable snapshot or bitmap refers to is not known, and the caller has not asked
    // to give it up.
    if scan.unknown
        || scan.nameless_data
        || scan.overflow
        || scan.has_lost_snapshots()
        || !scan.lost_bitmaps.is_empty()
        || !scan.overlaps.is_empty()
    {
        let reason = report.messages.into_iter().next().unwrap_or_default();
        return Err(Stop::Error(Error::corrupt(
            image.storage.name(),
            format!(
                "the image was not closed cleanly and its refcounts cannot be rebuilt: {reason}"
            ),
        )));
    }
    let right = !compared.too_low
        && compared.wrong_flags == 0
        && !compared.leaks_with_flags
        && !compared.counts_past_end
        && !scan.blocks_broken
        && report.leaks == 0;
    if right {
        return clear_dirty(image).await;
    }
    let old_len = Bytes(image.storage.len());
    let rebuilt = rebuild(image, &mut scan, true, hooks).await;
    if rebuilt.is_err() {
        image.cut(old_len).await;
    }
    rebuilt
}

async fn clear_dirty(image: Image<'_>) -> Result<(), Stop> {
    let mut head = image.head().await?;
    head.set_incompatible(head.incompatible() & !header::DIRTY);
    image.switch(&head).await
}
