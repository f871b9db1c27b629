//! Memory that large requests took goes back to the system when a queue is idle.
//!
//! Buffers of 1 MiB are address space until they are used; then they stay, so that the next requests find them warm. A queue that has
//! served something large looks a second later, and again until nothing came for a second; then it gives the pages of its idle
//! buffers back and does not wake up any more until the next large request. Pools are not given back: they are pinned, or other
//! threads use them.
//!
//! Queue thread only. Never allocates for a request; one look at a flag for each large one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ringdisk_ring::{IoBuf, Parker};

use crate::dev::Queue;
use crate::request::{Operation, Request};

/// From this size on a request is worth a look later, bytes: smaller ones use the first pages of a few buffers again and again.
const LARGE_BYTES: u32 = 64 * 1024;
/// How long nothing must come, and how long a look is put off after a large request.
const IDLE: Duration = Duration::from_secs(1);

/// A buffer of an entry, while the entry is with this queue.
#[derive(Debug, Default)]
struct Place {
    memory: RefCell<Option<IoBuf>>,
    /// No request is in it, as far as this thread has seen.
    is_idle: Cell<bool>,
    /// Its pages may not be there.
    is_cold: Cell<bool>,
}

/// The buffers of a queue's entries.
#[derive(Debug)]
pub(crate) struct IdleMemory {
    places: Vec<Place>,
    /// A look is due.
    used: Cell<bool>,
    look: Parker,
}

impl IdleMemory {
    /// * `entries`: that the queue may ever have.
    pub(crate) fn new(entries: usize) -> IdleMemory {
        IdleMemory {
            places: (0..entries).map(|_| Place::default()).collect(),
            used: Cell::new(false),
            look: Parker::default(),
        }
    }

    /// The entry with this number is with this queue, and has this memory.
    pub(crate) fn enter(&self, entry: usize, memory: Option<IoBuf>) {
        *self.places[entry].memory.borrow_mut() = memory;
        self.places[entry].is_idle.set(false);
        self.places[entry].is_cold.set(true);
    }

    /// The entry moves away.
    pub(crate) fn leave(&self, entry: usize) {
        self.enter(entry, None);
    }

    /// The entry waits for a request, or has one.
    pub(crate) fn set_idle(&self, entry: usize, is_idle: bool) {
        self.places[entry].is_idle.set(is_idle);
    }

    /// Whether the pages of an entry may not be there; the caller takes them now.
    pub(crate) fn take_cold(&self, entry: usize) -> bool {
        self.places[entry].is_cold.take()
    }

    /// Whether a request has used much of a buffer for the first time since the last look.
    fn is_first_large(&self, request: &Request) -> bool {
        let bytes = match &request.operation {
            Operation::Read(argument) => argument.size,
            Operation::Write(argument) => argument.size,
            _ => 0,
        };
        bytes >= LARGE_BYTES && !self.used.replace(true)
    }

    fn release(&self) {
        for place in self.places.iter().filter(|place| place.is_idle.get()) {
            if let Some(memory) = &*place.memory.borrow() {
                memory.release_pages();
                place.is_cold.set(true);
            }
        }
    }
}

/// A request was served.
pub(crate) fn note(queue: &Queue, request: &Request) {
    if queue.memory.is_first_large(request) {
        queue.memory.look.unpark(&queue.ring);
    }
}

/// Gives memory back. A task of the queue thread.
pub(crate) async fn give_back(queue: Rc<Queue>) {
    let ring = &queue.ring;
    loop {
        queue.memory.look.park(ring).await;
        loop {
            let before = queue.cells.requests.get();
            ring.sleep(IDLE).await;
            // A completion that nobody has looked at may stand for a request, with its data in a buffer that looks idle.
            if queue.cells.requests.get() == before
                && queue.cells.in_flight.get() == 0
                && ring.is_settled()
            {
                break;
            }
        }
        queue.memory.used.set(false);
        queue.memory.release();
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
