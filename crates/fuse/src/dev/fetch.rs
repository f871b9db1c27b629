//! Which entry of a queue fetches the next request.
//!
//! Idle entries wait on a stack, so that a light load uses one buffer again and again, hot in the cache. A few of them are *armed*:
//! each has an exclusive poll with a read linked to it in the ring.
//!
//! **Invariant: whenever a fetch ends, another is armed after it** (as soon as there is an idle entry). The kernel may have given
//! the wake-up of a second request to the poll that has just ended, which it does not repeat; only a new poll looks at the queue
//! again. So the number of armed entries grows under load, and shrinks only when all fetches are cancelled ([`Fetch::stop`]),
//! after which some queue must arm anew.

use std::cell::{Cell, RefCell};

use ringdisk_ring::{Parker, Ring};

/// Entries armed at most. More would only wear out caches: one turn of the loop takes what is there and arms again.
const ARMED_MAX: usize = 8;

/// The fetching side of one queue. Queue thread only; never allocates after start-up.
#[derive(Debug)]
pub(super) struct Fetch {
    /// One for each entry.
    parkers: Vec<Parker>,
    /// Entries without a request that are not armed; the last one is next.
    idle: RefCell<Vec<usize>>,
    armed: Cell<usize>,
    /// How many should be armed.
    target: Cell<usize>,
    /// This queue may fetch.
    enabled: Cell<bool>,
    /// The turn of the loop in which the last fetch ended, and how many ended in it.
    turn: Cell<(u64, usize)>,
}

impl Fetch {
    pub(super) fn new(entries: usize) -> Fetch {
        Fetch {
            parkers: (0..entries).map(|_| Parker::default()).collect(),
            idle: RefCell::new(Vec::with_capacity(entries)),
            armed: Cell::new(0),
            target: Cell::new(1),
            enabled: Cell::new(false),
            turn: Cell::new((0, 0)),
        }
    }

    /// The entry has nothing to do: waits until it shall fetch.
    pub(super) async fn wait_for_turn(&self, ring: &Ring, entry: usize) {
        self.idle.borrow_mut().push(entry);
        self.arm(ring);
        self.parkers[entry].park(ring).await;
    }

    /// A fetch brought a request. `turn`: number of the loop's turn.
    pub(super) fn fetched(&self, ring: &Ring, turn: u64) {
        self.ended();
        let (last, count) = self.turn.get();
        let count = if last == turn { count + 1 } else { 1 };
        self.turn.set((turn, count));
        if count >= self.target.get() && self.target.get() < ARMED_MAX {
            // All that were armed came back in one turn: there may be more in the queue.
            self.target.set(self.target.get() * 2);
        }
        self.arm(ring);
    }

    /// A fetch ended without a request.
    pub(super) fn ended(&self) {
        self.armed.set(self.armed.get() - 1);
    }

    /// Lets this queue fetch from now on.
    pub(super) fn start(&self, ring: &Ring) {
        self.enabled.set(true);
        self.target.set(1);
        self.arm(ring);
    }

    /// No more fetches; those that are armed are cancelled by their entries, which are woken.
    pub(super) fn stop(&self) {
        self.enabled.set(false);
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    pub(super) fn armed(&self) -> usize {
        self.armed.get()
    }

    /// Whether every entry carries a request: the queue cannot take more.
    pub(super) fn is_exhausted(&self) -> bool {
        self.armed.get() == 0 && self.idle.borrow().is_empty()
    }

    fn arm(&self, ring: &Ring) {
        while self.enabled.get() && self.armed.get() < self.target.get() {
            let Some(entry) = self.idle.borrow_mut().pop() else { return };
            self.armed.set(self.armed.get() + 1);
            self.parkers[entry].unpark(ring);
        }
    }
}
