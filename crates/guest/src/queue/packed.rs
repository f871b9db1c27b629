//! Packed virtqueue, device side (virtio 1.3, 2.8).
//!
//! Promises: used elements of a batch are written in order, but the first one's flags last, so the
//! driver, which reads in order, sees all or none. Both sides write one ring of descriptors; two
//! flags, compared with a counter that changes with each lap, say which side owns a descriptor.

use std::sync::atomic::{Ordering, fence};

use crate::Error;
use crate::inflight::{PackedArea, Taken};
use crate::layout::descriptor::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use crate::layout::event::{PACKED_DESCRIPTOR, PACKED_DISABLE, PACKED_ENABLE, packed_wants};
use crate::layout::packed::{AVAIL, EVENT_BYTES, FLAGS_AT, ID_AT, LEN_AT, NONE, Place, USED};
use crate::memory::{Log, View};

use super::broken::Broken;
use super::chain::Chain;
use super::indirect::add_packed;
use super::{Areas, Done};

/// An entry for each descriptor in flight, in the list of free entries or in the list of a chain.
/// Numbered as in the inflight area.
#[derive(Clone, Copy, Debug)]
struct Entry {
    next: u16,
    /// Of the chain that begins here: its last entry, how many, its id.
    last: u16,
    count: u16,
    id: u16,
    flying: bool,
}

/// State of the device for one queue.
#[derive(Debug)]
pub(super) struct Packed {
    size: u16,
    pub(super) areas: Areas,
    event_idx: bool,
    indirect: bool,
    /// Next descriptor to take.
    avail: Place,
    /// Next one to write a used element to.
    used: Place,
    entries: Vec<Entry>,
    /// First free entry, or `NONE`.
    free: u16,
    /// Descriptors in flight.
    taken: u16,
    area: Option<PackedArea>,
    /// Chains that a predecessor had taken, the next one last.
    again: Vec<u16>,
    /// The last event suppression that this device has written.
    wish: Option<u32>,
}

impl Packed {
    pub(super) fn new(
        size: u16,
        areas: Areas,
        event_idx: bool,
        indirect: bool,
        base: u32,
        area: Option<PackedArea>,
    ) -> Result<Packed, Error> {
        let [a, b, c, d] = base.to_le_bytes();
        let mut avail = Place::from_bits(u16::from_le_bytes([a, b]));
        let mut used = Place::from_bits(u16::from_le_bytes([c, d]));
        let mut again = Vec::with_capacity(usize::from(size));
        let entry = |number| Entry {
            next: if number + 1 < size { number + 1 } else { NONE },
            last: 0,
            count: 0,
            id: 0,
            flying: false,
        };
        let mut entries: Vec<Entry> = (0..size).map(entry).collect();
        let (mut free, mut taken) = (0, 0);
        let area = match area {
            None => None,
            Some(mut area) => {
                if area.is_in_use() {
                    let ring = &areas.descriptors;
                    let found = area.recover(ring)?;
                    for (number, next) in found.next.iter().enumerate() {
                        entries[number].next = *next;
                    }
                    for head in &found.heads {
                        let of = &mut entries[usize::from(head.entry)];
                        (of.last, of.count, of.id) = (head.last, head.count, head.id);
                        taken += head.count;
                        again.push(head.entry);
                    }
                    free = found.free;
                    used = found.used;
                    avail = used.plus(taken, size);
                } else {
                    area.begin(used);
                }
                Some(area)
            }
        };
        if avail.index >= size || used.index >= size {
            return Err(Error::BadBase { base });
        }
        again.reverse();
        Ok(Packed {
            size,
            areas,
            event_idx,
            indirect,
            avail,
            used,
            entries,
            free,
            taken,
            area,
            again,
            wish: None,
        })
    }

    /// Forgets the last written event suppression: the memory may hold an older one.
    pub(super) fn set_areas(&mut self, areas: Areas) {
        self.areas = areas;
        self.wish = None;
    }

    /// Whether chains of a predecessor are still to be taken again.
    pub(super) fn has_replays(&self) -> bool {
        !self.again.is_empty()
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.avail.bits()) | u32::from(self.used.bits()) << 16
    }

    #[inline]
    fn flags_of_next(&self) -> u16 {
        self.areas.descriptors.load_u16(self.avail.at() + FLAGS_AT, Ordering::Acquire)
    }

    #[inline]
    pub(super) fn has_next(&mut self) -> bool {
        // If all descriptors are in flight, the ring holds no new descriptor of the driver.
        !self.again.is_empty() || self.avail.is_available(self.flags_of_next())
    }

    /// Takes the next chain. It is called by its first entry.
    #[inline]
    pub(super) fn pop(&mut self, view: &View, chain: &mut Chain) -> Result<Option<u16>, Broken> {
        if let Some(slot) = self.again.last().copied() {
            self.walk_again(view, chain, slot)?;
            self.again.pop();
            self.entries[usize::from(slot)].flying = true;
            return Ok(Some(slot));
        }
        let flags = self.flags_of_next();
        if !self.avail.is_available(flags) {
            return Ok(None);
        }
        let (mut place, mut count) = (self.avail, 0);
        let mut entry = self.free;
        let slot = entry;
        let last = loop {
            if count == self.size {
                return Err(Broken::Loop { descriptors: u32::from(self.size) });
            }
            if entry == NONE {
                return Err(Broken::RingFull);
            }
            let descriptor = match count {
                // Its flags are those that said that it is there.
                0 => self.copy_first(place, flags),
                _ => Descriptor::packed(self.areas.descriptors.read_array(place.at())),
            };
            self.add(view, chain, &descriptor)?;
            if let Some(area) = &mut self.area {
                area.note(entry, &descriptor);
            }
            let this = entry;
            entry = self.entries[usize::from(entry)].next;
            place = place.plus(1, self.size);
            count += 1;
            if !descriptor.has(NEXT) {
                self.entries[usize::from(slot)].id = descriptor.other;
                break this;
            }
        };
        if let Some(area) = &mut self.area {
            area.take(&Taken { slot, last, count, free: entry });
        }
        let head = &mut self.entries[usize::from(slot)];
        (head.last, head.count, head.flying) = (last, count, true);
        self.free = entry;
        self.taken += count;
        self.avail = place;
        Ok(Some(slot))
    }

    /// Copies a descriptor whose flags were read already, so that each byte is read once.
    #[inline]
    fn copy_first(&self, place: Place, flags: u16) -> Descriptor {
        let (ring, at) = (&self.areas.descriptors, place.at());
        Descriptor {
            addr: ring.load_u64(at, Ordering::Relaxed),
            len: ring.load_u32(at + LEN_AT, Ordering::Relaxed),
            flags,
            other: ring.load_u16(at + ID_AT, Ordering::Relaxed),
        }
    }

    #[inline]
    fn add(&self, view: &View, chain: &mut Chain, descriptor: &Descriptor) -> Result<(), Broken> {
        if descriptor.has(INDIRECT) {
            return match (self.indirect, descriptor.has(NEXT)) {
                (false, _) => Err(Broken::IndirectRefused),
                (true, true) => Err(Broken::IndirectNested),
                (true, false) => add_packed(chain, view, descriptor),
            };
        }
        chain.push(view, descriptor.addr, descriptor.len, descriptor.has(WRITE))
    }

    /// A chain as the inflight area has it: its descriptors in the ring may be written over.
    fn walk_again(&self, view: &View, chain: &mut Chain, slot: u16) -> Result<(), Broken> {
        let Some(area) = &self.area else { return Ok(()) };
        let mut entry = slot;
        for _ in 0..self.entries[usize::from(slot)].count {
            self.add(view, chain, &area.noted(entry))?;
            entry = self.entries[usize::from(entry)].next;
        }
        Ok(())
    }

    pub(super) fn is_flying(&self, slot: u16) -> bool {
        self.entries.get(usize::from(slot)).is_some_and(|entry| entry.flying)
    }

    /// Shows a batch of used elements to the driver. Gives whether it wants a call for them.
    pub(super) fn publish(&mut self, batch: &[Done], log: Option<&Log>) -> bool {
        let first = self.used;
        let mut end = first;
        for done in batch {
            let Entry { last, count, .. } = self.entries[usize::from(done.slot)];
            self.entries[usize::from(last)].next = self.free;
            if let Some(area) = &mut self.area {
                area.link(last, self.free);
            }
            self.free = done.slot;
            end = end.plus(count, self.size);
        }
        if let Some(area) = &mut self.area {
            area.promise(self.free, end);
        }
        let ring = &self.areas.descriptors;
        let (mut place, mut first_flags, mut total) = (first, 0, 0);
        for (number, done) in batch.iter().enumerate() {
            let Entry { count, id, .. } = self.entries[usize::from(done.slot)];
            ring.store_u32(place.at() + LEN_AT, done.written, Ordering::Relaxed);
            ring.store_u16(place.at() + ID_AT, id, Ordering::Relaxed);
            let lap = if place.wrap { AVAIL | USED } else { 0 };
            let flags = lap | if done.written > 0 { WRITE } else { 0 };
            match number {
                0 => first_flags = flags,
                _ => ring.store_u16(place.at() + FLAGS_AT, flags, Ordering::Release),
            }
            if let Some(log) = log {
                log.mark(ring.guest_addr() + place.at() as u64, DESCRIPTOR_BYTES as u64);
            }
            place = place.plus(count, self.size);
            total += count;
        }
        ring.store_u16(first.at() + FLAGS_AT, first_flags, Ordering::Release);
        if let Some(log) = log {
            log.mark(ring.guest_addr() + first.at() as u64, DESCRIPTOR_BYTES as u64);
        }
        if let Some(area) = &mut self.area {
            area.give(batch.iter().map(|done| done.slot), self.free, end);
        }
        for done in batch {
            self.entries[usize::from(done.slot)].flying = false;
        }
        self.used = end;
        self.taken -= total;
        fence(Ordering::SeqCst);
        let wish = self.areas.driver.load_u32(0, Ordering::Relaxed);
        packed_wants(wish, self.event_idx, self.size, (end.index, end.wrap), total)
    }

    /// Asks for a kick when the next chain comes. The caller looks again after that.
    pub(super) fn enable_kicks(&mut self, log: Option<&Log>) {
        let wish = match self.event_idx {
            true => wish(self.avail.bits(), PACKED_DESCRIPTOR),
            false => wish(0, PACKED_ENABLE),
        };
        self.set_wish(wish, log);
        fence(Ordering::SeqCst);
    }

    pub(super) fn disable_kicks(&mut self, log: Option<&Log>) {
        self.set_wish(wish(0, PACKED_DISABLE), log);
    }

    fn set_wish(&mut self, wish: u32, log: Option<&Log>) {
        if self.wish != Some(wish) {
            self.wish = Some(wish);
            let device = &self.areas.device;
            device.store_u32(0, wish, Ordering::Release);
            if let Some(log) = log {
                log.mark(device.guest_addr(), EVENT_BYTES as u64);
            }
        }
    }
}

fn wish(off_wrap: u16, flags: u16) -> u32 {
    u32::from(off_wrap) | u32::from(flags) << 16
}
