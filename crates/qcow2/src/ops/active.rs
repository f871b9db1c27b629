//! Changes of the active L1 table and its L2 tables in a transaction.
//!
//! Promises: an L2 table that changes gets a new place, its old one loses a reference; the L1 table
//! follows when anything in it changed. Tables of snapshots are never written.

use std::collections::HashSet;

use crate::entry::COPIED;
use crate::error::Error;
use crate::limits::L1_BYTES_MAX;
use crate::refcounts::Run;
use crate::table::{bytes_of, words_of};
use crate::units::{Bytes, HostCluster, HostOffset};

use super::entries::{Reader, Reference};
use super::transaction::Transaction;

/// The active mapping.
pub(super) struct Active {
    /// The L1 table as it will be; all entries that the header counts.
    pub(super) l1: Vec<u64>,
    /// As it is on disk.
    old_l1: Vec<u64>,
    old_run: Run,
    /// L2 tables that this transaction has made, by host offset.
    fresh: HashSet<HostOffset>,
    /// The old clusters of the L1 table belong to something else now.
    given_away: bool,
    /// The L1 table gets a new place in any case.
    moves: bool,
}

impl Active {
    /// Reads the active L1 table.
    pub(super) async fn load(tx: &Transaction<'_>) -> Result<Active, Error> {
        let (offset, entries) = tx.header.l1_table();
        let l1 = read_l1(tx, offset, entries, "the L1 table").await?;
        Ok(Active {
            old_l1: l1.clone(),
            l1,
            old_run: tx.clusters_of(offset, Bytes(u64::from(entries) * 8)),
            fresh: HashSet::new(),
            given_away: false,
            moves: false,
        })
    }

    /// Host offset of an L2 table; `None`: there is none.
    pub(super) fn table_offset(
        &self,
        tx: &Transaction<'_>,
        index: usize,
    ) -> Result<Option<HostOffset>, Error> {
        let entry = self.l1.get(index).copied().unwrap_or(0);
        tx.reader().table(entry).map_err(|reason| tx.corrupt(reason))
    }

    /// The words of an L2 table; `None`: there is none. From now on no cluster that it names is
    /// taken for something new.
    pub(super) async fn table(
        &self,
        tx: &mut Transaction<'_>,
        index: usize,
    ) -> Result<Option<Vec<u64>>, Error> {
        let Some(offset) = self.table_offset(tx, index)? else { return Ok(None) };
        let words = words_of(&tx.read_cluster(offset, "an L2 table").await?);
        // What this transaction has made names what is counted, and nothing if the transaction
        // fails.
        if !self.fresh.contains(&offset) {
            tx.note_named(offset >> tx.geometry.cluster_bits, 1);
            for (start, count) in tx.reader().named(&words) {
                tx.note_data(start, count);
            }
        }
        Ok(Some(words))
    }

    /// Gives an L2 table new contents. It is referred to once.
    pub(super) async fn replace(
        &mut self,
        tx: &mut Transaction<'_>,
        index: usize,
        words: &[u64],
    ) -> Result<(), Error> {
        let old = self.table_offset(tx, index)?;
        if let Some(offset) = old
            && self.fresh.contains(&offset)
        {
            let run = tx.clusters_of(offset, Bytes(1));
            return tx.write_run(run, &bytes_of(words), "an L2 table").await;
        }
        if let Some(offset) = old {
            tx.unref_shared_metadata(offset >> tx.geometry.cluster_bits).await?;
        }
        self.link_new(tx, index, words).await
    }

    /// As [`replace`](Active::replace), but the old table keeps its reference: it belongs to
    /// something else now.
    pub(super) async fn link_new(
        &mut self,
        tx: &mut Transaction<'_>,
        index: usize,
        words: &[u64],
    ) -> Result<(), Error> {
        let run = tx.write_new(&bytes_of(words), "an L2 table").await?;
        let offset = run.start << tx.geometry.cluster_bits;
        self.fresh.insert(offset);
        self.l1[index] = offset.0 | COPIED;
        Ok(())
    }

    /// One reference more to an L2 table that stays as it is.
    pub(super) async fn share_table(
        &mut self,
        tx: &mut Transaction<'_>,
        index: usize,
    ) -> Result<(), Error> {
        if let Some(offset) = self.table_offset(tx, index)? {
            tx.share(offset >> tx.geometry.cluster_bits, 1).await?;
            self.l1[index] = offset.0;
        }
        Ok(())
    }

    /// Takes away an L2 table with everything it refers to.
    pub(super) async fn drop_table(
        &mut self,
        tx: &mut Transaction<'_>,
        index: usize,
    ) -> Result<(), Error> {
        if let Some(words) = self.table(tx, index).await? {
            self.unref_entries(tx, &words).await?;
            if let Some(offset) = self.table_offset(tx, index)? {
                tx.unref_shared_metadata(offset >> tx.geometry.cluster_bits).await?;
            }
            self.l1[index] = 0;
        }
        Ok(())
    }

    /// Takes away all tables.
    pub(super) async fn drop_all(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        for index in 0..self.l1.len() {
            self.drop_table(tx, index).await?;
        }
        Ok(())
    }

    /// One reference less to all that the entries `words` refer to.
    pub(super) async fn unref_entries(
        &self,
        tx: &mut Transaction<'_>,
        words: &[u64],
    ) -> Result<(), Error> {
        let runs = tx.reader().references(words).map_err(|reason| tx.corrupt(reason))?;
        for (start, count) in runs {
            tx.unref_data(start, count).await?;
        }
        Ok(())
    }

    /// One reference more to all that the entries `words` refer to.
    pub(super) async fn share_entries(
        &self,
        tx: &mut Transaction<'_>,
        words: &[u64],
    ) -> Result<(), Error> {
        let runs = tx.reader().references(words).map_err(|reason| tx.corrupt(reason))?;
        for (start, count) in runs {
            tx.share(start, count).await?;
        }
        Ok(())
    }

    /// Corrects all COPIED flags: set exactly where the count is 1.
    pub(super) async fn correct_flags(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        for index in 0..self.l1.len() {
            let Some(mut words) = self.table(tx, index).await? else { continue };
            if self.correct_words(tx, &mut words).await? {
                self.replace(tx, index, &words).await?;
            }
            if let Some(offset) = self.table_offset(tx, index)? {
                let flag = tx.copied(offset >> tx.geometry.cluster_bits).await?;
                self.l1[index] = offset.0 | flag;
            }
        }
        Ok(())
    }

    /// Corrects the flags of one L2 table. Returns whether any was wrong.
    async fn correct_words(
        &self,
        tx: &mut Transaction<'_>,
        words: &mut [u64],
    ) -> Result<bool, Error> {
        let mut changed = false;
        for entry in words.iter_mut().step_by(tx.geometry.entry_words()) {
            let reference = tx.reader().reference(*entry).map_err(|reason| tx.corrupt(reason))?;
            match reference {
                Reference::None => {}
                Reference::Compressed { start, count } => {
                    for cluster in start.up_to(start + count) {
                        tx.copied(cluster).await?;
                    }
                }
                Reference::Cluster(cluster) => {
                    let flag = tx.copied(cluster).await?;
                    changed |= *entry & COPIED != flag;
                    *entry = *entry & !COPIED | flag;
                }
            }
        }
        Ok(changed)
    }

    /// Where the L1 table lies on disk.
    pub(super) fn run(&self) -> Run {
        self.old_run
    }

    /// The L1 table moves even if it does not change.
    pub(super) fn move_l1(&mut self) {
        self.moves = true;
    }

    /// The clusters of the L1 table as it is on disk belong to something else from now on.
    pub(super) fn give_away_l1(&mut self) {
        self.given_away = true;
    }

    /// Writes the L1 table to a new place when it changed, and sets the header.
    ///
    /// * `entries`: its length: longer tables are filled with 0.
    pub(super) async fn finish(
        mut self,
        tx: &mut Transaction<'_>,
        entries: usize,
    ) -> Result<(), Error> {
        self.l1.resize(entries, 0);
        if self.l1 == self.old_l1 && !self.given_away && !self.moves {
            return Ok(());
        }
        let run = tx.write_new(&bytes_of(&self.l1), "the L1 table").await?;
        let offset = run.start << tx.geometry.cluster_bits;
        // At most 2^22.
        tx.header.set_l1_table(offset, u32::try_from(entries).unwrap_or(u32::MAX));
        if !self.given_away && self.old_run.count > 0 {
            tx.unref_metadata(self.old_run.start, self.old_run.count).await?;
        }
        Ok(())
    }
}

impl Transaction<'_> {
    /// The COPIED flag of a reference to a cluster in use.
    ///
    /// Errors: `Corrupt` when its count is 0, so that it would be given back.
    async fn copied(&mut self, cluster: HostCluster) -> Result<u64, Error> {
        match self.count(cluster).await? {
            0 => Err(self.corrupt(format!(
                "host cluster {cluster} is in use, but its refcount is 0, or would be"
            ))),
            1 => Ok(COPIED),
            _ => Ok(0),
        }
    }

    pub(super) fn reader(&self) -> Reader {
        Reader::new(self.geometry, Bytes(self.file.len()), self.version, self.external)
    }

    /// The clusters that a table lies in.
    pub(super) fn clusters_of(&self, offset: HostOffset, len: Bytes) -> Run {
        let bits = self.geometry.cluster_bits;
        Run::new(offset >> bits, len.clusters(bits))
    }
}

/// Reads an L1 table.
///
/// Errors: `Corrupt` when it is unaligned or outside the file; `TooLarge`.
pub(super) async fn read_l1(
    tx: &Transaction<'_>,
    offset: HostOffset,
    entries: u32,
    what: &str,
) -> Result<Vec<u64>, Error> {
    let len = Bytes(u64::from(entries) * 8);
    if len > L1_BYTES_MAX {
        let name = tx.file.name();
        return Err(Error::too_large(name, format!("{what} has {entries} entries")));
    }
    if entries == 0 {
        return Ok(Vec::new());
    }
    let cluster_size = tx.geometry.cluster_size();
    if !offset.is_multiple_of(cluster_size) || offset < HostOffset::after(cluster_size) {
        return Err(tx.corrupt(format!("{what} at {offset:#x} is unaligned or on the header")));
    }
    // At most 32 MiB.
    let bytes = tx.read(offset, usize::try_from(len).unwrap_or(0), what).await?;
    Ok(words_of(&bytes))
}
