//! The table of internal snapshots, rewritten byte for byte.
//!
//! Promises: entries that ringdisk did not make stay as they are.
//!
//! Source: qcow2 specification, "Snapshots".

use crate::error::Error;
use crate::extensions::{u16_at, u32_at, u64_at};
use crate::limits::SNAPSHOT_ENTRY_BYTES_MIN as ENTRY_BYTES_MIN;
use crate::limits::{SNAPSHOT_EXTRA_BYTES_MAX, SNAPSHOT_TABLE_BYTES_MAX};
use crate::refcounts::Run;
use crate::table::TableReader;
use crate::units::{Bytes, HostOffset};

use super::transaction::Transaction;

/// Extra data that we write: VM state size, disk size, instruction count.
const EXTRA_BYTES: u32 = 24;
/// "There is no instruction count."
const NO_COUNT: u64 = u64::MAX;

/// One entry.
pub(super) struct Entry {
    /// Without padding.
    bytes: Vec<u8>,
}

impl Entry {
    /// A snapshot of a disk of `size` bytes that is taken now.
    pub(super) fn new(
        l1_offset: HostOffset,
        l1_entries: u32,
        id: &str,
        name: &str,
        size: Bytes,
    ) -> Entry {
        let now = std::time::SystemTime::now();
        let since_1970 = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let mut bytes = Vec::with_capacity(ENTRY_BYTES_MIN + 24 + id.len() + name.len());
        bytes.extend_from_slice(&l1_offset.0.to_be_bytes());
        bytes.extend_from_slice(&l1_entries.to_be_bytes());
        // Both are short: checked by the caller.
        bytes.extend_from_slice(&u16::try_from(id.len()).unwrap_or(0).to_be_bytes());
        bytes.extend_from_slice(&u16::try_from(name.len()).unwrap_or(0).to_be_bytes());
        // The field has 32 bits and is unsigned: until 2106.
        let seconds = u32::try_from(since_1970.as_secs()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&seconds.to_be_bytes());
        bytes.extend_from_slice(&since_1970.subsec_nanos().to_be_bytes());
        // Guest clock and VM state: none.
        bytes.extend_from_slice(&0u64.to_be_bytes());
        bytes.extend_from_slice(&0u32.to_be_bytes());
        bytes.extend_from_slice(&EXTRA_BYTES.to_be_bytes());
        for extra in [0, size.0, NO_COUNT] {
            bytes.extend_from_slice(&extra.to_be_bytes());
        }
        bytes.extend_from_slice(id.as_bytes());
        bytes.extend_from_slice(name.as_bytes());
        Entry { bytes }
    }

    /// Host offset and entries of its L1 table.
    pub(super) fn l1_table(&self) -> (HostOffset, u32) {
        (HostOffset(u64_at(&self.bytes, 0)), u32_at(&self.bytes, 8))
    }

    fn extra_len(&self) -> usize {
        u32_at(&self.bytes, 36) as usize
    }

    pub(super) fn id(&self) -> &[u8] {
        let start = ENTRY_BYTES_MIN + self.extra_len();
        self.bytes.get(start..start + usize::from(u16_at(&self.bytes, 12))).unwrap_or_default()
    }

    /// Size of the disk in bytes, where recorded.
    pub(super) fn disk_size(&self) -> Option<Bytes> {
        (self.extra_len() >= 16).then(|| Bytes(u64_at(&self.bytes, ENTRY_BYTES_MIN + 8)))
    }
}

/// All entries.
pub(super) struct SnapshotTable {
    pub(super) entries: Vec<Entry>,
    /// Where it lies.
    old: Run,
}

impl SnapshotTable {
    pub(super) async fn load(tx: &Transaction<'_>) -> Result<SnapshotTable, Error> {
        let (offset, count) = tx.header.snapshots();
        let what = "the snapshot table";
        let mut reader =
            TableReader::new(tx.ring, &tx.file, what, offset, SNAPSHOT_TABLE_BYTES_MAX);
        let mut entries = Vec::new();
        for _ in 0..count {
            reader.align().await?;
            let mut bytes = reader.take(ENTRY_BYTES_MIN).await?.to_vec();
            let extra_len = u32_at(&bytes, 36);
            if extra_len > SNAPSHOT_EXTRA_BYTES_MAX {
                return Err(tx.corrupt(format!(
                    "a snapshot has {extra_len} bytes of extra data; the limit is \
                     {SNAPSHOT_EXTRA_BYTES_MAX}"
                )));
            }
            let names = usize::from(u16_at(&bytes, 12)) + usize::from(u16_at(&bytes, 14));
            bytes.extend_from_slice(reader.take(extra_len as usize + names).await?);
            entries.push(Entry { bytes });
        }
        let len = if count == 0 { Bytes::ZERO } else { reader.position() - offset };
        Ok(SnapshotTable { entries, old: tx.clusters_of(offset, len) })
    }

    /// Number of the first entry that `wanted` is true for.
    pub(super) fn find(&self, wanted: impl Fn(&Entry) -> bool) -> Option<usize> {
        self.entries.iter().position(wanted)
    }

    /// A number that no snapshot has: one more than the largest.
    pub(super) fn next_id(&self) -> String {
        let number =
            |entry: &Entry| -> Option<u64> { std::str::from_utf8(entry.id()).ok()?.parse().ok() };
        let largest = self.entries.iter().filter_map(number).max().unwrap_or(0);
        match largest.checked_add(1) {
            Some(next) => next.to_string(),
            // The largest number there is is taken: the first free one.
            None => (1u64..)
                .find(|id| self.find(|entry| number(entry) == Some(*id)).is_none())
                .unwrap_or(0)
                .to_string(),
        }
    }

    /// Writes the table to a new place and sets the header.
    ///
    /// Errors: `TooLarge`; those of the transaction.
    pub(super) async fn finish(self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let mut bytes = Vec::new();
        for entry in &self.entries {
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            bytes.extend_from_slice(&entry.bytes);
        }
        if Bytes::of(bytes.len()) > SNAPSHOT_TABLE_BYTES_MAX {
            return Err(Error::new(
                crate::ErrorKind::TooLarge,
                tx.file.name(),
                format!("the snapshot table would be larger than {SNAPSHOT_TABLE_BYTES_MAX} bytes"),
                "delete snapshots first",
            ));
        }
        let offset = if bytes.is_empty() {
            HostOffset(0)
        } else {
            tx.write_new(&bytes, "the snapshot table").await?.start << tx.geometry.cluster_bits
        };
        // At most 65536.
        let count = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        tx.header.set_snapshots(offset, count);
        if self.old.count > 0 {
            tx.unref_metadata(self.old.start, self.old.count).await?;
        }
        Ok(())
    }
}
