//! The control thread of an export, made before the export needs it.
//!
//! Promises: making the thread may fail, starting it cannot. So an export that takes another
//! process's clients over makes it first, and starts it when the other process has given them up.
//! Control path.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::{Error, ErrorKind, HaltReason};

/// A control thread that waits for what it is to look after. Dropped, it ends.
#[derive(Debug)]
#[must_use = "it does nothing yet"]
pub struct ControlThread<T> {
    work: SyncSender<T>,
    thread: JoinHandle<Result<(), HaltReason>>,
}

impl<T: Send + 'static> ControlThread<T> {
    /// Makes the thread.
    ///
    /// * `run`: what it does, until the export has ended.
    ///
    /// Errors: the system has no thread.
    pub fn make(
        name: &str,
        run: impl FnOnce(T) -> Result<(), HaltReason> + Send + 'static,
    ) -> Result<ControlThread<T>, Error> {
        let (work, given) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || given.recv().map_or(Ok(()), run));
        let no_thread =
            |error| Error::new(ErrorKind::System, "no thread for the export").source(error);
        Ok(ControlThread { work, thread: thread.map_err(no_thread)? })
    }

    /// Starts it.
    pub fn start(self, work: T) -> JoinHandle<Result<(), HaltReason>> {
        // There is room, and the thread does nothing but to wait for this.
        let _ = self.work.try_send(work);
        self.thread
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_when_it_is_started_and_ends_when_it_is_dropped() {
        let (sender, ran) = sync_channel(2);
        let second = sender.clone();
        let run = |sender: SyncSender<u8>| {
            move |work| sender.send(work).map_err(|_| HaltReason::Panicked)
        };
        let thread = ControlThread::make("test", run(sender)).expect("a thread");
        assert!(ran.try_recv().is_err(), "it waits");
        assert_eq!(thread.start(7).join().expect("no panic"), Ok(()));
        assert_eq!(ran.recv(), Ok(7));
        drop(ControlThread::make("test", run(second)).expect("a thread"));
        assert!(ran.recv().is_err(), "it has ended, and let go of its end");
    }
}
