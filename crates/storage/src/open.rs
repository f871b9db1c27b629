//! Opening files and block devices, and taking over descriptors.
//!
//! Control thread; may block for as long as the file system takes.
//!
//! Promises: what is opened is a regular file or a block device, in the mode asked for, locked,
//! with limits that were verified; on an error nothing stays open, locked or newly created.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

use ringdisk_ring::Fd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::block_locks::BlockLocks;
use crate::cause::Cause;
use crate::error::{Error, ErrorKind, not_opened, words};
use crate::file::{File, real_len};
use crate::kinds::{Kind, Lock};
use crate::options::OpenOptions;
use crate::sysfs::queue_number;
use crate::{ffi, lock, probe};

/// Opens by path.
pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<File, Error> {
    let name = path.to_string_lossy().into_owned();
    check_options(&name, options)?;
    let (fd, created) = open_or_create(path, &name, options)?;
    let made = rustix::fs::fstat(&fd).ok().filter(|_| created);
    let result = adopt(fd, &name, options);
    if let (Err(_), Some(made)) = (&result, made) {
        let _ = options.remove_made(path, (made.st_dev, made.st_ino));
    }
    result
}

/// Takes over a descriptor: inherited, or opened by a caller that resolves names itself.
pub(crate) fn from_fd(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<File, Error> {
    check_options(name, options)?;
    adopt(fd, name, options)
}

fn check_options(name: &str, options: &OpenOptions) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidInput, format!("'{name}': {what}")));
    if options.lock == Lock::ForceShare && !options.read_only {
        return refuse("--force-share works only together with --read-only");
    }
    if (options.create || options.create_new) && options.read_only {
        return refuse("a file that is to be created cannot be opened read-only");
    }
    Ok(())
}

/// Returns whether the file was made just now.
fn open_or_create(
    path: &Path,
    name: &str,
    options: &OpenOptions,
) -> Result<(OwnedFd, bool), Error> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // NONBLOCK: opening a pipe or a tape must not wait. It is taken off again in `adopt`.
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let create = flags | OFlags::CREATE | OFlags::EXCL;
    let mode = Mode::from_raw_mode(0o644);
    let open = |flags| rustix::fs::openat(CWD, path, flags, mode);
    let result = if options.create_new {
        options.or_make(open(create), path).map(|fd| (fd, true))
    } else {
        match open(flags) {
            Err(Errno::NOENT) if options.create => match open(create) {
                // Another process created it meanwhile.
                Err(Errno::EXIST) => open(flags).map(|fd| (fd, false)),
                other => other.map(|fd| (fd, true)),
            },
            other => other.map(|fd| (fd, false)),
        }
    };
    result.map_err(|errno| open_error(path, name, options, errno))
}

fn open_error(path: &Path, name: &str, options: &OpenOptions, errno: Errno) -> Error {
    let why = match errno {
        Errno::NOENT if path.as_os_str() == OsStr::new("") => {
            return Error::explained("the image has an empty name".into(), errno);
        }
        Errno::NOENT if path.is_symlink() => "it is a symbolic link to something that is not there",
        Errno::NOENT => {
            let error = Error::not_opened_since(name, "there is no such file", errno);
            return error.because(not_opened(name, "there is no such file", true));
        }
        Errno::EXIST => {
            return Error::explained(format!("cannot create '{name}': it exists already"), errno);
        }
        Errno::ISDIR => "it is a directory, not a disk image",
        // What open(2) says to a socket, and to a device node without a driver.
        Errno::NXIO | Errno::NODEV => "it is no file, or a device that is not there",
        Errno::ACCESS | Errno::PERM if !options.read_only && can_read(path) => {
            let text = format!(
                "'{name}' may be read but not written: use --read-only, or change its mode"
            );
            return Error::explained(text, errno);
        }
        Errno::ACCESS | Errno::PERM => "permission denied; check its owner and mode",
        Errno::ROFS => {
            let text = format!("'{name}' is on a read-only file system: use --read-only");
            return Error::explained(text, errno);
        }
        Errno::TXTBSY => {
            let text = format!("cannot open '{name}' for writing: it is running or swapped to");
            return Error::explained(text, errno);
        }
        Errno::MFILE | Errno::NFILE => "too many open files; raise the limit (ulimit -n)",
        Errno::LOOP => "too many symbolic links",
        _ => {
            let why = words(&errno.into());
            let error = Error::system(format!("cannot open '{name}'"), errno);
            return error.because(not_opened(name, &why, false));
        }
    };
    Error::not_opened_since(name, why, errno)
}

fn can_read(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::READ_OK).is_ok()
}

/// From an open descriptor to storage.
fn adopt(fd: OwnedFd, name: &str, options: &OpenOptions) -> Result<File, Error> {
    let system =
        |what: &'static str| move |errno| Error::system(format!("cannot {what} '{name}'"), errno);
    let stat = rustix::fs::fstat(&fd).map_err(system("examine"))?;
    let kind = kind_of(&stat).map_err(|what| {
        let context =
            format!("'{name}' is {what}; a disk image is a regular file or a block device");
        let error = Error::new(ErrorKind::WrongType, context);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => error.because(Cause::IsDirectory { file: name.to_owned() }),
            _ => error,
        }
    })?;
    let direct = set_flags(&fd, name, options)?;
    if kind == Kind::BlockDevice
        && !options.read_only
        && ffi::is_read_only_device(fd.as_fd()).unwrap_or(false)
    {
        let context =
            format!("'{name}' is a read-only device: use --read-only (or blockdev --setrw)");
        return Err(Error::new(ErrorKind::ReadOnly, context));
    }
    let held = lock::acquire(fd.as_fd(), name, options.lock, options.read_only)?;
    let limits = probe::limits(fd.as_fd(), kind, &stat, direct).map_err(|errno| {
        let error = direct_unsupported(name);
        if errno == Errno::INVAL { error } else { error.with_source(errno) }
    })?;
    let len = real_len(fd.as_fd(), kind).map_err(system("find the length of"))?;
    // io_uring polls a file before its first read. The kernel asks the server of a FUSE file system
    // for that until the server has answered that it has no poll. So the file is polled here, where
    // the control thread may wait, before a queue thread reads it.
    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    let refuses_holes = kind == Kind::BlockDevice
        && !options.read_only
        && queue_number(stat.st_rdev, "write_zeroes_max_bytes") == Some(0);
    let whole_blocks = limits.offset_align > 1 && !options.read_only;
    let buffered_twin = (whole_blocks && kind == Kind::Regular)
        .then(|| open_buffered(fd.as_fd(), false, options))
        .and_then(|twin| {
            twin.inspect_err(|errno| {
                tracing::debug!("'{name}': no buffered descriptor beside the direct one: {errno}");
            })
            .ok()
        });
    let file = File {
        name: name.into(),
        fd: Fd::Raw(fd.as_raw_fd()),
        kind,
        read_only: options.read_only,
        no_flush: options.no_flush,
        limits,
        len: AtomicU64::new(len),
        gate: whole_blocks.then(BlockLocks::new),
        buffered_twin,
        uses_page_cache: AtomicBool::new(!limits.direct),
        flush_failed: AtomicI32::new(0),
        refuses_holes: AtomicBool::new(refuses_holes),
        identity: identity(&stat, kind),
        held: Mutex::new(held),
        is_shared: AtomicBool::new(false),
        abandoned: AtomicBool::new(false),
        pages: OnceLock::new(),
        owner: Arc::new(fd),
    };
    file.lock_twin();
    Ok(file)
}

fn kind_of(stat: &Stat) -> Result<Kind, &'static str> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Kind::Regular),
        FileType::BlockDevice => Ok(Kind::BlockDevice),
        FileType::Directory => Err("a directory"),
        FileType::CharacterDevice => Err("a character device"),
        FileType::Fifo => Err("a pipe"),
        FileType::Socket => Err("a socket"),
        FileType::Symlink => Err("a symbolic link"),
        _ => Err("neither a file nor a device"),
    }
}

/// Device and inode; for a block device the device itself, whichever node names it (no file has
/// inode 0).
fn identity(stat: &Stat, kind: Kind) -> (u64, u64) {
    match kind {
        Kind::BlockDevice => (stat.st_rdev, 0),
        _ => (stat.st_dev, stat.st_ino),
    }
}

/// Checks and sets the flags of the open file. Returns whether O_DIRECT is in effect.
fn set_flags(fd: &OwnedFd, name: &str, options: &OpenOptions) -> Result<bool, Error> {
    let flags = rustix::fs::fcntl_getfl(fd)
        .map_err(|errno| Error::system(format!("cannot examine '{name}'"), errno))?;
    let access = flags & OFlags::ACCMODE;
    let refuse =
        |kind, what: &str| Err(Error::new(kind, format!("the descriptor of '{name}' {what}")));
    if flags.contains(OFlags::PATH) || access == OFlags::WRONLY {
        return refuse(ErrorKind::InvalidInput, "was not opened for reading");
    }
    if access == OFlags::RDONLY && !options.read_only {
        return refuse(ErrorKind::ReadOnly, "was opened for reading only: use --read-only");
    }
    // NONBLOCK makes io_uring fail where it should wait; APPEND sends every write to the end.
    let mut wanted = flags - OFlags::NONBLOCK - OFlags::APPEND;
    wanted.set(OFlags::DIRECT, options.direct || flags.contains(OFlags::DIRECT));
    if wanted != flags {
        rustix::fs::fcntl_setfl(fd, wanted).map_err(|errno| match errno {
            Errno::INVAL if wanted.contains(OFlags::DIRECT) => direct_unsupported(name),
            _ => Error::system(format!("cannot set the open flags of '{name}'"), errno),
        })?;
    }
    Ok(wanted.contains(OFlags::DIRECT))
}

fn direct_unsupported(name: &str) -> Error {
    let context = format!(
        "'{name}' is on a file system without direct I/O (O_DIRECT): use --cache writeback, or \
         move the image to another file system"
    );
    let error = Error::new(ErrorKind::DirectUnsupported, context);
    error.because(Cause::NoDirectIo { file: name.to_owned() })
}

/// The same file once more, without O_DIRECT.
///
/// * `options`: who is asked.
pub(crate) fn open_buffered(
    fd: BorrowedFd<'_>,
    read_only: bool,
    options: &OpenOptions,
) -> Result<OwnedFd, Errno> {
    open_again(fd, read_only, OFlags::empty(), options)
}

/// The same file once more, through its descriptor.
///
/// * `more`: flags.
/// * `options`: who is asked.
pub(crate) fn open_again(
    fd: BorrowedFd<'_>,
    read_only: bool,
    more: OFlags,
    options: &OpenOptions,
) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let opened = rustix::fs::openat(CWD, path, access | more | OFlags::CLOEXEC, Mode::empty());
    options.or_again(opened, fd, read_only)
}
