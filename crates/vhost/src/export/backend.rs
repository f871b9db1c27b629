//! The device behind a session: what the control thread asks its queue threads to do.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::Disk;
use ringdisk_guest::inflight::InflightArea as Inflight;
use ringdisk_guest::{Areas, Layout, Log, Memory, Region};
use ringdisk_ring::pin_to_cpus;

use super::home::Homes;
use super::state::{self, StateTransfer};
use crate::BackChannel;
use crate::blk::config::{Config, SPACE_BYTES, WRITEBACK_AT};
use crate::blk::features::{LOG_ALL, RING_PACKED};
use crate::device::{Complaint, Device};
use crate::session::{
    Backend, ConfigWrite, InflightArea, Refusal, RegionSetup, StateDirection, VringSetup,
};
use crate::worker::{Gone, QueueThread, RingStart, areas, layout};

/// A migration's destination waits so long for the source to give the disk away.
const TAKE_OVER: Duration = Duration::from_secs(10);

/// Requests in flight have so long at the end of an export: storage that never answers does not hold the process up.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// The last flush has so long.
const CLOSE_PATIENCE: Duration = Duration::from_secs(300);

/// What the front end gave for a virtqueue.
#[derive(Debug, Default)]
pub(super) struct Ring {
    pub(super) call: Option<OwnedFd>,
    pub(super) error: Option<OwnedFd>,
    /// What it was started with, while it runs or is suspended.
    setup: Option<VringSetup>,
    /// It waits for its memory to come back, and goes on here.
    suspended_at: Option<u32>,
}

/// The device of one export.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) disk: Arc<Disk>,
    pub(super) device: Arc<Device>,
    pub(super) config: Config,
    pub(super) threads: Vec<QueueThread>,
    pub(super) memory: Arc<Memory>,
    pub(super) rings: Vec<Ring>,
    pub(super) inflight: Option<Arc<Inflight>>,
    pub(super) log: Option<Arc<Log>>,
    pub(super) log_event: Option<OwnedFd>,
    pub(super) channel: Option<BackChannel>,
    /// A front end has been connected since the start, of this process or of one before it: without one there is no guest to migrate.
    pub(super) had_front_end: bool,
    transfer: Option<StateTransfer>,
    homes: Homes,
}

impl From<Gone> for Refusal {
    fn from(_: Gone) -> Refusal {
        Refusal::new("the queue thread does not answer")
    }
}

impl From<ringdisk_guest::Error> for Refusal {
    fn from(error: ringdisk_guest::Error) -> Refusal {
        Refusal::new(error.to_string())
    }
}

impl Control {
    /// * `threads`: at least one.
    pub(super) fn new(
        disk: Arc<Disk>,
        device: Arc<Device>,
        config: Config,
        threads: Vec<QueueThread>,
        homes: Homes,
    ) -> Control {
        Control {
            disk,
            device,
            threads,
            memory: Arc::default(),
            rings: (0..config.queues).map(|_| Ring::default()).collect(),
            config,
            inflight: None,
            log: None,
            log_event: None,
            channel: None,
            had_front_end: false,
            transfer: None,
            homes,
        }
    }

    /// The thread of a virtqueue.
    fn thread(&self, index: u16) -> &QueueThread {
        &self.threads[usize::from(index) % self.threads.len()]
    }

    /// Whether to go on waiting for a queue thread: not when it is gone or requests are not to be answered any more, and not for ever
    /// when the export is to end.
    pub(super) fn is_patient(&self) -> impl Fn() -> bool + use<> {
        let (device, begun) = (Arc::clone(&self.device), Instant::now());
        move || {
            let is_late = device.is_ending() && begun.elapsed() > END_PATIENCE;
            !device.gives_up() && !is_late
        }
    }

    /// Tells the front end that the configuration space has changed.
    pub(super) fn config_changed(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        if let Err(error) = channel.config_changed() {
            tracing::debug!(
                "{}: the front end is not told of the change: {error}",
                self.device.name
            );
            self.channel = None;
        }
    }

    /// Holds all virtqueues still, puts another memory in place, and lets them go on.
    fn change_memory(&mut self, memory: Memory) -> Result<(), Refusal> {
        let memory = Arc::new(memory);
        let held: Vec<_> = self
            .threads
            .iter()
            .map(|t| t.ask_task(|worker| async move { worker.hold_all().await }))
            .collect();
        for pending in held {
            pending.wait(self.is_patient())?;
        }
        let running: Vec<u16> = (0..self.config.queues).filter(|i| self.runs(*i)).collect();
        for index in running {
            if !self.move_ring(&memory, index)? {
                let base = self.take_off(index)?;
                self.rings[usize::from(index)].suspended_at = Some(base);
            }
        }
        self.show_memory(&memory)?;
        for thread in &self.threads {
            thread.ask(|worker| worker.release_all()).wait(self.is_patient())?;
        }
        self.memory = memory;
        self.wake_suspended();
        Ok(())
    }

    fn runs(&self, index: u16) -> bool {
        let ring = &self.rings[usize::from(index)];
        ring.setup.is_some() && ring.suspended_at.is_none()
    }

    /// Lets a virtqueue that is held use this memory: the file behind its addresses may be another one. `false`: it is not in it.
    fn move_ring(&self, memory: &Memory, index: u16) -> Result<bool, Refusal> {
        let Some(setup) = &self.rings[usize::from(index)].setup else { return Ok(false) };
        let Ok(areas) = areas(memory, setup, self.device.features()) else { return Ok(false) };
        let log = setup.log;
        let moved = self.thread(index).ask(move |worker| worker.set_areas(index, areas, log));
        Ok(moved.wait(self.is_patient())?.is_ok())
    }

    /// Whether all areas of a virtqueue lie in a memory.
    fn is_in(&self, memory: &Memory, index: u16) -> bool {
        let setup = self.rings[usize::from(index)].setup.as_ref();
        setup.is_some_and(|setup| areas(memory, setup, self.device.features()).is_ok())
    }

    /// Gives the memory to all queue threads.
    pub(super) fn show_memory(&self, memory: &Arc<Memory>) -> Result<(), Refusal> {
        let shown: Vec<_> = self
            .threads
            .iter()
            .map(|thread| {
                let memory = Arc::clone(memory);
                thread.ask(move |worker| worker.set_memory(memory))
            })
            .collect();
        for pending in shown {
            pending.wait(self.is_patient())?;
        }
        Ok(())
    }

    /// Lets virtqueues go on whose memory is there again.
    fn wake_suspended(&mut self) {
        for index in 0..self.config.queues {
            let ring = &self.rings[usize::from(index)];
            let Some(base) = ring.suspended_at else { continue };
            if !self.is_in(&self.memory, index) {
                continue;
            }
            match self.put_on(index, base) {
                Ok(()) => self.rings[usize::from(index)].suspended_at = None,
                Err(refusal) => {
                    self.device.complain(
                        Complaint::Suspended,
                        format_args!("virtqueue {index} stays suspended: {refusal}"),
                    );
                }
            }
        }
    }

    /// Starts a virtqueue on its thread.
    fn put_on(&mut self, index: u16, base: u32) -> Result<(), Refusal> {
        let ring = &self.rings[usize::from(index)];
        let setup = ring.setup.as_ref().ok_or("it was not set up")?;
        let areas = areas(&self.memory, setup, self.device.features())?;
        let lies = areas.clone();
        let duplicate = |fd: Option<&OwnedFd>| fd.map(OwnedFd::try_clone).transpose();
        let start = RingStart {
            index,
            layout: layout(setup),
            size: setup.size,
            base,
            areas,
            features: self.device.features(),
            inflight: self.inflight.clone(),
            log: self.log_in_force(),
            used_log: setup.log,
            kick: setup.kick.try_clone()?,
            call: duplicate(ring.call.as_ref())?,
            error: duplicate(ring.error.as_ref())?,
        };
        let started = self.thread(index).ask(move |worker| worker.start(start));
        started.wait(self.is_patient())?.map_err(|error| Refusal::new(error.to_string()))?;
        self.bring_home(index, &lies)
    }

    /// Moves the thread of a virtqueue to the node where its rings are.
    fn bring_home(&mut self, index: u16, areas: &Areas) -> Result<(), Refusal> {
        let Some(cpus) = self.homes.started(index, areas) else { return Ok(()) };
        let there = cpus.clone();
        let moved = self.thread(index).ask(move |_| pin_to_cpus(&there));
        match moved.wait(self.is_patient())? {
            Ok(()) => self.homes.moved(index, cpus),
            Err(errno) => {
                let name = &self.device.name;
                tracing::warn!(
                    "{name}: the thread of virtqueue {index} stays far from it: {errno}"
                );
            }
        }
        Ok(())
    }

    /// Drains a virtqueue and takes it off its thread. Gives its base.
    fn take_off(&self, index: u16) -> Result<u32, Refusal> {
        let stopped =
            self.thread(index).ask_task(move |worker| async move { worker.stop(index).await });
        Ok(stopped.wait(self.is_patient())?)
    }

    /// What is written to guest memory is logged at the moment.
    pub(super) fn is_migrating(&self) -> bool {
        self.log_in_force().is_some()
    }

    fn log_in_force(&self) -> Option<Arc<Log>> {
        self.log.clone().filter(|_| self.device.features() & LOG_ALL != 0)
    }

    /// Makes all virtqueues log, or not, from now on.
    fn show_log(&self) -> Result<(), Refusal> {
        for thread in &self.threads {
            let log = self.log_in_force();
            thread.ask(move |worker| worker.set_log(log.as_ref())).wait(self.is_patient())?;
        }
        Ok(())
    }

    /// Gives all queue threads what to signal when something was logged, if there is one.
    pub(super) fn show_log_event(&self) -> Result<(), Refusal> {
        for thread in &self.threads {
            let event = self.log_event.as_ref().map(OwnedFd::try_clone).transpose()?;
            thread.ask(move |worker| worker.set_log_event(event)).wait(self.is_patient())?;
        }
        Ok(())
    }

    fn map(setup: RegionSetup) -> Result<Arc<Region>, Refusal> {
        let RegionSetup { guest_addr, size, user_addr, mmap_offset, fd } = setup;
        Ok(Region::map(fd, guest_addr, user_addr, size, mmap_offset)?)
    }

    /// Makes the disk ours before the first virtqueue runs: in a migration another process has had it until now.
    fn take_disk(&self) -> Result<(), Refusal> {
        if self.disk.is_active() {
            return Ok(());
        }
        let taken = self.threads[0].ask_task(|worker| async move {
            worker.disk.activate(&worker.ring, TAKE_OVER).await.map_err(|error| {
                format!(
                    "the disk is not ours: {error}. A ringdisk that serves it elsewhere gives it away as soon as its guest is paused or gone"
                )
            })
        });
        taken.wait(self.is_patient())??;
        tracing::info!("{}: the disk is ours", self.device.name);
        Ok(())
    }

    /// Whether another process may have the disk, should one wait for it: no virtqueue runs, so at most a guest that is paused, or has no
    /// driver yet, is connected here. Nothing tells us that such a guest has been migrated: front ends speak of the log only while
    /// virtqueues run, and stay connected for as long as they like.
    pub(super) fn may_give_disk(&self) -> bool {
        let stands = self.rings.iter().all(|ring| ring.setup.is_none());
        self.had_front_end && stands && self.disk.is_active()
    }

    /// Gives the disk to who waits for it, if it may be given. Who waits is about to run a guest, which ours then has become.
    pub(super) fn give_disk_if_wanted(&self) {
        if self.may_give_disk() && self.disk.is_wanted() {
            self.give_disk();
        }
    }

    /// The guest stands still at the end of a migration: the process that serves it there may have the disk. If it comes back, so does
    /// the disk.
    fn give_disk(&self) {
        let given = self.threads[0].ask_task(|worker| async move {
            worker.disk.deactivate(&worker.ring).await.map_err(|error| error.to_string())
        });
        match given.wait(self.is_patient()) {
            Ok(Ok(())) => tracing::info!("{}: the disk is given away", self.device.name),
            Ok(Err(why)) => tracing::error!("{}: the disk stays ours: {why}", self.device.name),
            Err(Gone) => tracing::error!("{}: the queue thread does not answer", self.device.name),
        }
    }

    /// Makes what was written durable.
    pub(super) fn flush(&self) -> Result<(), Refusal> {
        if !self.disk.is_active() {
            return Ok(());
        }
        let flushed =
            self.threads[0].ask_task(|worker| async move { worker.disk.flush(&worker.ring).await });
        Ok(flushed.wait(self.is_patient())??)
    }

    /// The end of an export whose virtqueues have stopped: makes what was written durable and closes the images. What qcow2 keeps for
    /// later (dirty bitmaps, clusters that are to be given back) is written then. The flush comes first: closing waits for requests, and
    /// some may never end.
    pub(super) fn close(&self) -> Result<(), Refusal> {
        if !self.disk.is_active() {
            return Ok(());
        }
        let closed = self.threads[0].ask_task(|worker| async move {
            let flushed = worker.disk.flush(&worker.ring).await;
            flushed.and(worker.disk.close(&worker.ring).await)
        });
        // A page cache full of writes may take its time.
        let (device, begun) = (Arc::clone(&self.device), Instant::now());
        Ok(closed.wait(|| !device.gives_up() && begun.elapsed() < CLOSE_PATIENCE)??)
    }
}

impl Backend for Control {
    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        let before = self.device.features();
        self.device.set_features(features);
        if (before ^ features) & LOG_ALL != 0 { self.show_log() } else { Ok(()) }
    }

    /// The session keeps it; nothing here depends on it.
    fn set_status(&mut self, _status: u8) {}

    fn needs_reset(&self) -> bool {
        self.device.needs_reset()
    }

    fn reset(&mut self) {
        self.device.reset();
    }

    fn disconnect(&mut self) {
        self.device.reset();
        self.memory = Arc::default();
        self.log_event = None;
        let shown = self.show_memory(&Arc::default()).and_then(|()| self.show_log_event());
        if let Err(refusal) = shown {
            tracing::warn!("{}: {refusal}", self.device.name);
        }
        self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
        self.inflight = None;
        self.log = None;
        self.channel = None;
        self.transfer = None;
    }

    fn set_memory(&mut self, regions: Vec<RegionSetup>) -> Result<(), Refusal> {
        Memory::check_size(regions.iter().map(|region| region.size))?;
        let regions = regions.into_iter().map(Control::map).collect::<Result<Vec<_>, _>>()?;
        let memory = Memory::new(regions)?;
        for index in (0..self.config.queues).filter(|index| self.runs(*index)) {
            if !self.is_in(&memory, index) {
                return Err(format!("virtqueue {index} runs and is not in this memory").into());
            }
        }
        self.change_memory(memory)
    }

    fn add_region(&mut self, region: RegionSetup) -> Result<(), Refusal> {
        self.memory.check_room(region.size)?;
        let memory = Arc::new(self.memory.with(Control::map(region)?)?);
        // What was there stays where it is, so nothing has to wait.
        self.show_memory(&memory)?;
        self.memory = memory;
        self.wake_suspended();
        Ok(())
    }

    fn remove_region(&mut self, guest_addr: u64, size: u64, user_addr: u64) -> Result<(), Refusal> {
        let (memory, _gone) = self.memory.without(guest_addr, size, user_addr)?;
        self.change_memory(memory)
    }

    fn start_vring(&mut self, index: u16, setup: VringSetup) -> Result<(), Refusal> {
        self.take_disk()?;
        let base = setup.base;
        self.rings[usize::from(index)].setup = Some(setup);
        let started = self.put_on(index, base);
        if started.is_err() {
            self.rings[usize::from(index)].setup = None;
        }
        started
    }

    fn resume_vring(&mut self, index: u16, setup: VringSetup) -> Result<(), Refusal> {
        if areas(&self.memory, &setup, self.device.features()).is_ok() {
            return self.start_vring(index, setup);
        }
        tracing::info!("{}: virtqueue {index} waits for its memory", self.device.name);
        let ring = &mut self.rings[usize::from(index)];
        ring.suspended_at = Some(setup.base);
        ring.setup = Some(setup);
        Ok(())
    }

    fn stop_vring(&mut self, index: u16) -> Result<u32, Refusal> {
        let ring = &mut self.rings[usize::from(index)];
        ring.setup = None;
        let base = match ring.suspended_at.take() {
            Some(base) => base,
            None => self.take_off(index)?,
        };
        let is_last = self.rings.iter().all(|ring| ring.setup.is_none());
        if is_last && self.device.features() & LOG_ALL != 0 {
            self.give_disk();
        }
        Ok(base)
    }

    fn retire_vring(&mut self, index: u16) {
        if let Some(area) = &self.inflight {
            area.retire(index);
        }
        // Without STATUS and RESET_DEVICE this is all that a reset by the guest looks like. A hand-over ends virtqueues otherwise.
        if self.device.needs_reset() && self.rings.iter().all(|ring| ring.setup.is_none()) {
            self.device.mend();
        }
    }

    fn set_vring_call(&mut self, index: u16, call: Option<OwnedFd>) -> Result<(), Refusal> {
        if self.runs(index) {
            let ours = call.as_ref().map(OwnedFd::try_clone).transpose()?;
            self.thread(index)
                .ask(move |worker| worker.set_call(index, ours))
                .wait(self.is_patient())?;
        }
        self.rings[usize::from(index)].call = call;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u16, err: Option<OwnedFd>) -> Result<(), Refusal> {
        if self.runs(index) {
            let ours = err.as_ref().map(OwnedFd::try_clone).transpose()?;
            self.thread(index)
                .ask(move |worker| worker.set_error(index, ours))
                .wait(self.is_patient())?;
        }
        self.rings[usize::from(index)].error = err;
        Ok(())
    }

    fn set_vring_log(&mut self, index: u16, log: Option<u64>) -> Result<(), Refusal> {
        if let Some(setup) = &mut self.rings[usize::from(index)].setup {
            setup.log = log;
        }
        if self.runs(index) {
            let thread = self.thread(index);
            thread.ask(move |worker| worker.set_used_log(index, log)).wait(self.is_patient())?;
        }
        Ok(())
    }

    fn get_inflight(&mut self, queues: u16, queue_size: u16) -> Result<InflightArea, Refusal> {
        let packed = self.device.features() & RING_PACKED != 0;
        let layout = if packed { Layout::Packed } else { Layout::Split };
        let area = Inflight::create(queues, queue_size, layout)?;
        let (fd, size) = (area.fd().try_clone_to_owned()?, area.mmap_size());
        area.set_note(u32::from(self.device.write_cache()));
        self.inflight = Some(Arc::new(area));
        Ok(InflightArea { fd, size, offset: 0 })
    }

    fn set_inflight(
        &mut self,
        area: InflightArea,
        queues: u16,
        queue_size: u16,
    ) -> Result<(), Refusal> {
        let packed = self.device.features() & RING_PACKED != 0;
        let layout = if packed { Layout::Packed } else { Layout::Split };
        let area = Inflight::from_fd(area.fd, area.size, area.offset, queues, queue_size, layout)?;
        // A driver that has turned the cache off does not do so again because the process behind the device is another one.
        if let Some(write_cache) = area.note() {
            self.device.set_write_cache(write_cache != 0);
        }
        self.inflight = Some(Arc::new(area));
        Ok(())
    }

    fn set_log(&mut self, fd: OwnedFd, size: u64, offset: u64) -> Result<(), Refusal> {
        self.log = Some(Log::map(fd, size, offset)?);
        self.show_log()
    }

    fn set_log_event(&mut self, event: OwnedFd) -> Result<(), Refusal> {
        self.log_event = Some(event);
        self.show_log_event()
    }

    fn get_config(&mut self, offset: u32, bytes: &mut [u8]) -> Result<(), Refusal> {
        let space = self.config.space(self.disk.size(), self.device.write_cache());
        let start = usize::try_from(offset).unwrap_or(SPACE_BYTES).min(SPACE_BYTES);
        let len = bytes.len().min(SPACE_BYTES - start);
        bytes[..len].copy_from_slice(&space[start..start + len]);
        Ok(())
    }

    fn set_config(
        &mut self,
        offset: u32,
        bytes: &[u8],
        _write: ConfigWrite,
    ) -> Result<(), Refusal> {
        let at = WRITEBACK_AT.checked_sub(offset).and_then(|at| bytes.get(at as usize));
        let Some(wanted) = at else {
            return Err("only `writeback` can be written".into());
        };
        let write_cache = *wanted != 0;
        if self.device.read_only {
            return Err("the disk is read-only, it has no write cache".into());
        }
        let had = self.device.write_cache();
        self.device.set_write_cache(write_cache);
        if let Some(area) = &self.inflight {
            area.set_note(u32::from(write_cache));
        }
        if had && !write_cache {
            // What was answered before is durable, too, when the driver goes on without a cache.
            self.flush()?;
        }
        Ok(())
    }

    fn set_backend_channel(&mut self, socket: OwnedFd) -> Result<(), Refusal> {
        self.channel = Some(BackChannel::new(socket));
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        direction: StateDirection,
        fd: OwnedFd,
    ) -> Result<Option<OwnedFd>, Refusal> {
        self.transfer = match direction {
            StateDirection::Save => Some(state::save(fd.as_fd(), self.device.write_cache())?),
            StateDirection::Load => Some(StateTransfer::Loading(fd)),
        };
        Ok(None)
    }

    fn check_device_state(&mut self) -> Result<(), Refusal> {
        match self.transfer.take() {
            None => Err("no transfer was begun".into()),
            Some(StateTransfer::Saved) => Ok(()),
            Some(StateTransfer::Loading(fd)) => {
                self.device.set_write_cache(state::load(fd.as_fd())?);
                Ok(())
            }
        }
    }
}
