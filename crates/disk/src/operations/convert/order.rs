//! Keeps writes of a conversion in the order of the disk.
//!
//! Promises: writes begin in order, and several are in flight at once: a piece waits for its turn,
//! begins its last write and passes the turn on. Used by the tasks of one thread; after a failure
//! no task waits any more.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Poll, Waker};

/// The piece whose turn it is.
pub(super) struct Order {
    is_kept: bool,
    next: Cell<u64>,
    is_abandoned: Cell<bool>,
    waiting: RefCell<Vec<(u64, Waker)>>,
}

impl Order {
    /// * `is_kept`: false: no piece waits.
    pub(super) fn new(is_kept: bool) -> Order {
        Order {
            is_kept,
            next: Cell::new(0),
            is_abandoned: Cell::new(false),
            waiting: RefCell::default(),
        }
    }

    /// Waits for the turn of a piece. Pieces are numbered from 0 without gaps.
    pub(super) async fn turn(&self, number: u64) {
        poll_fn(|context| {
            if !self.is_kept || self.is_abandoned.get() || self.next.get() >= number {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            match waiting.iter_mut().find(|(other, _)| *other == number) {
                Some((_, waker)) => waker.clone_from(context.waker()),
                None => waiting.push((number, context.waker().clone())),
            }
            Poll::Pending
        })
        .await;
    }

    /// Passes the turn to the next piece. A second call has no effect.
    pub(super) fn pass(&self, number: u64) {
        if self.next.get() != number {
            return;
        }
        self.next.set(number + 1);
        let mut waiting = self.waiting.borrow_mut();
        if let Some(place) = waiting.iter().position(|(other, _)| *other == number + 1) {
            waiting.swap_remove(place).1.wake();
        }
    }

    /// Awaits a write, and passes the turn on as soon as it has begun.
    pub(super) async fn pass_when_begun<F: Future>(&self, number: u64, write: F) -> F::Output {
        let mut write = pin!(write);
        let mut has_begun = false;
        poll_fn(|context| {
            let result = write.as_mut().poll(context);
            if !std::mem::replace(&mut has_begun, true) {
                self.pass(number);
            }
            result
        })
        .await
    }

    /// Ends all waits.
    pub(super) fn abandon(&self) {
        self.is_abandoned.set(true);
        for (_, waker) in self.waiting.borrow_mut().drain(..) {
            waker.wake();
        }
    }
}
