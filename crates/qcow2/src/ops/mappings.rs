//! Walks all tables of an image, for changes of images whose reference counts are wrong.
//!
//! Promises: a change reads all of them before it takes a cluster
//! ([`note_all_named`](Transaction::note_all_named); growth does so once), and again before it is
//! made true, when it has taken references away ([`refuse_lost`](Transaction::refuse_lost)): no
//! table that stays may name what was freed. That is so for the tables of the disk, those of
//! internal snapshots, and what bitmaps have.
//!
//! What cannot be read has nothing to lose, so it does not stop a change that does not need it.
//! Memory: one L1 table, and a number for each L2 table; L2 tables that several L1 tables share are
//! read once.

use std::collections::{BTreeSet, HashSet};

use ringdisk_ring::Ring;

use crate::engine::Qcow2;
use crate::entry::OFFSET_MASK;
use crate::error::{Error, ErrorKind};
use crate::refcounts::Run;
use crate::table::{self, words_of};
use crate::units::{Bytes, HostOffset};

use super::active::read_l1;
use super::bitmaps;
use super::cluster_kind::ClusterKind;
use super::snapshot_table::SnapshotTable;
use super::transaction::Transaction;

/// The tables that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    All,
    /// Not those of the disk.
    Others,
}

/// How far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    /// Where L1 tables, L2 tables and bitmaps lie.
    Tables,
    /// Also what L2 tables name.
    Entries,
}

impl Qcow2 {
    /// From now on nothing is taken for something new that the tables of the image name, whatever
    /// the counts say. For changes that are no transaction; no request uses the image meanwhile.
    ///
    /// Errors: as [`Transaction::note_all_named`].
    pub(crate) async fn note_named_clusters(&mut self, ring: &Ring) -> Result<(), Error> {
        Transaction::begin(ring, self)?.note_all_named().await
    }
}

impl Transaction<'_> {
    /// From now on nothing is taken for something new that the image names, whatever the count
    /// says.
    ///
    /// Errors: `Io`; `Corrupt` when the snapshot table cannot be read.
    pub(super) async fn note_all_named(&mut self) -> Result<(), Error> {
        self.note_named_of(Tables::All).await
    }

    /// As [`note_all_named`](Transaction::note_all_named), once while the image is open: clients
    /// that append to a disk make it grow again and again. What was let go since by one of two
    /// entries that name it is not known to be named any more.
    pub(super) async fn note_all_named_once(&mut self) -> Result<(), Error> {
        if self.knows_all_named() { Ok(()) } else { self.note_all_named().await }
    }

    /// As [`note_all_named`](Transaction::note_all_named) where nothing is left of the disk.
    pub(super) async fn note_named_by_others(&mut self) -> Result<(), Error> {
        self.note_named_of(Tables::Others).await
    }

    async fn note_named_of(&mut self, of: Tables) -> Result<(), Error> {
        self.walk(of, Depth::Entries, |tx, _, what, run| {
            match what {
                ClusterKind::Table => tx.note_named(run.start, run.count),
                ClusterKind::Data => tx.note_data(run.start, run.count),
            }
            Ok(())
        })
        .await?;
        self.all_named();
        Ok(())
    }

    /// Refuses a change that has freed what the image, as the new header has it, names.
    ///
    /// Errors: `Corrupt`, `Io`.
    pub(super) async fn refuse_lost(&mut self) -> Result<(), Error> {
        self.refuse_lost_of(Tables::All).await
    }

    /// As [`refuse_lost`](Transaction::refuse_lost) where nothing stays of the disk.
    pub(super) async fn refuse_lost_by_others(&mut self) -> Result<(), Error> {
        self.refuse_lost_of(Tables::Others).await
    }

    async fn refuse_lost_of(&mut self, of: Tables) -> Result<(), Error> {
        if !self.has_freed() {
            return Ok(());
        }
        let depth = if self.has_freed_data() { Depth::Entries } else { Depth::Tables };
        self.walk(of, depth, |tx, user, _, run| match tx.first_freed(run.start, run.count) {
            None => Ok(()),
            Some(cluster) => Err(tx.corrupt(format!(
                "{user} uses host cluster {cluster}, but its refcount does not count that"
            ))),
        })
        .await
    }

    /// Calls `found` with all that is named, and by what.
    async fn walk(
        &mut self,
        of: Tables,
        depth: Depth,
        mut found: impl FnMut(&mut Self, &str, ClusterKind, Run) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut seen = HashSet::new();
        let active = Some(self.header.l1_table()).filter(|_| of == Tables::All);
        let table = SnapshotTable::load(self).await?;
        let snapshots: BTreeSet<(HostOffset, u32)> =
            table.entries.iter().map(super::snapshot_table::Entry::l1_table).collect();
        // L1 tables do not overlap, so there is no more of them than the file has.
        let bytes: Bytes =
            snapshots.iter().map(|(_, entries)| Bytes(u64::from(*entries) * 8)).sum();
        if bytes > Bytes(self.file.len()).max(self.geometry.cluster_size()) {
            return Err(self.corrupt("the L1 tables of its snapshots overlap"));
        }
        let active = active.into_iter().map(|place| ("the disk", place));
        let snapshots = snapshots.into_iter().map(|place| ("a snapshot", place));
        for (user, (offset, entries)) in active.chain(snapshots) {
            let l1 = match read_l1(self, offset, entries, "an L1 table").await {
                Ok(l1) => l1,
                Err(error) if error.kind() == ErrorKind::Io => return Err(error),
                Err(_) => continue,
            };
            let run = self.clusters_of(offset, Bytes(u64::from(entries) * 8));
            if run.count > 0 {
                found(self, user, ClusterKind::Table, run)?;
            }
            for entry in l1 {
                let offset = HostOffset(entry & OFFSET_MASK);
                if offset == HostOffset(0) || !seen.insert(offset) {
                    continue;
                }
                let (table, named) = self.named_by(offset, depth).await?;
                found(self, user, ClusterKind::Table, table)?;
                for run in named {
                    found(self, user, ClusterKind::Data, run)?;
                }
            }
        }
        bitmaps::walk(self, |tx, what, run| found(tx, "a bitmap", what, run)).await.map(drop)
    }

    /// The clusters of the L2 table at `offset`, and the runs that its entries name, also where
    /// these cannot be right.
    ///
    /// Errors: `Io`.
    async fn named_by(&self, offset: HostOffset, depth: Depth) -> Result<(Run, Vec<Run>), Error> {
        let bits = self.geometry.cluster_bits;
        let last = (offset + self.geometry.cluster_size() - Bytes(1)) >> bits;
        let start = offset >> bits;
        let table = Run::new(start, last - start + 1);
        let mut runs = Vec::new();
        if depth == Depth::Entries {
            let what = "an L2 table";
            // The file may end inside it.
            let bytes =
                table::read(self.ring, &self.file, offset, self.cluster_bytes(), what).await?;
            let named = self.reader().named(&words_of(&bytes));
            let run = |(start, count)| Run::new(start, count);
            runs.extend(named.into_iter().map(run));
        }
        Ok((table, runs))
    }
}
