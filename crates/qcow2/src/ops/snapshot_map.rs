//! Finds the ranges that an internal snapshot reads from the backing file.
//!
//! Promises: reads the tables of the snapshot and nothing else, one L2 table at a time; writes
//! nothing, so it may be used while requests run, also on an image that is open for writing: tables
//! of a snapshot are never written. For changes of what lies below an image: wherever a snapshot
//! has nothing itself, it shows what the backing chain holds, and follows a change of that.

use std::ops::Range;

use ringdisk_ring::Ring;

use crate::engine::Qcow2;
use crate::entry::COMPRESSED;
use crate::error::Error;
use crate::limits::L1_BYTES_MAX;
use crate::run::ExtentKind;
use crate::table::{self, words_of};
use crate::units::{Bytes, GuestOffset, HostOffset};

/// A range that an internal snapshot reads from the backing chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotNeed {
    /// Unique id of the snapshot.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The first such range of the disk as it was at the snapshot.
    pub range: Range<GuestOffset>,
}

/// The mapping of one internal snapshot, to be asked for the ranges that it does not hold itself.
pub struct SnapshotMap<'a> {
    image: &'a Qcow2,
    l1: Vec<u64>,
    /// Size of the disk at the snapshot, bytes.
    size: Bytes,
    /// The L2 table that was read last: index into `l1`, and its words; `None`: there is no table.
    table: Option<(usize, Option<Vec<u64>>)>,
}

impl std::fmt::Debug for SnapshotMap<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotMap").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Qcow2 {
    /// The first internal snapshot, with the first range in it, that reads from the backing chain.
    /// `None`: none does, so the chain below may change without any snapshot showing it. Of an
    /// image without backing file it is what reads as zeroes for want of one.
    ///
    /// * `below`: size of the backing chain, bytes: what lies past its end reads as zeroes and does
    ///   not count. `u64::MAX` where that may change too.
    ///
    /// Errors: `Corrupt`, `TooLarge` for tables that cannot be right; `Io`.
    pub async fn snapshots_need_backing(
        &self,
        ring: &Ring,
        below: Bytes,
    ) -> Result<Option<SnapshotNeed>, Error> {
        for (index, snapshot) in self.info.snapshots.iter().enumerate() {
            let mut map = self.snapshot_map(ring, index).await?;
            if let Some(range) =
                map.next_unallocated(ring, GuestOffset(0), GuestOffset::after(below)).await?
            {
                let (id, name) = (snapshot.id.clone(), snapshot.name.clone());
                return Ok(Some(SnapshotNeed { id, name, range }));
            }
        }
        Ok(None)
    }

    /// The mapping of a snapshot.
    ///
    /// * `index`: into the snapshots of [`Qcow2::info`].
    ///
    /// Errors: `InvalidRequest` when there is no such snapshot; `Corrupt`, `TooLarge`, `Io`.
    pub async fn snapshot_map(&self, ring: &Ring, index: usize) -> Result<SnapshotMap<'_>, Error> {
        let Some(snapshot) = self.info.snapshots.get(index) else {
            return Err(self.refused(
                format!("there is no snapshot with the number {index}"),
                "list the snapshots of the image",
            ));
        };
        let (offset, entries) = (snapshot.l1_table_offset, snapshot.l1_entries);
        let len = Bytes(u64::from(entries) * 8);
        let file = &self.file;
        if len > L1_BYTES_MAX {
            let what = format!("the L1 table of a snapshot has {entries} entries");
            return Err(Error::too_large(file.name(), what));
        }
        let cluster_size = self.geometry.cluster_size();
        let misplaced =
            !offset.is_multiple_of(cluster_size) || offset < HostOffset::after(cluster_size);
        if !len.is_zero() && misplaced {
            let what = format!("the L1 table of a snapshot at {offset:#x} cannot be right");
            return Err(Error::corrupt(file.name(), what));
        }
        // At most 32 MiB.
        let len = usize::try_from(len).unwrap_or(0);
        let bytes = table::read(ring, file, offset, len, "the L1 table of a snapshot").await?;
        if bytes.len() < len {
            let what = "the file ends inside the L1 table of a snapshot";
            return Err(Error::corrupt(file.name(), what));
        }
        let size = snapshot.disk_bytes.unwrap_or(self.virtual_size());
        Ok(SnapshotMap { image: self, l1: words_of(&bytes), size, table: None })
    }
}

impl SnapshotMap<'_> {
    /// Size of the disk at the snapshot, bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// The next range of `offset..end` that the snapshot does not hold itself, as long as it is one
    /// piece inside an L2 table, or a gap between tables.
    ///
    /// * `end`: cut to the size of the snapshot.
    ///
    /// Errors: `Corrupt` for an entry that cannot be right; `Io`.
    pub async fn next_unallocated(
        &mut self,
        ring: &Ring,
        offset: GuestOffset,
        end: GuestOffset,
    ) -> Result<Option<Range<GuestOffset>>, Error> {
        let end = end.min(GuestOffset::after(self.size));
        let mut at = offset;
        let mut found: Option<Range<GuestOffset>> = None;
        while at < end {
            let (is_unallocated, stop) = self.piece(ring, at).await?;
            let stop = stop.min(end);
            match (&mut found, is_unallocated) {
                (Some(range), true) => range.end = stop,
                (Some(_), false) => break,
                (None, true) => found = Some(at..stop),
                (None, false) => {}
            }
            let is_end_of_table = stop.0.trailing_zeros() >= self.image.geometry.table_shift();
            if found.is_some() && is_end_of_table {
                break;
            }
            at = stop;
        }
        Ok(found)
    }

    /// Whether the byte at `at` is left to the backing chain, and where a piece of the same sort
    /// ends: at most at the end of its cluster, or of its table where there is none.
    async fn piece(&mut self, ring: &Ring, at: GuestOffset) -> Result<(bool, GuestOffset), Error> {
        let image = self.image;
        let geometry = &image.geometry;
        let corrupt =
            |_| Error::corrupt(image.file.name(), "an entry of a snapshot cannot be right");
        let index = geometry.l1_index(at);
        if self.table.as_ref().is_none_or(|(of, _)| *of != index) {
            let entry = self.l1.get(index).copied().unwrap_or(0);
            let place = image.rules.l2_table(entry, Bytes(image.file.len())).map_err(corrupt)?;
            let words = match place {
                None => None,
                Some(offset) => {
                    let (len, what) = (1 << geometry.cluster_bits, "an L2 table of a snapshot");
                    let mut bytes = table::read(ring, &image.file, offset, len, what).await?;
                    bytes.resize(len, 0);
                    Some(words_of(&bytes))
                }
            };
            self.table = Some((index, words));
        }
        let Some((_, Some(words))) = &self.table else {
            return Ok((true, geometry.table_end(index)));
        };
        let word = geometry.entry_in_table(at >> geometry.cluster_bits) * geometry.entry_words();
        let word_at = |word: usize| words.get(word).copied().unwrap_or(0);
        let entry = word_at(word);
        let bitmap = if geometry.extended { word_at(word + 1) } else { 0 };
        let in_cluster = geometry.in_cluster(at);
        if entry & COMPRESSED != 0 {
            return Ok((false, at - in_cluster + geometry.cluster_size()));
        }
        let lengths = image.lengths();
        let (kind, len) = image.rules.piece(entry, bitmap, in_cluster, lengths).map_err(corrupt)?;
        Ok((kind == ExtentKind::Unallocated, at + len))
    }
}
