//! What the tables of the disk and of its internal snapshots name, for changes of images whose reference counts are wrong.
//!
//! A change looks at all tables before it takes a cluster ([`look`](Mappings::look)), and again before it is made true, when it has
//! taken references away ([`refuse_lost`](Mappings::refuse_lost)). L2 tables that several L1 tables share are read once.
//!
//! What cannot be read of a snapshot has nothing to lose, so it does not stop a change that does not need it.

use std::collections::HashSet;

use crate::entry::OFFSET_MASK;
use crate::error::{Error, ErrorKind};

use super::active::read_l1;
use super::entries::words_of;
use super::snapshot_table::SnapshotTable;
use super::transaction::Transaction;

/// L1 tables.
#[derive(Default)]
pub(super) struct Mappings {
    tables: Vec<Vec<u64>>,
}

impl Mappings {
    /// Those of all snapshots.
    ///
    /// Errors: those of [`SnapshotTable::load`].
    pub(super) async fn load(tx: &Transaction<'_>) -> Result<Mappings, Error> {
        Mappings::of_snapshots(tx, &SnapshotTable::load(tx).await?).await
    }

    /// Those of all snapshots in `table`, as far as they can be read.
    ///
    /// Errors: `Io`.
    pub(super) async fn of_snapshots(
        tx: &Transaction<'_>,
        table: &SnapshotTable,
    ) -> Result<Mappings, Error> {
        let mut mappings = Mappings::default();
        for entry in &table.entries {
            let (offset, entries) = entry.l1_table();
            match read_l1(tx, offset, entries, "the L1 table of a snapshot").await {
                Ok(l1) => mappings.tables.push(l1),
                Err(error) if error.kind() == ErrorKind::Io => return Err(error),
                Err(_) => {}
            }
        }
        Ok(mappings)
    }

    /// From now on nothing is taken for something new that one of the tables names.
    ///
    /// Errors: `Io`.
    pub(super) async fn look(&self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        for entry in self.distinct() {
            for (start, count) in names(tx, entry).await? {
                tx.note_named(start, count);
            }
        }
        Ok(())
    }

    /// Refuses a change that has freed what one of the tables names.
    ///
    /// Errors: `Corrupt`, `Io`.
    pub(super) async fn refuse_lost(&self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        if !tx.has_freed() {
            return Ok(());
        }
        for entry in self.distinct() {
            for (start, count) in names(tx, entry).await? {
                if let Some(cluster) = tx.first_freed(start, count) {
                    return Err(tx.corrupt(format!(
                        "a snapshot uses host cluster {cluster}, but its refcount does not count that"
                    )));
                }
            }
        }
        Ok(())
    }

    /// L1 entries that lead to L2 tables, each table once.
    fn distinct(&self) -> impl Iterator<Item = u64> {
        let mut seen = HashSet::new();
        let entries = self.tables.iter().flatten().copied();
        entries.filter(move |entry| entry & OFFSET_MASK != 0 && seen.insert(entry & OFFSET_MASK))
    }
}

/// The clusters that an L1 entry and the L2 table behind it name, also where these cannot be right.
///
/// Errors: `Io`.
async fn names(tx: &Transaction<'_>, l1_entry: u64) -> Result<Vec<(u64, u64)>, Error> {
    let (offset, bits) = (l1_entry & OFFSET_MASK, tx.geometry.cluster_bits);
    let last = (offset + tx.geometry.cluster_size() - 1) >> bits;
    let mut runs = vec![(offset >> bits, last - (offset >> bits) + 1)];
    match tx.read_cluster(offset, "an L2 table of a snapshot").await {
        Ok(bytes) => runs.extend(tx.reader().named(&words_of(&bytes))),
        Err(error) if error.kind() == ErrorKind::Io => return Err(error),
        // The file ends inside it.
        Err(_) => {}
    }
    Ok(runs)
}
