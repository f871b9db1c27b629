//! A slot: what one request in flight has.
//!
//! Promises: its memory is made with it and used again by every request that fits; a larger request
//! brings memory, which the session keeps for the next one. Queue thread only.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use ringdisk_nbd_protocol::request::Request;
use ringdisk_nbd_protocol::status::Extent;
use ringdisk_ring::{IoBuf, Parker};

use super::{HEAD_BYTES, SMALL_BYTES};

/// Runs of data and holes that a read is answered in at most; the rest is data.
pub(super) const RUNS_MAX: usize = 64;

/// A part of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// First byte, from the start of the read.
    pub(super) at: usize,
    pub(super) len: usize,
    /// It reads as zeroes, and no data is sent for it.
    pub(super) is_hole: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) number: usize,
    /// The task of the slot waits here for a request, and for the end.
    pub(super) work: Parker,
    /// The request that the task shall carry out.
    pub(super) request: Cell<Option<Request>>,
    /// When it was received.
    pub(super) begun: Cell<Option<Instant>>,
    /// [`HEAD_BYTES`] of room, then data.
    memory: IoBuf,
    /// The same for a larger request.
    large: RefCell<Option<IoBuf>>,
    /// Parts of the memory that are the reply, in order: first byte and the byte after the last.
    pub(super) reply: RefCell<Vec<(usize, usize)>>,
    /// Parts of a read.
    pub(super) runs: RefCell<Vec<Run>>,
    /// Extents of a reply to block status.
    pub(super) extents: RefCell<Vec<Extent>>,
    /// Bytes of a reply to block status, or of a request for it.
    pub(super) bytes: RefCell<Vec<u8>>,
}

impl Slot {
    pub(super) fn new(number: usize) -> Slot {
        Slot {
            number,
            work: Parker::default(),
            request: Cell::new(None),
            begun: Cell::new(None),
            memory: IoBuf::new(HEAD_BYTES + SMALL_BYTES, 4096),
            large: RefCell::new(None),
            reply: RefCell::new(Vec::with_capacity(RUNS_MAX + 1)),
            runs: RefCell::new(Vec::with_capacity(RUNS_MAX)),
            extents: RefCell::default(),
            bytes: RefCell::default(),
        }
    }

    /// Gives it the memory of a larger request.
    pub(super) fn enlarge(&self, memory: Option<IoBuf>) {
        *self.large.borrow_mut() = memory;
    }

    /// Its memory: [`HEAD_BYTES`] of room, then data.
    pub(super) fn memory(&self) -> IoBuf {
        self.large.borrow().as_ref().unwrap_or(&self.memory).clone()
    }

    /// The first bytes of its data.
    pub(super) fn data(&self, len: usize) -> IoBuf {
        self.memory().slice(HEAD_BYTES..HEAD_BYTES + len)
    }

    /// Forgets the request. Gives the memory that a larger one had.
    pub(super) fn clear(&self) -> Option<IoBuf> {
        self.reply.borrow_mut().clear();
        self.runs.borrow_mut().clear();
        self.large.take()
    }
}
