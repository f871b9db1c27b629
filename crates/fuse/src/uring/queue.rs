//! A queue as the transport over io_uring sees it: its rings, and whether its thread may leave its
//! CPU.
//!
//! Promises: queue thread only; never allocates, locks or blocks for a request.

use std::cell::Cell;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use ringdisk_ring::{CpuList, cpus_of_thread, pin_to_cpus};

use super::rings::Rings;
use crate::placement::ThreadPlace;
use crate::queue::Queue;

/// A queue and the entries of the rings that are with it.
pub(crate) struct RingQueue {
    queue: Rc<Queue>,
    pub(super) rings: Arc<Rings>,
    /// Entries of `dev`, behind which those of the rings are counted.
    first: usize,
    binding: Binding,
}

/// Whether the thread is bound to its CPU at the moment.
struct Binding {
    place: ThreadPlace,
    /// It may leave its CPU.
    is_free: Cell<bool>,
    /// It was bound from outside, and is left alone.
    is_bound_by_others: Cell<bool>,
}

impl Deref for RingQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl RingQueue {
    /// * `first`: number of the first entry of a ring among all entries of the queue.
    pub(crate) fn new(
        queue: &Rc<Queue>,
        rings: &Arc<Rings>,
        first: usize,
        place: ThreadPlace,
    ) -> RingQueue {
        let (is_free, is_bound_by_others) = (Cell::new(false), Cell::new(false));
        let binding = Binding { place, is_free, is_bound_by_others };
        RingQueue { queue: Rc::clone(queue), rings: Arc::clone(rings), first, binding }
    }

    /// A request came through the ring.
    pub(super) fn begin(&self, index: usize, now: Instant) {
        let nanos = self.queue.begin(self.number(index), now);
        self.rings.look(index, self.thread, nanos, self.ring.turn());
        let is_free = self.rings.is_free(self.thread);
        if is_free != self.binding.is_free.get() {
            self.binding.set_free(is_free, self.thread);
        }
    }

    /// Its reply is ready.
    ///
    /// * `turn`: of the thread's loop, when it began.
    pub(super) fn end(&self, index: usize, started: Instant, turn: u64) {
        self.queue.end_of_turn(self.number(index), started, turn);
    }

    /// Number of a ring's entry among all that the queue may have.
    pub(super) fn number(&self, index: usize) -> usize {
        self.first + index
    }
}

impl Binding {
    /// Leaves the thread's CPU to the scheduler, or binds it again. Stops doing so where another
    /// program has bound the thread meanwhile (taskset, a cpuset), or where the system refuses.
    fn set_free(&self, is_free: bool, thread: usize) {
        let was_free = self.is_free.replace(is_free);
        let ThreadPlace { cpus, away, roam, .. } = &self.place;
        let ours = if was_free { roam } else { cpus };
        if ours.is_empty() || self.is_bound_by_others.get() {
            return;
        }
        let now = cpus_of_thread();
        if now != *ours {
            self.is_bound_by_others.set(true);
            tracing::info!("queue {thread}: another program bound it to CPU {now}; it stays there");
            return;
        }
        // The scheduler alone would leave it where it is for some ms, and a trial sees just those.
        let steps: &[&CpuList] = if is_free { &[away, roam] } else { &[cpus] };
        for cpus in steps.iter().filter(|cpus| !cpus.is_empty()) {
            if let Err(errno) = pin_to_cpus(cpus) {
                self.is_bound_by_others.set(true);
                tracing::info!("queue {thread}: stays where it is: CPU {cpus}: {errno}");
                return;
            }
        }
    }
}
