//! What other threads ask of the control thread of an export.
//!
//! Promises: asking never waits. Any thread asks; the control thread looks after each wake-up.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_disk::Change;
use ringdisk_export::{HandOverRequest, HandOverState};
use rustix::event::{EventfdFlags, eventfd};

use crate::{Error, ErrorKind};

/// Flags and the eventfd that says that one was set. Any thread.
#[derive(Debug)]
pub(crate) struct Signals {
    event: OwnedFd,
    stop: AtomicBool,
    /// Front ends wait.
    held: AtomicBool,
    /// Front ends were let in; the process may have been confined before.
    released: AtomicBool,
    panicked: AtomicBool,
    changed: AtomicBool,
    /// A change of the disk waits for what is in the host kernel.
    recall: AtomicBool,
    /// A change of the disk is over.
    reconsider: AtomicBool,
    requests: Mutex<Requests>,
}

/// What other processes want.
#[derive(Debug, Default)]
struct Requests {
    waiting: VecDeque<Request>,
    /// Acceleration is to be on or off; the answer.
    switches: VecDeque<Switch>,
    /// The control thread looks at them no more.
    ended: bool,
}

/// A request to hand an export over.
pub(crate) type Request = HandOverRequest<HandOverState>;

/// A request to switch acceleration.
#[derive(Debug)]
pub(crate) struct Switch {
    pub(crate) on: bool,
    /// Whether the kernel serves now. Errors: why it stays as it is.
    pub(crate) answer: SyncSender<Result<bool, String>>,
}

/// The control thread while it answers requests; when it ends, also by a panic, no thread waits
/// for it.
#[derive(Debug)]
pub(crate) struct Attended(Arc<Signals>);

impl Drop for Attended {
    fn drop(&mut self) {
        self.0.refuse_requests();
    }
}

impl Signals {
    /// * `held`: nothing is served before [`Signals::release`].
    ///
    /// Errors: no descriptor is left.
    pub(crate) fn new(held: bool) -> Result<Signals, Error> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
                Error::new(ErrorKind::System, "no eventfd for the export").errno(errno)
            })?;
        Ok(Signals {
            event,
            stop: AtomicBool::new(false),
            held: AtomicBool::new(held),
            released: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            recall: AtomicBool::new(false),
            reconsider: AtomicBool::new(false),
            requests: Mutex::default(),
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

    /// Front ends are taken from now on.
    pub(crate) fn release(&self) {
        self.held.store(false, Ordering::Release);
        self.released.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_released(&self) -> bool {
        self.released.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
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

    /// A change of the disk has come, or is over.
    pub(crate) fn disk_changes(&self, change: Change) {
        match change {
            Change::Coming => self.recall.store(true, Ordering::Release),
            Change::Over => self.reconsider.store(true, Ordering::Release),
        }
        self.wake();
    }

    pub(crate) fn take_recall(&self) -> bool {
        self.recall.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn take_reconsider(&self) -> bool {
        self.reconsider.swap(false, Ordering::AcqRel)
    }

    /// Asks for acceleration on or off. When the control thread will not answer, the request is
    /// dropped at once.
    pub(crate) fn switch(&self, switch: Switch) {
        let mut requests = self.requests();
        if !requests.ended {
            requests.switches.push_back(switch);
            self.wake();
        }
    }

    pub(crate) fn take_switch(&self) -> Option<Switch> {
        self.requests().switches.pop_front()
    }

    /// Another process wants the export. When the control thread will not answer, the request is
    /// dropped at once.
    pub(crate) fn request(&self, request: Request) {
        let mut requests = self.requests();
        if !requests.ended {
            requests.waiting.push_back(request);
            self.wake();
        }
    }

    pub(crate) fn take_request(&self) -> Option<Request> {
        self.requests().waiting.pop_front()
    }

    /// For the control thread to hold as long as it answers requests.
    pub(crate) fn attended(self: &Arc<Signals>) -> Attended {
        Attended(Arc::clone(self))
    }

    /// No request is answered, neither those that wait nor those that come.
    fn refuse_requests(&self) {
        let refused = {
            let mut requests = self.requests();
            requests.ended = true;
            (std::mem::take(&mut requests.waiting), std::mem::take(&mut requests.switches))
        };
        drop(refused);
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
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
