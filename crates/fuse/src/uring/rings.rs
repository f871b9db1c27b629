//! What all queue threads of a mount know together: the entries, where they belong, and how far the start has come.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use ringdisk_ring::Errno;

use super::memory::{EntryMemory, Frame};
use super::mode::{Moved, Opens, RingMode, ZeroCopy};
use super::plan::Plan;
use super::policy::{Load, Policy, Spot, WINDOW_NS};
use super::pool::{Pool, PoolUses};
use crate::stats::QueueCells;

/// One entry.
#[derive(Debug)]
pub(super) struct Entry {
    /// Queue of the kernel.
    pub(super) queue: u16,
    /// Number inside that queue.
    pub(super) number: usize,
    pub(super) memory: EntryMemory,
    /// It is on its way to another thread. Who does not find this set must not touch it: the message was not for us.
    pub(super) handed: AtomicBool,
}

/// Where the entries of one queue are. In cache lines of its own: threads of different nodes write different ones.
#[derive(Debug)]
#[repr(align(128))]
struct Balance {
    /// Thread at home, and the one beside it.
    threads: [usize; 2],
    /// A [`Spot`].
    spot: AtomicU8,
    /// When the next look is due, nanoseconds.
    due: AtomicU64,
    policy: Mutex<Policy>,
}

/// Shared by the queue threads of a mount.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(super) plan: Plan,
    pub(super) entries: Vec<Entry>,
    balances: Vec<Balance>,
    /// Ring descriptor and counters of each thread.
    peers: OnceLock<Vec<(RawFd, Arc<QueueCells>)>>,
    /// First error of an entry before the mount went live; 0: none.
    failed: AtomicI32,
    live: AtomicBool,
    draining: AtomicBool,
    /// Buffers of the queues; none: each entry has its own.
    pool: OnceLock<Arc<Pool>>,
    opens: Opens,
    /// What the kernel is made to refuse: a mount of this mode, or the last queue of any.
    pub(super) refuses: Option<Refuse>,
}

/// What is done wrong on purpose, for tests of what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refuse {
    /// The last queue has a number that there is not.
    LastRing,
    /// The pools of this mode are too short.
    Pools(RingMode),
}

impl Rings {
    /// * `beside`: for each queue thread the one that its entries may move to.
    /// * `payload_bytes`: largest READ or WRITE.
    /// * `fixed`: entries never move.
    /// * `zero_copy`: which opens shall be.
    pub(crate) fn new(
        plan: Plan,
        beside: &[usize],
        payload_bytes: usize,
        fixed: bool,
        zero_copy: ZeroCopy,
    ) -> Rings {
        let mut entries = Vec::with_capacity(plan.entries());
        for (number, queue) in plan.0.iter().enumerate() {
            // The kernel numbers queues in 16 bits.
            let queue_number = u16::try_from(number).unwrap_or(u16::MAX);
            let memory = EntryMemory::of_queue(queue_number, queue.entries, payload_bytes);
            entries.extend(memory.into_iter().enumerate().map(|(number, memory)| Entry {
                queue: queue_number,
                number,
                memory,
                handed: AtomicBool::new(false),
            }));
        }
        let balance = |home: usize| Balance {
            threads: [home, beside.get(home).copied().unwrap_or(home)],
            spot: AtomicU8::new(Spot::Home as u8),
            due: AtomicU64::new(0),
            policy: Mutex::new(Policy::new(beside.len() > 1 && !fixed)),
        };
        let balances = plan.0.iter().map(|queue| balance(queue.thread)).collect();
        Rings {
            plan,
            entries,
            balances,
            peers: OnceLock::new(),
            failed: AtomicI32::new(0),
            live: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            pool: OnceLock::new(),
            opens: Opens::new(zero_copy),
            refuses: None,
        }
    }

    /// Makes the kernel refuse a step of the start. For tests of what follows.
    pub(crate) fn refusing(self, refuses: Option<Refuse>) -> Rings {
        Rings { refuses, ..self }
    }

    /// Gives the queues buffers. Once, before any entry is given to the kernel. Arguments: see [`Pool::new`]. False: there is none.
    pub(crate) fn make_pool(&self, asked: bool, buffer_bytes: usize, uses: PoolUses) -> bool {
        let pool = Pool::new(&self.plan, asked, buffer_bytes, uses);
        pool.is_some_and(|pool| self.pool.set(Arc::new(pool)).is_ok())
    }

    pub(crate) fn pool(&self) -> Option<&Arc<Pool>> {
        self.pool.get()
    }

    /// What these rings do.
    pub(crate) fn mode(&self) -> RingMode {
        match self.pool() {
            None => RingMode::Entries,
            Some(pool) if pool.zero_copy => RingMode::ZeroCopy,
            Some(_) => RingMode::Pools,
        }
    }

    /// The memory of an entry, for the calling thread.
    pub(super) fn frame(&self, index: usize) -> Frame {
        self.entries[index].memory.here(index, self.pool())
    }

    /// Whether the file that is being opened uses client pages. Control path.
    pub(super) fn opens_zero_copy(&self) -> bool {
        if self.mode() != RingMode::ZeroCopy {
            return false;
        }
        let peers = self.peers.get().map_or(&[][..], Vec::as_slice);
        let moved = peers.iter().fold(Moved::default(), |sum, (_, cells)| Moved {
            requests: sum.requests + cells.reads.get() + cells.writes.get(),
            bytes: sum.bytes + cells.read_bytes.get() + cells.write_bytes.get(),
        });
        self.opens.are_zero_copy(moved)
    }

    /// Entries of all queues.
    pub(crate) fn entry_count(&self) -> usize {
        self.entries.len()
    }

    /// Entries that may be with a thread at once: of its own queues, and of those that it is beside.
    pub(crate) fn entries_of(&self, thread: usize) -> usize {
        let queues = self.plan.0.iter().zip(&self.balances);
        let near = queues.filter(|(_, balance)| balance.threads.contains(&thread));
        near.map(|(queue, _)| queue.entries).sum()
    }

    /// Names the rings of all threads. Once, before any of them serves.
    pub(crate) fn set_peers(&self, peers: Vec<(RawFd, Arc<QueueCells>)>) {
        let _ = self.peers.set(peers);
    }

    pub(super) fn ring_fd(&self, thread: usize) -> Option<RawFd> {
        self.peers.get()?.get(thread).map(|(fd, _)| *fd)
    }

    /// The thread that shall serve the next request of an entry. One load.
    pub(super) fn place_of(&self, index: usize) -> usize {
        let entry = &self.entries[index];
        let balance = &self.balances[usize::from(entry.queue)];
        let away = match Spot::from(balance.spot.load(Ordering::Relaxed)) {
            Spot::Home => 0,
            Spot::Away => 1,
            Spot::Split => entry.number % 2,
        };
        balance.threads[away]
    }

    /// A request of an entry begins on `thread`: looks at the load when it is time.
    pub(crate) fn look(&self, index: usize, thread: usize, now: u64, turn: u64) {
        let balance = &self.balances[usize::from(self.entries[index].queue)];
        if now < balance.due.load(Ordering::Relaxed) {
            return;
        }
        // Somebody else is looking: that will do.
        let Ok(mut policy) = balance.policy.try_lock() else { return };
        if now < balance.due.load(Ordering::Relaxed) {
            return;
        }
        balance.due.store(now + WINDOW_NS, Ordering::Relaxed);
        let mut load = Load { now, turns: turn, thread, ..Load::default() };
        let peers = self.peers.get().map_or(&[][..], Vec::as_slice);
        for cells in balance.threads.iter().filter_map(|thread| peers.get(*thread)) {
            load.requests += cells.1.requests.get();
            load.bytes += cells.1.read_bytes.get() + cells.1.write_bytes.get();
        }
        let own = peers.get(thread).map_or(0, |peer| peer.1.requests.get());
        policy.step(&Load { own, ..load });
        balance.spot.store(policy.spot() as u8, Ordering::Relaxed);
    }

    /// An entry was refused before the mount was live.
    pub(super) fn fail(&self, errno: Errno) {
        let _ = self.failed.compare_exchange(
            0,
            errno.raw_os_error(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }

    /// Why the mount cannot go live.
    pub(super) fn failure(&self) -> Option<Errno> {
        match self.failed.load(Ordering::Acquire) {
            0 => None,
            number => Some(Errno::from_raw_os_error(number)),
        }
    }

    pub(super) fn set_live(&self) {
        self.live.store(true, Ordering::Release);
    }

    /// Whether requests travel in the rings.
    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    /// No request is served any more; those that come wait for the end of the connection.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}
