//! One request at a time: a task that lives as long as its thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use ringdisk_guest::Chain;
use ringdisk_ring::{Parker, Ring, Scatter};

use crate::blk::serve::serve;

use super::{Vring, Worker};

/// What a request needs while it is served; reused by the next one.
#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) chain: RefCell<Chain>,
    pub(crate) scatter: RefCell<Scatter>,
    vring: RefCell<Option<Rc<Vring>>>,
    since: Cell<Option<Instant>>,
    parker: Parker,
}

impl Slot {
    /// A request was popped into this slot: its task serves it in this turn.
    pub(crate) fn begin(&self, vring: Rc<Vring>, ring: &Ring) {
        *self.vring.borrow_mut() = Some(vring);
        self.since.set(Some(Instant::now()));
        self.parker.unpark(ring);
    }
}

/// Serves the requests of a slot, for ever.
pub(super) async fn run(worker: Rc<Worker>, slot: Rc<Slot>) {
    loop {
        slot.parker.park(&worker.ring).await;
        let Some(vring) = slot.vring.borrow_mut().take() else { continue };
        let written = serve(&worker, &vring, &slot).await;
        vring.complete(&slot.chain.borrow(), written);
        let since = slot.since.take().map_or(0, |since| since.elapsed().as_nanos());
        worker.cells.end(u64::try_from(since).unwrap_or(u64::MAX));
        worker.idle.borrow_mut().push(Rc::clone(&slot));
    }
}
