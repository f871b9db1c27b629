//! Wake-ups between processes: signals by eventfd, and events of descriptors.
//!
//! Promises: a signal takes no slot and nothing waits for it; one watched descriptor takes one
//! slot.

use std::future::poll_fn;
use std::task::Poll;

use io_uring::{opcode, squeue, types};

use super::op::{Fd, to_result};
use super::{Ring, TAG_IGNORE};
use crate::Errno;
use crate::slots::Keep;

/// What a signal writes.
static ONE: u64 = 1;

impl Ring {
    /// Adds 1 to an eventfd with the next enter. Nothing waits for it and no slot is used: it costs
    /// an entry, and no completion unless it fails, which is ignored.
    ///
    /// * `fd`: stays open until the task has waited for something. For one in non-blocking mode the
    ///   enter does it. One in blocking mode is left to a worker thread of the kernel, which costs
    ///   tens of µs: better write(2), where its counter is known not to be full.
    pub fn signal(&self, fd: Fd) {
        let (start, len) = ((&raw const ONE).cast::<u8>(), 8);
        let entry = on_fd!(fd, |fd| opcode::Write::new(fd, start, len).build());
        let entry = entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(TAG_IGNORE);
        self.0.push(entry);
    }

    /// Watches a descriptor: [`Readiness::next`] gives its poll(2) events as they come, without an
    /// operation for each.
    ///
    /// * `fd`: its owner keeps it open for as long as it is watched.
    pub fn poll_multishot(&self, fd: Fd, events: u32) -> Readiness {
        Readiness { ring: self.clone(), fd, events, slot: None }
    }
}

/// Events of a descriptor ([`Ring::poll_multishot`]). Dropping it ends the watch.
#[derive(Debug)]
pub struct Readiness {
    ring: Ring,
    fd: Fd,
    events: u32,
    /// Of the operation, while the kernel has it.
    slot: Option<u32>,
}

impl Readiness {
    /// Waits for events and returns them; those of several wake-ups since the last call together.
    /// A descriptor that is ready at the first call counts as an event; later only changes do,
    /// whether or not the descriptor is read.
    ///
    /// Errors: the kernel's; the next call tries again.
    pub async fn next(&mut self) -> Result<u32, Errno> {
        let mut has_waited = false;
        poll_fn(|cx| {
            let inner = &self.ring.0;
            if let Some(slot) = self.slot {
                let (result, is_over) = match inner.poll_stream(slot, cx) {
                    Poll::Ready(next) => next,
                    Poll::Pending => return Poll::Pending,
                };
                if is_over {
                    self.slot = None;
                }
                return Poll::Ready(to_result(result));
            }
            let taken = inner.take_slot(Keep::Nothing, cx, &mut has_waited);
            let Ok(slot) = taken else { return Poll::Pending };
            let events = self.events;
            let entry = on_fd!(self.fd, |fd| opcode::PollAdd::new(fd, events).multi(true).build());
            inner.push(entry.user_data(inner.slots.borrow().user_data(slot)));
            self.slot = Some(slot);
            // Sets the waiter; nothing can be there before the next enter.
            let _ = inner.poll_stream(slot, cx);
            Poll::Pending
        })
        .await
    }
}

impl Drop for Readiness {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.ring.0.abandon_slot(slot);
        }
    }
}

#[cfg(test)]
mod tests;
