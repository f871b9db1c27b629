//! GUID partition tables.
//!
//! Promises: as `partition`. A table counts only when both of its checksums fit; its array has
//! [`ARRAY_MAX`] bytes at most. Where the first header is damaged the one at the end of the disk is
//! used, and that is logged.

use ringdisk_qcow2::{Bytes, GuestOffset};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::{Partition, Scheme, Source, Table, read};
use crate::limits::SECTOR_BYTES;
use crate::{Error, ErrorKind};

/// Sector sizes that a table may count in; the table does not state its own.
const SECTORS: [Bytes; 2] = [SECTOR_BYTES, Bytes(4096)];
/// The largest array of entries that is read: 8192 entries of the usual size, 64 times what
/// tools make.
const ARRAY_MAX: Bytes = Bytes(1 << 20);
/// Sizes that an entry may have, bytes: a power of two times the first.
const ENTRY_MIN: u32 = 128;
const ENTRY_MAX: u32 = 4096;

/// The header, in the sector at 1 and in the last one.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    signature: [u8; 8],
    revision: U32,
    header_bytes: U32,
    header_crc: U32,
    reserved: U32,
    own_sector: U64,
    other_sector: U64,
    first_usable: U64,
    last_usable: U64,
    disk_guid: [u8; 16],
    array_sector: U64,
    entries: U32,
    entry_bytes: U32,
    array_crc: U32,
}

impl Header {
    /// Length of the array of entries.
    fn array_bytes(&self) -> Bytes {
        Bytes::from(self.entry_bytes.get()) * u64::from(self.entries.get())
    }
}

/// The first byte of sector `number`; `None`: past the end of any disk.
fn start_of(number: u64, sector: Bytes) -> Option<GuestOffset> {
    sector.checked_mul(number).map(GuestOffset::after)
}

/// Used bytes of a header.
const HEADER_MIN: usize = size_of::<Header>();
/// Offset of its checksum.
const CRC_AT: std::ops::Range<usize> = 16..20;

/// The start of an entry; a name follows.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Entry {
    kind: [u8; 16],
    guid: [u8; 16],
    first: U64,
    last: U64,
}

/// All partitions.
///
/// Errors: `Corrupt` when neither header can be used.
pub(super) async fn table(source: &impl Source) -> Result<Table, Error> {
    for sector in SECTORS {
        if let Some(table) = table_at(source, sector, 1).await? {
            return Ok(table);
        }
    }
    for sector in SECTORS {
        let last = (source.size() / sector).saturating_sub(1);
        if let Some(table) = table_at(source, sector, last).await? {
            tracing::warn!(
                "the first header of the GPT is damaged; the one at the end of the disk is used \
                 (`sgdisk -e` and gdisk repair it)"
            );
            return Ok(table);
        }
    }
    Err(Error::new(
        ErrorKind::Corrupt,
        "the disk has a GPT whose headers are both damaged (checksums, sizes); repair it with \
         gdisk, or serve the partition with --offset and --size",
    ))
}

/// The table whose header is in a sector; `None` when there is none that can be used.
///
/// * `sector`: its size.
/// * `at`: its number.
async fn table_at(source: &impl Source, sector: Bytes, at: u64) -> Result<Option<Table>, Error> {
    let Some(start) = start_of(at, sector) else { return Ok(None) };
    let Some(bytes) = read(source, start, sector).await? else { return Ok(None) };
    let Some(header) = header(&bytes, at) else { return Ok(None) };
    let array_bytes = header.array_bytes();
    let array_at = start_of(header.array_sector.get(), sector);
    let Some(array_at) = array_at.filter(|_| array_bytes <= ARRAY_MAX) else { return Ok(None) };
    let Some(array) = read(source, array_at, array_bytes).await? else { return Ok(None) };
    if libdeflater::crc32(&array) != header.array_crc.get() {
        return Ok(None);
    }
    // Not more than `ENTRY_MAX`, and not 0.
    let entry_bytes = usize::try_from(header.entry_bytes.get()).unwrap_or(usize::MAX);
    let entries = (1..).zip(array.chunks_exact(entry_bytes));
    let partitions =
        entries.filter_map(|(number, bytes)| partition(number, bytes, &header, sector)).collect();
    let mut own = vec![(GuestOffset::ZERO, 2 * sector), (start, sector), (array_at, array_bytes)];
    own.extend(copy(source, sector, header.other_sector.get()).await?);
    Ok(Some(Table { scheme: Scheme::Gpt, partitions, own, damage: None }))
}

/// The ranges of the table's copy, to protect them: first byte and length.
///
/// * `sector`: size of a sector.
/// * `at`: the sector of its header.
async fn copy(
    source: &impl Source,
    sector: Bytes,
    at: u64,
) -> Result<Vec<(GuestOffset, Bytes)>, Error> {
    let Some(start) = start_of(at, sector) else { return Ok(Vec::new()) };
    let Some(bytes) = read(source, start, sector).await? else { return Ok(Vec::new()) };
    let mut own = vec![(start, sector)];
    if let Some(header) = header(&bytes, at)
        && let Some(array_at) = start_of(header.array_sector.get(), sector)
    {
        let (len, end) = (header.array_bytes(), GuestOffset::after(source.size()));
        let is_there = array_at.checked_add(len).is_some_and(|last| last <= end);
        own.extend(is_there.then_some((array_at, len)));
    }
    Ok(own)
}

/// The header in a sector, if its checksum and numbers are valid.
///
/// * `at`: the sector.
fn header(bytes: &[u8], at: u64) -> Option<Header> {
    let (header, _) = Header::read_from_prefix(bytes).ok()?;
    let len = usize::try_from(header.header_bytes.get()).ok()?;
    if &header.signature != b"EFI PART" || len < HEADER_MIN {
        return None;
    }
    let mut summed = bytes.get(..len)?.to_vec();
    summed.get_mut(CRC_AT)?.fill(0);
    let entry = header.entry_bytes.get();
    let is_good = libdeflater::crc32(&summed) == header.header_crc.get()
        && header.own_sector.get() == at
        && header.first_usable <= header.last_usable
        && (ENTRY_MIN..=ENTRY_MAX).contains(&entry)
        && entry.is_power_of_two();
    is_good.then_some(header)
}

/// The partition of an entry; `None` when the entry is unused.
fn partition(number: u32, bytes: &[u8], header: &Header, sector: Bytes) -> Option<Partition> {
    let (entry, _) = Entry::read_from_prefix(bytes).ok()?;
    if entry.kind == [0; 16] {
        return None;
    }
    let (first, last) = (entry.first.get(), entry.last.get());
    let start = start_of(first, sector);
    let len = last.checked_sub(first).and_then(|more| sector.checked_mul(more.checked_add(1)?));
    let is_usable = header.first_usable.get() <= first && last <= header.last_usable.get();
    let fault = match (start, len) {
        (_, None) if last < first => Some("it ends before it begins"),
        (None, _) | (_, None) => Some("its sectors are beyond any disk"),
        _ if !is_usable => {
            Some("it lies outside the part of the disk that the table leaves to partitions")
        }
        _ => None,
    };
    let (start, len) = (start.unwrap_or(GuestOffset(u64::MAX)), len.unwrap_or_default());
    Some(Partition { number, start, len, is_extended: false, fault })
}
