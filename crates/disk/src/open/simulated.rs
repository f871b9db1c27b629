//! Simulated files for tests: a change that creates or opens one by its name gets the simulated
//! storage.
//!
//! Promises: each thread has its own files.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_storage::Storage;

/// Storages by the names of their files.
type Files = BTreeMap<PathBuf, Arc<Storage>>;

thread_local! {
    static FILES: RefCell<Files> = const { RefCell::new(BTreeMap::new()) };
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
