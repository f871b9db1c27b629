//! The driver's side of virtqueues, without a guest: for tests and benchmarks.
//!
//! Promises: nothing allocates after it was made, so a driver is cheap enough to load a device; a
//! used element that was not in flight is a bug of the device and panics.
//!
//! A [`GuestRam`] is memory as a front end announces it; [`Driver`]s put their queues into it, add
//! chains, decide about kicks and take used elements. Writes of a hostile guest go through
//! [`Driver::areas`] and [`GuestRam::write`].

mod packed;
mod ram;
mod split;

use crate::Error;
use crate::layout::Layout;
use crate::queue::{Areas, Segment};

use packed::PackedDriver;
pub use ram::{GUEST_BASE, GuestRam, USER_BASE};
use split::SplitDriver;

/// Options of a driver's queue.
#[derive(Clone, Copy, Debug)]
pub struct DriverConfig {
    /// Split or packed.
    pub layout: Layout,
    /// Descriptors.
    pub size: u16,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Entries of the indirect table of each chain; 0: there are none.
    pub indirect: u16,
}

/// A used element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`Driver::add`] gave.
    pub id: u16,
    /// Bytes written, as the device says.
    pub len: u32,
}

#[derive(Debug)]
enum Ring {
    Split(SplitDriver),
    Packed(PackedDriver),
}

/// The driver of one queue.
#[derive(Debug)]
pub struct Driver {
    ring: Ring,
    config: DriverConfig,
    areas: Areas,
    user: [u64; 3],
    /// First indirect table.
    tables: u64,
    ram: crate::RingMemory,
}

impl Driver {
    /// Lays a queue into memory of the guest.
    ///
    /// Errors: the memory is full; no queue has this size.
    pub fn new(ram: &mut GuestRam, config: DriverConfig) -> Result<Driver, Error> {
        let size = u64::from(config.size);
        let (driver_bytes, device_bytes) = match config.layout {
            Layout::Split => (6 + 2 * size, 6 + 8 * size),
            Layout::Packed => (4, 4),
        };
        let guest = [
            ram.take(16 * size, 16)?,
            ram.take(driver_bytes, 4)?,
            // A cache line of its own: the other side writes it.
            ram.take(device_bytes, 64)?,
        ];
        let tables = ram.take(size * u64::from(config.indirect) * 16, 16)?;
        let user = guest.map(GuestRam::user_addr);
        let memory = ram.own_table();
        let areas = Areas::find(&memory, config.layout, config.size, config.event_idx, user)?;
        let ring = match config.layout {
            Layout::Split => Ring::Split(SplitDriver::new(config.size, config.event_idx)),
            Layout::Packed => Ring::Packed(PackedDriver::new(config.size, config.event_idx)),
        };
        Ok(Driver { ring, config, areas, user, tables, ram: ram.memory().clone() })
    }

    /// As it was made.
    pub fn config(&self) -> DriverConfig {
        self.config
    }

    /// Addresses of the front end of descriptors, driver and device area, for SET_VRING_ADDR.
    pub fn user_addresses(&self) -> [u64; 3] {
        self.user
    }

    /// The queue's memory, to write anything to.
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// Descriptors that are free.
    pub fn free(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.free(),
            Ring::Packed(ring) => ring.free(),
        }
    }

    /// Chains that were added and not taken back.
    pub fn in_flight(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.in_flight(),
            Ring::Packed(ring) => ring.in_flight(),
        }
    }

    /// Adds a chain. The device sees it after [`Driver::publish`].
    ///
    /// * `segments`: the first `readable` of them are for the device to read, the others to write.
    ///
    /// Gives a number for it, less than the size and its own until it is used; nothing when the
    /// queue is full.
    pub fn add(&mut self, segments: &[Segment], readable: usize) -> Option<u16> {
        match &mut self.ring {
            Ring::Split(ring) => ring.add(&self.areas, segments, readable),
            Ring::Packed(ring) => ring.add(&self.areas, segments, readable),
        }
    }

    /// As [`Driver::add`], in one descriptor and an indirect table. Nothing, too, when there is no
    /// table that is large enough.
    pub fn add_indirect(&mut self, segments: &[Segment], readable: usize) -> Option<u16> {
        if segments.is_empty() || segments.len() > usize::from(self.config.indirect) {
            return None;
        }
        let id = match &self.ring {
            Ring::Split(ring) => ring.next_id(),
            Ring::Packed(ring) => ring.next_id(),
        }?;
        let table = self.tables + u64::from(id) * u64::from(self.config.indirect) * 16;
        let at = usize::try_from(table - GUEST_BASE).ok()?;
        match &mut self.ring {
            Ring::Split(ring) => {
                split::write_table(&self.ram, at, segments, readable);
                ring.add_table(&self.areas, table, segments.len())
            }
            Ring::Packed(ring) => {
                packed::write_table(&self.ram, at, segments, readable);
                ring.add_table(&self.areas, table, segments.len())
            }
        }
    }

    /// Shows the added chains to the device. Returns whether it wants a kick.
    pub fn publish(&mut self) -> bool {
        match &mut self.ring {
            Ring::Split(ring) => ring.publish(&self.areas),
            Ring::Packed(ring) => ring.publish(&self.areas),
        }
    }

    /// Takes a used element.
    pub fn pop_used(&mut self) -> Option<Used> {
        match &mut self.ring {
            Ring::Split(ring) => ring.pop_used(&self.areas),
            Ring::Packed(ring) => ring.pop_used(&self.areas),
        }
    }

    /// Whether there is one.
    pub fn has_used(&self) -> bool {
        match &self.ring {
            Ring::Split(ring) => ring.has_used(&self.areas),
            Ring::Packed(ring) => ring.has_used(&self.areas),
        }
    }

    /// The base for a device without state, in the form of SET_VRING_BASE.
    ///
    /// * `avail`: true: after the chains that were shown to it; false: after those that it has
    ///   used.
    pub fn base(&self, avail: bool) -> u32 {
        match &self.ring {
            Ring::Split(ring) => ring.base(avail),
            Ring::Packed(ring) => ring.base(avail),
        }
    }

    /// Asks for a call at the next used element. Gives whether one has come meanwhile.
    pub fn enable_calls(&mut self) -> bool {
        match &mut self.ring {
            Ring::Split(ring) => ring.enable_calls(&self.areas),
            Ring::Packed(ring) => ring.enable_calls(&self.areas),
        }
        self.has_used()
    }

    /// Asks for none.
    pub fn disable_calls(&mut self) {
        match &mut self.ring {
            Ring::Split(ring) => ring.disable_calls(&self.areas),
            Ring::Packed(ring) => ring.disable_calls(&self.areas),
        }
    }
}
