//! Runs a change as a task of the ring, detached from its caller.
//!
//! Promises: dropping the caller's future does not stop the change; the end of the ring gives the
//! caller an error.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use ringdisk_ring::Ring;

use crate::{Disk, Error, ErrorKind};

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

impl Disk {
    /// Runs `change` as a task of the ring and awaits its result. Dropping the future leaves the
    /// task alone.
    pub(crate) async fn detached<T, F>(
        &self,
        ring: &Ring,
        change: impl FnOnce(Arc<Disk>, Ring) -> F,
    ) -> Result<T, Error>
    where
        T: 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        // Every disk is in an `Arc`, and the caller has it.
        let Some(disk) = self.weak().upgrade() else { return Err(ended()) };
        let slot = Rc::new(RefCell::new(Slot { value: None, waiter: None, is_over: false }));
        let over = Over(Rc::clone(&slot));
        let change = change(disk, ring.clone());
        ring.spawn(async move {
            let result = change.await;
            over.0.borrow_mut().value = Some(result);
        });
        poll_fn(|context| {
            let mut slot = slot.borrow_mut();
            if slot.is_over {
                return Poll::Ready(slot.value.take().unwrap_or_else(|| Err(ended())));
            }
            slot.waiter = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Io, "the thread that made the change has ended")
}
