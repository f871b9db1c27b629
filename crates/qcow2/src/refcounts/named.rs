//! Host clusters that L2 entries name, as far as slices were loaded: none of them is free, whatever its reference count
//! says.
//!
//! Promises: bounded memory; past [`CHUNKS_MAX`] further clusters are not remembered, and only their reference counts
//! protect them. Pure memory.

use std::collections::BTreeMap;

/// Clusters of one chunk: 512 bytes of memory, 256 MiB in clusters of 64 KiB.
pub(super) const CHUNK_CLUSTERS: u64 = 4096;
const CHUNK_WORDS: usize = 64;
/// Most chunks: 32 MiB of memory, 16 TiB in clusters of 64 KiB without gaps.
pub(super) const CHUNKS_MAX: usize = 1 << 16;

/// A set of host clusters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Named {
    chunks: BTreeMap<u64, Box<[u64; CHUNK_WORDS]>>,
    /// All tables of the image were looked at. Entries that were written since name what is counted.
    is_complete: bool,
}

impl Named {
    /// Adds clusters.
    pub(super) fn insert(&mut self, start: u64, count: u64) {
        let end = start.saturating_add(count);
        let mut at = start;
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

    /// All tables were looked at.
    pub(super) fn complete(&mut self) {
        self.is_complete = true;
    }

    /// Whether all tables were looked at.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Takes clusters out.
    pub(super) fn remove(&mut self, start: u64, count: u64) {
        let end = start.saturating_add(count);
        let numbers = start / CHUNK_CLUSTERS..end.div_ceil(CHUNK_CLUSTERS);
        for (number, chunk) in self.chunks.range_mut(numbers) {
            let (first, last) = (number * CHUNK_CLUSTERS, (number + 1) * CHUNK_CLUSTERS);
            let clusters = start.max(first)..end.min(last);
            clusters.for_each(|cluster| chunk[word_of(cluster)] &= !bit_of(cluster));
        }
    }

    /// The first cluster of `start..start + count` that is in the set.
    pub(super) fn first_in(&self, start: u64, count: u64) -> Option<u64> {
        let end = start.saturating_add(count);
        let numbers = start / CHUNK_CLUSTERS..end.div_ceil(CHUNK_CLUSTERS);
        self.chunks.range(numbers).find_map(|(number, chunk)| {
            let (first, last) = (number * CHUNK_CLUSTERS, (number + 1) * CHUNK_CLUSTERS);
            (start.max(first)..end.min(last))
                .find(|cluster| chunk[word_of(*cluster)] & bit_of(*cluster) != 0)
        })
    }

    /// Adds all that another set has.
    pub(crate) fn add_all(&mut self, other: Named) {
        self.is_complete |= other.is_complete;
        for (number, theirs) in other.chunks {
            if self.chunks.len() >= CHUNKS_MAX && !self.chunks.contains_key(&number) {
                continue;
            }
            let ours = self.chunks.entry(number).or_insert_with(|| Box::new([0; CHUNK_WORDS]));
            ours.iter_mut().zip(*theirs).for_each(|(ours, theirs)| *ours |= theirs);
        }
    }

    /// Chunks that there are.
    #[cfg(test)]
    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
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
