//! The pid file.
//!
//! Promises: holds the decimal pid and a newline, mode 0600, under a POSIX lock for as long
//! as the process lives, and goes with it. A file that appears under its name is complete: it is
//! made beside and renamed, or written over in place when it was there and no process has it
//! locked. A file that does not look like a pid file, is a link, or belongs to another user is left
//! alone.
//!
//! An attacker who takes the process over cannot write another pid into the file, for scripts to
//! signal: the descriptor that stays open can only be read. So the lock is a read lock, which
//! excludes every process that asks for a write lock.
//!
//! Used by the main thread only: POSIX locks belong to the process and end when it closes *any*
//! descriptor of the file, so no other part of the process may open it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_export::retry_while;
use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, fcntl_lock, renameat_with};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::failure::{Cause, Exit, Failure, words};
use crate::helper;
use crate::pid_text;
use crate::terminal;

/// Tries to find a name that nobody removes or makes under our hands.
const ATTEMPTS: usize = 100;
/// A process that has given its disks away has so long to end: the helper process that held them
/// ends after the one that served them.
const FORMER_ENDS: Duration = Duration::from_secs(2);
const FORMER_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A pid file of this process; dropping it removes it.
#[derive(Debug)]
pub struct Pidfile {
    path: PathBuf,
    file: File,
    /// It is not removed.
    stays: bool,
}

impl Pidfile {
    /// Looks whether the file could be had, and makes nothing: a start that must fail fails early.
    ///
    /// Errors: as [`Pidfile::create`].
    pub fn check(path: &Path) -> Result<(), Failure> {
        match open_existing(path)? {
            Some(_) => Ok(()),
            None => {
                let directory = match path.parent() {
                    Some(directory) if !directory.as_os_str().is_empty() => directory,
                    _ => Path::new("."),
                };
                fs::metadata(directory).map(|_| ()).map_err(|error| cannot(path, "", &error))
            }
        }
    }

    /// Makes, locks and fills the file.
    ///
    /// * `path`: absolute, since the file is removed by this name.
    ///
    /// Errors: `Locked` when another process holds it, else the system's reason.
    pub fn create(path: &Path) -> Result<Pidfile, Failure> {
        for _ in 0..ATTEMPTS {
            let file = match open_existing(path)? {
                Some(file) => file,
                None => match create_beside(path)? {
                    Some(file) => file,
                    None => continue,
                },
            };
            // Its last holder may have removed the name between our open and our lock.
            if !is_named(path, &file) {
                continue;
            }
            fill(&file).map_err(|error| cannot(path, "", &error))?;
            let file = keep_to_read(path, file)?;
            // It was without a lock for a moment, and is another process's if that one was faster.
            if !is_named(path, &file) || !holds(&file, &content()) {
                continue;
            }
            return Ok(Pidfile { path: path.to_owned(), file, stays: false });
        }
        Err(refused(Exit::General, format!("'{}' comes and goes", path.display())))
    }
}

impl Pidfile {
    /// As [`Pidfile::check`].
    ///
    /// * `is_upgrade`: the process that has the file locked gives its disks to this one, and ends.
    ///
    /// Errors: as [`Pidfile::check`].
    pub fn check_for(path: &Path, is_upgrade: bool) -> Result<(), Failure> {
        match Pidfile::check(path) {
            Err(failure) if is_upgrade && failure.exit == Exit::Locked => Ok(()),
            checked => checked,
        }
    }

    /// As [`Pidfile::create`], where a file is asked for. Clients of the process before are served
    /// here already if this is an upgrade: its file is waited for, and one that cannot be had is
    /// complained of.
    ///
    /// Errors: as [`Pidfile::create`]; none if `is_upgrade`.
    pub fn create_for(path: Option<&Path>, is_upgrade: bool) -> Result<Option<Pidfile>, Failure> {
        let Some(path) = path else { return Ok(None) };
        let is_former = |created: &Result<Pidfile, Failure>| {
            is_upgrade && created.as_ref().is_err_and(|failure| failure.exit == Exit::Locked)
        };
        let create = || Pidfile::create(path);
        match retry_while(FORMER_ENDS, FORMER_POLL_INTERVAL, is_former, create) {
            Err(failure) if is_upgrade => {
                terminal::complain(&failure.context("the disk is served without a pid file"));
                Ok(None)
            }
            created => created.map(Some),
        }
    }

    /// Its name, with device and inode number.
    pub fn identity(&self) -> Option<helper::Named> {
        let meta = self.file.metadata().ok()?;
        Some((self.path.clone(), (meta.dev(), meta.ino())))
    }
}

impl Pidfile {
    /// Leaves the file to a process that goes on in place of this one, and takes it over as soon as
    /// this one is gone: the lock must be free by then.
    pub fn leave(mut self) {
        self.stays = true;
    }
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        // The name is removed before the lock goes, so that no other process locks a dead file.
        let may_be = |(path, id): helper::Named| helper::may_be(&path, id);
        if (is_named(&self.path, &self.file) || self.identity().is_some_and(may_be))
            && let Err(error) = helper::remove_file(&self.path)
        {
            tracing::warn!("cannot remove the pid file '{}': {error}", self.path.display());
        }
    }
}

/// The same file, open for reading only, and locked. The locks of a process on a file go with the
/// first of its descriptors that is closed.
fn keep_to_read(path: &Path, file: File) -> Result<File, Failure> {
    // Without /proc it stays as it is; nor is there a sandbox.
    let Ok(again) = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())) else {
        return Ok(file);
    };
    drop(file);
    lock_for(path, &again, FlockOperation::NonBlockingLockShared)?;
    Ok(again)
}

/// Opens and locks the file that is there; `None` if there is none.
fn open_existing(path: &Path) -> Result<Option<File>, Failure> {
    // A FIFO of that name must not hold us up, and a link of another user lead to any file that
    // holds a number.
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    let refuse = |what: &str| {
        Err(refused(Exit::General, format!("'{}' {what}", path.display()))
            .hint("give another name, or remove that file if nobody needs it"))
    };
    let mut file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(_) if path.is_symlink() => return refuse("is a symbolic link"),
        Err(error) => return Err(cannot(path, "", &error)),
    };
    let meta = file.metadata().map_err(|error| cannot(path, "", &error))?;
    if !meta.is_file() {
        return refuse("is not a regular file");
    }
    if meta.uid() != geteuid().as_raw() {
        return refuse("belongs to another user, who could put another pid into it");
    }
    if meta.nlink() > 1 {
        return refuse("has other names, too");
    }
    lock(path, &file)?;
    let mut content = Vec::new();
    Read::by_ref(&mut file)
        .take(pid_text::CONTENT_BYTES_MAX as u64 + 1)
        .read_to_end(&mut content)
        .map_err(|error| cannot(path, "", &error))?;
    if !pid_text::is_pid(&content) {
        return refuse("holds something else than a pid and is left as it is");
    }
    Ok(Some(file))
}

/// Makes the file under another name, complete and locked, and renames it; `None` if another
/// process was faster.
fn create_beside(path: &Path) -> Result<Option<File>, Failure> {
    let mut name = OsString::from(path.as_os_str());
    name.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(name);
    let _ = fs::remove_file(&beside);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&beside)
        .map_err(|error| cannot(path, "", &error))?;
    let placed = lock(path, &file)
        .and_then(|()| fill(&file).map_err(|error| cannot(path, "", &error)))
        .and_then(|()| place(path, &beside));
    if !matches!(placed, Ok(true)) {
        let _ = fs::remove_file(&beside);
    }
    Ok(placed?.then_some(file))
}

/// Gives `beside` the name `path` unless that is taken (`false`).
fn place(path: &Path, beside: &Path) -> Result<bool, Failure> {
    match renameat_with(CWD, beside, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        // A file system without the flag: a link does not replace either.
        Err(Errno::INVAL | Errno::NOSYS) => match fs::hard_link(beside, path) {
            Ok(()) => fs::remove_file(beside).map(|()| true).map_err(|e| cannot(path, "", &e)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(cannot(path, "", &error)),
        },
        Err(errno) => Err(cannot(path, "", &errno.into())),
    }
}

/// Takes the lock that says "this process lives".
fn lock(path: &Path, file: &File) -> Result<(), Failure> {
    lock_for(path, file, FlockOperation::NonBlockingLockExclusive)
}

fn lock_for(path: &Path, file: &File, how: FlockOperation) -> Result<(), Failure> {
    match fcntl_lock(file, how) {
        Ok(()) => Ok(()),
        Err(errno @ (Errno::AGAIN | Errno::ACCESS)) => {
            let reason = words(&io::Error::from(errno));
            Err(refused(Exit::Locked, format!("Cannot lock pid file: {reason}"))
                .hint(format!("the process named in '{}' still runs", path.display())))
        }
        Err(errno) => Err(cannot(path, "Cannot lock pid file: ", &errno.into())),
    }
}

/// Writes the pid over whatever there is, without a moment at which the file is empty.
fn fill(file: &File) -> io::Result<()> {
    let content = content();
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    file.write_all_at(content.as_bytes(), 0)?;
    file.set_len(content.len() as u64)?;
    (&*file).flush()
}

/// What it holds when it is ours.
fn content() -> String {
    format!("{}\n", std::process::id())
}

fn holds(file: &File, content: &str) -> bool {
    let mut found = [0; pid_text::CONTENT_BYTES_MAX];
    file.read_at(&mut found, 0).is_ok_and(|len| found[..len] == *content.as_bytes())
}

/// Whether `path` still names `file`.
fn is_named(path: &Path, file: &File) -> bool {
    match (fs::symlink_metadata(path), file.metadata()) {
        (Ok(named), Ok(ours)) => (named.dev(), named.ino()) == (ours.dev(), ours.ino()),
        _ => false,
    }
}

/// The failure, in the words that scripts know from QEMU's daemons.
fn cannot(path: &Path, what: &str, error: &io::Error) -> Failure {
    let file = format!("{what}'{}'", path.display());
    let why = format!("{file}: {}", words(error));
    Failure::system(format!("cannot create PID file: {file}"), error, Exit::General)
        .because(Cause::PidFile { why })
}

/// The same, where the system reported no error.
fn refused(exit: Exit, why: String) -> Failure {
    Failure::new(exit, format!("cannot create PID file: {why}")).because(Cause::PidFile { why })
}

#[cfg(test)]
mod tests;
