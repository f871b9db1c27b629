//! What other threads tell the control thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::{Error, ErrorKind};

/// Flags and the eventfd that says that one was set. Any thread.
#[derive(Debug)]
pub(crate) struct Signals {
    event: OwnedFd,
    stop: AtomicBool,
    panicked: AtomicBool,
    changed: AtomicBool,
}

impl Signals {
    /// Errors: no descriptor is left.
    pub(crate) fn new() -> Result<Signals, Error> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
                Error::new(ErrorKind::System, "no eventfd for the export").errno(errno)
            })?;
        Ok(Signals {
            event,
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            changed: AtomicBool::new(false),
        })
    }

    /// Makes the control thread look.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// The export shall end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// A queue thread ended by a defect.
    pub(crate) fn panicked(&self) {
        self.panicked.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::Acquire)
    }

    /// The configuration space is another one.
    pub(crate) fn changed(&self) {
        self.changed.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }

    /// Empties the eventfd; flags are looked at after that.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
