//! The directory of persistent bitmaps: listed only. Source: qcow2 specification, "Bitmaps".

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::error::Error;
use crate::extensions::{u16_at, u32_at, u64_at};
use crate::header::{self, Header};
use crate::info::Bitmap;
use crate::limits::{BITMAP_DIRECTORY_BYTES_MAX, BITMAP_NAME_BYTES_MAX, BITMAPS_MAX};
use crate::table::TableReader;

/// Bytes of an entry without extra data and name.
const ENTRY_BYTES_MIN: usize = 24;
/// Most extra data of one bitmap; none is defined today.
const EXTRA_BYTES_MAX: u32 = 1024;
const FLAG_IN_USE: u32 = 1 << 0;
const FLAG_AUTO: u32 = 1 << 1;
/// Bitmaps that record writes, the only type.
const TYPE_DIRTY_TRACKING: u8 = 1;

/// Reads the directory. Empty when the autoclear bit says that the bitmaps are stale.
///
/// Errors: `Corrupt` when the directory breaks the specification, `TooLarge`, `Io`.
pub(crate) async fn read(
    ring: &Ring,
    storage: &Storage,
    header: &Header,
) -> Result<Vec<Bitmap>, Error> {
    let Some(directory) = header.extensions.bitmaps else { return Ok(Vec::new()) };
    if header.autoclear & header::BITMAPS == 0 {
        return Ok(Vec::new());
    }
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
    let fits = directory.offset.checked_add(directory.len).is_some_and(|end| end <= storage.len());
    let aligned = directory.offset.is_multiple_of(header.geometry.cluster_size());
    if directory.count == 0 || !fits || !aligned || directory.offset == 0 {
        return Err(Error::corrupt(
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
    let mut bitmaps = Vec::new();
    for _ in 0..directory.count {
        bitmaps.push(entry(&mut table, file).await?);
    }
    Ok(bitmaps)
}

async fn entry(table: &mut TableReader<'_>, file: &str) -> Result<Bitmap, Error> {
    table.align().await?;
    let head: [u8; ENTRY_BYTES_MIN] = {
        let bytes = table.take(ENTRY_BYTES_MIN).await?;
        bytes.try_into().unwrap_or([0; ENTRY_BYTES_MIN])
    };
    let flags = u32_at(&head, 12);
    let (kind, granularity_bits) = (head[16], head[17]);
    let name_len = u32::from(u16_at(&head, 18));
    let extra_len = u32_at(&head, 20);
    if name_len > BITMAP_NAME_BYTES_MAX
        || extra_len > EXTRA_BYTES_MAX
        || granularity_bits > 63
        || kind != TYPE_DIRTY_TRACKING
    {
        return Err(Error::corrupt(
            file,
            format!(
                "a bitmap has type {kind}, granularity_bits {granularity_bits}, a name of \
                 {name_len} and extra data of {extra_len} bytes: at least one is not allowed"
            ),
        ));
    }
    let body_len = (name_len + extra_len) as usize;
    let name = table.take(body_len).await?.get(extra_len as usize..).unwrap_or_default();
    Ok(Bitmap {
        name: String::from_utf8_lossy(name).into_owned(),
        granularity_bytes: 1 << granularity_bits,
        in_use: flags & FLAG_IN_USE != 0,
        auto: flags & FLAG_AUTO != 0,
        table_offset: u64_at(&head, 0),
        table_entries: u32_at(&head, 8),
    })
}
