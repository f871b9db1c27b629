//! Operations as futures.
//!
//! Promises: an operation is submitted when it is first polled. Dropping it asks the kernel to
//! cancel, and keeps its slot, with the memory that the kernel may still touch, until the
//! completion.

use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use io_uring::squeue;

use crate::slots::Keep;
use crate::{Errno, IoBuf, Ring};

/// A descriptor, or a place in the ring's table of registered files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fd {
    /// A descriptor of this process. Its owner keeps it open until its operations are done.
    Raw(RawFd),
    /// A registered file (see [`Ring::register_file`]).
    Fixed(u32),
}

impl Fd {
    /// The descriptor of `fd`, which the caller keeps open until its operations are done.
    pub fn of(fd: &impl AsFd) -> Fd {
        Fd::Raw(fd.as_fd().as_raw_fd())
    }
}

/// Direction of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// An operation on a scattered buffer whose ends lie inside pieces: its array is made in the slot.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    pub(super) fd: Fd,
    pub(super) offset: u64,
    pub(super) way: Way,
}

/// What to submit.
#[derive(Clone)]
pub(crate) enum What {
    /// One entry.
    Entry(squeue::Entry),
    /// A poll of the descriptor, as an exclusive waiter, then, linked to it, the entry.
    WhenReadable(Fd, squeue::Entry),
    /// A scattered buffer without an array that would do.
    Cut(Cut),
    /// A timer.
    Timeout(Duration),
}

#[allow(clippy::large_enum_variant)] // The large variant is the one that lives long.
pub(crate) enum State {
    /// Not submitted yet.
    New {
        what: What,
        keep: Option<IoBuf>,
        /// For a slot.
        has_waited: bool,
    },
    InFlight(u32),
    Done,
}

/// One operation: a future of the completion's result (bytes or 0), or its errno.
///
/// Errors: whatever the kernel reports, `ECANCELED` after a cancellation, `EINTR` as it comes.
#[must_use = "an operation does nothing until it is awaited"]
pub struct Op {
    pub(crate) ring: Ring,
    pub(crate) state: State,
    pub(crate) inline: bool,
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.state {
            State::New { .. } => "Op(new)",
            State::InFlight(_) => "Op(in flight)",
            State::Done => "Op(done)",
        })
    }
}

impl Op {
    pub(crate) fn new(ring: &Ring, what: What, keep: Option<IoBuf>) -> Op {
        Op {
            ring: ring.clone(),
            state: State::New { what, keep, has_waited: false },
            inline: false,
        }
    }

    /// Declares that the kernel completes this operation while it is submitted, so that the thread
    /// may sleep until one more completion arrives; see [`Ring::wait_past_inline`].
    pub fn completes_inline(mut self) -> Op {
        self.inline = true;
        self
    }

    /// The name of this operation for [`Ring::cancel`]; `None` unless it is in flight.
    pub fn id(&self) -> Option<u64> {
        match self.state {
            State::InFlight(slot) => Some(self.ring.0.slots.borrow().user_data(slot)),
            _ => None,
        }
    }
}

impl Future for Op {
    type Output = Result<u32, Errno>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let inner = &this.ring.0;
        match &mut this.state {
            State::InFlight(slot) => {
                let slot = *slot;
                let result = ready!(inner.poll_slot(slot, cx));
                this.state = State::Done;
                Poll::Ready(to_result(result))
            }
            State::New { what, keep, has_waited } => {
                let kept = keep.take().map_or(Keep::Nothing, Keep::Buffer);
                let slot = match inner.take_slot(kept, cx, has_waited) {
                    Ok(slot) => slot,
                    Err(Keep::Buffer(buffer)) => {
                        *keep = Some(buffer);
                        return Poll::Pending;
                    }
                    Err(_) => return Poll::Pending,
                };
                inner.submit(slot, what, this.inline);
                this.state = State::InFlight(slot);
                // Sets the waiter; the result cannot be there before the next enter.
                let _ = inner.poll_slot(slot, cx);
                Poll::Pending
            }
            State::Done => Poll::Ready(Err(Errno::CANCELED)),
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if let State::InFlight(slot) = self.state {
            self.ring.0.abandon_slot(slot);
        }
    }
}

/// A completion's result as a `Result`.
pub(crate) fn to_result(result: i32) -> Result<u32, Errno> {
    u32::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
}

/// A future that is ready after some time. Made by [`Ring::sleep`].
#[must_use = "a timer does nothing until it is awaited"]
#[derive(Debug)]
pub struct Sleep(pub(crate) Op);

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // The result is ETIME, or ECANCELED at the end of the ring: both end the sleep.
        Pin::new(&mut self.0).poll(cx).map(|_| ())
    }
}
