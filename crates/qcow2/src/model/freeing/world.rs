//! The disk in memory, and what is true of all threads together.
//!
//! Promises: no step of it is one for the checker, so it adds no schedules. A rule that is broken
//! panics, with the rule.

// A few clusters.
#![allow(clippy::cast_possible_truncation)]

use super::super::WORDS;
use crate::refcounts::Run;

/// Header, refcount table, refcount block, and two clusters of data: the file cannot grow.
pub(super) const CLUSTERS: usize = 5;

/// An entry of the table: each change of it gets the next version.
pub(super) fn entry(version: u64, host: u64) -> u64 {
    version << 16 | host
}

pub(super) fn version(entry: u64) -> u64 {
    entry >> 16
}

pub(super) fn host(entry: u64) -> u64 {
    entry & 0xffff
}

/// Something on the disk: as it was written last, and as it is after a loss of power.
struct Kept<T> {
    written: T,
    stable: T,
}

/// The disk, and what is known about all threads. No step of it is one for the checker.
pub(super) struct World {
    table: Kept<[u64; WORDS]>,
    counts: Kept<[u16; CLUSTERS]>,
    /// Version of each entry whose change was answered.
    pub(super) answered: [u64; WORDS],
    /// Readers that use each cluster.
    pub(super) users: [u64; CLUSTERS],
    is_free: [bool; CLUSTERS],
    unlinked: Vec<Unlinked>,
    /// Something went wrong: the first thing counts.
    is_broken: bool,
}

/// A cluster that was unlinked.
struct Unlinked {
    cluster: u64,
    /// It is among the unlinked clusters.
    is_known: bool,
    is_freed: bool,
}

impl World {
    /// * `entries`: of the table, on the disk.
    pub(super) fn new(entries: [u64; WORDS]) -> World {
        World {
            table: Kept { written: entries, stable: entries },
            counts: Kept { written: [1; CLUSTERS], stable: [1; CLUSTERS] },
            answered: [0; WORDS],
            users: [0; CLUSTERS],
            is_free: [false; CLUSTERS],
            unlinked: Vec::new(),
            is_broken: false,
        }
    }

    /// As `assert`. Other threads go on while the one that failed unwinds, and would hide what it
    /// said.
    pub(super) fn require(&mut self, holds: bool, what: std::fmt::Arguments<'_>) {
        let is_first = !holds && !self.is_broken;
        self.is_broken |= !holds;
        assert!(!is_first, "{what}");
    }

    pub(super) fn write_table(&mut self, entries: &[u64]) {
        self.table.written.copy_from_slice(entries);
    }

    /// * `block`: the refcount block as it is on the disk.
    pub(super) fn write_counts(&mut self, block: &[u8]) {
        for (count, bytes) in self.counts.written.iter_mut().zip(block.chunks(2)) {
            *count = u16::from_be_bytes([bytes[0], bytes[1]]);
        }
    }

    pub(super) fn barrier(&mut self) {
        self.table.stable = self.table.written;
        self.counts.stable = self.counts.written;
    }

    /// Whether an entry names `cluster` after a loss of power.
    fn names(&self, cluster: u64) -> bool {
        let entries = self.table.written.iter().chain(&self.table.stable);
        entries.into_iter().any(|entry| host(*entry) == cluster)
    }

    /// After each write and barrier: what an entry may name after a loss of power is counted.
    pub(super) fn check(&mut self) {
        for cluster in 1..CLUSTERS {
            let count = self.counts.written[cluster].min(self.counts.stable[cluster]);
            let is_sound = count > 0 || !self.names(cluster as u64);
            self.require(is_sound, format_args!("cluster {cluster} is named and not counted"));
        }
    }

    /// `cluster` was allocated.
    pub(super) fn take(&mut self, cluster: u64) {
        self.require_unused(cluster);
        self.is_free[cluster as usize] = false;
    }

    /// `run` can be allocated, and its space is given back.
    pub(super) fn free(&mut self, run: Run) {
        for cluster in run.start.up_to(run.end()) {
            self.require_unused(cluster.0);
            self.is_free[cluster.0 as usize] = true;
            let same = |one: &&mut Unlinked| one.cluster == cluster.0 && !one.is_freed;
            self.unlinked.iter_mut().find(same).expect("it was unlinked").is_freed = true;
        }
    }

    fn require_unused(&mut self, cluster: u64) {
        let is_named = self.names(cluster);
        self.require(!is_named, format_args!("cluster {cluster} is named and free"));
        let is_read = self.users[cluster as usize] > 0;
        self.require(!is_read, format_args!("cluster {cluster} is read and free"));
    }

    /// `cluster` is about to be unlinked. Returns what [`known`](World::known) takes.
    pub(super) fn unlink(&mut self, cluster: u64) -> usize {
        self.unlinked.push(Unlinked { cluster, is_known: false, is_freed: false });
        self.unlinked.len() - 1
    }

    pub(super) fn known(&mut self, index: usize) {
        self.unlinked[index].is_known = true;
    }

    /// * `versions`: what a flush has to cover.
    pub(super) fn require_stable(&mut self, versions: [u64; WORDS]) {
        let stable = self.table.stable.map(version);
        let is_covered = (0..WORDS).all(|word| stable[word] >= versions[word]);
        self.require(is_covered, format_args!("a flush left changes out: {versions:?} {stable:?}"));
    }

    pub(super) fn has_free(&self) -> bool {
        self.is_free.contains(&true)
    }

    /// Clusters that are unlinked and not free yet.
    pub(super) fn on_their_way(&self) -> usize {
        self.unlinked.iter().filter(|one| one.is_known && !one.is_freed).count()
    }
}
