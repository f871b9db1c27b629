//! What keeps an export while the process that serves it is killed and another one goes on.
//!
//! Promises: plain values and one trait; what is kept is believed by the next process as little as
//! what a client says, since the process that wrote it may have been taken over.
//!
//! Descriptors are parked under numbers, each number once; the state names those that count. A
//! descriptor is parked before the state that names it is written, and released after a state that
//! does not: so at every moment the newest state names descriptors that are there.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Keeps the state of one export, outside of the process that serves it.
///
/// Called by the control thread of the export. When a call returns, the process may be killed and
/// nothing of it is lost.
pub trait Keeper: fmt::Debug + Send {
    /// Keeps a copy of a descriptor.
    ///
    /// * `number`: never used before.
    ///
    /// Errors: it is not kept.
    fn park(&mut self, number: u64, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// The descriptor with this number is kept no longer.
    fn release(&mut self, number: u64);

    /// Keeps a state in place of the one before.
    ///
    /// * `state`: text of [`KeptState::words`].
    ///
    /// Errors: it is not kept; the one before is.
    fn write(&mut self, state: &str) -> io::Result<()>;

    /// Another process has the export. What is kept of it stays as it is, for the case that the
    /// other process was killed before it could go on.
    fn leave(&mut self);

    /// The export has ended: nothing of it is kept any longer, and no process goes on with it.
    fn end(&mut self);
}

/// What was kept of an export whose process was killed.
#[derive(Debug)]
pub struct KeptState {
    /// The newest state.
    pub words: String,
    /// Parked descriptors with their numbers. Those that the state does not name are of no use.
    pub descriptors: Vec<(u64, OwnedFd)>,
}

impl KeptState {
    /// Numbers of all that is parked.
    #[must_use]
    pub fn numbers(&self) -> Vec<u64> {
        self.descriptors.iter().map(|(number, _)| *number).collect()
    }
}
