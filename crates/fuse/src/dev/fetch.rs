//! Which entry of a queue fetches the next request.
//!
//! Idle entries wait on a stack, so that a light load uses one buffer again and again, hot in the
//! cache. A few of them are *armed*: each has an exclusive poll with a read linked to it in the
//! ring.
//!
//! Promises: **invariant: whenever a fetch ends, another is armed after it** (as soon as there is
//! an idle entry). The kernel may have given the wake-up of a second request to the poll that has
//! just ended, which it does not repeat; only a new poll looks at the queue again. So the number of
//! armed entries grows under load, and shrinks only when all fetches are cancelled
//! ([`Fetch::stop`]), after which some queue must arm anew. The invariant rests on `target ≥
//! armed`: only then does a fetch that ends leave room for one.

use std::cell::{Cell, RefCell};

use ringdisk_ring::{Parker, Ring};

/// Entries armed at most. More would only wear out caches: one turn of the loop takes what is there
/// and arms again.
const ARMED_MAX: usize = 8;

/// Value of [`Fetch::operations`] for an entry that has no fetch in the ring.
const NO_OPERATION: u64 = u64::MAX;

/// The fetching side of one queue. Queue thread only; never allocates after start-up.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// One for each entry.
    parkers: Vec<Parker>,
    /// The fetch that an entry has in the ring, for its cancellation.
    operations: Vec<Cell<u64>>,
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
    pub(crate) fn new(entries: usize) -> Fetch {
        Fetch {
            parkers: (0..entries).map(|_| Parker::default()).collect(),
            operations: (0..entries).map(|_| Cell::new(NO_OPERATION)).collect(),
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

    /// The fetch of an entry is in the ring.
    pub(super) fn submitted(&self, entry: usize, operation: u64) {
        self.operations[entry].set(operation);
    }

    /// A fetch brought a request.
    pub(super) fn fetched(&self, ring: &Ring, entry: usize) {
        self.ended(ring, entry);
        let (last, count) = self.turn.get();
        let count = if last == ring.turn() { count + 1 } else { 1 };
        self.turn.set((ring.turn(), count));
        if count >= self.target.get() && self.target.get() < ARMED_MAX {
            // All that were armed came back in one turn: there may be more in the queue.
            self.aim_for(self.target.get() * 2);
        }
        self.arm(ring);
    }

    /// More than there are entries can never be armed.
    fn aim_for(&self, target: usize) {
        self.target.set(target.min(self.parkers.len()));
    }

    /// A fetch ended without a request.
    pub(super) fn ended(&self, ring: &Ring, entry: usize) {
        self.operations[entry].set(NO_OPERATION);
        self.armed.set(self.armed.get() - 1);
        self.allow_sleep(ring);
    }

    /// Whether the thread may sleep past the replies that it sends: only when what it waits for is
    /// armed, and no entry owes a fetch once its reply is out. A fetch that is owed may be the only
    /// one that would see the next request.
    fn allow_sleep(&self, ring: &Ring) {
        let armed = self.armed.get();
        ring.wait_past_inline(armed > 0 && armed >= self.target.get());
    }

    /// Lets this queue fetch from now on.
    pub(super) fn start(&self, ring: &Ring) {
        self.enabled.set(true);
        // One more than what is still in the ring, whose cancellation may swallow a wake-up.
        self.aim_for(self.armed.get() + 1);
        self.arm(ring);
    }

    /// No more fetches: cancels those in the ring. Each ends with a request after all, or with
    /// ECANCELED.
    pub(crate) fn stop(&self, ring: &Ring) {
        self.enabled.set(false);
        for operation in &self.operations {
            if operation.get() != NO_OPERATION {
                ring.cancel(operation.get());
            }
        }
    }

    /// Looks at the kernel's queue again, by a new poll: a wake-up may have gone to a poll of
    /// another queue that was cancelled.
    pub(super) fn look_again(&self, ring: &Ring) {
        let before = self.armed.get();
        if before < ARMED_MAX {
            self.aim_for(self.target.get().max(before + 1));
            self.arm(ring);
        }
        if self.armed.get() > before {
            return;
        }
        // Enough are armed, or no entry is idle: one of those in the ring starts anew. (An entry
        // that carries a request arms when it has replied.)
        let armed = self.operations.iter().find(|operation| operation.get() != NO_OPERATION);
        if let Some(operation) = armed {
            ring.cancel(operation.get());
        }
    }

    /// Whether this queue fetches.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled.get()
    }

    /// Whether this queue was stopped and no fetch of it is in the ring any more.
    pub(super) fn is_quiet(&self) -> bool {
        !self.enabled.get() && self.armed.get() == 0
    }

    /// Whether this queue was stopped, and every entry has nothing to do: each request that was
    /// fetched has its reply.
    pub(super) fn is_still(&self) -> bool {
        self.is_quiet() && self.idle.borrow().len() == self.parkers.len()
    }

    /// Whether every entry carries a request: the queue cannot take more.
    pub(super) fn is_exhausted(&self) -> bool {
        self.armed.get() == 0 && self.idle.borrow().is_empty()
    }

    fn arm(&self, ring: &Ring) {
        while self.enabled.get() && self.armed.get() < self.target.get() {
            let Some(entry) = self.idle.borrow_mut().pop() else { break };
            self.armed.set(self.armed.get() + 1);
            self.parkers[entry].unpark(ring);
        }
        self.allow_sleep(ring);
    }
}
