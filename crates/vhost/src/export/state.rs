//! The internal state of a device, as front ends save and load it (DEVICE_STATE): all of it that a driver cannot set again is whether there
//! is a write cache.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::session::Refusal;

/// Marks our state and its version.
const MAGIC: [u8; 8] = *b"rdblk\0\0\x01";
/// Bytes of it.
const STATE_BYTES: usize = MAGIC.len() + 1;
/// A front end may take so long to give or take it.
const PATIENCE: Duration = Duration::from_secs(5);

/// A transfer that was begun.
#[derive(Debug)]
pub(super) enum StateTransfer {
    /// All of it was written.
    Saved,
    /// It is read when the front end asks whether it is there.
    Loading(OwnedFd),
}

/// Writes the state.
///
/// Errors: nobody takes it.
pub(super) fn save(fd: BorrowedFd<'_>, write_cache: bool) -> Result<StateTransfer, Refusal> {
    let mut bytes = [0; STATE_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()] = u8::from(write_cache);
    wait(fd, PollFlags::OUT, Instant::now() + PATIENCE)?;
    // A pipe that can be written at all takes so few bytes whole.
    match rustix::io::write(fd, &bytes)? {
        STATE_BYTES => Ok(StateTransfer::Saved),
        _ => Err("the state was taken in part only".into()),
    }
}

/// Reads the state up to its end. Gives whether there is a write cache.
///
/// Errors: it is not there in time, or is not ours.
pub(super) fn load(fd: BorrowedFd<'_>) -> Result<bool, Refusal> {
    let deadline = Instant::now() + PATIENCE;
    // One byte more shows what is too long.
    let (mut bytes, mut len) = ([0; STATE_BYTES + 1], 0);
    while len < bytes.len() {
        wait(fd, PollFlags::IN, deadline)?;
        match rustix::io::read(fd, &mut bytes[len..]) {
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

fn wait(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> Result<(), Refusal> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
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
    use super::{load, save};
    use std::os::fd::AsFd;

    #[test]
    fn what_was_saved_is_loaded_and_anything_else_is_refused() {
        for cache in [false, true] {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            save(writer.as_fd(), cache).unwrap();
            drop(writer);
            assert_eq!(load(reader.as_fd()), Ok(cache));
        }
        for wrong in [
            &b""[..],
            b"rdblk\0\0\x01",
            b"rdblk\0\0\x01\x02",
            b"rdblk\0\0\x02\x01",
            b"rdblk\0\0\x01\x01x",
        ] {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            rustix::io::write(&writer, wrong).unwrap();
            drop(writer);
            assert!(load(reader.as_fd()).is_err(), "{wrong:?}");
        }
    }
}
