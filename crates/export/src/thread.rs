//! A queue thread, from its start to its end.
//!
//! Promises: the thread is bound to its CPUs before it makes its ring and its counters, so they are
//! on its node; a panic ends that thread and is reported, never the process; a thread that does not
//! end in time is left behind. The control thread holds a [`QueueThread`], and what runs on the
//! thread is the [`QueueWork`] of a protocol. Nothing here is on the path of a request.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_ring::{Config, Counters, CpuList, Remote, Ring, Runtime, SetupError, pin_to_cpus};
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};

use crate::stats::{QueueCells, QueueView};
use crate::{Error, Pending};

/// Longest poll of clients and storage before a queue thread sleeps (80 µs). Waking an idle CPU
/// costs about 75 µs on small machines, so a poll as long as that loses at most half; it is tried
/// only while it pays.
pub const POLL_MAX: Duration = Duration::from_micros(80);
/// How often a thread that waits for the end of a queue thread calls the function that it was given
/// for that.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

thread_local! {
    /// The [`QueueWork::Local`] of this queue thread.
    static LOCAL: RefCell<Option<Rc<dyn Any>>> = const { RefCell::new(None) };
}

/// What a protocol runs on a queue thread.
///
/// The value is dropped on the thread after its ring is closed, also after a panic: it keeps the
/// memory that the kernel knows through the ring.
pub trait QueueWork: Send + 'static {
    /// What other threads know of the queue.
    type Shared: Send + 'static;
    /// What the thread has for itself, for the closures that other threads send it.
    type Local: 'static;

    /// Serves. Makes what the queue needs, calls [`Running::ready`], and returns when
    /// [`Running::until_stopped`] has.
    ///
    /// Errors: what the queue needs cannot be had; only before [`Running::ready`].
    fn run(&mut self, thread: &mut Running<Self>) -> Result<(), SetupError>
    where
        Self: Sized;

    /// [`QueueWork::run`] has panicked.
    fn panicked(&self);
}

/// How a queue thread is made.
#[derive(Clone, Debug)]
pub struct ThreadSetup {
    /// Number of the thread among those of its export.
    pub number: usize,
    /// CPUs that it is bound to; empty: it runs where the scheduler wants.
    pub cpus: CpuList,
    /// Its ring. The name is that of the thread, too; the system keeps 15 bytes of it.
    pub ring: Config,
}

/// A running queue thread, as the control thread of its export sees it.
pub struct QueueThread<W> {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    ended: Receiver<()>,
    /// Its counters, and how to reach it.
    pub view: QueueView,
    /// Why it could not be bound to its CPUs.
    pub pin_error: Option<String>,
    work: PhantomData<fn() -> W>,
}

/// A queue thread, as the [`QueueWork`] that runs on it sees it.
#[derive(Debug)]
pub struct Running<W: QueueWork> {
    runtime: Runtime,
    cells: Arc<QueueCells>,
    stop: Arc<AtomicBool>,
    pin_error: Option<String>,
    ready: SyncSender<Result<Ready<W::Shared>, SetupError>>,
}

/// What a thread tells the one that has started it.
#[derive(Debug)]
struct Ready<T> {
    remote: Remote,
    counters: Arc<Counters>,
    cells: Arc<QueueCells>,
    pin_error: Option<String>,
    shared: T,
}

/// Reaches a queue thread from any other thread, also from another queue thread.
pub struct ThreadHandle<W> {
    remote: Remote,
    work: PhantomData<fn() -> W>,
}

impl<W: QueueWork> ThreadHandle<W> {
    /// Runs `closure` on the thread with what it has for itself, soon; drops it when the thread has
    /// ended before. The closure may spawn tasks and must not block.
    pub fn send(&self, closure: impl FnOnce(&Rc<W::Local>) + Send + 'static) {
        self.remote.run(move |_| {
            if let Some(local) = local::<W>() {
                closure(&local);
            }
        });
    }
}

impl<W> Clone for ThreadHandle<W> {
    fn clone(&self) -> ThreadHandle<W> {
        ThreadHandle { remote: self.remote.clone(), work: PhantomData }
    }
}

impl<W> fmt::Debug for ThreadHandle<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadHandle")
    }
}

impl<W: QueueWork> QueueThread<W> {
    /// Starts a thread and waits until it is ready.
    ///
    /// Errors: there is no thread or no ring; those of [`QueueWork::run`].
    pub fn start(setup: ThreadSetup, work: W) -> Result<(QueueThread<W>, W::Shared), SetupError> {
        let (ready_sender, ready) = sync_channel(1);
        let (ended_sender, ended) = sync_channel(1);
        let stop = Arc::new(AtomicBool::new(false));
        let its_stop = Arc::clone(&stop);
        let cpu = setup.cpus.only();
        let thread = std::thread::Builder::new()
            .name(setup.ring.name.clone())
            .spawn(move || {
                run(setup, work, its_stop, ready_sender);
                let _ = ended_sender.send(());
            })
            .map_err(SetupError::Limit)?;
        let Ready { remote, counters, cells, pin_error, shared } = match ready.recv() {
            Ok(result) => result?,
            Err(_) => {
                return Err(SetupError::Other(std::io::Error::other("the queue thread ended")));
            }
        };
        let cpu = cpu.filter(|_| pin_error.is_none());
        let view = QueueView { cells, ring: counters, remote, cpu };
        let (thread, work) = (Some(thread), PhantomData);
        Ok((QueueThread { thread, stop, ended, view, pin_error, work }, shared))
    }

    /// Runs `closure` on the thread, soon; never when the thread has ended before. The closure may
    /// spawn tasks and must not block.
    pub fn run(&self, closure: impl FnOnce(&Ring) + Send + 'static) {
        self.view.remote.run(closure);
    }

    /// A handle for other threads.
    #[must_use]
    pub fn handle(&self) -> ThreadHandle<W> {
        ThreadHandle { remote: self.view.remote.clone(), work: PhantomData }
    }

    /// Does something on the thread with what it has for itself.
    pub fn ask<T: Send + 'static>(
        &self,
        closure: impl FnOnce(&Rc<W::Local>) -> T + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = sync_channel(1);
        self.run(move |_| {
            if let Some(local) = local::<W>() {
                let _ = sender.send(closure(&local));
            }
        });
        Pending(receiver)
    }

    /// The same with a task, which may wait for other tasks of the thread.
    pub fn ask_task<T, F>(
        &self,
        closure: impl FnOnce(Rc<W::Local>) -> F + Send + 'static,
    ) -> Pending<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.ask_task_or(closure, |_| {})
    }

    /// The same with a task whose result must not stay when no thread waits for it any more.
    ///
    /// * `undo`: called then, on the queue thread. A thread that gives up just when the answer
    ///   comes has to undo it by itself.
    pub fn ask_task_or<T, F>(
        &self,
        closure: impl FnOnce(Rc<W::Local>) -> F + Send + 'static,
        undo: impl FnOnce(&W::Local) + Send + 'static,
    ) -> Pending<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = sync_channel(1);
        self.run(move |ring| {
            if let Some(local) = local::<W>() {
                let task = closure(Rc::clone(&local));
                ring.spawn(async move {
                    if sender.send(task.await).is_err() {
                        undo(&local);
                    }
                });
            }
        });
        Pending(receiver)
    }

    /// Has the thread call the function of [`Running::until_stopped`].
    pub fn wake(&self) {
        self.run(|_| {});
    }

    /// Asks the thread to end; requests in flight are dropped. Returns at once.
    pub fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits for the end of the thread. `false` when it did not end in time; it is left behind
    /// then.
    ///
    /// * `idle`: called now and then while it has not ended.
    pub fn join(&mut self, deadline: Instant, idle: impl Fn()) -> bool {
        let has_ended = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.ended.recv_timeout(left.min(POLL_INTERVAL)) {
                Ok(()) => break true,
                Err(RecvTimeoutError::Timeout) if left > POLL_INTERVAL => idle(),
                Err(_) => break false,
            }
        };
        if let Some(thread) = self.thread.take().filter(|_| has_ended) {
            let _ = thread.join();
        }
        has_ended
    }
}

/// A thread that was not joined is asked to end, and not waited for.
impl<W> Drop for QueueThread<W> {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop.store(true, Ordering::Release);
            self.view.remote.run(|_| {});
        }
    }
}

impl<W> fmt::Debug for QueueThread<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueThread").field("view", &self.view).finish_non_exhaustive()
    }
}

/// What the calling queue thread has for itself.
fn local<W: QueueWork>() -> Option<Rc<W::Local>> {
    LOCAL.with_borrow(Clone::clone)?.downcast().ok()
}

impl<W: QueueWork> Running<W> {
    /// The ring of the thread.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        self.runtime.ring()
    }

    /// The counters of the thread.
    #[must_use]
    pub fn cells(&self) -> &Arc<QueueCells> {
        &self.cells
    }

    /// The queue can serve: the start returns. Once. `false`: no thread waits for it any more.
    pub fn ready(&mut self, shared: W::Shared, local: Rc<W::Local>) -> bool {
        LOCAL.set(Some(local));
        let ready = Ready {
            remote: self.ring().remote(),
            counters: self.ring().counters(),
            cells: Arc::clone(&self.cells),
            pin_error: self.pin_error.take(),
            shared,
        };
        self.ready.send(Ok(ready)).is_ok()
    }

    /// Whether the thread has been asked to end.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Runs the tasks of the thread until it is asked to end.
    ///
    /// * `woken`: called at first, and each time that another thread has sent a closure.
    pub fn until_stopped(&mut self, mut woken: impl FnMut()) {
        let stop = &self.stop;
        self.runtime.block_on(poll_fn(|_| {
            woken();
            if stop.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
        }));
    }
}

/// The thread.
fn run<W: QueueWork>(
    setup: ThreadSetup,
    mut work: W,
    stop: Arc<AtomicBool>,
    ready: SyncSender<Result<Ready<W::Shared>, SetupError>>,
) {
    // First the CPUs, then the memory: pages are taken from the node of the thread that touches
    // them.
    let pin_error = bind(&setup);
    let served = catch_unwind(AssertUnwindSafe(|| {
        let runtime = match Runtime::new(setup.ring) {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let cells = Arc::new(QueueCells::default());
        cells.thread_id.set(u64::from(gettid().as_raw_nonzero().get().unsigned_abs()));
        let its_cells = Arc::clone(&cells);
        let mut running = Running { runtime, cells, stop, pin_error, ready };
        if let Err(error) = work.run(&mut running) {
            let _ = running.ready.send(Err(error));
        }
        LOCAL.set(None);
        drop(running);
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let nanos = cpu.tv_sec.unsigned_abs() * 1_000_000_000 + cpu.tv_nsec.unsigned_abs();
        its_cells.cpu_ns.set(nanos.max(1));
    }));
    LOCAL.set(None);
    if served.is_err() {
        // A defect of ours: the clients of this export get errors, and the process goes on.
        work.panicked();
    }
}

/// Binds the calling thread to its CPUs. Returns why it could not be.
fn bind(setup: &ThreadSetup) -> Option<String> {
    if setup.cpus.is_empty() {
        return None;
    }
    let errno = pin_to_cpus(&setup.cpus).err()?;
    Some(format!("queue thread {} runs unbound: CPU {}: {errno}", setup.number, setup.cpus))
}

/// Does something on each of some threads, on all at once. Gives the answers in their order.
///
/// * `limit`: for each answer.
///
/// Errors: those of [`Pending::within`].
pub fn ask_all<W: QueueWork, T, F>(
    threads: &[QueueThread<W>],
    limit: Duration,
    closure: impl Fn(Rc<W::Local>) -> F + Clone + Send + 'static,
) -> Result<Vec<T>, Error>
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let asked: Vec<_> = threads.iter().map(|thread| thread.ask_task(closure.clone())).collect();
    asked.into_iter().map(|answer| answer.within(limit)).collect()
}

/// A thread of an export that can be ended.
pub trait EndThread {
    /// Asks it to end. Returns at once.
    fn ask_to_stop(&self);

    /// Waits for its end. `false` when it did not end in time; it is left behind then.
    fn join(&mut self, deadline: Instant) -> bool;
}

impl<W: QueueWork> EndThread for QueueThread<W> {
    fn ask_to_stop(&self) {
        QueueThread::ask_to_stop(self);
    }

    fn join(&mut self, deadline: Instant) -> bool {
        QueueThread::join(self, deadline, || {})
    }
}

/// Ends the threads of an export: asks all of them, then waits for each.
///
/// * `limit`: for all together. A thread that does not end by then is left behind, with a warning
///   that begins with `name`.
pub fn stop_threads<T: EndThread>(threads: &mut [T], limit: Duration, name: &str) {
    threads.iter().for_each(EndThread::ask_to_stop);
    let deadline = Instant::now() + limit;
    for thread in threads {
        if !thread.join(deadline) {
            tracing::warn!("{name}: a queue thread does not end; it is left behind");
        }
    }
}

#[cfg(test)]
mod tests;
