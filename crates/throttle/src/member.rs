//! A disk in a group: its requests wait, or are let go on.
//!
//! Promises: where no limit is set a request reads one word; one that need not wait takes no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;

use crate::Kind;
use crate::group::Group;
use crate::wait::Wait;

/// A disk in a group.
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    /// Of this member in the group.
    number: usize,
    /// How often the limits are lifted.
    lifts: AtomicUsize,
    waited: AtomicU64,
    waited_nanos: AtomicU64,
    waiting: AtomicUsize,
}

/// The limits of a member are lifted while it is there.
#[derive(Debug)]
pub struct Lifted(Arc<Member>);

impl Drop for Lifted {
    fn drop(&mut self) {
        self.0.lifts.fetch_sub(1, Ordering::Release);
    }
}

/// How often and how long requests of a member waited for the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Requests that had to wait.
    pub requests: u64,
    /// Time that they waited, all together.
    pub time: Duration,
    /// Requests that wait at this moment.
    pub now: usize,
}

impl Member {
    /// A new member of a group.
    #[must_use]
    pub fn of(group: &Arc<Group>) -> Arc<Member> {
        Arc::new(Member {
            group: Arc::clone(group),
            number: group.next_number(),
            lifts: AtomicUsize::new(0),
            waited: AtomicU64::new(0),
            waited_nanos: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        })
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Waits until the limits let a request go on. Queue thread. A request that is dropped
    /// meanwhile has used nothing.
    #[inline]
    pub async fn pass(&self, ring: &Ring, kind: Kind, bytes: u64) {
        if self.group.shared.holds(kind) {
            self.pass_limits(ring, kind, bytes).await;
        }
    }

    async fn pass_limits(&self, ring: &Ring, kind: Kind, bytes: u64) {
        let shared = &self.group.shared;
        if self.is_lifted() {
            shared.count(self.group.now(), kind, bytes);
            return;
        }
        let is_alone = shared.waiting[kind as usize].load(Ordering::Relaxed) == 0;
        if is_alone && shared.take(self.group.now(), kind, bytes).is_ok() {
            return;
        }
        let began = Instant::now();
        let waiting = Waiting::new(&self.waiting);
        Wait::new(&self.group, (self.number, &self.lifts), ring, (kind, bytes)).await;
        drop(waiting);
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.waited_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Lets all requests of this member go on, those that wait and later ones, until the guard is
    /// dropped: for a stop and a hand-over. They count all the same, so later ones pay for them.
    /// Any thread.
    #[must_use]
    pub fn lift(self: &Arc<Member>) -> Lifted {
        self.lifts.fetch_add(1, Ordering::Release);
        self.group.ask_again();
        Lifted(Arc::clone(self))
    }

    pub(crate) fn is_lifted(&self) -> bool {
        self.lifts.load(Ordering::Acquire) > 0
    }

    /// How much requests waited until now. Any thread.
    #[must_use]
    pub fn waits(&self) -> Waits {
        Waits {
            requests: self.waited.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.waited_nanos.load(Ordering::Relaxed)),
            now: self.waiting.load(Ordering::Relaxed),
        }
    }
}

/// Counts a request while it waits, also one that is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl Waiting<'_> {
    fn new(count: &AtomicUsize) -> Waiting<'_> {
        count.fetch_add(1, Ordering::Relaxed);
        Waiting(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
