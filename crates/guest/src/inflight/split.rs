//! Inflight area of a split queue.
//!
//! Promises: as `inflight`. Layout: `features: u64, version: u16, desc_num: u16, last_batch_head:
//! u16, used_idx: u16`, then for each descriptor `inflight: u8, padding: [u8; 5], next: u16,
//! counter: u64`.

use std::sync::atomic::Ordering::{Acquire, Release};

use crate::memory::RingMemory;

use super::VERSION;

const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const COUNT: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;
const ENTRIES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// In an entry.
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

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

/// Marks a part as unused.
pub(super) fn retire(memory: &RingMemory) {
    memory.store_u16(VERSION_AT, 0, Release);
}

/// The area of a queue that runs.
#[derive(Debug)]
pub(crate) struct SplitArea {
    memory: RingMemory,
    size: u16,
    /// Order in which chains were taken.
    counter: u64,
    /// As in the area.
    last_batch_head: u16,
    /// Why its content was ignored, if so.
    given_up: Option<&'static str>,
}

impl SplitArea {
    pub(super) fn new(memory: RingMemory, size: u16) -> SplitArea {
        SplitArea { memory, size, counter: 0, last_batch_head: 0, given_up: None }
    }

    /// Finds the chains in flight; an area that was not in use begins here.
    ///
    /// * `used`, `avail`: indexes of the rings. * `again`: gets the first descriptors in flight, in
    ///   the order in which they were taken; at most as many as the queue has.
    pub(crate) fn recover(&mut self, used: u16, avail: u16, again: &mut Vec<u16>) {
        let memory = &self.memory;
        let is_ours = memory.load_u16(VERSION_AT, Acquire) == VERSION
            && memory.load_u16(COUNT, Acquire) == self.size;
        if !is_ours {
            return self.begin(used);
        }
        self.last_batch_head = memory.load_u16(LAST_BATCH_HEAD, Acquire);
        if !self.finish_batch(used) {
            return self.forget(used, "its used index is not of this ring");
        }
        let mut found: Vec<(u64, u16)> = (0..self.size)
            .filter(|number| memory.load_u8(at(*number, INFLIGHT), Acquire) != 0)
            .map(|number| (memory.load_u64(at(number, COUNTER), Acquire), number))
            .collect();
        // All of them were made available once, and none is used.
        if found.len() > usize::from(avail.wrapping_sub(used)) {
            return self.forget(used, "more is in flight than the ring has made available");
        }
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        again.extend(found.iter().map(|(_, number)| *number));
    }

    /// The driver sees more used elements than the area knows of: those of the last batch, which it
    /// lists. `false` when that makes no sense.
    fn finish_batch(&self, used: u16) -> bool {
        let memory = &self.memory;
        let batch = used.wrapping_sub(memory.load_u16(USED_IDX, Acquire));
        if batch > self.size {
            return false;
        }
        let mut number = self.last_batch_head;
        for _ in 0..batch {
            if number >= self.size {
                return false;
            }
            memory.store_u8(at(number, INFLIGHT), 0, Release);
            number = memory.load_u16(at(number, NEXT), Acquire);
        }
        memory.store_u16(USED_IDX, used, Release);
        true
    }

    /// The ring was reset since the area was last used, or its content is invalid: no chain is in
    /// flight.
    fn forget(&mut self, used: u16, why: &'static str) {
        self.given_up = Some(why);
        self.begin(used);
    }

    fn begin(&mut self, used: u16) {
        let memory = &self.memory;
        memory.store_u16(VERSION_AT, 0, Release);
        for number in 0..self.size {
            memory.store_u8(at(number, INFLIGHT), 0, Release);
        }
        memory.store_u64(FEATURES, 0, Release);
        memory.store_u16(COUNT, self.size, Release);
        memory.store_u16(LAST_BATCH_HEAD, 0, Release);
        memory.store_u16(USED_IDX, used, Release);
        memory.store_u16(VERSION_AT, VERSION, Release);
        (self.counter, self.last_batch_head) = (0, 0);
    }

    /// Why the content of the area was ignored, if so.
    pub(crate) fn given_up(&self) -> Option<&'static str> {
        self.given_up
    }

    /// A chain was taken.
    #[inline]
    pub(crate) fn take(&mut self, head: u16) {
        self.memory.store_u64(at(head, COUNTER), self.counter, Release);
        self.counter = self.counter.wrapping_add(1);
        self.memory.store_u8(at(head, INFLIGHT), 1, Release);
    }

    /// A chain belongs to the batch whose used index comes next.
    #[inline]
    pub(crate) fn link(&mut self, head: u16) {
        self.memory.store_u16(at(head, NEXT), self.last_batch_head, Release);
        self.memory.store_u16(LAST_BATCH_HEAD, head, Release);
        self.last_batch_head = head;
    }

    /// The driver sees the batch.
    #[inline]
    pub(crate) fn give(&mut self, heads: impl Iterator<Item = u16>, used: u16) {
        for head in heads {
            self.memory.store_u8(at(head, INFLIGHT), 0, Release);
        }
        self.memory.store_u16(USED_IDX, used, Release);
    }
}
