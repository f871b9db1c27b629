//! Driver side of a packed queue.
//!
//! Promises: as `driver`.

use std::sync::atomic::{Ordering, fence};

use crate::RingMemory;
use crate::layout::descriptor::INDIRECT;
use crate::layout::event::{PACKED_DESCRIPTOR, PACKED_DISABLE, PACKED_WRAP, packed_wants};
use crate::layout::packed::{AVAIL, FLAGS_AT, ID_AT, LEN_AT, Place, USED};
use crate::queue::{Areas, Segment};

use super::Used;
use super::split::flags;

pub(super) fn write_table(memory: &RingMemory, at: usize, segments: &[Segment], readable: usize) {
    for (number, segment) in segments.iter().enumerate() {
        let place = at + number * 16;
        memory.store_u64(place, segment.addr, Ordering::Relaxed);
        // Only WRITE means anything in a table.
        let flags = flags(number, 0, readable);
        let rest = u64::from(segment.len) | u64::from(flags) << 48;
        memory.store_u64(place + 8, rest, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(super) struct PackedDriver {
    size: u16,
    event_idx: bool,
    avail: Place,
    used: Place,
    /// Flags of the first descriptor that was not shown yet, and where.
    held: Option<(usize, u16)>,
    /// Descriptors not shown yet.
    hidden: u16,
    /// Descriptors that are free.
    free: u16,
    /// Ids that are free, as a stack.
    ids: Vec<u16>,
    /// Descriptors of a chain by its id; 0: it is not in flight.
    count: Vec<u16>,
}

impl PackedDriver {
    pub(super) fn new(size: u16, event_idx: bool) -> PackedDriver {
        let begin = Place { index: 0, wrap: true };
        PackedDriver {
            size,
            event_idx,
            avail: begin,
            used: begin,
            held: None,
            hidden: 0,
            free: size,
            ids: (0..size).rev().collect(),
            count: vec![0; usize::from(size)],
        }
    }

    pub(super) fn free(&self) -> u16 {
        self.free
    }

    pub(super) fn in_flight(&self) -> u16 {
        // As many as the queue has, which is 16 bits.
        self.size - u16::try_from(self.ids.len()).unwrap_or(self.size)
    }

    pub(super) fn next_id(&self) -> Option<u16> {
        if self.free == 0 { None } else { self.ids.last().copied() }
    }

    pub(super) fn add(
        &mut self,
        areas: &Areas,
        segments: &[Segment],
        readable: usize,
    ) -> Option<u16> {
        let count = u16::try_from(segments.len()).ok().filter(|count| *count <= self.free)?;
        let id = if count == 0 { None } else { self.ids.pop() }?;
        for (number, segment) in segments.iter().enumerate() {
            let flags = flags(number, segments.len(), readable);
            self.write(areas, (segment.addr, segment.len), flags, id);
        }
        self.count[usize::from(id)] = count;
        Some(id)
    }

    pub(super) fn add_table(&mut self, areas: &Areas, table: u64, entries: usize) -> Option<u16> {
        let len = u32::try_from(entries * 16).ok()?;
        let id = if self.free == 0 { None } else { self.ids.pop() }?;
        self.write(areas, (table, len), INDIRECT, id);
        self.count[usize::from(id)] = 1;
        Some(id)
    }

    fn write(&mut self, areas: &Areas, (addr, len): (u64, u32), flags: u16, id: u16) {
        let (ring, at) = (&areas.descriptors, self.avail.at());
        ring.store_u64(at, addr, Ordering::Relaxed);
        ring.store_u32(at + LEN_AT, len, Ordering::Relaxed);
        ring.store_u16(at + ID_AT, id, Ordering::Relaxed);
        let flags = flags | if self.avail.wrap { AVAIL } else { USED };
        match self.held {
            None => self.held = Some((at + FLAGS_AT, flags)),
            Some(_) => ring.store_u16(at + FLAGS_AT, flags, Ordering::Release),
        }
        self.avail = self.avail.plus(1, self.size);
        self.free -= 1;
        self.hidden += 1;
    }

    pub(super) fn publish(&mut self, areas: &Areas) -> bool {
        let Some((at, flags)) = self.held.take() else { return false };
        areas.descriptors.store_u16(at, flags, Ordering::Release);
        fence(Ordering::SeqCst);
        let count = std::mem::take(&mut self.hidden);
        let wish = areas.device.load_u32(0, Ordering::Relaxed);
        let place = (self.avail.index, self.avail.wrap);
        packed_wants(wish, self.event_idx, self.size, place, count)
    }

    pub(super) fn has_used(&self, areas: &Areas) -> bool {
        let flags = areas.descriptors.load_u16(self.used.at() + FLAGS_AT, Ordering::Acquire);
        self.used.is_used(flags)
    }

    pub(super) fn pop_used(&mut self, areas: &Areas) -> Option<Used> {
        if !self.has_used(areas) {
            return None;
        }
        let (ring, at) = (&areas.descriptors, self.used.at());
        let len = ring.load_u32(at + LEN_AT, Ordering::Relaxed);
        let id = ring.load_u16(at + ID_AT, Ordering::Relaxed);
        let count = std::mem::take(&mut self.count[usize::from(id)]);
        assert!(count > 0, "chain {id} was used, which is not in flight");
        self.ids.push(id);
        self.free += count;
        self.used = self.used.plus(count, self.size);
        Some(Used { id, len })
    }

    pub(super) fn base(&self, avail: bool) -> u32 {
        let place = if avail { self.avail } else { self.used };
        let word = u32::from(place.index) | u32::from(place.wrap) << 15;
        word | word << 16
    }

    pub(super) fn enable_calls(&mut self, areas: &Areas) {
        let wrap = if self.used.wrap { PACKED_WRAP } else { 0 };
        let wish = match self.event_idx {
            true => u32::from(self.used.index | wrap) | u32::from(PACKED_DESCRIPTOR) << 16,
            false => 0,
        };
        areas.driver.store_u32(0, wish, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    pub(super) fn disable_calls(&mut self, areas: &Areas) {
        areas.driver.store_u32(0, u32::from(PACKED_DISABLE) << 16, Ordering::Release);
    }
}
