//! The loop of a ring thread.
//!
//! Promises: the thread sleeps in `io_uring_enter` only, and memory that the kernel may still write
//! is never freed at the end. A turn: poll all ready tasks, then one enter that submits what they
//! queued, runs the kernel's deferred work and waits if nothing is ready, then take all
//! completions.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::nap::Nap;
use crate::ring::{Inner, ROOT};
use crate::{Config, Ring, SetupError, Source, SpinPolicy};

/// How long the end of a ring waits for operations that were cancelled. After that their memory is
/// leaked, since the kernel may still write it.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// A poll lets another thread of its CPU run after this time, and again whenever it has lasted
/// twice as long: it may be the one that the poll waits for. Each time is a system call, so they
/// must not be many.
const YIELD_FIRST: Duration = Duration::from_micros(4);

/// Where other threads had the CPU for longer than this during a poll, they are no clients that
/// answer and sleep, but wait for a CPU as we do.
const LOST_MAX: Duration = Duration::from_micros(200);

/// Rounds of ready tasks before an enter.
const ROUNDS: usize = 4;

/// A ring with its thread's tasks. Lives and dies on the thread that made it.
#[derive(Debug)]
pub struct Runtime {
    ring: Ring,
    /// Without requests that are served, and with: clients and storage take different times.
    spin: [SpinPolicy; 2],
    nap: Nap,
    last_sleep: Instant,
    began: Instant,
}

impl Runtime {
    /// Makes the ring of this thread. Errors: see [`SetupError`].
    pub fn new(config: Config) -> Result<Runtime, SetupError> {
        let inner = Inner::new(&config)?;
        let now = Instant::now();
        let ring = Ring(Rc::new(inner));
        let spin = [config.spin.clone(), config.spin];
        Ok(Runtime { ring, spin, nap: Nap::new(), last_sleep: now, began: now })
    }

    /// The handle for tasks.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Runs `future` and all spawned tasks until `future` is done. The thread sleeps in
    /// `io_uring_enter` only.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        let inner = Rc::clone(&self.ring.0);
        let waker = inner.executor.waker(ROOT);
        inner.executor.mark_root_ready();
        loop {
            if let Poll::Ready(output) = inner.executor.poll_root(future.as_mut(), &waker) {
                return output;
            }
            self.run_tasks(&inner);
        }
    }

    /// All spawned tasks that are ready, and a turn. Not a part of `block_on`, which is compiled
    /// once for each future.
    fn run_tasks(&mut self, inner: &Inner) {
        // Entries of tasks that wake each other are submitted together; but a task that always
        // wakes itself must not keep the thread from the kernel.
        for round in 0..=ROUNDS {
            inner.shared.receive_local(|task| inner.executor.schedule(task));
            if round == ROUNDS || !inner.executor.has_ready_tasks() {
                break;
            }
            inner.executor.run_ready();
        }
        self.turn(!inner.executor.has_ready());
    }

    /// One enter, and all completions that are there.
    fn turn(&mut self, may_wait: bool) {
        let inner = Rc::clone(&self.ring.0);
        inner.arm_event();
        let source = inner.source.borrow().clone();
        let found = source.as_ref().is_some_and(|source| {
            source.publish();
            self.poll_source(source.as_ref())
        });
        let may_wait = may_wait && !found;
        if may_wait
            && !self.poll_before_sleep()
            && !source.as_ref().is_some_and(|source| source.arm())
        {
            // Inline completions are there at once: the wait is for one more than those, if one is
            // sure to come without them.
            let past = if inner.past_inline.get() { inner.inline_expected.get() } else { 0 };
            let want = 1 + past;
            let awaited = self.awaited();
            inner.counters.sleeps.add(1);
            self.enter(want);
            if let Some(source) = source {
                source.disarm();
                self.nap.slept();
            }
            if !self.spin[awaited].cap().is_zero() {
                let now = Instant::now();
                self.spin[awaited].slept(now - self.last_sleep);
                self.last_sleep = now;
            }
        } else if !may_wait && (inner.uring.queued() > 0 || inner.uring.has_work()) {
            self.enter(0);
        }
        self.collect();
    }

    /// Takes the requests of a source. Returns whether there were any.
    fn poll_source(&mut self, source: &dyn Source) -> bool {
        let took = source.look();
        if took > 0 {
            let began = self.began;
            self.nap.took(took, || began.elapsed());
        }
        took > 0
    }

    fn enter(&self, want: u32) {
        self.enter_for(want, None);
    }

    /// Waits for `want` completions, but not longer than `limit`.
    fn enter_for(&self, want: u32, limit: Option<Duration>) {
        let inner = &self.ring.0;
        inner.inline_expected.set(0);
        if let Err(error) = inner.uring.enter(&inner.counters, want, limit) {
            // Only a programming error or a dying kernel gets here; spinning on it would hide it.
            tracing::error!("io_uring_enter: {error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Takes all completions.
    fn collect(&self) {
        let inner = &self.ring.0;
        while let Some(completion) = inner.uring.next_completion() {
            inner.complete(completion);
            if !inner.event_armed.get() {
                inner.shared.receive(&self.ring, |task| inner.executor.schedule(task));
                // A closure may have changed what the future of `block_on` waits for.
                inner.executor.mark_root_ready();
                inner.arm_event();
            }
        }
    }

    /// What a thread that has nothing to do waits for: requests, or answers of the storage.
    fn awaited(&self) -> usize {
        usize::from(self.ring.0.requests.get() > 0)
    }

    /// Submits, then watches shared memory for a while. Returns whether there is work now, i.e.
    /// there is no need to sleep.
    fn poll_before_sleep(&mut self) -> bool {
        if let Some(cap) = self.ring.0.polling.take() {
            self.spin.iter_mut().for_each(|spin| spin.set_cap(cap));
        }
        if self.ring.0.polling_held.get() {
            return false;
        }
        let awaited = self.awaited();
        let budget = self.spin[awaited].budget();
        if budget.is_zero() || !self.ring.0.uring.can_poll() {
            return false;
        }
        let inner = Rc::clone(&self.ring.0);
        let expected = inner.inline_expected.get();
        if inner.uring.queued() > 0 {
            self.enter(0);
            let before = inner.counters.cqes.get();
            self.collect();
            if inner.counters.cqes.get() - before > u64::from(expected)
                || inner.executor.has_ready()
            {
                return true;
            }
        }
        let source = inner.source.borrow().clone();
        let length = self.nap.length();
        if !length.is_zero() && source.as_ref().is_some_and(|source| source.rests()) {
            inner.counters.naps.add(1);
            self.enter_for(1, Some(length));
            self.collect();
            if inner.executor.has_ready() {
                return true;
            }
        }
        let start = Instant::now();
        let (mut yield_at, mut last, mut lost) = (YIELD_FIRST, start, Duration::ZERO);
        loop {
            if source.as_ref().is_some_and(|source| self.poll_source(source.as_ref())) {
                self.poll_ended(awaited, true, lost);
                return true;
            }
            if inner.uring.has_work() {
                // Waits for one completion, so that a poll and the read linked to it are done in
                // one call. Not with a source: deferred work of the kernel may end without a
                // completion, and the source is not armed for a sleep.
                self.enter(u32::from(source.is_none()));
                self.poll_ended(awaited, true, lost);
                return true;
            }
            let now = Instant::now();
            lost = lost.max(now - last);
            last = now;
            let polled = now - start;
            if polled >= budget {
                self.poll_ended(awaited, false, lost);
                return false;
            }
            if polled >= yield_at {
                std::thread::yield_now();
                yield_at = polled * 2;
                lost = lost.max(now.elapsed());
            }
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }

    /// A poll has ended, with work or without.
    ///
    /// * `awaited`: what it was for.
    /// * `lost`: how long the CPU did something else at once meanwhile.
    fn poll_ended(&mut self, awaited: usize, found: bool, lost: Duration) {
        let counters = &self.ring.0.counters;
        let now = Instant::now();
        if found {
            counters.polls_paid.add(1);
            self.last_sleep = now;
        } else {
            counters.polls_missed.add(1);
        }
        match found {
            _ if lost > LOST_MAX => self.spin.iter_mut().for_each(|spin| spin.displaced(lost, now)),
            true => self.spin[awaited].paid(),
            false => self.spin[awaited].missed(),
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let inner = Rc::clone(&self.ring.0);
        inner.executor.clear();
        // It may hold this ring.
        let source = inner.source.take();
        drop(source);
        let pending: Vec<u64> = inner.slots.borrow().pending().collect();
        for user_data in pending {
            inner.cancel(user_data);
        }
        let deadline = Instant::now() + CLOSE_WAIT;
        while inner.slots.borrow().pending().next().is_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let count = inner.slots.borrow().pending().count();
                tracing::warn!(
                    "{count} operations did not end in {CLOSE_WAIT:?}; their memory is leaked"
                );
                inner.slots.borrow_mut().leak_pending();
                break;
            }
            if inner.uring.enter(&inner.counters, 1, Some(left)).is_err() {
                inner.slots.borrow_mut().leak_pending();
                break;
            }
            self.collect();
        }
    }
}
