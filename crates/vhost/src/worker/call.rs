//! Waking a guest: the eventfd of a virtqueue's call.
//!
//! Promises: queue thread; one write for each signal. A guest whose counter is full was called
//! already and is not called again. A write that waits is found by another thread
//! ([`Watch::look`]); its eventfd is let go then, with a message in the log.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;

use super::watch::Watch;
use crate::device::{Complaint, Device};

/// The call of one virtqueue.
#[derive(Debug)]
pub(crate) struct Call {
    fd: RefCell<Option<Event>>,
    watch: Arc<Watch>,
    device: Arc<Device>,
}

#[derive(Debug)]
struct Event {
    fd: OwnedFd,
    /// A write to it waits while its counter is full. The flag is the front end's, which may read
    /// the same eventfd: it stays as it is.
    ///
    /// No write to an eventfd is sure not to wait (tried on Linux 6.18): it cannot be opened a
    /// second time with a flag of our own (`/proc/self/fd/N`: ENXIO), and `pwritev2` does not take
    /// RWF_NOWAIT for it (EOPNOTSUPP). A write by the ring would wait on a helper thread of the
    /// kernel, which is not worth an operation for each call. So the flag is read once, and if it
    /// says that a write may wait, the counter is asked before each write.
    ///
    /// That is for front ends that mean well. One that means harm can clear the flag later, or fill
    /// the counter between the question and the write: then the write waits, and with it all
    /// virtqueues of the thread, until another thread asks something of this one ([`Watch::look`]).
    /// The eventfd is let go then.
    may_block: bool,
}

impl Event {
    /// Whether a write would wait now.
    fn is_full(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 0)
    }
}

impl Call {
    /// No eventfd yet.
    pub(super) fn new(watch: &Arc<Watch>, device: &Arc<Device>) -> Call {
        let (watch, device) = (Arc::clone(watch), Arc::clone(device));
        Call { fd: RefCell::default(), watch, device }
    }

    /// Another eventfd, or none: the driver polls.
    pub(crate) fn set(&self, fd: Option<OwnedFd>) {
        *self.fd.borrow_mut() = fd.map(|fd| {
            let may_block = !fcntl_getfl(&fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
            Event { fd, may_block }
        });
    }

    /// Wakes the guest. Returns whether there is a guest to wake.
    pub(crate) fn signal(&self) -> bool {
        let written = match self.fd.borrow().as_ref() {
            None => return false,
            // A full counter (EAGAIN below) means that the guest was called and has not looked yet.
            Some(event) if event.may_block && event.is_full() => return true,
            Some(event) => self.watch.call(|| rustix::io::write(&event.fd, &1u64.to_ne_bytes())),
        };
        if written == Err(Errno::INTR) {
            // It waited. The next write would wait again.
            *self.fd.borrow_mut() = None;
            self.device.complain(
                Complaint::Call,
                format_args!(
                    "a call of a virtqueue waited for ever; that virtqueue calls nobody any more"
                ),
            );
            return false;
        }
        true
    }
}
