//! Waking a guest: the eventfd of a virtqueue's call.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};

/// The call of one virtqueue.
#[derive(Debug, Default)]
pub(crate) struct Call {
    fd: RefCell<Option<Event>>,
}

#[derive(Debug)]
struct Event {
    fd: OwnedFd,
    /// A write to it waits while its counter is full. The flag is the front end's, which may read the same eventfd: it stays as it is.
    ///
    /// No write to such an eventfd is sure not to wait (tried on Linux 6.18): it cannot be opened a second time with a flag of our own
    /// (`/proc/self/fd/N`: ENXIO), and `pwritev2` does not take RWF_NOWAIT for it (EOPNOTSUPP). A write by the ring would wait on a
    /// helper thread of the kernel, which is not worth an operation for each call. So it is asked before.
    may_block: bool,
}

impl Event {
    /// Whether a write would wait now. Only a front end that means harm can make it wait all the same, between this and the write, and
    /// stops nothing but its own virtqueue by that.
    fn is_full(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 0)
    }
}

impl Call {
    /// Another eventfd, or none: the driver polls.
    pub(crate) fn set(&self, fd: Option<OwnedFd>) {
        *self.fd.borrow_mut() = fd.map(|fd| {
            let may_block = !fcntl_getfl(&fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
            Event { fd, may_block }
        });
    }

    /// Wakes the guest. Returns whether there is somebody to wake.
    pub(crate) fn signal(&self) -> bool {
        let event = self.fd.borrow();
        let Some(event) = event.as_ref() else { return false };
        // A full counter (EAGAIN) means that the guest was called and has not looked yet.
        if !(event.may_block && event.is_full()) {
            let _ = rustix::io::write(&event.fd, &1u64.to_ne_bytes());
        }
        true
    }
}
