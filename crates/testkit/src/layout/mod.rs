//! A second opinion on qcow2 images: what each host cluster is, what is wrong, what the guest sees.
//!
//! Promises: written from the specification alone and sharing no code with the program, so that a
//! mistake of the program and the same mistake of its judge are not one and the same. Small images
//! only: everything is held in memory. Panics on nothing that an image holds: a broken image is a
//! list of problems.

mod guest;
mod make;
mod tables;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use crate::sim::SimStorage;

pub use guest::Guest;
pub use make::Shape;

/// Where the bytes of an image are.
pub trait Bytes {
    /// Length in bytes.
    fn size(&self) -> u64;
    /// Reads at `offset`; returns the bytes there are: fewer at the end.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> usize;
}

impl Bytes for SimStorage {
    fn size(&self) -> u64 {
        self.len()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> usize {
        self.peek(offset, bytes)
    }
}

impl Bytes for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> usize {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len());
        let count = bytes.len().min(self.len() - start);
        bytes[..count].copy_from_slice(&self[start..start + count]);
        count
    }
}

/// What a host cluster holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // The names are those of the specification.
pub enum Class {
    Header,
    RefcountTable,
    RefcountBlock,
    L1,
    L2,
    Data,
    Compressed,
    SnapshotTable,
    SnapshotL1,
    SnapshotL2,
    Bitmaps,
    /// Nothing refers to it.
    Free,
}

/// The fields of the header that matter here, in its own units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The names are those of the specification.
pub struct Header {
    pub version: u32,
    pub cluster_bits: u32,
    pub size: u64,
    pub l1_size: u32,
    pub l1_offset: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
    pub nb_snapshots: u32,
    pub snapshots_offset: u64,
    pub incompatible: u64,
    pub compatible: u64,
    pub autoclear: u64,
    pub refcount_order: u32,
    pub compression: u8,
}

impl Header {
    /// Bytes of a cluster.
    #[must_use]
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The dirty bit.
    #[must_use]
    pub fn dirty(&self) -> bool {
        self.incompatible & 1 != 0
    }

    /// The corrupt bit.
    #[must_use]
    pub fn corrupt(&self) -> bool {
        self.incompatible & 2 != 0
    }

    /// Data clusters are in another file.
    #[must_use]
    pub fn external(&self) -> bool {
        self.incompatible & 4 != 0
    }

    /// Entries of 128 bits with 32 subclusters.
    #[must_use]
    pub fn extended(&self) -> bool {
        self.incompatible & 16 != 0
    }

    /// Bytes of an L2 entry.
    #[must_use]
    pub fn entry_bytes(&self) -> u64 {
        if self.extended() { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    #[must_use]
    pub fn l2_entries(&self) -> u64 {
        self.cluster() / self.entry_bytes()
    }
}

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Snapshot {
    pub id: String,
    pub name: String,
    pub l1_offset: u64,
    pub l1_size: u32,
    /// Size of the disk then, in bytes.
    pub size: u64,
}

/// An image, looked through.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// The header.
    pub header: Header,
    /// Snapshots, in their order.
    pub snapshots: Vec<Snapshot>,
    /// What refers to each host cluster: class and number of references.
    pub references: BTreeMap<u64, (Class, u64)>,
    /// Refcounts that are not 0.
    pub refcounts: BTreeMap<u64, u64>,
    /// What is wrong. Leaks are not listed.
    pub problems: Vec<String>,
    /// Clusters of the file whose refcount is above their references.
    pub leaks: u64,
    /// The same past the end of the file, where they take no space.
    pub leaks_beyond: u64,
    /// The first host cluster that neither the file nor a refcount has. Of a table that reaches
    /// farther, one such cluster is noted: its refcount of 0 says enough, and a length that is
    /// rubbish would mean millions.
    end: u64,
}

impl Layout {
    /// Looks through an image. A header that cannot be understood is the only problem then.
    pub fn of(image: &(impl Bytes + ?Sized)) -> Layout {
        walk::walk(image)
    }

    /// What the byte at `offset` belongs to.
    #[must_use]
    pub fn class_at(&self, offset: u64) -> Class {
        let cluster = offset.checked_shr(self.header.cluster_bits).unwrap_or(0);
        self.references.get(&cluster).map_or(Class::Free, |(class, _)| *class)
    }

    /// Whether nothing worse than leaks was found.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }
}

impl Display for Layout {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}", self.header)?;
        for (cluster, (class, count)) in &self.references {
            let refcount = self.refcounts.get(cluster).copied().unwrap_or(0);
            writeln!(f, "  {cluster}: {class:?} references {count} refcount {refcount}")?;
        }
        for problem in &self.problems {
            writeln!(f, "  PROBLEM: {problem}")?;
        }
        Ok(())
    }
}
