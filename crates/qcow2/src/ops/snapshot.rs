//! Internal snapshots: create, apply, delete.
//!
//! Promises: each is there as a whole or not at all after a crash; tables of other snapshots are
//! never written.
//!
//! How references are counted: a cluster of data counts once for each way to it, that is for each
//! L1 table and each L2 entry below it, also where two L1 tables share an L2 table.
//!
//! Create leaves the old L1 and L2 tables to the snapshot as they are. The active side gets a new
//! L1 table, and copies of the L2 tables whose entries say COPIED, which is not true any more.
//!
//! Source: qcow2 specification, "Snapshots" and "Cluster mapping".

use ringdisk_ring::Ring;

use crate::cause::Cause;
use crate::engine::Qcow2;
use crate::entry::COPIED;
use crate::error::{Error, ErrorKind};
use crate::limits::{L1_BYTES_MAX, SNAPSHOTS_MAX};
use crate::table::words_of;
use crate::units::{Bytes, HostOffset};

use super::active::{Active, read_l1};
use super::snapshot_table::{Entry, SnapshotTable};
use super::transaction::Transaction;

/// Longest name of a snapshot: QEMU reads no more.
const NAME_BYTES_MAX: usize = 255;

impl Qcow2 {
    /// Takes a snapshot of the disk. Returns its id: a number that no other snapshot has.
    ///
    /// * `name`: 1 to 255 bytes without NUL. Names need not differ.
    ///
    /// Errors: `InvalidRequest` for such a name, or when the image has an external data file,
    /// cannot count that many references, or has 65536 snapshots; `Corrupt`, `TooLarge`, `Io`.
    pub async fn snapshot_create(&mut self, ring: &Ring, name: &str) -> Result<String, Error> {
        self.check_snapshots()?;
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(self.refused(
                format!(
                    "a snapshot cannot have the name '{}'",
                    name.chars().take(40).collect::<String>().escape_debug()
                ),
                "choose a name of 1 to 255 bytes",
            ));
        }
        if self.info.snapshots.len() >= SNAPSHOTS_MAX as usize {
            return Err(self.refused(
                format!("the image has {SNAPSHOTS_MAX} snapshots, more are not possible"),
                "delete snapshots first",
            ));
        }
        self.finish_use(ring).await?;
        let result = create(ring, self, name).await;
        self.reopen(ring, result).await
    }

    /// Makes the disk what it was when a snapshot was taken, its size included. What was written
    /// since is lost, unless another snapshot has it.
    ///
    /// * `wanted`: an id; or the name of a snapshot when there is no such id.
    ///
    /// Errors: `InvalidRequest` when there is no such snapshot, or the image has bitmaps, which
    /// would not be true any more, or an external data file; `Corrupt`, `Io`.
    pub async fn snapshot_apply(&mut self, ring: &Ring, wanted: &str) -> Result<(), Error> {
        self.check_snapshots()?;
        let by_id = self.info.snapshots.iter().position(|snapshot| snapshot.id == wanted);
        let Some(index) = by_id.or_else(|| self.snapshot_by_name(wanted)) else {
            return Err(self.no_snapshot(wanted));
        };
        if !self.info.bitmaps.is_empty() {
            return Err(self.refused(
                "the image has bitmaps, which would not be true any more",
                "remove the bitmaps first",
            ));
        }
        self.finish_use(ring).await?;
        let result = apply(ring, self, index).await;
        self.reopen(ring, result).await
    }

    /// Deletes a snapshot.
    ///
    /// * `wanted`: a name (the first with that name); or an id when there is no such name.
    ///
    /// Errors: `InvalidRequest` when there is no such snapshot; `Corrupt`, `Io`.
    pub async fn snapshot_delete(&mut self, ring: &Ring, wanted: &str) -> Result<(), Error> {
        self.check_snapshots()?;
        let by_id = || self.info.snapshots.iter().position(|snapshot| snapshot.id == wanted);
        let Some(index) = self.snapshot_by_name(wanted).or_else(by_id) else {
            return Err(self.no_snapshot(wanted));
        };
        self.finish_use(ring).await?;
        let result = delete(ring, self, index).await;
        self.reopen(ring, result).await
    }

    fn check_snapshots(&self) -> Result<(), Error> {
        if !self.info.external_data_file {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            self.file.name(),
            "an image with an external data file cannot have internal snapshots",
            "put an overlay on top of it, or copy it into an image without data file",
        ))
    }

    fn snapshot_by_name(&self, name: &str) -> Option<usize> {
        self.info.snapshots.iter().position(|snapshot| snapshot.name == name)
    }

    fn no_snapshot(&self, wanted: &str) -> Error {
        self.refused(
            format!("there is no snapshot '{}'", wanted.escape_debug()),
            "list the snapshots of the image to see their names and ids",
        )
        .because(Cause::NoSnapshot { wanted: wanted.to_owned() })
    }
}

async fn create(ring: &Ring, image: &mut Qcow2, name: &str) -> Result<String, Error> {
    let mut tx = Transaction::begin(ring, image)?;
    let mut table = SnapshotTable::load(&tx).await?;
    let mut active = Active::load(&tx).await?;
    tx.note_all_named().await?;
    let (l1_offset, l1_entries) = tx.header.l1_table();
    for index in 0..active.l1.len() {
        let Some(mut words) = active.table(&mut tx, index).await? else { continue };
        active.share_entries(&mut tx, &words).await?;
        if clear_flags(&mut words, tx.geometry.entry_words()) {
            active.link_new(&mut tx, index, &words).await?;
        } else {
            active.share_table(&mut tx, index).await?;
        }
    }
    if l1_entries > 0 {
        active.give_away_l1();
    }
    let id = table.next_id();
    let l1_offset = if l1_entries > 0 { l1_offset } else { HostOffset(0) };
    table.entries.push(Entry::new(l1_offset, l1_entries, &id, name, tx.header.size()));
    table.finish(&mut tx).await?;
    active.finish(&mut tx, l1_entries as usize).await?;
    tx.commit().await?;
    Ok(id)
}

async fn apply(ring: &Ring, image: &mut Qcow2, index: usize) -> Result<(), Error> {
    let mut tx = Transaction::begin(ring, image)?;
    let table = SnapshotTable::load(&tx).await?;
    let Some(entry) = table.entries.get(index) else {
        return Err(tx.corrupt("the snapshot table changed meanwhile"));
    };
    let size = entry.disk_size().unwrap_or(tx.header.size());
    let needed = size.clusters(tx.geometry.table_shift());
    if Bytes(needed * 8) > L1_BYTES_MAX || i64::try_from(size.0).is_err() {
        return Err(tx.corrupt(format!("the snapshot says that its disk has {size} bytes")));
    }
    let (offset, entries) = entry.l1_table();
    let l1 = read_l1(&tx, offset, entries, "the L1 table of the snapshot").await?;
    let mut active = Active::load(&tx).await?;
    tx.note_all_named().await?;
    // First, so that no count is larger for a moment than before or afterwards. What the snapshot
    // has in common with the disk keeps the reference of the snapshot.
    active.drop_all(&mut tx).await?;
    // At most 2^22.
    let entries = l1.len().max(usize::try_from(needed).unwrap_or(0));
    active.l1 = l1;
    for index in 0..active.l1.len() {
        let Some(mut words) = active.table(&mut tx, index).await? else { continue };
        active.share_entries(&mut tx, &words).await?;
        if clear_flags(&mut words, tx.geometry.entry_words()) {
            active.link_new(&mut tx, index, &words).await?;
        } else {
            active.share_table(&mut tx, index).await?;
        }
    }
    tx.header.set_size(size);
    active.finish(&mut tx, entries).await?;
    tx.commit().await
}

async fn delete(ring: &Ring, image: &mut Qcow2, index: usize) -> Result<(), Error> {
    let mut tx = Transaction::begin(ring, image)?;
    let mut table = SnapshotTable::load(&tx).await?;
    if index >= table.entries.len() {
        return Err(tx.corrupt("the snapshot table changed meanwhile"));
    }
    let mut active = Active::load(&tx).await?;
    tx.note_all_named().await?;
    let (offset, entries) = table.entries.remove(index).l1_table();
    let what = "the L1 table of the snapshot";
    let l1 = read_l1(&tx, offset, entries, what).await?;
    for entry in &l1 {
        let found = tx.reader().table(*entry).map_err(|reason| tx.corrupt(reason))?;
        let Some(l2_offset) = found else { continue };
        let words = words_of(&tx.read_cluster(l2_offset, "an L2 table of the snapshot").await?);
        active.unref_entries(&mut tx, &words).await?;
        tx.unref_shared_metadata(l2_offset >> tx.geometry.cluster_bits).await?;
    }
    let run = tx.clusters_of(offset, Bytes(u64::from(entries) * 8));
    if run.count > 0 {
        tx.unref_metadata(run.start, run.count).await?;
    }
    active.correct_flags(&mut tx).await?;
    table.finish(&mut tx).await?;
    let entries = active.l1.len();
    active.finish(&mut tx, entries).await?;
    tx.commit().await
}

/// Clears the COPIED flags of an L2 table. Returns whether there were any.
fn clear_flags(words: &mut [u64], entry_words: usize) -> bool {
    let mut found = false;
    for entry in words.iter_mut().step_by(entry_words) {
        if *entry & crate::entry::COMPRESSED == 0 {
            found |= *entry & COPIED != 0;
            *entry &= !COPIED;
        }
    }
    found
}
