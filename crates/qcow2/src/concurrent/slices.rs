//! The cache of L2 slices: a fixed arena of atomic words that any thread reads without a lock.
//!
//! Promises: [`SliceCache::find`] and [`Slice::word`] take no lock, allocate nothing and write
//! nothing, but for one mark "was used", which is written only when it is not set yet and only in a
//! cache that is smaller than the image. Memory is fixed when the image is opened.
//!
//! How: each slot of the arena has a tag, `generation << 32 | slice number + 1` (0 below: empty).
//! A reader loads the tag, loads the words it needs, and loads the tag again: when it is the same,
//! no one wrote the slot in between (a sequence lock for each slot). The order holds because:
//! - the writer stores the empty tag first and every word with Release after it, and the new tag
//!   with Release last;
//! - the reader loads each word with Acquire, so a reader that saw a new word also sees, in its
//!   second read of the tag, the empty tag or a later one.
//!
//! The generation makes a slot that was evicted and loaded again in between look different. It
//! would have to be reused 2^32 times within one look-up to be mistaken.
//!
//! Where a slice lies: if the cache holds the whole image, slot = slice number (the flat array).
//! Otherwise a slice may lie in one of 8 slots (whose tags share one cache line), chosen by the
//! low bits of its number, so neighbours never push each other out; the victim is found by second
//! chance.
//!
//! Changing a slice: [`SliceCache::update`] stores words under the writer lock and marks the slice
//! dirty. A dirty slice, and one that is being written to the image, is never evicted. Entries of
//! two words change together: while they do, the generation is odd and readers spin for these few
//! stores.

use super::sync::{AtomicU8, AtomicU64, Mutex, Ordering, lock, spin, zeroed_bytes, zeroed_words};
use crate::units::Bytes;

/// Slots that a slice may be in, when the cache is smaller than the image.
const WAYS: u32 = 8;
/// The same, in the type of a hand.
const WAYS_U8: u8 = 8;

/// Number of one L2 slice: guest offset / bytes of disk that a slice maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SliceIndex(pub(crate) u32);

/// The arena. Shared by all threads.
pub(crate) struct SliceCache {
    /// Words of one slice.
    slice_words: usize,
    /// 1 when every slice has its own slot, else [`WAYS`].
    ways: u32,
    /// Selects the set: all ones when every slice has its own slot.
    set_mask: u32,
    /// A tag for each slot.
    tags: Box<[AtomicU64]>,
    /// `slice_words` words for each slot, in the byte order of the machine.
    words: Box<[AtomicU64]>,
    /// "Was used" marks, one for each slot; empty when nothing is ever evicted.
    used: Box<[AtomicU8]>,
    /// Writers of slots exclude one another. Readers never take it.
    writer: Mutex<Writer>,
    /// Dirty slices; read without the lock.
    dirty: AtomicU64,
}

/// What only the writer needs.
struct Writer {
    counters: Counters,
    /// For each set the slot at which the search for a victim goes on; empty when nothing is ever
    /// evicted.
    hands: Vec<u8>,
    /// For each slot [`DIRTY`] and [`WRITING`]; empty until the first change.
    states: Vec<u8>,
    /// Slots that are dirty, each once.
    dirty: Vec<u32>,
}

/// The slot differs from the image.
const DIRTY: u8 = 1;
/// A copy of the slot is on its way to the image.
const WRITING: u8 = 2;
/// The slot is dirty, and among the changes are links to new clusters.
const LINKS: u8 = 4;

/// A copy of a slice that has to be written to the image.
#[derive(Debug)]
pub(crate) struct DirtySlice {
    pub(crate) slice: SliceIndex,
    slot: u32,
    /// It links clusters that were not linked before: their data and reference counts go first.
    pub(crate) links: bool,
    /// Its words, in the byte order of the machine.
    pub(crate) words: Box<[u64]>,
}

/// What happened in the cache so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Slices that were loaded.
    pub(crate) loads: u64,
    /// Slices that were pushed out: the cap of the cache was reached.
    pub(crate) evictions: u64,
    /// Slices that differ from the image now.
    pub(crate) dirty: u64,
}

/// The words of a slice that is being changed.
pub(crate) struct SliceWords<'a>(&'a [AtomicU64]);

impl SliceWords<'_> {
    pub(crate) fn set(&self, index: usize, value: u64) {
        self.0[index].store(value, Ordering::Release);
    }
}

/// A slice that was in the cache when it was found.
#[derive(Clone, Copy)]
pub(crate) struct Slice<'a> {
    tag: &'a AtomicU64,
    seen: u64,
    words: &'a [AtomicU64],
}

impl Slice<'_> {
    /// The word at `index`; only to be trusted when [`still_there`](Slice::still_there) says so
    /// afterwards.
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Acquire)
    }

    /// Whether all words loaded so far belong to this slice.
    pub(crate) fn still_there(&self) -> bool {
        self.tag.load(Ordering::Relaxed) == self.seen
    }
}

impl SliceCache {
    /// * `slices`: slices that the image has.
    /// * `slice_words`: 64-bit words of one.
    /// * `max_bytes`: cap; at least one set of slots is made.
    ///
    /// `None` when the memory is not to be had.
    pub(crate) fn new(slices: u32, slice_words: usize, max_bytes: Bytes) -> Option<SliceCache> {
        let slice_bytes = Bytes(slice_words as u64 * 8);
        let affordable = (max_bytes / slice_bytes).clamp(u64::from(WAYS), 1 << 31);
        let (ways, set_mask, slots) = if u64::from(slices) <= affordable {
            (1, u32::MAX, slices)
        } else {
            let sets = (affordable / u64::from(WAYS)).ilog2();
            let sets = 1u32 << sets;
            (WAYS, sets - 1, sets * WAYS)
        };
        let slots = slots as usize;
        let marks = if ways == 1 { 0 } else { slots };
        Some(SliceCache {
            slice_words,
            ways,
            set_mask,
            tags: zeroed_words(slots)?,
            words: zeroed_words(slots.checked_mul(slice_words)?)?,
            used: zeroed_bytes(marks)?,
            writer: Mutex::new(Writer {
                counters: Counters::default(),
                hands: vec![0; marks / WAYS as usize],
                states: Vec::new(),
                dirty: Vec::new(),
            }),
            dirty: AtomicU64::new(0),
        })
    }

    /// First slot in which `slice` may be.
    fn first_slot(&self, slice: SliceIndex) -> usize {
        ((slice.0 & self.set_mask) * self.ways) as usize
    }

    /// Finds `slice`, if it is loaded. No lock, no allocation.
    pub(crate) fn find(&self, slice: SliceIndex) -> Option<Slice<'_>> {
        let first = self.first_slot(slice);
        for slot in first..first + self.ways as usize {
            let tag = self.tags.get(slot)?;
            let mut seen = tag.load(Ordering::Acquire);
            if is_tag_of(seen, slice) {
                while is_changing(seen) {
                    spin();
                    seen = tag.load(Ordering::Acquire);
                }
                if !is_tag_of(seen, slice) {
                    continue;
                }
                if let Some(mark) = self.used.get(slot)
                    && mark.load(Ordering::Relaxed) == 0
                {
                    mark.store(1, Ordering::Relaxed);
                }
                let start = slot * self.slice_words;
                let words = &self.words[start..start + self.slice_words];
                return Some(Slice { tag, seen, words });
            }
        }
        None
    }

    /// Puts `slice` into the cache and evicts another where needed. Takes the writer lock. Does
    /// nothing when the slice is there by now: what is there may be newer.
    ///
    /// * `words`: the contents, `slice_words` of them.
    ///
    /// False: every slot in which it may be is dirty; write back first.
    pub(crate) fn publish(&self, slice: SliceIndex, words: &[u64]) -> bool {
        debug_assert_eq!(words.len(), self.slice_words);
        let mut writer = lock(&self.writer);
        if self.slot_of(slice).is_some() || self.tags.is_empty() {
            return true;
        }
        let Some(slot) = self.victim(&mut writer, slice) else { return false };
        let counters = &mut writer.counters;
        let tag = &self.tags[slot];
        let old = tag.load(Ordering::Relaxed);
        counters.loads += 1;
        counters.evictions += u64::from(old & LOW != 0);
        let generation = (old >> 32).wrapping_add(2) << 32;
        tag.store(generation, Ordering::Relaxed);
        for (word, value) in self.words_of(slot).iter().zip(words) {
            word.store(*value, Ordering::Release);
        }
        // Not marked: what is never looked up again goes first.
        if let Some(mark) = self.used.get(slot) {
            mark.store(0, Ordering::Relaxed);
        }
        tag.store(generation | (u64::from(slice.0) + 1), Ordering::Release);
        true
    }

    /// Changes words of `slice` and marks it dirty. Takes the writer lock; `change` must be short.
    ///
    /// * `pairs`: entries have two words, which readers must see change together.
    /// * `links`: clusters are linked that were not linked before.
    ///
    /// `None`: the slice is not in the cache, nothing happened.
    pub(crate) fn update<T>(
        &self,
        slice: SliceIndex,
        pairs: bool,
        links: bool,
        change: impl FnOnce(&SliceWords<'_>) -> T,
    ) -> Option<T> {
        let mut writer = lock(&self.writer);
        let slot = self.slot_of(slice)?;
        if writer.states.is_empty() {
            writer.states = vec![0; self.tags.len()];
        }
        let tag = &self.tags[slot];
        let before = tag.load(Ordering::Relaxed);
        if pairs {
            tag.store(before.wrapping_add(ODD), Ordering::Relaxed);
        }
        let result = change(&SliceWords(self.words_of(slot)));
        if pairs {
            tag.store(before.wrapping_add(2 * ODD), Ordering::Release);
        }
        writer.mark_dirty(slot, links);
        self.dirty.store(writer.dirty.len() as u64, Ordering::Relaxed);
        Some(result)
    }

    /// Copies up to `max` dirty slices, which count as being written until
    /// [`written`](SliceCache::written). Takes the writer lock.
    pub(crate) fn take_dirty(&self, max: usize) -> Vec<DirtySlice> {
        let mut writer = lock(&self.writer);
        let writer = &mut *writer;
        let from = writer.dirty.len() - max.min(writer.dirty.len());
        let mut taken = Vec::with_capacity(writer.dirty.len() - from);
        for slot in writer.dirty.drain(from..) {
            let index = slot as usize;
            let links = writer.states[index] & LINKS != 0;
            writer.states[index] = WRITING;
            let number = self.tags[index].load(Ordering::Relaxed) & LOW;
            // The low half of a tag, which is not 0 here.
            #[allow(clippy::cast_possible_truncation)]
            let slice = SliceIndex(number.wrapping_sub(1) as u32);
            let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
            let words = self.words_of(index).iter().map(load).collect();
            taken.push(DirtySlice { slice, slot, links, words });
        }
        self.dirty.store(writer.dirty.len() as u64, Ordering::Relaxed);
        taken
    }

    /// Ends what [`take_dirty`](SliceCache::take_dirty) began.
    ///
    /// * `ok`: the copies are on stable storage; otherwise the slices are dirty again.
    pub(crate) fn written(&self, slices: &[DirtySlice], ok: bool) {
        let mut writer = lock(&self.writer);
        for taken in slices {
            let slot = taken.slot as usize;
            writer.states[slot] &= !WRITING;
            if !ok {
                writer.mark_dirty(slot, taken.links);
            }
        }
        self.dirty.store(writer.dirty.len() as u64, Ordering::Relaxed);
    }

    /// Slices that are dirty. No lock; may be outdated.
    pub(crate) fn dirty_hint(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    /// The words of a slot.
    fn words_of(&self, slot: usize) -> &[AtomicU64] {
        let start = slot * self.slice_words;
        &self.words[start..start + self.slice_words]
    }

    /// The slot that holds `slice`. Under the writer lock.
    fn slot_of(&self, slice: SliceIndex) -> Option<usize> {
        let first = self.first_slot(slice);
        let mut slots = first..(first + self.ways as usize).min(self.tags.len());
        slots.find(|slot| is_tag_of(self.tags[*slot].load(Ordering::Relaxed), slice))
    }

    /// The slot for `slice`: an empty one, or the first behind the hand that is clean and whose
    /// mark is not set (marks are cleared on the way, so the second round ends). `None`: all are
    /// dirty.
    fn victim(&self, writer: &mut Writer, slice: SliceIndex) -> Option<usize> {
        let first = self.first_slot(slice);
        let slots = first..first + self.ways as usize;
        if slots.end > self.tags.len() {
            return None;
        }
        let tag = |slot: usize| self.tags[slot].load(Ordering::Relaxed);
        if let Some(slot) = slots.clone().find(|slot| tag(*slot) & LOW == 0) {
            return Some(slot);
        }
        let Writer { hands, states, .. } = writer;
        let clean = |slot: usize| states.get(slot).is_none_or(|state| *state == 0);
        let hand = hands.get_mut(first / WAYS as usize)?;
        for _ in 0..2 * WAYS {
            let slot = first + usize::from(*hand);
            *hand = (*hand + 1) % WAYS_U8;
            if clean(slot) && self.used[slot].swap(0, Ordering::Relaxed) == 0 {
                return Some(slot);
            }
        }
        // Readers set the marks again faster than they were cleared: any clean victim is right.
        slots.clone().find(|slot| clean(*slot))
    }

    /// What happened so far.
    pub(crate) fn counters(&self) -> Counters {
        let writer = lock(&self.writer);
        Counters { dirty: writer.dirty.len() as u64, ..writer.counters }
    }

    /// Bytes that the slices may take when all of them are in use.
    pub(crate) fn capacity_bytes(&self) -> Bytes {
        Bytes(self.words.len() as u64 * 8)
    }
}

impl Writer {
    fn mark_dirty(&mut self, slot: usize, links: bool) {
        if links {
            self.states[slot] |= LINKS;
        }
        if self.states[slot] & DIRTY == 0 {
            self.states[slot] |= DIRTY;
            // Slots are counted in 32 bits.
            #[allow(clippy::cast_possible_truncation)]
            self.dirty.push(slot as u32);
        }
    }
}

/// The half of a tag that names the slice.
const LOW: u64 = 0xffff_ffff;
/// The lowest bit of the generation: set while words change together.
const ODD: u64 = 1 << 32;

/// Whether words of the slot are changing right now.
fn is_changing(tag: u64) -> bool {
    tag & ODD != 0
}

/// Whether `tag` says that its slot holds `slice`.
fn is_tag_of(tag: u64, slice: SliceIndex) -> bool {
    tag & LOW == u64::from(slice.0) + 1
}

impl std::fmt::Debug for SliceCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SliceCache")
            .field("slots", &self.tags.len())
            .field("ways", &self.ways)
            .field("slice_words", &self.slice_words)
            .finish_non_exhaustive()
    }
}
