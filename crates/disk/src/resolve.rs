//! Opens the files that an image names, inside the allowed directories only.
//!
//! Promises: whatever an image says, and whatever happens to the file system meanwhile, the file
//! that is opened was reached by steps inside an allowed directory, or is a file that the user
//! named. A path is walked one component at a time from a directory that is held open; each step is
//! an `openat` of one name with `O_NOFOLLOW`, and `..` never is one, so the kernel follows no link
//! on its own and leaves no directory. (`openat2` would do it too; a filter of system calls cannot
//! see its flags, so a sandbox forbids it.) Links are read and their text is walked by the same
//! rules. Nothing outside the allowed directories is touched, not even to see whether it exists.
//! FIFOs, sockets and character devices are never opened (checked on an `O_PATH` descriptor first,
//! and again after the open, which does not block).
//!
//! Control path; called by the thread that opens an image.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use ringdisk_storage::Opener;
use rustix::fs::{self, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::name::{printable_path, shell_path};
use crate::{Cause, Error, ErrorKind};

/// Symbolic links followed for one name; the kernel's own limit (`MAXSYMLINKS`).
pub const SYMLINKS_MAX: u32 = 40;

/// Components walked for one name. A path of `PATH_MAX` bytes has at most 2048; links add theirs.
const COMPONENTS_MAX: u32 = 4096;

/// How often a name is tried again when the file changed between the check and the open.
const RACES_MAX: u32 = 16;

/// An opened file and what it is.
#[derive(Debug)]
pub struct Opened {
    /// The descriptor; not `O_NONBLOCK`.
    pub fd: OwnedFd,
    /// Device and inode; for a block device a pair made of its device number.
    pub identity: (u64, u64),
}

/// How to open the file at the end of a path.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Open for reading and writing.
    pub write: bool,
    /// `O_DIRECT`, where the file system has it.
    pub direct: bool,
}

/// A directory with everything below, or one file.
#[derive(Debug)]
enum Allowed {
    Directory {
        /// As the user spelled it, made absolute, and as the kernel calls it.
        paths: [PathBuf; 2],
        fd: OwnedFd,
    },
    File {
        paths: [PathBuf; 2],
        /// `O_PATH`.
        fd: OwnedFd,
    },
}

/// The allowed directories and files.
#[derive(Debug, Default)]
pub struct Resolver {
    allowed: Vec<Allowed>,
    opener: Option<Arc<dyn Opener>>,
}

/// Position of a walk: a held directory below an allowed one.
struct Place<'a> {
    root: &'a Path,
    root_fd: BorrowedFd<'a>,
    /// Directories below the root that lead here, so `..` goes back the way it came.
    below: Vec<OwnedFd>,
}

/// Result of one step of a walk.
enum Step {
    Done(OwnedFd),
    /// A link: its text.
    Link(PathBuf),
}

impl Resolver {
    /// Allows directories with all below, and single files.
    ///
    /// * `paths`: named by the user, so links in them are followed.
    ///
    /// Errors: as of `open(2)`, and `NotAnImage` for a path that is neither a directory nor an
    /// image.
    pub fn new(paths: &[PathBuf]) -> Result<Resolver, Error> {
        let mut resolver = Resolver::default();
        for path in paths {
            resolver.allow(path)?;
        }
        Ok(resolver)
    }

    /// Uses `opener` for files that this process may not open. The same paths are allowed.
    #[must_use]
    pub fn asking(self, opener: Option<&Arc<dyn Opener>>) -> Resolver {
        Resolver { opener: opener.cloned(), ..self }
    }

    /// Allows one more directory or file.
    ///
    /// Errors: as [`Resolver::new`].
    pub fn allow(&mut self, path: &Path) -> Result<(), Error> {
        let doing = format!("cannot allow the path '{}'", printable_path(path));
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty()).map_err(|e| Error::os(&doing, e))?;
        let stat = fs::fstat(&fd).map_err(|e| Error::os(&doing, e))?;
        let real = real_path(&fd).map_err(|e| Error::os(&doing, e))?;
        let given = absolute(path).map_err(|e| Error::os(&doing, e))?;
        let paths = [given, real];
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.allowed.push(Allowed::Directory { paths, fd }),
            FileType::RegularFile | FileType::BlockDevice => {
                self.allowed.push(Allowed::File { paths, fd });
            }
            other => return Err(not_an_image(&printable_path(path), other)),
        }
        Ok(())
    }

    /// The allowed paths, for messages.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for allowed in &self.allowed {
            let (Allowed::Directory { paths, .. } | Allowed::File { paths, .. }) = allowed;
            if !text.is_empty() {
                text.push_str(", ");
            }
            text.push('\'');
            text.push_str(&printable_path(&paths[0]));
            text.push('\'');
        }
        if text.is_empty() {
            text.push_str("none");
        }
        text
    }

    /// The first allowed directory; base of relative names when the image has no path.
    pub fn first_directory(&self) -> Option<&Path> {
        self.allowed.iter().find_map(|allowed| match allowed {
            Allowed::Directory { paths, .. } => Some(paths[0].as_path()),
            Allowed::File { .. } => None,
        })
    }

    /// Opens a file that an image names.
    ///
    /// * `path`: absolute.
    ///
    /// Errors: `NotAllowed` when the way leads outside, `NotFound`, `NotAnImage` (directory, FIFO,
    /// device), `PermissionDenied`, `Loop` (symbolic links), `Io`.
    pub fn open(&self, path: &Path, access: Access) -> Result<Opened, Error> {
        for _ in 0..RACES_MAX {
            match self.walk(path, access) {
                Err(WalkError::Raced) => {}
                Err(WalkError::Outside) => return Err(self.outside(path)),
                Err(error) => return Err(of_walk(error, &printable_path(path))),
                Ok(opened) => return Ok(opened),
            }
        }
        Err(Error::new(
            ErrorKind::NotAllowed,
            format!(
                "'{}' was replaced again and again while it was being opened",
                printable_path(path)
            ),
        ))
    }

    fn outside(&self, path: &Path) -> Error {
        let name = printable_path(path);
        Error::new(
            ErrorKind::NotAllowed,
            format!(
                "'{name}' is, or leads through a link or '..', outside the allowed paths ({}); if \
                 you trust the image, allow this file with `--allow-path {}`, or its directory",
                self.describe(),
                shell_path(path),
            ),
        )
        .because(Cause::PathNotAllowed)
    }

    /// The single file that the user allowed under this path.
    fn allowed_file(&self, path: &Path) -> Option<&OwnedFd> {
        self.allowed.iter().find_map(|allowed| match allowed {
            Allowed::File { paths, fd } if paths.iter().any(|p| p == path) => Some(fd),
            _ => None,
        })
    }

    /// The deepest allowed directory that the path starts with, and the rest of the path.
    fn enter<'a>(&'a self, path: &Path) -> Option<(Place<'a>, PathBuf)> {
        let mut best: Option<(usize, Place<'a>, PathBuf)> = None;
        for allowed in &self.allowed {
            let Allowed::Directory { paths, fd } = allowed else {
                continue;
            };
            for prefix in paths {
                let Ok(rest) = path.strip_prefix(prefix) else {
                    continue;
                };
                let depth = prefix.components().count();
                if best.as_ref().is_none_or(|(most, ..)| depth > *most) {
                    let place = Place { root: &paths[1], root_fd: fd.as_fd(), below: Vec::new() };
                    best = Some((depth, place, rest.to_path_buf()));
                }
            }
        }
        best.map(|(_, place, rest)| (place, rest))
    }

    /// One attempt.
    fn walk(&self, path: &Path, access: Access) -> Result<Opened, WalkError> {
        let mut target = path.to_path_buf();
        let mut links = 0;
        let mut components = 0;
        // Each turn starts at an allowed directory; a link or `..` that leaves it starts another.
        'again: loop {
            if let Some(fd) = self.allowed_file(&target) {
                return reopen(fd, access, self.opener.as_deref());
            }
            let (mut place, rest) = self.enter(&target).ok_or(WalkError::Outside)?;
            let mut todo: Vec<OsString> = reversed(&rest);
            while let Some(name) = todo.pop() {
                components += 1;
                if components > COMPONENTS_MAX {
                    return Err(WalkError::Os(Errno::NAMETOOLONG));
                }
                if name == ".." {
                    if place.below.pop().is_none() {
                        let mut above = place.root.parent().unwrap_or(place.root).to_path_buf();
                        append(&mut above, todo);
                        target = above;
                        continue 'again;
                    }
                    continue;
                }
                let last = todo.is_empty();
                let step = if last {
                    open_last(place.fd(), &name, access, self.opener.as_deref())?
                } else {
                    open_directory(place.fd(), &name)?
                };
                match step {
                    Step::Done(fd) if last => {
                        let identity = check(&fd)?;
                        return Ok(Opened { fd, identity });
                    }
                    Step::Done(fd) => place.below.push(fd),
                    Step::Link(text) => {
                        links += 1;
                        if links > SYMLINKS_MAX {
                            return Err(WalkError::Os(Errno::LOOP));
                        }
                        if text.is_absolute() {
                            target = text;
                            append(&mut target, todo);
                            continue 'again;
                        }
                        todo.extend(reversed(&text));
                    }
                }
            }
            // Nothing left to open: the path named a directory.
            return Err(WalkError::NotAnImage(FileType::Directory));
        }
    }
}

impl Place<'_> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.below.last().map_or(self.root_fd, AsFd::as_fd)
    }
}

/// Why a walk ended.
enum WalkError {
    Os(Errno),
    Outside,
    NotAnImage(FileType),
    /// The file was replaced between two steps.
    Raced,
    /// There is no `/proc` to open a held file by.
    NoProc,
}

impl From<Errno> for WalkError {
    fn from(errno: Errno) -> WalkError {
        WalkError::Os(errno)
    }
}

/// Components in reverse order; a leading `/` and `.` are dropped.
fn reversed(path: &Path) -> Vec<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_os_string()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    let mut names: Vec<OsString> = names.collect();
    names.reverse();
    names
}

fn append(path: &mut PathBuf, mut reversed: Vec<OsString>) {
    while let Some(name) = reversed.pop() {
        path.push(name);
    }
}

/// Opens a name of a directory: one that is there, and no link. It never leaves the directory.
fn open_name(at: BorrowedFd<'_>, name: &OsStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    debug_assert!(!name.as_bytes().contains(&b'/') && name != "..");
    fs::openat(at, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

fn open_directory(at: BorrowedFd<'_>, name: &OsStr) -> Result<Step, WalkError> {
    match open_name(at, name, OFlags::PATH | OFlags::DIRECTORY) {
        Ok(fd) => Ok(Step::Done(fd)),
        // A link is ENOTDIR by O_DIRECTORY, or ELOOP by O_NOFOLLOW.
        Err(errno @ (Errno::LOOP | Errno::NOTDIR)) => read_link(at, name, errno),
        Err(errno) => Err(walk_error(errno)),
    }
}

/// * `opener`: asked where this process is refused.
fn open_last(
    at: BorrowedFd<'_>,
    name: &OsStr,
    access: Access,
    opener: Option<&dyn Opener>,
) -> Result<Step, WalkError> {
    let looked_at = open_name(at, name, OFlags::PATH).map_err(walk_error)?;
    let stat = fs::fstat(&looked_at)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
        // The link itself is held, so this is its text whatever the name has become.
        return link_text(fs::readlinkat(&looked_at, c"", Vec::new())?);
    }
    let before = check_stat(&stat)?;
    let opened = open_maybe_direct(open_flags(access), |flags| open_name(at, name, flags));
    let opened = match (opened, opener) {
        // The very file that was looked at.
        (Err(Errno::ACCESS), Some(opener)) => opener.again(looked_at.as_fd(), !access.write),
        (opened, _) => opened,
    };
    let fd = match opened {
        Ok(fd) => fd,
        Err(Errno::LOOP | Errno::NOENT | Errno::NXIO) => return Err(WalkError::Raced),
        Err(errno) => return Err(walk_error(errno)),
    };
    if check(&fd)? != before {
        return Err(WalkError::Raced);
    }
    blocking(&fd)?;
    Ok(Step::Done(fd))
}

/// The text of a link by name; `errno` when it is none after all.
fn read_link(at: BorrowedFd<'_>, name: &OsStr, errno: Errno) -> Result<Step, WalkError> {
    match fs::readlinkat(at, name, Vec::new()) {
        Ok(text) => link_text(text),
        // Not a link: it was replaced if the error said that it was one.
        Err(Errno::INVAL) if errno == Errno::LOOP => Err(WalkError::Raced),
        Err(Errno::INVAL) => Err(WalkError::Os(errno)),
        Err(other) => Err(WalkError::Os(other)),
    }
}

fn link_text(text: CString) -> Result<Step, WalkError> {
    if text.is_empty() {
        return Err(WalkError::Os(Errno::NOENT));
    }
    let text = OsString::from_vec(text.into_bytes());
    Ok(Step::Link(PathBuf::from(text)))
}

/// EAGAIN: another process has a lease on the file, which it is giving up.
fn walk_error(errno: Errno) -> WalkError {
    match errno {
        Errno::AGAIN => WalkError::Raced,
        errno => WalkError::Os(errno),
    }
}

fn open_flags(access: Access) -> OFlags {
    let mode = if access.write { OFlags::RDWR } else { OFlags::RDONLY };
    let direct = if access.direct { OFlags::DIRECT } else { OFlags::empty() };
    mode | direct | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC
}

/// Opens; a file system without `O_DIRECT` (EINVAL) gets the plain open, and the storage layer
/// decides what to say about it.
fn open_maybe_direct(
    flags: OFlags,
    open: impl Fn(OFlags) -> Result<OwnedFd, Errno>,
) -> Result<OwnedFd, Errno> {
    match open(flags) {
        Err(Errno::INVAL) if flags.contains(OFlags::DIRECT) => open(flags - OFlags::DIRECT),
        result => result,
    }
}

/// Takes `O_NONBLOCK` off again: io_uring reads it as "never wait" on some file systems.
fn blocking(fd: &OwnedFd) -> Result<(), Errno> {
    let flags = fs::fcntl_getfl(fd)?;
    fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK)
}

/// Opens a held `O_PATH` descriptor for real; no name is looked up again.
fn reopen(fd: &OwnedFd, access: Access, opener: Option<&dyn Opener>) -> Result<Opened, WalkError> {
    let path = proc_path(fd);
    let flags = open_flags(access);
    let opened = open_maybe_direct(flags, |flags| fs::open(&path, flags, Mode::empty()));
    let opened = match (opened, opener) {
        (Err(Errno::ACCESS), Some(opener)) => opener.again(fd.as_fd(), !access.write),
        (opened, _) => opened,
    };
    let fd = match opened {
        Ok(fd) => fd,
        // The file is held, so what is not there is the way to it.
        Err(Errno::NOENT) => return Err(WalkError::NoProc),
        Err(errno) => return Err(WalkError::Os(errno)),
    };
    let identity = check(&fd)?;
    blocking(&fd)?;
    Ok(Opened { fd, identity })
}

/// A file that the user named, held without being opened: later opens lead to this very file.
#[derive(Debug)]
pub struct Held {
    fd: OwnedFd,
    name: String,
}

impl Held {
    /// Looks up a path that the user named: links are followed.
    ///
    /// Errors: as of `open(2)`, `NotAnImage` for directories, FIFOs, sockets, character devices.
    pub fn named(path: &Path) -> Result<Held, Error> {
        let name = printable_path(path);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty())
            .map_err(|errno| Error::not_opened("the image ", &name, errno))?;
        identify(&fd, &name)?;
        Ok(Held { fd, name })
    }

    /// Opens it.
    ///
    /// * `opener`: asked where this process is refused.
    ///
    /// Errors: as of `open(2)`, `NotAnImage`.
    pub fn open(&self, access: Access, opener: Option<&dyn Opener>) -> Result<Opened, Error> {
        reopen(&self.fd, access, opener).map_err(|error| of_walk(error, &self.name))
    }
}

/// An error of a walk that is not about its way.
fn of_walk(error: WalkError, name: &str) -> Error {
    match error {
        WalkError::NotAnImage(kind) => not_an_image(name, kind),
        WalkError::Os(errno) => Error::not_opened("", name, errno),
        WalkError::NoProc => {
            let why = "/proc is not there; mount it with `mount -t proc proc /proc`";
            let text = format!("cannot open '{name}': {why}");
            let (file, why) = (name.to_owned(), why.to_owned());
            Error::new(ErrorKind::Unsupported, text).because(Cause::Storage(
                ringdisk_storage::Cause::NotOpened { file, why, is_missing: false },
            ))
        }
        WalkError::Outside | WalkError::Raced => Error::not_opened("", name, Errno::AGAIN),
    }
}

/// What an inherited descriptor is.
///
/// Errors: `NotAnImage`, `Io`.
pub fn identify(fd: &OwnedFd, name: &str) -> Result<(u64, u64), Error> {
    check(fd).map_err(|error| of_walk(error, name))
}

fn check(fd: &OwnedFd) -> Result<(u64, u64), WalkError> {
    check_stat(&fs::fstat(fd)?)
}

/// The identity of a regular file or block device.
fn check_stat(stat: &Stat) -> Result<(u64, u64), WalkError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((stat.st_dev, stat.st_ino)),
        // Several device nodes may lead to one device. No file system has this device number.
        FileType::BlockDevice => Ok((u64::MAX, stat.st_rdev)),
        other => Err(WalkError::NotAnImage(other)),
    }
}

fn not_an_image(name: &str, kind: FileType) -> Error {
    let is_directory = kind == FileType::Directory;
    let kind = match kind {
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::Symlink => "a symbolic link",
        _ => "of an unknown kind",
    };
    Error::new(
        ErrorKind::NotAnImage,
        format!("'{name}' is {kind}; an image is a regular file or a block device"),
    )
    .because(
        is_directory.then(|| {
            Cause::Storage(ringdisk_storage::Cause::IsDirectory { file: name.to_owned() })
        }),
    )
}

fn proc_path(fd: &OwnedFd) -> PathBuf {
    use std::os::fd::AsRawFd;
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// What the kernel calls an open file.
fn real_path(fd: &OwnedFd) -> Result<PathBuf, Errno> {
    let text = fs::readlinkat(fs::CWD, proc_path(fd), Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(text.into_bytes())))
}

/// The path from the root, links and `..` left as they are.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Errno> {
    std::path::absolute(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
}
