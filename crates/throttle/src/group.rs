//! A group: the rates that its members share.
//!
//! Promises: its limits can change while requests wait; those that wait are judged by the new ones
//! at once. Who watches it hears of each change.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Instant;

use crate::buckets::{Shared, lock};
use crate::queue::Queue;
use crate::{Changed, Limits};

/// Gets a group whose limits were changed.
pub type Watch = Box<dyn Fn(&Group) + Send + Sync>;

/// The rates that some disks share, or that one disk has.
pub struct Group {
    limits: Mutex<Limits>,
    /// Those that it began with.
    begun: Mutex<Limits>,
    watches: Mutex<Vec<Watch>>,
    pub(crate) shared: Shared,
    /// Requests that wait: reads, writes.
    pub(crate) queues: [Mutex<Queue>; 2],
    start: Instant,
    members: AtomicUsize,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Group");
        out.field("limits", &self.limits).field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Group {
    /// A group without members.
    #[must_use]
    pub fn new(limits: &Limits) -> Arc<Group> {
        let group = Group {
            limits: Mutex::default(),
            begun: Mutex::default(),
            watches: Mutex::default(),
            shared: Shared::default(),
            queues: [Mutex::default(), Mutex::default()],
            start: Instant::now(),
            members: AtomicUsize::new(0),
        };
        group.begin(limits);
        Arc::new(group)
    }

    /// The limits in force. Control thread.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *lock(&self.limits)
    }

    /// Sets the limits that it begins with. Control thread, before a member is served.
    pub fn begin(&self, limits: &Limits) {
        *lock(&self.begun) = *limits;
        self.set(limits);
    }

    /// The limits that it began with. Control thread.
    #[must_use]
    pub fn begun(&self) -> Limits {
        *lock(&self.begun)
    }

    /// The limits, where they are others than at the beginning. Control thread.
    #[must_use]
    pub fn changed(&self) -> Option<Changed> {
        let (begun, now) = (self.begun(), self.limits());
        (begun != now).then_some(Changed { begun, now })
    }

    /// Takes the change of another process over. `false`: it began with other limits than this
    /// group. Control thread.
    pub fn follow(&self, changed: &Changed) -> bool {
        let is_same = self.begun() == changed.begun;
        if is_same {
            self.set(&changed.now);
        }
        is_same
    }

    /// Calls `watch` after each change of the limits. It must not call the group's methods that
    /// change it. Control thread.
    pub fn watch(&self, watch: Watch) {
        lock(&self.watches).push(watch);
    }

    /// Sets other limits; what was used before is forgotten. Control thread.
    pub fn set(&self, limits: &Limits) {
        let mut current = lock(&self.limits);
        self.shared.set(limits);
        *current = *limits;
        drop(current);
        self.ask_again();
        lock(&self.watches).iter().for_each(|watch| watch(self));
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
