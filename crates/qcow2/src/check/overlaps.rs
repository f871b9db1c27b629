//! Metadata that something else refers to as well.
//!
//! An L1 or L2 entry that names metadata is damaged, and what it should name is probably among the
//! leaks. Raising a refcount until the numbers agree would bless it: the guest reads metadata as
//! its data, and the real clusters are given back. So such an image is damaged whatever its
//! refcounts say, and a repair leaves it alone. Where only refcount structures are wrong they are
//! rebuilt, as nothing that they say is needed for that.
//!
//! Promises: reads the few refcount blocks in question, and all L1 and L2 tables once more only
//! where there is something to find.

use crate::check::layout::{EntryKind, Layout, OFFSET_MASK};
use crate::check::refcount;
use crate::check::report::CheckReport;
use crate::check::scan::{Claim, Holds, NO_INDEX, Scan, TableUse};
use crate::check::source::Source;
use crate::check::stop::Stop;
use crate::extensions::u64_at;
use crate::units::{Bytes, GuestOffset, HostCluster, HostOffset};

/// Entries that are named one by one.
const NAMED_MAX: usize = 100;

/// Finds the overlaps and adds them to the report, in front of everything else.
///
/// Errors: `Io`.
pub(super) async fn find(
    source: &impl Source,
    scan: &mut Scan,
    report: &mut CheckReport,
) -> Result<(), Stop> {
    let claims = std::mem::take(&mut scan.claims);
    let (mut found, mut messages) = (Vec::new(), Vec::new());
    for group in claims.chunk_by(|one, other| one.cluster == other.cluster) {
        match judge(source, scan, group).await? {
            Overlap::None => {}
            Overlap::Refcounts => {
                // Only where a bitmap is the other: else it was found when the blocks were counted.
                if !scan.blocks_broken {
                    report.own_finding(1, || said(scan.layout, group));
                    scan.blocks_broken = true;
                }
            }
            Overlap::Damage => {
                messages.push(said(scan.layout, group));
                found.push(group[0].cluster);
            }
        }
    }
    scan.claims = claims;
    if !found.is_empty() {
        messages.extend(entries_for(source, scan, &found).await?);
    }
    report.own_findings += found.len() as u64;
    report.corruptions += found.len() as u64;
    report.say_first(messages);
    scan.overlaps = found;
    Ok(())
}

/// What several references to one cluster mean.
enum Overlap {
    /// Nothing: they may be there.
    None,
    /// Refcount structures are wrong, which are rebuilt without them.
    Refcounts,
    /// See the module.
    Damage,
}

async fn judge(source: &impl Source, scan: &Scan, group: &[Claim]) -> Result<Overlap, Stop> {
    let uses = group.iter().fold(0u32, |sum, claim| sum.saturating_add(claim.uses));
    let data = scan.counts.get(group[0].cluster).total > uses;
    let counts =
        |claim: &&Claim| matches!(claim.holds, Holds::RefcountBlock | Holds::RefcountTable);
    let others = group.iter().filter(|claim| !counts(claim)).count();
    if group.len() == 1 && !data {
        return Ok(Overlap::None);
    }
    if others > 1 || (others == 1 && data) {
        return Ok(Overlap::Damage);
    }
    // Refcount structures among themselves, or beside one other thing: then those that make no
    // sense are the wrong ones.
    if others == 1 || data {
        for claim in group.iter().filter(counts) {
            let sense = match claim.holds {
                Holds::RefcountTable => table_makes_sense(scan),
                _ => block_makes_sense(source, scan, claim).await?,
            };
            if sense {
                return Ok(Overlap::Damage);
            }
        }
    }
    Ok(Overlap::Refcounts)
}

/// Whether the refcount table names more blocks that can be there than others.
fn table_makes_sense(scan: &Scan) -> bool {
    let layout = scan.layout;
    let named = scan.blocks.iter().filter(|entry| **entry != 0);
    let good = named.clone().filter(|entry| {
        layout.in_cluster(HostOffset(**entry)) == Bytes::ZERO
            && **entry & OFFSET_MASK == **entry
            && **entry < layout.file_len.0
    });
    let good = good.count();
    good > 0 && good * 2 > named.count()
}

/// Whether at least half of what a refcount block says is right, or the block is empty.
async fn block_makes_sense(source: &impl Source, scan: &Scan, claim: &Claim) -> Result<bool, Stop> {
    let layout = scan.layout;
    let at = claim.cluster << layout.cluster_bits;
    let bytes = source.read("reading a refcount block", at, layout.cluster_len()).await?;
    let first = layout.block_start(claim.block.into());
    let (mut right, mut wrong) = (0u64, 0u64);
    for place in 0..1u64 << layout.block_bits() {
        // Inside the block.
        let stored =
            refcount::get(&bytes, layout.refcount_order, usize::try_from(place).unwrap_or(0));
        let counted = u64::from(scan.counts.get(first + place).total).min(layout.refcount_max());
        if stored != 0 || counted != 0 {
            // Leaks are no sign that it is something else.
            let near = stored == counted || (counted == 0 && stored == 1);
            right += u64::from(near);
            wrong += u64::from(!near);
        }
    }
    Ok(right >= wrong)
}

fn said(layout: Layout, group: &[Claim]) -> String {
    let at = group[0].cluster << layout.cluster_bits;
    let mut holds: Vec<&str> = group.iter().map(|claim| claim.holds.words()).collect();
    holds.dedup();
    match holds.as_slice() {
        [one] if group.len() == 1 => {
            format!("ERROR the cluster at {at:#x} holds {one}, and is named as data too")
        }
        many => format!("ERROR the cluster at {at:#x} is claimed by {}", many.join(" and by ")),
    }
}

/// The entries of L1 and L2 tables that name one of `clusters`, as far as they name them wrongly.
async fn entries_for(
    source: &impl Source,
    scan: &Scan,
    clusters: &[HostCluster],
) -> Result<Vec<String>, Stop> {
    let layout = scan.layout;
    let mut messages = Vec::new();
    let is_one =
        |offset: HostOffset| clusters.binary_search(&(offset >> layout.cluster_bits)).is_ok();
    let tables = scan.tables.iter().filter(|table| {
        layout.in_cluster(table.offset) == Bytes::ZERO
            && table.offset.from_start() < layout.file_len
    });
    for table in tables {
        if is_one(table.offset) {
            messages.extend(l1_entry(layout, table));
            // What it holds are no entries, or it is not known.
            continue;
        }
        let len = layout.cluster_len();
        let bytes = source.read("reading an L2 table", table.offset, len).await?;
        let step = if layout.extended { 16 } else { 8 };
        for (index, raw) in bytes.chunks_exact(step).enumerate() {
            let entry = u64_at(raw, 0);
            if is_one(place_of(layout, entry))
                && place_of(layout, entry) != HostOffset(0)
                && messages.len() < NAMED_MAX
            {
                let at = table.offset;
                let what = guest(layout, table, index);
                messages.push(format!(
                    "ERROR L2 table at {at:#x}, entry {index} ({entry:#x}): names metadata{what}"
                ));
            }
        }
        if messages.len() >= NAMED_MAX {
            break;
        }
    }
    Ok(messages)
}

fn l1_entry(layout: Layout, table: &TableUse) -> Option<String> {
    let at = table.offset;
    (table.index != NO_INDEX && table.active() > 0).then(|| {
        let bytes = layout.table_bytes();
        let start = u64::from(table.index) * bytes;
        format!(
            "ERROR L1 table, entry {}: the L2 table at {at:#x} lies there ({bytes} bytes of the \
             disk from {start} on)",
            table.index
        )
    })
}

/// The offset that an entry names; 0: none.
fn place_of(layout: Layout, entry: u64) -> HostOffset {
    match layout.kind(entry) {
        EntryKind::Compressed => layout.compressed(entry).0,
        EntryKind::Allocated if !layout.external => HostOffset(entry & OFFSET_MASK),
        EntryKind::Allocated | EntryKind::Unallocated => HostOffset(0),
    }
}

/// Which part of the disk an entry is for, where that is known.
fn guest(layout: Layout, table: &TableUse, index: usize) -> String {
    if table.index == NO_INDEX {
        return String::new();
    }
    let start = GuestOffset::after(u64::from(table.index) * layout.table_bytes());
    let at = start + Bytes::of_clusters(index as u64, layout.cluster_bits);
    format!(" in place of the disk's bytes from {at} on")
}
