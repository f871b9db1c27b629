//! The state of virtqueues in the kernel, for reports.
//!
//! Promises: reading it waits for the device for 200 ms at most. Any thread.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ringdisk_vblk::{Engine, Stats, Vblk, Worker};

use super::{AccelOptions, Obstacle};

/// A reader waits so long for the device: while a virtqueue is drained whose storage does not
/// answer, no other thread can use it.
const TIMEOUT: Duration = Duration::from_millis(200);
/// And looks so often.
const PAUSE: Duration = Duration::from_millis(2);

/// How it is with a disk's virtqueues and the kernel.
#[derive(Clone, Debug)]
pub struct Acceleration {
    /// Virtqueues are in the kernel.
    pub on: bool,
    /// Nothing else will do: a disk that the kernel cannot serve is refused.
    pub required: bool,
    /// Why they are not; `None` also when none runs.
    pub obstacle: Option<String>,
    /// As it was asked for.
    pub engine: Engine,
    /// What carries reads and writes of the disk that the kernel has; `None` while it has none.
    pub engine_in_force: Option<Engine>,
    /// Kernel threads that serve.
    pub workers: Vec<Worker>,
    /// What the module says of each virtqueue; empty when there is no module.
    pub queues: Vec<QueueInKernel>,
}

/// A virtqueue, as the module knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueInKernel {
    /// Its state, and counters since the start of the export.
    pub stats: Stats,
    /// The kernel's thread that serves it when it is there; `None` where there is none yet, or it
    /// could not be told from others.
    pub worker: Option<u32>,
}

impl QueueInKernel {
    /// Requests that the kernel has answered, of all kinds.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let Stats { reads, writes, flushes, discards, write_zeroes, get_ids, .. } = self.stats;
        // What it does not know is of none of these kinds; a discard or write zeroes with flags
        // that it does not know counts in both.
        let kinds =
            [reads, writes, flushes, discards, write_zeroes, get_ids, self.stats.unsupported];
        kinds.iter().sum::<u64>().saturating_sub(u64::from(self.stats.in_flight))
    }
}

/// The state, for those who ask.
#[derive(Debug)]
pub(in crate::export) struct KernelStatus {
    vblk: Option<Arc<Mutex<Vblk>>>,
    required: bool,
    engine: Engine,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    on: bool,
    obstacle: Option<Obstacle>,
    engine: Option<Engine>,
    workers: Vec<Worker>,
    /// As they were when the device could be asked.
    queues: Vec<QueueInKernel>,
}

impl KernelStatus {
    pub(in crate::export) fn new(
        vblk: Option<Arc<Mutex<Vblk>>>,
        options: &AccelOptions,
    ) -> KernelStatus {
        let AccelOptions { required, engine, .. } = *options;
        KernelStatus { vblk, required, engine, now: Mutex::default() }
    }

    pub(in crate::export) fn set(&self, on: bool, obstacle: Option<Obstacle>) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        (now.on, now.obstacle) = (on, obstacle);
    }

    /// What carries reads and writes from now on; `None`: the kernel has no disk.
    pub(in crate::export) fn set_engine(&self, engine: Option<Engine>) {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).engine = engine;
    }

    /// Whether there is the module.
    pub(in crate::export) fn has_kernel(&self) -> bool {
        self.vblk.is_some()
    }

    /// How it is now. Counters are those of the last look when the device is busy with something
    /// that does not end.
    pub(in crate::export) fn read(&self) -> Acceleration {
        let fresh = self.look();
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((workers, queues)) = fresh {
            (now.workers, now.queues) = (workers, queues);
        }
        Acceleration {
            on: now.on,
            required: self.required,
            obstacle: now.obstacle.as_ref().map(ToString::to_string),
            engine: self.engine,
            engine_in_force: now.engine,
            workers: now.workers.clone(),
            queues: now.queues.clone(),
        }
    }

    /// Workers and counters; `None`: there are none, or the device is busy.
    fn look(&self) -> Option<(Vec<Worker>, Vec<QueueInKernel>)> {
        let vblk = self.vblk.as_ref()?;
        let begun = Instant::now();
        let vblk = loop {
            match vblk.try_lock() {
                Ok(vblk) => break vblk,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if begun.elapsed() > TIMEOUT => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        };
        let queue = |index| {
            let stats = vblk.stats(index).ok()?;
            Some(QueueInKernel { stats, worker: vblk.thread_of(index) })
        };
        let queues = (0..vblk.queues()).filter_map(queue).collect();
        Some((vblk.workers().to_vec(), queues))
    }
}
