//! Who wants to hear of a new disk size.
//!
//! Control path. A callback runs on the thread that changed the size, without any lock held, so it
//! may register or drop watches itself; it must not block.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crate::layer::Layer;

/// One callback: new size in bytes.
type Callback = Arc<dyn Fn(u64) + Send + Sync>;

/// The callbacks of a disk.
#[derive(Default)]
pub(crate) struct Watchers {
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    next_id: u64,
    entries: Vec<(u64, Callback)>,
}

/// What happens to the graph of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A change is about to wait until no request is in flight, and nobody holds the disk.
    Coming,
    /// It is over; the graph may be another one.
    Over,
}

/// Hears of changes of the graph.
pub(crate) type ChangeCallback = Box<dyn Fn(Change) + Send + Sync>;

/// The one that wants to hear of changes of the graph.
#[derive(Default)]
pub(crate) struct ChangeWatch(OnceLock<ChangeCallback>);

impl ChangeWatch {
    pub(crate) fn set(&self, callback: ChangeCallback) {
        let _ = self.0.set(callback);
    }

    pub(crate) fn tell(&self, change: Change) {
        if let Some(callback) = self.0.get() {
            callback(change);
        }
    }
}

/// Hears of the image that is about to be the top one.
type TopCallback = Box<dyn Fn(&Layer) + Send + Sync>;

/// The one that wants to hear of a new top image.
#[derive(Default)]
pub(crate) struct TopWatch(OnceLock<TopCallback>);

impl TopWatch {
    /// Whether somebody hears of it.
    pub(crate) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    pub(crate) fn set(&self, callback: TopCallback) {
        let _ = self.0.set(callback);
    }

    pub(crate) fn tell(&self, top: &Layer) {
        if let Some(callback) = self.0.get() {
            callback(top);
        }
    }
}

impl fmt::Debug for TopWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TopWatch").field(&self.0.get().is_some()).finish()
    }
}

/// A registered callback; dropping it ends the registration. A call that has begun on another
/// thread may still finish after the drop.
#[derive(Debug)]
#[must_use = "dropping the watch ends it"]
pub struct SizeWatch {
    watchers: Weak<Watchers>,
    id: u64,
}

impl Watchers {
    /// Registers a callback.
    pub(crate) fn add(self: &Arc<Self>, callback: Callback) -> SizeWatch {
        let mut list = self.list();
        let id = list.next_id;
        list.next_id += 1;
        list.entries.push((id, callback));
        SizeWatch { watchers: Arc::downgrade(self), id }
    }

    /// Calls everyone.
    pub(crate) fn notify(&self, size: u64) {
        let callbacks: Vec<Callback> = {
            let list = self.list();
            list.entries.iter().map(|(_, c)| Arc::clone(c)).collect()
        };
        for callback in callbacks {
            callback(size);
        }
    }

    /// The list; a panic elsewhere leaves it valid, so poison is ignored.
    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Watchers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchers").field("count", &self.list().entries.len()).finish()
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        if let Some(watchers) = self.watchers.upgrade() {
            watchers.list().entries.retain(|(id, _)| *id != self.id);
        }
    }
}
