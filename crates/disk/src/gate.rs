//! A small lock for tasks, held across awaits by rare operations: resize, and writes to the first
//! sector of a probed raw image.
//!
//! Promises: a waiting task blocks no thread; a holder that is dropped lets the next one in. Tasks
//! of several rings may wait on one gate. Requests that need no gate never touch it.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The lock.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: bool,
    waiters: Vec<Waker>,
}

/// Proof that the gate is held; opens it on drop.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
}

impl Gate {
    /// Waits until nobody holds the gate, then holds it.
    pub(crate) async fn enter(&self) -> Pass<'_> {
        poll_fn(|context| {
            let mut state = self.state();
            if state.held {
                if !state.waiters.iter().any(|w| w.will_wake(context.waker())) {
                    state.waiters.push(context.waker().clone());
                }
                return Poll::Pending;
            }
            state.held = true;
            Poll::Ready(())
        })
        .await;
        Pass { gate: self }
    }

    /// The state; a panic elsewhere leaves it valid, so poison is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        // All waiters are woken: one that was dropped meanwhile must not swallow the only wake.
        let waiters = {
            let mut state = self.gate.state();
            state.held = false;
            std::mem::take(&mut state.waiters)
        };
        for waker in waiters {
            waker.wake();
        }
    }
}
