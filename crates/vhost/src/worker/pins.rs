//! Guest memory as registered buffers of a ring: the kernel does not look its pages up for each
//! request. Pins all of it.
//!
//! Promises: a region is registered in pieces, as the kernel takes 1 GiB at most in one slot. A
//! request whose data lie in one segment inside one piece names its slot; every other request goes
//! the ordinary way.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_guest::{Memory, Region, View};
use ringdisk_ring::{Errno, Ring};
use rustix::process::{Resource, getrlimit};

/// Bytes of a piece, as a power of two: 1 GiB, the most that the kernel registers in one slot
/// (io_uring/rsrc.c).
const PIECE_SHIFT: u32 = 30;
/// Slots of the table: guests of almost 4 TiB, for 8 bytes of the kernel's memory each. Its limit
/// is 16384 (`IORING_MAX_REG_BUFFERS`).
const SLOTS: u16 = 4095;

/// Regions already reported as unpinned, by their guest address and size, so that each is logged
/// once: every queue thread meets the same limit.
///
/// At most [`REPORTED_MAX`]: a front end can announce as many as it likes, one after the other.
pub(crate) type Reported = Mutex<BTreeSet<(u64, u64)>>;

/// Regions that are reported at most, since the export began.
const REPORTED_MAX: usize = 16;

/// Which piece of which region is in which slot.
#[derive(Debug)]
pub(super) struct Pins {
    piece_shift: u32,
    /// Empty slots; never slot 0, which is for memory of the ring's owner.
    free: Vec<u16>,
    regions: Vec<Pinned>,
    reported: Arc<Reported>,
}

/// A region that the view has.
#[derive(Debug)]
struct Pinned {
    region: Arc<Region>,
    /// Of its pieces, in order, as far as they could be registered.
    slots: Vec<u16>,
}

impl Pins {
    /// Makes the ring's table. `None`, with a line in the log, where the kernel refuses.
    pub(super) fn new(ring: &Ring, reported: Arc<Reported>) -> Option<Pins> {
        Pins::sized(ring, reported, SLOTS, PIECE_SHIFT)
    }

    fn sized(ring: &Ring, reported: Arc<Reported>, slots: u16, piece_shift: u32) -> Option<Pins> {
        match ring.register_buffers(None, slots) {
            Ok(()) => {
                let free = (1..=slots).rev().collect();
                Some(Pins { piece_shift, free, regions: Vec::new(), reported })
            }
            Err(errno) => {
                tracing::warn!("guest memory is not pinned: {errno}");
                None
            }
        }
    }

    /// Registers what is new, lets go what is gone, and gives a view of it. What cannot be
    /// registered is used as it is.
    pub(super) fn view(&mut self, ring: &Ring, memory: Arc<Memory>) -> View {
        let is_there =
            |pinned: &Pinned| memory.regions().iter().any(|r| Arc::ptr_eq(r, &pinned.region));
        let (kept, gone) = std::mem::take(&mut self.regions).into_iter().partition(is_there);
        self.regions = kept;
        let gone: Vec<Pinned> = gone;
        for slot in gone.iter().flat_map(|pinned| &pinned.slots) {
            match ring.update_buffer(*slot, None) {
                Ok(()) => self.free.push(*slot),
                Err(errno) => tracing::warn!("a region of guest memory stays pinned: {errno}"),
            }
        }
        for region in memory.regions() {
            if self.slots_of(region).is_none() {
                let slots = self.pin(ring, region);
                self.regions.push(Pinned { region: Arc::clone(region), slots });
            }
        }
        View::fixed(memory, self.piece_shift, |region| self.slots_of(region).unwrap_or_default())
    }

    fn slots_of(&self, region: &Arc<Region>) -> Option<&[u16]> {
        let pinned = self.regions.iter().find(|pinned| Arc::ptr_eq(&pinned.region, region))?;
        Some(&pinned.slots)
    }

    /// Registers the pieces of a region, up to the first that cannot be. Gives their slots.
    fn pin(&mut self, ring: &Ring, region: &Arc<Region>) -> Vec<u16> {
        let shared = region.shared();
        let mut slots = Vec::new();
        for start in (0..shared.len()).step_by(1 << self.piece_shift) {
            let end = shared.len().min(start + (1 << self.piece_shift));
            let Some(slot) = self.free.pop() else {
                self.warn_unpinned(region, start, "the table of a ring has no slot for it left");
                break;
            };
            if let Err(errno) = ring.update_buffer(slot, Some((shared, start..end))) {
                self.free.push(slot);
                self.warn_unpinned(region, start, &reason(errno));
                break;
            }
            slots.push(slot);
        }
        slots
    }

    /// Warns that a region is not pinned from a byte on.
    fn warn_unpinned(&self, region: &Region, from: usize, why: &str) {
        let (start, size) = (region.guest_addr(), region.size());
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if reported.len() < REPORTED_MAX && reported.insert((start, size)) {
            let left = size - from as u64;
            let rest =
                if reported.len() < REPORTED_MAX { "" } else { " (of others nothing is said)" };
            tracing::warn!(
                "{left:#x} of the {size:#x} bytes of guest memory at {start:#x} are not pinned: \
                 {why}{rest}"
            );
        }
    }
}

/// Why the kernel did not pin memory, with the limit that it was.
fn reason(errno: Errno) -> String {
    if errno != Errno::NOMEM {
        return errno.to_string();
    }
    let limit = match getrlimit(Resource::Memlock).current {
        Some(bytes) => format!("{bytes:#x} bytes"),
        None => String::from("none"),
    };
    format!(
        "{errno}; the limit of locked memory (RLIMIT_MEMLOCK, each queue thread counts) is {limit}"
    )
}

#[cfg(test)]
mod tests;
