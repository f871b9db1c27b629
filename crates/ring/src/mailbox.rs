//! A queue of values for another thread.
//!
//! Promises: no value is lost, and of several puts before a take exactly the first reports that the
//! receiver must be signalled.

use super::sync::{Mutex, lock};

/// Values for another thread, taken in the order in which they were put.
///
/// Promises: nothing is lost, and of several `put`s before a `take` exactly the first reports that
/// the receiver must be signalled. Any number of threads put values; one takes them.
#[derive(Debug)]
pub(crate) struct Mailbox<T>(Mutex<Vec<T>>);

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Mailbox(Mutex::new(Vec::new()))
    }
}

impl<T> Mailbox<T> {
    /// Adds a value; returns whether the box was empty, i.e. the receiver must be signalled.
    pub(crate) fn put(&self, value: T) -> bool {
        let mut values = lock(&self.0);
        values.push(value);
        values.len() == 1
    }

    /// Takes all values.
    pub(crate) fn take(&self) -> Vec<T> {
        std::mem::take(&mut *lock(&self.0))
    }
}
