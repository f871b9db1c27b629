//! Waiting for another task of the same thread.
//!
//! Promises: no atomics, no allocation; a permit is not lost.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::task::Poll;

use crate::Ring;
use crate::slots::Waiter;

/// A task waits here until another task of the same ring gives a permit. A permit given
/// early is kept; several count as one. No atomics, no allocation.
#[derive(Debug)]
pub struct Parker {
    permit: Cell<bool>,
    waiter: RefCell<Waiter>,
}

impl Default for Parker {
    fn default() -> Self {
        Parker { permit: Cell::new(false), waiter: RefCell::new(Waiter::None) }
    }
}

impl Parker {
    /// Gives a permit to the waiting task, or to the next one that waits.
    pub fn unpark(&self, ring: &Ring) {
        self.permit.set(true);
        let waiter = self.waiter.replace(Waiter::None);
        ring.0.executor.wake(waiter);
    }

    /// Waits for the permit and takes it.
    pub fn park<'a>(&'a self, ring: &'a Ring) -> impl Future<Output = ()> + 'a {
        poll_fn(|cx| {
            if self.permit.replace(false) {
                return Poll::Ready(());
            }
            *self.waiter.borrow_mut() = ring.0.executor.waiter(cx);
            Poll::Pending
        })
    }
}
