//! Descriptors of a front end behind which is another process or machine.
//!
//! A file on FUSE or on the network answers when its server likes: a queue thread that touches memory in it, and a control thread that
//! closes it, could be held for ever. Such a descriptor is refused, and not asked anything by those threads, since its server could hold
//! that answer back as well. Called by the control thread, for each descriptor that arrives.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, StatFs, StatxFlags, fcntl_get_seals, fstatfs, statx};

/// File systems that are not of this machine's kernel alone. The numbers are those of linux/magic.h and of the file systems' sources.
const FOREIGN: &[(i64, &str)] = &[
    (0x6573_5546, "FUSE"),
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x517b, "SMB"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
];

/// A file system has so long to say what it is.
const PATIENCE: Duration = Duration::from_secs(2);

/// So many threads may wait for file systems: one that never answers costs no more, however often its files are sent.
const ASKING_MAX: u32 = 16;
/// How many wait.
static ASKING: AtomicU32 = AtomicU32::new(0);

/// Gives a descriptor back that this machine's kernel alone answers for. Another one is closed, by a thread that may wait for that.
///
/// Errors: what it is instead, for messages.
pub(crate) fn vet(fd: OwnedFd) -> Result<OwnedFd, &'static str> {
    if is_ours(&fd) {
        return Ok(fd);
    }
    let silent = Err("a file system that does not say what it is");
    if ASKING.fetch_add(1, Ordering::Relaxed) >= ASKING_MAX {
        ASKING.fetch_sub(1, Ordering::Relaxed);
        // Its closing may hold this thread up, and with it the disk of this front end, which no other one has.
        return silent;
    }
    let (answers, answer) = mpsc::sync_channel(1);
    let ask = move || {
        match judge(&fd) {
            Ok(()) => drop(answers.send(Ok(fd))),
            Err(name) => {
                drop(answers.send(Err(name)));
                drop(fd);
            }
        }
        ASKING.fetch_sub(1, Ordering::Relaxed);
    };
    if std::thread::Builder::new().name(String::from("statfs")).spawn(ask).is_err() {
        ASKING.fetch_sub(1, Ordering::Relaxed);
        return Err("a file system that could not be asked what it is: no more threads");
    }
    answer.recv_timeout(PATIENCE).unwrap_or(silent)
}

/// Whether the kernel knows by itself that nobody else is behind a descriptor.
fn is_ours(fd: &OwnedFd) -> bool {
    // Only memfd, tmpfs and hugetlbfs have seals.
    if fcntl_get_seals(fd).is_ok() {
        return true;
    }
    // With this flag no file system sends a message.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(known) = statx(fd, c"", flags, StatxFlags::TYPE) else { return false };
    // An eventfd is of no type.
    let kind = FileType::from_raw_mode(known.stx_mode.into());
    matches!(kind, FileType::Fifo | FileType::Socket | FileType::Unknown)
}

/// Asks the file system what it is.
fn judge(fd: &OwnedFd) -> Result<(), &'static str> {
    let system = fstatfs(fd.as_fd()).map_err(|_| "a file system that does not say what it is")?;
    match FOREIGN.iter().find(|(number, _)| *number == kind(&system)) {
        Some((_, name)) => Err(name),
        None => Ok(()),
    }
}

/// Number of a file system's kind, linux/magic.h.
#[allow(clippy::unnecessary_cast, reason = "the field's type is the platform's")]
fn kind(system: &StatFs) -> i64 {
    system.f_type as i64
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::{is_ours, vet};

    #[test]
    fn what_front_ends_send_is_known_without_asking() {
        let memory = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memfd");
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let (pipe, _end) = rustix::pipe::pipe().expect("a pipe");
        let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("a socket");
        for fd in [memory, event, pipe, socket.into()] {
            assert!(is_ours(&fd), "{fd:?}");
            assert!(vet(fd).is_ok());
        }
    }

    #[test]
    fn files_of_other_systems_of_this_machine_are_taken() {
        for path in ["/proc/self/status", "/dev/null", "/", env!("CARGO_MANIFEST_DIR")] {
            let file = File::open(path).expect(path);
            assert!(vet(file.into()).is_ok(), "{path}");
        }
    }
}
