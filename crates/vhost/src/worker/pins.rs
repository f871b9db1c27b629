//! Guest memory as registered buffers of a ring: the kernel does not look its pages up for each request. Pins all of it.

use std::sync::Arc;

use ringdisk_guest::{Memory, REGIONS_MAX, Region, View};
use ringdisk_ring::Ring;

/// Largest piece of memory that the kernel registers in one slot, bytes (io_uring/rsrc.c).
const SLOT_BYTES_MAX: u64 = 1 << 30;

/// Which region is in which slot.
#[derive(Debug)]
pub(super) struct Pins {
    slots: Vec<Option<Arc<Region>>>,
}

impl Pins {
    /// Makes the ring's table. `None`, with a line in the log, where the kernel refuses.
    pub(super) fn new(ring: &Ring) -> Option<Pins> {
        let slots = u16::try_from(REGIONS_MAX).unwrap_or(u16::MAX);
        match ring.register_buffers(None, slots) {
            // Slot 0 stays empty.
            Ok(()) => Some(Pins { slots: vec![None; usize::from(slots) + 1] }),
            Err(errno) => {
                tracing::warn!("guest memory is not pinned: {errno}");
                None
            }
        }
    }

    /// Registers what is new, lets go what is gone, and gives a view of it. What cannot be registered is used as it is.
    pub(super) fn view(&mut self, ring: &Ring, memory: Arc<Memory>) -> View {
        let is_there =
            |region: &Arc<Region>| memory.regions().iter().any(|r| Arc::ptr_eq(r, region));
        for (slot, held) in (0..).zip(&mut self.slots) {
            if held.as_ref().is_some_and(|region| !is_there(region)) {
                if let Err(errno) = ring.update_buffer(slot, None) {
                    tracing::warn!("a region of guest memory stays pinned: {errno}");
                }
                *held = None;
            }
        }
        for region in memory.regions() {
            self.pin(ring, region);
        }
        let slots: Vec<Option<u16>> = memory.regions().iter().map(|r| self.slot_of(r)).collect();
        View::fixed(memory, |number| slots.get(number).copied().flatten())
    }

    fn slot_of(&self, region: &Arc<Region>) -> Option<u16> {
        let holds =
            |held: &Option<Arc<Region>>| held.as_ref().is_some_and(|r| Arc::ptr_eq(r, region));
        self.slots.iter().position(holds).and_then(|slot| u16::try_from(slot).ok())
    }

    fn pin(&mut self, ring: &Ring, region: &Arc<Region>) {
        if self.slot_of(region).is_some() {
            return;
        }
        let (size, start) = (region.size(), region.guest_addr());
        if size > SLOT_BYTES_MAX {
            tracing::info!(
                "{size:#x} bytes at {start:#x} are not pinned: 1 GiB is the kernel's limit for a region"
            );
            return;
        }
        let Some(slot) = (1..self.slots.len()).find(|slot| self.slots[*slot].is_none()) else {
            return;
        };
        let Ok(number) = u16::try_from(slot) else { return };
        match ring.update_buffer(number, Some(region.shared())) {
            Ok(()) => self.slots[slot] = Some(Arc::clone(region)),
            Err(errno) => tracing::warn!("{size:#x} bytes at {start:#x} are not pinned: {errno}"),
        }
    }
}
