//! What happens to a disk, for those who watch it: a short queue of events.
//!
//! Promises: telling an event takes a lock for a moment and never waits for a reader. The queue
//! keeps the last [`QUEUE_MAX`] events; a reader that is slower is told how many it has lost.
//! Nothing of this is on the path of a request that succeeds.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Events that are kept.
pub const QUEUE_MAX: usize = 256;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its place among all events of the disk, from 0.
    pub number: u64,
    /// When it was told.
    pub at: SystemTime,
    /// What it is, for programs: a word of the table in docs/operations.md.
    pub kind: &'static str,
    /// What happened, for people.
    pub text: String,
    /// More for programs: names and values.
    pub fields: Vec<(&'static str, String)>,
}

/// What a reader gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The oldest first.
    pub events: Vec<Event>,
    /// Events that were dropped before the first of these, and after what was read last.
    pub lost: u64,
    /// Where the reader goes on.
    pub next: u64,
}

/// The queue of one disk. Any thread.
#[derive(Debug, Default)]
pub struct Events(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    /// The number of the next event.
    next: u64,
    last: VecDeque<Event>,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Emits an event.
    pub fn emit(&self, kind: &'static str, text: impl Into<String>) {
        self.emit_with(kind, text, Vec::new());
    }

    /// Emits an event with further fields, which programs read.
    pub fn emit_with(
        &self,
        kind: &'static str,
        text: impl Into<String>,
        fields: Vec<(&'static str, String)>,
    ) {
        let (at, text) = (SystemTime::now(), text.into());
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        if queue.last.len() == QUEUE_MAX {
            queue.last.pop_front();
        }
        queue.last.push_back(Event { number, at, kind, text, fields });
    }

    /// The number of the next event: where a reader of what happens from now on begins.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.lock().next
    }

    /// The events from a number on.
    ///
    /// * `from`: where the reader left off.
    /// * `max`: most events.
    #[must_use]
    pub fn read(&self, from: u64, max: usize) -> Batch {
        let queue = self.lock();
        let oldest = queue.last.front().map_or(queue.next, |event| event.number);
        let events: Vec<Event> =
            queue.last.iter().filter(|event| event.number >= from).take(max).cloned().collect();
        let next = events.last().map_or(queue.next.max(from), |event| event.number + 1);
        Batch { events, lost: oldest.saturating_sub(from), next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_reader_loses_the_oldest_events_and_is_told_how_many() {
        let events = Events::default();
        assert_eq!(events.read(0, 10), Batch::default());
        for number in 0..QUEUE_MAX + 5 {
            events.emit("io-error", number.to_string());
        }
        let first = events.read(0, 2);
        assert_eq!((first.lost, first.next), (5, 7));
        assert_eq!(first.events[0].text, "5");
        let rest = events.read(first.next, usize::MAX);
        assert_eq!((rest.lost, rest.events.len()), (0, QUEUE_MAX - 2));
        assert_eq!(rest.next, events.next());
        let none = events.read(rest.next, 10);
        assert_eq!((none.events.len(), none.lost, none.next), (0, 0, events.next()));
    }
}
