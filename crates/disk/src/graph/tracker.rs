//! Record of the ranges that clients write while the top layer is being committed.
//!
//! Promises: a write records its range when it has ended, also when it failed, with one atomic
//! operation for each granule: no lock, no allocation. The copier clears a granule first and reads
//! it afterwards, so a change that it did not read is recorded again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use ringdisk_ring::Errno;

use super::Graph;

/// Smallest granule, bytes: a cluster of the usual size.
const GRANULE_MIN: u64 = 64 << 10;
/// Most granules: a bitmap of 4 MiB.
const GRANULES_MAX: u64 = 1 << 25;

/// The record: a bitmap of granules.
#[derive(Debug)]
pub(crate) struct Tracker {
    granule_bits: u32,
    words: Box<[AtomicU64]>,
    /// The errno for which the commit will fail; 0: none.
    failure: AtomicI32,
}

impl Tracker {
    /// * `size`: of the disk, bytes.
    pub(crate) fn new(size: u64) -> Tracker {
        let granule = size.div_ceil(GRANULES_MAX).next_power_of_two().max(GRANULE_MIN);
        let granules = size.div_ceil(granule);
        // At most 2^19.
        let words = usize::try_from(granules.div_ceil(64)).unwrap_or(usize::MAX);
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Tracker { granule_bits: granule.trailing_zeros(), words, failure: AtomicI32::new(0) }
    }

    /// A record for the disk with another size, with the same ranges. No request is in flight
    /// meanwhile; a range that the copier takes from the old record is copied once more.
    ///
    /// * `size`: the new size, bytes.
    pub(crate) fn resized(&self, size: u64) -> Tracker {
        let next = Tracker::new(size);
        next.failure.store(self.failure.load(Ordering::Acquire), Ordering::Release);
        for (index, word) in self.words.iter().enumerate() {
            let mut rest = word.load(Ordering::Acquire);
            while rest != 0 {
                let granule = index as u64 * 64 + u64::from(rest.trailing_zeros());
                next.set(granule << self.granule_bits, 1 << self.granule_bits);
                rest &= rest - 1;
            }
        }
        next
    }

    /// Makes the commit fail.
    pub(crate) fn fail(&self, errno: Errno) {
        self.failure.store(errno.raw_os_error(), Ordering::Release);
    }

    /// Errors: the one of [`Tracker::fail`].
    pub(crate) fn check(&self) -> Result<(), Errno> {
        match self.failure.load(Ordering::Acquire) {
            0 => Ok(()),
            number => Err(Errno::from_raw_os_error(number)),
        }
    }

    /// Records a range.
    pub(crate) fn set(&self, offset: u64, len: u64) {
        let Some(last) = offset.checked_add(len).and_then(|end| end.checked_sub(1)) else { return };
        if len == 0 {
            return;
        }
        for granule in offset >> self.granule_bits..=last >> self.granule_bits {
            let Some(word) = self.word(granule) else { return };
            let bit = 1 << (granule % 64);
            // Load before the atomic change: writers of one granule would otherwise contend for the
            // cache line.
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::AcqRel);
            }
        }
    }

    /// Takes the next recorded granule from `offset` on out of the record, as a range of bytes. The
    /// caller reads it after this.
    pub(crate) fn take(&self, offset: u64) -> Option<(u64, u64)> {
        let mut granule = (offset + (1 << self.granule_bits) - 1) >> self.granule_bits;
        while let Some(word) = self.word(granule) {
            let rest = word.load(Ordering::Acquire) >> (granule % 64);
            if rest == 0 {
                granule = (granule / 64 + 1) * 64;
                continue;
            }
            granule += u64::from(rest.trailing_zeros());
            word.fetch_and(!(1 << (granule % 64)), Ordering::AcqRel);
            return Some((granule << self.granule_bits, 1 << self.granule_bits));
        }
        None
    }

    /// Removes a range of whole granules from the record. The caller reads it after this.
    pub(crate) fn clear(&self, offset: u64, len: u64) {
        let end = (offset + len) >> self.granule_bits;
        for granule in (offset + (1 << self.granule_bits) - 1) >> self.granule_bits..end {
            if let Some(word) = self.word(granule) {
                word.fetch_and(!(1 << (granule % 64)), Ordering::AcqRel);
            }
        }
    }

    /// Size of the recorded ranges, bytes (granules count as whole).
    pub(crate) fn bytes(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum::<u64>() << self.granule_bits
    }

    fn word(&self, granule: u64) -> Option<&AtomicU64> {
        self.words.get(usize::try_from(granule / 64).ok()?)
    }
}

/// Records a range when it is dropped: after the write, also when that failed or was cancelled.
#[derive(Debug)]
pub(crate) struct Mark<'a> {
    tracker: Option<&'a Arc<Tracker>>,
    offset: u64,
    len: u64,
}

impl<'a> Mark<'a> {
    /// For a write that begins now.
    pub(crate) fn new(graph: &'a Graph, offset: u64, len: u64) -> Mark<'a> {
        Mark { tracker: graph.tracker.as_ref(), offset, len }
    }
}

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        if let Some(tracker) = self.tracker {
            tracker.set(self.offset, self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_ranges_are_taken_once_and_in_order() {
        let tracker = Tracker::new(100 << 20);
        tracker.set(0, 1);
        tracker.set((10 << 20) - 1, 2);
        tracker.set((100 << 20) - 1, 1);
        tracker.set(5 << 20, 0);
        assert_eq!(tracker.bytes(), 4 * GRANULE_MIN);
        let mut at = 0;
        let mut found = Vec::new();
        while let Some((offset, len)) = tracker.take(at) {
            found.push(offset);
            at = offset + len;
        }
        let expected = [0, (10 << 20) - GRANULE_MIN, 10 << 20, (100 << 20) - GRANULE_MIN];
        assert_eq!(found, expected);
        assert_eq!(tracker.bytes(), 0);
    }

    #[test]
    fn a_record_of_another_size_has_the_same_ranges() {
        let tracker = Tracker::new(100 << 20);
        tracker.set(5 << 20, 1);
        tracker.set((100 << 20) - 1, 1);
        let places = |tracker: &Tracker| {
            let mut at = 0;
            std::iter::from_fn(|| {
                let (offset, len) = tracker.take(at)?;
                at = offset + len;
                Some(offset)
            })
            .collect::<Vec<_>>()
        };
        let last = (100 << 20) - GRANULE_MIN;
        assert_eq!(places(&tracker.resized(200 << 20)), [5 << 20, last]);
        // A granule of 1 MiB.
        assert_eq!(places(&tracker.resized(GRANULES_MAX << 20)), [5 << 20, 99 << 20]);
        assert_eq!(places(&tracker.resized(50 << 20)), [5 << 20]);
        tracker.fail(Errno::NOSPC);
        assert_eq!(tracker.resized(200 << 20).check(), Err(Errno::NOSPC));
    }

    #[test]
    fn only_whole_granules_are_cleared() {
        let tracker = Tracker::new(1 << 20);
        tracker.set(0, 1 << 20);
        tracker.clear(1, (128 << 10) - 1);
        assert_eq!(tracker.take(0), Some((0, GRANULE_MIN)));
        assert_eq!(tracker.take(0), Some((2 * GRANULE_MIN, GRANULE_MIN)));
    }

    #[test]
    fn a_huge_disk_has_a_small_bitmap() {
        let tracker = Tracker::new(1 << 50);
        assert!(tracker.words.len() as u64 * 64 <= GRANULES_MAX);
        tracker.set((1 << 50) - 1, 1);
        assert!(tracker.take(0).is_some());
        // Nothing past the end, and nothing wraps.
        tracker.set(u64::MAX - 5, 100);
        tracker.set(1 << 60, 1);
        assert_eq!(tracker.bytes(), 0);
    }
}
