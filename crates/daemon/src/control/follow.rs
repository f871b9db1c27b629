//! Events of a disk, as lines for a client that follows them.
//!
//! Promises: what a follower has not taken stays in the disk's queue, which is bounded: a client
//! that reads nothing loses events and is told how many. Control thread.

use std::time::UNIX_EPOCH;

use ringdisk_disk::{Event, Events};
use serde_json::{Value, json};
use std::sync::Arc;

/// Events that are sent at once.
const BATCH: usize = 32;

/// The place of one client in the queue.
#[derive(Debug)]
pub struct Follower {
    events: Arc<Events>,
    next: u64,
}

impl Follower {
    /// From now on.
    pub fn new(events: Arc<Events>) -> Follower {
        let next = events.next();
        Follower { events, next }
    }

    /// The lines for what has happened since.
    pub fn take(&mut self) -> Vec<Value> {
        let batch = self.events.read(self.next, BATCH);
        self.next = batch.next;
        let lost = (batch.lost > 0).then(|| json!({ "event": "lost", "count": batch.lost }));
        lost.into_iter().chain(batch.events.iter().map(line)).collect()
    }
}

/// One event.
fn line(event: &Event) -> Value {
    let at = event.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut line = json!({
        "event": event.kind,
        "number": event.number,
        "time": { "seconds": at.as_secs(), "microseconds": at.subsec_micros() },
        "text": event.text,
    });
    for (name, value) in &event.fields {
        line[*name] = json!(value);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_gets_what_happens_from_now_on_and_hears_of_what_it_lost() {
        let events = Arc::new(Events::default());
        events.emit("io-error", "before");
        let mut follower = Follower::new(Arc::clone(&events));
        assert!(follower.take().is_empty());
        events.emit("disk-full", "a write failed");
        let lines = follower.take();
        assert_eq!((&lines[0]["event"], &lines[0]["number"]), (&json!("disk-full"), &json!(1)));
        for _ in 0..1000 {
            events.emit("io-error", "again");
        }
        let lines = follower.take();
        assert_eq!(lines[0], json!({ "event": "lost", "count": 1000 - ringdisk_disk::EVENTS_MAX }));
        assert_eq!(lines.len(), 1 + BATCH);
    }
}
