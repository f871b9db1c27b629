//! Host clusters that L2 entries name, as far as slices were loaded: none of them is free, whatever
//! its reference count says.
//!
//! Promises: bounded memory; past [`CHUNKS_MAX`] further clusters are not remembered, and only
//! their reference counts protect them. Pure memory.

use std::collections::BTreeMap;

use crate::units::HostCluster;

/// Clusters of one chunk: 512 bytes of memory, 256 MiB in clusters of 64 KiB.
pub(super) const CHUNK_CLUSTERS: u64 = 4096;
const CHUNK_WORDS: usize = 64;
/// Most chunks: 32 MiB of memory, 16 TiB in clusters of 64 KiB without gaps.
pub(super) const CHUNKS_MAX: usize = 1 << 16;

/// Host clusters that tables name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Named {
    clusters: Clusters,
    /// Metadata that an entry for data names: it is not given up, since a writer that believes the
    /// entry would write into whatever comes to lie there.
    contested: Clusters,
    /// All tables of the image were read. Entries that were written since name what is
    /// counted.
    is_complete: bool,
}

impl Named {
    /// Adds clusters.
    pub(super) fn insert(&mut self, start: HostCluster, count: u64) {
        self.clusters.insert(start, count);
    }

    /// Adds metadata that an entry for data names.
    pub(super) fn insert_contested(&mut self, cluster: HostCluster) {
        self.contested.insert(cluster, 1);
    }

    /// Whether an entry for data names this cluster of metadata.
    pub(super) fn is_contested(&self, cluster: HostCluster) -> bool {
        self.contested.first_in(cluster, 1).is_some()
    }

    /// All tables were read.
    pub(super) fn complete(&mut self) {
        self.is_complete = true;
    }

    /// Whether all tables were read.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Takes clusters out.
    pub(super) fn remove(&mut self, start: HostCluster, count: u64) {
        self.clusters.remove(start, count);
    }

    /// The first cluster of `start..start + count` that is in the set.
    pub(super) fn first_in(&self, start: HostCluster, count: u64) -> Option<HostCluster> {
        self.clusters.first_in(start, count)
    }

    /// Adds all that another set has.
    pub(crate) fn add_all(&mut self, other: Named) {
        self.is_complete |= other.is_complete;
        self.clusters.add_all(other.clusters);
        self.contested.add_all(other.contested);
    }

    /// Chunks that there are.
    #[cfg(test)]
    pub(super) fn chunks(&self) -> usize {
        self.clusters.chunks.len()
    }
}

/// A set of host clusters.
#[derive(Clone, Debug, Default)]
struct Clusters {
    chunks: BTreeMap<u64, Box<[u64; CHUNK_WORDS]>>,
}

impl Clusters {
    fn insert(&mut self, start: HostCluster, count: u64) {
        let end = start.saturating_add(count).0;
        let mut at = start.0;
        while at < end {
            let number = at / CHUNK_CLUSTERS;
            let stop = end.min((number + 1) * CHUNK_CLUSTERS);
            if self.chunks.len() < CHUNKS_MAX || self.chunks.contains_key(&number) {
                let chunk = self.chunks.entry(number).or_insert_with(|| Box::new([0; CHUNK_WORDS]));
                (at..stop).for_each(|cluster| chunk[word_of(cluster)] |= bit_of(cluster));
            }
            at = stop;
        }
    }

    fn remove(&mut self, start: HostCluster, count: u64) {
        let (start, end) = (start.0, start.saturating_add(count).0);
        let numbers = start / CHUNK_CLUSTERS..end.div_ceil(CHUNK_CLUSTERS);
        for (number, chunk) in self.chunks.range_mut(numbers) {
            let (first, last) = (number * CHUNK_CLUSTERS, (number + 1) * CHUNK_CLUSTERS);
            let clusters = start.max(first)..end.min(last);
            clusters.for_each(|cluster| chunk[word_of(cluster)] &= !bit_of(cluster));
        }
    }

    fn first_in(&self, start: HostCluster, count: u64) -> Option<HostCluster> {
        let (start, end) = (start.0, start.saturating_add(count).0);
        let numbers = start / CHUNK_CLUSTERS..end.div_ceil(CHUNK_CLUSTERS);
        self.chunks.range(numbers).find_map(|(number, chunk)| {
            let (first, last) = (number * CHUNK_CLUSTERS, (number + 1) * CHUNK_CLUSTERS);
            (start.max(first)..end.min(last))
                .find(|cluster| chunk[word_of(*cluster)] & bit_of(*cluster) != 0)
                .map(HostCluster)
        })
    }

    fn add_all(&mut self, other: Clusters) {
        for (number, theirs) in other.chunks {
            if self.chunks.len() >= CHUNKS_MAX && !self.chunks.contains_key(&number) {
                continue;
            }
            let ours = self.chunks.entry(number).or_insert_with(|| Box::new([0; CHUNK_WORDS]));
            ours.iter_mut().zip(*theirs).for_each(|(ours, theirs)| *ours |= theirs);
        }
    }
}

fn word_of(cluster: u64) -> usize {
    // Below CHUNK_WORDS.
    #[allow(clippy::cast_possible_truncation)]
    let word = (cluster % CHUNK_CLUSTERS / 64) as usize;
    word
}

fn bit_of(cluster: u64) -> u64 {
    1 << (cluster % 64)
}
