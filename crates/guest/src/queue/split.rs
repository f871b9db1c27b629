//! Split virtqueue, device side (virtio 1.3, 2.7).
//!
//! Promises: used elements of a batch are written first, then the index. The parts are the
//! descriptor table, the avail ring (driver) and the used ring (device).

use std::sync::atomic::{Ordering, fence};

use crate::inflight::SplitArea;
use crate::layout::descriptor::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use crate::layout::event::{NO_NOTIFY, passed};
use crate::memory::{Log, View};

use super::broken::Broken;
use super::chain::Chain;
use super::indirect::add_split;
use super::{Areas, Done};

/// `flags` and `idx` of both rings, then the entries.
const FLAGS: usize = 0;
const IDX: usize = 2;
const ENTRIES: usize = 4;
const AVAIL_BYTES: usize = 2;
const USED_BYTES: usize = 8;

/// Bytes of avail ring and used ring; with EVENT_IDX each ends with an index.
pub(super) fn area_bytes(size: usize, event_idx: bool) -> (usize, usize) {
    let event = if event_idx { 2 } else { 0 };
    (ENTRIES + AVAIL_BYTES * size + event, ENTRIES + USED_BYTES * size + event)
}

/// State of the device for one queue.
#[derive(Debug)]
pub(super) struct Split {
    size: u16,
    pub(super) areas: Areas,
    event_idx: bool,
    indirect: bool,
    /// Next entry of the avail ring to take; counts on over 2^16.
    next_avail: u16,
    /// The driver's index when we last looked.
    avail_seen: u16,
    /// The used index that the driver sees.
    used: u16,
    /// By first descriptor.
    flying: Vec<bool>,
    area: Option<SplitArea>,
    /// First descriptors of the chains that a predecessor had taken, the next one last.
    again: Vec<u16>,
    /// The last value that this device has written to `used.flags`; a predecessor may have written
    /// another one before.
    flags: Option<u16>,
    /// Address of the guest of the used ring, for the log: any number, as the front end says it.
    used_addr: u64,
}

impl Split {
    /// * `base`: next entry of the avail ring; with an area the used index says that better, even
    ///   with one that was not in use: a kill may have come before it was.
    pub(super) fn new(
        size: u16,
        areas: Areas,
        event_idx: bool,
        indirect: bool,
        base: u16,
        area: Option<SplitArea>,
    ) -> Split {
        let used_addr = areas.device.guest_addr();
        let used = areas.device.load_u16(IDX, Ordering::Acquire);
        let avail = areas.driver.load_u16(IDX, Ordering::Acquire);
        let mut next_avail = base;
        let mut again = Vec::with_capacity(usize::from(size));
        let area = area.map(|mut area| {
            area.recover(used, avail, &mut again);
            // What was taken is either used or in flight. At most `size` is, as `recover` promises.
            next_avail = used.wrapping_add(u16::try_from(again.len()).unwrap_or(size));
            area
        });
        again.reverse();
        let flying = vec![false; usize::from(size)];
        Split {
            size,
            areas,
            event_idx,
            indirect,
            next_avail,
            avail_seen: next_avail,
            used,
            flying,
            area,
            again,
            flags: None,
            used_addr,
        }
    }

    pub(super) fn inflight_given_up(&self) -> Option<&'static str> {
        self.area.as_ref().and_then(SplitArea::given_up)
    }

    /// Whether chains of a predecessor are still to be taken again.
    pub(super) fn has_replays(&self) -> bool {
        !self.again.is_empty()
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    /// Forgets the last written flags: the memory may hold older ones.
    pub(super) fn set_areas(&mut self, areas: Areas, log_addr: Option<u64>) {
        self.areas = areas;
        self.set_used_addr(log_addr);
        self.flags = None;
    }

    /// * `log_addr`: address of the used ring in the log; `None`: where it is.
    pub(super) fn set_used_addr(&mut self, log_addr: Option<u64>) {
        self.used_addr = log_addr.unwrap_or(self.areas.device.guest_addr());
    }

    #[inline]
    pub(super) fn has_next(&mut self) -> bool {
        if self.avail_seen == self.next_avail {
            self.avail_seen = self.areas.driver.load_u16(IDX, Ordering::Acquire);
        }
        self.avail_seen != self.next_avail || !self.again.is_empty()
    }

    /// Takes the next chain; its first descriptor is what it is called by.
    #[inline]
    pub(super) fn pop(&mut self, view: &View, chain: &mut Chain) -> Result<Option<u16>, Broken> {
        if let Some(head) = self.again.last().copied() {
            self.walk(view, chain, head)?;
            self.again.pop();
            self.flying[usize::from(head)] = true;
            return Ok(Some(head));
        }
        if !self.has_next() {
            return Ok(None);
        }
        if self.avail_seen.wrapping_sub(self.next_avail) > self.size {
            return Err(Broken::AvailJump { from: self.next_avail, to: self.avail_seen });
        }
        let place = usize::from(self.next_avail & (self.size - 1));
        let head = self.areas.driver.load_u16(ENTRIES + AVAIL_BYTES * place, Ordering::Relaxed);
        match self.flying.get(usize::from(head)) {
            None => return Err(Broken::OutOfTable { index: head, size: u32::from(self.size) }),
            Some(true) => return Err(Broken::InFlight { head }),
            Some(false) => {}
        }
        self.walk(view, chain, head)?;
        if let Some(area) = &mut self.area {
            area.take(head);
        }
        self.flying[usize::from(head)] = true;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    #[inline]
    fn walk(&self, view: &View, chain: &mut Chain, head: u16) -> Result<(), Broken> {
        let mut index = head;
        for _ in 0..self.size {
            let at = usize::from(index) * DESCRIPTOR_BYTES;
            let descriptor = Descriptor::split(self.areas.descriptors.read_array(at));
            if descriptor.has(INDIRECT) {
                return match (self.indirect, descriptor.has(NEXT)) {
                    (false, _) => Err(Broken::IndirectRefused),
                    (true, true) => Err(Broken::IndirectNested),
                    (true, false) => add_split(chain, view, &descriptor),
                };
            }
            chain.push(view, descriptor.addr, descriptor.len, descriptor.has(WRITE))?;
            if !descriptor.has(NEXT) {
                return Ok(());
            }
            index = descriptor.other;
            if index >= self.size {
                return Err(Broken::OutOfTable { index, size: u32::from(self.size) });
            }
        }
        Err(Broken::Loop { descriptors: u32::from(self.size) })
    }

    /// Shows a batch of used elements to the driver. Gives whether it wants a call for them.
    pub(super) fn publish(&mut self, batch: &[Done], log: Option<&Log>) -> bool {
        let device = &self.areas.device;
        let old = self.used;
        let mut used = old;
        for done in batch {
            let at = ENTRIES + USED_BYTES * usize::from(used & (self.size - 1));
            device.store_u32(at, u32::from(done.slot), Ordering::Relaxed);
            device.store_u32(at + 4, done.written, Ordering::Relaxed);
            if let Some(log) = log {
                log.mark(self.used_addr.wrapping_add(at as u64), USED_BYTES as u64);
            }
            if let Some(area) = &mut self.area {
                area.link(done.slot);
            }
            used = used.wrapping_add(1);
        }
        device.store_u16(IDX, used, Ordering::Release);
        self.used = used;
        if let Some(log) = log {
            log.mark(self.used_addr.wrapping_add(IDX as u64), 2);
        }
        if let Some(area) = &mut self.area {
            area.give(batch.iter().map(|done| done.slot), used);
        }
        for done in batch {
            self.flying[usize::from(done.slot)] = false;
        }
        fence(Ordering::SeqCst);
        let driver = &self.areas.driver;
        if self.event_idx {
            let event = ENTRIES + AVAIL_BYTES * usize::from(self.size);
            passed(driver.load_u16(event, Ordering::Relaxed), used, old)
        } else {
            driver.load_u16(FLAGS, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    pub(super) fn is_flying(&self, slot: u16) -> bool {
        self.flying.get(usize::from(slot)).copied().unwrap_or(false)
    }

    /// Asks for a kick when the next chain comes. The caller looks again after that.
    pub(super) fn enable_kicks(&mut self, log: Option<&Log>) {
        if self.event_idx {
            let event = ENTRIES + USED_BYTES * usize::from(self.size);
            self.areas.device.store_u16(event, self.next_avail, Ordering::Relaxed);
            if let Some(log) = log {
                log.mark(self.used_addr.wrapping_add(event as u64), 2);
            }
        } else {
            self.set_flags(0, log);
        }
        fence(Ordering::SeqCst);
    }

    /// With EVENT_IDX the index that was asked for stays behind us, which asks for nothing until it
    /// comes round again.
    pub(super) fn disable_kicks(&mut self, log: Option<&Log>) {
        if !self.event_idx {
            self.set_flags(NO_NOTIFY, log);
        }
    }

    fn set_flags(&mut self, flags: u16, log: Option<&Log>) {
        if self.flags != Some(flags) {
            self.flags = Some(flags);
            self.areas.device.store_u16(FLAGS, flags, Ordering::Relaxed);
            if let Some(log) = log {
                log.mark(self.used_addr, 2);
            }
        }
    }
}
