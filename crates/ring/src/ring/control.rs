//! Requests of a task to the loop of its thread: other tasks, helper threads, polling, state.
//!
//! Promises: none of them is an operation, so none takes a slot.

use std::future::{Future, poll_fn};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::Ring;
use super::remote::Remote;
use crate::Source;
use crate::counters::Counters;
use crate::offload;

impl Ring {
    /// Adds a task to this thread. Allocates: at start-up, not for a request.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.0.executor.spawn(future);
    }

    /// Runs `work` on a helper thread and awaits its result: for work that blocks or takes long
    /// (decompression, lseek, ioctl). Allocates. Dropping the future does not stop the work.
    pub fn offload<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = T> {
        offload::run(work, self.0.offloads_here.get())
    }

    /// Runs offloaded work at once, on this thread, from now on: for simulations, in which nothing
    /// may depend on another thread.
    pub fn offload_here(&self) {
        self.0.offloads_here.set(true);
    }

    /// Lets other tasks run first.
    pub fn yield_now(&self) -> impl Future<Output = ()> {
        let mut yielded = false;
        poll_fn(move |cx| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    /// Whether both are handles of one ring.
    pub fn is(&self, other: &Ring) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// A handle for other threads.
    pub fn remote(&self) -> Remote {
        Remote(Arc::clone(&self.0.shared))
    }

    /// The ring's counters, to be read from any thread.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.0.counters)
    }

    /// Makes the loop poll a source of work in shared memory. Once for each ring; a second
    /// source is ignored.
    pub fn set_source(&self, source: Rc<dyn Source>) {
        self.0.source.borrow_mut().get_or_insert(source);
    }

    /// Sets how long the thread may poll before it sleeps ([`crate::SpinPolicy`]); zero: not at
    /// all.
    pub fn set_polling(&self, cap: Duration) {
        self.0.polling.set(Some(cap));
    }

    /// Holds polling back while the thread waits for something that polling does not help.
    pub fn hold_polling(&self, held: bool) {
        self.0.polling_held.set(held);
    }

    /// Another request is served from now on. Whether polling pays is learned apart for a thread
    /// that waits for the storage, i.e. with requests that are served, and for one that waits for
    /// more requests.
    #[inline]
    pub fn begin_request(&self) {
        self.0.requests.set(self.0.requests.get() + 1);
    }

    /// One of them is done. As many times as [`Ring::begin_request`].
    #[inline]
    pub fn end_request(&self) {
        self.0.requests.set(self.0.requests.get().saturating_sub(1));
    }

    /// Says whether the thread may sleep past completions that are there at once
    /// ([`Op::completes_inline`]) until one more comes.
    ///
    /// Only while an operation is in flight that stands for new work and needs none of the
    /// operations that complete inline; otherwise the thread would wait for a completion that
    /// never comes. Off at first.
    pub fn wait_past_inline(&self, on: bool) {
        self.0.past_inline.set(on);
    }

    /// Whether everything is handled: no completion waits, no entry is queued, no other task is
    /// ready. Only where the kernel defers its work to enters (DEFER_TASKRUN), so that it stays
    /// true until the caller's next await; else false.
    pub fn is_settled(&self) -> bool {
        let inner = &self.0;
        let is_quiet = !inner.uring.has_work() && inner.uring.queued() == 0;
        inner.uring.can_poll() && is_quiet && !inner.executor.has_ready_tasks()
    }

    /// Number of the present turn of the loop (enters so far). Completions of one turn arrived
    /// together.
    pub fn turn(&self) -> u64 {
        self.0.counters.enters.get()
    }

    /// The ring's descriptor, as the target of [`Ring::send_message`].
    pub fn raw_fd(&self) -> RawFd {
        self.0.uring.raw_fd()
    }

    /// Operations in flight.
    pub fn in_flight(&self) -> usize {
        self.0.slots.borrow().in_flight()
    }
}
