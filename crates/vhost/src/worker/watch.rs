//! A queue thread that is stuck in a call is found, and goes on.
//!
//! Nothing else of a queue thread may wait, and no write to an eventfd is sure not to wait (see
//! [`super::call`]). A thread that waits for an answer of this one interrupts such a write.
//! Promises: the thread says when it makes one: two stores of its own memory, and no system call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_ring::{Errno, Interrupt};

/// State of the blocking calls of a queue thread, shared with threads that wait for its answer.
#[derive(Debug)]
pub(crate) struct Watch {
    is_calling: AtomicBool,
    interrupt: Interrupt,
}

impl Watch {
    /// Of the calling thread.
    ///
    /// Errors: those of [`Interrupt::of_this_thread`].
    pub(super) fn of_this_thread() -> Result<Arc<Watch>, Errno> {
        let interrupt = Interrupt::of_this_thread()?;
        Ok(Arc::new(Watch { is_calling: AtomicBool::new(false), interrupt }))
    }

    /// A call of the thread itself that may wait: it ends with EINTR when another thread finds it
    /// waiting.
    #[inline]
    pub(super) fn call<T>(&self, call: impl FnOnce() -> T) -> T {
        self.is_calling.store(true, Ordering::Release);
        let result = call();
        self.is_calling.store(false, Ordering::Release);
        result
    }

    /// The thread has not answered for a while. A call that does not wait is not hurt: it is not
    /// interrupted.
    pub(crate) fn look(&self) {
        if self.is_calling.load(Ordering::Acquire) {
            self.interrupt.send();
        }
    }
}
