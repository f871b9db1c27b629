//! What the code under test says about the compaction after a shrink: a failure in there costs only
//! space, so the warning is the only report of it. A failure anywhere else must not be
//! told that way.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_testkit::sim::SimStorage;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, set_default};
use tracing::{Event, Level, Metadata, Subscriber};

/// The compaction begins.
const BEGINS: &str = "metadata moves to the front of the image file";
/// It failed.
const NOT_SHORTER: &str = "the image file does not get shorter";

#[derive(Debug, Default)]
struct Seen {
    /// Number of the first operation of a compaction that runs.
    began: Option<u64>,
    /// Numbers of the operations of those that failed.
    failed: Vec<Range<u64>>,
}

/// The compactions of one thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings {
    storage: Option<SimStorage>,
    seen: Arc<Mutex<Seen>>,
}

impl Warnings {
    /// Takes what this thread says until the answer is dropped.
    ///
    /// * `storage`: the one whose operations are counted.
    pub(crate) fn watch(&mut self, storage: &SimStorage) -> DefaultGuard {
        self.storage = Some(storage.clone());
        set_default(self.clone())
    }

    /// Whether the warning was about this operation.
    pub(crate) fn tell_of(&self, operation: u64) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.failed.iter().any(|operations| operations.contains(&operation))
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message::default();
        event.record(&mut message);
        let next = || self.storage.as_ref().map_or(0, |storage| storage.log().len() as u64);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match message.0.as_str() {
            BEGINS => seen.began = Some(next()),
            NOT_SHORTER => {
                // What did not begin has no operations.
                let began = seen.began.take().unwrap_or(u64::MAX);
                seen.failed.push(began..next());
            }
            _ => {}
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}
