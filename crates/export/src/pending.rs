//! The answer of a queue thread to something that it was asked to do.
//!
//! Promises: waiting ends when the function of the waiting thread says so, at most 100 ms later: a
//! queue thread that has ended never answers. Control path.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind};

/// How often a thread that waits calls its function.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// An answer that may not be there yet.
#[derive(Debug)]
pub struct Pending<T>(pub(crate) Receiver<T>);

/// There is no answer: the queue thread has ended, or the waiting was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl<T> Pending<T> {
    /// Waits for it, so long at most.
    ///
    /// Errors: [`ErrorKind::Halted`].
    pub fn within(self, limit: Duration) -> Result<T, Error> {
        let begun = Instant::now();
        let gone = |Gone| Error::new(ErrorKind::Halted, "the queue thread does not answer");
        self.wait(|| begun.elapsed() < limit).map_err(gone)
    }

    /// Waits for it.
    ///
    /// * `idle`: called now and then while there is no answer; `false` gives up.
    ///
    /// Errors: [`Gone`].
    pub fn wait(self, mut idle: impl FnMut() -> bool) -> Result<T, Gone> {
        loop {
            match self.0.recv_timeout(POLL_INTERVAL) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if idle() => {}
                Err(_) => return Err(Gone),
            }
        }
    }
}
