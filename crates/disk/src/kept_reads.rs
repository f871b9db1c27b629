//! The state of copy-on-read (`request/copy_on_read.rs`) of a disk.
//!
//! Promises: one flag is all that a request of a disk without it looks at.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// Whether it is done, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct CopyOnRead {
    pub(crate) is_on: AtomicBool,
    /// The last piece could not be kept; it was said.
    pub(crate) is_failing: AtomicBool,
    /// Bytes that were kept.
    pub(crate) kept: AtomicU64,
}

impl CopyOnRead {
    pub(crate) fn new(is_on: bool) -> CopyOnRead {
        CopyOnRead { is_on: AtomicBool::new(is_on), ..CopyOnRead::default() }
    }
}
