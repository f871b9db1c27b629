//! Virtqueues, device side: split and packed.
//!
//! Promises: a queue never allocates after it was made, never locks and makes no system call: kicks
//! and calls are eventfds of the caller. It belongs to one thread for as long as it runs. Chains
//! are completed in any order; [`Queue::publish`] shows the completed ones to the driver, once for
//! a batch, and says whether the driver wants a call.

mod broken;
mod chain;
mod indirect;
#[cfg(test)]
mod model;
mod packed;
mod split;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use crate::Error;
use crate::inflight::InflightQueue;
use crate::layout::descriptor::DESCRIPTOR_BYTES;
use crate::layout::packed::EVENT_BYTES;
use crate::layout::{Layout, SIZE_MAX};
use crate::memory::{Log, Memory, RingMemory, View, losses};

pub use broken::Broken;
pub use chain::{Chain, SEGMENTS_MAX, Segment};
use packed::Packed;
use split::Split;

/// Base of a packed queue that begins: both indexes 0, both wrap counters 1.
pub const PACKED_BASE: u32 = 0x8000_8000;

/// The three parts of a queue in memory of the guest.
#[derive(Clone, Debug)]
pub struct Areas {
    /// Descriptor table or descriptor ring.
    pub descriptors: RingMemory,
    /// Avail ring (split), or the driver's event suppression (packed).
    pub driver: RingMemory,
    /// Used ring (split), or the device's event suppression (packed).
    pub device: RingMemory,
}

impl Areas {
    /// Looks the parts up.
    ///
    /// * `descriptors`, `driver`, `device`: addresses of the front end (SET_VRING_ADDR: desc,
    ///   avail, used).
    ///
    /// Errors: a part is not in memory or not aligned; the size is none of this layout.
    pub fn find(
        memory: &Memory,
        layout: Layout,
        size: u16,
        event_idx: bool,
        [descriptors, driver, device]: [u64; 3],
    ) -> Result<Areas, Error> {
        let (driver_bytes, device_bytes) = bytes(layout, size, event_idx)?;
        let areas = Areas {
            descriptors: memory.ring(descriptors, DESCRIPTOR_BYTES as u64 * u64::from(size))?,
            driver: memory.ring(driver, driver_bytes as u64)?,
            device: memory.ring(device, device_bytes as u64)?,
        };
        areas.check(layout, size, event_idx)?;
        Ok(areas)
    }

    /// Alignment and length (virtio 1.3, 2.7 and 2.8).
    fn check(&self, layout: Layout, size: u16, event_idx: bool) -> Result<(), Error> {
        let (driver_bytes, device_bytes) = bytes(layout, size, event_idx)?;
        let driver_align = if layout == Layout::Split { 2 } else { 4 };
        let parts = [
            ("descriptors", &self.descriptors, DESCRIPTOR_BYTES * usize::from(size), 16),
            ("driver area", &self.driver, driver_bytes, driver_align),
            ("device area", &self.device, device_bytes, 4),
        ];
        for (area, part, len, align) in parts {
            if part.len() < len || !part.is_aligned(align) {
                return Err(Error::BadArea { area });
            }
        }
        Ok(())
    }

    fn is_lost(&self) -> bool {
        [&self.descriptors, &self.driver, &self.device].iter().any(|part| part.is_lost())
    }
}

/// Bytes of the driver's and the device's area.
fn bytes(layout: Layout, size: u16, event_idx: bool) -> Result<(usize, usize), Error> {
    let is_legal = match layout {
        Layout::Split => size.is_power_of_two(),
        Layout::Packed => size > 0,
    };
    if !is_legal || size > SIZE_MAX {
        return Err(Error::BadQueueSize { size: u32::from(size) });
    }
    Ok(match layout {
        Layout::Split => split::area_bytes(usize::from(size), event_idx),
        Layout::Packed => (EVENT_BYTES, EVENT_BYTES),
    })
}

/// Options of a queue.
#[derive(Debug)]
pub struct QueueConfig {
    /// Whether RING_PACKED was negotiated.
    pub layout: Layout,
    /// Descriptors: for split queues a power of two, for packed ones any; at most [`SIZE_MAX`].
    pub size: u16,
    /// Its areas in guest memory.
    pub areas: Areas,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// The first position, in the form of SET_VRING_BASE: the next avail index (split); last avail
    /// index in bits 0 to 14, its wrap counter in bit 15, the same for used above (packed;
    /// [`PACKED_BASE`] for a new queue). Front ends do not know which chains the device had taken:
    /// the base is not used by a split queue with an inflight area, nor by a packed one whose area
    /// was in use.
    pub base: u32,
    /// Chains in flight, in memory that outlives the process.
    pub inflight: Option<InflightQueue>,
    /// Log of a migration.
    pub log: Option<Arc<Log>>,
    /// Address of the guest of the used ring, for the log; the one of its region when the front end
    /// gave none.
    pub log_addr: Option<u64>,
}

/// A popped chain, to be given back to [`Queue::complete`] exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a chain that is not completed is lost to the guest"]
pub struct Token {
    slot: u16,
}

/// A completed chain that was not published yet.
#[derive(Clone, Copy, Debug)]
struct Done {
    slot: u16,
    /// Bytes written for the guest.
    written: u32,
}

#[derive(Debug)]
enum Ring {
    Split(Split),
    Packed(Packed),
}

/// A virtqueue.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
    layout: Layout,
    size: u16,
    event_idx: bool,
    log: Option<Arc<Log>>,
    /// Completed, not yet published.
    batch: Vec<Done>,
    /// Popped, not yet completed.
    in_flight: u16,
    broken: Option<Broken>,
    /// [`losses`] when memory was last found whole.
    losses: u64,
    /// Nothing was published yet: whether a predecessor has called the driver is not known.
    begins: bool,
}

impl Queue {
    /// A queue that begins at its base, or continues at the position in its inflight area. Chains
    /// that the guest made available before are found.
    ///
    /// Errors: size, base, areas or inflight area do not fit one another.
    pub fn new(config: QueueConfig) -> Result<Queue, Error> {
        let QueueConfig { layout, size, areas, event_idx, indirect, base, .. } = config;
        let QueueConfig { inflight, log, log_addr, .. } = config;
        areas.check(layout, size, event_idx)?;
        // Memory may have been lost before a reset of the device: the first check finds that.
        let losses = losses().wrapping_sub(1);
        let wrong = Error::BadInflight { why: "it was made for the other layout or another size" };
        let ring = match layout {
            Layout::Split => {
                let area = inflight.map(|area| area.split(size).ok_or(wrong)).transpose()?;
                let base = u16::try_from(base).map_err(|_| Error::BadBase { base })?;
                let mut ring = Split::new(size, areas, event_idx, indirect, base, area);
                ring.set_used_addr(log_addr);
                Ring::Split(ring)
            }
            Layout::Packed => {
                let area = inflight.map(|area| area.packed(size).ok_or(wrong)).transpose()?;
                Ring::Packed(Packed::new(size, areas, event_idx, indirect, base, area)?)
            }
        };
        let batch = Vec::with_capacity(usize::from(size));
        Ok(Queue {
            ring,
            layout,
            size,
            event_idx,
            log,
            batch,
            in_flight: 0,
            broken: None,
            losses,
            begins: true,
        })
    }

    /// Takes the next chain: first the chains that a predecessor had taken and not returned, in
    /// their order, then new ones.
    ///
    /// * `chain`: is filled. Its segments are checked against `view`, and valid as long as that
    ///   view.
    ///
    /// `None`: there is no chain. Errors: the guest violated the protocol; the queue gives no
    /// chains any more.
    #[inline]
    pub fn pop(&mut self, view: &View, chain: &mut Chain) -> Result<Option<Token>, Broken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        chain.clear();
        let popped = match &mut self.ring {
            Ring::Split(ring) => ring.pop(view, chain),
            Ring::Packed(ring) => ring.pop(view, chain),
        };
        match popped {
            Ok(None) => Ok(None),
            Ok(Some(slot)) => {
                self.in_flight += 1;
                Ok(Some(Token { slot }))
            }
            Err(broken) => {
                chain.clear();
                self.broken = Some(broken);
                Err(broken)
            }
        }
    }

    /// Returns a chain. The next [`Queue::publish`] shows it to the driver.
    ///
    /// * `written`: bytes written for the guest.
    #[inline]
    pub fn complete(&mut self, token: Token, written: u32) {
        let slot = token.slot;
        let is_flying = match &self.ring {
            Ring::Split(ring) => ring.is_flying(slot),
            Ring::Packed(ring) => ring.is_flying(slot),
        };
        debug_assert!(is_flying, "chain {slot} was not popped from this queue");
        if is_flying && self.batch.len() < usize::from(self.size) {
            self.in_flight = self.in_flight.saturating_sub(1);
            self.batch.push(Done { slot, written });
        }
    }

    /// Whether completed chains were not published yet.
    #[inline]
    pub fn has_completed(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Shows all completed chains to the driver. Returns whether it wants a call; the first time it
    /// always gets one, since the last call of a predecessor is not known.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        let log = self.log.as_deref();
        let wanted = match &mut self.ring {
            Ring::Split(ring) => ring.publish(&self.batch, log),
            Ring::Packed(ring) => ring.publish(&self.batch, log),
        };
        self.batch.clear();
        std::mem::take(&mut self.begins) || wanted
    }

    /// Whether there is a chain to pop. One read of shared memory at most.
    #[inline]
    pub fn has_next(&mut self) -> bool {
        self.broken.is_none()
            && match &mut self.ring {
                Ring::Split(ring) => ring.has_next(),
                Ring::Packed(ring) => ring.has_next(),
            }
    }

    /// Asks for a kick when the next chain comes, before a sleep. Returns whether one has come
    /// meanwhile: then do not sleep.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        let log = self.log.as_deref();
        match &mut self.ring {
            Ring::Split(ring) => ring.enable_kicks(log),
            Ring::Packed(ring) => ring.enable_kicks(log),
        }
        self.has_next()
    }

    /// Asks for no kicks while the thread polls. Some may still come.
    #[inline]
    pub fn disable_kicks(&mut self) {
        let log = self.log.as_deref();
        match &mut self.ring {
            Ring::Split(ring) => ring.disable_kicks(log),
            Ring::Packed(ring) => ring.disable_kicks(log),
        }
    }

    /// Checks whether memory was lost since the last call: once for each turn of a loop. One read
    /// of memory that hardly ever changes.
    ///
    /// Errors: a part of the rings or of `view` is gone; the queue is broken.
    #[inline]
    pub fn check(&mut self, view: &View) -> Result<(), Broken> {
        let now = losses();
        if now != self.losses {
            self.losses = now;
            let areas = match &self.ring {
                Ring::Split(ring) => &ring.areas,
                Ring::Packed(ring) => &ring.areas,
            };
            if areas.is_lost() || view.memory().is_lost() {
                self.broken = Some(Broken::MemoryLost);
            }
        }
        self.broken.map_or(Ok(()), Err)
    }

    /// Ends the queue for a reason of the caller, as a request that makes no sense.
    pub fn break_with(&mut self, broken: Broken) {
        self.broken.get_or_insert(broken);
    }

    /// Why the queue gives no more chains.
    pub fn broken(&self) -> Option<Broken> {
        self.broken
    }

    /// Why the content of the inflight area was ignored, if so: nothing was in flight, and the area
    /// begins anew.
    pub fn inflight_given_up(&self) -> Option<&'static str> {
        match &self.ring {
            Ring::Split(ring) => ring.inflight_given_up(),
            // Its area is refused instead: only the area knows the position of such a queue.
            Ring::Packed(_) => None,
        }
    }

    /// Whether chains that a predecessor had taken are still to be popped again. The base counts
    /// them as taken.
    pub fn has_replays(&self) -> bool {
        match &self.ring {
            Ring::Split(ring) => ring.has_replays(),
            Ring::Packed(ring) => ring.has_replays(),
        }
    }

    /// The next position, in the form of [`QueueConfig::base`]. Chains in flight count as taken.
    pub fn base(&self) -> u32 {
        match &self.ring {
            Ring::Split(ring) => ring.base(),
            Ring::Packed(ring) => ring.base(),
        }
    }

    /// Ends the queue, drained: publishes what was completed and gives its base for GET_VRING_BASE,
    /// and whether the driver wants a call. The inflight area keeps the position of the queue
    /// until the front end knows it: [`crate::inflight::InflightArea::retire`].
    pub fn stop(mut self) -> (u32, bool) {
        let call = self.publish();
        (self.base(), call)
    }

    /// Chains popped and not completed.
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Split or packed.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The same rings in another mapping, after a change of the memory. Nothing is in flight. The
    /// content is that of the old one, so nothing is read again.
    ///
    /// * `log_addr`: as [`QueueConfig::log_addr`].
    ///
    /// Errors: they do not fit the queue, which goes on with those it has.
    pub fn set_areas(&mut self, areas: Areas, log_addr: Option<u64>) -> Result<(), Error> {
        areas.check(self.layout, self.size, self.event_idx)?;
        match &mut self.ring {
            Ring::Split(ring) => ring.set_areas(areas, log_addr),
            Ring::Packed(ring) => ring.set_areas(areas),
        }
        // A part may have been lost since it was mapped: the next check finds that.
        self.losses = losses().wrapping_sub(1);
        Ok(())
    }

    /// Another address of the used ring in the log, as [`QueueConfig::log_addr`].
    pub fn set_log_addr(&mut self, log_addr: Option<u64>) {
        if let Ring::Split(ring) = &mut self.ring {
            ring.set_used_addr(log_addr);
        }
    }

    /// Begins to mark writes to the rings in a log, or ends it.
    pub fn set_log(&mut self, log: Option<Arc<Log>>) {
        self.log = log;
    }

    /// The log, for what the caller writes.
    pub fn log(&self) -> Option<&Arc<Log>> {
        self.log.as_ref()
    }
}
