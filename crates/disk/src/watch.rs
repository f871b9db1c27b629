//! Callbacks for a new size, a change of the graph, a new chain and other limits of a disk.
//!
//! Promises: a callback runs on the thread of the change, without any lock of this module held, so
//! it may register or drop watches itself; it must not block. Control path.

use ringdisk_qcow2::Bytes;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ringdisk_throttle::Changed;

use crate::layer::Layer;

/// One callback: new size in bytes.
type Callback = Arc<dyn Fn(Bytes) + Send + Sync>;

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

/// An event of the graph of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A change is about to wait until no request is in flight and no holder has the disk.
    Coming,
    /// It is over; the graph may be another one.
    Over,
}

/// Callback for changes of the graph.
pub(crate) type ChangeCallback = Box<dyn Fn(Change) + Send + Sync>;

/// The watcher of changes of the graph, if there is one.
#[derive(Default)]
pub(crate) struct ChangeWatch(OnceLock<ChangeCallback>);

impl ChangeWatch {
    pub(crate) fn set(&self, callback: ChangeCallback) {
        let _ = self.0.set(callback);
    }

    pub(crate) fn notify(&self, change: Change) {
        if let Some(callback) = self.0.get() {
            callback(change);
        }
    }
}

/// Gives the reason why an image may not become the top one.
type TopCheck = Box<dyn Fn(&Layer) -> Result<(), String> + Send + Sync>;
/// Callback with the layers that are about to be the chain, top first.
type ChainCallback = Box<dyn Fn(&[Arc<Layer>]) + Send + Sync>;

/// The watcher that opens the chain by its names later, if there is one.
#[derive(Default)]
pub(crate) struct ChainWatch(OnceLock<(TopCheck, ChainCallback)>);

impl ChainWatch {
    pub(crate) fn set(&self, check: TopCheck, callback: ChainCallback) {
        let _ = self.0.set((check, callback));
    }

    /// Errors: why an image may not become the top one.
    pub(crate) fn check(&self, top: &Layer) -> Result<(), String> {
        let Some((check, _)) = self.0.get() else { return Ok(()) };
        match top.differs_by_its_name() {
            Some(why) => Err(why.to_owned()),
            None => check(top),
        }
    }

    pub(crate) fn notify(&self, chain: &[Arc<Layer>]) {
        if let Some((_, callback)) = self.0.get() {
            callback(chain);
        }
    }
}

/// Gets what a command has changed of the limits.
#[derive(Clone)]
pub(crate) struct LimitWatch(Arc<dyn Fn(Option<Changed>) + Send + Sync>);

impl LimitWatch {
    pub(crate) fn new(watch: impl Fn(Option<Changed>) + Send + Sync + 'static) -> LimitWatch {
        LimitWatch(Arc::new(watch))
    }

    /// As a watch of the group.
    pub(crate) fn of_group(&self) -> ringdisk_throttle::Watch {
        let watch = self.clone();
        Box::new(move |group| (watch.0)(group.changed()))
    }
}

impl fmt::Debug for LimitWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LimitWatch")
    }
}

impl fmt::Debug for ChainWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ChainWatch").field(&self.0.get().is_some()).finish()
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

    /// Calls all callbacks.
    pub(crate) fn notify(&self, size: Bytes) {
        let callbacks: Vec<Callback> = {
            let list = self.list();
            list.entries.iter().map(|(_, c)| Arc::clone(c)).collect()
        };
        for callback in callbacks {
            callback(size);
        }
    }

    /// The list; a panic of another holder leaves it valid, so poison is ignored.
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
