//! The virtqueues of a thread, as its loop sees them.
//!
//! Promises: all that a turn of the loop has completed is shown to the guests at its end, with one
//! call for each virtqueue at most, and one signal for the log. The thread sleeps only when each
//! virtqueue asks for kicks and was looked at after that. Queue thread; never allocates, locks or
//! blocks for a request.

use ringdisk_ring::Source;

use super::Worker;

impl Source for Worker {
    fn publish(&self) {
        let mut logged = false;
        for vring in self.vrings.borrow().iter() {
            let published = vring.publish();
            if published.called {
                self.cells.calls.add(1);
            }
            logged |= published.logged;
        }
        if logged {
            self.log_event.signal();
        }
    }

    fn look(&self) -> u32 {
        self.dispatch()
    }

    fn rests(&self) -> bool {
        self.idle.borrow().len() == self.slots.get()
    }

    fn arm(&self) -> bool {
        if self.room() == 0 {
            // Nothing could be taken; the next request that ends looks again.
            return false;
        }
        if self.device.needs_reset() {
            // Nothing is taken, so no kick is asked for. Virtqueues are started anew after a reset.
            return false;
        }
        self.is_armed.set(true);
        let mut came = false;
        for vring in self.vrings.borrow().iter() {
            came |= vring.enable_kicks();
            // A ring whose memory is gone reads as one without requests: nothing else would tell.
            vring.check(&self.view.borrow(), &self.device);
        }
        if came {
            self.disarm();
        }
        came
    }

    fn disarm(&self) {
        if self.is_armed.replace(false) {
            for vring in self.vrings.borrow().iter() {
                vring.disable_kicks();
            }
        }
    }
}
