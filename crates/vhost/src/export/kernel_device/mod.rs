//! The device of the host kernel's module (`kernel/vhost-blk`) that belongs to an export, and what
//! is known of it.
//!
//! Promises: one device for each export, opened before a sandbox. Control thread; any thread reads
//! its status.

mod claim;
mod errors;
mod obstacle;
mod status;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_vblk::Vblk;

use crate::{Error, ErrorKind};

pub(super) use claim::claim;
pub(super) use errors::{KERNEL_POLL_INTERVAL, KernelErrors, Occasion};
pub(crate) use obstacle::Obstacle;
pub(super) use obstacle::{Look, obstacle};
pub use ringdisk_vblk::{Engine, State, Stats as QueueCounters};
pub(super) use status::KernelStatus;
pub use status::{Acceleration, QueueInKernel};

/// Whether the kernel is to move the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccelOptions {
    /// Serve not at all where that cannot be.
    pub required: bool,
    /// Which mechanism carries reads and writes.
    pub engine: Engine,
    /// Kernel threads, at most one for each virtqueue; `None`: as many.
    pub workers: Option<u16>,
}

/// What is needed for it.
#[derive(Debug)]
pub(in crate::export) struct Accel {
    pub(in crate::export) options: AccelOptions,
    /// The module's device of this export; or why there is none.
    pub(in crate::export) vblk: Result<Arc<Mutex<Vblk>>, String>,
    /// The module is not there, as on most machines; else there may be something to mend.
    pub(in crate::export) is_missing: bool,
    pub(in crate::export) is_switched_off: bool,
    /// What the kernel refused. Tried again when something has changed.
    pub(in crate::export) trouble: Option<String>,
    /// Kernel threads are made, and each has its virtqueues.
    pub(in crate::export) has_workers: bool,
    /// No other process may claim the device meanwhile.
    pub(in crate::export) claim: Option<OwnedFd>,
    /// Features, memory and disk are in place, and the disk is held.
    pub(in crate::export) is_prepared: bool,
    pub(in crate::export) in_kernel: Vec<bool>,
    /// As the module was told, bytes.
    pub(in crate::export) capacity: u64,
    /// What was last said of where virtqueues are, and why: some messages of front ends take them
    /// back for a moment, which is no news.
    pub(in crate::export) reported: Option<(bool, Option<Obstacle>)>,
    pub(in crate::export) errors: KernelErrors,
    pub(in crate::export) status: Arc<KernelStatus>,
}

/// What makes up for a module that was not usable at the start.
const RETRY_HINT: &str =
    "this process looked when it started, one with --upgrade takes over and looks again";

impl Accel {
    /// Opens the module's device. Before a sandbox, in the process that serves.
    ///
    /// Errors: it is required and cannot be had.
    pub(in crate::export) fn open(options: AccelOptions, queues: u16) -> Result<Accel, Error> {
        let vblk = Vblk::open(queues).map(|vblk| Arc::new(Mutex::new(vblk)));
        let is_missing = matches!(vblk, Err(ringdisk_vblk::Error::Missing { .. }));
        if let (true, Err(why)) = (options.required, &vblk) {
            let text = format!("--accel require: {why}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // A process that serves cannot try again: it may be in a sandbox without a way to the
        // device.
        let vblk = vblk.map_err(|error| format!("{error}; {RETRY_HINT}"));
        let status = Arc::new(KernelStatus::new(vblk.as_ref().ok().cloned(), &options));
        let in_kernel = vec![false; usize::from(queues)];
        Ok(Accel {
            options,
            vblk,
            is_missing,
            is_switched_off: false,
            trouble: None,
            has_workers: false,
            claim: None,
            is_prepared: false,
            in_kernel,
            capacity: 0,
            reported: None,
            errors: KernelErrors::default(),
            status,
        })
    }

    pub(in crate::export) fn is_in_kernel(&self, index: u16) -> bool {
        self.in_kernel[usize::from(index)]
    }

    pub(in crate::export) fn is_used(&self) -> bool {
        self.in_kernel.contains(&true)
    }
}

/// The device; a panic elsewhere leaves it valid.
pub(in crate::export) fn locked(vblk: &Mutex<Vblk>) -> MutexGuard<'_, Vblk> {
    vblk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the kernel refused.
pub(in crate::export) fn refused(error: ringdisk_vblk::Error) -> String {
    error.to_string()
}
