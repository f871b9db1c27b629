//! New overlays of a process in its sandbox.
//!
//! Inside, only the images can be opened that were there when the process entered; nothing else of
//! their directories. So the helper process makes the overlay of a `ringdisk ctl snapshot`, and
//! opens it again when a command needs that (`opener.rs` asks for it).
//!
//! Promises: directories and files are those that it has descriptors of; what they are called
//! counts when one is made or removed only. A file that was there is never opened, changed or
//! removed: only what was made here is opened again, or removed while its name still leads to it.
//! No descriptor that could hold a lock stays here, and none of a file or directory that is of no
//! disk any more. There is a limit to how many are made.
//!
//! Orders: a letter and fields between zero bytes, the first two of which are device and inode
//! number of a directory or file. The answer to one that fails has the errno in it.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use ringdisk_disk::Format;
use ringdisk_disk::names_note::{Names, change_note};
use ringdisk_sandbox::User;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, statat, unlinkat,
};
use rustix::io::Errno;

use super::answer::{Answer, DONE, REFUSED};
use super::chain::{self, Chain, Image};
use super::named::{Id, Named, pin};
use crate::helper::mark;

/// Makes a file; after the numbers of the directory comes its name, or, where `--allow-path` names
/// that directory, the path from there.
pub(crate) const MAKE: u8 = b'o';
/// Opens a file again, to read it only.
pub(crate) const READ: u8 = b'r';
/// The same to read and write it.
pub(crate) const WRITE: u8 = b'w';
/// Removes a file.
pub(crate) const REMOVE: u8 = b'x';
/// Makes the names of a directory durable.
pub(crate) const SYNC: u8 = b'y';
/// A file is written no more.
pub(crate) const LOWER: u8 = b'q';
/// The header of an image names another backing file; after the numbers comes the line of its note.
pub(crate) const NOTE: u8 = b'n';
/// The same, before it does.
pub(crate) const NOTE_BOTH: u8 = b'b';
/// A file is of no disk any more.
pub(crate) const FORGET: u8 = b'z';
/// A disk that had its overlays in a directory is served no longer.
pub(crate) const LEAVE: u8 = b'l';

/// Files that are held at a time: a chain has 256 images at most, and a process has 1024
/// descriptors where nobody says otherwise.
pub(crate) const HELD_MAX: usize = 512;
/// Files that are made while the process serves: one each ten minutes for a year.
pub(crate) const MADE_MAX: u32 = 1 << 16;

/// What is held for new overlays. Outside.
#[derive(Debug, Default)]
pub(crate) struct Overlays {
    /// One for each disk.
    directories: Vec<(Id, Rc<OwnedFd>)>,
    /// Those that `--allow-path` names: files may be made at any depth.
    trees: Vec<(Id, Rc<OwnedFd>)>,
    /// Those of targets of mirrors, as long as the disk has one there, or an overlay.
    lent: Vec<(Id, Rc<OwnedFd>)>,
    files: Vec<Made>,
    /// Files that were made.
    count: u32,
    /// Who makes them; `None`: this process.
    maker: Option<User>,
    /// What they are marked with; empty: nothing.
    mark: String,
    /// What was there before.
    pub(crate) below: Chain,
}

/// What the target is for that a user has named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A mirror: the disk may switch over to it.
    Top,
    /// A backup: it is written, and nothing else.
    Copy,
}

/// A file that was made here, or is the target of a mirror or a backup, which a user has named.
#[derive(Debug)]
struct Made {
    id: Id,
    /// What it is opened as, and what an image may name it as.
    format: Format,
    directory: Rc<OwnedFd>,
    name: Vec<u8>,
    /// A note names it, or has named it; or it is the user's. It is not removed.
    is_named: bool,
    /// The target of a backup: no image names it on the word of the process.
    is_copy: bool,
    /// `O_PATH`: while it is open no other file gets these numbers.
    file: OwnedFd,
}

impl Overlays {
    /// Takes hold of directories. One whose name leads elsewhere by now is none.
    ///
    /// * `trees`: directories in which files may be made at any depth.
    /// * `maker`: who must be allowed to make files there, and owns them; `None`: this process.
    /// * `mark`: what they are marked with; empty: nothing.
    /// * `images`: of the chains.
    pub(crate) fn hold(
        directories: &[Named],
        trees: &[Named],
        maker: Option<User>,
        mark: &str,
        images: &[Image],
    ) -> Overlays {
        let held = |(path, id): &Named| {
            let directory = pin(path, *id).filter(|fd| is_of_type(fd, FileType::Directory))?;
            Some((*id, Rc::new(directory)))
        };
        Overlays {
            directories: directories.iter().filter_map(held).collect(),
            trees: trees.iter().filter_map(held).collect(),
            maker,
            mark: mark.to_owned(),
            below: Chain::hold(images),
            ..Overlays::default()
        }
    }

    /// Does what an order asks for. `None`: it is none of these.
    pub(crate) fn carry_out(&mut self, what: u8, fields: &[u8]) -> Option<Answer> {
        if ![MAKE, READ, WRITE, REMOVE, SYNC, FORGET, LEAVE, LOWER, NOTE, NOTE_BOTH].contains(&what)
        {
            return None;
        }
        let Some((id, rest)) = numbers(fields) else { return Some(answer(Err(Errno::INVAL))) };
        // Where there is no name, nothing may stand in its place.
        if ![MAKE, NOTE, NOTE_BOTH].contains(&what) && !rest.is_empty() {
            return Some(answer(Err(Errno::INVAL)));
        }
        Some(match what {
            MAKE => answer(self.make(id, rest).map(Some)),
            READ => answer(self.again(id, OFlags::RDONLY).map(Some)),
            WRITE if self.made(id).is_err() => {
                answer(self.below.write(id, self.maker, &self.mark).map(Some))
            }
            WRITE => answer(self.again(id, OFlags::RDWR).map(Some)),
            NOTE => answer(self.note(id, rest, true).map(|()| None)),
            NOTE_BOTH => answer(self.note(id, rest, false).map(|()| None)),
            LOWER => {
                self.below.lower(id);
                answer(Ok(None))
            }
            REMOVE => answer(self.remove(id).map(|()| None)),
            SYNC => answer(self.sync(id).map(|()| None)),
            FORGET => {
                self.files.retain(|made| made.id != id);
                self.lent.retain(|(_, directory)| Rc::strong_count(directory) > 1);
                self.below.forget(id);
                answer(Ok(None))
            }
            _ => {
                for held in [&mut self.directories, &mut self.trees] {
                    if let Some(at) = held.iter().position(|(held, _)| *held == id) {
                        held.remove(at);
                        break;
                    }
                }
                answer(Ok(None))
            }
        })
    }

    fn directory(&self, id: Id) -> Result<&Rc<OwnedFd>, Errno> {
        let held = self.directories.iter().chain(&self.trees).chain(&self.lent);
        let mut held = held.filter(|(held, _)| *held == id);
        held.next().map(|(_, directory)| directory).ok_or(Errno::ACCESS)
    }

    fn made(&self, id: Id) -> Result<usize, Errno> {
        self.files.iter().position(|made| made.id == id).ok_or(Errno::ACCESS)
    }

    /// Takes hold of the target of a mirror or a backup, on the word of a user: the process may
    /// write it; beside that of a mirror it may make overlays if it may make any. It is never
    /// removed.
    ///
    /// * `path`: absolute, without links.
    /// * `format`: what the user says that it is.
    /// * `purpose`: that of a backup is not marked, and its directory not lent.
    ///
    /// Errors: ENOENT: another file has the name by now; EDQUOT: too many are held; those of
    /// open(2).
    pub(crate) fn adopt(
        &mut self,
        path: &Path,
        id: Id,
        format: Format,
        purpose: Purpose,
    ) -> Result<(), Errno> {
        let is_copy = purpose == Purpose::Copy;
        // One of a backup becomes one of a mirror when a user says so.
        if self.made(id).is_ok_and(|at| is_copy || !self.files[at].is_copy) {
            return Ok(());
        }
        if self.files.len() >= HELD_MAX {
            return Err(Errno::DQUOT);
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::INVAL);
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, parent, flags | OFlags::DIRECTORY, Mode::empty())?;
        let file = openat(&directory, name, flags, Mode::empty())?;
        let (of, stat) = (fstat(&directory)?, fstat(&file)?);
        if (stat.st_dev, stat.st_ino) != id {
            return Err(Errno::NOENT);
        }
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if is_file && !is_copy && !self.mark.is_empty() {
            // Where it cannot be marked, the disk does not switch over to it.
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let _ = openat(CWD, link(file.as_fd()), flags, Mode::empty())
                .map(|file| mark::set(&file, &self.mark));
        }
        let of = (of.st_dev, of.st_ino);
        // That of a backup keeps no directory lent.
        let known = self.directory(of).ok().filter(|_| !is_copy).cloned();
        let is_known = known.is_some();
        let directory = known.unwrap_or_else(|| Rc::new(directory));
        let makes_any = !self.directories.is_empty() || !self.trees.is_empty();
        if is_file && !is_copy && makes_any && !is_known {
            self.lent.push((of, Rc::clone(&directory)));
        }
        let name = name.as_bytes().to_vec();
        self.files.retain(|made| made.id != id);
        self.files.push(Made { id, format, directory, name, is_named: true, is_copy, file });
        Ok(())
    }

    /// The directory of a new file, and its name there.
    ///
    /// * `path`: from the directory with this number.
    fn place<'a>(&self, directory: Id, path: &'a [u8]) -> Result<(Rc<OwnedFd>, &'a [u8]), Errno> {
        if is_component(path) {
            return Ok((Rc::clone(self.directory(directory)?), path));
        }
        let slash = path.iter().rposition(|byte| *byte == b'/').ok_or(Errno::ACCESS)?;
        let (parent, name) = (&path[..slash], &path[slash + 1..]);
        let tree = self.trees.iter().find(|(held, _)| *held == directory);
        let is_path = !parent.is_empty() && is_component(name);
        let tree = tree.filter(|_| is_path).ok_or(Errno::ACCESS)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Links of others may lead to another place of the tree.
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let root = tree.1.as_fd();
        let open = || openat2(root, parent, flags, Mode::empty(), within);
        let open = match self.maker {
            Some(user) => user.look(open)?,
            None => open(),
        };
        // It leads out of the tree.
        open.map(|parent| (Rc::new(parent), name)).map_err(|errno| match errno {
            Errno::XDEV => Errno::ACCESS,
            errno => errno,
        })
    }

    fn make(&mut self, directory: Id, path: &[u8]) -> Result<OwnedFd, Errno> {
        let (directory, name) = self.place(directory, path)?;
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
        if !self.mark.is_empty() {
            // Where it cannot be marked, the next process of the mount does not go on with it, and
            // says so.
            let _ = mark::set(&open, &self.mark);
        }
        // Until it is said what it names it names nothing.
        let noted = match change_note(&open, &Names::default().line(), true) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            noted => noted,
        };
        let held = noted.and_then(|()| fstat(&open)).and_then(|stat| {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let file = openat(CWD, link(open.as_fd()), flags, Mode::empty())?;
            let (id, directory) = ((stat.st_dev, stat.st_ino), Rc::clone(&directory));
            let (name, format) = (name.to_vec(), Format::Qcow2);
            Ok(Made { id, format, directory, name, is_named: false, is_copy: false, file })
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

    /// Changes the note of the names of an image. A file that was made here names what the process
    /// says as long as that is known.
    fn note(&mut self, id: Id, line: &[u8], is_done: bool) -> Result<(), Errno> {
        let made = self.files.iter().filter(|made| !made.is_copy);
        let made: Vec<_> = made.map(|made| (made.id, made.format)).collect();
        let named = Cell::new(None);
        let is_made = |id, format| {
            let is_made = made.contains(&(id, format));
            named.set(is_made.then_some(id).or(named.get()));
            is_made
        };
        match self.made(id) {
            Err(_) => self.below.note(id, line, is_done, is_made)?,
            Ok(index) => {
                let (file, below) = (&self.files[index], &self.below);
                let is_known = |id, format| {
                    is_made(id, format)
                        || below.has(id, format)
                        || below.is_named_by_user(id, format)
                };
                let directory = link(file.directory.as_fd());
                let line = chain::checked(line, &Names::default(), &directory, is_known)?;
                match change_note(&file.file, &line, is_done) {
                    // There are no notes, so there is none that would refuse the name.
                    Err(Errno::OPNOTSUPP) => {}
                    changed => changed?,
                }
                let below = Names::parse(&line).and_then(|names| names.backing());
                if is_done && let Some((path, format)) = below {
                    self.below.add(directory.join(path), format);
                }
            }
        }
        if let Some(made) = named.get().and_then(|id| self.made(id).ok()) {
            self.files[made].is_named = true;
        }
        Ok(())
    }

    /// Removes a file that was made here. One that a note has named stays: another file could get
    /// its name, and would be what an image names.
    fn remove(&mut self, id: Id) -> Result<(), Errno> {
        let index = self.made(id)?;
        if self.files[index].is_named {
            return Err(Errno::BUSY);
        }
        let made = self.files.swap_remove(index);
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
pub(crate) fn is_component(name: &[u8]) -> bool {
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

#[cfg(test)]
mod tests;
