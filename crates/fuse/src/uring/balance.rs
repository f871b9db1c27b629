//! Where each queue thread is, and where its entries are: what the rule ([`super::policy`]) decides, and what it sees.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::policy::{Load, Policy, Spot, Stay, Step, WINDOW_NS};
use crate::placement::Placement;
use crate::stats::QueueCells;

/// Nobody waits longer for a trial to end: its client may be gone.
const TRIAL_NS_MAX: u64 = 6 * WINDOW_NS;
/// How long what a trial has found out is good for a thread that begins again.
const LEARNED_NS: u64 = 1_000_000_000;
/// The lowest bits of what was learned are a [`Spot`], the others a time.
const SPOT_BITS: u32 = 2;

/// One queue thread. In cache lines of its own: threads of different nodes write different ones.
#[derive(Debug)]
#[repr(align(128))]
struct Balance {
    /// Threads that its entries may move to.
    near: [usize; 2],
    /// The one of them that was chosen last.
    beside: AtomicUsize,
    /// A [`Spot`].
    spot: AtomicU8,
    /// When the next look is due, nanoseconds.
    due: AtomicU64,
    /// It is in a trial until this moment at most, nanoseconds.
    trying: AtomicU64,
    policy: Mutex<Policy>,
}

/// All queue threads of a mount.
#[derive(Debug)]
pub(super) struct Balances {
    threads: Vec<Balance>,
    /// The last verdict of any thread: spot and nanoseconds.
    learned: AtomicU64,
    /// Ring descriptor and counters of each thread.
    peers: OnceLock<Vec<(RawFd, Arc<QueueCells>)>>,
}

impl Balances {
    /// * `stay`: where all stay; `None`: they move with the load.
    pub(super) fn new(placement: &Placement, stay: Option<Stay>) -> Balances {
        let can_move = placement.threads.len() > 1;
        let stay = stay.filter(|_| can_move).map(Stay::spot);
        let balance = |near: &[usize; 2]| Balance {
            near: *near,
            beside: AtomicUsize::new(near[0]),
            spot: AtomicU8::new(stay.unwrap_or_default() as u8),
            due: AtomicU64::new(0),
            trying: AtomicU64::new(0),
            policy: Mutex::new(Policy::new(can_move, stay)),
        };
        Balances {
            threads: placement.beside.iter().map(balance).collect(),
            learned: AtomicU64::new(0),
            peers: OnceLock::new(),
        }
    }

    /// Names the rings of all threads. Once, before any of them serves.
    pub(super) fn set_peers(&self, peers: Vec<(RawFd, Arc<QueueCells>)>) {
        let _ = self.peers.set(peers);
    }

    pub(super) fn peers(&self) -> &[(RawFd, Arc<QueueCells>)] {
        self.peers.get().map_or(&[], Vec::as_slice)
    }

    fn spot(&self, thread: usize) -> Spot {
        Spot::from(self.threads[thread].spot.load(Ordering::Relaxed))
    }

    /// The thread that shall serve an entry. Two loads.
    ///
    /// * `home`: the thread of its queue.
    /// * `number`: of the entry inside its queue.
    pub(super) fn place_of(&self, home: usize, number: usize) -> usize {
        let is_away = match self.spot(home) {
            Spot::Home | Spot::Free => false,
            Spot::Split => number % 2 == 1,
            Spot::Away => true,
        };
        if is_away { self.threads[home].beside.load(Ordering::Relaxed) } else { home }
    }

    /// Whether a thread may run where the scheduler wants. One load.
    pub(super) fn is_free(&self, thread: usize) -> bool {
        self.spot(thread) == Spot::Free
    }

    /// Whether entries of `home` may come to `thread`.
    pub(super) fn may_come(&self, home: usize, thread: usize) -> bool {
        home == thread || self.threads[home].near.contains(&thread)
    }

    /// A request of a queue begins: looks at the load when it is time.
    ///
    /// * `home`: the thread of the queue.
    /// * `thread`, `turn`: the one that serves the request, and the turns of its loop so far.
    /// * `now`: nanoseconds.
    pub(super) fn look(&self, home: usize, thread: usize, now: u64, turn: u64) {
        let balance = &self.threads[home];
        if now < balance.due.load(Ordering::Relaxed) {
            return;
        }
        // Somebody else is looking: that will do.
        let Ok(mut policy) = balance.policy.try_lock() else { return };
        if now < balance.due.load(Ordering::Relaxed) {
            return;
        }
        balance.due.store(now + WINDOW_NS, Ordering::Relaxed);
        let mut load =
            Load { now, turns: turn, thread, begin: self.learned(now), ..Load::default() };
        let peers = self.peers();
        let beside = balance.beside.load(Ordering::Relaxed);
        for cells in [home, beside].iter().filter_map(|thread| peers.get(*thread)) {
            load.requests += cells.1.requests.get();
            load.bytes += cells.1.read_bytes.get() + cells.1.write_bytes.get();
        }
        let is_trying = |thread: usize| self.threads[thread].trying.load(Ordering::Relaxed) > now;
        load.must_wait = beside != home && is_trying(beside);
        load.own = peers.get(thread).map_or(0, |peer| peer.1.requests.get());
        let step = policy.step(&load);
        if step == Step::Same {
            return;
        }
        let spot = policy.spot();
        if step == Step::Moved && spot == Spot::Split {
            self.choose_beside(balance);
        }
        balance.spot.store(spot as u8, Ordering::Relaxed);
        let until = if step == Step::Moved { now + TRIAL_NS_MAX } else { 0 };
        balance.trying.store(until, Ordering::Relaxed);
        if step == Step::Judged {
            self.learned.store(now << SPOT_BITS | spot as u64, Ordering::Relaxed);
        }
        tracing::trace!(thread = home, ?spot, ?step, ?policy, "placement");
    }

    /// Of the threads near by the one with fewer requests at this moment.
    fn choose_beside(&self, balance: &Balance) {
        let peers = self.peers();
        let busy = |thread: &&usize| peers.get(**thread).map_or(0, |peer| peer.1.in_flight.get());
        if let Some(thread) = balance.near.iter().min_by_key(busy) {
            balance.beside.store(*thread, Ordering::Relaxed);
        }
    }

    /// Where a thread begins.
    fn learned(&self, now: u64) -> Spot {
        let learned = self.learned.load(Ordering::Relaxed);
        let is_fresh = now.saturating_sub(learned >> SPOT_BITS) < LEARNED_NS;
        if learned == 0 || !is_fresh {
            return Spot::Home;
        }
        // Two bits.
        Spot::from((learned & ((1 << SPOT_BITS) - 1)) as u8)
    }
}
