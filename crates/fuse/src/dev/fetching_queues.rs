//! Decides which queues fetch requests, and whether they poll.
//!
//! All clones of /dev/fuse share one input queue, so any queue could take any request. Where it is
//! served decides more than anything else: a client that waits for each reply is served best on its
//! own CPU (waking an idle CPU costs tens of µs), or by a queue that polls on another; one that
//! keeps many requests in flight is served best from another CPU; many clients or large requests
//! keep several queues busy. No fixed choice wins everywhere, so the choice is tried and measured
//! ([`Policy`]).
//!
//! Promises: one queue thread at a time takes a step, and none waits for another; a wrong choice
//! costs speed and nothing else.
//!
//! The state is shared by all queues; a request reads one word of it, and one queue at a time makes
//! a step, every 2 ms under load.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::policy::{Load, Mode, Policy, WINDOW_NS};
use ringdisk_export::stats::QueueCells;

pub(super) const MESSAGE_UPDATE: u32 = 1;
pub(super) const MESSAGE_LOOK_AGAIN: u32 = 2;

/// All queues fetch.
const ALL: u64 = 1 << 32;
const QUEUE_MASK: u64 = ALL - 1;
/// How long the fetching queues poll, in µs, from this bit on.
const POLLS_SHIFT: u32 = 40;

/// How long a queue whose requests travel in rings polls while one of them is with the storage:
/// what a fast disk takes, and two wake-ups. A thread learns for itself whether that pays
/// ([`ringdisk_ring::SpinPolicy`]).
const STORAGE_POLL: Duration = Duration::from_micros(200);
/// Nanoseconds between the steps of a restless place: a few requests.
const RESTLESS_WINDOW_NS: u64 = 50_000;

/// Shared by the queues of an export.
#[derive(Debug)]
pub(crate) struct Place {
    mode: AtomicU64,
    changes: AtomicU64,
    /// When the next step is due, nanoseconds of the clock of the export.
    due: AtomicU64,
    /// Nanoseconds between steps.
    window: u64,
    /// No queue fetches any more.
    draining: AtomicBool,
    /// Requests travel in rings: requests over `/dev/fuse` are rare.
    settled: AtomicBool,
    policy: Mutex<Policy>,
    /// Ring descriptors and counters of all queues, set once all run.
    peers: OnceLock<Vec<(RawFd, Arc<QueueCells>)>>,
}

impl Place {
    /// For `queues` queues, at least 1.
    pub(crate) fn new(queues: usize) -> Place {
        Place::with_policy(Policy::new(queues), WINDOW_NS)
    }

    /// A place that changes all the time: for tests.
    pub(crate) fn restless(queues: usize) -> Place {
        Place::with_policy(Policy::restless(queues), RESTLESS_WINDOW_NS)
    }

    fn with_policy(policy: Policy, window: u64) -> Place {
        Place {
            window,
            mode: AtomicU64::new(encode(policy.mode())),
            changes: AtomicU64::new(0),
            due: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            policy: Mutex::new(policy),
            peers: OnceLock::new(),
        }
    }

    /// Names all queues, in the order of their numbers. Once, before any of them serves.
    pub(crate) fn set_peers(&self, peers: Vec<(RawFd, Arc<QueueCells>)>) {
        let _ = self.peers.set(peers);
    }

    /// From now on no queue fetches; those that run must be woken to see it.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Queues fetch again as before [`Place::drain`]; those that run must be woken to see it.
    pub(crate) fn resume(&self) {
        self.draining.store(false, Ordering::Release);
    }

    /// Whether no queue fetches any more.
    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// From now on the first queue fetches, all may poll for storage, and nothing is measured;
    /// those that run must be woken to see it.
    pub(crate) fn settle(&self) {
        self.settled.store(true, Ordering::Release);
        self.due.store(u64::MAX, Ordering::Relaxed);
    }

    pub(super) fn fetches(&self, queue: usize) -> bool {
        if self.is_draining() {
            return false;
        }
        if self.is_settled() {
            return queue == 0;
        }
        let mode = self.mode.load(Ordering::Acquire);
        mode & ALL != 0 || mode & QUEUE_MASK == queue as u64
    }

    /// Whether requests travel in rings.
    pub(super) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire)
    }

    /// How long queues poll before they sleep.
    pub(super) fn polls(&self) -> Duration {
        if self.is_settled() {
            return STORAGE_POLL;
        }
        Duration::from_micros(self.mode.load(Ordering::Acquire) >> POLLS_SHIFT)
    }

    /// Number of changes so far.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Ring descriptors of all queues but `queue`.
    pub(super) fn others(&self, queue: usize) -> impl Iterator<Item = RawFd> + '_ {
        let peers = self.peers.get().map_or(&[][..], Vec::as_slice);
        peers.iter().enumerate().filter(move |(index, _)| *index != queue).map(|(_, (fd, _))| *fd)
    }

    /// Whether a step is due. One shared word, seldom written.
    pub(super) fn is_due(&self, now: u64) -> bool {
        now >= self.due.load(Ordering::Relaxed)
    }

    /// Looks at the load, and changes the mode if that promises more. Returns whether it did.
    /// Queues that come while another is here go on at once.
    pub(super) fn step(&self, now: u64) -> bool {
        let Ok(mut policy) = self.policy.try_lock() else { return false };
        if !self.is_due(now) {
            return false;
        }
        self.due.store(now + self.window, Ordering::Relaxed);
        let mut load = Load { now, ..Load::default() };
        for (_, cells) in self.peers.get().into_iter().flatten() {
            load.requests += cells.requests.get();
            load.bytes += cells.read_bytes.get() + cells.write_bytes.get();
        }
        policy.step(&load);
        self.publish(policy.mode())
    }

    /// A fetching queue has no entry left: all must fetch. Returns whether that is a change.
    pub(super) fn exhausted(&self) -> bool {
        if self.settled.load(Ordering::Acquire) || self.mode.load(Ordering::Acquire) & ALL != 0 {
            return false;
        }
        // Rare: the first time that a queue runs out of entries. The thread with the lock is done
        // in well under a microsecond.
        let mut policy = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        policy.spread();
        self.publish(policy.mode())
    }

    fn publish(&self, mode: Mode) -> bool {
        let mode = encode(mode);
        if self.mode.swap(mode, Ordering::AcqRel) == mode {
            return false;
        }
        self.changes.fetch_add(1, Ordering::AcqRel);
        true
    }
}

fn encode(mode: Mode) -> u64 {
    let queue = mode.queue.map_or(ALL, |queue| queue as u64 & QUEUE_MASK);
    let polls_us = u64::try_from(mode.polls.cap().as_micros()).unwrap_or(0);
    queue | polls_us << POLLS_SHIFT
}
