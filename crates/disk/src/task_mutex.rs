//! A mutex for tasks, held across awaits by rare operations: changes of the disk, and writes to the
//! first sector of a probed raw image.
//!
//! Promises: tasks get it in the order in which they came, so none waits while others take it again
//! and again; a waiting task blocks no thread. Tasks of several rings may wait for one mutex.
//! Requests that do not need the mutex never touch it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The mutex.
#[derive(Debug, Default)]
pub(crate) struct TaskMutex {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_held: bool,
    /// Number of the next task that comes.
    next: u64,
    /// Tasks that wait, by their numbers.
    waiting: VecDeque<(u64, Waker)>,
}

/// Waits for the mutex; gives its place up on drop.
#[derive(Debug)]
pub(crate) struct Lock<'a> {
    mutex: &'a TaskMutex,
    /// Of its place among those that wait, once it was polled.
    number: Option<u64>,
}

/// Proof that the mutex is held; releases it on drop.
#[derive(Debug)]
pub(crate) struct TaskGuard<'a> {
    mutex: &'a TaskMutex,
}

impl TaskMutex {
    /// Waits until the mutex is free and all that came before have had it, then holds it.
    pub(crate) fn lock(&self) -> Lock<'_> {
        Lock { mutex: self, number: None }
    }

    /// The state; a panic of another holder leaves it valid, so poison is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Who has it next, when it is free.
    fn next_waker(&self) -> Option<Waker> {
        let first = self.waiting.front().filter(|_| !self.is_held);
        first.map(|(_, waker)| waker.clone())
    }
}

impl<'a> Future for Lock<'a> {
    type Output = TaskGuard<'a>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<TaskGuard<'a>> {
        let this = self.get_mut();
        let mut state = this.mutex.state();
        let number = this.number.unwrap_or(state.next);
        if this.number.replace(number).is_none() {
            state.next += 1;
            state.waiting.push_back((number, context.waker().clone()));
        }
        if !state.is_held && state.waiting.front().is_some_and(|(first, _)| *first == number) {
            state.waiting.pop_front();
            state.is_held = true;
            this.number = None;
            return Poll::Ready(TaskGuard { mutex: this.mutex });
        }
        if let Some((_, waker)) = state.waiting.iter_mut().find(|(other, _)| *other == number) {
            waker.clone_from(context.waker());
        }
        Poll::Pending
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let next = {
            let mut state = self.mutex.state();
            state.waiting.retain(|(other, _)| *other != number);
            // It may have been woken for a mutex that is free.
            state.next_waker()
        };
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

impl Drop for TaskGuard<'_> {
    fn drop(&mut self) {
        let next = {
            let mut state = self.mutex.state();
            state.is_held = false;
            state.next_waker()
        };
        if let Some(waker) = next {
            waker.wake();
        }
    }
}
