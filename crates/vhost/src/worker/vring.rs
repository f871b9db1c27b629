//! A virtqueue that runs, on its thread.
//!
//! Promises: queue thread; a request that is taken is given back once, and the guest sees it at the
//! end of the turn. A virtqueue that the guest has broken gives no request any more, and the device
//! needs a reset; nothing that a guest writes there panics. Held, it takes nothing until it is
//! released. Nothing here waits but [`Vring::hold`], which is a future.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use ringdisk_export::Admission;
use ringdisk_export::stats::QueueCells;
use ringdisk_guest::inflight::InflightArea as Inflight;
use ringdisk_guest::{
    Areas, Broken, Chain, Error, Layout, Log, Memory, Queue, QueueConfig, Token, View,
};
use ringdisk_ring::{Fd, POLL_IN, Parker, Ring};

use super::call::Call;
use super::watch::Watch;
use crate::blk::features::{RING_EVENT_IDX, RING_INDIRECT};
use crate::device::{Complaint, Device};
use crate::session::VringSetup;

/// What a virtqueue is started with.
#[derive(Debug)]
pub(crate) struct RingStart {
    pub(crate) index: u16,
    pub(crate) layout: Layout,
    pub(crate) size: u16,
    /// As [`QueueConfig::base`].
    pub(crate) base: u32,
    pub(crate) areas: Areas,
    /// Features that were agreed on.
    pub(crate) features: u64,
    pub(crate) inflight: Option<Arc<Inflight>>,
    pub(crate) log: Option<Arc<Log>>,
    /// Address of the used ring in the log.
    pub(crate) used_log: Option<u64>,
    pub(crate) kick: OwnedFd,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) error: Option<OwnedFd>,
}

/// Finds the areas of a virtqueue.
///
/// Errors: they do not lie in this memory.
pub(crate) fn areas(memory: &Memory, setup: &VringSetup, features: u64) -> Result<Areas, Error> {
    let layout = layout(setup);
    let event_idx = features & RING_EVENT_IDX != 0;
    let words = [setup.descriptor, setup.available, setup.used];
    Areas::find(memory, layout, setup.size, event_idx, words)
}

pub(crate) fn layout(setup: &VringSetup) -> Layout {
    if setup.packed { Layout::Packed } else { Layout::Split }
}

/// What came of showing a guest what is done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Published {
    /// The guest was called.
    pub(super) called: bool,
    /// What was written for it, now and before, is in the log.
    pub(super) logged: bool,
}

/// A virtqueue.
pub(crate) struct Vring {
    pub(crate) index: u16,
    queue: RefCell<Option<Queue>>,
    kick: OwnedFd,
    pub(crate) call: Call,
    pub(crate) error: Call,
    /// No requests are taken while the control thread changes something.
    admission: Admission,
    /// The task that reads the kick shall end.
    over: Parker,
}

impl Vring {
    /// Errors: size, base, areas or inflight area do not fit one another.
    pub(super) fn start(
        start: RingStart,
        watch: &Arc<Watch>,
        device: &Arc<Device>,
    ) -> Result<Rc<Vring>, Error> {
        let inflight = match start.inflight {
            Some(area) => Some(
                area.queue(start.index)
                    .ok_or(Error::BadInflight { why: "it has no room for this virtqueue" })?,
            ),
            None => None,
        };
        let queue = Queue::new(QueueConfig {
            layout: start.layout,
            size: start.size,
            areas: start.areas,
            event_idx: start.features & RING_EVENT_IDX != 0,
            indirect: start.features & RING_INDIRECT != 0,
            base: start.base,
            inflight,
            log: start.log,
            log_addr: start.used_log,
        })?;
        if let Some(why) = queue.inflight_given_up() {
            let index = start.index;
            device.complain(
                Complaint::Inflight,
                format_args!("the inflight area of virtqueue {index} is given up: {why}"),
            );
        }
        let vring = Vring {
            index: start.index,
            queue: RefCell::new(Some(queue)),
            kick: start.kick,
            call: Call::new(watch, device),
            error: Call::new(watch, device),
            admission: Admission::default(),
            over: Parker::default(),
        };
        vring.call.set(start.call);
        vring.error.set(start.error);
        // What a process before us completed may not have been told.
        vring.call.signal();
        Ok(Rc::new(vring))
    }

    /// Waits for kicks: each one ends the thread's sleep, and the loop looks at the virtqueue.
    ///
    /// The counter of the eventfd is not read, and the poll is not exclusive: the ring of a process
    /// that was killed may be waiting on the same eventfd for a while, and would take the counter,
    /// or the one wake-up that exclusive waiters share.
    pub(super) fn listen(
        self: &Rc<Vring>,
        ring: &Ring,
        cells: &Arc<QueueCells>,
        device: &Arc<Device>,
    ) {
        let (vring, listening, cells) = (Rc::clone(self), ring.clone(), Arc::clone(cells));
        let device = Arc::clone(device);
        ring.spawn(async move {
            let mut kicks = listening.poll_multishot(Fd::of(&vring.kick), POLL_IN);
            loop {
                let mut over = pin!(vring.over.park(&listening));
                let mut kick = pin!(kicks.next());
                let kicked = poll_fn(|cx| match over.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(None),
                    Poll::Pending => kick.as_mut().poll(cx).map(Some),
                });
                match kicked.await {
                    None => break,
                    Some(Ok(events)) if events & POLL_IN != 0 => cells.kicks.add(1),
                    Some(Ok(events)) => {
                        let index = vring.index;
                        device.complain(
                            Complaint::Kick,
                            format_args!(
                                "the kick of virtqueue {index} cannot be waited for ({events:#x})"
                            ),
                        );
                        break;
                    }
                    Some(Err(errno)) => {
                        let index = vring.index;
                        device.complain(
                            Complaint::Kick,
                            format_args!("virtqueue {index} gets no kicks any more: {errno}"),
                        );
                        break;
                    }
                }
            }
        });
    }

    /// Whether there is a request that may be taken.
    #[inline]
    pub(super) fn has_next(&self) -> bool {
        !self.admission.is_held() && self.queue.borrow_mut().as_mut().is_some_and(Queue::has_next)
    }

    /// Takes the next request, with its descriptors in `chain`. `None` when there is none, or when
    /// the guest has broken the virtqueue.
    pub(super) fn pop(
        &self,
        ring: &Ring,
        view: &View,
        chain: &mut Chain,
        device: &Device,
    ) -> Option<Token> {
        let mut queue = self.queue.borrow_mut();
        let queue = queue.as_mut()?;
        let popped = queue.check(view).and_then(|()| queue.pop(view, chain));
        match popped {
            Ok(token) => {
                if token.is_some() {
                    self.admission.begin(ring);
                }
                token
            }
            Err(broken) => {
                self.tell_broken(device, &broken.to_string());
                None
            }
        }
    }

    /// Looks whether the memory of the rings, or any that is used, is gone.
    pub(super) fn check(&self, view: &View, device: &Device) {
        let checked = self.queue.borrow_mut().as_mut().map_or(Ok(()), |queue| queue.check(view));
        if let Err(broken) = checked {
            self.tell_broken(device, &broken.to_string());
        }
    }

    /// The guest sent a request that makes no sense.
    pub(crate) fn set_broken(&self, device: &Device, reason: &str) {
        if let Some(queue) = self.queue.borrow_mut().as_mut() {
            queue.break_with(Broken::Request);
        }
        self.tell_broken(device, reason);
    }

    fn tell_broken(&self, device: &Device, reason: &str) {
        device.set_broken(format!("virtqueue {}: {reason}", self.index));
        self.error.signal();
    }

    /// Gives a request back; the guest is shown it at the end of the turn.
    pub(super) fn complete(&self, ring: &Ring, token: Token, written: u32) {
        if let Some(queue) = self.queue.borrow_mut().as_mut() {
            queue.complete(token, written);
        }
        self.admission.end(ring);
    }

    /// Shows the guest what is done.
    #[inline]
    pub(super) fn publish(&self) -> Published {
        let (wanted, logged) = match self.queue.borrow_mut().as_mut() {
            Some(queue) if queue.has_completed() => (queue.publish(), queue.log().is_some()),
            _ => (false, false),
        };
        Published { called: wanted && self.call.signal(), logged }
    }

    /// Whether requests of a process before us have not been taken again yet, and will be.
    pub(super) fn is_behind(&self) -> bool {
        let queue = self.queue.borrow();
        let is_behind = |queue: &Queue| queue.broken().is_none() && queue.has_replays();
        !self.admission.is_held() && queue.as_ref().is_some_and(is_behind)
    }

    /// Whether what is written to guest memory is logged.
    pub(super) fn logs(&self) -> bool {
        self.queue.borrow().as_ref().is_some_and(|queue| queue.log().is_some())
    }

    /// Asks for a kick. Returns whether a request has come meanwhile.
    pub(super) fn enable_kicks(&self) -> bool {
        if self.admission.is_held() {
            return false;
        }
        self.queue.borrow_mut().as_mut().is_some_and(Queue::enable_kicks)
    }

    pub(super) fn disable_kicks(&self) {
        if let Some(queue) = self.queue.borrow_mut().as_mut() {
            queue.disable_kicks();
        }
    }

    /// Takes no more requests, and waits until none is in flight.
    pub(super) async fn hold(&self, ring: &Ring) {
        self.admission.hold(ring).await;
    }

    /// Takes requests again.
    pub(super) fn release(&self, ring: &Ring) {
        self.admission.release(ring);
    }

    /// The same rings in another mapping; it is held.
    ///
    /// Errors: they do not fit the virtqueue.
    pub(super) fn set_areas(&self, areas: Areas, used_log: Option<u64>) -> Result<(), Error> {
        self.queue.borrow_mut().as_mut().map_or(Ok(()), |queue| queue.set_areas(areas, used_log))
    }

    /// The address of the used ring in the log from now on.
    pub(super) fn set_used_log(&self, used_log: Option<u64>) {
        if let Some(queue) = self.queue.borrow_mut().as_mut() {
            queue.set_log_addr(used_log);
        }
    }

    /// The log from now on.
    pub(super) fn set_log(&self, log: Option<Arc<Log>>) {
        if let Some(queue) = self.queue.borrow_mut().as_mut() {
            queue.set_log(log);
        }
    }

    /// Does something with the log, if what is written to guest memory is logged.
    pub(crate) fn with_log(&self, mark: impl FnOnce(&Log)) {
        if let Some(log) = self.queue.borrow().as_ref().and_then(Queue::log) {
            mark(log);
        }
    }

    /// Ends it; it was drained. Gives its base.
    pub(super) fn end(&self, ring: &Ring) -> u32 {
        self.over.unpark(ring);
        let Some(queue) = self.queue.borrow_mut().take() else { return 0 };
        let (base, wants_call) = queue.stop();
        if wants_call {
            self.call.signal();
        }
        base
    }
}
