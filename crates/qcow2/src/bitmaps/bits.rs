//! The bits of one bitmap in memory.
//!
//! Promises: [`Bits::set`] takes no lock and allocates nothing, and writes only to words that
//! change, so that writers of the same places share clean cache lines. Parts of the disk that were
//! never written take no memory.

use std::ops::Range;

use crate::sync::{AtomicU64, Ordering, zeroed_words};
use crate::units::{Bytes, GuestOffset};

/// One bit for each `1 << granularity_bits` bytes of disk; bit 0 of word 0 is the first.
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
    /// Size of the disk in bytes.
    size: Bytes,
    granularity_bits: u32,
}

impl Bits {
    /// No bit is set. `None`: there is no memory for it.
    pub(crate) fn new(size: Bytes, granularity_bits: u32) -> Option<Bits> {
        let count = count(size, granularity_bits).div_ceil(64);
        let words = zeroed_words(usize::try_from(count).ok()?)?;
        Some(Bits { words, size, granularity_bits })
    }

    pub(crate) fn size(&self) -> Bytes {
        self.size
    }

    pub(crate) fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// Bits that there are.
    pub(crate) fn count(&self) -> u64 {
        count(self.size, self.granularity_bits)
    }

    /// Bytes that the bits take as a file has them.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes(self.count().div_ceil(8))
    }

    /// Marks `len` bytes of disk at `offset`. What lies past the end is left out.
    pub(crate) fn set(&self, offset: GuestOffset, len: Bytes) {
        let end = offset.saturating_add(len).min(GuestOffset::after(self.size));
        if offset >= end {
            return;
        }
        let first = offset.from_start() >> self.granularity_bits;
        let last = (end - Bytes(1)).from_start() >> self.granularity_bits;
        self.set_bits(first..last + 1);
    }

    /// Sets bits by their numbers, which must exist.
    pub(crate) fn set_bits(&self, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let next = (at / 64 + 1) * 64;
            let stop = next.min(range.end);
            let width = stop - at;
            let mask = (u64::MAX >> (64 - width)) << (at % 64);
            // Below the number of words: memory was taken for them.
            let Ok(index) = usize::try_from(at / 64) else { return };
            let Some(word) = self.words.get(index) else { return };
            // Most writes hit what is set already: reading keeps the line shared.
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Relaxed);
            }
            at = stop;
        }
    }

    /// Adds 64 bits at once; those past the end are left out.
    pub(crate) fn or_word(&self, index: usize, value: u64) {
        let Some(word) = self.words.get(index) else { return };
        let left = self.count() - index as u64 * 64;
        let value = if left < 64 { value & ((1 << left) - 1) } else { value };
        if value != 0 {
            word.fetch_or(value, Ordering::Relaxed);
        }
    }

    /// 64 bits, zeroes past the end.
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.words.get(index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// The same bits once more. `None`: there is no memory for them.
    pub(crate) fn copy(&self) -> Option<Bits> {
        let copy = Bits::new(self.size, self.granularity_bits)?;
        for (to, from) in copy.words.iter().zip(&self.words) {
            let word = from.load(Ordering::Relaxed);
            if word != 0 {
                to.store(word, Ordering::Relaxed);
            }
        }
        Some(copy)
    }

    /// Clears all bits. No writer sets any meanwhile.
    pub(crate) fn clear(&self) {
        for word in &self.words {
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Words that there are.
    pub(crate) fn words(&self) -> usize {
        self.words.len()
    }

    /// The ranges of the disk whose bits are set, in order: whole units of granularity, cut at the
    /// end of the disk.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<GuestOffset>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            let end = self.next(start, false).unwrap_or_else(|| self.count());
            at = end;
            let bits = self.granularity_bits;
            let offset = |bit: u64| GuestOffset::after(Bytes::of_clusters(bit, bits));
            Some(offset(start)..offset(end).min(GuestOffset::after(self.size)))
        })
    }

    /// The first bit from `at` on that is `wanted`.
    fn next(&self, at: u64, wanted: bool) -> Option<u64> {
        let mut index = usize::try_from(at / 64).ok()?;
        let mut skip = at % 64;
        while index < self.words.len() {
            let word = self.word(index);
            let word = (if wanted { word } else { !word }) >> skip << skip;
            if word != 0 {
                let found = index as u64 * 64 + u64::from(word.trailing_zeros());
                return (found < self.count()).then_some(found);
            }
            index += 1;
            skip = 0;
        }
        None
    }

    /// Adds what `other` has. Where granularities differ, each bit stands for the range that it
    /// covers.
    pub(crate) fn merge(&self, other: &Bits) {
        if self.granularity_bits == other.granularity_bits {
            for index in 0..other.words() {
                self.or_word(index, other.word(index));
            }
            return;
        }
        for range in other.ranges() {
            self.set(range.start, range.end - range.start);
        }
    }
}

/// Bits for a disk of `size` bytes.
pub(crate) fn count(size: Bytes, granularity_bits: u32) -> u64 {
    size.clusters(granularity_bits)
}

impl std::fmt::Debug for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bits")
            .field("size", &self.size)
            .field("granularity_bits", &self.granularity_bits)
            .finish_non_exhaustive()
    }
}
