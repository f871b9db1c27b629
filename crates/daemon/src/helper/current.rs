//! The helper of this process, if it has one: what a process asks it for where the kernel refuses
//! that to the process itself.
//!
//! Promises: without a helper each function does what its system call does. Any thread.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use ringdisk_fuse::mount::Remover;

use super::Helper;
use super::tasks::Tasks;
use crate::mount_users::Users;
use crate::notify::Word;

/// A process is confined once, with all of its threads, so it has one helper.
static HELPER: OnceLock<Helper> = OnceLock::new();

/// The helper.
pub fn get() -> Option<&'static Helper> {
    HELPER.get()
}

/// Starts a helper process for what this one will not be able to do any more.
///
/// Errors: it cannot be started.
pub fn start(tasks: &Tasks) -> io::Result<Arc<dyn Remover>> {
    let helper = Helper::start(tasks)?;
    let remover = helper.remover();
    // A process is confined once.
    let _ = HELPER.set(helper);
    Ok(remover)
}

/// As [`std::fs::remove_file`]; inside a sandbox the helper process does it, if it was told of the
/// file.
///
/// Errors: those of unlink(2).
pub fn remove_file(path: &Path) -> io::Result<()> {
    match (fs::remove_file(path), HELPER.get()) {
        (Err(error), Some(helper)) if error.kind() == io::ErrorKind::PermissionDenied => {
            if helper.unlink(path) { Ok(()) } else { Err(error) }
        }
        (result, _) => result,
    }
}

/// Whether a name still leads to a file of ours. Where a process that is not root's any more may
/// not look, the helper process does, before it removes it.
pub fn may_be(path: &Path, id: (u64, u64)) -> bool {
    match fs::symlink_metadata(path) {
        Ok(meta) => (meta.dev(), meta.ino()) == id,
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied && HELPER.get().is_some(),
    }
}

/// Connects to a front end that listens; inside a sandbox, where no socket can be made, the helper
/// process does it, if it was told of the name.
///
/// Errors: nobody listens there.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    match HELPER.get().filter(|_| is_for_helper(path)) {
        Some(helper) => helper.connect(path),
        None => UnixStream::connect(path).map(OwnedFd::from),
    }
}

/// Whether the helper process, which has another directory, can use a name.
pub fn is_for_helper(path: &Path) -> bool {
    path.is_absolute()
}

/// Who uses the mount, as the helper process sees it: inside a sandbox other processes cannot be
/// looked at. `None`: there is no helper.
pub fn users() -> Option<Users> {
    HELPER.get()?.users()
}

/// Lets the helper process tell the service manager something.
pub fn say(word: Word, text: &str) {
    if let Some(helper) = HELPER.get() {
        helper.say(word, text);
    }
}

/// Whether this process has had a helper that is gone. Never waits.
pub fn is_gone() -> bool {
    HELPER.get().is_some_and(Helper::is_gone)
}

/// The process ends: the helper process does, too.
pub fn leave() {
    if let Some(helper) = HELPER.get() {
        helper.end();
    }
}
