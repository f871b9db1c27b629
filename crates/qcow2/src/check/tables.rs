//! The directories of snapshots and bitmaps, as far as a check needs them.
//!
//! Promises: memory is bounded by [`limits`](crate::limits); a directory that cannot be understood
//! is an error, since what it refers to is then not known.

use std::ops::Range;

use crate::bitmaps::directory::{AUTO, EXTRA_COMPATIBLE, IN_USE, TYPE_DIRTY_TRACKING};
use crate::bitmaps::tables::table_entries;
use crate::check::layout::{Layout, OFFSET_MASK};
use crate::check::report::CheckReport;
use crate::check::source::Source;
use crate::check::stop::Stop;
use crate::extensions::{BitmapDirectory, u16_at, u32_at, u64_at};
use crate::header::Header;
use crate::limits::{
    BITMAP_DIRECTORY_BYTES_MAX, BITMAP_NAME_BYTES_MAX, BITMAPS_MAX,
    SNAPSHOT_ENTRY_BYTES_MIN as ENTRY_BYTES_MIN, SNAPSHOT_EXTRA_BYTES_MAX,
    SNAPSHOT_TABLE_BYTES_MAX,
};
use crate::units::{Bytes, HostOffset};

/// Bytes of a table that are read at first.
const FIRST_BYTES: Bytes = Bytes(64 << 10);
/// Version 3 wants the 64-bit sizes of machine state and disk in each snapshot.
const EXTRA_BYTES_V3: usize = 16;
/// Extra data that has a meaning: these, and the instruction count.
const EXTRA_BYTES_KNOWN: usize = 24;
/// Most entries of a bitmap table, and most bytes of one bitmap: the limits of QEMU.
const BITMAP_ENTRIES_MAX: u32 = 0x800_0000;
const BITMAP_BYTES_MAX: Bytes = Bytes(0x2000_0000);
/// Bytes of a bitmap directory entry without extra data and name.
const BITMAP_ENTRY_BYTES: usize = 24;
/// Most extra data of one bitmap, as an open takes it.
const BITMAP_EXTRA_BYTES_MAX: u32 = 1024;

/// The L1 table of one snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SnapshotL1 {
    pub(super) offset: HostOffset,
    pub(super) entries: u32,
    /// Id and name, for messages.
    pub(super) name: String,
    /// Its entry lacks what version 3 wants, or has more extra data than is allowed.
    pub(super) incomplete: bool,
    /// It has more extra data than is allowed, so where the entries behind it begin is not known.
    pub(super) has_too_much: bool,
}

/// Reads the snapshot table: the snapshots, and the bytes that the table has.
///
/// Errors: `Corrupt` when an entry does not fit.
pub(super) async fn snapshots(
    source: &impl Source,
    header: &Header,
    report: &mut CheckReport,
) -> Result<(Vec<SnapshotL1>, Bytes), Stop> {
    if header.snapshots == 0 {
        return Ok((Vec::new(), Bytes::ZERO));
    }
    let mut want = FIRST_BYTES;
    loop {
        let len = usize::try_from(want).map_err(|_| Stop::Memory)?;
        // What the file does not have reads as zeroes.
        let bytes = source.read("reading the snapshot table", header.snapshots_offset, len).await?;
        let mut found = CheckReport::default();
        match parse_snapshots(&bytes, header, &mut found)? {
            Some(parsed) => {
                report.corruptions += found.corruptions;
                found.messages.into_iter().for_each(|text| report.say(|| text));
                return Ok(parsed);
            }
            None if want >= SNAPSHOT_TABLE_BYTES_MAX => {
                return Err(Stop::Corrupt(format!(
                    "the snapshot table at {:#x} has more than {SNAPSHOT_TABLE_BYTES_MAX} bytes",
                    header.snapshots_offset
                )));
            }
            None => want = want * 2,
        }
    }
}

/// `None`: the table goes on behind `bytes`.
fn parse_snapshots(
    bytes: &[u8],
    header: &Header,
    report: &mut CheckReport,
) -> Result<Option<(Vec<SnapshotL1>, Bytes)>, Stop> {
    let mut snapshots = Vec::new();
    let mut at = 0usize;
    for number in 0..header.snapshots {
        at = at.next_multiple_of(8);
        let Some(head) = bytes.get(at..at + ENTRY_BYTES_MIN) else { return Ok(None) };
        let extra = u32_at(head, 36);
        let too_much = extra > SNAPSHOT_EXTRA_BYTES_MAX;
        let extra = extra as usize;
        let (id_len, name_len) = (usize::from(u16_at(head, 12)), usize::from(u16_at(head, 14)));
        let names = at + ENTRY_BYTES_MIN + extra;
        let Some(end) = names.checked_add(id_len + name_len) else { return Ok(None) };
        let Some(names) = bytes.get(names..end) else { return Ok(None) };
        let (id, name) = names.split_at(id_len);
        let incomplete = header.version >= 3 && extra < EXTRA_BYTES_V3;
        if too_much {
            report.corrupt(1, || {
                format!(
                    "ERROR snapshot table entry {number} has {extra} bytes of extra data, more \
                     than {SNAPSHOT_EXTRA_BYTES_MAX}"
                )
            });
        }
        if incomplete {
            report.corrupt(1, || format!("ERROR snapshot table entry {number} is incomplete"));
        }
        snapshots.push(SnapshotL1 {
            offset: HostOffset(u64_at(head, 0)),
            entries: u32_at(head, 8),
            name: format!(
                "{} ({})",
                String::from_utf8_lossy(id).escape_debug(),
                String::from_utf8_lossy(name).escape_debug()
            ),
            incomplete: incomplete || too_much,
            has_too_much: too_much,
        });
        at = end;
    }
    Ok(Some((snapshots, Bytes::of(at))))
}

/// One entry of the bitmap directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BitmapEntry {
    /// Host offset and entries of the bitmap table.
    pub(super) offset: HostOffset,
    pub(super) entries: u32,
    pub(super) name: String,
    raw_name: Vec<u8>,
    pub(super) flags: u32,
    /// Where the entry lies in the directory, without padding.
    pub(super) place: Range<usize>,
    /// Why the bitmap cannot be used, if so.
    pub(super) bad: Option<String>,
}

/// Reads the bitmap directory. The inner error says why it cannot be understood.
///
/// Errors: `Io`, `Memory`.
pub(super) async fn bitmaps(
    source: &impl Source,
    header: &Header,
    directory: BitmapDirectory,
) -> Result<Result<Vec<BitmapEntry>, String>, Stop> {
    let layout = Layout::new(header, source.len());
    let bad =
        |reason: &str| Ok(Err(format!("the bitmap directory at {:#x} {reason}", directory.offset)));
    if directory.count == 0 || directory.count > BITMAPS_MAX {
        return bad(&format!("has {} entries", directory.count));
    }
    let end = directory.offset.checked_add(directory.len);
    if directory.offset == HostOffset(0)
        || layout.in_cluster(directory.offset) != Bytes::ZERO
        || directory.len > BITMAP_DIRECTORY_BYTES_MAX
        || end.is_none_or(|end| end.from_start() > source.len())
    {
        return bad(&format!("({} bytes) is not aligned or not inside the file", directory.len));
    }
    let len = usize::try_from(directory.len).map_err(|_| Stop::Memory)?;
    let bytes = source.read("reading the bitmap directory", directory.offset, len).await?;
    let mut bitmaps = Vec::new();
    let mut at = 0usize;
    for _ in 0..directory.count {
        let Some(entry) = bitmap_entry(&bytes, at, layout, header.geometry.virtual_size) else {
            return bad(&format!("is not complete, or its entry at byte {at} makes no sense"));
        };
        at = entry.place.end.next_multiple_of(8);
        bitmaps.push(entry);
    }
    if at < bytes.len() {
        let (len, count) = (directory.len, directory.count);
        return bad(&format!("has {len} bytes, more than its {count} entries take"));
    }
    refuse_doubles(&mut bitmaps);
    Ok(Ok(bitmaps))
}

/// A name that two bitmaps have does not say which one is meant: both are unusable.
fn refuse_doubles(bitmaps: &mut [BitmapEntry]) {
    let mut order: Vec<usize> = (0..bitmaps.len()).collect();
    order.sort_by(|one, other| bitmaps[*one].raw_name.cmp(&bitmaps[*other].raw_name));
    let doubles: Vec<usize> = order
        .windows(2)
        .filter(|pair| bitmaps[pair[0]].raw_name == bitmaps[pair[1]].raw_name)
        .flatten()
        .copied()
        .collect();
    for number in doubles {
        let bitmap = &mut bitmaps[number];
        bitmap.bad.get_or_insert_with(|| "another one has the same name".to_owned());
    }
}

/// The entry at byte `at`; `None`: where it ends is not known.
///
/// * `disk_bytes`: size of the disk.
fn bitmap_entry(bytes: &[u8], at: usize, layout: Layout, disk_bytes: Bytes) -> Option<BitmapEntry> {
    let head = bytes.get(at..at + BITMAP_ENTRY_BYTES)?;
    let offset = HostOffset(u64_at(head, 0));
    let (entries, flags) = (u32_at(head, 8), u32_at(head, 12));
    let (kind, granularity) = (head[16], head[17]);
    let (name_len, extra_len) = (u32::from(u16_at(head, 18)), u32_at(head, 20));
    if name_len > BITMAP_NAME_BYTES_MAX || extra_len > BITMAP_EXTRA_BYTES_MAX {
        return None;
    }
    let names = at + BITMAP_ENTRY_BYTES + extra_len as usize;
    let end = names + name_len as usize;
    let raw_name = bytes.get(names..end)?.to_vec();
    let name = String::from_utf8_lossy(&raw_name).escape_debug().to_string();
    let size = Bytes::of_clusters(entries.into(), layout.cluster_bits);
    // One that was not saved may be of a disk of another size.
    let wanted = || table_entries(disk_bytes, u32::from(granularity), layout.cluster_bits);
    let bad = if name_len == 0 {
        Some("it has no name".to_owned())
    } else if raw_name.contains(&0) {
        Some("its name has a NUL byte in it".to_owned())
    } else if kind != TYPE_DIRTY_TRACKING {
        Some(format!("its type is {kind}"))
    } else if flags & !(IN_USE | AUTO | EXTRA_COMPATIBLE) != 0 {
        Some(format!("it has unknown flags ({flags:#x})"))
    } else if !(9..=31).contains(&granularity) {
        Some(format!("granularity_bits is {granularity}, not 9 to 31"))
    } else if extra_len != 0 && flags & EXTRA_COMPATIBLE == 0 {
        Some(format!("it has {extra_len} bytes of extra data that may change its meaning"))
    } else if entries == 0 || entries > BITMAP_ENTRIES_MAX || size > BITMAP_BYTES_MAX {
        Some(format!("its table has {entries} entries"))
    } else if flags & IN_USE == 0 && u64::from(entries) != wanted() {
        Some(format!("its table has {entries} entries, not {}", wanted()))
    } else if offset == HostOffset(0) || layout.in_cluster(offset) != Bytes::ZERO {
        Some(format!("its table at {offset:#x} is not aligned"))
    } else {
        None
    };
    Some(BitmapEntry { offset, entries, name, raw_name, flags, place: at..end, bad })
}

/// The clusters that the words of a bitmap table name, as host offsets; an error says why it cannot
/// be right.
pub(super) fn bitmap_clusters(words: &[u64], layout: Layout) -> Result<Vec<HostOffset>, String> {
    let mut clusters = Vec::new();
    for word in words {
        let offset = HostOffset(word & OFFSET_MASK);
        let reserved = word & !(OFFSET_MASK | 1) != 0;
        if reserved
            || (offset != HostOffset(0)
                && (word & 1 != 0 || layout.in_cluster(offset) != Bytes::ZERO))
        {
            return Err(format!("the table entry {word:#x} is not allowed"));
        }
        if offset != HostOffset(0) {
            clusters.push(offset);
        }
    }
    Ok(clusters)
}

/// The bitmap directory `bytes` without the entries numbered in `dropped` (rising).
pub(super) fn without_bitmaps(bytes: &[u8], entries: &[Range<usize>], dropped: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for (number, place) in (0u32..).zip(entries) {
        if dropped.binary_search(&number).is_err() {
            out.extend_from_slice(bytes.get(place.clone()).unwrap_or_default());
            out.resize(out.len().next_multiple_of(8), 0);
        }
    }
    out
}

/// The snapshot table with all that version 3 wants in each entry; the 64-bit sizes are added where
/// they are missing, and extra data that is more than allowed is cut to what has a meaning.
///
/// * `bytes`: a table that [`snapshots`] understood.
/// * `dropped`: numbers of entries that are left out, rising.
/// * `disk_bytes`: size of the disk, for the snapshots that do not say theirs.
pub(super) fn completed(bytes: &[u8], count: u32, dropped: &[u32], disk_bytes: Bytes) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + count as usize * EXTRA_BYTES_V3);
    let mut at = 0usize;
    for number in 0..count {
        at = at.next_multiple_of(8);
        let Some(head) = bytes.get(at..at + ENTRY_BYTES_MIN) else { break };
        let extra_len = u32_at(head, 36) as usize;
        let names_len = usize::from(u16_at(head, 12)) + usize::from(u16_at(head, 14));
        let start = at + ENTRY_BYTES_MIN;
        let end = start + extra_len + names_len;
        let Some(rest) = bytes.get(start..end) else { break };
        at = end;
        if dropped.binary_search(&number).is_ok() {
            continue;
        }
        out.resize(out.len().next_multiple_of(8), 0);
        let (extra, names) = rest.split_at(extra_len);
        let extra = if extra_len > SNAPSHOT_EXTRA_BYTES_MAX as usize {
            extra.get(..EXTRA_BYTES_KNOWN).unwrap_or_default()
        } else {
            extra
        };
        let mut extra = extra.to_vec();
        if extra.len() < 8 {
            extra = u64::from(u32_at(head, 32)).to_be_bytes().to_vec();
        }
        if extra.len() < EXTRA_BYTES_V3 {
            extra.truncate(8);
            extra.extend_from_slice(&disk_bytes.0.to_be_bytes());
        }
        out.extend_from_slice(&head[..36]);
        // At most 1024.
        out.extend_from_slice(&u32::try_from(extra.len()).unwrap_or(0).to_be_bytes());
        out.extend_from_slice(&extra);
        out.extend_from_slice(names);
    }
    out
}
