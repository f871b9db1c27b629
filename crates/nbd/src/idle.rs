//! Ends an export that nobody uses ([`crate::NbdOptions::idle_exit`]).
//!
//! Promises: only clients that have come to their first request count, so that a program that asks
//! what is exported neither keeps the export nor ends it; the count is shared by all queue threads.
//! No part of a request.

use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::queue::Queue;

/// Clients in their transmission phase.
#[derive(Debug)]
pub(crate) struct Idle {
    limit: Option<Duration>,
    clients: AtomicUsize,
    /// Clients that have come so far.
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
}

/// A client has gone: if it was the last one, the export ends unless another one comes in time.
pub(crate) fn client_has_gone(queue: &Rc<Queue>) {
    if queue.shared.idle.clients.fetch_sub(1, Ordering::AcqRel) == 1 {
        watch(queue);
    }
}

/// Nobody has come yet: the export ends unless somebody does in time. Where the limit is zero it
/// waits for the first client however long that takes.
pub(crate) fn nobody_has_come(queue: &Rc<Queue>) {
    if queue.shared.idle.limit.is_some_and(|limit| !limit.is_zero()) {
        watch(queue);
    }
}

fn watch(queue: &Rc<Queue>) {
    let Some(limit) = queue.shared.idle.limit else { return };
    let (queue, ring) = (Rc::clone(queue), queue.ring.clone());
    ring.spawn(async move {
        let idle = &queue.shared.idle;
        let came = idle.came.load(Ordering::Acquire);
        if !limit.is_zero() {
            queue.ring.sleep(limit).await;
        }
        let nobody_came = idle.came.load(Ordering::Acquire) == came;
        if nobody_came && idle.clients.load(Ordering::Acquire) == 0 {
            queue.ending.stopped();
        }
    });
}
