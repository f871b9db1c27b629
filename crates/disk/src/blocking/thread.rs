//! A thread with a ring, which runs async functions for callers that block.
//!
//! Promises: a call returns its result, or an error if the thread has ended; calls of several
//! threads run side by side. Dropping [`RingThread`] ends the thread and waits for that.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_ring::{Config, Remote, Ring, Runtime};

use crate::{Error, ErrorKind};

/// How often a waiting caller checks that the thread has not ended: only a panic there ends it.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The thread.
#[derive(Debug)]
pub(super) struct RingThread {
    remote: Remote,
    must_end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RingThread {
    /// Starts the thread and makes its ring.
    ///
    /// Errors: `Unsupported` where there is no io_uring; `Io` when no thread can be started.
    pub(super) fn start() -> Result<RingThread, Error> {
        let must_end = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&must_end);
        let (ready, is_ready) = channel();
        let run = move || {
            let mut runtime = match Runtime::new(Config::default()) {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return;
                }
            };
            let _ = ready.send(Ok(runtime.ring().remote()));
            // Polled again after each closure of another thread.
            runtime.block_on(poll_fn(|_| match ends.load(Ordering::Acquire) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }));
        };
        let thread = std::thread::Builder::new().name("disk".to_owned()).spawn(run);
        let thread = thread.map_err(|error| {
            Error::new(ErrorKind::Io, "cannot start a thread for the image").with_source(error)
        })?;
        match is_ready.recv() {
            Ok(Ok(remote)) => Ok(RingThread { remote, must_end, thread: Some(thread) }),
            Ok(Err(error)) => Err(Error::new(ErrorKind::Unsupported, error.to_string())),
            Err(_) => Err(ended()),
        }
    }

    /// Runs an async function on the thread, and waits for its result.
    ///
    /// Errors: those of the function; `Io` when the thread has ended.
    pub(super) fn call<T, F>(
        &self,
        work: impl FnOnce(Ring) -> F + Send + 'static,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        let (sender, receiver) = channel();
        self.remote.run(move |ring| {
            let future = work(ring.clone());
            ring.spawn(async move {
                let _ = sender.send(future.await);
            });
        });
        loop {
            match receiver.recv_timeout(CHECK_INTERVAL) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                // A closure that was sent after the end is never run, and keeps its sender.
                Err(RecvTimeoutError::Timeout) => {
                    if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                        return Err(ended());
                    }
                }
            }
        }
    }
}

impl Drop for RingThread {
    fn drop(&mut self) {
        let must_end = Arc::clone(&self.must_end);
        self.remote.run(move |_| must_end.store(true, Ordering::Release));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Io, "the thread of the image has ended")
}
