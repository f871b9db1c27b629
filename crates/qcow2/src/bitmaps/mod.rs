//! Persistent bitmaps: which parts of the disk were written. Source: qcow2 specification,
//! "Bitmaps".
//!
//! Promises: nothing here writes to an image but [`Recording::begin`], which marks bitmaps as in
//! use. Adding, changing, saving and resizing them is in `ops/bitmaps`.
//!
//! - [`read`]: the list, for `info`;
//! - [`recording`]: the bitmaps that record while the image is open for writing.

pub(crate) mod bits;
pub(crate) mod directory;
pub(crate) mod recording;
pub(crate) mod tables;
#[cfg(test)]
mod tests;

use crate::units::Bytes;
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::error::Error;
use crate::header::{self, Header};
use crate::info::Bitmap;

pub(crate) use recording::Recording;

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
    let cluster_size = header.geometry.cluster_size();
    let entries = directory::read(ring, storage, directory, cluster_size).await?;
    Ok(entries.iter().map(listed).collect())
}

/// Bytes in the directory of a bitmap whose name has `name_len` bytes.
pub(crate) fn entry_bytes(name_len: usize) -> Bytes {
    Bytes::of(directory::entry_bytes(name_len))
}

/// What a list says about one bitmap.
pub(crate) fn listed(entry: &directory::Entry) -> Bitmap {
    Bitmap {
        name: entry.display_name(),
        // At most 63: checked when the directory was read.
        granularity_bytes: Bytes(1 << entry.granularity_bits),
        // A bitmap that cannot be used counts as one that was not saved.
        in_use: entry.has(directory::IN_USE) || entry.unusable().is_some(),
        auto: entry.has(directory::AUTO),
        table_offset: entry.table_offset,
        table_entries: entry.table_entries,
    }
}
