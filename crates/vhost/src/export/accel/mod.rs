//! Virtqueues in the host kernel (`kernel/vhost-blk`): when they go there, and how they come back.
//!
//! Promises: a virtqueue is on its queue thread or in the kernel, never in both: it is drained before it moves, in either direction, and
//! nothing is waited for but requests in flight. While one is in the kernel the disk is held ([`ringdisk_disk::Disk::hold_plain`]), so that no
//! change of it can begin before all are back. What the kernel refuses costs speed and nothing else: queue threads serve on.
//!
//! Control thread; what is shown of it is read by any.

mod claim;
mod obstacle;
mod shown;
mod workers;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_disk::Plain;
use ringdisk_storage::Kind;
use ringdisk_vblk::{DiskSetup, RingSetup, State, Vblk};

use super::backend::Control;
use crate::blk::SERIAL_BYTES;
use crate::blk::config::RANGES_MAX;
use crate::session::Refusal;
use crate::worker::{Gone, Pending, Worker, areas};
use crate::{Error, ErrorKind};

pub(crate) use obstacle::Obstacle;
use obstacle::{Look, obstacle};
pub use ringdisk_vblk::Engine;
pub(super) use shown::Shown;
pub use shown::{Acceleration, QueueInKernel};

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
    /// Nobody else may claim the device meanwhile.
    claim: Option<OwnedFd>,
    /// Features, memory and disk are in place, and the disk is held.
    is_prepared: bool,
    in_kernel: Vec<bool>,
    /// As the module was told, bytes.
    capacity: u64,
    pub(super) shown: Arc<Shown>,
}

impl Accel {
    /// Opens the module's device. Before a sandbox, in the process that serves.
    ///
    /// Errors: it is required and cannot be had.
    pub(super) fn open(options: AccelOptions, queues: u16) -> Result<Accel, Error> {
        let vblk = Vblk::open(queues).map(|vblk| Arc::new(Mutex::new(vblk)));
        let is_missing = matches!(vblk, Err(ringdisk_vblk::Error::Missing { .. }));
        let vblk = vblk.map_err(|error| error.to_string());
        if let (true, Err(why)) = (options.required, &vblk) {
            let text = format!("--accel require: {why}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let shown = Arc::new(Shown::new(vblk.as_ref().ok().cloned(), options.engine));
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
            shown,
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
    fn uses_kernel(&self) -> bool {
        self.accel.as_ref().is_some_and(Accel::is_used)
    }

    /// Why virtqueues cannot be in the kernel at this moment; `None`: they can. Without acceleration there is nothing to ask.
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
            size: self.disk.size(),
            disk: disk.as_ref().map(|align| *align).map_err(String::as_str),
            features: (features != 0).then_some(features),
            regions: self.memory.regions().len(),
            regions_max,
            ring_size: sizes.max().unwrap_or(0),
            ring_max,
            is_broken: self.device.needs_reset(),
            wants_device: accel.options.engine == Engine::Bio && is_file,
        })
    }

    /// Looks at the conditions that hold before there is a guest. Gives whether the kernel may serve.
    ///
    /// Errors: it is required and cannot be.
    pub(super) fn check_accel(&mut self) -> Result<bool, Error> {
        let obstacle = self.accel_obstacle();
        let Some(accel) = &self.accel else { return Ok(false) };
        accel.shown.set(false, obstacle.clone());
        let Some(why) = obstacle else { return Ok(true) };
        if accel.options.required {
            let name = &self.device.name;
            let text = format!("--accel require: the kernel cannot serve {name}, since {why}");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let name = &self.device.name;
        match why {
            // Somebody has installed it, and it is of no use.
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

    /// Moves a virtqueue from its thread into the kernel, if it may be there.
    ///
    /// Errors: it is on neither now.
    pub(super) fn move_to_kernel(&mut self, index: u16) -> Result<(), Refusal> {
        if self.accel.is_none() || self.is_in_kernel(index) {
            return Ok(());
        }
        let mut why = self.accel_obstacle();
        if why.is_none() {
            let settled = self
                .thread(index)
                .ask_task(move |worker| async move { worker.settle(index).await });
            let base = self.wait_and_give_way(settled)?;
            if let Err(obstacle) = self.enter_kernel(index, base) {
                self.take_back_all();
                self.put_on_thread(index, base)?;
                why = Some(obstacle);
            }
        } else {
            // All of them or none: what keeps one out keeps the disk out.
            self.take_back_all();
        }
        self.tell_accel(why);
        Ok(())
    }

    /// Waits for a queue thread while other virtqueues may be in the kernel, which holds the disk. A change of the disk may come now, for which
    /// the thread's requests wait, and which waits for the hold: then the others come back.
    pub(super) fn wait_and_give_way<T>(&mut self, pending: Pending<T>) -> Result<T, Gone> {
        let is_patient = self.is_patient();
        pending.wait(|| {
            if self.signals.take_recall() {
                self.take_back_all();
            }
            is_patient()
        })
    }

    /// Says where virtqueues are, and why, when that is news.
    fn tell_accel(&mut self, why: Option<Obstacle>) {
        let Some(accel) = &mut self.accel else { return };
        if let Some(Obstacle::Trouble(trouble)) = &why {
            accel.trouble = Some(trouble.clone());
        }
        if accel.shown.set(accel.is_used(), why.clone()) {
            let name = &self.device.name;
            match why {
                None => tracing::info!("{name}: the kernel serves the virtqueues"),
                Some(why) => tracing::info!("{name}: the queue threads serve, since {why}"),
            }
        }
    }

    fn enter_kernel(&mut self, index: u16, base: u32) -> Result<(), Obstacle> {
        self.prepare_kernel()?;
        self.bring_worker_home(index);
        let Some(accel) = &mut self.accel else { return Ok(()) };
        let mut vblk = locked(accel.vblk.as_ref().map_err(|why| Obstacle::Module(why.clone()))?);
        let ring = &self.rings[usize::from(index)];
        let trouble = |why: &dyn std::fmt::Display| Obstacle::Trouble(why.to_string());
        let setup = ring.setup.as_ref().ok_or_else(|| trouble(&"it was not set up"))?;
        let areas =
            areas(&self.memory, setup, self.device.features()).map_err(|error| trouble(&error))?;
        let ring = RingSetup {
            size: setup.size,
            base: u16::try_from(base & 0xffff).unwrap_or(0),
            areas,
            kick: setup.kick.as_fd(),
            call: ring.call.as_ref().map(AsFd::as_fd),
            // A ring that the kernel gives up is ours to look at (`look_at_kernel`).
            err: Some(self.signals.as_fd()),
        };
        if let Some(area) = &self.inflight {
            // Nothing is in flight at this moment, and what the kernel takes it completes, whatever becomes of us: whoever comes next begins
            // at the used index.
            area.retire(index);
        }
        vblk.start(index, ring).map_err(|error| trouble(&error))?;
        accel.in_kernel[usize::from(index)] = true;
        Ok(())
    }

    /// Holds the disk and tells the module of it, of the features and of the memory.
    fn prepare_kernel(&mut self) -> Result<(), Obstacle> {
        if self.accel.as_ref().is_none_or(|accel| accel.is_prepared) {
            return Ok(());
        }
        // Not before: here they are made by a thread of the sandbox, and have its rights.
        self.make_workers().map_err(Obstacle::Trouble)?;
        let held = self.threads[0].ask_task(Worker::hold_disk);
        let plain = held
            .wait(self.is_patient())
            .map_err(|_| Obstacle::Trouble(String::from("the queue thread does not answer")))?
            .map_err(|error| Obstacle::Disk(error.to_string()))?;
        let claimed = if plain.is_block_device && !plain.read_only {
            claim::claim(plain.fd.as_fd()).map(Some).map_err(Obstacle::InUse)
        } else {
            Ok(None)
        };
        let ready = claimed.and_then(|claim| {
            self.describe(&plain).map_err(Obstacle::Trouble)?;
            Ok(claim)
        });
        match (&mut self.accel, ready) {
            (Some(accel), Ok(claim)) => {
                (accel.is_prepared, accel.capacity, accel.claim) = (true, plain.size, claim);
                Ok(())
            }
            (_, Err(why)) => {
                self.let_disk_go();
                Err(why)
            }
            (None, Ok(_)) => Ok(()),
        }
    }

    fn describe(&self, plain: &Plain) -> Result<(), String> {
        let Some(accel) = &self.accel else { return Ok(()) };
        let mut vblk = locked(accel.vblk.as_ref()?);
        let features = self.device.features() & vblk.info().features;
        vblk.set_features(features).map_err(refused)?;
        vblk.set_memory(Arc::clone(&self.memory)).map_err(refused)?;
        let mut id = [0; SERIAL_BYTES];
        id.copy_from_slice(&self.device.serial);
        let disk = DiskSetup {
            fd: plain.fd.as_fd(),
            engine: accel.options.engine,
            read_only: self.device.read_only,
            write_through: plain.write_through || self.device.is_write_through(),
            block_bytes: self.device.logical_block,
            memory_align: plain.memory_align,
            ranges_max: RANGES_MAX.min(vblk.info().ranges_max),
            range_sectors_max: self.config.longest_range_sectors(),
            capacity: plain.size,
            id,
        };
        vblk.set_disk(Some(&disk)).map_err(refused)
    }

    /// Nothing of ours is in the kernel any more: changes of the disk may go on.
    fn let_disk_go(&mut self) {
        let Some(accel) = &mut self.accel else { return };
        accel.is_prepared = false;
        if let Ok(vblk) = &accel.vblk {
            let mut vblk = locked(vblk);
            // The memory of a guest that has gone goes, too.
            if let Err(error) = vblk.set_disk(None).and_then(|()| vblk.forget_memory()) {
                let name = &self.device.name;
                tracing::warn!("{name}: the kernel keeps the image and the memory: {error}");
            }
        }
        accel.claim = None;
        let released = self.threads[0].ask(|worker| worker.release_disk());
        let _ = released.wait(self.is_patient());
    }

    /// Drains a virtqueue that is in the kernel and takes it off. Gives its base.
    ///
    /// Errors: the kernel does not give it back (this process is being killed). It stays there, with its memory and the disk.
    pub(super) fn stop_in_kernel(&mut self, index: u16) -> Result<u32, Refusal> {
        let Some(accel) = &mut self.accel else { return Err("it is not in the kernel".into()) };
        let stopped = {
            let mut vblk = locked(accel.vblk.as_ref().map_err(Clone::clone)?);
            let stopped = vblk.stop(index);
            accel.in_kernel[usize::from(index)] = vblk.is_started(index);
            stopped
        };
        if !accel.is_used() {
            accel.shown.set(false, None);
            self.let_disk_go();
        }
        stopped.map(u32::from).map_err(|error| {
            let text = format!("virtqueue {index} does not come back from the kernel: {error}");
            self.device.set_broken(text.clone());
            Refusal::new(text)
        })
    }

    /// Takes all virtqueues back; they go on, on their threads. What the kernel does not give back (this process is being killed) stays
    /// there, with its memory and the disk; whoever comes next finds what is in flight in the ring.
    pub(super) fn take_back_all(&mut self) {
        let Some(accel) = &mut self.accel else { return };
        let Ok(vblk) = &accel.vblk else { return };
        let mut bases = Vec::new();
        if accel.is_used() {
            let mut vblk = locked(vblk);
            match vblk.stop_all() {
                Ok(stopped) => bases = stopped,
                Err(error) => {
                    let text = format!("the kernel does not give virtqueues back: {error}");
                    self.device.set_broken(text);
                }
            }
            for (index, is_there) in (0..).zip(&mut accel.in_kernel) {
                *is_there = vblk.is_started(index);
            }
        }
        if accel.is_used() {
            return;
        }
        accel.shown.set(false, None);
        if accel.is_prepared {
            self.let_disk_go();
        }
        for (index, base) in bases {
            if let Err(refusal) = self.put_on_thread(index, u32::from(base)) {
                self.device.set_broken(format!("virtqueue {index} does not go on here: {refusal}"));
            }
        }
    }

    /// Moves all virtqueues that run into the kernel, if they may be there.
    fn consider_kernel(&mut self) {
        let running: Vec<u16> = (0..self.config.queues).filter(|i| self.runs(*i)).collect();
        for index in running {
            if let Err(refusal) = self.move_to_kernel(index) {
                self.device.set_broken(format!("virtqueue {index} does not go on: {refusal}"));
                return;
            }
        }
    }

    /// Something has changed: what was refused before is tried again.
    pub(super) fn reconsider_kernel(&mut self) {
        self.forget_trouble();
        self.consider_kernel();
    }

    /// What the kernel has refused does not count any more.
    pub(super) fn forget_trouble(&mut self) {
        if let Some(accel) = &mut self.accel {
            accel.trouble = None;
        }
    }

    /// Switches acceleration off or on (`ringdisk ctl … accel`).
    pub(super) fn switch_accel(&mut self, on: bool) -> Result<(), String> {
        let Some(accel) = &mut self.accel else {
            return Err(String::from("it was started with --accel off"));
        };
        accel.is_switched_off = !on;
        if on {
            self.reconsider_kernel();
        } else {
            self.take_back_all();
        }
        let obstacle = self.accel_obstacle();
        if let Some(accel) = &self.accel {
            accel.shown.set(accel.is_used(), obstacle.clone());
        }
        match obstacle {
            Some(why) if on => Err(format!("the kernel cannot serve this disk, since {why}")),
            _ => Ok(()),
        }
    }

    /// The disk may have another size, which the module is told while none of its virtqueues runs.
    pub(super) fn follow_size_in_kernel(&mut self) {
        let capacity = self.accel.as_ref().map(|accel| accel.capacity);
        if self.uses_kernel() && capacity != Some(self.disk.size()) {
            self.take_back_all();
            self.reconsider_kernel();
        }
    }

    /// Looks whether the kernel has given a virtqueue up: then the device is broken, as on its own threads.
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
            let _ = rustix::io::write(error, &1_u64.to_ne_bytes());
        }
    }

    /// Regions were added to the memory: the module takes it while none of its virtqueues runs.
    pub(super) fn show_memory_to_kernel(&mut self) {
        if self.uses_kernel() {
            self.take_back_all();
        }
        self.reconsider_kernel();
    }

    /// The driver has turned the write cache off or on. Gives whether the kernel has done so: off means that all that was answered is durable, too.
    /// Where it cannot, the virtqueues come back to their threads, which do.
    pub(super) fn show_cache_to_kernel(&mut self) -> bool {
        if !self.uses_kernel() {
            return false;
        }
        let is_through = self.device.is_write_through() || self.disk.cache().sync();
        let Some(Ok(vblk)) = self.accel.as_ref().map(|accel| &accel.vblk) else { return false };
        let shown = locked(vblk).set_cache(!is_through);
        if let Err(error) = &shown {
            tracing::warn!("{}: the queue threads serve, since {error}", self.device.name);
            self.take_back_all();
        }
        shown.is_ok()
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
            // What was completed before was told to nobody.
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
        Ok(())
    }
}
