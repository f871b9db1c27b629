//! What a walk through the metadata finds, one value for each finding.
//!
//! Promises: plain values.

use crate::units::{HostCluster, HostOffset};

/// An L2 table and the entries that refer to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::check) struct TableUse {
    /// Host offset as it stands in the L1 entry; not always aligned.
    pub(in crate::check) offset: HostOffset,
    /// Entries of the active L1 table with the COPIED flag.
    pub(in crate::check) copied: u32,
    /// Entries of the active L1 table without it.
    pub(in crate::check) plain: u32,
    /// Entries of the active L1 table for the header, which is no table.
    pub(in crate::check) header: u32,
    /// Entries of L1 tables of snapshots.
    pub(in crate::check) snapshots: u32,
    /// Number of the one entry that names it, in the active L1 table; [`NO_INDEX`] where there are
    /// more.
    pub(in crate::check) index: u32,
}

/// See [`TableUse::index`].
pub(in crate::check) const NO_INDEX: u32 = u32::MAX;

impl TableUse {
    pub(in crate::check) fn active(&self) -> u32 {
        self.copied.saturating_add(self.plain)
    }

    pub(in crate::check) fn total(&self) -> u32 {
        self.active().saturating_add(self.snapshots).saturating_add(self.header)
    }
}

/// An L2 entry that is made right by itself, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::check) struct Fixable {
    /// Host offset of the table.
    pub(in crate::check) table: HostOffset,
    /// Number of the entry.
    pub(in crate::check) index: u32,
    /// Its place in the external data file, which is known; `None`: nothing of the entry can be
    /// kept.
    pub(in crate::check) place: Option<HostOffset>,
}

/// A compressed cluster of which the file has not all sectors. What is missing need not be part of
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::check) struct CutCompressed {
    /// Host offset of the table.
    pub(in crate::check) table: HostOffset,
    /// Number of the entry.
    pub(in crate::check) index: u32,
    /// Host offset of the data.
    pub(in crate::check) offset: HostOffset,
}

/// What a cluster of metadata holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::check) enum Holds {
    Header,
    RefcountTable,
    RefcountBlock,
    L1,
    SnapshotL1,
    Snapshots,
    L2,
    Bitmaps,
}

impl Holds {
    /// In a message.
    pub(in crate::check) fn words(self) -> &'static str {
        match self {
            Holds::Header => "the header",
            Holds::RefcountTable => "the refcount table",
            Holds::RefcountBlock => "a refcount block",
            Holds::L1 => "the L1 table",
            Holds::SnapshotL1 => "the L1 table of a snapshot",
            Holds::Snapshots => "the snapshot table",
            Holds::L2 => "an L2 table",
            Holds::Bitmaps => "bitmaps",
        }
    }
}

/// A cluster that a structure needs for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::check) struct Claim {
    pub(in crate::check) cluster: HostCluster,
    pub(in crate::check) holds: Holds,
    /// References that the structure itself has.
    pub(in crate::check) uses: u32,
    /// Number of the refcount block.
    pub(in crate::check) block: u32,
}
