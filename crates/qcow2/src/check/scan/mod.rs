//! Walks all metadata of an image and counts every reference to every cluster.
//!
//! Promises: nothing is written; each table is read once, however many snapshots share it; memory
//! and the number of bytes that are read are bounded by [`limits`](crate::limits), whatever the
//! image says. What is wrong with single entries goes to the report, counted as `qemu-img check`
//! counts it (a table that is referenced n times counts n times).

mod found;

use std::collections::HashMap;

use crate::check::counts::{Counts, Uses};
use crate::check::layout::{BLOCK_RESERVED, COPIED, L1_RESERVED, Layout, OFFSET_MASK};
use crate::check::lost_bitmaps::LostBitmaps;
use crate::check::report::{CheckHooks, CheckReport};
use crate::check::source::{READ_BYTES, Source, pieces_of};
use crate::check::stop::Stop;
use crate::check::tables::{self, SnapshotL1};
use crate::header::{self, Header};
use crate::limits::{CHECK_BYTES_MAX, CHECK_PAST_END_MAX, CHECK_TABLES_BYTES_MAX, L1_BYTES_MAX};
use crate::units::{Bytes, HostCluster, HostOffset};

pub(super) use found::{Claim, CutCompressed, Fixable, Holds, NO_INDEX, TableUse};

/// Where an L1 table lies.
#[derive(Clone, Copy, Debug)]
struct Table {
    offset: HostOffset,
    bytes: Bytes,
    active: bool,
}

/// What one walk found.
#[derive(Debug)]
pub(super) struct Scan {
    pub(super) layout: Layout,
    pub(super) counts: Counts,
    /// All L2 tables by offset, each once.
    pub(super) tables: Vec<TableUse>,
    /// The L1 tables of snapshots that could be read.
    pub(super) snapshots: Vec<SnapshotL1>,
    /// Clusters that hold metadata; sorted.
    pub(super) claims: Vec<Claim>,
    /// Clusters of metadata that something else refers to too, where it is not known how to make
    /// that right (module `overlaps`).
    pub(super) overlaps: Vec<HostCluster>,
    /// Entries of the refcount table.
    pub(super) blocks: Vec<u64>,
    /// Clusters of what reaches past the end, and how many entries of the active tree refer to
    /// each with the COPIED flag and without.
    pub(super) past_end: HashMap<HostCluster, (u64, u64)>,
    /// There were too many of them: those that are missing lie below this cluster.
    pub(super) past_end_unknown_to: HostCluster,
    /// COPIED flags that are missing in an image with an external data file.
    pub(super) external_flags: u64,
    /// It is not known what some structure refers to.
    pub(super) unknown: bool,
    /// Entries of the snapshot table lack what version 3 wants, or have too much extra data.
    pub(super) incomplete_snapshots: u64,
    /// Snapshots whose L1 table cannot be read, with their numbers, rising.
    pub(super) lost_snapshots: Vec<(u32, String)>,
    /// Where the entries of some snapshots are is not known.
    pub(super) hidden_snapshots: bool,
    /// Bytes of the snapshot table.
    pub(super) snapshot_table_len: Bytes,
    /// Snapshots and bitmaps aside: L1 and L2 entries that cannot be right. What they should refer
    /// to may be among the leaks.
    pub(super) damaged: u64,
    /// Some entry may name another cluster than its own (see
    /// [`Compared::suspect`](super::compare::Compared)): set by a repair, to its end.
    pub(super) suspect: bool,
    /// L2 entries that can be made right one by one.
    pub(super) fixable: Vec<Fixable>,
    /// Compressed clusters of which the file has not all sectors.
    pub(super) cut_compressed: Vec<CutCompressed>,
    /// Bitmaps that cannot be used.
    pub(super) lost_bitmaps: LostBitmaps,
    /// The mark of a raw data file stands in an image without a data file.
    pub(super) raw_without_data: bool,
    /// The data is said to be in another file, and no name of one is there.
    pub(super) nameless_data: bool,
    /// The refcount structures cannot be used as they are.
    pub(super) blocks_broken: bool,
    /// Some cluster has more references than a refcount can say.
    pub(super) overflow: bool,
    /// Bytes of metadata that were read, and that are known to be there.
    pub(super) done: Bytes,
    pub(super) total: Bytes,
}

/// Walks the image. The refcount blocks themselves are counted, but not read.
///
/// Errors: `Corrupt` when a table of snapshots or bitmaps cannot be understood, `TooLarge`,
/// `Cancelled`, `Io`.
pub(super) async fn scan(
    source: &impl Source,
    header: &Header,
    report: &mut CheckReport,
    hooks: CheckHooks<'_>,
) -> Result<Scan, Stop> {
    let layout = Layout { data_len: source.data_len(), ..Layout::new(header, source.len()) };
    // One more: an unaligned entry may reach into the cluster behind a cut one.
    let counts = Counts::new(layout.clusters() + 1, CHECK_BYTES_MAX)?;
    let mut scan = Scan {
        layout,
        counts,
        tables: Vec::new(),
        snapshots: Vec::new(),
        claims: Vec::new(),
        overlaps: Vec::new(),
        blocks: Vec::new(),
        past_end: HashMap::new(),
        past_end_unknown_to: HostCluster(0),
        external_flags: 0,
        unknown: false,
        incomplete_snapshots: 0,
        lost_snapshots: Vec::new(),
        hidden_snapshots: false,
        snapshot_table_len: Bytes::ZERO,
        damaged: 0,
        suspect: false,
        fixable: Vec::new(),
        cut_compressed: Vec::new(),
        lost_bitmaps: LostBitmaps::default(),
        raw_without_data: false,
        nameless_data: layout.external && header.extensions.data_file.is_none(),
        blocks_broken: false,
        overflow: false,
        done: Bytes::ZERO,
        total: Bytes::ZERO,
    };
    scan.count(HostOffset(0), layout.cluster_size(), "the header", report)?;
    scan.own(HostOffset(0), layout.cluster_size(), Holds::Header);
    scan.marks(header, report);
    scan.read_refcount_table(source, header).await?;
    let l1_bytes = Bytes(u64::from(header.l1_entries) * 8);
    let l1 = Table { offset: header.l1_table.start, bytes: l1_bytes, active: true };
    scan.l1_table(source, l1, "the L1 table", report).await?;
    scan.snapshots(source, header, report, hooks).await?;
    scan.l2_tables(source, report, hooks).await?;
    Box::pin(scan.cut_compressed(source, header, report, hooks)).await?;
    scan.refcount_table(header, report)?;
    scan.claims.sort_unstable();
    // Last: a bitmap that lies on something else is wrong, not what it lies on.
    scan.bitmaps(source, header, report, hooks).await?;
    scan.claims.sort_unstable();
    Ok(scan)
}

impl Scan {
    /// Whether leaked clusters have to stay: they may be what some entry should name.
    pub(super) fn keeps_leaks(&self) -> bool {
        self.damaged > 0 || self.suspect
    }

    /// Whether what snapshots refer to is not known.
    pub(super) fn has_lost_snapshots(&self) -> bool {
        self.hidden_snapshots || !self.lost_snapshots.is_empty()
    }

    /// Counts one reference to each cluster of a range of the file.
    pub(super) fn count(
        &mut self,
        offset: HostOffset,
        len: Bytes,
        what: &str,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        if len == Bytes::ZERO {
            return Ok(());
        }
        self.count_range(offset, len, Uses::unflagged(1), || what.to_owned(), report)
    }

    /// As [`count`](Scan::count) for what an L1 or L2 entry names, with `uses`: the flags belong to
    /// the first cluster.
    pub(super) fn count_uses(
        &mut self,
        offset: HostOffset,
        len: Bytes,
        uses: Uses,
        what: impl FnOnce() -> String,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        if len == Bytes::ZERO {
            return Ok(());
        }
        self.damaged += u64::from(!self.layout.may_be_there(offset, len));
        self.count_range(offset, len, uses, what, report)
    }

    fn count_range(
        &mut self,
        offset: HostOffset,
        len: Bytes,
        uses: Uses,
        what: impl FnOnce() -> String,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let first = offset >> self.layout.cluster_bits;
        if !self.layout.may_be_there(offset, len) {
            let file_len = self.layout.file_len;
            report.corrupt(u64::from(uses.total), || {
                format!(
                    "ERROR {} at {offset:#x} ({len} bytes) lies past the end of the file at \
                     {file_len:#x}",
                    what()
                )
            });
            self.note_past_end(offset, len, uses);
            return Ok(());
        }
        let last = (offset + len - Bytes(1)) >> self.layout.cluster_bits;
        self.counts.add(first, uses)?;
        for cluster in (first + 1).up_to(last + 1) {
            self.counts.add(cluster, Uses::unflagged(uses.total))?;
        }
        Ok(())
    }

    /// Remembers what points past the end. A long structure may begin inside the file: that part
    /// is not counted, as QEMU does not count it, but it is not free either.
    pub(super) fn note_past_end(&mut self, offset: HostOffset, len: Bytes, uses: Uses) {
        let bits = self.layout.cluster_bits;
        let (first, last) = (offset >> bits, offset.saturating_add(len - Bytes(1)) >> bits);
        for cluster in first.up_to(last + 1) {
            if self.past_end.len() >= CHECK_PAST_END_MAX && !self.past_end.contains_key(&cluster) {
                self.past_end_unknown_to = self.past_end_unknown_to.max(last + 1);
                // Something inside the file may be in use after all.
                self.unknown |= cluster < self.layout.clusters();
                return;
            }
            let flags = self.past_end.entry(cluster).or_default();
            if cluster == first {
                flags.0 += u64::from(uses.copied);
                flags.1 += u64::from(uses.plain);
            }
        }
    }

    /// Notes that a range holds a structure that shares its clusters with nothing.
    pub(super) fn own(&mut self, offset: HostOffset, len: Bytes, holds: Holds) {
        if len == Bytes::ZERO || !self.layout.may_be_there(offset, len) {
            return;
        }
        let bits = self.layout.cluster_bits;
        let (first, last) = (offset >> bits, (offset + len - Bytes(1)) >> bits);
        let clusters = first.up_to(last + 1);
        self.claims.extend(clusters.map(|cluster| Claim { cluster, holds, uses: 1, block: 0 }));
    }

    /// Looks whether a table that has to be there as a whole is cut by the end of the file. What it
    /// refers to is not known then. `qemu-img check` takes zeroes for what is missing.
    pub(super) fn whole(
        &mut self,
        offset: HostOffset,
        len: Bytes,
        what: &str,
        report: &mut CheckReport,
    ) {
        self.unknown |= self.named_whole(offset, len, what, report);
    }

    /// As [`whole`](Scan::whole), and only says so. Returns whether it is cut.
    fn named_whole(
        &mut self,
        offset: HostOffset,
        len: Bytes,
        what: &str,
        report: &mut CheckReport,
    ) -> bool {
        let end = offset.saturating_add(len);
        if len == Bytes::ZERO || end.from_start() <= self.layout.exact_len {
            return false;
        }
        // Else it was counted as lying past the end.
        if self.layout.may_be_there(offset, len) {
            let exact_len = self.layout.exact_len;
            report.own_finding(1, || {
                format!(
                    "ERROR the file ends at {exact_len:#x}, before the end of {what} ({len} bytes \
                     at {offset:#x})"
                )
            });
        }
        true
    }

    /// What the header says that cannot be, where that is no reason to stop.
    fn marks(&mut self, header: &Header, report: &mut CheckReport) {
        let raw = header.autoclear & header::RAW_EXTERNAL != 0;
        self.raw_without_data = raw && !self.layout.external;
        if self.raw_without_data {
            report.own_finding(1, || {
                "ERROR the header says that the data file is a raw image, but there is no data file"
                    .to_owned()
            });
        }
    }

    pub(super) fn progress(&mut self, bytes: Bytes, hooks: CheckHooks<'_>) -> Result<(), Stop> {
        self.done += bytes;
        hooks.step(self.done, self.total)
    }

    /// Counts an L1 table and notes the L2 tables that it names.
    async fn l1_table(
        &mut self,
        source: &impl Source,
        table: Table,
        what: &str,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let Table { offset, bytes, active } = table;
        self.count(offset, bytes, what, report)?;
        self.own(offset, bytes, if active { Holds::L1 } else { Holds::SnapshotL1 });
        self.whole(offset, bytes, what, report);
        let there = bytes.min(self.layout.file_len.saturating_sub(offset.from_start()));
        source
            .read_all("reading an L1 table", pieces_of(offset, there), |place, piece| {
                let first = place * READ_BYTES / 8;
                for (at, raw) in piece.as_chunks::<8>().0.iter().enumerate() {
                    let entry = u64::from_be_bytes(*raw);
                    if entry != 0 {
                        // At most 2^22 entries.
                        let index = u32::try_from(first + at).unwrap_or(u32::MAX);
                        self.l1_entry(index, entry, active, what, report);
                    }
                }
                Ok(())
            })
            .await?;
        self.merge_tables()
    }

    fn l1_entry(
        &mut self,
        index: u32,
        entry: u64,
        active: bool,
        what: &str,
        report: &mut CheckReport,
    ) {
        let offset = HostOffset(entry & OFFSET_MASK);
        let bad = entry & L1_RESERVED != 0 || self.layout.in_cluster(offset) != Bytes::ZERO;
        self.damaged += u64::from(bad);
        if entry & L1_RESERVED != 0 {
            report.corrupt(1, || format!("ERROR {what}: entry {entry:#x} has reserved bits set"));
        }
        if self.layout.in_cluster(offset) != Bytes::ZERO {
            report.corrupt(1, || {
                format!("ERROR {what}: entry {entry:#x} names an L2 table that is not aligned")
            });
        }
        let index = if active { index } else { NO_INDEX };
        let mut table = TableUse { offset, index, ..TableUse::default() };
        // An entry for the header counts like any other, only its flag does not.
        match (active, offset, entry & COPIED) {
            (false, _, _) => table.snapshots = 1,
            (true, HostOffset(0), _) => table.header = 1,
            (true, _, 0) => table.plain = 1,
            _ => table.copied = 1,
        }
        self.tables.push(table);
    }

    /// Sorts the tables and joins the uses of each.
    fn merge_tables(&mut self) -> Result<(), Stop> {
        self.tables.sort_unstable_by_key(|table| table.offset);
        self.tables.dedup_by(|next, first| {
            let same = next.offset == first.offset;
            if same {
                first.index = if next.index == first.index { first.index } else { NO_INDEX };
                first.copied = first.copied.saturating_add(next.copied);
                first.plain = first.plain.saturating_add(next.plain);
                first.header = first.header.saturating_add(next.header);
                first.snapshots = first.snapshots.saturating_add(next.snapshots);
            }
            same
        });
        let bytes = Bytes::of(self.tables.len() * size_of::<TableUse>());
        if bytes > CHECK_BYTES_MAX / 4 { Err(Stop::Memory) } else { Ok(()) }
    }

    async fn snapshots(
        &mut self,
        source: &impl Source,
        header: &Header,
        report: &mut CheckReport,
        hooks: CheckHooks<'_>,
    ) -> Result<(), Stop> {
        let (snapshots, len) = tables::snapshots(source, header, report).await?;
        self.snapshot_table_len = len;
        self.incomplete_snapshots = snapshots.iter().filter(|s| s.incomplete).count() as u64;
        let has_known_len = !snapshots.iter().any(|snapshot| snapshot.has_too_much);
        if self.layout.external && !snapshots.is_empty() {
            report.corrupt(1, || {
                format!(
                    "ERROR {} snapshots in an image with an external data file",
                    snapshots.len()
                )
            });
        }
        let mut bytes_sum = Bytes::ZERO;
        for (number, snapshot) in (0u32..).zip(snapshots) {
            hooks.step(self.done, self.total)?;
            let (offset, name) = (snapshot.offset, &snapshot.name);
            let bytes = Bytes(u64::from(snapshot.entries) * 8);
            if self.layout.in_cluster(offset) != Bytes::ZERO {
                report.corrupt(1, || {
                    format!("ERROR snapshot {name}: its L1 table at {offset:#x} is not aligned")
                });
                self.lost_snapshots.push((number, snapshot.name));
                continue;
            }
            if bytes > L1_BYTES_MAX {
                report.corrupt(1, || {
                    format!("ERROR snapshot {name}: its L1 table has {bytes} bytes, too many")
                });
                self.lost_snapshots.push((number, snapshot.name));
                continue;
            }
            bytes_sum += bytes;
            if bytes_sum > CHECK_TABLES_BYTES_MAX {
                return Err(Stop::Memory);
            }
            let what = format!("the L1 table of snapshot {name}");
            let table = Table { offset, bytes, active: false };
            self.l1_table(source, table, &what, report).await?;
            self.snapshots.push(snapshot);
        }
        self.count(header.snapshots_offset, len, "the snapshot table", report)?;
        self.own(header.snapshots_offset, len, Holds::Snapshots);
        let what = "the snapshot table";
        if has_known_len {
            self.whole(header.snapshots_offset, len, what, report);
        } else {
            // A length that comes from a wrong number says little about the file: such a table is
            // repaired as by QEMU. But snapshots that are not found there may have what is leaked.
            self.named_whole(header.snapshots_offset, len, what, report);
            self.hidden_snapshots = true;
        }
        Ok(())
    }

    /// Counts the L2 tables and reads those inside the file.
    async fn l2_tables(
        &mut self,
        source: &impl Source,
        report: &mut CheckReport,
        hooks: CheckHooks<'_>,
    ) -> Result<(), Stop> {
        let (len, size) = (self.layout.cluster_len(), self.layout.cluster_size());
        let tables = std::mem::take(&mut self.tables);
        for table in &tables {
            let uses = Uses { total: table.total(), copied: table.copied, plain: table.plain };
            self.count_uses(table.offset, size, uses, || "an L2 table".to_owned(), report)?;
            if self.layout.in_cluster(table.offset) == Bytes::ZERO
                && table.offset.from_start() < self.layout.file_len
            {
                let cluster = table.offset >> self.layout.cluster_bits;
                let claim = Claim { cluster, holds: Holds::L2, uses: table.total(), block: 0 };
                self.claims.push(claim);
                self.whole(table.offset, size, "an L2 table", report);
            }
        }
        let inside =
            &tables[..tables.partition_point(|t| t.offset.from_start() < self.layout.file_len)];
        self.total += inside.len() as u64 * size;
        let runs = Runs { tables: inside, size };
        let mut at = 0;
        source
            .read_all("reading L2 tables", runs, |_, piece| {
                for bytes in piece.chunks_exact(len) {
                    self.l2_table(bytes, inside[at], report)?;
                    at += 1;
                }
                self.progress(Bytes::of(piece.len()), hooks)
            })
            .await?;
        self.tables = tables;
        Ok(())
    }

    /// Reads the refcount table; what is wrong with it is found later.
    async fn read_refcount_table(
        &mut self,
        source: &impl Source,
        header: &Header,
    ) -> Result<(), Stop> {
        let table = header.refcount_table;
        // At most 8 MiB: bounded by the header.
        let len = usize::try_from(table.len()).map_err(|_| Stop::Memory)?;
        let raw = source.read("reading the refcount table", table.start, len).await?;
        self.blocks = raw.as_chunks::<8>().0.iter().map(|b| u64::from_be_bytes(*b)).collect();
        let blocks = self.blocks.iter().filter(|entry| **entry != 0).count() as u64;
        self.total += Bytes::of_clusters(blocks, self.layout.cluster_bits);
        Ok(())
    }

    /// Counts the refcount table and its blocks.
    fn refcount_table(&mut self, header: &Header, report: &mut CheckReport) -> Result<(), Stop> {
        let layout = self.layout;
        let table = header.refcount_table;
        self.count(table.start, table.len(), "the refcount table", report)?;
        self.own(table.start, table.len(), Holds::RefcountTable);
        let size = layout.cluster_size();
        let max = layout.refcount_max();
        for index in 0..self.blocks.len() {
            let entry = self.blocks[index];
            if entry == 0 {
                continue;
            }
            let offset = HostOffset(entry & !BLOCK_RESERVED);
            let cluster = offset >> layout.cluster_bits;
            let wrong = if entry & BLOCK_RESERVED != 0 {
                "reserved bits are set"
            } else if layout.in_cluster(offset) != Bytes::ZERO {
                "the block is not aligned"
            } else if cluster >= layout.clusters() {
                "the block lies past the end of the file"
            } else {
                self.count(offset, size, "a refcount block", report)?;
                // At most 2^20 entries.
                let block = u32::try_from(index).unwrap_or(u32::MAX);
                let holds = Holds::RefcountBlock;
                self.claims.push(Claim { cluster, holds, uses: 1, block });
                if u64::from(self.counts.get(cluster).total).min(max) == 1 {
                    continue;
                }
                "something else refers to the block too"
            };
            self.blocks_broken = true;
            report.corrupt(1, || {
                format!("ERROR refcount table, entry {index} ({entry:#x}): {wrong}")
            });
        }
        Ok(())
    }
}

/// Reads of L2 tables, neighbours in one.
struct Runs<'a> {
    tables: &'a [TableUse],
    size: Bytes,
}

impl Iterator for Runs<'_> {
    type Item = (HostOffset, usize);

    fn next(&mut self) -> Option<(HostOffset, usize)> {
        let start = self.tables.first()?.offset;
        let max = (Bytes::of(READ_BYTES) / self.size).max(1);
        let mut count = 0u64;
        while count < max
            && let Some(table) = self.tables.get(usize::try_from(count).unwrap_or(usize::MAX))
            && table.offset == start + count * self.size
        {
            count += 1;
        }
        let taken = usize::try_from(count).unwrap_or(1);
        self.tables = self.tables.get(taken..).unwrap_or_default();
        Some((start, usize::try_from(count * self.size).unwrap_or(0)))
    }
}
