//! A mutex for tasks, held across awaits by rare operations: changes of the disk, and writes to the
//! first sector of a probed raw image.
//!
//! Promises: a waiting task blocks no thread; dropping the guard lets the next task in. Tasks of
//! several rings may wait for one mutex. Requests that do not need the mutex never touch it.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The mutex.
#[derive(Debug, Default)]
pub(crate) struct TaskMutex {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_held: bool,
    waiters: Vec<Waker>,
}

/// Proof that the mutex is held; releases it on drop.
#[derive(Debug)]
pub(crate) struct TaskGuard<'a> {
    mutex: &'a TaskMutex,
}

impl TaskMutex {
    /// Waits until the mutex is free, then holds it.
    pub(crate) async fn lock(&self) -> TaskGuard<'_> {
        poll_fn(|context| {
            let mut state = self.state();
            if state.is_held {
                if !state.waiters.iter().any(|w| w.will_wake(context.waker())) {
                    state.waiters.push(context.waker().clone());
                }
                return Poll::Pending;
            }
            state.is_held = true;
            Poll::Ready(())
        })
        .await;
        TaskGuard { mutex: self }
    }

    /// The state; a panic of another holder leaves it valid, so poison is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TaskGuard<'_> {
    fn drop(&mut self) {
        // All waiters are woken: one that was dropped meanwhile must not swallow the only wake.
        let waiters = {
            let mut state = self.mutex.state();
            state.is_held = false;
            std::mem::take(&mut state.waiters)
        };
        for waker in waiters {
            waker.wake();
        }
    }
}
