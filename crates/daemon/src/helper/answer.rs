//! What the helper process answers to an order.
//!
//! Promises: plain values.

use std::os::fd::OwnedFd;

/// What came of one.
pub(crate) const DONE: u8 = b'D';
pub(crate) const BUSY: u8 = b'B';
pub(crate) const REFUSED: u8 = b'E';

/// The answer to an order.
#[derive(Debug)]
pub struct Answer {
    pub(crate) kind: u8,
    /// For people.
    pub(crate) words: String,
    /// A socket or file that was asked for.
    pub(crate) fd: Option<OwnedFd>,
}

impl Answer {
    pub(crate) fn new(kind: u8, words: impl Into<String>) -> Answer {
        Answer { kind, words: words.into(), fd: None }
    }

    pub(super) fn refused() -> Answer {
        Answer::new(REFUSED, "not a task of the helper process")
    }
}
