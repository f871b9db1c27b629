//! Whether an export is used ([`crate::NbdOptions::idle_exit`]).
//!
//! Promises: only clients that have come to their first request count, so that a program that asks
//! what is exported neither keeps the export nor ends it; the count is shared by all queue threads.
//! No part of a request.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Clients in their transmission phase.
#[derive(Debug)]
pub(crate) struct Idle {
    /// The export ends when there was none for so long; `None`: never.
    pub(crate) limit: Option<Duration>,
    clients: AtomicUsize,
    came: AtomicUsize,
}

impl Idle {
    pub(crate) fn new(limit: Option<Duration>) -> Idle {
        Idle { limit, clients: AtomicUsize::new(0), came: AtomicUsize::new(0) }
    }

    /// A client has come.
    pub(crate) fn begin(&self) {
        self.came.fetch_add(1, Ordering::AcqRel);
        self.clients.fetch_add(1, Ordering::AcqRel);
    }

    /// A client has gone. Gives whether it was the last one.
    pub(crate) fn end(&self) -> bool {
        self.clients.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Clients that have come so far.
    pub(crate) fn came(&self) -> usize {
        self.came.load(Ordering::Acquire)
    }

    /// Whether there is no client, and none has come since `came` was asked.
    pub(crate) fn is_since(&self, came: usize) -> bool {
        self.came() == came && self.clients.load(Ordering::Acquire) == 0
    }
}
