//! Passes one value from a helper thread to the task that waits for it.
//!
//! Promises: the value arrives exactly once, the waiter is always woken, also when the work panics,
//! and a waiter that is dropped costs nothing. Built on [`super::sync`], so that the model test can
//! run it under every order of steps.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::sync::{Arc, Mutex, lock};

enum Outcome<T> {
    Running(Option<Waker>),
    Done(T),
    Panicked,
    Taken,
}

/// The worker's end.
pub(crate) struct Finish<T>(Arc<Mutex<Outcome<T>>>);

/// The waiter's end: a future of the value. Panics when the work panicked.
pub(crate) struct Handoff<T>(Arc<Mutex<Outcome<T>>>);

/// Makes both ends.
pub(crate) fn handoff<T>() -> (Finish<T>, Handoff<T>) {
    let state = Arc::new(Mutex::new(Outcome::Running(None)));
    (Finish(Arc::clone(&state)), Handoff(state))
}

impl<T> Finish<T> {
    /// Hands the value over and wakes the waiter.
    pub(crate) fn done(self, value: T) {
        self.set(Outcome::Done(value));
    }

    fn set(&self, outcome: Outcome<T>) {
        let before = std::mem::replace(&mut *lock(&self.0), outcome);
        if let Outcome::Running(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        let is_running = matches!(*lock(&self.0), Outcome::Running(_));
        if is_running {
            self.set(Outcome::Panicked);
        }
    }
}

impl<T> Future for Handoff<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut state = lock(&self.0);
        match std::mem::replace(&mut *state, Outcome::Taken) {
            Outcome::Running(_) => {
                *state = Outcome::Running(Some(cx.waker().clone()));
                Poll::Pending
            }
            Outcome::Done(value) => Poll::Ready(value),
            Outcome::Panicked => panic!("work on a helper thread panicked"),
            Outcome::Taken => panic!("polled after completion"),
        }
    }
}
