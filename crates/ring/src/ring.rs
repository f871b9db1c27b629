//! The handle of a ring: operations, tasks and messages of its thread.
//!
//! Promises: memory that the kernel may still touch stays in the slot of its operation until the
//! completion; a full submission queue is submitted early, never an error.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use io_uring::{opcode, squeue, types};

use crate::counters::Counters;
use crate::slots::{Completed, Keep, Slots, VECTOR_MAX, Waiter};
use crate::uring::{Completion, Uring};
use crate::{Errno, IoBuf, Source};

/// Builds an entry for a raw or a registered descriptor.
macro_rules! on_fd {
    ($fd:expr, |$target:ident| $build:expr) => {
        match $fd {
            Fd::Raw(fd) => {
                let $target = types::Fd(fd);
                $build
            }
            Fd::Fixed(index) => {
                let $target = types::Fixed(index);
                $build
            }
        }
    };
}

mod client_pages;
mod command;
mod control;
mod events;
mod executor;
mod memory;
mod op;
mod registered;
mod remote;
mod scattered;

pub use command::RawCommand;
pub use events::Readiness;
pub(crate) use executor::ROOT;
pub use op::{Fd, Op, Sleep};
pub use remote::Remote;

use client_pages::Pipes;
use executor::Executor;
use op::{State, Way, What};
use remote::Shared;

/// Marks the user data of a poll linked before an operation; alone: a cancellation.
pub(crate) const TAG_IGNORE: u64 = 1 << 63;
/// User data of the poll on the eventfd of [`Shared`].
pub(crate) const TAG_EVENT: u64 = (1 << 62) | 1;
/// User data of a message from another ring; its result is the message.
pub(crate) const TAG_MESSAGE: u64 = (1 << 62) | 2;

/// `POLLIN` (poll(2)), which is also `EPOLLIN`: the descriptor is readable.
pub const POLL_IN: u32 = libc::POLLIN as u32;
/// `EPOLLEXCLUSIVE`: of all exclusive waiters the kernel wakes one
/// (include/uapi/linux/eventpoll.h).
const POLL_EXCLUSIVE: u32 = 1 << 28;

/// Messages that may wait before their queue grows.
const MESSAGE_ROOM: usize = 64;

pub(crate) struct Inner {
    pub(crate) uring: Uring,
    pub(crate) slots: RefCell<Slots>,
    /// Vectors and times that the kernel reads while an operation is in flight, one a slot.
    vectors: Box<[UnsafeCell<[libc::iovec; VECTOR_MAX]>]>,
    times: Box<[UnsafeCell<types::Timespec>]>,
    /// Tasks that wait for a slot.
    slot_waiters: RefCell<VecDeque<Waiter>>,
    /// Until this round of the executor ([`Executor::rounds`]) only tasks that waited for a slot
    /// may take one; others wait. Otherwise a task that starts another operation as soon as one has
    /// ended, and takes the free slot at once, starves all waiting tasks.
    slots_reserved_until: Cell<u64>,
    pub(crate) executor: Executor,
    pub(crate) counters: Arc<Counters>,
    pub(crate) shared: Arc<Shared>,
    /// Operations queued since the last enter that complete while they are submitted.
    pub(crate) inline_expected: Cell<u32>,
    messages: RefCell<VecDeque<u32>>,
    message_waiter: RefCell<Waiter>,
    files: RefCell<Vec<u32>>,
    registered_buffers: RefCell<Vec<IoBuf>>,
    /// Pipes that move bytes to and from pages of clients.
    pub(crate) pipes: Pipes,
    pub(crate) event_armed: Cell<bool>,
    /// Longest poll before a sleep, when it was changed since the loop looked.
    pub(crate) polling: Cell<Option<Duration>>,
    /// No polling for the moment.
    pub(crate) polling_held: Cell<bool>,
    /// Requests that the thread has taken and not answered, where its export counts them.
    pub(crate) requests: Cell<u32>,
    /// A completion that is not inline is sure to come ([`Ring::wait_past_inline`]).
    pub(crate) past_inline: Cell<bool>,
    /// Offloaded work runs on the ring's own thread.
    pub(crate) offloads_here: Cell<bool>,
    /// Work that comes through shared memory.
    pub(crate) source: RefCell<Option<Rc<dyn Source>>>,
}

/// Handle of a ring; cheap to clone, bound to its thread.
#[derive(Clone)]
pub struct Ring(pub(crate) Rc<Inner>);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({} in flight)", self.0.slots.borrow().in_flight())
    }
}

/// The time given to a future ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout;

/// A table of zeroes: pages come from the system when they are touched.
///
/// # Safety
///
/// A `T` of zeroes is valid.
unsafe fn zeroed<T>(count: usize) -> Box<[T]> {
    let table = Box::new_zeroed_slice(count);
    // SAFETY: as the caller promises.
    unsafe { table.assume_init() }
}

impl Inner {
    pub(crate) fn new(config: &crate::Config) -> Result<Inner, crate::SetupError> {
        let shared =
            Arc::new(Shared::new().map_err(|e| crate::SetupError::from(std::io::Error::from(e)))?);
        Shared::reserve_local();
        let uring = Uring::new(config)?;
        let slots = config.slots.max(8);
        Ok(Inner {
            uring,
            slots: RefCell::new(Slots::new(slots)),
            // SAFETY: zeroes are vectors of null pointers and lengths of 0.
            vectors: unsafe { zeroed(slots as usize) },
            // SAFETY: zeroes are times of no length.
            times: unsafe { zeroed(slots as usize) },
            slot_waiters: RefCell::new(VecDeque::with_capacity(slots as usize)),
            slots_reserved_until: Cell::new(0),
            executor: Executor::new(Arc::clone(&shared)),
            counters: Arc::new(Counters::default()),
            shared,
            inline_expected: Cell::new(0),
            messages: RefCell::new(VecDeque::with_capacity(MESSAGE_ROOM)),
            message_waiter: RefCell::new(Waiter::None),
            files: RefCell::new((0..config.files).rev().collect()),
            registered_buffers: RefCell::new(Vec::new()),
            pipes: Pipes::default(),
            event_armed: Cell::new(false),
            polling: Cell::new(None),
            polling_held: Cell::new(false),
            requests: Cell::new(0),
            past_inline: Cell::new(false),
            offloads_here: Cell::new(false),
            source: RefCell::default(),
        })
    }

    /// Takes a slot, or registers the polled future as waiting for one.
    ///
    /// * `has_waited`: for one operation, false at first.
    pub(crate) fn take_slot(
        &self,
        keep: Keep,
        cx: &Context<'_>,
        has_waited: &mut bool,
    ) -> Result<u32, Keep> {
        if !*has_waited && self.executor.rounds() < self.slots_reserved_until.get() {
            *has_waited = true;
            // By the waker, which wakes waiting tasks in the order of their requests.
            cx.waker().wake_by_ref();
            return Err(keep);
        }
        self.slots.borrow_mut().take(keep).inspect_err(|_| {
            *has_waited = true;
            self.counters.slots_full.add(1);
            self.slot_waiters.borrow_mut().push_back(self.executor.waiter(cx));
        })
    }

    pub(crate) fn poll_slot(&self, slot: u32, cx: &Context<'_>) -> Poll<i32> {
        let result = self.slots.borrow_mut().poll(slot, || self.executor.waiter(cx));
        match result {
            Some(result) => {
                self.wake_slot_waiters();
                Poll::Ready(result)
            }
            None => Poll::Pending,
        }
    }

    /// As [`Inner::poll_slot`], for an operation with several completions: the result, and whether
    /// it was the last.
    pub(crate) fn poll_stream(&self, slot: u32, cx: &Context<'_>) -> Poll<(i32, bool)> {
        if let Some(result) = self.slots.borrow_mut().take_event(slot) {
            return Poll::Ready((result, false));
        }
        self.poll_slot(slot, cx).map(|result| (result, true))
    }

    /// A slot is free: wakes all tasks that wait for one. Some of them may be gone, so waking one
    /// is not enough.
    fn wake_slot_waiters(&self) {
        if self.slot_waiters.borrow().is_empty() {
            return;
        }
        // They are polled in the next round; tasks that become ready until its end are polled in
        // the round after that.
        self.slots_reserved_until.set(self.executor.rounds() + 2);
        while let Some(waiter) = { self.slot_waiters.borrow_mut().pop_front() } {
            self.executor.wake(waiter);
        }
    }

    /// Makes room for `count` entries, with an early enter if need be.
    fn make_room(&self, count: usize) {
        if self.uring.has_room(count) {
            return;
        }
        self.counters.queue_full.add(1);
        // The kernel may take nothing for a moment (EBUSY, EAGAIN: no memory, completions
        // overflowed): an entry must not be lost.
        while !self.uring.has_room(count) {
            if let Err(error) = self.uring.enter(&self.counters, 0, None) {
                tracing::error!("io_uring_enter: {error}");
            }
            if !self.uring.has_room(count) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn push(&self, entry: squeue::Entry) {
        self.make_room(1);
        self.uring.push(entry);
    }

    pub(crate) fn submit(&self, slot: u32, what: &What, inline: bool) {
        let user_data = self.slots.borrow().user_data(slot);
        match what {
            What::Entry(entry) => self.push(entry.clone().user_data(user_data)),
            What::WhenReadable(fd, entry) => {
                self.make_room(2);
                let events = POLL_IN | POLL_EXCLUSIVE;
                let poll = on_fd!(*fd, |fd| opcode::PollAdd::new(fd, events).build());
                // A poll that succeeded posts nothing; one that failed posts its error and
                // silences the read behind it (kernel: REQ_F_SKIP_LINK_CQES).
                let flags = squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS;
                self.uring.push(poll.flags(flags).user_data(user_data | TAG_IGNORE));
                self.uring.push(entry.clone().user_data(user_data));
            }
            What::Cut(cut) => {
                let entry = self.cut_entry(slot, *cut);
                self.push(entry.user_data(user_data));
            }
            What::Timeout(duration) => {
                let time = self.times[slot as usize].get();
                // SAFETY: the slot is in flight and belongs to this operation alone, so no other
                // code reads or writes its time; the table lives as long as the ring.
                unsafe { *time = types::Timespec::from(*duration) };
                self.push(opcode::Timeout::new(time).build().user_data(user_data));
            }
        }
        if inline {
            self.inline_expected.set(self.inline_expected.get() + 1);
        }
    }

    /// The future of an operation was dropped.
    pub(crate) fn abandon_slot(&self, slot: u32) {
        let user_data = self.slots.borrow().user_data(slot);
        if self.slots.borrow_mut().abandon(slot) {
            self.counters.cancelled.add(1);
            self.cancel(user_data);
            // The owner may close the descriptor now and its number be used again: nothing of this
            // operation may wait in the queue for that.
            if let Err(error) = self.uring.enter(&self.counters, 0, None) {
                tracing::error!("io_uring_enter: {error}");
            }
        } else {
            self.wake_slot_waiters();
        }
    }

    /// Asks the kernel to end an operation, and the poll linked before it.
    pub(crate) fn cancel(&self, user_data: u64) {
        for target in [user_data | TAG_IGNORE, user_data] {
            let entry = opcode::AsyncCancel::new(target).build().user_data(TAG_IGNORE);
            self.push(entry.flags(squeue::Flags::SKIP_SUCCESS));
        }
    }

    /// Handles one completion.
    pub(crate) fn complete(&self, completion: Completion) {
        self.counters.cqes.add(1);
        match completion.user_data {
            TAG_EVENT => self.event_armed.set(false),
            TAG_MESSAGE => {
                self.messages.borrow_mut().push_back(completion.result.cast_unsigned());
                let waiter = self.message_waiter.replace(Waiter::None);
                self.executor.wake(waiter);
            }
            // A failed poll: the kernel then posts nothing for the read linked to it. A failed
            // cancellation has generation 0, which no slot has.
            user_data => {
                let target = user_data & !TAG_IGNORE;
                let done =
                    self.slots.borrow_mut().complete(target, completion.result, completion.more);
                match done {
                    Completed::Wake(waiter) => self.executor.wake(waiter),
                    Completed::Nobody => self.wake_slot_waiters(),
                }
            }
        }
    }

    /// Keeps a poll on the eventfd in the ring.
    pub(crate) fn arm_event(&self) {
        if !self.event_armed.replace(true) {
            let fd = types::Fd(self.shared.event().as_raw_fd());
            self.push(opcode::PollAdd::new(fd, POLL_IN).build().user_data(TAG_EVENT));
        }
    }
}

/// Length for the kernel. One operation moves less than 4 GiB by construction of its buffer.
fn len_u32(buf: &IoBuf) -> u32 {
    u32::try_from(buf.len()).unwrap_or(u32::MAX)
}

impl Ring {
    fn op(&self, entry: squeue::Entry, keep: Option<IoBuf>) -> Op {
        Op::new(self, What::Entry(entry), keep)
    }

    fn read_entry(fd: Fd, offset: u64, buf: &IoBuf) -> squeue::Entry {
        let (start, len) = (buf.as_mut_ptr(), len_u32(buf));
        match buf.fixed() {
            None => on_fd!(fd, |fd| opcode::Read::new(fd, start, len).offset(offset).build()),
            Some(slot) => on_fd!(fd, |fd| {
                opcode::ReadFixed::new(fd, start, len, slot).offset(offset).build()
            }),
        }
    }

    /// Reads at byte `offset` into `buf`; a registered buffer is named by its slot. Result: bytes
    /// read, short at the end of the file, and for a scattered buffer of more than 1024 pieces.
    /// Errors: also `EFAULT` for a registered buffer that this ring does not know.
    pub fn read(&self, fd: Fd, offset: u64, buf: &IoBuf) -> Op {
        if buf.is_scattered() {
            return self.move_pieces(fd, offset, buf, Way::Read);
        }
        self.count_fixed(buf);
        self.op(Self::read_entry(fd, offset, buf), Some(buf.clone()))
    }

    /// Writes `buf` at byte `offset`, as [`Ring::read`] reads. Result: bytes written, may be short.
    pub fn write(&self, fd: Fd, offset: u64, buf: &IoBuf) -> Op {
        if buf.is_scattered() {
            return self.move_pieces(fd, offset, buf, Way::Write);
        }
        let (start, len) = (buf.as_mut_ptr(), len_u32(buf));
        let entry = match buf.fixed() {
            None => on_fd!(fd, |fd| opcode::Write::new(fd, start, len).offset(offset).build()),
            Some(slot) => on_fd!(fd, |fd| {
                opcode::WriteFixed::new(fd, start, len, slot).offset(offset).build()
            }),
        };
        self.count_fixed(buf);
        self.op(entry, Some(buf.clone()))
    }

    fn count_fixed(&self, buf: &IoBuf) {
        if buf.fixed().is_some() {
            self.0.counters.fixed.add(1);
        }
    }

    /// Waits until the descriptor is readable, as an exclusive waiter (of several, the kernel
    /// wakes one), then reads into `buf`: one completion and one system call for both.
    ///
    /// Errors: `EAGAIN` or a long wait when another reader took the data in between. For a
    /// descriptor in non-blocking mode that is read by several threads, as /dev/fuse. Panics for a
    /// scattered buffer.
    pub fn read_when_readable(&self, fd: Fd, buf: &IoBuf) -> Op {
        assert!(!buf.is_scattered(), "a read after a poll goes to one place");
        let entry = Self::read_entry(fd, 0, buf);
        Op::new(self, What::WhenReadable(fd, entry), Some(buf.clone()))
    }

    /// Waits for a slot.
    async fn slot(&self, keep: impl Fn() -> Keep) -> u32 {
        let mut has_waited = false;
        poll_fn(|cx| match self.0.take_slot(keep(), cx, &mut has_waited) {
            Ok(slot) => Poll::Ready(slot),
            Err(_) => Poll::Pending,
        })
        .await
    }

    /// Takes a slot and fills it, then awaits the completion of what `entry` builds from the
    /// slot's vector.
    async fn vectored(
        &self,
        bufs: &[IoBuf],
        entry: impl Fn(*const libc::iovec, u32) -> squeue::Entry,
    ) -> Result<u32, Errno> {
        if bufs.len() > VECTOR_MAX || bufs.iter().any(|buf| !buf.is_contiguous()) {
            return Err(Errno::INVAL);
        }
        let inner = &self.0;
        let slot = self.slot(|| Keep::Pieces).await;
        inner.slots.borrow_mut().keep_pieces(slot, bufs);
        let vector = inner.vectors[slot as usize].get();
        for (at, buf) in bufs.iter().enumerate() {
            // SAFETY: the slot belongs to this operation alone, `at < VECTOR_MAX` was checked, and
            // the table lives as long as the ring.
            unsafe {
                (*vector)[at] =
                    libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
            }
        }
        let count = u32::try_from(bufs.len()).unwrap_or(0);
        inner.submit(slot, &What::Entry(entry(vector.cast(), count)), false);
        Op { ring: self.clone(), state: State::InFlight(slot), inline: false }.await
    }

    /// Reads into up to 8 pieces. Errors: `EINVAL` for more, and for a scattered buffer or client
    /// pages.
    pub async fn readv(&self, fd: Fd, offset: u64, bufs: &[IoBuf]) -> Result<u32, Errno> {
        self.vectored(bufs, |vector, count| {
            on_fd!(fd, |fd| opcode::Readv::new(fd, vector, count).offset(offset).build())
        })
        .await
    }

    /// Writes up to 8 pieces. Errors: as [`Ring::readv`].
    pub async fn writev(&self, fd: Fd, offset: u64, bufs: &[IoBuf]) -> Result<u32, Errno> {
        self.vectored(bufs, |vector, count| {
            on_fd!(fd, |fd| opcode::Writev::new(fd, vector, count).offset(offset).build())
        })
        .await
    }

    /// Makes the file's data (and with `data_only` false its metadata) durable.
    pub fn fsync(&self, fd: Fd, data_only: bool) -> Op {
        let flags =
            if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
        self.op(on_fd!(fd, |fd| opcode::Fsync::new(fd).flags(flags).build()), None)
    }

    /// fallocate(2) with `mode`.
    pub fn fallocate(&self, fd: Fd, mode: i32, offset: u64, len: u64) -> Op {
        let entry =
            on_fd!(fd, |fd| opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build());
        self.op(entry, None)
    }

    /// ftruncate(2). Errors: `EINVAL` also when the kernel is older than 6.9.
    pub fn ftruncate(&self, fd: Fd, len: u64) -> Op {
        self.op(on_fd!(fd, |fd| opcode::Ftruncate::new(fd, len).build()), None)
    }

    /// Waits for poll(2) events; the result is the set that occurred.
    pub fn poll(&self, fd: Fd, events: u32) -> Op {
        self.op(on_fd!(fd, |fd| opcode::PollAdd::new(fd, events).build()), None)
    }

    /// Waits.
    pub fn sleep(&self, duration: Duration) -> Sleep {
        Sleep(Op::new(self, What::Timeout(duration), None))
    }

    /// Awaits `future` for at most `limit`; then drops it. Costs a timer for each call: for
    /// control paths.
    pub async fn within<F: Future>(
        &self,
        limit: Duration,
        future: F,
    ) -> Result<F::Output, Timeout> {
        let mut future = std::pin::pin!(future);
        let mut sleep = std::pin::pin!(self.sleep(limit));
        poll_fn(|cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(output));
            }
            sleep.as_mut().poll(cx).map(|()| Err(Timeout))
        })
        .await
    }

    /// Asks the kernel to end the operation named by [`Op::id`]; it then completes with
    /// `ECANCELED`, or with its result when that came first.
    pub fn cancel(&self, id: u64) {
        self.0.cancel(id);
    }

    /// Sends `message` to the ring whose descriptor is `ring_fd` (see [`Ring::raw_fd`]); there
    /// [`Ring::receive`] yields it.
    pub fn send_message(&self, ring_fd: RawFd, message: u32) -> Op {
        let entry =
            opcode::MsgRingData::new(types::Fd(ring_fd), message.cast_signed(), TAG_MESSAGE, None)
                .build();
        self.op(entry, None)
    }

    /// The next message from another ring. One task of a ring may wait for messages.
    pub fn receive(&self) -> impl Future<Output = u32> + '_ {
        poll_fn(|cx| match self.0.messages.borrow_mut().pop_front() {
            Some(message) => Poll::Ready(message),
            None => {
                *self.0.message_waiter.borrow_mut() = self.0.executor.waiter(cx);
                Poll::Pending
            }
        })
    }
}
