//! The tasks of one thread.
//!
//! Promises: waking a task from its own thread allocates nothing; a task that always wakes itself
//! does not starve completions. A task is made at start-up and lives long (one for each entry), so
//! spawning may allocate. Completions wake a task by its number; only a waker that left the thread
//! goes through [`super::remote`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use super::remote::Shared;
use crate::slots::Waiter;

/// Number of the future given to `block_on`.
pub(crate) const ROOT: u32 = u32::MAX;

/// Room for ready tasks before their queue must grow, which it does at most once in each power of
/// two.
const READY_ROOM: usize = 1024;

type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

struct Task {
    /// `None` while it is being polled.
    future: Option<TaskFuture>,
    waker: Waker,
    queued: bool,
}

/// The data of a task's [`Waker`]; may be dropped and woken on any thread.
struct TaskWake {
    id: u32,
    shared: Arc<Shared>,
}

impl Wake for TaskWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.shared.wake(self.id);
    }
}

/// The tasks of one ring, and those that are ready.
pub(crate) struct Executor {
    tasks: RefCell<Vec<Option<Task>>>,
    free: RefCell<Vec<u32>>,
    ready: RefCell<VecDeque<u32>>,
    root_ready: Cell<bool>,
    /// Rounds of polling all ready tasks.
    rounds: Cell<u64>,
    /// Number and waker address of the task that is being polled.
    current: Cell<(u32, *const ())>,
    shared: Arc<Shared>,
}

impl Executor {
    pub(crate) fn new(shared: Arc<Shared>) -> Executor {
        Executor {
            tasks: RefCell::new(Vec::new()),
            free: RefCell::new(Vec::new()),
            ready: RefCell::new(VecDeque::with_capacity(READY_ROOM)),
            root_ready: Cell::new(true),
            rounds: Cell::new(0),
            current: Cell::new((ROOT, std::ptr::null())),
            shared,
        }
    }

    pub(crate) fn waker(&self, id: u32) -> Waker {
        Waker::from(Arc::new(TaskWake { id, shared: Arc::clone(&self.shared) }))
    }

    /// Adds a task; it is polled in the next turn.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        let id = self.free.borrow_mut().pop().unwrap_or_else(|| {
            tasks.push(None);
            u32::try_from(tasks.len() - 1).expect("fewer than 2^32 tasks")
        });
        tasks[id as usize] =
            Some(Task { future: Some(Box::pin(future)), waker: self.waker(id), queued: true });
        self.ready.borrow_mut().push_back(id);
    }

    /// Makes a task ready. Unknown and finished ones are ignored.
    pub(crate) fn schedule(&self, id: u32) {
        if id == ROOT {
            self.root_ready.set(true);
            return;
        }
        if let Some(Some(task)) = self.tasks.borrow_mut().get_mut(id as usize)
            && !task.queued
        {
            task.queued = true;
            self.ready.borrow_mut().push_back(id);
        }
    }

    pub(crate) fn has_ready(&self) -> bool {
        self.root_ready.get() || self.has_ready_tasks()
    }

    /// Whether a spawned task is ready.
    pub(crate) fn has_ready_tasks(&self) -> bool {
        !self.ready.borrow().is_empty()
    }

    /// Polls every task that is ready now; those that become ready meanwhile wait for the next
    /// turn, so that a task that always wakes itself cannot starve completions.
    pub(crate) fn run_ready(&self) {
        self.rounds.set(self.rounds.get() + 1);
        let count = self.ready.borrow().len();
        for _ in 0..count {
            let Some(id) = self.ready.borrow_mut().pop_front() else { return };
            self.poll_task(id);
        }
    }

    /// Rounds of [`Executor::run_ready`] that have begun.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.get()
    }

    fn poll_task(&self, id: u32) {
        let taken = {
            let mut tasks = self.tasks.borrow_mut();
            let Some(Some(task)) = tasks.get_mut(id as usize) else { return };
            task.queued = false;
            self.current.set((id, task.waker.data()));
            // The waker is not cloned: the task outlives its poll, and its place in the table is
            // not reused before it is done.
            task.future
                .take()
                .map(|future| (future, std::mem::replace(&mut task.waker, Waker::noop().clone())))
        };
        let Some((mut future, waker)) = taken else { return };
        let done = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        self.current.set((ROOT, std::ptr::null()));
        if done {
            // Dropped outside the borrow: a future's drop may spawn or wake.
            drop(future);
            self.tasks.borrow_mut()[id as usize] = None;
            self.free.borrow_mut().push(id);
        } else if let Some(Some(task)) = self.tasks.borrow_mut().get_mut(id as usize) {
            task.future = Some(future);
            task.waker = waker;
        }
    }

    /// Polls the future of `block_on` if it is ready.
    pub(crate) fn poll_root<F: Future>(
        &self,
        future: Pin<&mut F>,
        waker: &Waker,
    ) -> Poll<F::Output> {
        if !self.root_ready.replace(false) {
            return Poll::Pending;
        }
        self.current.set((ROOT, waker.data()));
        let result = future.poll(&mut Context::from_waker(waker));
        self.current.set((ROOT, std::ptr::null()));
        result
    }

    pub(crate) fn mark_root_ready(&self) {
        self.root_ready.set(true);
    }

    /// The way in which a completion wakes the future that is being polled with `cx`.
    pub(crate) fn waiter(&self, cx: &Context<'_>) -> Waiter {
        let (id, data) = self.current.get();
        if cx.waker().data() == data { Waiter::Task(id) } else { Waiter::Waker(cx.waker().clone()) }
    }

    pub(crate) fn wake(&self, waiter: Waiter) {
        match waiter {
            Waiter::None => {}
            Waiter::Task(id) => self.schedule(id),
            Waiter::Waker(waker) => waker.wake(),
        }
    }

    /// Adds where it and its tasks lie, for [`crate::Ring::own_memory`].
    pub(crate) fn own_memory(&self, ranges: &mut Vec<(usize, usize)>) {
        let tasks = self.tasks.borrow();
        ranges.push((tasks.as_ptr().addr(), size_of_val(&tasks[..])));
        let futures = tasks.iter().flatten().filter_map(|task| task.future.as_ref());
        ranges.extend(futures.map(|future| {
            let future: &dyn Future<Output = ()> = &**future;
            (std::ptr::from_ref(future).addr(), size_of_val(future))
        }));
        let ready = self.ready.borrow();
        let (first, second) = ready.as_slices();
        for part in [first, second] {
            ranges.push((part.as_ptr().addr(), size_of_val(part)));
        }
    }

    /// Drops all tasks; their operations become orphans.
    pub(crate) fn clear(&self) {
        let count = self.tasks.borrow().len();
        for id in 0..count {
            let task = self.tasks.borrow_mut()[id].take();
            drop(task);
        }
        self.ready.borrow_mut().clear();
    }
}

#[cfg(test)]
mod tests;
