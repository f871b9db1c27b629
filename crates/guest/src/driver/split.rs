//! Driver side of a split queue.
//!
//! Promises: as `driver`.

use std::sync::atomic::{Ordering, fence};

use crate::RingMemory;
use crate::layout::descriptor::{INDIRECT, NEXT, WRITE};
use crate::layout::event::{NO_NOTIFY, passed};
use crate::queue::{Areas, Segment};

use super::Used;

/// Writes a descriptor.
pub(super) fn write(
    memory: &RingMemory,
    at: usize,
    (addr, len): (u64, u32),
    flags: u16,
    next: u16,
) {
    memory.store_u64(at, addr, Ordering::Relaxed);
    let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
    memory.store_u64(at + 8, rest, Ordering::Relaxed);
}

pub(super) fn write_table(memory: &RingMemory, at: usize, segments: &[Segment], readable: usize) {
    for (number, segment) in (0u16..).zip(segments) {
        let flags = flags(usize::from(number), segments.len(), readable);
        let place = at + usize::from(number) * 16;
        write(memory, place, (segment.addr, segment.len), flags, number + 1);
    }
}

/// Flags of a descriptor by its number in its chain.
pub(super) fn flags(number: usize, of: usize, readable: usize) -> u16 {
    let next = if number + 1 < of { NEXT } else { 0 };
    let write = if number >= readable { WRITE } else { 0 };
    next | write
}

#[derive(Debug)]
pub(super) struct SplitDriver {
    size: u16,
    event_idx: bool,
    /// Next descriptor, of a chain or of the free ones.
    next: Vec<u16>,
    free_head: u16,
    free: u16,
    /// Descriptors of the chain that begins here; 0: none is in flight.
    count: Vec<u16>,
    in_flight: u16,
    /// Entries written to the avail ring, and entries that its index has published.
    avail: u16,
    published: u16,
    used: u16,
}

impl SplitDriver {
    pub(super) fn new(size: u16, event_idx: bool) -> SplitDriver {
        SplitDriver {
            size,
            event_idx,
            next: (0..size).map(|number| number + 1).collect(),
            free_head: 0,
            free: size,
            count: vec![0; usize::from(size)],
            in_flight: 0,
            avail: 0,
            published: 0,
            used: 0,
        }
    }

    pub(super) fn free(&self) -> u16 {
        self.free
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    pub(super) fn next_id(&self) -> Option<u16> {
        (self.free > 0).then_some(self.free_head)
    }

    pub(super) fn add(
        &mut self,
        areas: &Areas,
        segments: &[Segment],
        readable: usize,
    ) -> Option<u16> {
        let count = u16::try_from(segments.len()).ok().filter(|count| *count <= self.free)?;
        if count == 0 {
            return None;
        }
        let (head, mut index) = (self.free_head, self.free_head);
        for (number, segment) in segments.iter().enumerate() {
            let flags = flags(number, segments.len(), readable);
            let next = self.next[usize::from(index)];
            let at = usize::from(index) * 16;
            write(&areas.descriptors, at, (segment.addr, segment.len), flags, next);
            index = next;
        }
        self.made(areas, head, count, index);
        Some(head)
    }

    pub(super) fn add_table(&mut self, areas: &Areas, table: u64, entries: usize) -> Option<u16> {
        let head = self.next_id()?;
        let len = u32::try_from(entries * 16).ok()?;
        write(&areas.descriptors, usize::from(head) * 16, (table, len), INDIRECT, 0);
        let after = self.next[usize::from(head)];
        self.made(areas, head, 1, after);
        Some(head)
    }

    fn made(&mut self, areas: &Areas, head: u16, count: u16, free_head: u16) {
        self.free_head = free_head;
        self.free -= count;
        self.count[usize::from(head)] = count;
        self.in_flight += 1;
        let at = 4 + 2 * usize::from(self.avail & (self.size - 1));
        areas.driver.store_u16(at, head, Ordering::Relaxed);
        self.avail = self.avail.wrapping_add(1);
    }

    pub(super) fn publish(&mut self, areas: &Areas) -> bool {
        let old = std::mem::replace(&mut self.published, self.avail);
        if old == self.avail {
            return false;
        }
        areas.driver.store_u16(2, self.avail, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = areas.device.load_u16(4 + 8 * usize::from(self.size), Ordering::Relaxed);
            passed(event, self.avail, old)
        } else {
            areas.device.load_u16(0, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    pub(super) fn has_used(&self, areas: &Areas) -> bool {
        areas.device.load_u16(2, Ordering::Acquire) != self.used
    }

    pub(super) fn pop_used(&mut self, areas: &Areas) -> Option<Used> {
        if !self.has_used(areas) {
            return None;
        }
        let at = 4 + 8 * usize::from(self.used & (self.size - 1));
        let head = areas.device.load_u32(at, Ordering::Relaxed);
        let len = areas.device.load_u32(at + 4, Ordering::Relaxed);
        let head = u16::try_from(head).expect("an id of 16 bits");
        let count = std::mem::take(&mut self.count[usize::from(head)]);
        assert!(count > 0, "chain {head} was used, which is not in flight");
        let mut last = head;
        for _ in 1..count {
            last = self.next[usize::from(last)];
        }
        self.next[usize::from(last)] = self.free_head;
        self.free_head = head;
        self.free += count;
        self.in_flight -= 1;
        self.used = self.used.wrapping_add(1);
        Some(Used { id: head, len })
    }

    pub(super) fn base(&self, avail: bool) -> u32 {
        u32::from(if avail { self.published } else { self.used })
    }

    pub(super) fn enable_calls(&mut self, areas: &Areas) {
        if self.event_idx {
            let event = 4 + 2 * usize::from(self.size);
            areas.driver.store_u16(event, self.used, Ordering::Relaxed);
        } else {
            areas.driver.store_u16(0, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    pub(super) fn disable_calls(&mut self, areas: &Areas) {
        if !self.event_idx {
            areas.driver.store_u16(0, NO_NOTIFY, Ordering::Relaxed);
        }
    }
}
