//! The internal state of a device, as front ends save and load it (DEVICE_STATE): all of it that a
//! driver cannot set again is whether there is a write cache.
//!
//! Promises: it is written or read within a few seconds, or refused: a descriptor that takes or
//! gives nothing does not hold the control thread for longer. Bytes that are not ours, or of
//! another version, are refused and change nothing.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::closing::Held;
use crate::session::Refusal;

/// Marks our state and its version.
const MAGIC: [u8; 8] = *b"rdblk\0\0\x01";
/// Bytes of it.
const STATE_BYTES: usize = MAGIC.len() + 1;
/// A front end may take so long to give or take it.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A transfer that was begun.
#[derive(Debug)]
pub(super) enum StateTransfer {
    /// All of it was written.
    Saved,
    /// It is read when the front end asks whether it is there.
    Loading(Held),
}

/// Whether the state may go through this: a pipe, a socket or a file. An eventfd, which comes for
/// other things, takes numbers.
///
/// Errors: it is none of them.
pub(super) fn check(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    match FileType::from_raw_mode(fstat(fd)?.st_mode) {
        FileType::Fifo | FileType::Socket | FileType::RegularFile => Ok(()),
        _ => Err("the state goes through a pipe, a socket or a file".into()),
    }
}

/// Writes the state.
///
/// Errors: the front end does not take it.
pub(super) fn save(fd: BorrowedFd<'_>, write_cache: bool) -> Result<StateTransfer, Refusal> {
    let mut bytes = [0; STATE_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()] = u8::from(write_cache);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        wait(fd, PollFlags::OUT, deadline)?;
        // A pipe that can be written at all takes so few bytes whole.
        match write_now(fd, &bytes) {
            Ok(STATE_BYTES) => return Ok(StateTransfer::Saved),
            Ok(_) => return Err("the state was taken in part only".into()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads the state up to its end. Gives whether there is a write cache.
///
/// Errors: it is not there in time, or is not ours.
pub(super) fn load(fd: BorrowedFd<'_>) -> Result<bool, Refusal> {
    let deadline = Instant::now() + TIMEOUT;
    // One byte more shows what is too long.
    let (mut bytes, mut len) = ([0; STATE_BYTES + 1], 0);
    while len < bytes.len() {
        wait(fd, PollFlags::IN, deadline)?;
        match read_now(fd, &mut bytes[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let ours = len == STATE_BYTES && bytes[..MAGIC.len()] == MAGIC && bytes[MAGIC.len()] <= 1;
    if ours {
        Ok(bytes[MAGIC.len()] == 1)
    } else {
        Err("this is no state of a ringdisk device".into())
    }
}

/// Position of a file that is read on where it stands.
const HERE: u64 = u64::MAX;

/// Reads what there is and never waits, though a poll may have told of bytes that are gone (the
/// front end reads its own pipe) or too few for the socket's SO_RCVLOWAT.
///
/// Errors: EAGAIN when there is nothing.
fn read_now(fd: BorrowedFd<'_>, into: &mut [u8]) -> Result<usize, Errno> {
    match recv(fd, &mut *into, RecvFlags::DONTWAIT) {
        Ok((len, _)) => return Ok(len),
        Err(Errno::NOTSOCK) => {}
        Err(errno) => return Err(errno),
    }
    if is_file(fd)? {
        return rustix::io::read(fd, into);
    }
    let mut parts = [std::io::IoSliceMut::new(into)];
    match preadv2(fd, &mut parts, HERE, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => {
            without_waiting(fd)?;
            rustix::io::read(fd, into)
        }
        read => read,
    }
}

/// As [`read_now`].
fn write_now(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    match send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Err(Errno::NOTSOCK) => {}
        sent => return sent,
    }
    if is_file(fd)? {
        return rustix::io::write(fd, bytes);
    }
    match pwritev2(fd, &[std::io::IoSlice::new(bytes)], HERE, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => {
            without_waiting(fd)?;
            rustix::io::write(fd, bytes)
        }
        written => written,
    }
}

/// Whether it is a file of a local file system (no other one is taken), which waits for nothing but
/// its disk, and may say for ever that without waiting nothing can be done.
fn is_file(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::RegularFile)
}

/// For pipes before Linux 6.5: the flag of the description, which a front end that means harm can
/// take back.
fn without_waiting(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

fn wait(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> Result<(), Refusal> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("the front end neither gives nor takes the state".into());
        }
        let timeout = Timespec::try_from(left).ok();
        let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => return Err("the front end neither gives nor takes the state".into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::time::Instant;

    use super::{TIMEOUT, check, load, read_now, save, write_now};
    use rustix::io::Errno;

    fn pipe() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe().expect("a pipe")
    }

    fn sockets() -> (OwnedFd, OwnedFd) {
        let (one, other) = UnixStream::pair().expect("sockets");
        (one.into(), other.into())
    }

    #[test]
    fn what_was_saved_is_loaded_and_anything_else_is_refused() {
        for cache in [false, true] {
            for (reader, writer) in [pipe(), sockets()] {
                save(writer.as_fd(), cache).unwrap();
                drop(writer);
                assert_eq!(load(reader.as_fd()), Ok(cache));
            }
        }
        for wrong in [
            &b""[..],
            b"rdblk\0\0\x01",
            b"rdblk\0\0\x01\x02",
            b"rdblk\0\0\x02\x01",
            b"rdblk\0\0\x01\x01x",
        ] {
            let (reader, writer) = pipe();
            rustix::io::write(&writer, wrong).unwrap();
            drop(writer);
            assert!(load(reader.as_fd()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn what_takes_or_gives_numbers_has_no_state() {
        let event = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).expect("one");
        assert!(check(event.as_fd()).is_err());
        let ((reader, writer), (one, other)) = (pipe(), sockets());
        for fd in [reader, writer, one, other, tempfile::tempfile().expect("a file").into()] {
            assert_eq!(check(fd.as_fd()), Ok(()));
        }
    }

    #[test]
    fn a_file_has_a_state_too() {
        let file = tempfile::tempfile().expect("a file");
        save(file.as_fd(), true).unwrap();
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0)).expect("seek");
        // Not in the page cache: to read it takes the disk.
        rustix::fs::fsync(&file).expect("sync");
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(&file, 0, None, advice).expect("advice");
        assert_eq!(load(file.as_fd()), Ok(true));
    }

    /// What a poll has told may be gone when it is read.
    #[test]
    fn nothing_waits_for_a_front_end_that_does_not_give() {
        for (reader, writer) in [pipe(), sockets()] {
            assert_eq!(read_now(reader.as_fd(), &mut [0]), Err(Errno::AGAIN));
            let room = |fd: BorrowedFd<'_>| loop {
                match write_now(fd, &[0; 512]) {
                    Ok(_) => {}
                    Err(errno) => break errno,
                }
            };
            assert_eq!(room(writer.as_fd()), Errno::AGAIN);
            // The description is the front end's, too.
            assert!(
                !rustix::fs::fcntl_getfl(&reader).unwrap().contains(rustix::fs::OFlags::NONBLOCK)
            );
        }
    }

    /// A poll says that there are bytes, and a read that may wait would wait for as many as the
    /// front end likes.
    #[test]
    fn a_socket_that_wants_more_bytes_than_there_are_is_given_up() {
        let (reader, writer) = sockets();
        let wish = "import socket; s = socket.socket(fileno=0); s.setsockopt(socket.SOL_SOCKET, \
            socket.SO_RCVLOWAT, 4096)";
        let mut python = Command::new("python3");
        python.args(["-c", wish]).stdin(reader.try_clone().expect("a descriptor"));
        assert!(python.status().expect("python3 (tests/tally needs it, too)").success());
        rustix::io::write(&writer, b"rd").unwrap();
        let begun = Instant::now();
        assert!(load(reader.as_fd()).is_err());
        assert!(begun.elapsed() < 2 * TIMEOUT);
    }
}
