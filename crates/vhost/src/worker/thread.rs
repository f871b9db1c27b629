//! A queue thread, as the control thread sees it.
//!
//! Promises: control thread; what it asks for is done on the queue thread, and each question has
//! one answer. A wait for the answer interrupts a call in which the queue thread is stuck
//! ([`Watch`]), and ends with an error when that thread is gone.

use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use ringdisk_disk::Disk;
use ringdisk_export::{EndThread, Gone, POLL_MAX, QueueThread, QueueWork, Running};
use ringdisk_ring::{Config, CpuList, SetupError, SpinPolicy};
use rustix::thread::set_current_timer_slack;

use super::watch::Watch;
use super::{REQUESTS_MAX, Reported, Worker};
use crate::device::Device;

/// Operations for each request: data of several extents, metadata.
const SLOTS_PER_REQUEST: usize = 4;
/// Submission entries: a batch of requests with what belongs to them.
const ENTRIES: u32 = 256;
/// Operations in flight at once: a little less than all requests may have, so that the completions
/// that the ring makes room for (twice as many, and 64) are 2048 and not 4096. All of that room is
/// taken from the start.
const SLOTS: usize = REQUESTS_MAX * SLOTS_PER_REQUEST - 32;

/// What a queue thread is made of.
#[derive(Debug)]
pub(crate) struct ThreadSetup {
    pub(crate) index: usize,
    /// CPUs that it is bound to; empty: it runs where the scheduler wants.
    pub(crate) cpus: CpuList,
    pub(crate) disk: Arc<Disk>,
    pub(crate) device: Arc<Device>,
    /// Guest memory is registered with the ring; shared by the threads of an export.
    pub(crate) pins: Option<Arc<Reported>>,
    /// The ring does nothing but what serving takes.
    pub(crate) restricted: bool,
}

/// A running queue thread.
#[derive(Debug)]
pub(crate) struct WorkerThread {
    pub(crate) thread: QueueThread<ThreadSetup>,
    watch: Arc<Watch>,
}

/// The answer to something that a thread was asked to do.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    answer: ringdisk_export::Pending<T>,
    watch: Arc<Watch>,
}

impl<T> Pending<T> {
    /// Waits for it.
    ///
    /// * `idle`: called now and then while there is no answer; `false` gives up.
    pub(crate) fn wait(self, mut idle: impl FnMut() -> bool) -> Result<T, Gone> {
        self.answer.wait(|| {
            self.watch.look();
            idle()
        })
    }
}

impl WorkerThread {
    /// Starts the thread and makes its ring.
    ///
    /// Errors: [`SetupError`].
    pub(crate) fn start(setup: ThreadSetup) -> Result<WorkerThread, SetupError> {
        let thread = ringdisk_export::ThreadSetup {
            number: setup.index,
            cpus: setup.cpus.clone(),
            ring: Config {
                entries: ENTRIES,
                slots: u32::try_from(SLOTS).unwrap_or(512),
                spin: SpinPolicy::adaptive(POLL_MAX),
                name: format!("vq-{}", setup.index),
                restricted: setup.restricted,
                ..Config::default()
            },
        };
        let (thread, watch) = QueueThread::start(thread, setup)?;
        Ok(WorkerThread { thread, watch })
    }

    /// Does something on the thread.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        closure: impl FnOnce(&Rc<Worker>) -> T + Send + 'static,
    ) -> Pending<T> {
        self.pending(self.thread.ask(closure))
    }

    /// Does something on the thread that waits for other tasks there.
    pub(crate) fn ask_task<T, F>(
        &self,
        closure: impl FnOnce(Rc<Worker>) -> F + Send + 'static,
    ) -> Pending<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.pending(self.thread.ask_task(closure))
    }

    /// As [`QueueThread::ask_task_or`].
    pub(crate) fn ask_task_or<T, F>(
        &self,
        closure: impl FnOnce(Rc<Worker>) -> F + Send + 'static,
        undo: impl FnOnce(&Worker) + Send + 'static,
    ) -> Pending<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.pending(self.thread.ask_task_or(closure, undo))
    }

    fn pending<T>(&self, answer: ringdisk_export::Pending<T>) -> Pending<T> {
        Pending { answer, watch: Arc::clone(&self.watch) }
    }
}

impl EndThread for WorkerThread {
    fn ask_to_stop(&self) {
        self.thread.ask_to_stop();
    }

    fn join(&mut self, deadline: Instant) -> bool {
        self.thread.join(deadline, || self.watch.look())
    }
}

impl QueueWork for ThreadSetup {
    type Shared = Arc<Watch>;
    type Local = Worker;

    fn run(&mut self, thread: &mut Running<ThreadSetup>) -> Result<(), SetupError> {
        // Naps of some µs are meant as they are; the usual slack of timers is longer than they.
        let _ = set_current_timer_slack(NonZeroU64::new(1000));
        let watch = Watch::of_this_thread().map_err(|errno| SetupError::Other(errno.into()))?;
        let worker = Worker::new(
            thread.ring(),
            Arc::clone(&self.disk),
            Arc::clone(&self.device),
            Arc::clone(thread.cells()),
            self.pins.clone(),
            Arc::clone(&watch),
        );
        thread.ring().set_source(Rc::clone(&worker) as _);
        if thread.ready(watch, worker) {
            thread.until_stopped(|| {});
        }
        Ok(())
    }

    fn panicked(&self) {
        self.device.thread_panicked();
    }
}
