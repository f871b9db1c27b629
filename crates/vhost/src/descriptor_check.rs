//! Decides which descriptors of a front end the control thread takes: a list of accepted kinds.
//!
//! A queue thread that touches memory of a file, and a control thread that closes a descriptor,
//! wait for the process that answers for it: a file on FUSE answers when its server likes, also
//! below an overlayfs, and a TCP socket with SO_LINGER closes when its other end likes. Promises:
//! only those are taken behind which is this machine's kernel alone: files on memory and on the
//! file systems of local disks, eventfds, pipes, and Unix sockets, which [`crate::closing`] closes.
//! What has no type and is no eventfd is none of these: an epoll set asks the servers of all files
//! in it when it is looked at, and a userfaultfd waits for the process that has made it when it is
//! closed. Anything else is refused, and not asked anything by those threads, since its server
//! could hold that answer back as well. Called by the control thread, for each descriptor that
//! arrives.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::fs::{
    AtFlags, FileType, StatFs, StatxFlags, fcntl_get_seals, fstatfs, readlink, statx,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};

use crate::closing::{close, waits};

/// File systems whose files are taken: none of them waits for another process or machine. Numbers:
/// linux/magic.h.
const LOCAL: &[i64] = &[
    0x0102_1994, // tmpfs, memfd
    0x5345_434d, // memfd_secret
    0x9584_58f6, // hugetlbfs
    0xef53,      // ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
];

/// Names of the most common other file systems, for messages.
const FOREIGN: &[(i64, &str)] = &[
    (0x6573_5546, "a file on FUSE"),
    (0x794c_7630, "a file on overlayfs"),
    (0x6969, "a file on NFS"),
    (0xff53_4d42, "a file on CIFS"),
    (0xfe53_4d42, "a file on SMB"),
    (0x0102_1997, "a file on 9p"),
    (0x00c3_6400, "a file on Ceph"),
];

/// What the kernel calls an eventfd, and the beginning of what it calls a pipe without a name
/// (`fs/eventfd.c`, `fs/pipe.c`).
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";
const PIPE: &[u8] = b"pipe:[";

/// For messages.
const SILENT: &str = "a file on a file system that does not say what it is";

/// Time that a file system has to answer which type it is.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Most threads of an export that wait for file systems: however often a front end sends files of
/// one that never answers, no more threads wait for it.
const ASKING_MAX: u32 = 16;

/// Returns a descriptor behind which is only the kernel of this machine. Closes any other one, on a
/// thread that may block.
///
/// Errors: what it is instead, for messages.
pub(crate) fn vet(fd: OwnedFd) -> Result<OwnedFd, &'static str> {
    match is_ours(&fd) {
        Ok(true) => return Ok(fd),
        Ok(false) => {}
        Err(name) => {
            close(fd);
            return Err(name);
        }
    }
    let waits = waits();
    if waits.asking.fetch_add(1, Ordering::Relaxed) >= ASKING_MAX {
        waits.asking.fetch_sub(1, Ordering::Relaxed);
        close(fd);
        return Err(SILENT);
    }
    let (answers, answer) = mpsc::sync_channel(1);
    let these = Arc::clone(&waits);
    let ask = move || {
        match judge(&fd) {
            // A thread that waits no more leaves the closing to this thread.
            Ok(()) => drop(answers.send(Ok(fd))),
            Err(name) => {
                drop(answers.send(Err(name)));
                drop(fd);
            }
        }
        these.asking.fetch_sub(1, Ordering::Relaxed);
    };
    if std::thread::Builder::new().name(String::from("statfs")).spawn(ask).is_err() {
        waits.asking.fetch_sub(1, Ordering::Relaxed);
        return Err("a file on a file system that could not be asked what it is: no more threads");
    }
    answer.recv_timeout(TIMEOUT).unwrap_or(Err(SILENT))
}

/// Whether the kernel knows by itself that no other process is behind a descriptor. `false`: its
/// file system has to be asked.
///
/// Errors: what it is instead.
fn is_ours(fd: &OwnedFd) -> Result<bool, &'static str> {
    // Only memfd, tmpfs and hugetlbfs have seals.
    if fcntl_get_seals(fd).is_ok() {
        return Ok(true);
    }
    // With this flag no file system sends a message.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let known = statx(fd, c"", flags, StatxFlags::TYPE).map_err(|_| SILENT)?;
    match FileType::from_raw_mode(known.stx_mode.into()) {
        FileType::Unknown if is_called(fd, |link| link == EVENTFD) => Ok(true),
        FileType::Unknown => Err("something that is no eventfd"),
        // One with a name is a file of a file system, which is asked for its length.
        FileType::Fifo => Ok(is_called(fd, |link| link.starts_with(PIPE))),
        // Sockets of networks can block in close, if SO_LINGER is set.
        FileType::Socket => match sockopt::socket_domain(fd) {
            Ok(AddressFamily::UNIX) => Ok(true),
            _ => Err("a network socket"),
        },
        FileType::RegularFile => Ok(false),
        FileType::Directory => Err("a directory"),
        _ => Err("a device"),
    }
}

/// Whether the kernel's word for a file, in `/proc`, is one. Asks no file system. A file with a
/// name begins with a slash.
///
/// Without `/proc` there is no way to ask, and it is as good as that: some walls are missing then.
fn is_called(fd: &OwnedFd, is_it: impl FnOnce(&[u8]) -> bool) -> bool {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    match readlink(path, Vec::new()) {
        Ok(link) => is_it(link.as_bytes()),
        Err(errno) => errno == Errno::NOENT,
    }
}

/// Asks the file system of a file for its type.
fn judge(fd: &OwnedFd) -> Result<(), &'static str> {
    let kind = kind(&fstatfs(fd.as_fd()).map_err(|_| SILENT)?);
    if LOCAL.contains(&kind) {
        return Ok(());
    }
    let known = FOREIGN.iter().find(|(number, _)| *number == kind);
    Err(known.map_or("a file on another file system", |(_, name)| name))
}

/// Number of a file system's kind, linux/magic.h.
#[allow(clippy::unnecessary_cast, reason = "the field's type is the platform's")]
fn kind(system: &StatFs) -> i64 {
    system.f_type as i64
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{TcpListener, TcpStream};

    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{
        CWD, FileType, MemfdFlags, Mode, OFlags, inotify, memfd_create, mknodat, open,
    };
    use rustix::process::{PidfdFlags, pidfd_open};

    use super::{is_ours, vet};

    #[test]
    fn what_front_ends_send_is_known_without_asking() {
        let memory = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memfd");
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let (pipe, _end) = rustix::pipe::pipe().expect("a pipe");
        let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("a socket");
        for fd in [memory, event, pipe, socket.into()] {
            assert_eq!(is_ours(&fd), Ok(true), "{fd:?}");
            assert!(vet(fd).is_ok());
        }
    }

    #[test]
    fn a_file_on_a_local_disk_or_in_memory_is_taken() {
        let shm = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
        assert!(vet(shm.into()).is_ok());
    }

    #[test]
    fn a_pipe_with_a_name_is_asked_for_its_file_system() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let path = directory.path().join("pipe");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        let fd = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("a pipe");
        assert_eq!(is_ours(&fd), Ok(false));
        assert!(vet(fd).is_ok(), "it is on a local one");
    }

    #[test]
    fn what_has_no_type_is_an_eventfd_or_refused() {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).expect("a watch");
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
        let process = rustix::process::getpid();
        let process = pidfd_open(process, PidfdFlags::empty()).expect("a process");
        for fd in [watch, set, process] {
            assert!(is_ours(&fd).is_err(), "{fd:?}");
            assert!(vet(fd).is_err());
        }
    }

    #[test]
    fn what_is_not_on_the_list_is_refused() {
        for (path, what) in [
            ("/proc/self/status", "a file on another file system"),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "a file on another file system"),
            ("/dev/null", "a device"),
            ("/", "a directory"),
        ] {
            let file = File::open(path).expect(path);
            assert_eq!(vet(file.into()).map(drop), Err(what), "{path}");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
        assert_eq!(vet(stream.into()).map(drop), Err("a network socket"));
        assert_eq!(vet(listener.into()).map(drop), Err("a network socket"));
    }
}
