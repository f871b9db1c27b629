//! MBR partition tables: four entries in the first sector, and chains of logical partitions.
//!
//! Promises: as `partition`. A chain is followed for [`RECORDS_MAX`] records at most, each of them
//! once and inside the extended partition. Sectors have 512 bytes, but for a disk that is on a
//! device with larger ones. Partitions are counted, and so numbered, as the kernel does
//! (`block/partitions/msdos.c`).

use ringdisk_qcow2::{Bytes, GuestOffset};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::{Partition, Scheme, Source, Table, read};
use crate::Error;
use crate::limits::SECTOR_BYTES;

/// Partitions with a place in the first sector: the numbers up to this one.
pub(super) const PRIMARIES: u32 = 4;
/// Extended boot records that are read: the kernel has numbers for 256 partitions of a disk.
const RECORDS_MAX: usize = 256;
/// Where the entries are in a sector, bytes.
const ENTRIES_AT: usize = 446;

/// An entry, in its format on disk.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Entry {
    /// 0x80: to boot from; 0 otherwise.
    flag: u8,
    first_chs: [u8; 3],
    kind: u8,
    last_chs: [u8; 3],
    start: U32,
    sectors: U32,
}

impl Entry {
    fn is_used(&self) -> bool {
        self.sectors.get() != 0
    }

    fn is_extended(&self) -> bool {
        self.is_used() && matches!(self.kind, 0x05 | 0x0f | 0x85)
    }

    /// * `base`: sector that the entry counts from.
    /// * `sector`: its size.
    fn partition(&self, number: u32, base: u64, sector: Bytes) -> Partition {
        // Three numbers of 32 bits: no product of them with a sector overflows.
        Partition {
            number,
            start: start_of(base + u64::from(self.start.get()), sector),
            len: u64::from(self.sectors.get()) * sector,
            is_extended: self.is_extended(),
            fault: None,
        }
    }
}

/// The first byte of sector `number`, which is the sum of a few numbers of 32 bits.
fn start_of(number: u64, sector: Bytes) -> GuestOffset {
    GuestOffset::after(number * sector)
}

/// The four entries of a boot sector.
pub(super) type Entries = [Entry; 4];

/// The entries of a sector with a table. `None`: it has none. A boot sector of a file system has
/// the same signature, and code in place of the entries, which is found by their flags.
pub(super) fn entries(sector: &[u8]) -> Option<Entries> {
    let entries = raw_entries(sector)?;
    entries.iter().all(|entry| matches!(entry.flag, 0 | 0x80)).then_some(entries)
}

/// As [`entries`], by the signature alone.
fn raw_entries(sector: &[u8]) -> Option<Entries> {
    let (entries, signature) = sector.get(ENTRIES_AT..512)?.split_at_checked(64)?;
    let entries = Entries::read_from_bytes(entries).ok()?;
    (signature == [0x55, 0xaa]).then_some(entries)
}

/// Whether the table only protects a GPT from programs that do not know GPTs.
pub(super) fn is_protective(entries: &Entries) -> bool {
    entries.iter().any(|entry| entry.kind == 0xee && entry.is_used())
}

/// All partitions.
///
/// * `entries`: of the first sector.
pub(super) async fn table(source: &impl Source, entries: &Entries) -> Result<Table, Error> {
    let sector = source.sector();
    let own = vec![(GuestOffset::ZERO, sector)];
    let mut table = Table { scheme: Scheme::Mbr, partitions: Vec::new(), own, damage: None };
    for (number, entry) in (1..).zip(entries).filter(|(_, entry)| entry.is_used()) {
        table.partitions.push(entry.partition(number, 0, sector));
    }
    for entry in entries.iter().filter(|entry| entry.is_extended()) {
        logical(source, &mut table, entry).await?;
    }
    Ok(table)
}

/// Adds the logical partitions of an extended one, record by record.
async fn logical(source: &impl Source, table: &mut Table, extended: &Entry) -> Result<(), Error> {
    let base = u64::from(extended.start.get());
    let end = base + u64::from(extended.sectors.get());
    let sector = source.sector();
    // The record, and how long the entry that leads to it says that it is with its partition.
    let (mut at, mut len) = (base, u64::from(extended.sectors.get()));
    for _ in 0..RECORDS_MAX {
        let bytes = read(source, start_of(at, sector), SECTOR_BYTES).await?;
        let Some(entries) = bytes.as_deref().and_then(raw_entries) else {
            // An empty extended partition needs no record.
            let is_damage = at != base || bytes.is_none();
            table.note(is_damage, format!("there is no boot record at sector {at}"));
            return Ok(());
        };
        table.own.push((start_of(at, sector), sector));
        data_of(table, &entries, Record { at, len, sector }, base..end);
        let Some(next) = entries.iter().find(|entry| entry.is_extended()) else { return Ok(()) };
        (at, len) = (base + u64::from(next.start.get()), u64::from(next.sectors.get()));
        if at >= end {
            table.note(
                true,
                format!(
                    "the next boot record, at sector {at}, lies outside the extended partition"
                ),
            );
            return Ok(());
        }
        if table.own.contains(&(start_of(at, sector), sector)) {
            table.note(true, format!("the chain of boot records comes back to sector {at}"));
            return Ok(());
        }
    }
    table.note(true, format!("there are more than {RECORDS_MAX} boot records"));
    Ok(())
}

/// A boot record of a chain, in sectors.
#[derive(Clone, Copy, Debug)]
struct Record {
    at: u64,
    /// With its partition, as the entry says that leads to it.
    len: u64,
    /// Size of a sector.
    sector: Bytes,
}

/// Adds the partitions that a boot record names. The first two entries are for them and for the
/// next record; more are counted only where they make sense: inside the extended partition, and
/// inside what the entry gave that leads to the record.
fn data_of(table: &mut Table, entries: &Entries, record: Record, extended: std::ops::Range<u64>) {
    for (index, entry) in entries.iter().enumerate() {
        let start = record.at + u64::from(entry.start.get());
        let end = start + u64::from(entry.sectors.get());
        let is_inside = extended.contains(&start) && end <= extended.end;
        let is_counted = index < 2 || (is_inside && end <= record.at + record.len);
        if !entry.is_used() || entry.is_extended() || !is_counted {
            continue;
        }
        let last = table.partitions.last().map_or(0, |each| each.number);
        let mut partition = entry.partition(last.max(PRIMARIES) + 1, record.at, record.sector);
        if !is_inside {
            partition.fault = Some("it lies outside the extended partition");
        }
        table.partitions.push(partition);
    }
}

impl Table {
    fn note(&mut self, is_damage: bool, text: String) {
        if is_damage {
            self.damage.get_or_insert(text);
        }
    }
}
