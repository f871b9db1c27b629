//! Files that a mount makes: the image, its data file, the mountpoint.
//!
//! Promises: what was made goes when the start fails or the mount ends, but for an image that was
//! served. Shared with the signal thread until the mount is there.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::{NewFile, NewFiles};

/// Files that we made and may have to remove. Shared with the signal thread until the mount is
/// there.
#[derive(Clone, Default)]
pub(super) struct Made {
    /// The image, and its data file if it has one.
    pub(super) images: NewFiles,
    files: Arc<Mutex<MadeFiles>>,
}

#[derive(Default)]
struct MadeFiles {
    mountpoint: Option<NewFile>,
}

impl Made {
    /// Makes the mountpoint when there is none.
    pub(super) fn mountpoint(&self, path: &Path) -> Result<(), Failure> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let made = NewFile::make_there(path, 0o600).map_err(|error| {
            let doing = format!("cannot make the mountpoint '{}'", path.display());
            Failure::system(doing, &error, Exit::Mountpoint)
        })?;
        files.mountpoint = made;
        Ok(())
    }

    /// The mountpoint that a process before this one has made.
    pub(super) fn adopt(&self, path: &Path, id: Option<(u64, u64)>) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint = id.map(|id| NewFile::adopt(path, id));
    }

    /// All of it belongs to another process from now on.
    pub(super) fn leave(&self) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint.take().into_iter().for_each(NewFile::leave);
    }

    /// Device and inode number of the mountpoint, if we made it.
    pub(super) fn mountpoint_id(&self) -> Option<(u64, u64)> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint.as_ref().map(NewFile::id)
    }

    /// From now on the image is the user's.
    pub(super) fn keep_image(&self) {
        self.images.keep();
    }

    /// Removes what was made.
    pub(super) fn undo(&self) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint = None;
        self.images.undo();
    }
}
