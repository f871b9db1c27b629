//! How an export is asked to end.
//!
//! Promises: the first reason counts; asking returns at once. Control path.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Why an export ends.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    why: Mutex<Option<Why>>,
    changed: Condvar,
}

/// See [`Ending`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Stopped,
    Panicked,
}

impl Ending {
    fn set(&self, why: Why) {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
        self.changed.notify_all();
    }

    pub(crate) fn get(&self) -> Option<Why> {
        *self.why.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait(&self) -> Why {
        let mut why = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(why) = *why {
                return why;
            }
            why = self.changed.wait(why).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A queue thread has panicked.
    pub(crate) fn panicked(&self) {
        self.set(Why::Panicked);
    }

    /// The export is not used any more.
    pub(crate) fn stopped(&self) {
        self.set(Why::Stopped);
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

    /// Whether one was asked for.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.get() == Some(Why::Stopped)
    }
}
