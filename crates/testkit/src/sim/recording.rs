//! What is recorded of a simulated storage.
//!
//! Promises: plain values.

use super::image::Image;
use super::operation::Change;

/// Something that took effect.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Change(Change),
    /// Covers the changes with smaller numbers.
    Flush {
        before: u64,
    },
}

/// What was recorded.
#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(super) start: Image,
    pub(super) first_change: u64,
    pub(crate) events: Vec<Event>,
}
