//! A queue thread, as the control thread sees it.

use std::cell::RefCell;
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_disk::Disk;
use ringdisk_export::stats::{QueueCells, QueueView};
use ringdisk_ring::{
    Config, Counters, CpuList, Remote, Runtime, SetupError, SpinPolicy, pin_to_cpus,
};
use rustix::thread::set_current_timer_slack;

use super::watch::Watch;
use super::{REQUESTS_MAX, Told, Worker};
use crate::device::Device;

/// Whoever waits for a thread looks so often whether it is stuck.
const LOOK: Duration = Duration::from_millis(100);
/// Operations for each request: data of several extents, metadata.
const SLOTS_PER_REQUEST: usize = 4;
/// Submission entries: a batch of requests with what belongs to them.
const ENTRIES: u32 = 256;
/// Operations in flight at once: a little less than all requests may have, so that the completions
/// that the ring makes room for (twice as many, and 64) are 2048 and not 4096. All of that room is
/// taken from the start.
const SLOTS: usize = REQUESTS_MAX * SLOTS_PER_REQUEST - 32;
/// Longest poll of virtqueues and storage before a sleep. Waking an idle CPU costs about 75 µs on
/// small machines, so a poll as long as that loses at most half; it is tried only while it pays.
const POLL: Duration = Duration::from_micros(80);

thread_local! {
    static WORKER: RefCell<Option<Rc<Worker>>> = const { RefCell::new(None) };
}

/// What a queue thread is made of.
#[derive(Debug)]
pub(crate) struct ThreadSetup {
    pub(crate) index: usize,
    /// CPUs that it is bound to; empty: it runs where the scheduler wants.
    pub(crate) cpus: CpuList,
    pub(crate) disk: Arc<Disk>,
    pub(crate) device: Arc<Device>,
    /// Guest memory is registered with the ring; shared by the threads of an export.
    pub(crate) pins: Option<Arc<Told>>,
    /// The ring does nothing but what serving takes.
    pub(crate) restricted: bool,
}

struct Ready {
    remote: Remote,
    counters: Arc<Counters>,
    cells: Arc<QueueCells>,
    watch: Arc<Watch>,
    pin_error: Option<String>,
}

/// A running queue thread.
#[derive(Debug)]
pub(crate) struct QueueThread {
    thread: Option<JoinHandle<()>>,
    remote: Remote,
    stop: Arc<AtomicBool>,
    done: Receiver<()>,
    watch: Arc<Watch>,
    pub(crate) view: QueueView,
    /// Why it could not be bound to its CPU.
    pub(crate) pin_error: Option<String>,
}

/// The answer to something that a thread was asked to do.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    answer: Receiver<T>,
    watch: Arc<Watch>,
}

/// The thread has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

impl<T> Pending<T> {
    /// Waits for it.
    ///
    /// * `idle`: called now and then while there is no answer; `false` gives up.
    pub(crate) fn wait(self, mut idle: impl FnMut() -> bool) -> Result<T, Gone> {
        loop {
            match self.answer.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if idle() => self.watch.look(),
                Err(_) => return Err(Gone),
            }
        }
    }
}

impl QueueThread {
    /// Starts the thread and makes its ring.
    ///
    /// Errors: [`SetupError`].
    pub(crate) fn start(setup: ThreadSetup) -> Result<QueueThread, SetupError> {
        let (ready_sender, ready) = sync_channel(1);
        let (done_sender, done) = sync_channel(1);
        let stop = Arc::new(AtomicBool::new(false));
        let thread_stop = Arc::clone(&stop);
        let cpu = setup.cpus.only();
        let thread = std::thread::Builder::new()
            .name(format!("vq-{}", setup.index))
            .spawn(move || {
                let device = Arc::clone(&setup.device);
                let served =
                    catch_unwind(AssertUnwindSafe(|| run(setup, &ready_sender, &thread_stop)));
                if served.is_err() {
                    device.thread_panicked();
                }
                let _ = done_sender.send(());
            })
            .map_err(SetupError::Limit)?;
        let ready: Ready = match ready.recv() {
            Ok(result) => result?,
            Err(_) => {
                return Err(SetupError::Other(std::io::Error::other("the queue thread ended")));
            }
        };
        let cpu = cpu.filter(|_| ready.pin_error.is_none());
        let view = QueueView {
            cells: ready.cells,
            ring: ready.counters,
            remote: ready.remote.clone(),
            cpu,
        };
        Ok(QueueThread {
            thread: Some(thread),
            remote: ready.remote,
            stop,
            done,
            watch: ready.watch,
            view,
            pin_error: ready.pin_error,
        })
    }

    /// Does something on the thread.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Rc<Worker>) -> T + Send + 'static,
    ) -> Pending<T> {
        let (sender, receiver) = sync_channel(1);
        self.remote.run(move |_| {
            if let Some(worker) = WORKER.with_borrow(Clone::clone) {
                let _ = sender.send(job(&worker));
            }
        });
        Pending { answer: receiver, watch: Arc::clone(&self.watch) }
    }

    /// Does something on the thread that waits for other tasks there.
    pub(crate) fn ask_task<T, F>(
        &self,
        job: impl FnOnce(Rc<Worker>) -> F + Send + 'static,
    ) -> Pending<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.ask_task_or(job, |_| {})
    }

    /// The same with something that must not stay when nobody waits for the answer any more.
    ///
    /// * `undo`: called then, on the thread. Whoever gives up sees to it by itself if the answer
    ///   has just come.
    pub(crate) fn ask_task_or<T, F>(
        &self,
        job: impl FnOnce(Rc<Worker>) -> F + Send + 'static,
        undo: impl FnOnce(&Worker) + Send + 'static,
    ) -> Pending<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = sync_channel(1);
        self.remote.run(move |ring| {
            if let Some(worker) = WORKER.with_borrow(Clone::clone) {
                let task = job(Rc::clone(&worker));
                ring.spawn(async move {
                    if sender.send(task.await).is_err() {
                        undo(&worker);
                    }
                });
            }
        });
        Pending { answer: receiver, watch: Arc::clone(&self.watch) }
    }

    /// Asks the thread to end; requests in flight are dropped.
    pub(crate) fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.remote.run(|_| {});
    }

    /// Waits for the end of the thread. False when it did not end in time; it is left behind then.
    pub(crate) fn join(&mut self, deadline: Instant) -> bool {
        let ended = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.done.recv_timeout(left.min(LOOK)) {
                Ok(()) => break true,
                Err(RecvTimeoutError::Timeout) if left > LOOK => self.watch.look(),
                Err(_) => break false,
            }
        };
        if let Some(thread) = self.thread.take()
            && ended
        {
            let _ = thread.join();
        }
        ended
    }
}

/// The thread.
fn run(setup: ThreadSetup, ready: &SyncSender<Result<Ready, SetupError>>, stop: &AtomicBool) {
    // First the CPU, then the memory: pages are taken from the node of the thread that touches
    // them.
    let pin_error =
        (!setup.cpus.is_empty()).then(|| pin_to_cpus(&setup.cpus).err()).flatten().map(|errno| {
            format!("queue thread {} runs unbound: CPU {}: {errno}", setup.index, setup.cpus)
        });
    // Naps of some µs are meant as they are; the usual slack of timers is longer than they.
    let _ = set_current_timer_slack(NonZeroU64::new(1000));
    let slots = u32::try_from(SLOTS).unwrap_or(512);
    let config = Config {
        entries: ENTRIES,
        slots,
        spin: SpinPolicy::adaptive(POLL),
        name: format!("vq-{}", setup.index),
        restricted: setup.restricted,
        ..Config::default()
    };
    let watch = match Watch::of_this_thread() {
        Ok(watch) => watch,
        Err(errno) => {
            let _ = ready.send(Err(SetupError::Other(errno.into())));
            return;
        }
    };
    let mut runtime = match Runtime::new(config) {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let ring = runtime.ring().clone();
    let cells = Arc::new(QueueCells::default());
    cells.thread_id.set(u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()));
    let worker = Worker::new(
        &ring,
        setup.disk,
        setup.device,
        Arc::clone(&cells),
        setup.pins,
        Arc::clone(&watch),
    );
    WORKER.set(Some(Rc::clone(&worker)));
    ring.set_source(worker);
    let told = ready.send(Ok(Ready {
        remote: ring.remote(),
        counters: ring.counters(),
        cells: Arc::clone(&cells),
        watch,
        pin_error,
    }));
    if told.is_ok() {
        // Polled again whenever another thread sends a job.
        runtime.block_on(poll_fn(|_| {
            if stop.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
        }));
    }
    WORKER.set(None);
    drop(runtime);
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let nanos = cpu.tv_sec.unsigned_abs() * 1_000_000_000 + cpu.tv_nsec.unsigned_abs();
    cells.cpu_ns.set(nanos.max(1));
}
