//! How many clients there are, and how many there may be.
//!
//! Promises: never more use the export than may, and the one that has waited longest is the next;
//! the connection that gives back a place where there was none left hears that, by the subtraction
//! itself, so that nobody waits for a place that is free. Any thread; no part of a request.
//!
//! A client looks for a place and waits where there is none, and only messages to its thread wake
//! it: one that was sent after the subtraction arrives after the client began to wait, or it had
//! arrived before the client looked, which then has seen the place.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// See the module.
#[derive(Debug)]
pub(crate) struct Places {
    /// Clients that use the export at once, at most.
    max_connections: usize,
    /// The same with those in their handshakes.
    sockets_max: usize,
    /// Clients that use the export.
    in_use: AtomicUsize,
    line: Mutex<Line>,
    /// Connections of all threads.
    total: AtomicUsize,
    /// Connections of each thread.
    counts: Vec<AtomicUsize>,
    /// Tasks that accept, and wait until handshakes end.
    hurries: AtomicUsize,
}

/// Clients of all threads that wait to use the export.
#[derive(Debug, Default)]
struct Line {
    next: u64,
    /// Their numbers, in their order.
    waiting: VecDeque<u64>,
}

/// The place of a client in the line of those that wait to use the export; it leaves the line when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct InLine<'a> {
    places: &'a Places,
    number: u64,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.places.line().waiting.retain(|number| *number != self.number);
    }
}

impl Places {
    /// * `sockets_max`: clients at once, with those in their handshakes.
    pub(crate) fn new(max_connections: usize, sockets_max: usize, threads: usize) -> Places {
        Places {
            max_connections,
            sockets_max,
            in_use: AtomicUsize::new(0),
            line: Mutex::default(),
            total: AtomicUsize::new(0),
            counts: (0..threads).map(|_| AtomicUsize::new(0)).collect(),
            hurries: AtomicUsize::new(0),
        }
    }

    /// Clients that use the export at once, at most.
    pub(crate) fn max_connections(&self) -> usize {
        self.max_connections
    }

    /// Connections of all threads.
    pub(crate) fn connections(&self) -> usize {
        self.total.load(Ordering::Acquire)
    }

    /// Whether as many clients use the export as may.
    pub(crate) fn is_used_up(&self) -> bool {
        self.in_use.load(Ordering::Acquire) >= self.max_connections
    }

    /// Whether the clients that use the export have all sockets: none is left for a handshake.
    pub(crate) fn all_sockets_are_in_use(&self) -> bool {
        self.in_use.load(Ordering::Acquire) >= self.sockets_max
    }

    /// Whether no client may be accepted.
    pub(crate) fn is_full(&self) -> bool {
        self.is_used_up() || self.connections() >= self.sockets_max
    }

    /// A panic elsewhere leaves the line valid.
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client waits behind all others. It has to try once more after this.
    pub(crate) fn wait_in_line(&self) -> InLine<'_> {
        let mut line = self.line();
        let number = line.next;
        line.next += 1;
        line.waiting.push_back(number);
        InLine { places: self, number }
    }

    /// Counts one more client that uses the export, if one more may and none has waited longer.
    ///
    /// * `waits`: its place in the line; `None`: it has just come.
    #[must_use]
    pub(crate) fn try_use(&self, waits: Option<&InLine<'_>>) -> bool {
        let line = self.line();
        if line.waiting.front().is_some_and(|first| waits.is_none_or(|it| it.number != *first)) {
            return false;
        }
        let more = |count| (count < self.max_connections).then_some(count + 1);
        self.in_use.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Counts one more client that uses the export: another process has let it.
    pub(crate) fn use_anyway(&self) {
        self.in_use.fetch_add(1, Ordering::AcqRel);
    }

    /// A client uses the export no more. `true`: there was no room before, others may wait.
    #[must_use]
    pub(crate) fn end_use(&self) -> bool {
        self.in_use.fetch_sub(1, Ordering::AcqRel) >= self.max_connections
    }

    /// Counts one more connection of a thread. Only tasks of one thread do, after they have seen
    /// that there is room.
    pub(crate) fn take(&self, thread: usize) {
        self.counts[thread].fetch_add(1, Ordering::AcqRel);
        self.total.fetch_add(1, Ordering::AcqRel);
    }

    /// A connection of a thread has ended. `true`: there was no room before, others may wait.
    #[must_use]
    pub(crate) fn leave(&self, thread: usize) -> bool {
        self.counts[thread].fetch_sub(1, Ordering::AcqRel);
        self.total.fetch_sub(1, Ordering::AcqRel) >= self.sockets_max
    }

    /// The thread with the fewest connections.
    pub(crate) fn emptiest(&self) -> usize {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Acquire));
        counts.enumerate().min_by_key(|(_, count)| *count).map_or(0, |(number, _)| number)
    }

    /// Whether a client waits until handshakes end: they have to hurry then.
    pub(crate) fn is_crowded(&self) -> bool {
        self.hurries.load(Ordering::Acquire) > 0
    }

    /// Handshakes have to hurry from now on.
    pub(crate) fn hurry(&self) -> Hurry<'_> {
        self.hurries.fetch_add(1, Ordering::AcqRel);
        Hurry(self)
    }
}

/// Handshakes have to hurry as long as one of these lives.
#[derive(Debug)]
pub(crate) struct Hurry<'a>(&'a Places);

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.hurries.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests;
