//! The requests of one ring to one export.
//!
//! Promises: slots are made once; a request takes one, and allocates nothing. A reply finds its
//! request by the cookie, which is in use once. A request whose caller is gone keeps its slot until
//! its reply came, and lets go of the caller's memory at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::{Poll, Waker};

use ringdisk_nbd_protocol::numbers::command;
use ringdisk_nbd_protocol::request::Request;
use ringdisk_nbd_protocol::status::Extent;
use ringdisk_ring::{Errno, IoBuf};

/// Requests in flight of one ring. qemu-nbd carries out 16 of a connection at a time, others more;
/// the clients of one queue thread have at most 256 in flight.
pub(super) const SLOTS: u16 = 256;
/// Extents of one reply that are kept, about 64 KiB; the rest of the reply is read and dropped.
pub(super) const EXTENTS_MAX: usize = 4096;
/// Pieces of a read that wait for the bytes between them; a server that sends more is refused.
const GAPS_MAX: usize = 256;
/// How often a request is sent, each time over another connection.
const SENT_MAX: u8 = 5;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Free,
    /// Not on its way.
    Queued,
    /// On its way, or on the way back.
    Sent,
    Done(Result<(), Errno>),
}

/// Bytes of a read that have come, from its first byte on: disjoint runs in order.
#[derive(Debug, Default)]
struct Covered(Vec<Range<u64>>);

impl Covered {
    /// Adds a run. Errors: it overlaps one, or there are too many gaps.
    fn add(&mut self, start: u64, end: u64) -> Result<(), &'static str> {
        let at = self.0.partition_point(|run| run.end <= start);
        if self.0.get(at).is_some_and(|run| run.start < end) {
            return Err("two parts of a reply overlap");
        }
        let joins_before = at > 0 && self.0[at - 1].end == start;
        let joins_after = self.0.get(at).is_some_and(|run| run.start == end);
        match (joins_before, joins_after) {
            (true, true) => {
                self.0[at - 1].end = self.0[at].end;
                self.0.remove(at);
            }
            (true, false) => self.0[at - 1].end = end,
            (false, true) => self.0[at].start = start,
            (false, false) if self.0.len() >= GAPS_MAX => {
                return Err("a reply comes in too many pieces");
            }
            (false, false) => self.0.insert(at, start..end),
        }
        Ok(())
    }

    fn is_all(&self, len: u64) -> bool {
        len == 0 || self.0.iter().eq([&(0..len)])
    }
}

#[derive(Debug, Default)]
struct Slot {
    state: State,
    /// Differs between the requests that use the slot.
    generation: u32,
    request: Request,
    /// Of a read and a write; `None` too when the caller is gone.
    buf: Option<IoBuf>,
    covered: Covered,
    /// The error of a chunk that was not the last one.
    error: Option<Errno>,
    /// Of block status.
    extents: Vec<Extent>,
    has_status: bool,
    sent: u8,
    is_abandoned: bool,
    waker: Option<Waker>,
}

/// A broken rule of the protocol, for the message about the connection.
pub(super) type Violation = &'static str;

/// All slots of a driver.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Slots to be sent, in order.
    queue: VecDeque<u16>,
    /// Requests on their way.
    sent: usize,
    /// Callers that wait for a slot.
    waiting: VecDeque<Waker>,
}

impl Slots {
    pub(super) fn new() -> Slots {
        Slots {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            free: (0..SLOTS).rev().collect(),
            queue: VecDeque::with_capacity(SLOTS.into()),
            sent: 0,
            waiting: VecDeque::with_capacity(SLOTS.into()),
        }
    }

    fn slot(&mut self, index: u16) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }

    /// Queues a request, and gives its slot.
    ///
    /// * `request`: its cookie is chosen here.
    /// * `waker`: is woken when it is done, or when there is a free slot.
    pub(super) fn begin(
        &mut self,
        request: Request,
        buf: Option<&IoBuf>,
        waker: &Waker,
    ) -> Poll<u16> {
        let Some(index) = self.free.pop() else {
            self.waiting.push_back(waker.clone());
            return Poll::Pending;
        };
        let slot = self.slot(index);
        slot.state = State::Queued;
        slot.generation = slot.generation.wrapping_add(1);
        let cookie = u64::from(slot.generation) << 16 | u64::from(index);
        slot.request = Request { cookie, ..request };
        slot.buf = buf.cloned();
        (slot.sent, slot.is_abandoned) = (0, false);
        slot.waker = Some(waker.clone());
        slot.begin_again();
        self.queue.push_back(index);
        Poll::Ready(index)
    }

    /// The result of a request. The slot is free afterwards.
    pub(super) fn poll(&mut self, index: u16, waker: &Waker) -> Poll<Result<(), Errno>> {
        let slot = self.slot(index);
        if let State::Done(result) = slot.state {
            return Poll::Ready(result);
        }
        match &mut slot.waker {
            Some(had) => had.clone_from(waker),
            had @ None => *had = Some(waker.clone()),
        }
        Poll::Pending
    }

    /// The extents of a request for block status that is done.
    pub(super) fn extents(&mut self, index: u16) -> &[Extent] {
        &self.slot(index).extents
    }

    /// The caller has taken the result, or is gone.
    pub(super) fn end(&mut self, index: u16) {
        let slot = self.slot(index);
        slot.buf = None;
        slot.waker = None;
        match slot.state {
            State::Sent => slot.is_abandoned = true,
            State::Queued => {
                self.queue.retain(|it| *it != index);
                self.free_slot(index);
            }
            State::Done(_) => self.free_slot(index),
            State::Free => {}
        }
    }

    fn free_slot(&mut self, index: u16) {
        self.slot(index).state = State::Free;
        self.free.push(index);
        if let Some(waker) = self.waiting.pop_front() {
            waker.wake();
        }
    }

    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Requests on their way.
    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    /// The next request to be sent, with its payload if it is a write.
    pub(super) fn send_next(&mut self) -> Option<(Request, Option<IoBuf>)> {
        let index = self.queue.pop_front()?;
        let slot = self.slot(index);
        slot.state = State::Sent;
        slot.sent += 1;
        let payload = slot.buf.clone().filter(|_| slot.request.command == command::WRITE);
        let request = slot.request;
        self.sent += 1;
        Some((request, payload))
    }

    /// The slot of a reply.
    ///
    /// Errors: no request with this cookie is on its way.
    pub(super) fn find(&mut self, cookie: u64) -> Result<u16, Violation> {
        let index = u16::try_from(cookie & 0xffff).unwrap_or(u16::MAX);
        match self.slots.get(usize::from(index)) {
            Some(slot) if slot.state == State::Sent && slot.request.cookie == cookie => Ok(index),
            _ => Err("a reply to a request that nobody sent"),
        }
    }

    pub(super) fn request(&mut self, index: u16) -> Request {
        self.slot(index).request
    }

    /// Where the data of a read goes; `None`: the caller is gone.
    pub(super) fn buf(&mut self, index: u16) -> Option<IoBuf> {
        self.slot(index).buf.clone()
    }

    /// Bytes of a read have come, or are about to.
    ///
    /// * `offset`: on the disk.
    /// * `len`: not 0.
    ///
    /// Returns where they are in the request.
    ///
    /// Errors: bytes that were not asked for, or came before.
    pub(super) fn cover(&mut self, index: u16, offset: u64, len: u64) -> Result<usize, Violation> {
        let slot = self.slot(index);
        if slot.request.command != command::READ {
            return Err("data for a request that is no read");
        }
        let start = offset.checked_sub(slot.request.offset);
        let end = start.and_then(|start| start.checked_add(len));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= slot.request.len)) else {
            return Err("data that was not asked for");
        };
        if len == 0 {
            return Err("an empty part of a reply");
        }
        slot.covered.add(start, end)?;
        usize::try_from(start).map_err(|_| "data that was not asked for")
    }

    /// A chunk with an error has come. A second one changes nothing.
    pub(super) fn fail(&mut self, index: u16, error: Errno) -> Result<(), Violation> {
        match self.slot(index).error.replace(error) {
            None => Ok(()),
            Some(_) => Err("two errors in one reply"),
        }
    }

    /// The extents of block status begin.
    pub(super) fn begin_status(&mut self, index: u16) -> Result<(), Violation> {
        let slot = self.slot(index);
        if slot.request.command != command::BLOCK_STATUS {
            return Err("block status that was not asked for");
        }
        if std::mem::replace(&mut slot.has_status, true) {
            return Err("block status comes twice");
        }
        slot.extents.clear();
        Ok(())
    }

    /// One extent more. Neighbours of one kind become one. Those that are too many are left out, at
    /// the end.
    pub(super) fn add_extent(&mut self, index: u16, extent: Extent) {
        let extents = &mut self.slot(index).extents;
        if extents.len() >= EXTENTS_MAX {
            return;
        }
        match extents.last_mut() {
            Some(last) if last.flags == extent.flags => {
                last.len = last.len.saturating_add(extent.len);
            }
            _ => extents.push(extent),
        }
    }

    /// The last part of a reply has come.
    ///
    /// * `error`: that of a simple reply.
    ///
    /// Errors: parts of the reply are missing.
    pub(super) fn finish(&mut self, index: u16, error: Option<Errno>) -> Result<(), Violation> {
        let slot = self.slot(index);
        let error = error.or(slot.error);
        let is_whole = match slot.request.command {
            command::READ => slot.covered.is_all(slot.request.len),
            command::BLOCK_STATUS => slot.has_status,
            _ => true,
        };
        if error.is_none() && !is_whole {
            return Err("a reply without all of its data");
        }
        self.sent -= 1;
        self.done(index, error.map_or(Ok(()), Err));
        Ok(())
    }

    fn done(&mut self, index: u16, result: Result<(), Errno>) {
        let slot = self.slot(index);
        slot.state = State::Done(result);
        slot.buf = None;
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
        if slot.is_abandoned {
            self.free_slot(index);
        }
    }

    /// The connection is lost: requests on their way are queued again, in front of the others, or
    /// fail.
    ///
    /// * `repeats_changes`: requests that change the disk are sent again, too.
    pub(super) fn lost(&mut self, repeats_changes: bool, failed: Errno) {
        for index in (0..SLOTS).rev() {
            let slot = self.slot(index);
            if slot.state != State::Sent {
                continue;
            }
            let changes = matches!(
                slot.request.command,
                command::WRITE | command::TRIM | command::WRITE_ZEROES
            );
            let repeats =
                !slot.is_abandoned && slot.sent < SENT_MAX && (repeats_changes || !changes);
            if repeats {
                slot.state = State::Queued;
                slot.begin_again();
                // A late reply to it would be one that nobody waits for.
                self.queue.push_front(index);
            } else {
                self.done(index, Err(failed));
            }
        }
        self.sent = 0;
    }

    /// All queued requests fail.
    pub(super) fn fail_queued(&mut self, failed: Errno) {
        while let Some(index) = self.queue.pop_front() {
            self.done(index, Err(failed));
        }
    }
}

impl Slot {
    /// Nothing of a reply has come.
    fn begin_again(&mut self) {
        self.covered.0.clear();
        self.error = None;
        self.has_status = false;
        self.extents.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: u16, offset: u64, len: u64) -> Request {
        Request { command, offset, len, ..Request::default() }
    }

    fn sent(slots: &mut Slots, request: Request) -> (u16, u64) {
        let Poll::Ready(index) = slots.begin(request, None, Waker::noop()) else {
            panic!("a slot is free");
        };
        let (request, _) = slots.send_next().expect("queued");
        (index, request.cookie)
    }

    #[test]
    fn a_read_is_done_when_all_of_it_came_once_in_any_order() {
        let mut slots = Slots::new();
        let (index, cookie) = sent(&mut slots, request(command::READ, 1000, 100));
        assert_eq!(slots.find(cookie), Ok(index));
        assert_eq!(slots.cover(index, 1050, 50), Ok(50));
        assert!(slots.finish(index, None).is_err());
        assert_eq!(slots.cover(index, 1000, 20), Ok(0));
        for (offset, len) in [(1010, 20), (999, 10), (1090, 20), (0, 10), (1020, 0), (1060, 10)] {
            assert!(slots.cover(index, offset, len).is_err(), "{offset} {len}");
        }
        assert!(
            slots.cover(index, u64::MAX, 10).is_err()
                && slots.cover(index, 1020, u64::MAX).is_err()
        );
        assert_eq!(slots.cover(index, 1020, 30), Ok(20));
        assert_eq!(slots.finish(index, None), Ok(()));
        assert_eq!(slots.poll(index, Waker::noop()), Poll::Ready(Ok(())));
        assert!(slots.find(cookie).is_err(), "answered");
        slots.end(index);
        assert_eq!(slots.free.len(), usize::from(SLOTS));
    }

    #[test]
    fn cookies_of_other_requests_are_unknown() {
        let mut slots = Slots::new();
        let (index, cookie) = sent(&mut slots, request(command::FLUSH, 0, 0));
        for other in [cookie + 1, cookie + (1 << 16), 0, u64::MAX, u64::from(SLOTS)] {
            assert!(slots.find(other).is_err(), "{other}");
        }
        assert!(slots.cover(index, 0, 1).is_err() && slots.begin_status(index).is_err());
        assert_eq!(slots.finish(index, Some(Errno::NOSPC)), Ok(()));
        assert_eq!(slots.poll(index, Waker::noop()), Poll::Ready(Err(Errno::NOSPC)));
    }

    #[test]
    fn a_lost_connection_repeats_reads_and_changes_where_that_is_safe() {
        for repeats_changes in [true, false] {
            let mut slots = Slots::new();
            let (write, _) = sent(&mut slots, request(command::WRITE, 0, 10));
            let (read, _) = sent(&mut slots, request(command::READ, 0, 10));
            let (gone, _) = sent(&mut slots, request(command::READ, 0, 10));
            slots.end(gone);
            slots.lost(repeats_changes, Errno::IO);
            let failed = Poll::Ready(Err(Errno::IO));
            let expected = if repeats_changes { Poll::Pending } else { failed };
            assert_eq!(slots.poll(write, Waker::noop()), expected);
            assert_eq!(slots.poll(read, Waker::noop()), Poll::Pending);
            assert_eq!(slots.queue.len(), if repeats_changes { 2 } else { 1 });
            assert_eq!(slots.sent(), 0);
            for _ in 1..SENT_MAX {
                while slots.send_next().is_some() {}
                slots.lost(true, Errno::IO);
            }
            assert_eq!(slots.poll(read, Waker::noop()), failed, "not for ever");
        }
    }

    #[test]
    fn a_caller_that_is_gone_frees_its_slot_when_the_reply_came() {
        let mut slots = Slots::new();
        let (index, cookie) = sent(&mut slots, request(command::FLUSH, 0, 0));
        slots.end(index);
        assert_eq!(slots.free.len() + 1, usize::from(SLOTS));
        let found = slots.find(cookie).expect("still on its way");
        assert_eq!(slots.finish(found, None), Ok(()));
        assert_eq!(slots.free.len(), usize::from(SLOTS));
    }
}
