//! One queue thread: its virtqueues, and the tasks that serve their requests.
//!
//! Promises: a request costs no allocation, no lock, and no system call beyond the batch that it is
//! part of. All that is popped, served and completed in one turn of the loop is made visible to the
//! guest at once, with one call at most.

mod call;
mod fetch;
mod hold;
mod memory;
mod pins;
mod serve;
mod slot;
mod source;
mod task;
mod thread;
mod turns;
mod vring;
mod watch;

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::Disk;
use ringdisk_export::stats::QueueCells;
use ringdisk_guest::{Areas, Error, Log, Memory, View};
use ringdisk_ring::Ring;

use crate::device::Device;

use call::Call;
use hold::Held;
use pins::Pins;
use turns::Turns;
use watch::Watch;

pub(crate) use pins::Reported;
pub(crate) use slot::Slot;
pub(crate) use thread::{Pending, ThreadSetup, WorkerThread};
pub(crate) use vring::{RingStart, Vring, areas, layout};

/// Requests that one thread serves at once; further ones wait in their virtqueues.
pub(crate) const REQUESTS_MAX: usize = 256;
/// Requests that are taken before what they lead to is submitted: more would keep the first ones
/// waiting.
const BATCH_MAX: u32 = 32;

/// How often to look whether requests of a process before us were taken: a batch may be all that
/// there is room for.
const SETTLE_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The thread-local side of a queue thread.
pub(crate) struct Worker {
    pub(crate) ring: Ring,
    pub(crate) disk: Arc<Disk>,
    pub(crate) device: Arc<Device>,
    pub(crate) cells: Arc<QueueCells>,
    /// The virtqueues of this thread that run.
    vrings: RefCell<Vec<Rc<Vring>>>,
    /// Memory of the guest as it is now; requests keep what they use of an older one.
    view: RefCell<Rc<View>>,
    /// Tasks that wait for a request.
    idle: RefCell<Vec<Rc<Slot>>>,
    slots: Cell<usize>,
    /// All slots, so that their memory can be moved to another NUMA node.
    all_slots: RefCell<Vec<Rc<Slot>>>,
    /// Virtqueues are to be held, and those that are.
    holds_all: Cell<bool>,
    all_held: RefCell<Vec<Rc<Vring>>>,
    /// Which virtqueue is next, so that none starves another.
    turns: Turns,
    /// The guest does not kick: the thread looks by itself.
    is_armed: Cell<bool>,
    /// Signalled when something was logged, once for all that becomes visible at once.
    log_event: Call,
    /// Guest memory is registered with the ring (`--pin-guest-memory`).
    pins: Option<RefCell<Pins>>,
    /// The disk, for as long as the host kernel serves it.
    held: Held,
    /// For those who wait for this thread.
    pub(crate) watch: Arc<Watch>,
    this: std::rc::Weak<Worker>,
}

impl Worker {
    pub(crate) fn new(
        ring: &Ring,
        disk: Arc<Disk>,
        device: Arc<Device>,
        cells: Arc<QueueCells>,
        pins: Option<Arc<Reported>>,
        watch: Arc<Watch>,
    ) -> Rc<Worker> {
        let pins = pins.and_then(|reported| Pins::new(ring, reported));
        let log_event = Call::new(&watch, &device);
        Rc::new_cyclic(|this| Worker {
            ring: ring.clone(),
            disk,
            device,
            cells,
            vrings: RefCell::default(),
            view: RefCell::new(Rc::new(View::new(Arc::default()))),
            idle: RefCell::new(Vec::with_capacity(REQUESTS_MAX)),
            slots: Cell::new(0),
            all_slots: RefCell::new(Vec::with_capacity(REQUESTS_MAX)),
            holds_all: Cell::new(false),
            all_held: RefCell::default(),
            turns: Turns::default(),
            is_armed: Cell::new(false),
            log_event,
            pins: pins.map(RefCell::new),
            held: Held::default(),
            watch,
            this: this.clone(),
        })
    }

    /// Memory of the guest from now on. Virtqueues whose requests use what goes must have been
    /// held.
    pub(crate) fn set_memory(&self, memory: Arc<Memory>) {
        let view = match &self.pins {
            Some(pins) => pins.borrow_mut().view(&self.ring, memory),
            None => View::new(memory),
        };
        *self.view.borrow_mut() = Rc::new(view);
    }

    /// The same virtqueue in another mapping. It was held.
    ///
    /// Errors: it does not fit there.
    pub(crate) fn set_areas(
        &self,
        index: u16,
        areas: Areas,
        used_log: Option<u64>,
    ) -> Result<(), Error> {
        self.vring(index).map_or(Ok(()), |vring| vring.set_areas(areas, used_log))
    }

    /// Serves a virtqueue from now on.
    ///
    /// Errors: it cannot be as it is described.
    pub(crate) fn start(&self, start: RingStart) -> Result<(), Error> {
        let vring = Vring::start(start, &self.watch, &self.device)?;
        self.add_slots();
        vring.listen(&self.ring, &self.cells, &self.device);
        self.vrings.borrow_mut().push(vring);
        Ok(())
    }

    /// A batch finds its tasks there; more are made when more requests are with the storage than
    /// ever before.
    fn add_slots(&self) {
        while self.slots.get() < BATCH_MAX as usize {
            let Some(slot) = self.new_slot() else { break };
            self.idle.borrow_mut().push(slot);
        }
    }

    /// Waits until all that a process before us had taken is taken again: the base of a virtqueue
    /// says that it was, so it would never be asked for again once the virtqueue has been taken off
    /// this thread.
    async fn catch_up(&self, vring: &Vring) {
        while !self.device.needs_reset() && vring.is_behind() {
            self.ring.sleep(SETTLE_POLL_INTERVAL).await;
        }
    }

    /// Drains a virtqueue and serves it no more. Gives its base; 0 when it does not run here.
    pub(crate) async fn stop(&self, index: u16) -> u32 {
        let Some(vring) = self.vring(index) else { return 0 };
        self.catch_up(&vring).await;
        let lifted = self.disk.lift_limits();
        vring.hold(&self.ring).await;
        drop(lifted);
        self.vrings.borrow_mut().retain(|other| !Rc::ptr_eq(other, &vring));
        let logs = vring.logs();
        let base = vring.end(&self.ring);
        if logs {
            self.log_event.signal();
        }
        base
    }

    /// Takes no more requests, and waits until none is in flight, not even one that a process
    /// before us had taken.
    pub(crate) async fn hold_all(&self) {
        self.holds_all.set(true);
        let _lifted = self.disk.lift_limits();
        let vrings = self.vrings.borrow().clone();
        for vring in vrings {
            self.catch_up(&vring).await;
            if !self.holds_all.get() {
                return;
            }
            self.all_held.borrow_mut().push(Rc::clone(&vring));
            vring.hold(&self.ring).await;
        }
    }

    /// Ends [`Worker::hold_all`], also one that is not done yet.
    pub(crate) fn release_all(&self) {
        self.holds_all.set(false);
        self.all_held.borrow_mut().drain(..).for_each(|vring| vring.release(&self.ring));
    }

    /// What is written to guest memory is logged there from now on, or nowhere.
    pub(crate) fn set_log(&self, log: Option<&Arc<Log>>) {
        self.vrings.borrow().iter().for_each(|vring| vring.set_log(log.cloned()));
    }

    /// Another address of the used ring of a virtqueue in the log.
    pub(crate) fn set_used_log(&self, index: u16, used_log: Option<u64>) {
        if let Some(vring) = self.vring(index) {
            vring.set_used_log(used_log);
        }
    }

    /// What to signal when something was logged.
    pub(crate) fn set_log_event(&self, fd: Option<OwnedFd>) {
        self.log_event.set(fd);
    }

    /// Another eventfd to call the guest of a virtqueue.
    pub(crate) fn set_call(&self, index: u16, fd: Option<OwnedFd>) {
        if let Some(vring) = self.vring(index) {
            vring.call.set(fd);
            // The guest was not called for what was completed before.
            vring.call.signal();
        }
    }

    /// Signals an eventfd of a virtqueue that does not run here. Control threads have it done here:
    /// a write that waits is found ([`Watch`]).
    pub(crate) fn signal(&self, fd: OwnedFd) {
        let call = Call::new(&self.watch, &self.device);
        call.set(Some(fd));
        call.signal();
    }

    /// Another eventfd to say that a virtqueue is broken.
    pub(crate) fn set_error(&self, index: u16, fd: Option<OwnedFd>) {
        if let Some(vring) = self.vring(index) {
            vring.error.set(fd);
        }
    }

    /// The virtqueue with this number, if it runs here.
    fn vring(&self, index: u16) -> Option<Rc<Vring>> {
        self.vrings.borrow().iter().find(|vring| vring.index == index).cloned()
    }

    /// A task that waits for a request, a new one if need be; `None` when there are as many as
    /// there may be.
    fn take_slot(&self) -> Option<Rc<Slot>> {
        if let Some(slot) = self.idle.borrow_mut().pop() {
            return Some(slot);
        }
        if self.room() == 0 { None } else { self.new_slot() }
    }

    fn new_slot(&self) -> Option<Rc<Slot>> {
        self.slots.set(self.slots.get() + 1);
        let slot = Rc::new(Slot::default());
        self.all_slots.borrow_mut().push(Rc::clone(&slot));
        let worker = self.this.upgrade()?;
        self.ring.spawn(task::run(worker, Rc::clone(&slot)));
        Some(slot)
    }

    /// Requests that could be served now besides those that are.
    fn room(&self) -> u32 {
        u32::try_from(REQUESTS_MAX - self.slots.get() + self.idle.borrow().len()).unwrap_or(0)
    }
}
