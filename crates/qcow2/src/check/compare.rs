//! Compares the refcounts that the image stores with the references that were counted.
//!
//! Promises: every refcount block is read once, in a stream; messages about neighbours are joined.

use crate::check::counts::{REGION_CLUSTERS, Region, Uses, needs_flags};
use crate::check::layout::{BLOCK_RESERVED, Layout};
use crate::check::refcount;
use crate::check::report::{CheckHooks, CheckReport};
use crate::check::scan::Scan;
use crate::check::source::{READ_BYTES, Source};
use crate::check::stop::Stop;
use crate::units::{Bytes, HostCluster, HostOffset};

/// What a comparison says beyond the report.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Compared {
    /// Refcounts are missing or too low, so that a writer would overwrite what is in use.
    pub(super) too_low: bool,
    /// COPIED flags that do not suit the stored refcounts.
    pub(super) wrong_flags: u64,
    /// A leak can only be taken back together with a change of COPIED flags.
    pub(super) leaks_with_flags: bool,
    /// Clusters past the end of the file are counted as used: leaks once the file has grown over
    /// them. `qemu-img check` does not look there.
    pub(super) counts_past_end: bool,
    /// Entries name clusters that are counted as free, or as another entry's, by blocks that are
    /// right otherwise: one of them may be for another cluster.
    pub(super) suspect: bool,
    /// The last cluster with a refcount or a reference.
    highest: HostCluster,
}

/// One past the last cluster that is compared: those of the file, and one more when something
/// reaches into it.
pub(super) fn end_of(scan: &Scan) -> HostCluster {
    let clusters = scan.layout.clusters();
    if scan.counts.get(clusters).total > 0 { clusters + 1 } else { clusters }
}

/// Reads all refcount blocks and compares.
///
/// Errors: `Io`, `Cancelled`.
pub(super) async fn compare(
    source: &impl Source,
    scan: &mut Scan,
    report: &mut CheckReport,
    hooks: CheckHooks<'_>,
) -> Result<Compared, Stop> {
    let blocks = std::mem::take(&mut scan.blocks);
    let layout = scan.layout;
    let end = end_of(scan);
    let size = layout.cluster_size();
    let mut compared = Compared::default();
    let mut runs = Findings::new(layout);
    // Blocks that can be read, in the order of what they cover. Others count as zeroes, or cannot
    // be known.
    let covered = |index: usize| layout.block_start(index as u64) < end;
    let readable = |index: usize| {
        let offset = HostOffset(blocks.get(index).map_or(0, |entry| entry & !BLOCK_RESERVED));
        offset != HostOffset(0)
            && layout.in_cluster(offset) == Bytes::ZERO
            && offset.from_start() < layout.file_len
    };
    let places: Vec<usize> =
        (0..blocks.len()).filter(|index| covered(*index) && readable(*index)).collect();
    let pieces = Neighbours { places: &places, blocks: &blocks, size };
    let mut at = 0;
    source
        .read_all("reading refcount blocks", pieces, |_, piece| {
            for bytes in piece.chunks_exact(layout.cluster_len()) {
                let block = Block { first: layout.block_start(places[at] as u64), bytes };
                block.compare(scan, end, &mut compared, &mut runs, report);
                at += 1;
            }
            scan.progress(Bytes::of(piece.len()), hooks)
        })
        .await?;
    runs.finish(report);
    // What such a block says cannot be known, nor whether it is right.
    let unknown = |index: u64| {
        let entry = usize::try_from(index).ok().and_then(|index| blocks.get(index)).copied();
        let offset = HostOffset(entry.unwrap_or(0) & !BLOCK_RESERVED);
        layout.in_cluster(offset) != Bytes::ZERO || i64::try_from(offset.0).is_err()
    };
    for (index, _) in blocks.iter().enumerate().filter(|(index, _)| unknown(*index as u64)) {
        let first = layout.block_start(index as u64);
        let count = end.min(layout.block_start(index as u64 + 1)).saturating_sub(first);
        report.check_errors += count;
    }
    without_block(scan, end, &mut compared, &mut runs, report, |cluster| {
        let index = layout.block_of(cluster);
        let known = usize::try_from(index).is_ok_and(readable) || unknown(index);
        !known
    });
    runs.finish(report);
    flags_past_end(source, scan, &blocks, &mut compared, report).await?;
    compared.wrong_flags += scan.external_flags;
    report.image_end_offset = ((compared.highest + 1) << layout.cluster_bits).0;
    scan.blocks = blocks;
    Ok(compared)
}

/// Clusters whose refcount is 0 because no block covers them.
fn without_block(
    scan: &mut Scan,
    end: HostCluster,
    compared: &mut Compared,
    runs: &mut Findings,
    report: &mut CheckReport,
    is_uncovered: impl Fn(HostCluster) -> bool,
) {
    let step = REGION_CLUSTERS.min(1 << scan.layout.block_bits());
    let mut overflow = false;
    for region in 0..end.0.div_ceil(REGION_CLUSTERS) {
        let counts = scan.counts.region(region);
        if matches!(counts, Region::Empty) {
            continue;
        }
        let first = HostCluster(region * REGION_CLUSTERS);
        let starts = first.up_to(end.min(first + REGION_CLUSTERS)).step_by(1 << step.ilog2());
        for start in starts {
            if !is_uncovered(start) {
                continue;
            }
            for cluster in start.up_to(end.min(start + step)) {
                let uses = scan.counts.get(cluster);
                if uses != Uses::default() {
                    overflow |= runs.cluster(cluster, 0, uses, compared, report);
                    if uses.total > 0 {
                        compared.highest = compared.highest.max(cluster);
                    }
                }
            }
        }
    }
    scan.overflow |= overflow;
}

/// Flags of entries that point past the end: the refcount there is what a block says, mostly 0.
async fn flags_past_end(
    source: &impl Source,
    scan: &Scan,
    blocks: &[u64],
    compared: &mut Compared,
    report: &mut CheckReport,
) -> Result<(), Stop> {
    let layout = scan.layout;
    let mut entries: Vec<_> = scan.past_end.iter().map(|(at, flags)| (*at, *flags)).collect();
    entries.retain(|(_, (copied, plain))| copied + plain > 0);
    entries.sort_unstable();
    for (cluster, (copied, plain)) in entries {
        let index = usize::try_from(layout.block_of(cluster)).unwrap_or(usize::MAX);
        let offset = HostOffset(blocks.get(index).map_or(0, |entry| entry & !BLOCK_RESERVED));
        let is_readable = offset != HostOffset(0)
            && offset.from_start() < layout.file_len
            && layout.in_cluster(offset) == Bytes::ZERO;
        let stored = if is_readable {
            let len = layout.cluster_len();
            let bytes = source.read("reading a refcount block", offset, len).await?;
            refcount::get(&bytes, layout.refcount_order, layout.in_block(cluster))
        } else {
            0
        };
        let wrong = if stored == 1 { plain } else { copied };
        if wrong > 0 {
            compared.wrong_flags += wrong;
            report.corrupt(wrong, || {
                format!(
                    "ERROR {wrong} entries for the cluster at {:#x}, past the end of the file, \
                     have the wrong COPIED flag (refcount {stored})",
                    cluster << layout.cluster_bits
                )
            });
        }
    }
    Ok(())
}

/// One refcount block.
struct Block<'a> {
    /// The first cluster that it covers.
    first: HostCluster,
    bytes: &'a [u8],
}

impl Block<'_> {
    fn compare(
        &self,
        scan: &mut Scan,
        end: HostCluster,
        compared: &mut Compared,
        runs: &mut Findings,
        report: &mut CheckReport,
    ) {
        let layout = scan.layout;
        let order = layout.refcount_order;
        let block_end = self.first + (1 << layout.block_bits());
        let last = end.min(block_end);
        let (mut overflow, mut right) = (false, 0u64);
        let mut start = self.first;
        while start < last {
            let region = start.0 / REGION_CLUSTERS;
            let stop = last.min(HostCluster((region + 1) * REGION_CLUSTERS));
            // Both inside the block and the region.
            let at = layout.in_block(start);
            let inside = usize::try_from(start.0 % REGION_CLUSTERS).unwrap_or(0);
            let count = usize::try_from(stop - start).unwrap_or(0);
            let counts = scan.counts.region(region);
            for place in 0..count {
                let stored = refcount::get(self.bytes, order, at + place);
                let uses = match counts {
                    Region::Empty if stored == 0 => continue,
                    Region::Empty => Uses::default(),
                    Region::Narrow(bytes) => {
                        let byte = bytes[inside + place];
                        // Nearly all clusters: no user, or one whose entry says so.
                        if (byte == 0 && stored == 0) || (byte == 0x11 && stored == 1) {
                            right += stored;
                            continue;
                        }
                        Uses::from_narrow(byte)
                    }
                    Region::Wide(words) => Uses::from_wide(words[inside + place]),
                };
                right += u64::from(stored == u64::from(uses.total));
                overflow |= runs.cluster(start + place as u64, stored, uses, compared, report);
            }
            start = stop;
        }
        scan.overflow |= overflow;
        // A block that is wrong about most of its clusters says nothing about entries.
        compared.suspect |= runs.too_low > 0 && runs.too_low <= right + runs.leaked;
        (runs.too_low, runs.leaked) = (0, 0);
        compared.counts_past_end |= last
            .up_to(block_end)
            .any(|cluster| refcount::get(self.bytes, order, layout.in_block(cluster)) > 0);
        self.note_highest(scan, last, compared);
    }

    fn note_highest(&self, scan: &Scan, last: HostCluster, compared: &mut Compared) {
        let order = scan.layout.refcount_order;
        let floor = self.first.max(compared.highest);
        for cluster in floor.up_to(last).rev() {
            let at = scan.layout.in_block(cluster);
            if refcount::get(self.bytes, order, at) > 0 || scan.counts.get(cluster).total > 0 {
                compared.highest = cluster;
                return;
            }
        }
    }
}

/// Joins findings about neighbouring clusters.
struct Findings {
    layout: Layout,
    run: Option<Run>,
    /// Clusters of the block at hand whose refcount is too low, and that are leaked.
    too_low: u64,
    leaked: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Run {
    first: HostCluster,
    count: u64,
    stored: u64,
    counted: u64,
}

impl Findings {
    fn new(layout: Layout) -> Findings {
        Findings { layout, run: None, too_low: 0, leaked: 0 }
    }

    /// Judges one cluster. Returns whether it has more references than fit.
    fn cluster(
        &mut self,
        cluster: HostCluster,
        stored: u64,
        uses: Uses,
        compared: &mut Compared,
        report: &mut CheckReport,
    ) -> bool {
        let max = self.layout.refcount_max();
        let total = u64::from(uses.total);
        let counted = total.min(max);
        let offset = cluster << self.layout.cluster_bits;
        if total > max {
            report.corrupt(total - max, || {
                format!(
                    "ERROR the cluster at {offset:#x} has {total} references; refcounts of this \
                     image end at {max}"
                )
            });
        }
        if stored != counted {
            compared.too_low |= stored < counted;
            self.leaked += u64::from(stored > counted);
            compared.leaks_with_flags |= stored > counted && needs_flags(uses, counted);
            self.add(cluster, stored, counted, report);
        }
        self.too_low += u64::from(stored < total);
        let wrong = if stored == 1 { uses.plain } else { uses.copied };
        if wrong > 0 {
            compared.wrong_flags += u64::from(wrong);
            let what = if stored == 1 { "is missing" } else { "is set" };
            report.corrupt(u64::from(wrong), || {
                format!(
                    "ERROR the COPIED flag {what} in {wrong} entries for the cluster at \
                     {offset:#x} (refcount {stored})"
                )
            });
        }
        total > max
    }

    fn add(&mut self, cluster: HostCluster, stored: u64, counted: u64, report: &mut CheckReport) {
        if let Some(run) = &mut self.run
            && run.first + run.count == cluster
            && (run.stored, run.counted) == (stored, counted)
        {
            run.count += 1;
            return;
        }
        self.finish(report);
        self.run = Some(Run { first: cluster, count: 1, stored, counted });
    }

    /// Reports what is left.
    fn finish(&mut self, report: &mut CheckReport) {
        let Some(run) = self.run.take() else { return };
        let bits = self.layout.cluster_bits;
        let Run { first, count, stored, counted } = run;
        let range = || match count {
            1 => format!("cluster at {:#x}", first << bits),
            _ => format!("{count} clusters at {:#x}", first << bits),
        };
        if stored < counted {
            report.corrupt(count, || {
                format!("ERROR {}: refcount {stored}, references {counted}", range())
            });
        } else {
            report.leak(count, || {
                format!("Leaked {}: refcount {stored}, references {counted}", range())
            });
        }
    }
}

/// Reads of refcount blocks, neighbours in one.
struct Neighbours<'a> {
    places: &'a [usize],
    blocks: &'a [u64],
    size: Bytes,
}

impl Iterator for Neighbours<'_> {
    type Item = (HostOffset, usize);

    fn next(&mut self) -> Option<(HostOffset, usize)> {
        let offset = |place: usize| self.blocks.get(place).map_or(0, |at| at & !BLOCK_RESERVED);
        let offset = |place: usize| HostOffset(offset(place));
        let start = offset(*self.places.first()?);
        let max = usize::try_from(Bytes::of(READ_BYTES) / self.size).unwrap_or(1).max(1);
        let count = self
            .places
            .iter()
            .take(max)
            .enumerate()
            .take_while(|(n, place)| offset(**place) == start + *n as u64 * self.size)
            .count();
        self.places = self.places.get(count..).unwrap_or_default();
        Some((start, usize::try_from(count as u64 * self.size).unwrap_or(0)))
    }
}
