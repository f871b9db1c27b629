//! New overlays of a process in its sandbox.
//!
//! Inside, only the images can be opened that were there when the process entered; nothing else of their directories. So the warden makes the
//! overlay of a `ringdisk ctl snapshot`, and opens it again when a command needs that ([`FromInside`]).
//!
//! Promises, of the side that is outside ([`Overlays`]): directories and files are those that it has descriptors of; what they are called
//! counts when one is made or removed only. A file that was there is never opened, changed or removed: only what was made here is opened again,
//! or removed while its name still leads to it. No descriptor that could hold a lock stays here, and none of a file or directory that is of
//! no disk any more. There is a limit to how many are made.
//!
//! Orders: a letter and fields between zero bytes, the first two of which are device and inode number of a directory or file. The answer to one
//! that fails has the errno in it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Mutex, OnceLock, PoisonError};

use ringdisk_disk::Disk;
use ringdisk_sandbox::User;
use ringdisk_storage::{Kind, Opener, Storage};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, openat, statat, unlinkat};
use rustix::io::Errno;

use super::duties::{Answer, DONE, Named, REFUSED, pin};
use super::{Reach, WARDEN, directory_of};
use crate::cli::SandboxWord;

/// Makes a file; after the numbers of the directory comes its name.
const MAKE: u8 = b'o';
/// Opens a file again, to read it only.
const READ: u8 = b'r';
/// The same to read and write it.
const WRITE: u8 = b'w';
/// Removes a file.
const REMOVE: u8 = b'x';
/// Makes the names of a directory durable.
const SYNC: u8 = b'y';
/// A file is of no disk any more.
const FORGET: u8 = b'z';
/// A disk that had its overlays in a directory is served no longer.
const LEAVE: u8 = b'l';

/// Files that are held at a time: a chain has 256 images at most, and a process has 1024 descriptors where nobody says otherwise.
const HELD_MAX: usize = 512;
/// Files that are made while the process serves: one each ten minutes for a year.
const MADE_MAX: u32 = 1 << 16;

/// Device and inode number.
type Id = (u64, u64);

/// What is held for new overlays. Outside.
#[derive(Debug, Default)]
pub(super) struct Overlays {
    /// One for each disk.
    directories: Vec<(Id, Rc<OwnedFd>)>,
    files: Vec<Made>,
    /// Files that were made.
    count: u32,
    /// Who makes them; `None`: this process.
    maker: Option<User>,
}

/// A file that was made here.
#[derive(Debug)]
struct Made {
    id: Id,
    directory: Rc<OwnedFd>,
    name: Vec<u8>,
    /// `O_PATH`: while it is open no other file gets these numbers.
    file: OwnedFd,
}

impl Overlays {
    /// Takes hold of directories. One whose name leads elsewhere by now is none.
    ///
    /// * `maker`: who must be allowed to make files there, and owns them; `None`: this process.
    pub(super) fn hold(directories: &[Named], maker: Option<User>) -> Overlays {
        let held = directories.iter().filter_map(|(path, id)| {
            let directory = pin(path, *id).filter(|fd| is_of_type(fd, FileType::Directory))?;
            Some((*id, Rc::new(directory)))
        });
        Overlays { directories: held.collect(), maker, ..Overlays::default() }
    }

    /// Does what an order asks for. `None`: it is none of these.
    pub(super) fn carry_out(&mut self, what: u8, fields: &[u8]) -> Option<Answer> {
        if ![MAKE, READ, WRITE, REMOVE, SYNC, FORGET, LEAVE].contains(&what) {
            return None;
        }
        let Some((id, rest)) = numbers(fields) else { return Some(answer(Err(Errno::INVAL))) };
        // Where there is no name, nothing may stand in its place.
        if what != MAKE && !rest.is_empty() {
            return Some(answer(Err(Errno::INVAL)));
        }
        Some(match what {
            MAKE => answer(self.make(id, rest).map(Some)),
            READ => answer(self.again(id, OFlags::RDONLY).map(Some)),
            WRITE => answer(self.again(id, OFlags::RDWR).map(Some)),
            REMOVE => answer(self.remove(id).map(|()| None)),
            SYNC => answer(self.sync(id).map(|()| None)),
            FORGET => {
                self.files.retain(|made| made.id != id);
                answer(Ok(None))
            }
            _ => {
                if let Some(at) = self.directories.iter().position(|(held, _)| *held == id) {
                    self.directories.remove(at);
                }
                answer(Ok(None))
            }
        })
    }

    fn directory(&self, id: Id) -> Result<&Rc<OwnedFd>, Errno> {
        let held = self.directories.iter().find(|(held, _)| *held == id);
        held.map(|(_, directory)| directory).ok_or(Errno::ACCESS)
    }

    fn made(&self, id: Id) -> Result<usize, Errno> {
        self.files.iter().position(|made| made.id == id).ok_or(Errno::ACCESS)
    }

    fn make(&mut self, directory: Id, name: &[u8]) -> Result<OwnedFd, Errno> {
        let directory = Rc::clone(self.directory(directory)?);
        if !is_component(name) {
            return Err(Errno::ACCESS);
        }
        if self.files.len() >= HELD_MAX || self.count >= MADE_MAX {
            return Err(Errno::DQUOT);
        }
        // As `ringdisk-storage` makes one; the umask is the one that we were started with.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let more = OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
        let parent = directory.as_fd();
        let open = || openat(parent, name, flags | more, Mode::from_raw_mode(0o644));
        let open = match self.maker {
            Some(user) => user.look(open)??,
            None => open()?,
        };
        self.count += 1;
        let held = fstat(&open).and_then(|stat| {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let file = openat(CWD, link(open.as_fd()), flags, Mode::empty())?;
            let (id, directory) = ((stat.st_dev, stat.st_ino), Rc::clone(&directory));
            Ok(Made { id, directory, name: name.to_vec(), file })
        });
        match held {
            Ok(made) => {
                self.files.push(made);
                Ok(open)
            }
            Err(errno) => {
                let stat = fstat(&open)?;
                let _ = unlink(&directory, name, (stat.st_dev, stat.st_ino));
                Err(errno)
            }
        }
    }

    fn again(&self, id: Id, access: OFlags) -> Result<OwnedFd, Errno> {
        let made = &self.files[self.made(id)?];
        openat(CWD, link(made.file.as_fd()), access | OFlags::CLOEXEC, Mode::empty())
    }

    fn remove(&mut self, id: Id) -> Result<(), Errno> {
        let made = self.files.swap_remove(self.made(id)?);
        unlink(&made.directory, &made.name, id)
    }

    fn sync(&self, id: Id) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = openat(&**self.directory(id)?, c".", flags, Mode::empty())?;
        match rustix::fs::fsync(&open) {
            // A file system that has no such thing.
            Err(Errno::INVAL) => Ok(()),
            result => result,
        }
    }
}

/// Removes a file whose name leads to it.
fn unlink(directory: &OwnedFd, name: &[u8], id: Id) -> Result<(), Errno> {
    let now = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    match (now.st_dev, now.st_ino) == id {
        true => unlinkat(directory, name, AtFlags::empty()),
        false => Err(Errno::NOENT),
    }
}

fn answer(result: Result<Option<OwnedFd>, Errno>) -> Answer {
    match result {
        Ok(fd) => Answer { fd, ..Answer::new(DONE, "") },
        Err(errno) => Answer::new(REFUSED, errno.raw_os_error().to_string()),
    }
}

fn is_of_type(fd: &OwnedFd, wanted: FileType) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == wanted)
}

/// By which an open file is opened again.
fn link(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Whether a name leads to something in a directory, and nowhere else.
fn is_component(name: &[u8]) -> bool {
    !name.is_empty()
        && name != b"."
        && name != b".."
        && !name.iter().any(|byte| b"/\0".contains(byte))
}

/// The two numbers at the beginning, and what follows them.
fn numbers(fields: &[u8]) -> Option<(Id, &[u8])> {
    let mut parts = fields.splitn(3, |byte| *byte == 0);
    let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse::<u64>().ok();
    let id = (number()?, number()?);
    Some((id, parts.next().unwrap_or_default()))
}

/// Asks the warden. Inside.
#[derive(Debug)]
pub(super) struct FromInside;

impl FromInside {
    /// Errors: those of the warden; EACCES where there is none.
    fn ask(what: u8, id: Id, name: &[u8]) -> Result<Option<OwnedFd>, Errno> {
        let warden = WARDEN.get().ok_or(Errno::ACCESS)?;
        let mut fields = format!("{}\0{}", id.0, id.1).into_bytes();
        if !name.is_empty() {
            fields.push(0);
            fields.extend_from_slice(name);
        }
        let answer = warden.ask(what, &fields).map_err(|error| {
            tracing::warn!("the warden does not answer: {error}");
            Errno::ACCESS
        })?;
        match answer.kind {
            DONE => Ok(answer.fd),
            _ => Err(answer.words.parse().map_or(Errno::ACCESS, Errno::from_raw_os_error)),
        }
    }

    fn open(what: u8, id: Id, name: &[u8]) -> Result<OwnedFd, Errno> {
        Self::ask(what, id, name)?.ok_or(Errno::ACCESS)
    }
}

impl Opener for FromInside {
    fn make(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let name = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
        // A slash at the end would be lost.
        let is_whole = is_component(name) && path.as_os_str().as_bytes().ends_with(name);
        let directory = path.parent().filter(|_| is_whole).ok_or(Errno::ACCESS)?;
        match Self::ask(MAKE, id_of(directory)?, name) {
            Ok(Some(made)) => Ok(made),
            // This process has no number for it, and lost it.
            Ok(None) => {
                let _ = id_of(path).map(|id| self.remove(id));
                Err(Errno::MFILE)
            }
            Err(errno) => {
                if errno == Errno::DQUOT {
                    tracing::warn!(
                        "no overlay is made where {HELD_MAX} are in use, or after {MADE_MAX} of one process: commit some, or start it anew"
                    );
                }
                Err(errno)
            }
        }
    }

    fn again(&self, file: BorrowedFd<'_>, read_only: bool) -> Result<OwnedFd, Errno> {
        let stat = fstat(file)?;
        Self::open(if read_only { READ } else { WRITE }, (stat.st_dev, stat.st_ino), b"")
    }

    fn remove(&self, identity: Id) -> Result<(), Errno> {
        Self::ask(REMOVE, identity, b"").map(drop)
    }

    fn sync(&self, directory: &Path) -> Result<(), Errno> {
        Self::ask(SYNC, id_of(directory)?, b"").map(drop)
    }
}

/// The numbers of what a name leads to.
fn id_of(path: &Path) -> Result<Id, Errno> {
    let path = if path == Path::new("") { Path::new(".") } else { path };
    let meta = fs::metadata(path).map_err(|error| errno_of(&error))?;
    Ok((meta.dev(), meta.ino()))
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The directory in which a disk may get new overlays: that of the image on top. `None`: it gets none.
///
/// * `told_within`: of a disk that another process handed over, a name counts only there.
pub(crate) fn directory_for(
    word: SandboxWord,
    disk: &Disk,
    told_within: Option<&Reach>,
) -> Option<Named> {
    if word == SandboxWord::Strict || disk.is_read_only() {
        return None;
    }
    let layers = disk.layers();
    let top = layers.first()?;
    let is_file = top.file().is_some_and(|file| file.kind() == Kind::Regular);
    let directory = directory_of(top.name()).filter(|_| is_file)?;
    if told_within.is_some_and(|reach| !reach.has(&directory)) {
        return None;
    }
    named(directory)
}

/// A directory as it is now.
pub(crate) fn named(directory: PathBuf) -> Option<Named> {
    let id = id_of(&directory).ok()?;
    Some((directory, id))
}

/// Files of the chain of a disk.
fn files_of(disk: &Disk) -> Vec<Id> {
    let layers = disk.layers();
    let storages = layers.iter().flat_map(|layer| [layer.file(), layer.data_storage()]);
    storages.flatten().filter_map(|file| Storage::identity(file)).collect()
}

/// What the warden holds for one disk, as far as this side knows. What it may let go of is told: a file that somebody holds keeps its space when
/// it has lost its name, and its file system cannot be unmounted.
#[derive(Debug, Default)]
pub(crate) struct HeldForDisk {
    directory: OnceLock<Id>,
    files: Mutex<Vec<Id>>,
}

impl HeldForDisk {
    /// The warden was told of this directory, for this disk.
    pub(crate) fn has(&self, directory: &Named) {
        let _ = self.directory.set(directory.1);
    }

    /// Before and after a command that changes the chain.
    pub(crate) fn settle(&self, disk: &Disk) {
        self.are_now(files_of(disk));
    }

    /// The disk is served no longer.
    pub(crate) fn end(&self) {
        self.are_now(Vec::new());
        if let Some(directory) = self.directory.get() {
            let _ = FromInside::ask(LEAVE, *directory, b"");
        }
    }

    fn are_now(&self, now: Vec<Id>) {
        if WARDEN.get().is_none() {
            return;
        }
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in files.iter().filter(|id| !now.contains(id)) {
            let _ = FromInside::ask(FORGET, *gone, b"");
        }
        *files = now;
    }
}

#[cfg(test)]
mod tests;
