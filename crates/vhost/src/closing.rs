//! Threads that close sockets of front ends, since closing one may block.
//!
//! A Unix socket holds messages that were sent and not received, with their descriptors. The thread
//! that closes the last descriptor of the socket closes those, too, and another process can make
//! that close block: a TCP socket with SO_LINGER, a file on FUSE. Front ends choose what is sent to
//! us, also on sockets that we never read from. So neither control threads nor queue threads close
//! sockets of front ends.
//!
//! Promises: [`close`] does not wait. At most [`THREADS_MAX`] threads close for an export; what
//! comes while all of them wait is kept until one is free; the peer of a connection is told of its
//! end before that ([`Held::end`]). While that is much ([`is_full`]) this export takes no more from
//! front ends, so what is kept is bounded; others go on. A descriptor is of the export whose
//! control thread has taken it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown, sockopt};

/// Most threads that close at the same time.
const THREADS_MAX: usize = 16;
/// Descriptors that may wait before no more are taken: one message has 253 at most.
const WAITING_MAX: usize = 256;

/// A descriptor that is to be closed.
#[derive(Debug, Default)]
struct Waiting {
    fds: Vec<OwnedFd>,
    threads: usize,
}

/// Descriptors of front ends of one export that wait to be closed.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    closing: Mutex<Waiting>,
    /// Threads that ask a file system for its type.
    pub(crate) asking: AtomicU32,
}

thread_local! {
    static WAITS: Arc<Waits> = Arc::default();
}

/// Those of this thread's export: each export has a control thread of its own.
pub(crate) fn waits() -> Arc<Waits> {
    WAITS.with(Arc::clone)
}

impl Waits {
    /// A panic elsewhere leaves it valid.
    fn closing(&self) -> MutexGuard<'_, Waiting> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes a descriptor, by a thread that may wait for that.
    pub(crate) fn close(self: &Arc<Waits>, fd: OwnedFd) {
        let mut closing = self.closing();
        closing.fds.push(fd);
        if closing.threads == THREADS_MAX {
            return;
        }
        closing.threads += 1;
        drop(closing);
        let these = Arc::clone(self);
        let thread = std::thread::Builder::new().name(String::from("closing"));
        if thread.spawn(move || these.work()).is_err() {
            // It is kept, and closed with the next one.
            self.closing().threads -= 1;
        }
    }

    /// A thread: closes what there is.
    fn work(&self) {
        loop {
            let mut closing = self.closing();
            let Some(fd) = closing.fds.pop() else {
                closing.threads -= 1;
                return;
            };
            drop(closing);
            drop(fd);
        }
    }
}

/// Closes a descriptor for the export of this thread.
pub(crate) fn close(fd: OwnedFd) {
    waits().close(fd);
}

/// Whether so many descriptors wait to be closed that the export of this thread should take nothing
/// more from front ends.
pub(crate) fn is_full() -> bool {
    waits().closing().fds.len() >= WAITING_MAX
}

/// Whether a descriptor is a socket. Asks no file system.
pub(crate) fn is_socket(fd: impl AsFd) -> bool {
    sockopt::socket_domain(fd) != Err(Errno::NOTSOCK)
}

/// A descriptor of a front end. If it is a socket, dropping it does not wait.
#[derive(Debug)]
pub(crate) struct Held(Option<OwnedFd>, Arc<Waits>);

impl Held {
    /// Second descriptors of the sockets among some: dropping the others closes nothing yet.
    ///
    /// Errors: no descriptor is left.
    pub(crate) fn sockets_of(fds: &[OwnedFd]) -> Result<Vec<Held>, Errno> {
        let sockets = fds.iter().filter(|fd| is_socket(fd));
        let copies = sockets.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0).map(Held::from));
        copies.collect()
    }

    /// Ends the connection for its peer, which would see nothing of it else while the closing
    /// waits. For other processes that have the socket, too: so not of one that has been handed
    /// over.
    pub(crate) fn end(&self) {
        // One that has ended already needs no end.
        let _ = shutdown(self.as_fd(), Shutdown::Both);
    }

    /// The descriptor, for a caller that makes sure that closing it does not block.
    pub(crate) fn into_fd(mut self) -> OwnedFd {
        self.0.take().expect("it is there until it is dropped")
    }
}

impl From<OwnedFd> for Held {
    fn from(fd: OwnedFd) -> Held {
        Held(Some(fd), waits())
    }
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take().filter(|fd| is_socket(fd)) {
            self.1.close(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_is_closed_and_everything_else_at_once() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        assert!(is_socket(&ours) && !is_socket(&reader));
        drop((Held::from(OwnedFd::from(ours)), Held::from(writer)));
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
        assert_eq!(theirs.read(&mut [0; 1]).expect("its end"), 0);
    }

    #[test]
    fn a_second_descriptor_outlives_the_first() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let fds = vec![OwnedFd::from(ours), reader];
        let held = Held::sockets_of(&fds).expect("descriptors are left");
        drop(fds);
        assert_eq!(held.len(), 1);
        rustix::io::write(&theirs, b"x").expect("the other end is there");
        let fd = held.into_iter().next().expect("one").into_fd();
        assert_eq!(rustix::io::read(&fd, &mut [0; 2]), Ok(1));
    }

    #[test]
    fn what_front_ends_of_one_export_make_wait_stops_no_other() {
        std::thread::spawn(|| {
            let waits = waits();
            let mut closing = waits.closing();
            // All of its threads wait.
            closing.threads = THREADS_MAX;
            let file = std::fs::File::open("/dev/null").expect("open");
            let more = || OwnedFd::from(file.try_clone().expect("a descriptor"));
            closing.fds.extend(std::iter::repeat_with(more).take(WAITING_MAX));
            drop(closing);
            assert!(is_full());
            let other = std::thread::spawn(|| {
                let (ours, mut theirs) = UnixStream::pair().expect("sockets");
                drop(Held::from(OwnedFd::from(ours)));
                (is_full(), theirs.read(&mut [0; 1]).expect("its end"))
            });
            assert_eq!(other.join().expect("no panic"), (false, 0));
        })
        .join()
        .expect("no panic");
    }
}
