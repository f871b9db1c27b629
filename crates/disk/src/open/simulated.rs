//! Files that a test simulates: a change that makes or opens one by its name gets the simulated
//! storage. Each thread has its own.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_storage::Storage;

thread_local! {
    static FILES: RefCell<BTreeMap<PathBuf, Arc<Storage>>> = const { RefCell::new(BTreeMap::new()) };
}

/// Files are simulated until this is dropped.
pub(crate) struct Simulated(());

impl Simulated {
    /// * `files`: by the names that the crate has for them. One that is opened by its name (not
    ///   made) needs a real file of that name too, which stays empty.
    pub(crate) fn new(files: impl IntoIterator<Item = (PathBuf, Arc<Storage>)>) -> Simulated {
        FILES.with_borrow_mut(|all| all.extend(files));
        Simulated(())
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        FILES.with_borrow_mut(BTreeMap::clear);
    }
}

/// The storage of this name.
pub(crate) fn find(name: &Path) -> Option<Arc<Storage>> {
    FILES.with_borrow(|all| all.get(name).cloned())
}
