//! The transmission phase of a connection: requests come, are carried out together, and are
//! answered in the order in which they finish.
//!
//! Promises: one task receives, one sends, and each request that is in flight has a task with a
//! slot; slots are made when they are needed for the first time and then used again, so a request
//! allocates nothing. The memory of a connection is bounded: [`CONNECTION_BYTES_MAX`]. A client
//! that takes no replies fills its own slots and is not read any more.

mod answer;
mod receive;
mod send;
mod serve;
mod slot;
mod status;
mod validate;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_nbd_protocol::request::Style;
use ringdisk_ring::{Errno, IoBuf, Parker, Ring};

use crate::end_reason::End;
use crate::exported_disk::Exported;
use crate::input_buffer::{INPUT_BYTES, Input};
use crate::negotiated::Agreed;
use crate::queue::Queue;
use crate::transport::Transport;

use slot::Slot;

/// Requests of a connection in flight: as many as Linux's own client sends on a socket.
pub(crate) const REQUESTS_MAX: usize = 128;
/// Data of a request that fits into the memory of its slot, bytes: the largest request of most
/// tools.
pub(crate) const SMALL_BYTES: usize = 256 << 10;
/// Room before the data in the memory of a slot, bytes: for the head of the reply. A page, so that
/// data is aligned for direct I/O.
pub(crate) const HEAD_BYTES: usize = 4096;
/// Larger requests of a connection in flight, bytes together: one of the largest, or several.
pub(crate) const LARGE_BYTES_MAX: usize = 32 << 20;

/// Replies that a Unix socket holds for its client, bytes; the kernel doubles that for what it
/// keeps beside them, and allows less where `net.core.wmem_max` says so. With its own default it
/// takes less than one reply of 256 KiB, so client and server wait for each other all the time. A
/// socket of TCP finds its size by itself.
pub(crate) const SEND_BYTES: usize = 512 << 10;

/// Pieces of memory of larger requests that are kept.
const SPARES_MAX: usize = 16;

/// Memory for data of a connection at most, bytes: 128 slots of 256 KiB and a page, requests that
/// are larger (32 MiB together and a page each), the input, and what the kernel holds in the
/// socket. About 66 MiB; pages that no request has used are not there.
pub const CONNECTION_BYTES_MAX: usize =
    REQUESTS_MAX * (SMALL_BYTES + 2 * HEAD_BYTES) + LARGE_BYTES_MAX + INPUT_BYTES + 2 * SEND_BYTES;

/// A connection in its transmission phase.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) queue: Rc<Queue>,
    transport: Rc<Transport>,
    pub(crate) export: Arc<Exported>,
    pub(crate) style: Style,
    /// Places in the export's contexts; the index is the number on the wire.
    pub(crate) contexts: Vec<usize>,
    /// Slots that were made. Never shorter.
    slots: RefCell<Vec<Rc<Slot>>>,
    /// Those that carry no request. The last one was used last, so its memory is warm.
    free: RefCell<Vec<usize>>,
    /// Bytes that larger requests may still take.
    large_left: Cell<usize>,
    /// Memory of larger requests that have ended, for the next ones: its pages are there. Counts as
    /// taken.
    spare: RefCell<Vec<IoBuf>>,
    /// Slots whose replies wait for the task that sends.
    finished: RefCell<Vec<usize>>,
    /// The task that sends waits here for replies.
    to_send: Parker,
    /// The task that receives waits here for a slot, for memory, or for the end.
    freed: Parker,
    /// Nothing can be sent any more.
    is_broken: Cell<bool>,
    /// The tasks of the slots and the one that sends end.
    is_closing: Cell<bool>,
}

impl Session {
    fn new(queue: &Rc<Queue>, transport: &Rc<Transport>, agreed: Agreed) -> Session {
        Session {
            queue: Rc::clone(queue),
            transport: Rc::clone(transport),
            export: agreed.export,
            style: agreed.style,
            contexts: agreed.contexts,
            slots: RefCell::new(Vec::with_capacity(REQUESTS_MAX)),
            free: RefCell::new(Vec::with_capacity(REQUESTS_MAX)),
            large_left: Cell::new(LARGE_BYTES_MAX),
            spare: RefCell::new(Vec::with_capacity(SPARES_MAX)),
            finished: RefCell::new(Vec::with_capacity(REQUESTS_MAX)),
            to_send: Parker::default(),
            freed: Parker::default(),
            is_broken: Cell::new(false),
            is_closing: Cell::new(false),
        }
    }

    pub(crate) fn ring(&self) -> &Ring {
        &self.queue.ring
    }

    /// A free slot; a new one where there are not yet as many as there may be.
    fn take_slot(self: &Rc<Session>) -> Option<Rc<Slot>> {
        if let Some(number) = self.free.borrow_mut().pop() {
            return Some(Rc::clone(&self.slots.borrow()[number]));
        }
        let number = self.slots.borrow().len();
        if number == REQUESTS_MAX {
            return None;
        }
        let slot = Rc::new(Slot::new(number));
        self.slots.borrow_mut().push(Rc::clone(&slot));
        self.ring().spawn(serve::serve(Rc::clone(self), Rc::clone(&slot)));
        Some(slot)
    }

    /// Waits for a slot with memory for so many bytes of data, at most [`LARGE_BYTES_MAX`].
    async fn slot(self: &Rc<Session>, data_bytes: usize) -> Rc<Slot> {
        loop {
            let large = data_bytes > SMALL_BYTES;
            let memory = if large { self.large_memory(data_bytes) } else { None };
            if !large || memory.is_some() {
                if let Some(slot) = self.take_slot() {
                    slot.enlarge(memory);
                    return slot;
                }
                memory.into_iter().for_each(|memory| self.keep(memory));
            }
            self.queue.cells.exhausted.add(1);
            self.freed.park(self.ring()).await;
        }
    }

    /// Memory for a larger request: that of one that has ended, or new one. `None`: the larger
    /// requests in flight have all that there may be.
    fn large_memory(&self, data_bytes: usize) -> Option<IoBuf> {
        let mut spare = self.spare.borrow_mut();
        let fits = |memory: &IoBuf| (data_bytes..=2 * data_bytes).contains(&data_bytes_of(memory));
        if let Some(found) = spare.iter().position(fits) {
            return Some(spare.swap_remove(found));
        }
        if data_bytes > self.large_left.get() {
            let given_back: usize = spare.drain(..).map(|memory| data_bytes_of(&memory)).sum();
            self.large_left.set(self.large_left.get() + given_back);
        }
        let left = self.large_left.get().checked_sub(data_bytes)?;
        self.large_left.set(left);
        let memory = IoBuf::new(HEAD_BYTES + data_bytes, HEAD_BYTES);
        memory.populate(memory.len());
        Some(memory)
    }

    /// The request that had this memory has ended.
    fn keep(&self, memory: IoBuf) {
        let mut spare = self.spare.borrow_mut();
        if spare.len() < SPARES_MAX {
            spare.push(memory);
        } else {
            self.large_left.set(self.large_left.get() + data_bytes_of(&memory));
        }
    }

    /// The reply of a slot is complete.
    fn finish(&self, slot: &Slot) {
        self.queue.unsent.set(self.queue.unsent.get() + 1);
        self.finished.borrow_mut().push(slot.number);
        self.to_send.unpark(self.ring());
    }

    /// The reply of a slot has left, or never will.
    fn release(&self, number: usize) {
        self.queue.unsent.set(self.queue.unsent.get() - 1);
        let memory = self.slots.borrow()[number].clear();
        memory.into_iter().for_each(|memory| self.keep(memory));
        self.free.borrow_mut().push(number);
        self.freed.unpark(self.ring());
    }

    /// Waits until no slot carries a request.
    async fn wait_idle(&self) {
        while self.free.borrow().len() < self.slots.borrow().len() {
            self.freed.park(self.ring()).await;
        }
    }

    /// Ends the tasks of the slots and the one that sends.
    fn close(&self) {
        self.is_closing.set(true);
        self.slots.borrow().iter().for_each(|slot| slot.work.unpark(self.ring()));
        self.to_send.unpark(self.ring());
    }
}

/// Bytes of data that such memory holds.
fn data_bytes_of(memory: &IoBuf) -> usize {
    memory.len() - HEAD_BYTES
}

/// Serves requests until the end of the connection, or until it has to stand still
/// ([`End::StandsStill`]: what was read and not used is in `input`); requests in flight are
/// finished and, where that is possible, answered.
pub(crate) async fn run(
    queue: &Rc<Queue>,
    transport: &Rc<Transport>,
    agreed: Agreed,
    input: &mut Input,
) -> Result<(), End> {
    let session = Rc::new(Session::new(queue, transport, agreed));
    queue.ring.spawn(send::send(Rc::clone(&session)));
    let end = receive::receive(&session, input).await;
    session.wait_idle().await;
    session.close();
    match end {
        // Some replies have not left, and never will.
        Err(End::StandsStill) if session.is_broken.get() => Err(End::Socket(Errno::PIPE)),
        end => end,
    }
}
