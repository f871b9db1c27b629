//! The requests of one direction that wait.
//!
//! Promises: requests of one member keep their order; members take turns. One of the requests is
//! the timekeeper: it alone sleeps until there is room, and then lets others go on with it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use crate::Kind;
use crate::buckets::Shared;

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) kind: Kind,
    pub(crate) bytes: u64,
    /// It may go on.
    pub(crate) has_passed: AtomicBool,
}

#[derive(Debug)]
struct Entry {
    ticket: Arc<Ticket>,
    waker: Waker,
}

#[derive(Debug)]
struct Line {
    member: usize,
    entries: VecDeque<Entry>,
}

/// The queue; behind a mutex of the group.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// Members with requests that wait; the first one is next.
    lines: VecDeque<Line>,
    /// The request that sleeps until there is room.
    keeper: Option<Arc<Ticket>>,
}

/// What a look at the queue came to.
#[derive(Debug, Default)]
pub(crate) struct Admitted {
    /// Of requests that may go on, and of one that becomes the timekeeper.
    pub(crate) wakers: Vec<Waker>,
    /// How long the caller has to sleep, nanoseconds, when it is the timekeeper.
    pub(crate) sleep: Option<u64>,
}

impl Queue {
    /// Puts a request at the end of its member's line, or gives it another waker.
    pub(crate) fn put(
        &mut self,
        member: usize,
        ticket: &Arc<Ticket>,
        waker: &Waker,
        shared: &Shared,
    ) {
        let at = self.lines.iter().position(|line| line.member == member).unwrap_or_else(|| {
            self.lines.push_back(Line { member, entries: VecDeque::new() });
            self.lines.len() - 1
        });
        let entries = &mut self.lines[at].entries;
        match entries.iter_mut().find(|entry| Arc::ptr_eq(&entry.ticket, ticket)) {
            Some(entry) => entry.waker.clone_from(waker),
            None => {
                entries.push_back(Entry { ticket: Arc::clone(ticket), waker: waker.clone() });
                shared.waiting[ticket.kind as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Lets requests go on as far as there is room, if `mine` keeps the time or nobody does.
    pub(crate) fn admit(&mut self, shared: &Shared, now: u64, mine: &Arc<Ticket>) -> Admitted {
        let mut out = Admitted::default();
        if self.keeper.as_ref().is_some_and(|keeper| !Arc::ptr_eq(keeper, mine)) {
            return out;
        }
        self.keeper = None;
        while let Some(mut line) = self.lines.pop_front() {
            let Some(entry) = line.entries.front() else { continue };
            if let Err(wait) = shared.take(now, entry.ticket.kind, entry.ticket.bytes) {
                self.lines.push_front(line);
                if mine.has_passed.load(Ordering::Relaxed) {
                    out.wakers.extend(self.next());
                } else {
                    self.keeper = Some(Arc::clone(mine));
                    out.sleep = Some(wait);
                }
                return out;
            }
            out.wakers.extend(line.entries.pop_front().map(|entry| passes(entry, shared)));
            if !line.entries.is_empty() {
                self.lines.push_back(line);
            }
        }
        out
    }

    /// Takes a request out that waits no more. Returns the waker of one that has to keep the time,
    /// when nobody does: the request may have kept it, or was woken to do so.
    pub(crate) fn remove(
        &mut self,
        member: usize,
        ticket: &Arc<Ticket>,
        shared: &Shared,
    ) -> Option<Waker> {
        for line in self.lines.iter_mut().filter(|line| line.member == member) {
            let at = line.entries.iter().position(|entry| Arc::ptr_eq(&entry.ticket, ticket));
            if at.and_then(|at| line.entries.remove(at)).is_some() {
                shared.waiting[ticket.kind as usize].fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.lines.retain(|line| !line.entries.is_empty());
        if self.keeper.as_ref().is_some_and(|keeper| Arc::ptr_eq(keeper, ticket)) {
            self.keeper = None;
        }
        if self.keeper.is_none() { self.next() } else { None }
    }

    /// The waker of the request that is next: it looks at the queue when it runs.
    fn next(&self) -> Option<Waker> {
        Some(self.lines.front()?.entries.front()?.waker.clone())
    }

    /// The wakers of all.
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        let entries = self.lines.iter().flat_map(|line| &line.entries);
        entries.map(|entry| entry.waker.clone()).collect()
    }
}

/// A request may go on. Returns its waker.
fn passes(entry: Entry, shared: &Shared) -> Waker {
    entry.ticket.has_passed.store(true, Ordering::Release);
    shared.waiting[entry.ticket.kind as usize].fetch_sub(1, Ordering::Relaxed);
    entry.waker
}
