//! Guest clusters whose mapping is being changed: only requests for the same clusters wait for one
//! another.
//!
//! Promises: claims on ranges that do not overlap never wait; claims that overlap are granted in
//! the order in which they came, so none starves; a claim that is dropped while it waits, or while
//! it is held, lets the next ones in. A waiting task blocks no thread.
//!
//! One claim covers all that a request needs at a time, and a holder never claims again, so claims
//! cannot wait for each other in a circle. The same type with the range 0..1 serves as a lock for
//! tasks.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::sync::{Mutex, lock};

/// All claims of one image, in the order of arrival.
pub(crate) struct Registry {
    state: Mutex<State>,
}

struct State {
    next: u64,
    claims: Vec<Entry>,
}

struct Entry {
    id: u64,
    start: u64,
    end: u64,
    /// Set while it waits.
    waker: Option<Waker>,
}

impl Entry {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

impl Registry {
    pub(crate) fn new() -> Registry {
        Registry { state: Mutex::new(State { next: 0, claims: Vec::new() }) }
    }

    /// Claims `start..end`; ready when no earlier claim overlaps.
    pub(crate) fn claim(&self, start: u64, end: u64) -> Waiting<'_> {
        Waiting { registry: self, start, end, id: None }
    }

    /// Claims it now or not at all.
    pub(crate) fn try_claim(&self, start: u64, end: u64) -> Option<Claim<'_>> {
        let mut state = lock(&self.state);
        if state.claims.iter().any(|other| other.overlaps(start, end)) {
            return None;
        }
        let id = state.add(start, end, None);
        Some(Claim { registry: self, id })
    }

    fn remove(&self, id: u64) {
        let mut wake = Vec::new();
        {
            let mut state = lock(&self.state);
            let Some(at) = state.claims.iter().position(|entry| entry.id == id) else { return };
            let gone = state.claims.remove(at);
            // All claims that it may have blocked are woken; those blocked by another one wait
            // again.
            for later in &mut state.claims[at..] {
                if later.overlaps(gone.start, gone.end)
                    && let Some(waker) = later.waker.take()
                {
                    wake.push(waker);
                }
            }
        }
        wake.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn add(&mut self, start: u64, end: u64, waker: Option<Waker>) -> u64 {
        let id = self.next;
        self.next += 1;
        self.claims.push(Entry { id, start, end, waker });
        id
    }
}

/// A claim that may have to wait.
pub(crate) struct Waiting<'a> {
    registry: &'a Registry,
    start: u64,
    end: u64,
    /// Its place in the order, from the first poll on.
    id: Option<u64>,
}

impl<'a> Future for Waiting<'a> {
    type Output = Claim<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Claim<'a>> {
        let this = &mut *self;
        let mut state = lock(&this.registry.state);
        let id = *this.id.get_or_insert_with(|| state.add(this.start, this.end, None));
        let earlier = state.claims.iter().take_while(|entry| entry.id != id);
        let blocked = earlier.into_iter().any(|entry| entry.overlaps(this.start, this.end));
        if blocked {
            if let Some(own) = state.claims.iter_mut().find(|entry| entry.id == id) {
                own.waker = Some(context.waker().clone());
            }
            return Poll::Pending;
        }
        drop(state);
        this.id = None;
        Poll::Ready(Claim { registry: this.registry, id })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.registry.remove(id);
        }
    }
}

/// A range that is claimed, until it is dropped.
pub(crate) struct Claim<'a> {
    registry: &'a Registry,
    id: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.registry.remove(self.id);
    }
}
