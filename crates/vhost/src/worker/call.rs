//! Waking a guest: the eventfd of a virtqueue's call.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

/// The call of one virtqueue.
#[derive(Debug, Default)]
pub(crate) struct Call {
    fd: RefCell<Option<OwnedFd>>,
}

impl Call {
    /// Another eventfd, or none: the driver polls.
    pub(crate) fn set(&self, fd: Option<OwnedFd>) {
        *self.fd.borrow_mut() = fd;
    }

    /// Wakes the guest. Returns whether there is somebody to wake.
    pub(crate) fn signal(&self) -> bool {
        let fd = self.fd.borrow();
        let Some(fd) = fd.as_ref() else { return false };
        // A full counter (EAGAIN) means that the guest was called and has not looked yet.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        true
    }
}
