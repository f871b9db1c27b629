//! Counts the references of one L2 table: the part of a scan that takes the time of a large image.
//!
//! Promises: reads each entry once; an entry that cannot be right goes to the report.

use crate::check::counts::Uses;
use crate::check::layout::{COPIED, EntryKind, L2_RESERVED, OFFSET_MASK, ZERO};
use crate::check::report::{CheckHooks, CheckReport};
use crate::check::scan::{CutCompressed, Fixable, NO_INDEX, Scan, TableUse};
use crate::check::source::Source;
use crate::check::stop::Stop;
use crate::compressed::decompress;
use crate::header::Header;
use crate::limits::CHECK_PAST_END_MAX;
use crate::units::{Bytes, HostOffset};

/// Cut clusters that are decompressed to see what is left of them: an image of a file system ends
/// in one of them.
const CUT_COMPRESSED_MAX: usize = 64;

impl Scan {
    /// Counts what one L2 table refers to.
    pub(super) fn l2_table(
        &mut self,
        bytes: &[u8],
        table: TableUse,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let mut walk = Walk::new(table);
        if self.layout.extended {
            for (index, raw) in bytes.as_chunks::<16>().0.iter().enumerate() {
                let (entry, bitmap) = raw.split_at(8);
                let entry = crate::extensions::u64_at(entry, 0);
                let bitmap = crate::extensions::u64_at(bitmap, 0);
                if entry | bitmap != 0 {
                    self.entry(index, entry, bitmap, &mut walk, report)?;
                }
            }
        } else {
            self.standard_entries(bytes, &mut walk, report)?;
        }
        let active = u64::from(table.active().saturating_add(table.header));
        report.allocated_clusters += walk.allocated * active;
        report.fragmented_clusters += walk.fragmented * active;
        report.compressed_clusters += walk.compressed * active;
        Ok(())
    }

    /// The loop that a large image spends its time in.
    fn standard_entries(
        &mut self,
        bytes: &[u8],
        walk: &mut Walk,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let bits = self.layout.cluster_bits;
        let clusters = self.layout.clusters();
        let place_bits = OFFSET_MASK & !(self.layout.cluster_size().0 - 1);
        // Anything but the flag and an aligned place needs a closer look.
        let unusual = !(COPIED | place_bits);
        let fast = !self.layout.external;
        for (index, raw) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let entry = u64::from_be_bytes(*raw);
            if entry == 0 {
                continue;
            }
            let offset = HostOffset(entry & place_bits);
            let cluster = offset >> bits;
            if fast && entry & unusual == 0 && offset != HostOffset(0) && cluster < clusters {
                walk.place(offset, Bytes::of_clusters(1, bits));
                let (uses, narrow) = if entry & COPIED == 0 { walk.plain } else { walk.copied };
                match narrow {
                    Some(narrow) => self.counts.add_narrow(cluster, narrow, uses)?,
                    None => self.counts.add(cluster, uses)?,
                }
                continue;
            }
            self.entry(index, entry, 0, walk, report)?;
        }
        Ok(())
    }

    /// One L2 entry, with all that can be wrong with it.
    fn entry(
        &mut self,
        index: usize,
        entry: u64,
        bitmap: u64,
        walk: &mut Walk,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let layout = self.layout;
        let (table, visits) = (walk.table.offset, u64::from(walk.table.total()));
        let at = At { table, index, entry, visits };
        let kind = layout.kind(entry);
        if kind != EntryKind::Compressed && entry & L2_RESERVED != 0 {
            at.wrong(report, "reserved bits are set");
            self.damaged += 1;
        }
        if layout.has_reserved_zero(entry) {
            report.own_finding(visits, || {
                format!(
                    "ERROR L2 table at {table:#x}, entry {index} ({entry:#x}): bit 0 is set, which \
                     means nothing in this image"
                )
            });
            self.damaged += 1;
        }
        match kind {
            EntryKind::Compressed => return self.compressed(at, bitmap, walk, report),
            EntryKind::Allocated => return self.allocated(at, bitmap, walk, report),
            EntryKind::Unallocated => {
                if allocated_of(bitmap) != 0 {
                    at.wrong(report, "subclusters are allocated, but there is no cluster");
                    self.damaged += 1;
                }
            }
        }
        Ok(())
    }

    /// One L2 entry of compressed data.
    fn compressed(
        &mut self,
        at: At,
        bitmap: u64,
        walk: &mut Walk,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let At { table, index, entry, .. } = at;
        let layout = self.layout;
        if entry & COPIED != 0 {
            at.wrong(report, "a compressed cluster has the COPIED flag");
        }
        if layout.external {
            at.wrong(report, "a compressed cluster in an image with an external data file");
            self.damaged += 1;
            return Ok(());
        }
        if bitmap != 0 {
            at.wrong(report, "a compressed cluster has a subcluster bitmap");
            self.damaged += 1;
            return Ok(());
        }
        let (offset, len) = layout.compressed(entry);
        let uses = Uses::unflagged(walk.table.total());
        let what = || format!("L2 table at {table:#x}, entry {index}: compressed data");
        self.count_uses(offset, len, uses, what, report)?;
        self.note_cut(table, index, offset, len);
        walk.allocated += 1;
        walk.compressed += 1;
        walk.fragmented += 1;
        Ok(())
    }

    /// One L2 entry that names a cluster.
    fn allocated(
        &mut self,
        at: At,
        bitmap: u64,
        walk: &mut Walk,
        report: &mut CheckReport,
    ) -> Result<(), Stop> {
        let At { table, index, entry, visits } = at;
        let layout = self.layout;
        let (allocated, zeroes) = (allocated_of(bitmap), zeroes_of(bitmap));
        let uses = if entry & COPIED == 0 { walk.plain.0 } else { walk.copied.0 };
        let offset = HostOffset(entry & OFFSET_MASK);
        if layout.external {
            // No counts exist there, so every cluster has exactly one user.
            if uses.plain > 0 {
                self.external_flags += u64::from(uses.plain);
                report.corrupt(u64::from(uses.plain), || {
                    format!(
                        "ERROR L2 table at {table:#x}, entry {index} ({entry:#x}): the \
                         COPIED flag is missing"
                    )
                });
            }
        }
        // Such bits mean something that we do not know, so nothing else of the entry can be
        // believed; it counts as damaged.
        let is_rubbish = entry & L2_RESERVED != 0 || layout.has_reserved_zero(entry);
        if allocated & zeroes != 0 {
            at.wrong(report, "subclusters are both allocated and zero");
            if !is_rubbish {
                self.not_readable(table, index);
            }
        }
        let misplaced = self.misplaced(index, offset, walk, report);
        let data = if layout.extended { allocated != 0 } else { entry & ZERO == 0 };
        if let Some(len) =
            layout.data_len.filter(|len| data && !misplaced && offset.from_start() >= *len)
        {
            report.own_finding(visits, || {
                format!(
                    "ERROR L2 table at {table:#x}, entry {index}: the cluster at \
                     {offset:#x} lies past the end of the data file at {len:#x}"
                )
            });
        }
        if layout.in_cluster(offset) != Bytes::ZERO && !misplaced {
            let what = if data { "data" } else { "reserved space" };
            at.wrong(report, &format!("the place of {what} is not aligned to a cluster"));
            if data || is_rubbish {
                self.damaged += 1;
            } else {
                self.not_readable(table, index);
            }
        }
        walk.place(offset, layout.cluster_size());
        if !layout.external {
            let what = || format!("L2 table at {table:#x}, entry {index}: the cluster");
            self.count_uses(offset, layout.cluster_size(), uses, what, report)?;
        }
        Ok(())
    }

    /// Looks whether an entry of an image with an external data file names another place there than
    /// that of its guest cluster. `qemu-img check` does not, and QEMU then reads nothing there.
    fn misplaced(
        &mut self,
        index: usize,
        offset: HostOffset,
        walk: &Walk,
        report: &mut CheckReport,
    ) -> bool {
        let table = walk.table;
        // A table that is named twice is wrong anyway.
        if !self.layout.external || table.index == NO_INDEX {
            return false;
        }
        let start = HostOffset::after(u64::from(table.index) * self.layout.table_bytes());
        let place = start + Bytes::of_clusters(index as u64, self.layout.cluster_bits);
        if offset == place {
            return false;
        }
        let at = table.offset;
        report.own_finding(1, || {
            format!(
                "ERROR L2 table at {at:#x}, entry {index}: names the place {offset:#x} of the data \
                 file, not its own ({place:#x})"
            )
        });
        self.fixable(at, index, Some(place));
        true
    }

    /// Remembers a compressed cluster whose last sectors the file does not have.
    fn note_cut(&mut self, table: HostOffset, index: usize, offset: HostOffset, len: Bytes) {
        let layout = self.layout;
        let is_cut =
            layout.may_be_there(offset, len) && (offset + len).from_start() > layout.exact_len;
        if is_cut
            && self.cut_compressed.len() < CHECK_PAST_END_MAX
            && let Ok(index) = u32::try_from(index)
        {
            self.cut_compressed.push(CutCompressed { table, index, offset });
        }
    }

    /// Decompresses what there is of compressed clusters that the file cuts. `qemu-img check` does
    /// not.
    pub(super) async fn cut_compressed(
        &mut self,
        source: &impl Source,
        header: &Header,
        report: &mut CheckReport,
        hooks: CheckHooks<'_>,
    ) -> Result<(), Stop> {
        if self.cut_compressed.is_empty() {
            return Ok(());
        }
        let mut output = vec![0; self.layout.cluster_len()];
        for (number, cut) in std::mem::take(&mut self.cut_compressed).into_iter().enumerate() {
            hooks.step(self.done, self.total)?;
            // Not more than a cluster.
            let len = self.layout.exact_len.saturating_sub(cut.offset.from_start());
            let len = usize::try_from(len).map_err(|_| Stop::Memory)?;
            let is_whole = number < CUT_COMPRESSED_MAX && {
                let input = source.read("reading a compressed cluster", cut.offset, len).await?;
                decompress(header.compression, &input, &mut output, true).is_ok()
            };
            if !is_whole {
                self.damaged += 1;
                report.own_finding(1, || {
                    format!(
                        "ERROR L2 table at {:#x}, entry {}: the file ends inside the compressed \
                         data at {:#x}",
                        cut.table, cut.index, cut.offset
                    )
                });
            }
        }
        Ok(())
    }

    fn not_readable(&mut self, table: HostOffset, index: usize) {
        self.fixable(table, index, None);
    }

    fn fixable(&mut self, table: HostOffset, index: usize, place: Option<HostOffset>) {
        // The rest is found when the image is checked again.
        if self.fixable.len() < CHECK_PAST_END_MAX
            && let Ok(index) = u32::try_from(index)
        {
            self.fixable.push(Fixable { table, index, place });
        }
    }
}

/// An entry of an L2 table.
#[derive(Clone, Copy)]
struct At {
    table: HostOffset,
    index: usize,
    entry: u64,
    /// How often the table is named.
    visits: u64,
}

impl At {
    /// Reports that it is corrupt.
    fn wrong(self, report: &mut CheckReport, what: &str) {
        let At { table, index, entry, visits } = self;
        report.corrupt(visits, || {
            format!("ERROR L2 table at {table:#x}, entry {index} ({entry:#x}): {what}")
        });
    }
}

/// The subclusters that are allocated: the lower half of the bitmap of an entry.
#[allow(clippy::cast_possible_truncation)]
fn allocated_of(bitmap: u64) -> u32 {
    bitmap as u32
}

/// The subclusters that read as zeroes: the upper half.
fn zeroes_of(bitmap: u64) -> u32 {
    (bitmap >> 32) as u32
}

/// The state of a walk through one L2 table.
struct Walk {
    table: TableUse,
    /// What an entry with the COPIED flag counts, also in narrow form.
    copied: (Uses, Option<u8>),
    /// What an entry without it counts.
    plain: (Uses, Option<u8>),
    allocated: u64,
    fragmented: u64,
    compressed: u64,
    /// Where the next cluster would be if it followed the last one; 0: there was none.
    next: HostOffset,
}

impl Walk {
    fn new(table: TableUse) -> Walk {
        let (total, active) = (table.total(), table.active());
        let copied = Uses { total, copied: active, plain: 0 };
        let plain = Uses { total, copied: 0, plain: active };
        Walk {
            table,
            copied: (copied, copied.narrow()),
            plain: (plain, plain.narrow()),
            allocated: 0,
            fragmented: 0,
            compressed: 0,
            next: HostOffset(0),
        }
    }

    /// Notes a cluster that has a place.
    #[inline]
    fn place(&mut self, offset: HostOffset, size: Bytes) {
        self.allocated += 1;
        if self.next != HostOffset(0) && self.next != offset {
            self.fragmented += 1;
        }
        self.next = offset + size;
    }
}
