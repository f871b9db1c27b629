//! A virtqueue that runs, on its thread.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_guest::{Chain, Log, Queue, View};
use ringdisk_ring::stats::QueueCells;
use ringdisk_ring::{Errno, Fd, IoBuf, Parker, Ring};

use super::call::Call;
use super::slot::Slot;
use crate::device::Device;

/// What a virtqueue is started with.
pub(crate) struct RingStart {
    pub(crate) index: u16,
    pub(crate) queue: Queue,
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) error: Option<OwnedFd>,
}

/// A virtqueue.
pub(crate) struct Vring {
    pub(crate) index: u16,
    queue: RefCell<Queue>,
    kick: Option<OwnedFd>,
    pub(crate) call: Call,
    pub(crate) error: Call,
    log: RefCell<Option<Arc<Log>>>,
    /// No requests are taken while somebody changes something.
    holds: Cell<u32>,
    is_broken: Cell<bool>,
    in_flight: Cell<u32>,
    /// Completions that the guest has not been shown.
    has_unpublished: Cell<bool>,
    /// Somebody waits until nothing is in flight.
    drained: Parker,
    /// User data of the read of the kick, to cancel it.
    kick_read: Cell<Option<u64>>,
}

impl Vring {
    pub(crate) fn new(start: RingStart) -> Rc<Vring> {
        let vring = Vring {
            index: start.index,
            queue: RefCell::new(start.queue),
            kick: start.kick,
            call: Call::default(),
            error: Call::default(),
            log: RefCell::default(),
            holds: Cell::new(0),
            is_broken: Cell::new(false),
            in_flight: Cell::new(0),
            has_unpublished: Cell::new(false),
            drained: Parker::default(),
            kick_read: Cell::new(None),
        };
        vring.call.set(start.call);
        vring.error.set(start.error);
        Rc::new(vring)
    }
}
