//! One queue, as all transports see it: its ring, its counters, its requests in flight.
//!
//! Promises: knows no transport. Queue thread only, but for [`InFlight`] and [`Buffers`]; never
//! allocates, locks or blocks for a request. What a transport adds is in
//! [`crate::dev::DevQueue`] and [`crate::uring::RingQueue`]; the thread is in [`crate::thread`].

mod buffers;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use ringdisk_export::stats::QueueCells;
use ringdisk_export::{Clock, IdleMemory, InFlight};
use ringdisk_ring::{Fd, Ring};

use crate::events::{EndReason, Event, EventSender};
use crate::file::FileServer;
use crate::request::{Operation, Request};

pub(crate) use buffers::Buffers;

/// Requests that one queue serves at once unless the user says otherwise. The memory is 1 MiB each,
/// taken when it is touched.
pub const QUEUE_DEPTH_DEFAULT: u32 = 128;
/// Largest queue depth: 4096 × 1 MiB of address space for each queue.
pub const QUEUE_DEPTH_MAX: u32 = 4096;

/// What a queue thread polls for before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PollsFor {
    /// The next request: a single one that is in flight when the thread waits is with the storage,
    /// and nothing comes before that ends.
    Requests,
    /// The storage: with nothing in flight there is nothing to poll for.
    Storage,
}

/// How a transport stops to fetch.
type StopFetching = Box<dyn Fn(&Ring)>;

/// The side of a queue that its thread has, shared by its tasks.
pub(crate) struct Queue {
    pub(crate) ring: Ring,
    pub(crate) device: Fd,
    pub(crate) server: Arc<FileServer>,
    pub(crate) cells: Arc<QueueCells>,
    pub(crate) memory: IdleMemory,
    pub(crate) clock: Clock,
    /// Number of the thread among those of the export.
    pub(crate) thread: usize,
    pub(crate) polls_for: Cell<PollsFor>,
    in_flight: Arc<InFlight>,
    events: EventSender,
    has_ended: Cell<bool>,
    stop_fetching: StopFetching,
}

/// What a queue is made of beside its ring.
pub(crate) struct QueueParts {
    pub(crate) device: Fd,
    pub(crate) server: Arc<FileServer>,
    pub(crate) cells: Arc<QueueCells>,
    pub(crate) clock: Clock,
    pub(crate) thread: usize,
    /// Entries that it may ever have.
    pub(crate) entries: usize,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) events: EventSender,
    /// Called once when the queue cannot go on.
    pub(crate) stop_fetching: StopFetching,
}

impl Queue {
    pub(crate) fn new(ring: &Ring, parts: QueueParts) -> Queue {
        Queue {
            ring: ring.clone(),
            device: parts.device,
            server: parts.server,
            cells: parts.cells,
            memory: IdleMemory::new(parts.entries),
            clock: parts.clock,
            thread: parts.thread,
            polls_for: Cell::new(PollsFor::Requests),
            in_flight: parts.in_flight,
            events: parts.events,
            has_ended: Cell::new(false),
            stop_fetching: parts.stop_fetching,
        }
    }

    /// A request was fetched. Gives the moment as [`Clock::nanos`].
    pub(crate) fn begin(&self, entry: usize, now: Instant) -> u64 {
        let nanos = self.clock.nanos(now);
        self.in_flight.begin(entry, nanos);
        self.cells.begin();
        self.hold_polling();
        nanos
    }

    /// A request is about to use the buffer of its entry. The data of a WRITE are there already;
    /// for a READ the kernel looks up each page that it copies from.
    pub(crate) fn will_use(&self, entry: usize, request: &Request) {
        let bytes = match &request.operation {
            Operation::Read(argument) => argument.size,
            Operation::Write(argument) => argument.size,
            _ => 0,
        };
        self.memory.will_use(&self.ring, entry, bytes);
    }

    /// Its reply is ready, and whether the request waited for something meanwhile is not known.
    pub(crate) fn end(&self, entry: usize, started: Instant) {
        self.in_flight.end(entry);
        self.cells.end_since(started);
        self.hold_polling();
    }

    /// As [`Queue::end`], of a request that began in this turn of the thread's loop, or in an
    /// earlier one.
    pub(crate) fn end_of_turn(&self, entry: usize, started: Instant, turn: u64) {
        self.in_flight.end(entry);
        if self.ring.turn() == turn {
            self.cells.end_since(started);
        } else {
            self.cells.end_waited_since(started);
        }
        self.hold_polling();
    }

    /// Lets the thread poll, or not, as the requests in flight are.
    pub(crate) fn hold_polling(&self) {
        let in_flight = self.cells.in_flight.get();
        let useless = match self.polls_for.get() {
            PollsFor::Storage => 0,
            PollsFor::Requests => 1,
        };
        self.ring.hold_polling(in_flight == useless);
    }

    /// This queue cannot go on; reported once.
    pub(crate) fn finish(&self, reason: EndReason) {
        if !self.has_ended.replace(true) {
            (self.stop_fetching)(&self.ring);
            self.events.send(Event::QueueEnded(self.thread, reason));
        }
    }

    /// Whether [`Queue::finish`] was called.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.get()
    }
}
