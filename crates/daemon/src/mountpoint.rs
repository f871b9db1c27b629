//! State of the mountpoint before we mounted on it, for clean-up.
//!
//! Promises: what was there before stays, and so does a mount that lives; one that nobody serves
//! cannot make it hang. Control path.

use std::fs;
use std::path::{Path, PathBuf};

use ringdisk_fuse::ErrorKind;
use ringdisk_fuse::mount::{Unmount, mountpoint, table, unmount};

/// A mountpoint as it was.
#[derive(Debug)]
pub struct MountpointState {
    path: PathBuf,
    was_there: bool,
    was_mounted: bool,
}

impl MountpointState {
    /// Looks at it now.
    pub fn of(path: &Path) -> MountpointState {
        // The process may leave its directory meanwhile.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let was_mounted = is_mounted(&path);
        MountpointState {
            was_there: was_mounted || path.symlink_metadata().is_ok(),
            was_mounted,
            path,
        }
    }

    /// Whether a file was there.
    pub fn was_there(&self) -> bool {
        self.was_there
    }

    /// Takes away what a process that was killed before its mount was ready has left: the mount,
    /// and an empty file that it made.
    pub fn restore(&self) {
        if self.was_mounted {
            return;
        }
        if is_mounted(&self.path) {
            // A mount that has a server is another process's.
            let checked = mountpoint::check(&self.path);
            if checked.is_err_and(|error| error.kind() == ErrorKind::Stale)
                && let Err(error) = unmount(&self.path, Unmount::Lazy)
            {
                tracing::warn!("{}", error.with_hint());
            }
        }
        if is_mounted(&self.path) {
            return;
        }
        let file = self.path.symlink_metadata();
        let is_empty = file.is_ok_and(|file| file.is_file() && file.len() == 0);
        if !self.was_there && is_empty {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn is_mounted(path: &Path) -> bool {
    let at = mountpoint::resolve(path).and_then(|path| table::at(&path));
    at.is_ok_and(|entry| entry.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_file_that_was_not_there_goes() {
        let directory = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        fs::write(path("old"), "").expect("write");
        let [old, new, filled] =
            ["old", "new", "filled"].map(|name| MountpointState::of(&path(name)));
        fs::write(path("new"), "").expect("write");
        fs::write(path("filled"), "content").expect("write");
        for before in [old, new, filled] {
            before.restore();
        }
        assert_eq!(["old", "new", "filled"].map(|name| path(name).exists()), [true, false, true]);
    }
}
