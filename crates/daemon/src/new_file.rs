//! Files that a command makes and that must not stay when it fails.
//!
//! Promises: only a file that this process made itself, or whose old content it has given up, is
//! ever removed, and only if its name still leads to it; a signal removes it too.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use crate::failure::{Exit, Failure};
use crate::helper;
use crate::terminal::{self, visible};

/// A file that goes with this value, unless it is kept or is not the one that was made any more.
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    id: (u64, u64),
    keep: bool,
    /// It was there before; its old content is lost.
    was_there: bool,
    /// Another process says that it made it, empty.
    is_adopted: bool,
}

impl NewFile {
    /// Makes an empty file; `None` if there is one.
    pub fn make(path: &Path, mode: u32) -> io::Result<Option<NewFile>> {
        let path = std::path::absolute(path)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        NewFile::made(path, file)
    }

    /// The same without following any symbolic link: a user who may write a directory of the path
    /// could have put a link there since the path was found to have none.
    ///
    /// * `path`: absolute.
    ///
    /// Errors: ELOOP where there is a link.
    pub fn make_there(path: &Path, mode: u32) -> io::Result<Option<NewFile>> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = openat2(CWD, path, flags, Mode::from_raw_mode(mode), ResolveFlags::NO_SYMLINKS);
        match made {
            // Linux before 5.6, and filters of system calls that do not know it.
            Err(Errno::NOSYS | Errno::PERM) => NewFile::make(path, mode),
            made => NewFile::made(path.to_owned(), made.map(File::from).map_err(io::Error::from)),
        }
    }

    fn made(path: PathBuf, file: io::Result<File>) -> io::Result<Option<NewFile>> {
        match file {
            Ok(file) => {
                let meta = file.metadata()?;
                let id = (meta.dev(), meta.ino());
                Ok(Some(NewFile { path, id, keep: false, was_there: false, is_adopted: false }))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// One that a process before this one says that it has made. That process may have been taken
    /// over, so a file with content, which it has not made so, stays.
    pub fn adopt(path: &Path, id: (u64, u64)) -> NewFile {
        NewFile { path: path.to_owned(), id, keep: false, was_there: false, is_adopted: true }
    }

    /// The file belongs to another process from now on.
    pub fn leave(mut self) {
        self.keep = true;
    }

    /// Device and inode number.
    pub fn id(&self) -> (u64, u64) {
        self.id
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        let is_empty = |meta: fs::Metadata| meta.is_file() && meta.len() == 0;
        let may_go = || match fs::symlink_metadata(&self.path) {
            Ok(meta) => is_empty(meta),
            // The helper process looks.
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        };
        let may_go = !self.is_adopted || may_go();
        if !(may_go && helper::may_be(&self.path, self.id)) {
            return;
        }
        // Removed rather than emptied: a write that is under way would make it long again.
        match helper::remove_file(&self.path) {
            Ok(()) if self.was_there => terminal::note(format_args!(
                "'{}' was overwritten in part already, so it is removed",
                self.path.display()
            )),
            Ok(()) => {}
            Err(error) => {
                let emptied = OpenOptions::new().write(true).truncate(true).open(&self.path);
                let how = if emptied.is_ok() { "it is empty now" } else { "it holds no image" };
                tracing::warn!("cannot remove '{}': {error}; {how}", self.path.display());
            }
        }
    }
}

/// Files that were made so far; shared with the thread that takes signals.
#[derive(Clone, Debug, Default)]
pub struct NewFiles(Arc<Mutex<Vec<NewFile>>>);

impl NewFiles {
    /// Makes an empty file, mode 0644 less umask as qemu-img's; one that is there is left as it is.
    /// Returns whether it was made.
    ///
    /// Errors: those of open(2).
    pub fn file(&self, path: &Path) -> io::Result<bool> {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let made = NewFile::make(path, 0o644)?;
        Ok(made.map(|made| files.push(made)).is_some())
    }

    /// A regular file that is there, and that we have locked, is overwritten from now on: what it
    /// becomes is made by us.
    ///
    /// Errors: those of stat(2).
    pub fn begin(&self, path: &Path) -> io::Result<()> {
        let path = path.canonicalize()?;
        let meta = path.metadata()?;
        let id = (meta.dev(), meta.ino());
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if meta.is_file() && files.iter().all(|file| file.id != id) {
            files.push(NewFile { path, id, keep: false, was_there: true, is_adopted: false });
        }
        Ok(())
    }

    /// All of them are the user's from now on.
    pub fn keep(&self) {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        files.iter_mut().for_each(|file| file.keep = true);
        files.clear();
    }

    /// Removes all of them.
    pub fn undo(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Whether a new file may have this name.
///
/// Errors: a name that could not be used again, by us or by QEMU's programs.
pub fn check_new_name(file: &Path) -> Result<(), Failure> {
    let text = file.to_string_lossy();
    if text.is_empty() {
        return Err(Failure::new(Exit::Usage, "the image needs a name"));
    }
    if text.chars().any(char::is_control) {
        let text = format!("the name '{}' has a control character in it", visible(&text));
        return Err(Failure::new(Exit::Usage, text));
    }
    let protocol = text.split(':').next().unwrap_or_default();
    let is_protocol = protocol.len() < text.len()
        && protocol.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    if is_protocol {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "the name '{}' begins like a protocol ('{protocol}:'); images are files and block \
                 devices",
                visible(&text)
            ),
        )
        .hint(format!("write './{}' if the file shall be called so", visible(&text))));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
