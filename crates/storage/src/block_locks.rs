//! Keeps read-modify-write cycles apart from other writes to the same blocks.
//!
//! Promises: with O_DIRECT a write that does not fill whole blocks reads them, changes a part and
//! writes them back. A write to another part of such a block that ends in between would be lost. So
//! no other write runs in the blocks of a cycle.
//!
//! Aligned writes must not pay for that: they count themselves in a counter of their own thread (a
//! cache line that no other thread touches) and look at one flag that hardly ever changes. Only
//! while the flag is set, i.e. while a cycle waits or runs, writes go through a table of ranges.
//!
//! Called by ring threads; a pass may be dropped at any time, also when its future is. The fast
//! path allocates nothing and takes no lock; the slow one takes a mutex for a few instructions.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Counters; more threads than this share them, which costs time only.
const SHARDS: usize = 32;

/// A counter on a cache line of its own (two, since CPUs fetch them in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(AtomicUsize);

thread_local! {
    static SHARD: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, SeqCst) % SHARDS
    };
}

#[derive(Debug)]
pub(crate) struct BlockLocks {
    /// Writes on the fast path, by thread.
    shards: Box<[Shard]>,
    /// Set while the table is in use. The order of flag and counters is what makes it work: a
    /// write counts itself, then looks at the flag; a cycle sets the flag, then looks at the
    /// counters. All sequentially consistent, so one of the two sees the other.
    slow: AtomicBool,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    /// In order of arrival.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    start: u64,
    end: u64,
    exclusive: bool,
    waker: Option<Waker>,
}

impl Entry {
    fn conflicts(&self, other: &Entry) -> bool {
        (self.exclusive || other.exclusive) && self.start < other.end && other.start < self.end
    }
}

/// The right to write; ends when dropped.
#[derive(Debug)]
pub(crate) enum Pass<'a> {
    Fast { gate: &'a BlockLocks, shard: usize },
    Slow { gate: &'a BlockLocks, id: u64 },
}

impl BlockLocks {
    pub(crate) fn new() -> BlockLocks {
        BlockLocks {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            slow: AtomicBool::new(false),
            table: Mutex::new(Table::default()),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pass for an ordinary write, if no read-modify-write cycle waits or runs.
    pub(crate) fn try_shared(&self) -> Option<Pass<'_>> {
        let shard = SHARD.with(|shard| *shard);
        self.shards[shard].0.fetch_add(1, SeqCst);
        let pass = Pass::Fast { gate: self, shard };
        // Dropping the pass wakes the cycle that may have seen the count.
        (!self.slow.load(SeqCst)).then_some(pass)
    }

    /// A pass for an ordinary write of bytes `start..end`.
    pub(crate) async fn shared(&self, start: u64, end: u64) -> Pass<'_> {
        match self.try_shared() {
            Some(pass) => pass,
            None => self.slow(start, end, false).await,
        }
    }

    /// A pass for a read-modify-write cycle on bytes `start..end`: no other write runs there.
    pub(crate) async fn exclusive(&self, start: u64, end: u64) -> Pass<'_> {
        self.slow(start, end, true).await
    }

    async fn slow(&self, start: u64, end: u64, exclusive: bool) -> Pass<'_> {
        let pass = {
            let mut table = self.table();
            let id = table.next_id;
            table.next_id += 1;
            table.entries.push(Entry { id, start, end, exclusive, waker: None });
            self.slow.store(true, SeqCst);
            Pass::Slow { gate: self, id }
        };
        poll_fn(|cx| self.poll_granted(&pass, cx)).await;
        pass
    }

    fn poll_granted(&self, pass: &Pass<'_>, cx: &Context<'_>) -> Poll<()> {
        let Pass::Slow { id, .. } = pass else { return Poll::Ready(()) };
        let mut table = self.table();
        let Some(place) = table.entries.iter().position(|entry| entry.id == *id) else {
            debug_assert!(false, "a pass is in the table until it is dropped");
            return Poll::Ready(());
        };
        // The waker first: a fast pass that ends after its counter was read finds it.
        table.entries[place].waker = Some(cx.waker().clone());
        let (earlier, rest) = table.entries.split_at(place);
        let free = !earlier.iter().any(|entry| entry.conflicts(&rest[0]));
        // Fast passes carry no range. Once they are gone none starts while the flag is set.
        let drained =
            !rest[0].exclusive || self.shards.iter().all(|shard| shard.0.load(SeqCst) == 0);
        if free && drained {
            table.entries[place].waker = None;
            return Poll::Ready(());
        }
        Poll::Pending
    }

    fn wake_all(table: &mut Table) -> Vec<Waker> {
        table.entries.iter_mut().filter_map(|entry| entry.waker.take()).collect()
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let wakers = match *self {
            Pass::Fast { gate, shard } => {
                gate.shards[shard].0.fetch_sub(1, SeqCst);
                if !gate.slow.load(SeqCst) {
                    return;
                }
                BlockLocks::wake_all(&mut gate.table())
            }
            Pass::Slow { gate, id } => {
                let mut table = gate.table();
                table.entries.retain(|entry| entry.id != id);
                if table.entries.is_empty() {
                    gate.slow.store(false, SeqCst);
                }
                BlockLocks::wake_all(&mut table)
            }
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn ordinary_writes_do_not_use_the_table() {
        let gate = BlockLocks::new();
        let first = gate.try_shared();
        let second = gate.try_shared();
        assert!(first.is_some() && second.is_some());
        assert!(gate.table().entries.is_empty());
    }

    #[test]
    fn cycle_waits_for_writes_that_began_before() {
        let gate = BlockLocks::new();
        let write = gate.try_shared();
        let mut cycle = pin!(gate.exclusive(0, 4096));
        assert!(poll(cycle.as_mut()).is_pending());
        drop(write);
        assert!(poll(cycle.as_mut()).is_ready());
    }

    #[test]
    fn write_to_other_blocks_passes_a_cycle_and_to_the_same_waits() {
        let gate = BlockLocks::new();
        let Poll::Ready(cycle) = poll(pin!(gate.exclusive(0, 4096))) else { panic!("free gate") };
        let mut other = pin!(gate.shared(4096, 8192));
        let mut same = pin!(gate.shared(0, 8192));
        assert!(poll(other.as_mut()).is_ready());
        assert!(poll(same.as_mut()).is_pending());
        drop(cycle);
        assert!(poll(same.as_mut()).is_ready());
    }

    #[test]
    fn dropped_waiter_leaves_no_trace() {
        let gate = BlockLocks::new();
        let Poll::Ready(cycle) = poll(pin!(gate.exclusive(0, 1))) else { panic!("free gate") };
        {
            let mut waiter = pin!(gate.exclusive(0, 1));
            assert!(poll(waiter.as_mut()).is_pending());
        }
        drop(cycle);
        assert!(gate.table().entries.is_empty());
        assert!(gate.try_shared().is_some());
    }

    #[test]
    fn threads_never_share_a_block_with_a_cycle() {
        use std::sync::atomic::AtomicI64;
        /// Awaits on this thread by parking it.
        fn block_on<F: Future>(future: F) -> F::Output {
            struct Unpark(std::thread::Thread);
            impl std::task::Wake for Unpark {
                fn wake(self: std::sync::Arc<Self>) {
                    self.0.unpark();
                }
            }
            let waker = Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
            let mut future = pin!(future);
            loop {
                if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    return value;
                }
                std::thread::park();
            }
        }
        let gate = BlockLocks::new();
        // Positive: writers inside; negative: a cycle inside.
        let inside = AtomicI64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let pass = block_on(gate.shared(0, 1));
                        assert!(inside.fetch_add(1, SeqCst) >= 0);
                        inside.fetch_sub(1, SeqCst);
                        drop(pass);
                    }
                });
                scope.spawn(|| {
                    for _ in 0..500 {
                        let pass = block_on(gate.exclusive(0, 1));
                        assert_eq!(inside.fetch_sub(1 << 32, SeqCst), 0);
                        inside.fetch_add(1 << 32, SeqCst);
                        drop(pass);
                    }
                });
            }
        });
        assert_eq!(inside.load(SeqCst), 0);
    }
}
