//! What all queue threads of a mount know together: the entries, where they belong, and how far the
//! start has come.
//!
//! Promises: shared by atomics, without a lock; entries and plan do not change once the threads
//! run, and buffers are made once, before any entry is given to the kernel. A request allocates
//! nothing here.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ringdisk_ring::Errno;

use super::balance::Balances;
use super::memory::{EntryMemory, Frame};
use super::mode::{Moved, Opens, RingMode, ZeroCopy};
use super::ownership::{Outcome, Ownership};
use super::plan::Plan;
use super::policy::Stay;
use super::pool::{Pool, PoolUses};
use crate::placement::Placement;
use ringdisk_export::stats::QueueCells;

/// One entry.
#[derive(Debug)]
pub(super) struct Entry {
    /// Queue of the kernel.
    pub(super) queue: u16,
    /// Number inside that queue.
    pub(super) number: usize,
    pub(super) memory: EntryMemory,
    pub(super) ownership: Ownership,
}

/// Shared by the queue threads of a mount.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(super) plan: Plan,
    pub(super) entries: Vec<Entry>,
    balances: Balances,
    outcome: Outcome,
    draining: AtomicBool,
    /// Buffers of the queues; none: each entry has its own.
    pool: OnceLock<Arc<Pool>>,
    opens: Opens,
    /// What the kernel is made to refuse.
    pub(super) refuses: Option<Refuse>,
}

/// What is done wrong on purpose, for tests of what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refuse {
    /// The last queue has a number that there is not.
    LastRing,
    /// The same for one entry, by its number among all.
    Entry(usize),
    /// The pools of this mode are too short.
    Pools(RingMode),
    /// The reply of each entry that comes after so many good ones names a queue that there is not.
    ReplyAfter(u32),
}

impl Rings {
    /// * `payload_bytes`: largest READ or WRITE.
    /// * `stay`: where entries stay; `None`: they move with the load.
    /// * `zero_copy`: which opens shall be.
    pub(crate) fn new(
        plan: Plan,
        placement: &Placement,
        payload_bytes: usize,
        stay: Option<Stay>,
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
                ownership: Ownership::new(),
            }));
        }
        Rings {
            plan,
            entries,
            balances: Balances::new(placement, stay),
            outcome: Outcome::new(),
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

    /// Gives the queues buffers. Once, before any entry is given to the kernel. Arguments: see
    /// [`Pool::new`]. False: there is none.
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
    ///
    /// * `opener`: user id of the caller.
    pub(super) fn opens_zero_copy(&self, opener: u32) -> bool {
        if self.mode() != RingMode::ZeroCopy {
            return false;
        }
        let moved = self.balances.peers().iter().fold(Moved::default(), |sum, (_, cells)| Moved {
            requests: sum.requests + cells.reads.get() + cells.writes.get(),
            bytes: sum.bytes + cells.read_bytes.get() + cells.write_bytes.get(),
        });
        self.opens.are_zero_copy(moved, opener)
    }

    /// Entries of all queues.
    pub(crate) fn entry_count(&self) -> usize {
        self.entries.len()
    }

    /// Entries that may be with a thread at once: of its own queues, and of those of threads near
    /// by.
    pub(crate) fn entries_of(&self, thread: usize) -> usize {
        let near = self.plan.0.iter().filter(|queue| self.balances.may_come(queue.thread, thread));
        near.map(|queue| queue.entries).sum()
    }

    /// Names the rings of all threads. Once, before any of them serves.
    pub(crate) fn set_peers(&self, peers: Vec<(RawFd, Arc<QueueCells>)>) {
        self.balances.set_peers(peers);
    }

    pub(super) fn ring_fd(&self, thread: usize) -> Option<RawFd> {
        self.balances.peers().get(thread).map(|(fd, _)| *fd)
    }

    /// The thread of the queue of an entry.
    fn home_of(&self, index: usize) -> usize {
        self.plan.0[usize::from(self.entries[index].queue)].thread
    }

    /// The thread that shall serve the next request of an entry.
    pub(super) fn place_of(&self, index: usize) -> usize {
        self.balances.place_of(self.home_of(index), self.entries[index].number)
    }

    /// Whether a thread may leave its CPU. One load.
    pub(crate) fn is_free(&self, thread: usize) -> bool {
        self.balances.is_free(thread)
    }

    /// A request of an entry begins on `thread`: looks at the load when it is time.
    ///
    /// * `now`: nanoseconds.
    /// * `turn`: turns of the thread's loop so far.
    pub(crate) fn look(&self, index: usize, thread: usize, now: u64, turn: u64) {
        self.balances.look(self.home_of(index), thread, now, turn);
    }

    /// An entry was refused. False: the mount is live and has to end.
    pub(super) fn fail(&self, errno: Errno) -> bool {
        self.outcome.fail(errno.raw_os_error())
    }

    /// Why the mount cannot go live.
    pub(super) fn failure(&self) -> Option<Errno> {
        self.outcome.failure().map(Errno::from_raw_os_error)
    }

    /// Requests travel in the rings from now on. Errors: what an entry was refused with.
    pub(super) fn go_live(&self) -> Result<(), Errno> {
        self.outcome.go_live().map_err(Errno::from_raw_os_error)
    }

    /// No request is served any more; those that come wait for the end of the connection.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}
