//! A bit for each host cluster that may hold metadata, for writers that must not wait.
//!
//! Promises: [`Marks::may_be`] is one load from a line that is hardly ever written; it takes no
//! lock and allocates nothing. It never says no for a cluster that is metadata. Where the image has
//! more clusters than there are bits, several clusters share one: then a yes is to be asked again
//! under the lock ([`super::Refcounts::is_metadata`]).
//!
//! Set and cleared under the lock of the reference counts, together with what makes a cluster
//! metadata or frees it: a thread that has held the lock since, or that synchronizes with such a
//! thread, sees the mark. Memory that is never touched is not taken.

use super::sync::{AtomicBool, AtomicU64, Ordering, zeroed_words};
use crate::units::HostCluster;

/// Fewest bits: 4 KiB of memory.
pub(super) const BITS_MIN: u64 = 1 << 15;
/// Most bits: 8 MiB of memory, enough for 4 TiB in clusters of 64 KiB.
pub(super) const BITS_MAX: u64 = 1 << 26;

/// Host clusters that may be metadata.
pub(crate) struct Marks {
    words: Box<[AtomicU64]>,
    /// Number of bits - 1.
    mask: u64,
    /// A cluster beyond the last bit was marked: bits are shared and never cleared again.
    is_folded: AtomicBool,
}

impl Marks {
    /// * `clusters`: host clusters that the image has or may soon have.
    pub(super) fn new(clusters: u64) -> Marks {
        let wanted = clusters.clamp(BITS_MIN, BITS_MAX).next_power_of_two();
        let allocate = |bits: u64| Some((zeroed_words(usize::try_from(bits / 64).ok()?)?, bits));
        // Without memory for more all clusters share 64 bits: slower, not wrong.
        let (words, bits) = allocate(wanted)
            .unwrap_or_else(|| (std::iter::once(AtomicU64::new(0)).collect(), u64::BITS.into()));
        Marks { words, mask: bits - 1, is_folded: AtomicBool::new(false) }
    }

    /// Whether `cluster` may be metadata. No lock; false is certain for marks that were set before.
    #[inline]
    pub(crate) fn may_be(&self, cluster: HostCluster) -> bool {
        let (word, bit) = self.place(cluster);
        self.words.get(word).is_none_or(|word| word.load(Ordering::Acquire) & bit != 0)
    }

    /// As [`may_be`](Marks::may_be) for any of `count` clusters.
    pub(crate) fn may_have(&self, start: HostCluster, count: u64) -> bool {
        start.up_to(start.saturating_add(count)).any(|cluster| self.may_be(cluster))
    }

    pub(super) fn set(&self, start: HostCluster, count: u64) {
        if start.saturating_add(count) > HostCluster(self.mask + 1) {
            self.is_folded.store(true, Ordering::Relaxed);
        }
        // More than all bits are all bits.
        for cluster in start.up_to(start.saturating_add(count.min(self.mask + 1))) {
            let (word, bit) = self.place(cluster);
            self.words[word].fetch_or(bit, Ordering::Release);
        }
    }

    /// Of clusters that are no metadata any more.
    pub(super) fn clear(&self, start: HostCluster, count: u64) {
        if self.is_folded.load(Ordering::Relaxed) {
            return;
        }
        for cluster in start.up_to(start.saturating_add(count).min(HostCluster(self.mask + 1))) {
            let (word, bit) = self.place(cluster);
            self.words[word].fetch_and(!bit, Ordering::Release);
        }
    }

    /// Bits that there are.
    #[cfg(test)]
    pub(super) fn bits(&self) -> u64 {
        self.mask + 1
    }

    fn place(&self, cluster: HostCluster) -> (usize, u64) {
        let index = cluster.0 & self.mask;
        // At most 2^26 bits.
        #[allow(clippy::cast_possible_truncation)]
        let word = (index / 64) as usize;
        (word, 1 << (index % 64))
    }
}
