//! Memory of large requests: taken at once, and given back to the system when a queue is idle.
//!
//! Buffers of 1 MiB are address space until they are used. The first large request takes the pages
//! that it needs in one call, huge ones where there are any; then they stay, so that the next
//! requests find them warm. A queue that has served something large looks a second later, and again
//! until nothing came for a second; then it gives the pages of its idle buffers back and does not
//! wake up any more until the next large request. Buffers that are pinned, or that other threads
//! use, are not kept here.
//!
//! Promises: queue threads; an idle queue wakes up for this once after its last large request, and
//! no more. What the kernel refuses costs memory or speed, and nothing else.
//!
//! Queue thread only. Never allocates for a request; one look at a flag for each large one.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ringdisk_ring::{IoBuf, Parker, Ring};

use crate::stats::QueueCells;

/// From this size on a request is worth a look later, bytes: smaller ones use the first pages of a
/// few buffers again and again.
const LARGE_BYTES: u32 = 64 * 1024;
/// Bytes that may be in a buffer before the data.
const HEADER_BYTES_MAX: usize = 4096;
/// How long nothing must come, and how long a look is put off after a large request.
const IDLE: Duration = Duration::from_secs(1);

/// A buffer of an entry, while the entry is with this queue.
#[derive(Debug, Default)]
struct Place {
    memory: RefCell<Option<IoBuf>>,
    /// No request is in it, as far as this thread has seen.
    is_idle: Cell<bool>,
    /// How much of it is there, bytes, as far as this thread knows.
    there: Cell<u32>,
    /// Its pages may not be there.
    is_cold: Cell<bool>,
}

/// The buffers of a queue: one for each request that it serves at once (an entry, a slot).
#[derive(Debug)]
pub struct IdleMemory {
    places: Vec<Place>,
    /// A look is due.
    used: Cell<bool>,
    look: Parker,
}

impl IdleMemory {
    /// * `entries`: that the queue may ever have.
    #[must_use]
    pub fn new(entries: usize) -> IdleMemory {
        IdleMemory {
            places: (0..entries).map(|_| Place::default()).collect(),
            used: Cell::new(false),
            look: Parker::default(),
        }
    }

    /// The entry with this number is with this queue, and has this memory.
    pub fn enter(&self, entry: usize, memory: Option<IoBuf>) {
        *self.places[entry].memory.borrow_mut() = memory;
        self.places[entry].is_idle.set(false);
        self.places[entry].there.set(0);
        self.places[entry].is_cold.set(true);
    }

    /// The entry moves away.
    pub fn leave(&self, entry: usize) {
        self.enter(entry, None);
    }

    /// The entry waits for a request, or has one.
    pub fn set_idle(&self, entry: usize, is_idle: bool) {
        self.places[entry].is_idle.set(is_idle);
    }

    /// Whether the pages of an entry may not be there; the caller takes them now.
    pub fn take_cold(&self, entry: usize) -> bool {
        self.places[entry].is_cold.take()
    }

    /// Takes the pages for so many bytes of an entry's buffer at once.
    fn populate(&self, entry: usize, bytes: u32) {
        let place = &self.places[entry];
        if bytes <= place.there.get() {
            return;
        }
        place.there.set(bytes);
        if let Some(memory) = &*place.memory.borrow() {
            // Data may begin a little into the buffer.
            memory.populate(bytes as usize + HEADER_BYTES_MAX);
        }
    }

    /// A request of so many bytes is about to use the buffer of an entry.
    pub fn will_use(&self, ring: &Ring, entry: usize, bytes: u32) {
        if bytes < LARGE_BYTES {
            return;
        }
        self.populate(entry, bytes);
        if !self.used.replace(true) {
            self.look.unpark(ring);
        }
    }

    /// Gives memory back whenever the queue is idle; never ends. A task of the queue thread.
    ///
    /// * `cells`: the counters of this queue.
    pub async fn give_back(&self, ring: &Ring, cells: &QueueCells) {
        loop {
            self.look.park(ring).await;
            loop {
                let before = cells.requests.get();
                ring.sleep(IDLE).await;
                // A completion that this thread has not taken yet may stand for a request, with its
                // data in a buffer that looks idle.
                let is_quiet = cells.requests.get() == before && cells.in_flight.get() == 0;
                if is_quiet && ring.is_settled() {
                    break;
                }
            }
            self.used.set(false);
            self.release();
        }
    }

    fn release(&self) {
        for place in self.places.iter().filter(|place| place.is_idle.get()) {
            if let Some(memory) = &*place.memory.borrow() {
                memory.release_pages();
                place.there.set(0);
                place.is_cold.set(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_is_cold_until_it_is_taken_again() {
        let memory = IdleMemory::new(2);
        for entry in 0..2 {
            memory.enter(entry, Some(IoBuf::new(1 << 20, 4096)));
            assert!(memory.take_cold(entry), "never touched");
            assert!(!memory.take_cold(entry), "taken");
        }
        memory.set_idle(0, true);
        memory.release();
        assert_eq!(
            (memory.take_cold(0), memory.take_cold(1)),
            (true, false),
            "only an idle one is"
        );
        assert!(!memory.take_cold(0));
    }
}
