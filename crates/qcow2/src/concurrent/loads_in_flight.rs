//! Loads in flight: what several requests miss at the same time is loaded once.
//!
//! Promises: for each key one caller leads and does the work, the others follow and are woken when
//! it is done. A leader that is dropped in the middle (its request was cancelled) lets the
//! followers try again. No lock is held while anything waits.
//!
//! Called on the miss path only, by any thread.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use super::sync::{Arc, Mutex, lock};

/// All loads of one kind. `K` names what is loaded, `V` is what followers get.
pub(crate) struct Flights<K, V> {
    running: Mutex<Vec<(K, Arc<Flight<V>>)>>,
}

/// One load.
struct Flight<V> {
    state: Mutex<State<V>>,
}

struct State<V> {
    outcome: Option<Outcome<V>>,
    waiting: Vec<Waker>,
}

#[derive(Clone)]
enum Outcome<V> {
    Done(Result<V, Errno>),
    /// The leader was dropped.
    Abandoned,
}

/// The part that a caller plays.
pub(crate) enum Join<'a, K: Copy + PartialEq, V: Clone> {
    /// It was loaded in the meantime.
    Ready(V),
    /// The caller does the work and reports by [`Leader::finish`].
    Lead(Leader<'a, K, V>),
    /// Another caller does.
    Follow(Follower<V>),
}

impl<K: Copy + PartialEq, V: Clone> Flights<K, V> {
    pub(crate) fn new() -> Flights<K, V> {
        Flights { running: Mutex::new(Vec::new()) }
    }

    /// Takes part in the load of `key`.
    ///
    /// `ready` looks whether it is there by now. A leader makes its result visible to `ready`
    /// before it finishes, so between the two no load is started twice.
    pub(crate) fn join(&self, key: K, ready: impl FnOnce() -> Option<V>) -> Join<'_, K, V> {
        let mut running = lock(&self.running);
        if let Some((_, flight)) = running.iter().find(|(other, _)| *other == key) {
            return Join::Follow(Follower { flight: flight.clone(), place: None });
        }
        if let Some(value) = ready() {
            return Join::Ready(value);
        }
        let state = State { outcome: None, waiting: Vec::new() };
        let flight = Arc::new(Flight { state: Mutex::new(state) });
        running.push((key, flight.clone()));
        Join::Lead(Leader { flights: self, key, flight, finished: false })
    }

    /// Loads under way.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.running).len()
    }
}

/// The caller that does the work.
pub(crate) struct Leader<'a, K: Copy + PartialEq, V: Clone> {
    flights: &'a Flights<K, V>,
    key: K,
    flight: Arc<Flight<V>>,
    finished: bool,
}

impl<K: Copy + PartialEq, V: Clone> Leader<'_, K, V> {
    /// Hands `result` to all followers.
    pub(crate) fn finish(mut self, result: Result<V, Errno>) {
        self.finished = true;
        self.end(Outcome::Done(result));
    }

    fn end(&self, outcome: Outcome<V>) {
        lock(&self.flights.running).retain(|(key, _)| *key != self.key);
        let waiting = {
            let mut state = lock(&self.flight.state);
            state.outcome = Some(outcome);
            std::mem::take(&mut state.waiting)
        };
        for waker in waiting {
            waker.wake();
        }
    }
}

impl<K: Copy + PartialEq, V: Clone> Drop for Leader<'_, K, V> {
    fn drop(&mut self) {
        if !self.finished {
            self.end(Outcome::Abandoned);
        }
    }
}

/// Waits for a leader. `None`: it gave up, try again.
pub(crate) struct Follower<V> {
    flight: Arc<Flight<V>>,
    /// Where its waker is.
    place: Option<usize>,
}

impl<V: Clone> Future for Follower<V> {
    type Output = Option<Result<V, Errno>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut state = lock(&this.flight.state);
        if let Some(outcome) = &state.outcome {
            return Poll::Ready(match outcome.clone() {
                Outcome::Done(result) => Some(result),
                Outcome::Abandoned => None,
            });
        }
        match this.place {
            Some(place) => state.waiting[place].clone_from(context.waker()),
            None => {
                this.place = Some(state.waiting.len());
                state.waiting.push(context.waker().clone());
            }
        }
        Poll::Pending
    }
}

impl<K, V> std::fmt::Debug for Flights<K, V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flights").finish_non_exhaustive()
    }
}
