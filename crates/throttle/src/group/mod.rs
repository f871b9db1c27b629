//! A group: the rates that its members share.
//!
//! Promises: its limits can change while requests wait; those that wait are judged by the new ones
//! at once.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;

use crate::bucket::Bucket;
use crate::queue::Queue;
use crate::wait::Wait;
use crate::{Kind, Limits};

/// A bucket without a burst holds a tenth of a second of its rate, as in QEMU.
const SHARE: f64 = 0.1;
/// Each of the six rates has a bucket for its average and one for a burst that lasts.
const BUCKETS: usize = 12;

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

/// What a request looks at that need not wait. Queue threads.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    buckets: [Bucket; BUCKETS],
    /// The buckets that hold back reads, and those that hold back writes: a bit for each.
    held_by: [AtomicU16; 2],
    /// Requests in the queues: reads, writes.
    pub(crate) waiting: [AtomicUsize; 2],
    iops_size: AtomicU64,
}

/// A disk in a group.
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    /// Of this member in the group.
    pub(crate) number: usize,
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

    /// A new member.
    #[must_use]
    pub fn member(self: &Arc<Group>) -> Arc<Member> {
        Arc::new(Member {
            group: Arc::clone(self),
            number: self.members.fetch_add(1, Ordering::Relaxed),
            lifts: AtomicUsize::new(0),
            waited: AtomicU64::new(0),
            waited_nanos: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        })
    }

    /// The limits in force. Control thread.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *lock(&self.limits)
    }

    /// Sets other limits; what was used before is forgotten. Control thread.
    pub fn set(&self, limits: &Limits) {
        let mut current = lock(&self.limits);
        let mut held_by = [0_u16; 2];
        for (number, rate) in limits.rates().iter().enumerate() {
            if rate.average == 0 {
                continue;
            }
            let lasting = rate.burst_seconds.max(1) as f64;
            let size = match rate.burst {
                0 => rate.average as f64 * SHARE,
                burst => burst as f64 * lasting,
            };
            let mut bits = 1 << (2 * number);
            self.shared.buckets[2 * number].set(rate.average, size);
            if rate.burst_seconds > 1 {
                let burst = &self.shared.buckets[2 * number + 1];
                burst.set(rate.burst, rate.burst as f64 * SHARE);
                bits |= 2 << (2 * number);
            }
            for kind in [Kind::Read, Kind::Write] {
                if number % 3 == 0 || number % 3 == 1 + kind as usize {
                    held_by[kind as usize] |= bits;
                }
            }
        }
        self.shared.iops_size.store(limits.iops_size, Ordering::Relaxed);
        for (place, bits) in self.shared.held_by.iter().zip(held_by) {
            place.store(bits, Ordering::Release);
        }
        *current = *limits;
        drop(current);
        self.ask_again();
    }

    /// Has the requests that wait judged again.
    fn ask_again(&self) {
        for queue in &self.queues {
            let wakers = lock(queue).wakers();
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Nanoseconds since the start of the group.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Shared {
    /// Whether requests of a kind may have to wait.
    #[inline]
    fn holds(&self, kind: Kind) -> bool {
        self.held_by[kind as usize].load(Ordering::Relaxed) != 0
    }

    fn held_by(&self, kind: Kind) -> impl Iterator<Item = (usize, &Bucket)> {
        let bits = self.held_by[kind as usize].load(Ordering::Acquire);
        self.buckets.iter().enumerate().filter(move |(index, _)| bits & (1 << index) != 0)
    }

    /// Lets a request go on, or says how long it has to wait, nanoseconds.
    #[inline]
    pub(crate) fn take(&self, now: u64, kind: Kind, bytes: u64) -> Result<(), u64> {
        let wait = self.held_by(kind).map(|(_, bucket)| bucket.wait(now)).max().unwrap_or(0);
        if wait > 0 {
            return Err(wait);
        }
        self.count(now, kind, bytes);
        Ok(())
    }

    /// Counts a request that goes on.
    pub(crate) fn count(&self, now: u64, kind: Kind, bytes: u64) {
        let size = self.iops_size.load(Ordering::Relaxed);
        let requests = if size > 0 && bytes > size { bytes as f64 / size as f64 } else { 1.0 };
        for (index, bucket) in self.held_by(kind) {
            // The first six are of requests.
            bucket.add(now, if index < BUCKETS / 2 { requests } else { bytes as f64 });
        }
    }
}

impl Member {
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
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Wait::new(self, ring, kind, bytes).await;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.waited_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// A request does not wait any more. Queue thread.
    pub(crate) fn ends_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
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

/// A panic of another holder leaves the content valid, so poison is ignored.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
