//! A task of the ring whose end can be awaited.
//!
//! Promises: dropping the answer does not stop the task; a task that is dropped with its ring
//! answers `None`.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::{Poll, Waker};

use ringdisk_ring::Ring;

/// The result of the task, shared with the caller.
struct Slot<T> {
    value: Option<T>,
    waiter: Option<Waker>,
    is_over: bool,
}

/// Marks the task as over, also when it was dropped with its ring.
struct Over<T>(Rc<RefCell<Slot<T>>>);

impl<T> Drop for Over<T> {
    fn drop(&mut self) {
        let waiter = {
            let mut slot = self.0.borrow_mut();
            slot.is_over = true;
            slot.waiter.take()
        };
        if let Some(waker) = waiter {
            waker.wake();
        }
    }
}

/// Runs `task` as a task of the ring, at once, and gives its result to the task that awaits it.
pub(crate) fn spawn<T: 'static>(
    ring: &Ring,
    task: impl Future<Output = T> + 'static,
) -> impl Future<Output = Option<T>> {
    let slot = Rc::new(RefCell::new(Slot { value: None, waiter: None, is_over: false }));
    let over = Over(Rc::clone(&slot));
    ring.spawn(async move {
        let result = task.await;
        over.0.borrow_mut().value = Some(result);
    });
    poll_fn(move |context| {
        let mut slot = slot.borrow_mut();
        if slot.is_over {
            return Poll::Ready(slot.value.take());
        }
        slot.waiter = Some(context.waker().clone());
        Poll::Pending
    })
}
