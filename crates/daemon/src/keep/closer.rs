//! Closes descriptors that were parked, by threads that may wait for that.
//!
//! Promises: [`Closer::close`] does not wait; a close of one disk that waits for another process
//! stops those of no other disk; what waits is counted. Control path.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

/// A thread that closes descriptors.
#[derive(Debug)]
pub(super) struct Closer {
    sender: Sender<OwnedFd>,
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    /// Errors: the thread cannot be made.
    pub(super) fn start() -> io::Result<Closer> {
        let (sender, receiver) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let closed = Arc::clone(&waiting);
        let work = move || {
            for descriptor in receiver {
                drop(descriptor);
                closed.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = std::thread::Builder::new().name(String::from("closing"));
        thread.stack_size(64 << 10).spawn(work)?;
        Ok(Closer { sender, waiting })
    }

    /// Closes a descriptor, without waiting.
    pub(super) fn close(&self, descriptor: OwnedFd) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _ = self.sender.send(descriptor);
    }

    /// Descriptors that are not closed yet.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}
