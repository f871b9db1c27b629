//! Inflight area of a packed queue.
//!
//! Layout: `features: u64, version: u16, desc_num: u16, free_head: u16, old_free_head: u16,
//! used_idx: u16, old_used_idx: u16, used_wrap_counter: u8, old_used_wrap_counter: u8, padding:
//! [u8; 7]`, and from byte 32 for each descriptor `inflight: u8, padding: u8, next: u16, last: u16,
//! num: u16, counter: u64, id: u16, flags: u16, len: u32, addr: u64`.
//!
//! Promises: descriptors are copied here, since used elements overwrite them. The `old_…` fields
//! hold while the driver does not see the next batch yet, the others once it does. Both free heads
//! are one write, and all fields of the used place are one: so no kill leaves an index of one lap
//! with the counter of another.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::Error;
use crate::layout::descriptor::Descriptor;
use crate::layout::packed::{AVAIL, FLAGS_AT, NONE, Place, USED};
use crate::memory::RingMemory;

use super::VERSION;

const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const COUNT: usize = 10;
/// `free_head` and `old_free_head`.
const FREE_HEADS: usize = 12;
/// `used_idx`, `old_used_idx`, both wrap counters and two bytes of padding.
const USED_PLACES: usize = 16;
const ENTRIES: usize = 32;
const ENTRY_BYTES: usize = 32;
/// In an entry.
const INFLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LEN: usize = 20;
const ADDR: usize = 24;

pub(super) fn bytes(size: u16) -> usize {
    ENTRIES + ENTRY_BYTES * usize::from(size)
}

fn at(number: u16, field: usize) -> usize {
    ENTRIES + ENTRY_BYTES * usize::from(number) + field
}

pub(super) fn is_busy(memory: &RingMemory, size: u16) -> bool {
    memory.load_u16(VERSION_AT, Acquire) == VERSION
        && (0..size).any(|number| memory.load_u8(at(number, INFLIGHT), Acquire) != 0)
}

/// A chain that was taken: its first and last entry, how many, and the first entry that is free
/// after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) slot: u16,
    pub(crate) last: u16,
    pub(crate) count: u16,
    pub(crate) free: u16,
}

/// A chain in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) entry: u16,
    pub(crate) last: u16,
    pub(crate) count: u16,
    pub(crate) id: u16,
}

/// State of an area that was in use.
#[derive(Debug)]
pub(crate) struct Found {
    /// Next entry of each.
    pub(crate) next: Vec<u16>,
    /// Chains in flight, in the order in which they were taken.
    pub(crate) heads: Vec<Head>,
    /// First free entry.
    pub(crate) free: u16,
    /// Where the next used element goes.
    pub(crate) used: Place,
}

/// Marks a part as unused.
pub(super) fn retire(memory: &RingMemory) {
    memory.store_u16(VERSION_AT, 0, Release);
}

/// The area of a queue that runs.
#[derive(Debug)]
pub(crate) struct PackedArea {
    memory: RingMemory,
    size: u16,
    /// Order in which chains were taken.
    counter: u64,
    /// As the driver sees it.
    used: Place,
    free: u16,
}

impl PackedArea {
    pub(super) fn new(memory: RingMemory, size: u16) -> PackedArea {
        PackedArea { memory, size, counter: 0, used: Place { index: 0, wrap: true }, free: 0 }
    }

    /// Whether a queue of this size has used it.
    pub(crate) fn is_in_use(&self) -> bool {
        self.memory.load_u16(VERSION_AT, Acquire) == VERSION
            && self.memory.load_u16(COUNT, Acquire) == self.size
    }

    /// Makes it the area of a queue with nothing in flight.
    pub(crate) fn begin(&mut self, used: Place) {
        let memory = &self.memory;
        memory.store_u16(VERSION_AT, 0, Release);
        for number in 0..self.size {
            let next = if number + 1 < self.size { number + 1 } else { NONE };
            memory.store_u8(at(number, INFLIGHT), 0, Release);
            memory.store_u16(at(number, NEXT), next, Release);
        }
        memory.store_u64(FEATURES, 0, Release);
        memory.store_u16(COUNT, self.size, Release);
        self.store_free(0, 0);
        self.store_used(used, used);
        self.memory.store_u16(VERSION_AT, VERSION, Release);
        (self.counter, self.used, self.free) = (0, used, 0);
    }

    fn store_free(&self, now: u16, old: u16) {
        let both = u32::from(now) | u32::from(old) << 16;
        self.memory.store_u32(FREE_HEADS, both, Release);
    }

    fn store_used(&self, now: Place, old: Place) {
        let [a, b] = now.index.to_le_bytes();
        let [c, d] = old.index.to_le_bytes();
        let all = [a, b, c, d, u8::from(now.wrap), u8::from(old.wrap), 0, 0];
        self.memory.store_u64(USED_PLACES, u64::from_le_bytes(all), Release);
    }

    /// Copies a descriptor to a free entry.
    #[inline]
    pub(crate) fn note(&mut self, entry: u16, descriptor: &Descriptor) {
        let memory = &self.memory;
        memory.store_u64(at(entry, ADDR), descriptor.addr, Release);
        memory.store_u32(at(entry, LEN), descriptor.len, Release);
        memory.store_u16(at(entry, FLAGS), descriptor.flags, Release);
        memory.store_u16(at(entry, ID), descriptor.other, Release);
    }

    /// A copied descriptor.
    pub(crate) fn noted(&self, entry: u16) -> Descriptor {
        let memory = &self.memory;
        Descriptor {
            addr: memory.load_u64(at(entry, ADDR), Acquire),
            len: memory.load_u32(at(entry, LEN), Acquire),
            flags: memory.load_u16(at(entry, FLAGS), Acquire),
            other: memory.load_u16(at(entry, ID), Acquire),
        }
    }

    /// A chain was taken, and all its descriptors are copied. It is in flight with the last write.
    #[inline]
    pub(crate) fn take(&mut self, taken: &Taken) {
        let memory = &self.memory;
        memory.store_u16(at(taken.slot, LAST), taken.last, Release);
        memory.store_u16(at(taken.slot, NUM), taken.count, Release);
        memory.store_u64(at(taken.slot, COUNTER), self.counter, Release);
        memory.store_u8(at(taken.slot, INFLIGHT), 1, Release);
        self.counter = self.counter.wrapping_add(1);
        self.free = taken.free;
        self.store_free(self.free, self.free);
    }

    /// The entry after another one.
    #[inline]
    pub(crate) fn link(&mut self, entry: u16, next: u16) {
        self.memory.store_u16(at(entry, NEXT), next, Release);
    }

    /// Stores the state that holds once the driver sees the batch.
    #[inline]
    pub(crate) fn promise(&mut self, free: u16, used: Place) {
        self.store_free(free, self.free);
        self.store_used(used, self.used);
    }

    /// The driver sees the batch.
    #[inline]
    pub(crate) fn give(&mut self, slots: impl Iterator<Item = u16>, free: u16, used: Place) {
        for slot in slots {
            self.memory.store_u8(at(slot, INFLIGHT), 0, Release);
        }
        self.store_free(free, free);
        self.store_used(used, used);
        (self.free, self.used) = (free, used);
    }

    /// Finds the chains in flight, and makes ring and area consistent.
    ///
    /// * `ring`: the descriptors.
    ///
    /// Errors: the area contradicts itself.
    pub(crate) fn recover(&mut self, ring: &RingMemory) -> Result<Found, Error> {
        (self.free, self.used) = self.decide(ring)?;
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
        let mut lists = Lists::new(self.size);
        // Free ones: chains whose taking was not finished, and those of a batch that the driver
        // sees.
        let mut entry = self.free;
        while entry != NONE {
            lists.visit(entry)?;
            self.memory.store_u8(at(entry, INFLIGHT), 0, Release);
            entry = self.next(entry, &mut lists);
        }
        let mut heads = Vec::new();
        for number in 0..self.size {
            if self.memory.load_u8(at(number, INFLIGHT), Acquire) != 0 {
                heads.push(self.chain(number, &mut lists)?);
            }
        }
        if lists.left != 0 {
            return Err(damaged());
        }
        heads.sort_unstable_by_key(|(counter, _)| *counter);
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let heads: Vec<Head> = heads.iter().map(|(_, head)| *head).collect();
        let taken = heads.iter().map(|head| head.count).sum();
        self.hide_unseen(ring, taken);
        Ok(Found { next: lists.next, heads, free: self.free, used: self.used })
    }

    /// First free entry and used place: those after the last batch if the driver sees it, else
    /// those before.
    fn decide(&self, ring: &RingMemory) -> Result<(u16, Place), Error> {
        let [a, b, c, d] = self.memory.load_u32(FREE_HEADS, Acquire).to_le_bytes();
        let (free, old_free) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        let [a, b, c, d, wrap, old_wrap, ..] =
            self.memory.load_u64(USED_PLACES, Acquire).to_le_bytes();
        let used = Place { index: u16::from_le_bytes([a, b]), wrap: wrap != 0 };
        let old_used = Place { index: u16::from_le_bytes([c, d]), wrap: old_wrap != 0 };
        if used.index >= self.size || old_used.index >= self.size {
            return Err(damaged());
        }
        let flags = ring.load_u16(old_used.at() + FLAGS_AT, Acquire);
        // The driver may even have made it available again, in the next lap.
        let is_seen = used != old_used && !old_used.is_available(flags);
        Ok(if is_seen { (free, used) } else { (old_free, old_used) })
    }

    fn next(&self, entry: u16, lists: &mut Lists) -> u16 {
        let next = self.memory.load_u16(at(entry, NEXT), Acquire);
        lists.next[usize::from(entry)] = if next < self.size { next } else { NONE };
        lists.next[usize::from(entry)]
    }

    /// The chain that begins at an entry.
    fn chain(&self, head: u16, lists: &mut Lists) -> Result<(u64, Head), Error> {
        let count = self.memory.load_u16(at(head, NUM), Acquire);
        let counter = self.memory.load_u64(at(head, COUNTER), Acquire);
        let (mut entry, mut last) = (head, head);
        for _ in 0..count {
            lists.visit(entry)?;
            last = entry;
            entry = self.next(entry, lists);
        }
        if count == 0 || last != self.memory.load_u16(at(head, LAST), Acquire) {
            return Err(damaged());
        }
        let id = self.memory.load_u16(at(last, ID), Acquire);
        Ok((counter, Head { entry: head, last, count, id }))
    }

    /// Removes used elements of an unfinished batch: the driver has not reached them, but would
    /// after the next one.
    fn hide_unseen(&self, ring: &RingMemory, taken: u16) {
        let mut place = self.used;
        for _ in 0..taken {
            let at = place.at() + FLAGS_AT;
            let flags = ring.load_u16(at, Relaxed);
            if place.is_used(flags) {
                let lap = if place.wrap { AVAIL } else { USED };
                ring.store_u16(at, flags & !(AVAIL | USED) | lap, Release);
            }
            place = place.plus(1, self.size);
        }
    }
}

/// Entries in lists, each in one.
struct Lists {
    next: Vec<u16>,
    seen: Vec<bool>,
    /// Entries not seen yet.
    left: u16,
}

impl Lists {
    fn new(size: u16) -> Lists {
        let len = usize::from(size);
        Lists { next: vec![NONE; len], seen: vec![false; len], left: size }
    }

    fn visit(&mut self, entry: u16) -> Result<(), Error> {
        match self.seen.get_mut(usize::from(entry)) {
            Some(seen) if !*seen => {
                *seen = true;
                self.left -= 1;
                Ok(())
            }
            _ => Err(damaged()),
        }
    }
}

fn damaged() -> Error {
    Error::BadInflight { why: "it contradicts itself" }
}
