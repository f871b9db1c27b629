//! Memory of large requests: taken at once, and given back to the system when a queue is idle.
//!
//! Buffers of 1 MiB are address space until they are used. The first large READ takes the pages
//! that it needs in one call, huge ones where there are any (the kernel looks up each page that it
//! copies from; the data of a WRITE are there already); then they stay, so that the next requests
//! find them warm. A queue that has served something large looks a second later, and again until
//! nothing came for a second; then it gives the pages of its idle buffers back and does not wake up
//! any more until the next large request. Pools are not given back: they are pinned, or other
//! threads use them.
//!
//! Queue thread only. Never allocates for a request; one look at a flag for each large one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ringdisk_ring::{IoBuf, Parker};

use super::Queue;
use crate::request::{Operation, Request};

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
        self.places[entry].there.set(0);
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

/// A request is about to use the buffer of an entry.
pub(crate) fn note(queue: &Queue, entry: usize, request: &Request) {
    let bytes = match &request.operation {
        Operation::Read(argument) => argument.size,
        Operation::Write(argument) => argument.size,
        _ => 0,
    };
    if bytes < LARGE_BYTES {
        return;
    }
    queue.memory.populate(entry, bytes);
    if !queue.memory.used.replace(true) {
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
            // A completion that nobody has looked at may stand for a request, with its data in a
            // buffer that looks idle.
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
