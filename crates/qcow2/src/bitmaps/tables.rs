//! The contents of a bitmap on disk: a table of clusters with bits. Source: qcow2 specification,
//! "Bitmap table" and "Bitmap data".
//!
//! Promises: no offset of a table is followed that is unaligned, in the header or outside the file;
//! memory is bounded by [`BITMAP_BYTES_MAX`]. Reads only.

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;

use super::bits::{self, Bits};
use super::directory::{AUTO, Entry, IN_USE};
use crate::limits::BITMAP_BYTES_MAX;
use crate::refcounts::Run;
use crate::table;
use crate::units::{Bytes, HostOffset};

/// Bits 9 to 55 of a table entry: host offset of a cluster.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Without an offset: all bits are ones, not zeroes.
pub(crate) const ALL_ONES: u64 = 1;
/// Alignment of buffers: a page suits O_DIRECT everywhere.
const ALIGN: usize = 4096;

/// Where the contents of bitmaps are.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) ring: &'a Ring,
    pub(crate) file: &'a Storage,
    pub(crate) cluster_bits: u32,
    /// Size of the disk in bytes.
    pub(crate) size: Bytes,
}

/// Entries that the table of such a bitmap has.
pub(crate) fn table_entries(size: Bytes, granularity_bits: u32, cluster_bits: u32) -> u64 {
    content_bytes(size, granularity_bits).clusters(cluster_bits)
}

/// Bytes of the bits of a bitmap, which is what it takes in memory too.
pub(crate) fn content_bytes(size: Bytes, granularity_bits: u32) -> Bytes {
    Bytes(bits::count(size, granularity_bits).div_ceil(8))
}

/// Bytes that those of `entries` take that record writes of a disk of `size` bytes.
pub(crate) fn recording_bytes(entries: &[Entry], size: Bytes) -> Bytes {
    let recording = entries
        .iter()
        .filter(|entry| entry.has(AUTO) && !entry.has(IN_USE) && entry.unusable().is_none());
    recording.fold(Bytes::ZERO, |sum, entry| {
        sum.saturating_add(content_bytes(size, entry.granularity_bits.into()))
    })
}

/// Whether a bitmap is too large for the format.
pub(crate) fn is_too_large(size: Bytes, granularity_bits: u32) -> bool {
    content_bytes(size, granularity_bits) > BITMAP_BYTES_MAX
}

/// A bitmap that cannot be read, and why.
pub(crate) type Unreadable = String;

impl Place<'_> {
    fn cluster_size(&self) -> Bytes {
        Bytes(1 << self.cluster_bits)
    }

    /// The table of `entry`, its entries checked.
    pub(crate) async fn table(&self, entry: &Entry) -> Result<Vec<u64>, Unreadable> {
        let count = u64::from(entry.table_entries);
        let wanted = table_entries(self.size, entry.granularity_bits.into(), self.cluster_bits);
        if count != wanted {
            return Err(format!("its table has {count} entries, not {wanted}"));
        }
        self.clusters_of(entry).await
    }

    /// The entries of a table of any length.
    async fn clusters_of(&self, entry: &Entry) -> Result<Vec<u64>, Unreadable> {
        let len = Bytes(u64::from(entry.table_entries) * 8);
        if len > BITMAP_BYTES_MAX {
            return Err(format!("its table has {len} bytes"));
        }
        self.check_place(entry.table_offset, len)?;
        let bytes = self.read(entry.table_offset, len).await?;
        let table = table::words_of(&bytes);
        for word in &table {
            let offset = word & OFFSET_MASK;
            let flag = if offset == 0 { ALL_ONES } else { 0 };
            if word & !(OFFSET_MASK | flag) != 0 {
                return Err(format!("its table has an entry with reserved bits ({word:#x})"));
            }
            if offset != 0 {
                self.check_place(HostOffset(offset), self.cluster_size())?;
            }
        }
        Ok(table)
    }

    fn check_place(&self, offset: HostOffset, len: Bytes) -> Result<(), Unreadable> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.end());
        if offset == HostOffset(0) || !offset.is_multiple_of(self.cluster_size()) || !inside {
            return Err(format!("{len} bytes at {offset:#x} are unaligned or outside the file"));
        }
        Ok(())
    }

    /// The end of the file; its last cluster may be cut.
    fn end(&self) -> HostOffset {
        HostOffset(self.file.len()).next_multiple_of(self.cluster_size())
    }

    /// Reads bytes; zeroes past the end of the file.
    async fn read(&self, offset: HostOffset, len: Bytes) -> Result<Vec<u8>, Unreadable> {
        let len = usize::try_from(len).map_err(|_| "it is too large".to_owned())?;
        let buf = IoBuf::new(len.max(1), ALIGN).slice(0..len);
        self.file
            .read(self.ring, offset.0, &buf)
            .await
            .map_err(|errno| format!("reading at {offset:#x} failed: {errno}"))?;
        Ok(buf.to_vec())
    }

    /// The bits of `entry`.
    ///
    /// Errors: why they cannot be had.
    pub(crate) async fn load(&self, entry: &Entry) -> Result<Bits, Unreadable> {
        if let Some(reason) = entry.unusable() {
            return Err(reason.to_owned());
        }
        let granularity_bits = u32::from(entry.granularity_bits);
        if is_too_large(self.size, granularity_bits) {
            return Err(format!("it has more than {BITMAP_BYTES_MAX} bytes"));
        }
        let table = self.table(entry).await?;
        let bits = Bits::new(self.size, granularity_bits).ok_or("there is not enough memory")?;
        let cluster_words = usize::try_from(self.cluster_size() / Bytes(8)).unwrap_or(0);
        for (index, word) in table.iter().enumerate() {
            let first = index * cluster_words;
            if *word == ALL_ONES {
                let start = first as u64 * 64;
                bits.set_bits(start..bits.count().min(start + self.cluster_size().0 * 8));
            } else if *word != 0 {
                let bytes = self.read(HostOffset(*word), self.cluster_size()).await?;
                for (at, raw) in bytes.as_chunks::<8>().0.iter().enumerate() {
                    if first + at < bits.words() {
                        bits.or_word(first + at, u64::from_le_bytes(*raw));
                    }
                }
            }
        }
        Ok(bits)
    }

    /// All clusters that a bitmap has: its table and its bits. For giving them back.
    pub(crate) async fn runs(&self, entry: &Entry) -> Result<Vec<Run>, Unreadable> {
        let words = self.clusters_of(entry).await?;
        let run = |offset: HostOffset, count| Run::new(offset >> self.cluster_bits, count);
        let table = Bytes(u64::from(entry.table_entries) * 8);
        let mut runs = vec![run(entry.table_offset, table.clusters(self.cluster_bits))];
        let data = words.iter().map(|word| word & OFFSET_MASK).filter(|offset| *offset != 0);
        let mut data: Vec<u64> = data.collect();
        // A table that names a cluster twice counts as one reference.
        data.sort_unstable();
        data.dedup();
        runs.extend(data.into_iter().map(|offset| run(HostOffset(offset), 1)));
        Ok(runs)
    }
}
