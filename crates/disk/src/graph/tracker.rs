//! Record of the ranges that clients write while a commit, a stream or a mirror copies.
//!
//! Promises: a write records its range when it has ended, also when it failed, with one atomic
//! operation for each granule: no lock, no allocation. The copier clears a granule first and reads
//! it afterwards, so a change that it did not read is recorded again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use super::Graph;

/// Smallest granule, bytes: a cluster of the usual size.
const GRANULE_MIN: Bytes = Bytes(64 << 10);
/// Most granules: a bitmap of 4 MiB.
const GRANULES_MAX: u64 = 1 << 25;

/// The smallest granule of a record that has at most so many of them.
///
/// * `size`: of the disk.
/// * `min`: a power of two.
pub(super) fn granule_of(size: Bytes, granules_max: u64, min: Bytes) -> Bytes {
    Bytes(size.0.div_ceil(granules_max).next_power_of_two()).max(min)
}

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
    pub(crate) fn new(size: Bytes) -> Tracker {
        let granule = granule_of(size, GRANULES_MAX, GRANULE_MIN);
        let granules = size.div_ceil(granule);
        // At most 2^19.
        let words = usize::try_from(granules.div_ceil(64)).unwrap_or(usize::MAX);
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Tracker { granule_bits: granule.ilog2(), words, failure: AtomicI32::new(0) }
    }

    /// A record for the disk with another size, with the same ranges. No request is in flight
    /// meanwhile; a range that the copier takes from the old record is copied once more.
    ///
    /// * `size`: the new size, bytes.
    pub(crate) fn resized(&self, size: Bytes) -> Tracker {
        let next = Tracker::new(size);
        next.failure.store(self.failure.load(Ordering::Acquire), Ordering::Release);
        for (index, word) in self.words.iter().enumerate() {
            let mut rest = word.load(Ordering::Acquire);
            while rest != 0 {
                let granule = index as u64 * 64 + u64::from(rest.trailing_zeros());
                next.set(GuestOffset(granule << self.granule_bits), self.granule());
                rest &= rest - 1;
            }
        }
        next
    }

    /// Bytes of a granule; a power of two.
    pub(crate) fn granule(&self) -> Bytes {
        Bytes(1 << self.granule_bits)
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
    pub(crate) fn set(&self, offset: GuestOffset, len: Bytes) {
        let Some(last) = offset.0.checked_add(len.0).and_then(|end| end.checked_sub(1)) else {
            return;
        };
        if len.is_zero() {
            return;
        }
        for granule in offset.0 >> self.granule_bits..=last >> self.granule_bits {
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
    pub(crate) fn take(&self, offset: GuestOffset) -> Option<(GuestOffset, Bytes)> {
        let mut granule = (offset.0 + (1 << self.granule_bits) - 1) >> self.granule_bits;
        while let Some(word) = self.word(granule) {
            let rest = word.load(Ordering::Acquire) >> (granule % 64);
            if rest == 0 {
                granule = (granule / 64 + 1) * 64;
                continue;
            }
            granule += u64::from(rest.trailing_zeros());
            word.fetch_and(!(1 << (granule % 64)), Ordering::AcqRel);
            return Some((GuestOffset(granule << self.granule_bits), self.granule()));
        }
        None
    }

    /// Removes a range of whole granules from the record. The caller reads it after this. Returns
    /// whether any of it was recorded.
    pub(crate) fn clear(&self, offset: GuestOffset, len: Bytes) -> bool {
        let end = (offset + len).from_start() >> self.granule_bits;
        let mut was_recorded = false;
        for granule in (offset.0 + (1 << self.granule_bits) - 1) >> self.granule_bits..end {
            if let Some(word) = self.word(granule) {
                let bit = 1 << (granule % 64);
                was_recorded |= word.fetch_and(!bit, Ordering::AcqRel) & bit != 0;
            }
        }
        was_recorded
    }

    /// The next recorded range from `offset` on, in whole granules; it stays recorded.
    ///
    /// * `max`: bytes of the range at most, or one granule.
    pub(crate) fn next(&self, offset: GuestOffset, max: Bytes) -> Option<(GuestOffset, Bytes)> {
        let mut granule = (offset.0 + (1 << self.granule_bits) - 1) >> self.granule_bits;
        loop {
            let rest = self.word(granule)?.load(Ordering::Acquire) >> (granule % 64);
            if rest != 0 {
                granule += u64::from(rest.trailing_zeros());
                break;
            }
            granule = (granule / 64 + 1) * 64;
        }
        let mut end = granule + 1;
        while self.of(end - granule + 1) <= max && self.is_recorded(end) {
            end += 1;
        }
        Some((GuestOffset(granule << self.granule_bits), self.of(end - granule)))
    }

    /// Whether all of a range is recorded. An empty one is.
    pub(crate) fn covers(&self, offset: GuestOffset, len: Bytes) -> bool {
        let (start, end) = self.granules(offset, len);
        (start..end).all(|granule| self.is_recorded(granule))
    }

    /// The granules that a range touches, in bytes: first and past the last.
    pub(crate) fn widened(&self, offset: GuestOffset, len: Bytes) -> (u64, u64) {
        let (start, end) = self.granules(offset, len);
        (start << self.granule_bits, end << self.granule_bits)
    }

    /// The granules that a range touches: first and past the last.
    fn granules(&self, offset: GuestOffset, len: Bytes) -> (u64, u64) {
        let end = offset.saturating_add(len).from_start().clusters(self.granule_bits);
        (offset.0 >> self.granule_bits, end)
    }

    fn is_recorded(&self, granule: u64) -> bool {
        let word = self.word(granule);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (granule % 64) & 1 != 0)
    }

    /// Size of the recorded ranges, bytes (granules count as whole).
    pub(crate) fn bytes(&self) -> Bytes {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.of(self.words.iter().map(ones).sum())
    }

    /// The length of so many granules.
    fn of(&self, granules: u64) -> Bytes {
        Bytes::of_clusters(granules, self.granule_bits)
    }

    fn word(&self, granule: u64) -> Option<&AtomicU64> {
        self.words.get(usize::try_from(granule / 64).ok()?)
    }
}

/// Records a range when it is dropped: after the write, also when that failed or was cancelled.
#[derive(Debug)]
pub(crate) struct Mark<'a> {
    graph: &'a Graph,
    tracker: Option<&'a Arc<Tracker>>,
    offset: GuestOffset,
    len: Bytes,
}

impl<'a> Mark<'a> {
    /// For a write that begins now.
    pub(crate) fn new(graph: &'a Graph, offset: GuestOffset, len: Bytes) -> Mark<'a> {
        Mark { graph, tracker: graph.tracker.as_ref(), offset, len }
    }

    /// The range is where it has to be, and is not recorded.
    pub(crate) fn forget(mut self) {
        self.tracker = None;
    }

    /// The write has ended with success: where a mirror is to stay in step, the range goes to its
    /// target now, and is not recorded.
    #[inline]
    pub(crate) async fn written(mut self, ring: &Ring) {
        let Some(mirror) = &self.graph.mirror else { return };
        // Boxed: the future of a plain write stays small.
        if mirror.is_in_step()
            && Box::pin(mirror.follow(ring, self.graph, self.offset, self.len)).await
        {
            self.tracker = None;
        }
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
        let tracker = Tracker::new(Bytes(100 << 20));
        tracker.set(GuestOffset(0), Bytes(1));
        tracker.set(GuestOffset((10 << 20) - 1), Bytes(2));
        tracker.set(GuestOffset((100 << 20) - 1), Bytes(1));
        tracker.set(GuestOffset(5 << 20), Bytes::ZERO);
        assert_eq!(tracker.bytes(), 4 * GRANULE_MIN);
        let mut at = GuestOffset(0);
        let mut found = Vec::new();
        while let Some((offset, len)) = tracker.take(at) {
            found.push(offset.0);
            at = offset + len;
        }
        let expected = [0, (10 << 20) - GRANULE_MIN.0, 10 << 20, (100 << 20) - GRANULE_MIN.0];
        assert_eq!(found, expected);
        assert_eq!(tracker.bytes(), Bytes::ZERO);
    }

    #[test]
    fn a_record_of_another_size_has_the_same_ranges() {
        let tracker = Tracker::new(Bytes(100 << 20));
        tracker.set(GuestOffset(5 << 20), Bytes(1));
        tracker.set(GuestOffset((100 << 20) - 1), Bytes(1));
        let places = |tracker: &Tracker| {
            let mut at = GuestOffset(0);
            std::iter::from_fn(|| {
                let (offset, len) = tracker.take(at)?;
                at = offset + len;
                Some(offset.0)
            })
            .collect::<Vec<_>>()
        };
        let last = (100 << 20) - GRANULE_MIN.0;
        assert_eq!(places(&tracker.resized(Bytes(200 << 20))), [5 << 20, last]);
        // A granule of 1 MiB.
        assert_eq!(places(&tracker.resized(Bytes(GRANULES_MAX << 20))), [5 << 20, 99 << 20]);
        assert_eq!(places(&tracker.resized(Bytes(50 << 20))), [5 << 20]);
        tracker.fail(Errno::NOSPC);
        assert_eq!(tracker.resized(Bytes(200 << 20)).check(), Err(Errno::NOSPC));
    }

    #[test]
    fn only_whole_granules_are_cleared() {
        let tracker = Tracker::new(Bytes(1 << 20));
        tracker.set(GuestOffset(0), Bytes(1 << 20));
        tracker.clear(GuestOffset(1), Bytes((128 << 10) - 1));
        assert_eq!(tracker.take(GuestOffset(0)), Some((GuestOffset(0), GRANULE_MIN)));
        assert_eq!(
            tracker.take(GuestOffset(0)),
            Some((GuestOffset::after(2 * GRANULE_MIN), GRANULE_MIN))
        );
    }

    #[test]
    fn recorded_ranges_are_found_and_stay() {
        let tracker = Tracker::new(Bytes(100 << 20));
        let at = |granule: u64| GuestOffset::after(granule * GRANULE_MIN);
        tracker.set(at(62), 4 * GRANULE_MIN);
        assert_eq!(tracker.next(at(0), Bytes(1 << 20)), Some((at(62), 4 * GRANULE_MIN)));
        assert_eq!(tracker.next(at(0), 2 * GRANULE_MIN), Some((at(62), 2 * GRANULE_MIN)));
        assert_eq!(tracker.next(at(64), Bytes::ZERO), Some((at(64), GRANULE_MIN)));
        assert_eq!(tracker.next(at(66), Bytes(1 << 20)), None);
        assert!(tracker.covers(at(62) + Bytes(5), 3 * GRANULE_MIN));
        assert!(!tracker.covers(at(62) + Bytes(5), 4 * GRANULE_MIN));
        assert_eq!(tracker.widened(at(3) + Bytes(1), GRANULE_MIN), (at(3).0, at(5).0));
        assert!(tracker.clear(at(60), 3 * GRANULE_MIN));
        assert!(!tracker.clear(at(60), 3 * GRANULE_MIN));
        assert_eq!(tracker.bytes(), 3 * GRANULE_MIN);
    }

    #[test]
    fn a_huge_disk_has_a_small_bitmap() {
        let tracker = Tracker::new(Bytes(1 << 50));
        assert!(tracker.words.len() as u64 * 64 <= GRANULES_MAX);
        tracker.set(GuestOffset((1 << 50) - 1), Bytes(1));
        assert!(tracker.take(GuestOffset(0)).is_some());
        // Nothing past the end, and nothing wraps.
        tracker.set(GuestOffset(u64::MAX - 5), Bytes(100));
        tracker.set(GuestOffset(1 << 60), Bytes(1));
        assert_eq!(tracker.bytes(), Bytes::ZERO);
    }
}
