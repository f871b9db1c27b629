//! A value that all requests read and a change replaces, in several copies (shards), one for each
//! group of threads.
//!
//! Promises:
//! 1. **A request costs one `try_read`** of the copy of its own threads (about 10 ns with the
//!    leave), on a cache line that other groups do not touch; no allocation. The guard is both the
//!    count of requests in flight and the access to the value, so the value's own reference count
//!    is never touched.
//! 2. **Nothing here blocks a thread.** A request that arrives during a change suspends on a waker,
//!    and so does the change while requests are in flight. The mutex is held for a few
//!    instructions, and only while a change is under way.
//! 3. A change that is dropped at any point opens the gate again.
//!
//! Why no wake-up is lost: a change says that it is closing, then looks at the copies; a request
//! leaves its copy, then looks whether a change is closing; a request that finds the gate closed
//! looks once more under the mutex before it suspends, and the gate opens under the same mutex. On
//! machines where the unlock of a copy and the look after it may be seen in the other order, the
//! change could miss the last leave: it also looks every few milliseconds by itself (`drain.rs`).

use std::future::poll_fn;
use std::ops::Deref;
use std::task::{Context, Poll, Waker};

use super::sync::{
    AtomicBool, Mutex, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, lock, try_read,
    try_write,
};

/// A copy on cache lines of its own (two, since CPUs fetch them in pairs).
#[repr(align(128))]
struct Shard<T> {
    value: RwLock<T>,
    /// Requests of clients that came in here. Nothing is ordered by it, and threads that share the
    /// copy may lose some.
    entered: std::sync::atomic::AtomicU64,
}

/// The copies, and the gate in front of them.
pub(crate) struct Shards<T> {
    shards: Box<[Shard<T>]>,
    /// A change is under way. Read by every request and written by changes only.
    closing: AtomicBool,
    /// The change has every copy. For observers only; no ordering depends on it.
    alone: AtomicBool,
    waiting: Mutex<Waiting>,
}

/// Tasks that wait while a change is under way.
#[derive(Default)]
struct Waiting {
    /// The change, for the next request that leaves.
    change: Option<Waker>,
    /// Requests that found the gate closed.
    requests: Vec<Waker>,
}

/// A request in flight, with its access to the value. Bound to its thread.
pub(crate) struct Pass<'a, T> {
    // Dropped before `_leave`: the change must find the copy free when it is woken.
    guard: RwLockReadGuard<'a, T>,
    _leave: Leave<'a, T>,
}

struct Leave<'a, T>(&'a Shards<T>);

/// A change that is waiting, or has every copy for itself. Opens the gate on drop.
pub(crate) struct Closed<'a, T> {
    shards: &'a Shards<T>,
    /// Copies that it has; a prefix of all.
    held: Vec<RwLockWriteGuard<'a, T>>,
}

impl<T> Shard<T> {
    fn new(value: T) -> Shard<T> {
        Shard { value: RwLock::new(value), entered: std::sync::atomic::AtomicU64::new(0) }
    }
}

impl<T: Clone> Shards<T> {
    /// * `count`: copies; at least 1.
    pub(crate) fn new(value: T, count: usize) -> Shards<T> {
        Shards {
            shards: (0..count.max(1)).map(|_| Shard::new(value.clone())).collect(),
            closing: AtomicBool::new(false),
            alone: AtomicBool::new(false),
            waiting: Mutex::new(Waiting::default()),
        }
    }
}

impl<T> Shards<T> {
    /// Lets a request in, unless a change is under way.
    ///
    /// * `shard`: copy of the calling thread, below the count.
    #[inline]
    pub(crate) fn try_enter(&self, shard: usize) -> Option<Pass<'_, T>> {
        // Without this look a steady stream of requests would keep a change out for ever.
        if self.closing.load(Ordering::SeqCst) {
            return None;
        }
        let guard = try_read(&self.shards[shard].value)?;
        Some(Pass { guard, _leave: Leave(self) })
    }

    /// Counts a request of a client. The queue threads have a copy each, so this is a load and a
    /// store in a cache line that the thread has just written.
    #[inline]
    pub(crate) fn count(&self, shard: usize) {
        use std::sync::atomic::Ordering::Relaxed;
        let entered = &self.shards[shard].entered;
        entered.store(entered.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// The requests that were counted: a number that changes when there were some. Any thread.
    pub(crate) fn entered(&self) -> u64 {
        let counts = self.shards.iter().map(|shard| &shard.entered);
        let counts = counts.map(|count| count.load(std::sync::atomic::Ordering::Relaxed));
        counts.fold(0, u64::wrapping_add)
    }

    /// Whether a change has every copy for itself.
    pub(crate) fn is_closed_alone(&self) -> bool {
        self.alone.load(Ordering::SeqCst)
    }

    /// Lets a request in; waits while a change is under way. A request enters once: a second time
    /// while it holds a pass could wait for a change that waits for it.
    pub(crate) async fn enter(&self, shard: usize) -> Pass<'_, T> {
        loop {
            if let Some(pass) = self.try_enter(shard) {
                return pass;
            }
            poll_fn(|context| self.poll_open(context)).await;
        }
    }

    /// Ready when the gate is open at this moment.
    fn poll_open(&self, context: &Context<'_>) -> Poll<()> {
        let mut waiting = lock(&self.waiting);
        if !self.closing.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        if !waiting.requests.iter().any(|waker| waker.will_wake(context.waker())) {
            waiting.requests.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Closes the gate. One change at a time: the caller sees to that.
    pub(crate) fn close(&self) -> Closed<'_, T> {
        let _waiting = lock(&self.waiting);
        let closed = self.closing.swap(true, Ordering::SeqCst);
        assert!(!closed, "changes take turns");
        Closed { shards: self, held: Vec::with_capacity(self.shards.len()) }
    }
}

impl<T> Closed<'_, T> {
    /// Ready when no request is in flight.
    pub(crate) fn poll_alone(&mut self, context: &Context<'_>) -> Poll<()> {
        lock(&self.shards.waiting).change = Some(context.waker().clone());
        while let Some(shard) = self.shards.shards.get(self.held.len()) {
            match try_write(&shard.value) {
                Some(guard) => self.held.push(guard),
                None => return Poll::Pending,
            }
        }
        self.shards.alone.store(true, Ordering::SeqCst);
        Poll::Ready(())
    }

    /// Whether every copy is held: no request is in flight.
    pub(crate) fn is_alone(&self) -> bool {
        self.held.len() == self.shards.shards.len()
    }
}

impl<T: Clone> Closed<'_, T> {
    /// Replaces the value in all copies. Only when alone.
    pub(crate) fn replace(&mut self, value: &T) {
        assert!(self.is_alone(), "requests are in flight");
        for guard in &mut self.held {
            (**guard).clone_from(value);
        }
    }
}

impl<T> Drop for Closed<'_, T> {
    fn drop(&mut self) {
        self.shards.alone.store(false, Ordering::SeqCst);
        // The copies first: a request that is woken finds its copy free.
        self.held.clear();
        let requests = {
            let mut waiting = lock(&self.shards.waiting);
            self.shards.closing.store(false, Ordering::SeqCst);
            waiting.change = None;
            std::mem::take(&mut waiting.requests)
        };
        for waker in requests {
            waker.wake();
        }
    }
}

impl<T> Drop for Leave<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.0.closing.load(Ordering::SeqCst) {
            let change = lock(&self.0.waiting).change.clone();
            if let Some(waker) = change {
                waker.wake();
            }
        }
    }
}

impl<T> Deref for Pass<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> std::fmt::Debug for Shards<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shards").field("count", &self.shards.len()).finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for Pass<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pass")
    }
}
