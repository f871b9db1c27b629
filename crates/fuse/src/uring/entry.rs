//! The life of a ring entry: given to the kernel once, then request, reply, request.
//!
//! Promises: one task for each entry, on the thread whose ring the entry belongs to at the moment.
//! The kernel delivers the next request of an entry to the ring that committed its last one; so
//! handing an entry with the request in it to another thread, which serves and commits it, moves it
//! for good. Never allocates, locks or blocks for a request (a move makes a new task).

use std::future::pending;
use std::rc::Rc;
use std::time::Instant;

use ringdisk_ring::{Errno, RawCommand};

use crate::abi::flags::FOPEN_IO_URING_ZERO_COPY;
use crate::abi::uring::{
    self, CMD_ADD_BUFPOOL, CMD_ADD_QUEUE, CMD_COMMIT_AND_FETCH, CMD_REGISTER, command,
    register_with_slot,
};
use crate::events::EndReason;
use crate::reply::ReplyBuf;
use crate::serve::{Answer, answer};

use super::MESSAGE_ENTRY;
use super::memory::{Frame, Incoming};
use super::pool::{MEMORY_SLOT, Pool};
use super::queue::RingQueue;
use super::rings::Refuse;

/// How an entry comes to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// It is given to the kernel.
    Register,
    /// Another thread hands it over, with a request in it.
    Handed,
}

/// Another thread has handed an entry over.
pub(crate) fn take_over(queue: &Rc<RingQueue>, message: u32) {
    let index = (message & !MESSAGE_ENTRY) as usize;
    if queue.rings.entries.get(index).is_some_and(|entry| entry.ownership.take()) {
        queue.ring.spawn(live(Rc::clone(queue), index, Begin::Handed));
    }
}

/// Serves an entry until it moves away or the mount ends.
pub(super) async fn live(queue: Rc<RingQueue>, index: usize, begin: Begin) {
    let rings = &*queue.rings;
    let entry = &rings.entries[index];
    let frame = rings.frame(index);
    let fixed = rings.pool().filter(|pool| pool.is_pinned()).map(|_| MEMORY_SLOT);
    if begin == Begin::Register {
        let registered = register(&queue, index, &frame, fixed).await;
        if let Err(errno) = registered {
            return ended(&queue, errno, EndReason::Device);
        }
    }
    let place = queue.number(index);
    queue.memory.enter(place, frame.own_payload());
    let mut good_replies = match rings.refuses {
        Some(Refuse::ReplyAfter(count)) => Some(count),
        _ => None,
    };
    loop {
        if rings.is_draining() {
            // The mount goes: the kernel ends the request with the connection.
            return pending().await;
        }
        let to = rings.place_of(index);
        if to != queue.thread && !frame.is_zero_copy() {
            // The thread that gets the entry may use its memory at once.
            queue.memory.leave(place);
            if hand_over(&queue, index, to).await {
                return;
            }
            queue.memory.enter(place, frame.own_payload());
        }
        let number = serve(&queue, index, &frame).await;
        let area = command(number, queue_of_reply(entry.queue, &mut good_replies));
        queue.memory.set_idle(place, true);
        let committed = send(&queue, CMD_COMMIT_AND_FETCH, (0, 0), area, fixed).await;
        queue.memory.set_idle(place, false);
        if let Err(errno) = committed {
            return ended(&queue, errno, EndReason::Reply);
        }
    }
}

/// The queue that a reply names: the entry's, but for a test of replies that are refused.
///
/// * `good`: how many more replies name it; `None`: all.
fn queue_of_reply(queue: u16, good: &mut Option<u32>) -> u16 {
    match good {
        None => queue,
        Some(0) => u16::MAX,
        Some(count) => {
            *count -= 1;
            queue
        }
    }
}

/// Gives the entry to the kernel; ready when a request is in it.
async fn register(
    queue: &RingQueue,
    index: usize,
    frame: &Frame,
    fixed: Option<u16>,
) -> Result<(), Errno> {
    // The header and the payload.
    const VECTORS: u32 = 2;
    let rings = &queue.rings;
    let number = rings.entries[index].queue;
    let is_last = usize::from(number) + 1 == rings.plan.0.len();
    let number = match rings.refuses {
        Some(Refuse::LastRing) if is_last => u16::MAX,
        Some(Refuse::Entry(refused)) if refused == index => u16::MAX,
        _ => number,
    };
    let area = match frame.slot(index) {
        Some(slot) => register_with_slot(number, slot),
        None => command(0, number),
    };
    send(queue, CMD_REGISTER, (frame.vector(), VECTORS), area, fixed).await
}

/// Makes a queue with a pool.
pub(super) async fn add_pool(queue: &RingQueue, pool: &Pool, number: u16) -> Result<(), Errno> {
    let rings = &queue.rings;
    let area = uring::add_queue(number, pool.zero_copy);
    send(queue, CMD_ADD_QUEUE, (0, 0), area, None).await?;
    let (address, mut len) = pool.region(number);
    if rings.refuses == Some(Refuse::Pools(rings.mode())) {
        // No room for a single request.
        len = 4096;
    }
    let area = uring::add_pool(number, address, len);
    let fixed = pool.is_pinned().then_some(MEMORY_SLOT);
    send(queue, CMD_ADD_BUFPOOL, (0, 0), area, fixed).await
}

/// * `vector`: address and number of what the command reads from our memory.
/// * `fixed`: slot of the pool's memory in the ring.
async fn send(
    queue: &RingQueue,
    operation: u32,
    vector: (u64, u32),
    command: [u8; 80],
    fixed: Option<u16>,
) -> Result<(), Errno> {
    let (address, len) = vector;
    let raw =
        RawCommand { fd: queue.device, operation, address, len, fixed_buffer: fixed, command };
    // SAFETY: the command names the entry's header and payload or the queue's pool, directly
    // (REGISTER, ADD_BUFPOOL) or from then on. They belong to `Rings`, which the queue thread holds
    // until its ring is closed ([`crate::thread`]), so also after this future is dropped. The
    // thread that has the request touches them, and after the command none does until it
    // completes. Pages of a client in a slot of the ring are reached by operations only, which have
    // all ended before a reply is committed.
    #[allow(unsafe_code)]
    let sent = unsafe { queue.ring.command(&raw) };
    sent.await.map(|_| ())
}

/// Sends the entry to the thread where it belongs. False: it could not be sent and stays.
async fn hand_over(queue: &RingQueue, index: usize, to: usize) -> bool {
    let rings = &queue.rings;
    let Some(fd) = rings.ring_fd(to) else { return false };
    // Fewer entries than 2^31.
    let number = u32::try_from(index).unwrap_or(0);
    let ownership = &rings.entries[index].ownership;
    ownership.send();
    queue.ring.send_message(fd, MESSAGE_ENTRY | number).await.is_ok() || !ownership.take_back()
}

/// Carries out the request in the entry and leaves the reply there. Returns the number to commit.
async fn serve(queue: &RingQueue, index: usize, frame: &Frame) -> u64 {
    let (started, turn) = (Instant::now(), queue.ring.turn());
    queue.begin(index, started);
    let number = match frame.incoming() {
        Some(incoming) => {
            serve_incoming(queue, queue.number(index), frame, &incoming).await;
            incoming.number
        }
        None => {
            queue.cells.errors.add(1);
            frame.fail(Errno::IO)
        }
    };
    queue.end(index, started, turn);
    number
}

async fn serve_incoming(queue: &RingQueue, place: usize, frame: &Frame, incoming: &Incoming) {
    let Incoming { number, data, body, .. } = incoming;
    let number = *number;
    if !data.is_ours() {
        queue.cells.zero_copy.add(1);
    }
    let answer = match &incoming.request {
        Ok(request) => {
            queue.will_use(place, request);
            answer(&queue.ring, &queue.server, &queue.cells, request, data).await
        }
        Err(_) => Answer::error(number, Errno::INVAL),
    };
    match answer {
        Answer::Data(len) => frame.put_data(number, len),
        Answer::Reply(mut reply) => {
            if reply.is_failure() {
                queue.cells.errors.add(1);
            } else if reply.error_number() == 0
                && incoming.opener().is_some_and(|opener| queue.rings.opens_zero_copy(opener))
            {
                reply.add_open_flags(FOPEN_IO_URING_ZERO_COPY);
            }
            frame.put(&reply, body);
        }
        Answer::None => {
            // Nothing of that kind comes through a ring; the entry goes back in any case.
            let mut reply = ReplyBuf::new();
            reply.set_empty(number);
            frame.put(&reply, body);
        }
    }
}

/// The kernel gives the entry no request any more.
///
/// * `unexpected`: what it is when the end of the mount does not explain it.
fn ended(queue: &RingQueue, errno: Errno, unexpected: fn(Errno) -> EndReason) {
    if queue.rings.fail(errno) {
        // The mount is not live yet: the start decides what follows.
        return;
    }
    match errno {
        Errno::NODEV => queue.finish(EndReason::Unmounted),
        // Unmounted or aborted: both end entries so. Where the mount is still there it has to go.
        Errno::NOTCONN | Errno::CONNABORTED => queue.finish(EndReason::Aborted),
        Errno::NOENT => {
            tracing::warn!(
                "the kernel does not know a request of ours any more: the mount was aborted"
            );
            queue.finish(EndReason::Aborted);
        }
        // The ring is being closed.
        Errno::CANCELED => {}
        errno => queue.finish(unexpected(errno)),
    }
}
