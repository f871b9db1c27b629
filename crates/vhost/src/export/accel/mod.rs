//! Virtqueues in the host kernel (`kernel/vhost-blk`): when they go there, and how they come back.
//!
//! Promises: a virtqueue is on its queue thread or in the kernel, never in both ([`moves`]). While
//! one is in the kernel the disk is held ([`ringdisk_disk::Disk::hold_plain`]), so that no change
//! of it can begin before all are back. What the kernel refuses costs speed and nothing else: queue
//! threads serve on. Where they are, and why, is said once for each front end.
//!
//! Control thread; any thread reads its status.

mod claim;
mod errors;
mod moves;
mod obstacle;
mod status;
mod workers;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_storage::Kind;
use ringdisk_vblk::Vblk;

use super::backend::Control;
use crate::session::Refusal;
use crate::{Error, ErrorKind};

use errors::KernelErrors;
pub(super) use errors::{KERNEL_POLL_INTERVAL, Occasion};
pub(crate) use obstacle::Obstacle;
use obstacle::{Look, obstacle};
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
pub(super) struct Accel {
    options: AccelOptions,
    /// The module's device of this export; or why there is none.
    vblk: Result<Arc<Mutex<Vblk>>, String>,
    /// The module is not there, as on most machines; else there may be something to mend.
    is_missing: bool,
    is_switched_off: bool,
    /// What the kernel refused. Tried again when something has changed.
    trouble: Option<String>,
    /// Kernel threads are made, and each has its virtqueues.
    has_workers: bool,
    /// No other process may claim the device meanwhile.
    claim: Option<OwnedFd>,
    /// Features, memory and disk are in place, and the disk is held.
    is_prepared: bool,
    in_kernel: Vec<bool>,
    /// As the module was told, bytes.
    capacity: u64,
    /// What the control thread last logged about where virtqueues are, and why: some messages of
    /// front ends take them back for a moment, which is no news.
    reported: Option<(bool, Option<Obstacle>)>,
    errors: KernelErrors,
    pub(super) status: Arc<KernelStatus>,
}

/// What makes up for a module that was not usable at the start.
const RETRY_HINT: &str =
    "this process looked when it started, one with --upgrade takes over and looks again";

impl Accel {
    /// Opens the module's device. Before a sandbox, in the process that serves.
    ///
    /// Errors: it is required and cannot be had.
    pub(super) fn open(options: AccelOptions, queues: u16) -> Result<Accel, Error> {
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

    fn is_in_kernel(&self, index: u16) -> bool {
        self.in_kernel[usize::from(index)]
    }

    fn is_used(&self) -> bool {
        self.in_kernel.contains(&true)
    }
}

/// The device; a panic elsewhere leaves it valid.
fn locked(vblk: &Mutex<Vblk>) -> MutexGuard<'_, Vblk> {
    vblk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the kernel refused.
fn refused(error: ringdisk_vblk::Error) -> String {
    error.to_string()
}

impl Control {
    /// Whether a virtqueue is in the kernel.
    pub(super) fn is_in_kernel(&self, index: u16) -> bool {
        self.accel.as_ref().is_some_and(|accel| accel.is_in_kernel(index))
    }

    /// Whether any is.
    pub(super) fn uses_kernel(&self) -> bool {
        self.accel.as_ref().is_some_and(Accel::is_used)
    }

    /// Why virtqueues cannot be in the kernel at this moment; `None`: they can. Without
    /// acceleration there is nothing to ask.
    fn accel_obstacle(&self) -> Option<Obstacle> {
        let accel = self.accel.as_ref()?;
        let (regions_max, ring_max) = match &accel.vblk {
            Ok(vblk) => {
                let vblk = locked(vblk);
                (vblk.regions_max(), vblk.info().ring_max)
            }
            Err(_) => (0, 0),
        };
        let disk = self.disk.check_plain();
        let is_file = disk.as_ref().is_ok_and(|(_, kind)| *kind != Kind::BlockDevice);
        let disk = disk.map(|(limits, _)| limits.offset_align).map_err(|error| error.to_string());
        let features = self.device.features();
        let sizes = self.rings.iter().filter_map(|ring| ring.setup.as_ref().map(|it| it.size));
        obstacle(&Look {
            unusable: accel.vblk.as_ref().err().map(String::as_str),
            is_switched_off: accel.is_switched_off,
            trouble: accel.trouble.as_deref(),
            on_error: self.device.on_error,
            logical_block: self.device.logical_block,
            size: self.disk.size().0,
            disk: disk.as_ref().map(|align| *align).map_err(String::as_str),
            features: (features != 0).then_some(features),
            regions: self.memory.regions().len(),
            regions_max,
            ring_size: sizes.max().unwrap_or(0),
            ring_max,
            is_broken: self.device.needs_reset() || self.memory.is_lost(),
            wants_device: accel.options.engine == Engine::Bio && is_file,
        })
    }

    /// Looks at the conditions that hold before there is a guest. Gives whether the kernel may
    /// serve.
    ///
    /// Errors: it is required and cannot be.
    pub(super) fn check_accel(&mut self) -> Result<bool, Error> {
        let obstacle = self.accel_obstacle();
        let Some(accel) = &mut self.accel else { return Ok(false) };
        accel.status.set(false, obstacle.clone());
        accel.reported = obstacle.clone().map(|why| (false, Some(why)));
        let Some(why) = obstacle else { return Ok(true) };
        if accel.options.required {
            let name = &self.device.name;
            let text = format!("--accel require: the kernel cannot serve {name}, since {why}");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let name = &self.device.name;
        match why {
            // It was installed, and it is of no use.
            Obstacle::Module(why) if !accel.is_missing => {
                tracing::warn!("{name}: the queue threads serve, since {why}");
            }
            why => tracing::info!("{name}: the queue threads serve, since {why}"),
        }
        Ok(false)
    }

    /// Whether virtqueues may start at all.
    ///
    /// Errors: acceleration is required, and something that does not pass is in the way.
    pub(super) fn check_required(&self) -> Result<(), Refusal> {
        if !self.accel.as_ref().is_some_and(|accel| accel.options.required) {
            return Ok(());
        }
        match self.accel_obstacle() {
            Some(why) if !why.is_passing() => Err(Refusal::new(format!(
                "--accel require: the kernel cannot serve this disk, since {why}"
            ))),
            _ => Ok(()),
        }
    }

    /// Says where virtqueues are, and why, when that is news.
    fn tell_accel(&mut self, why: Option<Obstacle>) {
        let Some(accel) = &mut self.accel else { return };
        if let Some(Obstacle::Trouble(trouble)) = &why {
            accel.trouble = Some(trouble.clone());
        }
        accel.status.set(accel.is_used(), why.clone());
        let news = Some((accel.is_used(), why.clone()));
        if accel.reported == news {
            return;
        }
        accel.reported = news;
        let name = &self.device.name;
        match why {
            None if accel.is_used() => tracing::info!("{name}: the kernel serves the virtqueues"),
            None => {}
            Some(why @ Obstacle::Trouble(_)) => {
                tracing::warn!("{name}: the queue threads serve, since {why}");
            }
            Some(why) => tracing::info!("{name}: the queue threads serve, since {why}"),
        }
    }

    /// The front end has gone: what holds for the next one is news again.
    pub(super) fn forget_front_end(&mut self) {
        self.forget_trouble();
        if let Some(accel) = &mut self.accel {
            accel.reported.take_if(|(was_on, _)| *was_on);
        }
    }

    /// Something has changed: what was refused before is tried again.
    pub(super) fn reconsider_kernel(&mut self) {
        self.forget_trouble();
        self.consider_kernel();
    }

    /// What the kernel has refused does not count any more.
    fn forget_trouble(&mut self) {
        if let Some(accel) = &mut self.accel {
            accel.trouble = None;
        }
    }

    /// Switches acceleration off or on (`ringdisk ctl … accel`). Gives whether the kernel serves
    /// now; without a guest that may be later.
    ///
    /// Errors: why it cannot.
    pub(super) fn switch_accel(&mut self, on: bool) -> Result<bool, String> {
        let Some(accel) = &mut self.accel else {
            return Err(String::from("it was started without acceleration"));
        };
        accel.is_switched_off = !on;
        if on {
            self.reconsider_kernel();
        } else {
            self.take_back_all();
        }
        let obstacle = self.accel_obstacle();
        self.tell_accel(obstacle.clone());
        match obstacle {
            Some(why) if on => Err(format!("the kernel cannot serve this disk, since {why}")),
            _ => Ok(self.uses_kernel()),
        }
    }

    /// The disk may have another size, which the module is told while none of its virtqueues runs.
    pub(super) fn follow_size_in_kernel(&mut self) {
        let capacity = self.accel.as_ref().map(|accel| accel.capacity);
        if self.uses_kernel() && capacity != Some(self.disk.size().0) {
            self.take_back_all();
            self.reconsider_kernel();
        }
    }

    /// Looks whether the kernel has given a virtqueue up: then the device is broken, as on its own
    /// threads.
    pub(super) fn look_at_kernel(&mut self) {
        if !self.uses_kernel() {
            return;
        }
        if self.device.needs_reset() {
            self.take_back_all();
            return;
        }
        let Some(Ok(vblk)) = self.accel.as_ref().map(|accel| &accel.vblk) else { return };
        let is_broken = |index: &u16| {
            self.is_in_kernel(*index)
                && locked(vblk).stats(*index).is_ok_and(|stats| stats.state == State::Broken)
        };
        let Some(index) = (0..self.config.queues).find(is_broken) else { return };
        self.device.set_broken(format!("virtqueue {index}: the kernel gave it up"));
        self.take_back_all();
        if let Some(error) = &self.rings[usize::from(index)].error {
            self.signal(index, error.as_fd());
        }
    }

    /// Signals an eventfd of a virtqueue that is not on its queue thread. A write to it may wait,
    /// so this thread makes none.
    fn signal(&self, index: u16, event: BorrowedFd<'_>) {
        let Ok(event) = event.try_clone_to_owned() else { return };
        let signalled = self.thread(index).ask(move |worker| worker.signal(event));
        let _ = signalled.wait(self.may_wait());
    }

    /// Regions were added to the memory: the module takes it while none of its virtqueues runs.
    pub(super) fn show_memory_to_kernel(&mut self) {
        if self.uses_kernel() {
            self.take_back_all();
        }
        self.reconsider_kernel();
    }

    /// The driver has turned the write cache off or on. Gives whether the kernel has done so: off
    /// means that all that was answered is durable, too. Where it cannot, the virtqueues come back
    /// to their threads, which do.
    pub(super) fn show_cache_to_kernel(&mut self) -> bool {
        if !self.uses_kernel() {
            return false;
        }
        let is_through = self.device.is_write_through() || self.disk.cache().sync();
        let Some(Ok(vblk)) = self.accel.as_ref().map(|accel| &accel.vblk) else { return false };
        let set = locked(vblk).set_cache(!is_through);
        if let Err(error) = &set {
            let why = Obstacle::Trouble(error.to_string());
            self.take_back_all();
            self.tell_accel(Some(why));
        }
        set.is_ok()
    }

    /// Another eventfd to call the guest of a virtqueue that is in the kernel.
    pub(super) fn set_call_in_kernel(
        &self,
        index: u16,
        call: Option<BorrowedFd<'_>>,
    ) -> Result<(), Refusal> {
        let Some(Ok(vblk)) = self.accel.as_ref().map(|accel| &accel.vblk) else { return Ok(()) };
        locked(vblk).set_call(index, call).map_err(|error| Refusal::new(error.to_string()))?;
        if let Some(call) = call {
            // The guest was not called for what was completed before.
            self.signal(index, call);
        }
        Ok(())
    }
}
