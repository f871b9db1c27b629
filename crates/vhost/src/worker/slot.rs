//! What one request at a time needs while it is served.
//!
//! Promises: serving a request as drivers are told to make them allocates nothing here.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use ringdisk_guest::{Chain, Token, View};
use ringdisk_ring::{IoBuf, Parker, Ring, Scatter};

use super::vring::Vring;
use crate::blk::SEGMENTS_MAX;

/// Segments of the longest request that drivers are told to make, with header and status. There are
/// up to 256 slots for each thread, so room for the longest request that there can be (8 times as
/// much) would cost more memory than anything else does.
const SEGMENTS_USUAL: usize = SEGMENTS_MAX as usize + 2;

/// What a request needs while it is served; reused by the next one.
pub(crate) struct Slot {
    pub(crate) chain: RefCell<Chain>,
    pub(super) scatter: RefCell<Scatter>,
    pub(super) request: RefCell<Option<Request>>,
    /// Memory as it was when the request was popped.
    pub(super) view: RefCell<Option<Rc<View>>>,
    pub(super) since: Cell<Option<Instant>>,
    pub(super) parker: Parker,
}

/// A request that was popped.
pub(super) struct Request {
    pub(super) vring: Rc<Vring>,
    pub(super) token: Token,
}

impl Default for Slot {
    /// With room for a request as drivers are told to make them: serving one allocates nothing. A
    /// longer one makes room, once.
    fn default() -> Slot {
        Slot {
            chain: RefCell::new(Chain::with_capacity(SEGMENTS_USUAL)),
            scatter: RefCell::new(Scatter::with_capacity(SEGMENTS_USUAL)),
            request: RefCell::default(),
            view: RefCell::default(),
            since: Cell::default(),
            parker: Parker::default(),
        }
    }
}

impl Slot {
    /// Adds where it lies, for [`Worker::own_memory`].
    pub(super) fn own_memory(&self, ranges: &mut Vec<(usize, usize)>) {
        ranges.push((std::ptr::from_ref(self).addr(), size_of_val(self)));
        ranges.push(self.chain.borrow().own_memory());
        ranges.extend(self.scatter.borrow().own_memory());
    }

    /// A request was popped into this slot: its task serves it in this turn.
    pub(super) fn begin(
        &self,
        vring: &Rc<Vring>,
        token: Token,
        view: &Rc<View>,
        now: Instant,
        ring: &Ring,
    ) {
        *self.request.borrow_mut() = Some(Request { vring: Rc::clone(vring), token });
        *self.view.borrow_mut() = Some(Rc::clone(view));
        self.since.set(Some(now));
        self.parker.unpark(ring);
    }

    /// Copies bytes that the guest wrote for us, each read once. `false` when there are fewer.
    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> bool {
        let view = self.view.borrow();
        view.as_ref().is_some_and(|view| self.chain.borrow().read(view, at, bytes))
    }

    /// Copies bytes to where we may write. `false` when there is no room for them.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> bool {
        let view = self.view.borrow();
        view.as_ref().is_some_and(|view| self.chain.borrow().write(view, at, bytes))
    }

    /// Whether a part of the guest's memory was found gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.view.borrow().as_ref().is_some_and(|view| view.memory().is_lost())
    }

    /// Bytes that the guest wrote for us, as a buffer.
    pub(crate) fn readable(&self, at: u64, len: u64) -> Option<IoBuf> {
        self.gather(|chain, view, scatter| {
            chain.readable_pieces(view, at..at + len, |piece| scatter.push(piece))
        })
    }

    /// The first bytes that we may write, as a buffer.
    pub(crate) fn writable(&self, len: u64) -> Option<IoBuf> {
        self.gather(|chain, view, scatter| {
            chain.writable_pieces(view, 0..len, |piece| scatter.push(piece))
        })
    }

    fn gather(&self, fill: impl FnOnce(&Chain, &View, &mut Scatter) -> bool) -> Option<IoBuf> {
        let view = self.view.borrow();
        let mut scatter = self.scatter.borrow_mut();
        scatter.clear();
        fill(&self.chain.borrow(), view.as_ref()?, &mut scatter).then(|| scatter.buffer())
    }
}
