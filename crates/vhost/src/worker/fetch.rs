//! Fetches requests: takes them off the virtqueues of a thread and gives each to a task.
//!
//! Promises: a turn takes [`BATCH_MAX`] requests at most, from the virtqueues in turn, so none
//! starves another. A broken device takes nothing more. Called by the queue thread only; never
//! locks, blocks or calls the kernel, and allocates only for a new task: when more requests are in
//! flight than ever before.

use std::time::Instant;

use super::{BATCH_MAX, Worker};

impl Worker {
    /// Takes requests off the virtqueues and gives each to a task. Returns how many there were.
    pub(super) fn dispatch(&self) -> u32 {
        // A broken device takes nothing in any of its virtqueues, whichever thread they are on
        // (virtio 1.3, section 2.1.2).
        if self.device.needs_reset() {
            return 0;
        }
        let vrings = self.vrings.borrow();
        let view = self.view.borrow();
        // One look at the clock for the batch.
        let mut now = None;
        let taken = self.turns.take(vrings.len(), self.room().min(BATCH_MAX), |number| {
            let vring = &vrings[number];
            let Some(slot) = vring.has_next().then(|| self.take_slot()).flatten() else {
                return false;
            };
            let popped = vring.pop(&self.ring, &view, &mut slot.chain.borrow_mut(), &self.device);
            let Some(token) = popped else {
                self.idle.borrow_mut().push(slot);
                return false;
            };
            self.cells.begin();
            let now = *now.get_or_insert_with(Instant::now);
            slot.begin(vring, token, &view, now, &self.ring);
            true
        });
        if self.room() == 0 && vrings.iter().any(|vring| vring.has_next()) {
            self.cells.exhausted.add(1);
        }
        taken
    }
}
