//! A group: the rates that its members share.
//!
//! Promises: its limits can change while requests wait; those that wait are judged by the new ones
//! at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Instant;

use crate::Limits;
use crate::queue::Queue;
use crate::shared::{Shared, lock};

/// The rates that some disks share, or that one disk has.
#[derive(Debug)]
pub struct Group {
    limits: Mutex<Limits>,
    pub(crate) shared: Shared,
    /// Requests that wait: reads, writes.
    pub(crate) queues: [Mutex<Queue>; 2],
    start: Instant,
    members: AtomicUsize,
}

impl Group {
    /// A group without members.
    #[must_use]
    pub fn new(limits: &Limits) -> Arc<Group> {
        let group = Group {
            limits: Mutex::default(),
            shared: Shared::default(),
            queues: [Mutex::default(), Mutex::default()],
            start: Instant::now(),
            members: AtomicUsize::new(0),
        };
        group.set(limits);
        Arc::new(group)
    }

    /// The limits in force. Control thread.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *lock(&self.limits)
    }

    /// Sets other limits; what was used before is forgotten. Control thread.
    pub fn set(&self, limits: &Limits) {
        let mut current = lock(&self.limits);
        self.shared.set(limits);
        *current = *limits;
        drop(current);
        self.ask_again();
    }

    /// Has the requests that wait judged again.
    pub(crate) fn ask_again(&self) {
        for queue in &self.queues {
            let wakers = lock(queue).wakers();
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// The number of a new member.
    pub(crate) fn next_number(&self) -> usize {
        self.members.fetch_add(1, Ordering::Relaxed)
    }

    /// Nanoseconds since the start of the group.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
