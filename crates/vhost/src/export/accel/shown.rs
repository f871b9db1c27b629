//! What is shown of virtqueues in the kernel. Any thread.

use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_vblk::{Engine, Stats, Vblk, Worker};

use super::{Obstacle, locked};

/// How it is with a disk's virtqueues and the kernel.
#[derive(Clone, Debug)]
pub struct Acceleration {
    /// Virtqueues are in the kernel.
    pub on: bool,
    /// Why they are not; `None` also when none runs.
    pub obstacle: Option<String>,
    /// As it was asked for.
    pub engine: Engine,
    /// Kernel threads that serve.
    pub workers: Vec<Worker>,
    /// What the module counted, for each virtqueue; empty when there is no module.
    pub queues: Vec<QueueInKernel>,
}

/// Counters of a virtqueue in the kernel, since the start of the export.
pub type QueueInKernel = Stats;

/// The state, for those who ask.
#[derive(Debug)]
pub(in crate::export) struct Shown {
    vblk: Option<Arc<Mutex<Vblk>>>,
    engine: Engine,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    on: bool,
    obstacle: Option<Obstacle>,
}

impl Shown {
    pub(super) fn new(vblk: Option<Arc<Mutex<Vblk>>>, engine: Engine) -> Shown {
        Shown { vblk, engine, now: Mutex::default() }
    }

    /// Returns whether that is news.
    pub(super) fn set(&self, on: bool, obstacle: Option<Obstacle>) -> bool {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = now.on != on || now.obstacle != obstacle;
        (now.on, now.obstacle) = (on, obstacle);
        is_news
    }

    /// Whether there is the module.
    pub(in crate::export) fn has_kernel(&self) -> bool {
        self.vblk.is_some()
    }

    /// How it is now.
    pub(in crate::export) fn read(&self) -> Acceleration {
        let (on, obstacle) = {
            let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
            (now.on, now.obstacle.as_ref().map(ToString::to_string))
        };
        let mut shown = Acceleration {
            on,
            obstacle,
            engine: self.engine,
            workers: Vec::new(),
            queues: Vec::new(),
        };
        if let Some(vblk) = &self.vblk {
            let vblk = locked(vblk);
            shown.workers = vblk.workers().to_vec();
            shown.queues = (0..vblk.queues()).filter_map(|index| vblk.stats(index).ok()).collect();
        }
        shown
    }
}
