//! The state of copy-on-read (`request/copy_on_read.rs`) of a disk.
//!
//! Promises: one flag is all that a request of a disk without it looks at.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

type Watch = Box<dyn Fn(bool) + Send + Sync>;

/// Whether it is done, and what came of it.
#[derive(Default)]
pub(crate) struct CopyOnRead {
    pub(crate) is_on: AtomicBool,
    /// A command has switched it, so it is not what the disk was opened with.
    is_changed: AtomicBool,
    /// Hears of that.
    watch: OnceLock<Watch>,
    /// The last piece could not be kept; it was said.
    pub(crate) is_failing: AtomicBool,
    /// Bytes that were kept.
    pub(crate) kept: AtomicU64,
}

impl CopyOnRead {
    pub(crate) fn new(is_on: bool) -> CopyOnRead {
        CopyOnRead { is_on: AtomicBool::new(is_on), ..CopyOnRead::default() }
    }

    /// A command switches it, or has done so in a process before this one.
    pub(crate) fn switch(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
        self.is_changed.store(true, Ordering::Relaxed);
        if let Some(watch) = self.watch.get() {
            watch(is_on);
        }
    }

    /// What a command has switched it to; `None`: none has.
    pub(crate) fn changed(&self) -> Option<bool> {
        let is_changed = self.is_changed.load(Ordering::Relaxed);
        is_changed.then(|| self.is_on.load(Ordering::Relaxed))
    }

    /// The first one stays.
    pub(crate) fn watch(&self, watch: Watch) {
        let _ = self.watch.set(watch);
    }
}

impl fmt::Debug for CopyOnRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyOnRead").field("is_on", &self.is_on).finish_non_exhaustive()
    }
}
