//! Warnings of the code under test: what a failure costs is said there where nothing is lost but space.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, set_default};
use tracing::{Event, Level, Metadata, Subscriber};

/// The messages of one thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Takes the warnings of this thread until the answer is dropped.
    pub(crate) fn watch(&self) -> DefaultGuard {
        set_default(self.clone())
    }

    /// Whether this was said.
    pub(crate) fn has(&self, message: &str) -> bool {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.iter().any(|each| each == message)
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Message(self));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Finds the message among the fields of an event.
struct Message<'a>(&'a Warnings);

impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            let mut said = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            said.push(format!("{value:?}"));
        }
    }
}
