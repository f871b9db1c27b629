//! Where each queue thread is, and where its entries are: what the rule ([`super::policy`])
//! decides, and what it sees.
//!
//! Promises: queue threads; a request costs a few atomic loads, and one look at the load in each
//! window. Never allocates or blocks: a look that another thread has begun is left to it. A wrong
//! choice costs speed and nothing else.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::policy::{Load, Policy, Spot, Stay, Step, WINDOW_NS};
use crate::placement::Placement;
use ringdisk_export::stats::QueueCells;

/// Others wait so long after the last look of a thread that is in a trial: its client may be gone.
const TRIAL_NS: u64 = 6 * WINDOW_NS;
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
    /// Threads whose requests it sees, or that see its own.
    others: Vec<usize>,
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
        let all = &placement.beside;
        let others = |thread: usize| {
            let is_other = |other: &usize| {
                *other != thread && (all[thread].contains(other) || all[*other].contains(&thread))
            };
            (0..all.len()).filter(is_other).collect()
        };
        let balance = |(thread, near): (usize, &[usize; 2])| Balance {
            near: *near,
            others: others(thread),
            beside: AtomicUsize::new(near[0]),
            spot: AtomicU8::new(stay.unwrap_or_default() as u8),
            due: AtomicU64::new(0),
            trying: AtomicU64::new(0),
            policy: Mutex::new(Policy::new(can_move, stay)),
        };
        Balances {
            threads: all.iter().enumerate().map(balance).collect(),
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
        // Another thread is looking: that will do.
        let Ok(mut policy) = balance.policy.try_lock() else { return };
        if now < balance.due.load(Ordering::Relaxed) {
            return;
        }
        balance.due.store(now + WINDOW_NS, Ordering::Relaxed);
        let is_trying = |other: &usize| self.threads[*other].trying.load(Ordering::Relaxed) > now;
        let cells = self.peers().get(thread).map(|peer| &peer.1);
        let seen = Load {
            now,
            turns: turn,
            thread,
            own: cells.map_or(0, |cells| cells.requests.get()),
            own_ns: cells.map_or(0, |cells| cells.waited_ns.get()),
            begin: self.learned(now),
            must_wait: balance.others.iter().any(is_trying),
            ..Load::default()
        };
        let step = policy.step(&self.totals(seen, home));
        let until = if policy.is_trying() { now + TRIAL_NS } else { 0 };
        balance.trying.store(until, Ordering::Relaxed);
        if step == Step::Same {
            return;
        }
        let spot = policy.spot();
        if step == Step::Moved && spot == Spot::Split {
            self.choose_beside(balance);
            // Another thread beside has other totals.
            policy.begin_window(&self.totals(seen, home));
        }
        balance.spot.store(spot as u8, Ordering::Relaxed);
        if step == Step::Judged {
            self.learned.store(now << SPOT_BITS | spot as u64, Ordering::Relaxed);
        }
        tracing::trace!(thread = home, ?spot, ?step, ?policy, "placement");
    }

    /// `seen` with the requests and bytes of a thread and the one beside it.
    fn totals(&self, seen: Load, home: usize) -> Load {
        let beside = self.threads[home].beside.load(Ordering::Relaxed);
        let both = [Some(home), Some(beside).filter(|beside| *beside != home)];
        let mut load = seen;
        for (_, cells) in both.into_iter().flatten().filter_map(|thread| self.peers().get(thread)) {
            load.requests += cells.requests.get();
            load.bytes += cells.read_bytes.get() + cells.write_bytes.get();
        }
        load
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
