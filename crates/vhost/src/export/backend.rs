//! The device behind a session: what the control thread asks its queue threads to do.
//!
//! Promises: control thread; a call has had its effect on the queue threads when it returns, or is
//! refused with the reason. A queue thread that is stuck or gone ends the wait with a refusal. What
//! a front end gives (memory, areas, descriptors) is checked before a queue thread gets it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::Disk;
use ringdisk_export::{Gone, stop_threads};
use ringdisk_guest::inflight::InflightArea as Inflight;
use ringdisk_guest::{Layout, Log, Memory, Region};

use super::kernel_device::Accel;
use super::ring_nodes::RingNodes;
use super::state::{self, StateTransfer};
use super::vring::Ring;
use crate::BackChannel;
use crate::blk::config::{Config, SPACE_BYTES, WRITEBACK_AT};
use crate::blk::features::{LOG_ALL, RING_PACKED};
use crate::device::Device;
use crate::session::{
    Backend, ConfigWrite, InflightArea, Refusal, RegionSetup, StateDirection, VringSetup,
};
use crate::signals::Signals;
use crate::worker::{WorkerThread, areas};

/// Requests in flight have so long at the end of an export: storage that never answers does not
/// hold the process up.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Queue threads have so long to end.
const THREADS_END: Duration = Duration::from_secs(10);

/// The device of one export.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) disk: Arc<Disk>,
    pub(super) device: Arc<Device>,
    pub(super) config: Config,
    pub(super) threads: Vec<WorkerThread>,
    pub(super) memory: Arc<Memory>,
    pub(super) rings: Vec<Ring>,
    pub(super) inflight: Option<Arc<Inflight>>,
    /// Where the front end gave none, or one without room for a virtqueue: for the process after
    /// this one, if there may be one.
    pub(super) own_area: Option<Arc<Inflight>>,
    /// Another process goes on when this one is killed.
    pub(super) is_kept: bool,
    /// Descriptors of a virtqueue at most.
    queue_size_max: u16,
    /// Virtqueues whose parts of the areas are to be marked as unused, as soon as that is recorded.
    pub(super) retiring: Vec<u16>,
    pub(super) log: Option<Arc<Log>>,
    pub(super) log_event: Option<OwnedFd>,
    pub(super) channel: Option<BackChannel>,
    /// A front end has been connected since the start, of this process or of one before it: without
    /// one there is no guest to migrate.
    pub(super) had_front_end: bool,
    transfer: Option<StateTransfer>,
    pub(super) ring_nodes: RingNodes,
    /// For virtqueues in the host kernel; `None`: they are never there.
    pub(super) accel: Option<Accel>,
    pub(super) signals: Arc<Signals>,
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
    /// * `is_kept`, `queue_size_max`: another process goes on when this one is killed; descriptors
    ///   of a virtqueue.
    #[allow(clippy::too_many_arguments)] // The fields of a start, once.
    pub(super) fn new(
        disk: Arc<Disk>,
        device: Arc<Device>,
        config: Config,
        threads: Vec<WorkerThread>,
        ring_nodes: RingNodes,
        accel: Option<Accel>,
        signals: Arc<Signals>,
        (is_kept, queue_size_max): (bool, u16),
    ) -> Control {
        Control {
            disk,
            device,
            threads,
            memory: Arc::default(),
            rings: (0..config.queues).map(|_| Ring::default()).collect(),
            config,
            inflight: None,
            own_area: None,
            is_kept,
            queue_size_max,
            retiring: Vec::new(),
            log: None,
            log_event: None,
            channel: None,
            had_front_end: false,
            transfer: None,
            ring_nodes,
            accel,
            signals,
        }
    }

    /// The thread of a virtqueue.
    pub(super) fn thread(&self, index: u16) -> &WorkerThread {
        &self.threads[usize::from(index) % self.threads.len()]
    }

    /// Ends all queue threads.
    pub(super) fn stop_threads(&mut self) {
        stop_threads(&mut self.threads, THREADS_END, &self.device.name);
    }

    /// Whether to go on waiting for a queue thread: not when it is gone or requests are not to be
    /// answered any more, and not for ever when the export is to end.
    pub(super) fn may_wait(&self) -> impl Fn() -> bool + use<> {
        let (device, begun) = (Arc::clone(&self.device), Instant::now());
        move || {
            let is_late = device.is_ending() && begun.elapsed() > END_TIMEOUT;
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
            pending.wait(self.may_wait())?;
        }
        Ok(())
    }

    /// What is written to guest memory is logged at the moment.
    pub(super) fn is_migrating(&self) -> bool {
        self.log_in_force().is_some()
    }

    pub(super) fn log_in_force(&self) -> Option<Arc<Log>> {
        self.log.clone().filter(|_| self.device.features() & LOG_ALL != 0)
    }

    /// Layout of virtqueues.
    fn layout(&self) -> Layout {
        match self.device.features() & RING_PACKED {
            0 => Layout::Split,
            _ => Layout::Packed,
        }
    }

    /// Where a virtqueue notes its requests in flight.
    pub(super) fn area_for(&self, index: u16, size: u16) -> Option<Arc<Inflight>> {
        let fits = |area: &&Arc<Inflight>| index < area.queues() && size <= area.size();
        match &self.own_area {
            None => self.inflight.clone(),
            Some(own) => self.inflight.as_ref().filter(fits).or(Some(own)).cloned(),
        }
    }

    /// Whether a virtqueue notes its requests in flight where the front end does not see them.
    pub(super) fn notes_in_own_area(&self, index: u16, size: u16) -> bool {
        let area = self.area_for(index, size);
        match (&self.own_area, area) {
            (Some(own), Some(area)) => Arc::ptr_eq(own, &area),
            (_, area) => area.is_none(),
        }
    }

    /// Makes an area of our own that fits the virtqueues, where none of them runs. Gives whether it
    /// is another one now.
    ///
    /// Errors: no memory.
    pub(super) fn fit_own_area(&mut self) -> Result<bool, Refusal> {
        let layout = self.layout();
        let is_at_rest = self.rings.iter().all(|ring| ring.setup.is_none());
        let fits = self.own_area.as_ref().is_some_and(|area| area.layout() == layout);
        if fits || !is_at_rest {
            return Ok(false);
        }
        let area = Inflight::create(self.config.queues, self.queue_size_max, layout)?;
        self.own_area = Some(Arc::new(area));
        Ok(true)
    }

    /// Marks parts of areas as unused.
    pub(super) fn retire(&mut self) {
        for index in self.retiring.drain(..) {
            [&self.inflight, &self.own_area].into_iter().flatten().for_each(|area| {
                area.retire(index);
            });
        }
    }

    /// Makes all virtqueues log, or not, from now on.
    fn show_log(&self) -> Result<(), Refusal> {
        for thread in &self.threads {
            let log = self.log_in_force();
            thread.ask(move |worker| worker.set_log(log.as_ref())).wait(self.may_wait())?;
        }
        Ok(())
    }

    /// Gives all queue threads what to signal when something was logged, if there is one.
    pub(super) fn show_log_event(&self) -> Result<(), Refusal> {
        for thread in &self.threads {
            let event = self.log_event.as_ref().map(OwnedFd::try_clone).transpose()?;
            thread.ask(move |worker| worker.set_log_event(event)).wait(self.may_wait())?;
        }
        Ok(())
    }

    fn map(setup: RegionSetup) -> Result<Arc<Region>, Refusal> {
        let RegionSetup { guest_addr, size, user_addr, mmap_offset, fd } = setup;
        Ok(Region::map(fd, guest_addr, user_addr, size, mmap_offset)?)
    }
}

impl Backend for Control {
    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        let before = self.device.features();
        self.device.set_features(features);
        if (before ^ features) & LOG_ALL == 0 {
            return Ok(());
        }
        // The host kernel logs nothing.
        self.take_back_all();
        self.show_log()?;
        self.reconsider_kernel();
        Ok(())
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
        self.forget_front_end();
        self.memory = Arc::default();
        self.log_event = None;
        let shown = self.show_memory(&Arc::default()).and_then(|()| self.show_log_event());
        if let Err(refusal) = shown {
            tracing::warn!("{}: {refusal}", self.device.name);
        }
        self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
        self.inflight = None;
        self.own_area = None;
        self.retiring.clear();
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
        self.show_memory_to_kernel();
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
        self.retiring.push(index);
        if !self.is_kept {
            self.retire();
        }
        // Without STATUS and RESET_DEVICE this is all that a reset by the guest looks like. A
        // hand-over ends virtqueues otherwise.
        if self.device.needs_reset() && self.rings.iter().all(|ring| ring.setup.is_none()) {
            self.device.mend();
        }
    }

    fn set_vring_call(&mut self, index: u16, call: Option<OwnedFd>) -> Result<(), Refusal> {
        if self.is_in_kernel(index) {
            self.set_call_in_kernel(index, call.as_ref().map(AsFd::as_fd))?;
        } else if self.runs(index) {
            let ours = call.as_ref().map(OwnedFd::try_clone).transpose()?;
            self.thread(index)
                .ask(move |worker| worker.set_call(index, ours))
                .wait(self.may_wait())?;
        }
        self.rings[usize::from(index)].call = call;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u16, err: Option<OwnedFd>) -> Result<(), Refusal> {
        if self.runs(index) && !self.is_in_kernel(index) {
            let ours = err.as_ref().map(OwnedFd::try_clone).transpose()?;
            self.thread(index)
                .ask(move |worker| worker.set_error(index, ours))
                .wait(self.may_wait())?;
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
            thread.ask(move |worker| worker.set_used_log(index, log)).wait(self.may_wait())?;
        }
        Ok(())
    }

    fn get_inflight(&mut self, queues: u16, queue_size: u16) -> Result<InflightArea, Refusal> {
        let area = Inflight::create(queues, queue_size, self.layout())?;
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
        let InflightArea { fd, size, offset } = area;
        let area = Inflight::from_fd(fd, size, offset, queues, queue_size, self.layout())?;
        // A driver that has turned the cache off does not do so again because the process behind
        // the device is another one.
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
        let space = self.config.space(self.disk.size().0, self.device.write_cache());
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
        let is_shown = self.show_cache_to_kernel();
        if had && !write_cache && !is_shown {
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
        state::check(fd.as_fd())?;
        self.transfer = match direction {
            StateDirection::Save => Some(state::save(fd.as_fd(), self.device.write_cache())?),
            StateDirection::Load => Some(StateTransfer::Loading(fd.into())),
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
