//! The task of a slot: it serves one request after the other and lives as long as its thread.
//!
//! Promises: guest memory is let go before the task waits for its next request.

use std::rc::Rc;

use super::Worker;
use super::serve::serve;
use super::slot::{Request, Slot};

/// Serves the requests of a slot, for ever.
pub(super) async fn run(worker: Rc<Worker>, slot: Rc<Slot>) {
    loop {
        slot.parker.park(&worker.ring).await;
        let Some(Request { vring, token }) = slot.request.borrow_mut().take() else { continue };
        let written = serve(&worker, &vring, &slot).await;
        // Memory that is to be let go must not wait for the next request of this slot.
        slot.scatter.borrow_mut().clear();
        *slot.view.borrow_mut() = None;
        match slot.since.take() {
            Some(since) => worker.cells.end_since(since),
            None => worker.cells.end(0),
        }
        worker.idle.borrow_mut().push(Rc::clone(&slot));
        vring.complete(&worker.ring, token, written);
    }
}
