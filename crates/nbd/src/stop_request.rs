//! How an export is asked to end, or to go to another process.
//!
//! Promises: the first reason counts, but an export that another process has is not ended, whatever
//! was asked for meanwhile; asking for an end returns at once; after it no hand-over
//! begins. Control path.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ringdisk_export::{Error, HandOverRequest, HandOverState, HandedOver, ask_hand_over};

/// A successor wants the export.
pub(crate) type Request = HandOverRequest<HandOverState>;

/// What an export is asked for.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    asked: Mutex<Asked>,
    changed: Condvar,
    /// An end was asked for, also after the export had gone to another process.
    is_stopped: AtomicBool,
}

#[derive(Debug, Default)]
struct Asked {
    why: Option<Why>,
    hand_over: Option<Request>,
}

/// What the control thread does next.
#[derive(Debug)]
pub(crate) enum Next {
    End(Why),
    HandOver(Request),
}

/// See [`Ending`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Stopped,
    Panicked,
    /// Another process has it.
    Moved,
}

impl Ending {
    fn lock(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, why: Why) {
        let mut asked = self.lock();
        asked.why.get_or_insert(why);
        // The thread that waits for it hears that the export ends.
        asked.hand_over = None;
        self.changed.notify_all();
    }

    fn hand_over(&self, request: Request) {
        let mut asked = self.lock();
        if asked.why.is_none() {
            asked.hand_over = Some(request);
            self.changed.notify_all();
        }
    }

    pub(crate) fn wait(&self) -> Next {
        let mut asked = self.lock();
        loop {
            if let Some(why) = asked.why {
                return Next::End(why);
            }
            if let Some(request) = asked.hand_over.take() {
                return Next::HandOver(request);
            }
            asked = self.changed.wait(asked).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Why the export ends, or has ended.
    pub(crate) fn reason(&self) -> Option<Why> {
        self.lock().why
    }

    /// Whether it ends, or has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.reason().is_some()
    }

    /// A queue thread has panicked.
    pub(crate) fn panicked(&self) {
        self.set(Why::Panicked);
    }

    /// The export is not used any more.
    pub(crate) fn stopped(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.set(Why::Stopped);
    }

    /// Another process has the export. A stop that came in the middle of that is that one's to
    /// carry out ([`StopHandle::is_stopped`]): the sockets of clients are its own by now.
    pub(crate) fn moved(&self) {
        self.lock().why = Some(Why::Moved);
        self.set(Why::Moved);
    }
}

/// Gives an export to another process, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct HandOverHandle(Arc<Ending>);

impl HandOverHandle {
    pub(crate) fn new(ending: &Arc<Ending>) -> HandOverHandle {
        HandOverHandle(Arc::clone(ending))
    }

    /// Lets the export stand still and packs it: disks, listening sockets, and connections between
    /// two messages. It goes on when the second value is dropped, and ends when that is committed.
    /// Handshakes and encrypted connections end then, too.
    ///
    /// Errors: a disk cannot be handed over, or requests in flight do not end: it goes on.
    pub fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error> {
        ask_hand_over(|request| self.0.hand_over(request))
    }
}

/// Asks an export for a clean stop, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<Ending>);

impl StopHandle {
    pub(crate) fn new(ending: &Arc<Ending>) -> StopHandle {
        StopHandle(Arc::clone(ending))
    }

    /// Asks for a clean stop; returns at once.
    pub fn stop(&self) {
        self.0.stopped();
    }

    /// Whether another process has the export: it has not ended.
    #[must_use]
    pub fn has_moved(&self) -> bool {
        self.0.lock().why == Some(Why::Moved)
    }

    /// Whether one was asked for.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::Acquire)
    }
}
