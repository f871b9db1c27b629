//! The bitmap directory: one entry for each bitmap, read and written whole.
//!
//! Promises: entries keep all their bytes, extra data that we do not know included; sizes are
//! bounded before memory is asked for. Source: qcow2 specification, "Bitmap directory".

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::error::Error;
use crate::extensions::{BitmapDirectory, u16_at, u32_at, u64_at};
use crate::header::bad_bitmaps;
use crate::limits::{BITMAP_DIRECTORY_BYTES_MAX, BITMAP_NAME_BYTES_MAX, BITMAPS_MAX};
use crate::table::TableReader;
use crate::units::{Bytes, HostOffset};

/// Bytes of an entry without extra data and name.
pub(crate) const ENTRY_BYTES_MIN: usize = 24;
/// Most extra data of one bitmap; none is defined today.
const EXTRA_BYTES_MAX: u32 = 1024;
/// Position of the flags inside an entry. Entries are aligned to 8, so they lie in one sector.
pub(crate) const FLAGS_AT: usize = 12;
/// The contents were not saved: they are wrong.
pub(crate) const IN_USE: u32 = 1 << 0;
/// Writes are recorded.
pub(crate) const AUTO: u32 = 1 << 1;
/// Extra data that a program does not know changes nothing about the bitmap.
pub(crate) const EXTRA_COMPATIBLE: u32 = 1 << 2;
/// Bitmaps that record writes, the only type.
pub(crate) const TYPE_DIRTY_TRACKING: u8 = 1;
/// Granularities that QEMU takes: 512 bytes to 2 GiB.
pub(crate) const GRANULARITY_BITS_MIN: u32 = 9;
pub(crate) const GRANULARITY_BITS_MAX: u32 = 31;

/// One bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Host offset of the bitmap table.
    pub(crate) table_offset: HostOffset,
    pub(crate) table_entries: u32,
    pub(crate) flags: u32,
    pub(crate) kind: u8,
    pub(crate) granularity_bits: u8,
    pub(crate) extra: Vec<u8>,
    pub(crate) name: Vec<u8>,
}

impl Entry {
    /// The entry of a new bitmap.
    ///
    /// * `granularity_bits`: at most 31.
    /// * `table`: host offset of its table, and the number of entries there.
    pub(crate) fn new(
        name: &str,
        granularity_bits: u32,
        flags: u32,
        (table_offset, table_entries): (HostOffset, u32),
    ) -> Entry {
        Entry {
            table_offset,
            table_entries,
            flags,
            kind: TYPE_DIRTY_TRACKING,
            granularity_bits: u8::try_from(granularity_bits).unwrap_or(u8::MAX),
            extra: Vec::new(),
            name: name.as_bytes().to_vec(),
        }
    }

    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Why we must leave the bitmap alone, if so.
    pub(crate) fn unusable(&self) -> Option<&'static str> {
        let bits = u32::from(self.granularity_bits);
        if !(GRANULARITY_BITS_MIN..=GRANULARITY_BITS_MAX).contains(&bits) {
            return Some("its granularity is not from 512 bytes to 2 GiB");
        }
        if self.flags & !(IN_USE | AUTO | EXTRA_COMPATIBLE) != 0 {
            return Some("it has flags that ringdisk does not know");
        }
        if !self.extra.is_empty() && !self.has(EXTRA_COMPATIBLE) {
            return Some("it has extra data that ringdisk does not know");
        }
        None
    }

    /// The name, for messages.
    pub(crate) fn display_name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// Bytes in the directory.
    fn len(&self) -> usize {
        entry_bytes(self.extra.len() + self.name.len())
    }
}

/// Bytes of an entry with so many bytes of extra data and name.
pub(crate) fn entry_bytes(body_len: usize) -> usize {
    (ENTRY_BYTES_MIN + body_len).next_multiple_of(8)
}

/// Reads all entries.
///
/// Errors: `Corrupt` when the directory breaks the specification, `TooLarge`, `Io`.
pub(crate) async fn read(
    ring: &Ring,
    storage: &Storage,
    directory: BitmapDirectory,
    cluster_size: Bytes,
) -> Result<Vec<Entry>, Error> {
    let file = storage.name();
    if directory.count > BITMAPS_MAX || directory.len > BITMAP_DIRECTORY_BYTES_MAX {
        return Err(Error::too_large(
            file,
            format!(
                "the bitmap directory has {} entries and {} bytes; the limits are {BITMAPS_MAX} \
                 and {BITMAP_DIRECTORY_BYTES_MAX}",
                directory.count, directory.len
            ),
        ));
    }
    let fits =
        directory.offset.checked_add(directory.len).is_some_and(|end| end.0 <= storage.len());
    let aligned = directory.offset.is_multiple_of(cluster_size);
    if directory.count == 0 || !fits || !aligned || directory.offset == HostOffset(0) {
        return Err(bad_bitmaps(
            file,
            format!(
                "the bitmap directory at {:#x} ({} entries, {} bytes) is empty, unaligned or \
                 outside the file",
                directory.offset, directory.count, directory.len
            ),
        ));
    }
    let what = "the bitmap directory";
    let mut table = TableReader::new(ring, storage, what, directory.offset, directory.len);
    let mut entries = Vec::new();
    for _ in 0..directory.count {
        entries.push(entry(&mut table, file).await?);
    }
    // The last entry may lack its padding.
    if table.position().next_multiple_of(Bytes(8)) < directory.offset + directory.len {
        return Err(bad_bitmaps(
            file,
            format!(
                "the bitmap directory at {:#x} has {} bytes, more than its {} entries take",
                directory.offset, directory.len, directory.count
            ),
        ));
    }
    Ok(entries)
}

async fn entry(table: &mut TableReader<'_>, file: &str) -> Result<Entry, Error> {
    table.align().await?;
    let head: [u8; ENTRY_BYTES_MIN] = {
        let bytes = table.take(ENTRY_BYTES_MIN).await?;
        bytes.try_into().unwrap_or([0; ENTRY_BYTES_MIN])
    };
    let (kind, granularity_bits) = (head[16], head[17]);
    let name_len = u32::from(u16_at(&head, 18));
    let extra_len = u32_at(&head, 20);
    if name_len > BITMAP_NAME_BYTES_MAX
        || extra_len > EXTRA_BYTES_MAX
        || granularity_bits > 63
        || kind != TYPE_DIRTY_TRACKING
    {
        return Err(bad_bitmaps(
            file,
            format!(
                "a bitmap has type {kind}, granularity_bits {granularity_bits}, a name of \
                 {name_len} and extra data of {extra_len} bytes: at least one is not allowed"
            ),
        ));
    }
    let body = table.take((name_len + extra_len) as usize).await?;
    let (extra, name) = body.split_at((extra_len as usize).min(body.len()));
    Ok(Entry {
        table_offset: HostOffset(u64_at(&head, 0)),
        table_entries: u32_at(&head, 8),
        flags: u32_at(&head, FLAGS_AT),
        kind,
        granularity_bits,
        extra: extra.to_vec(),
        name: name.to_vec(),
    })
}

/// The directory as bytes.
pub(crate) fn to_bytes(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in entries {
        bytes.extend_from_slice(&entry.table_offset.0.to_be_bytes());
        bytes.extend_from_slice(&entry.table_entries.to_be_bytes());
        bytes.extend_from_slice(&entry.flags.to_be_bytes());
        bytes.extend_from_slice(&[entry.kind, entry.granularity_bits]);
        // Both were read from such fields, or are bounded by the limit of names.
        let name_len = u16::try_from(entry.name.len()).unwrap_or(u16::MAX);
        let extra_len = u32::try_from(entry.extra.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&name_len.to_be_bytes());
        bytes.extend_from_slice(&extra_len.to_be_bytes());
        bytes.extend_from_slice(&entry.extra);
        bytes.extend_from_slice(&entry.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes
}

/// Position of each entry in the directory, in bytes.
pub(crate) fn positions(entries: &[Entry]) -> impl Iterator<Item = usize> + '_ {
    entries.iter().scan(0, |at, entry| {
        let position = *at;
        *at += entry.len();
        Some(position)
    })
}
