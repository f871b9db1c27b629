//! One virtqueue of the model: requests in, answers out.
//!
//! Promises: an answer to a chain that is not in flight, or a byte that the device has written
//! beside its buffers, fails the test. Shares no code with the device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringdisk_guest::Segment;
use ringdisk_guest::driver::{Driver, GuestRam};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{Request, TIMEOUT};
use crate::process::patient;
use crate::sim::Prng;

/// What memory holds where the device has nothing to write.
const POISON: u8 = 0xa5;

/// An answer.
#[derive(Debug)]
pub struct Done {
    /// What [`Queue::add`] gave.
    pub id: u16,
    /// What was asked.
    pub request: Request,
    /// 0: done, 1: an I/O error, 2: not supported.
    pub status: u8,
    /// The bytes that were read.
    pub data: Vec<u8>,
}

#[derive(Debug)]
struct Pending {
    slot: usize,
    request: Request,
    /// What memory held, from the start of the slot.
    before: Vec<u8>,
    /// Places in it that the device may write, and their lengths.
    writable: Vec<(usize, usize)>,
}

/// A virtqueue and its driver.
#[derive(Debug)]
pub struct Queue {
    /// The rings.
    pub driver: Driver,
    /// Eventfd that wakes the device.
    pub kick: OwnedFd,
    /// Eventfd that wakes us.
    pub call: OwnedFd,
    /// Times that the device was kicked.
    pub kicks: u64,
    /// Times that we were called while we slept.
    pub calls: u64,
    slots: Vec<u64>,
    slot_bytes: usize,
    free: Vec<usize>,
    pending: Vec<Option<Pending>>,
    prng: Prng,
}

/// An eventfd that counts.
pub(super) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

impl Queue {
    /// A virtqueue whose requests lie in memory at `slots`, each `slot_bytes` bytes.
    ///
    /// * `seed`: of all chance.
    #[must_use]
    pub fn new(driver: Driver, slots: Vec<u64>, slot_bytes: usize, seed: u64) -> Queue {
        let pending = (0..driver.config().size).map(|_| None).collect();
        Queue {
            driver,
            kick: event(),
            call: event(),
            kicks: 0,
            calls: 0,
            free: (0..slots.len()).rev().collect(),
            slots,
            slot_bytes,
            pending,
            prng: Prng::new(seed),
        }
    }

    /// Requests that were added and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a request; the device sees it after [`Queue::kick`]. Gives its id, or the request back
    /// when there is no room.
    ///
    /// Errors: the queue is full.
    pub fn add(&mut self, ram: &GuestRam, request: Request) -> Result<u16, Request> {
        let Some(slot) = self.free.last().copied() else { return Err(request) };
        let start = self.slots[slot];
        let bytes = request.readable();
        let (readable, writable) = request.segments(&mut self.prng);
        let (mut at, mut from) = (self.skip(64), 0);
        let (mut segments, mut places, mut before) = (Vec::new(), Vec::new(), Vec::new());
        for (number, len) in readable.iter().chain(&writable).copied().enumerate() {
            before.resize(at, POISON);
            if number < readable.len() {
                before.extend(&bytes[from..from + len]);
                from += len;
            } else {
                places.push((at, len));
                before.resize(at + len, POISON);
            }
            let len32 = u32::try_from(len).expect("a small segment");
            segments.push(Segment { addr: start + at as u64, len: len32 });
            at += len + self.skip(3);
        }
        before.resize(at, POISON);
        assert!(at <= self.slot_bytes, "a request of {at} bytes in a slot of {}", self.slot_bytes);
        ram.write(start, &before);
        let id = match request.indirect {
            true => self.driver.add_indirect(&segments, readable.len()),
            false => self.driver.add(&segments, readable.len()),
        };
        let Some(id) = id else { return Err(request) };
        self.free.pop();
        self.pending[usize::from(id)] = Some(Pending { slot, request, before, writable: places });
        Ok(id)
    }

    fn skip(&mut self, bound: u64) -> usize {
        usize::try_from(self.prng.below(bound)).expect("64 bits")
    }

    /// Shows what was added to the device, and kicks it if it wants that.
    pub fn kick(&mut self) {
        if self.driver.publish() {
            self.kick_anyway();
        }
    }

    /// Kicks the device.
    pub fn kick_anyway(&mut self) {
        self.kicks += 1;
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Takes an answer if there is one. Panics when it is wrong: of nothing that was asked, with a
    /// length that cannot be, or when the device has written elsewhere.
    pub fn reap(&mut self, ram: &GuestRam) -> Option<Done> {
        let used = self.driver.pop_used()?;
        let pending = self.pending[usize::from(used.id)].take();
        let Pending { slot, request, mut before, writable } = pending.expect("it was asked");
        self.free.push(slot);
        let mut after = vec![0; before.len()];
        ram.read(self.slots[slot], &mut after);
        let mut data = Vec::with_capacity(request.room + 1);
        for (at, len) in &writable {
            data.extend(&after[*at..at + len]);
            before[*at..at + len].copy_from_slice(&after[*at..at + len]);
        }
        let kind = request.kind;
        assert!(before == after, "{kind:?}: the device wrote beside the buffers that it was given");
        let room = data.len();
        let status = data.pop().expect("a status");
        let len = usize::try_from(used.len).expect("64 bits");
        assert!(len <= room, "{kind:?}: {len} bytes written, there was room for {room}");
        if status == 0 && kind != super::Kind::GetId {
            assert_eq!(len, room, "{kind:?}: bytes written");
        }
        Some(Done { id: used.id, request, status, data })
    }

    /// Waits for an answer until `limit` is over.
    pub fn wait_for(&mut self, ram: &GuestRam, limit: Duration) -> Option<Done> {
        let end = Instant::now() + limit;
        loop {
            if let Some(done) = self.reap(ram) {
                return Some(done);
            }
            if self.driver.enable_calls() {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let mut fds = [PollFd::from_borrowed_fd(self.call.as_fd(), PollFlags::IN)];
            let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
            self.calls += u64::from(rustix::io::read(&self.call, &mut [0; 8]).is_ok());
            self.driver.disable_calls();
        }
    }

    /// Waits for an answer.
    pub fn wait(&mut self, ram: &GuestRam) -> Done {
        self.wait_for(ram, patient(TIMEOUT)).unwrap_or_else(|| panic!("{}", self.state()))
    }

    /// What is known of requests that are not answered, for a message.
    fn state(&self) -> String {
        let areas = self.driver.areas();
        let words = |area: &ringdisk_guest::RingMemory| -> Vec<String> {
            let word = |at| area.load_u16(at * 2, Ordering::Relaxed);
            (0..area.len() / 2).map(|at| format!("{:x}", word(at))).collect()
        };
        let (descriptors, driver, device) =
            (words(&areas.descriptors), words(&areas.driver), words(&areas.device));
        let descriptors: Vec<String> =
            descriptors.chunks(8).map(|d| format!("{}{}:{}:{}", d[5], d[4], d[6], d[7])).collect();
        format!(
            "{} requests are not answered: {:?}; lengths and flags {descriptors:?}, \
             driver {driver:?}, device {device:?}",
            self.in_flight(),
            self.driver,
        )
    }

    /// Does one request.
    pub fn run(&mut self, ram: &GuestRam, request: Request) -> Done {
        assert_eq!(self.in_flight(), 0, "it would be another's answer");
        self.add(ram, request).expect("an empty queue has room");
        self.kick();
        self.wait(ram)
    }
}
