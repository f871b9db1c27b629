//! Descriptors that a service manager kept for us while no process of ours lived.
//!
//! Promises: each descriptor is taken once, and is close-on-exec from then on; those that do not
//! have one of our names stay as they are. Called by the main thread at the start of the program.
//!
//! Source: sd_listen_fds(3): `LISTEN_PID` is our pid, `LISTEN_FDS` descriptors begin at 3,
//! `LISTEN_FDNAMES` has their names between colons.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FileType, fstat};
use rustix::io::{FdFlags, fcntl_setfd};

/// The first descriptor that is handed over.
const FIRST: RawFd = 3;
/// More than any manager keeps for one service: a bound for a number from the environment.
const COUNT_MAX: usize = 1024;

/// The descriptors whose names begin with `prefix`, with their names, in the order in which they
/// were given. Empty the second time.
#[must_use]
pub fn take(prefix: &str) -> Vec<(String, OwnedFd)> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let variable = |name| std::env::var(name).unwrap_or_default();
    let ours = variable("LISTEN_PID").parse() == Ok(std::process::id());
    if !ours || IS_TAKEN.swap(true, Ordering::AcqRel) {
        return Vec::new();
    }
    let count = variable("LISTEN_FDS").parse().unwrap_or(0);
    let names = variable("LISTEN_FDNAMES");
    numbered(&names, count, prefix).filter_map(|(name, raw)| Some((name, adopt(raw)?))).collect()
}

/// The socket of this number that the program was started with. `None`: there is no such
/// descriptor, it is no socket, or it was taken before.
///
/// To be called before the program opens sockets of its own, which could have this number.
#[must_use]
pub fn take_socket(number: RawFd) -> Option<OwnedFd> {
    static TAKEN: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    if number < FIRST || taken.contains(&number) {
        return None;
    }
    // SAFETY: the number is not -1; the borrow ends before this function, and a closed descriptor
    // only makes the call fail with EBADF.
    let there = unsafe { BorrowedFd::borrow_raw(number) };
    let mode = fstat(there).ok()?.st_mode;
    if FileType::from_raw_mode(mode) != FileType::Socket {
        return None;
    }
    taken.push(number);
    adopt(number)
}

/// Names and numbers of the descriptors that are ours; those of older managers have no names.
fn numbered(names: &str, count: usize, prefix: &str) -> impl Iterator<Item = (String, RawFd)> {
    let names = names.split(':').chain(std::iter::repeat(""));
    let names = names.take(count.min(COUNT_MAX)).zip(FIRST..);
    let ours = names.filter(move |(name, _)| name.starts_with(prefix));
    ours.map(|(name, raw)| (name.to_owned(), raw)).collect::<Vec<_>>().into_iter()
}

/// `None`: there is no such descriptor.
fn adopt(raw: RawFd) -> Option<OwnedFd> {
    // SAFETY: the number is not -1; the borrow ends with this function, and a closed descriptor
    // only makes the call fail with EBADF.
    let there = unsafe { BorrowedFd::borrow_raw(raw) };
    fcntl_setfd(there, FdFlags::CLOEXEC).ok()?;
    // SAFETY: the process that started this one opened it for us (LISTEN_PID, or a number that the
    // user wrote; a socket, before any of ours was made), nothing else in the process was given it,
    // and the callers see to it that it is taken once.
    Some(unsafe { OwnedFd::from_raw_fd(raw) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_names_are_taken_and_only_as_many_as_there_are() {
        let found: Vec<_> =
            numbered("ringdisk-a:http:ringdisk-b:ringdisk-c", 3, "ringdisk-").collect();
        assert_eq!(found, [("ringdisk-a".to_owned(), 3), ("ringdisk-b".to_owned(), 5)]);
        assert_eq!(numbered("", 0, "ringdisk-").count(), 0);
        assert_eq!(numbered("", 3, "ringdisk-").count(), 0);
        let unnamed: Vec<_> = numbered("", 2, "").collect();
        assert_eq!(unnamed, [(String::new(), 3), (String::new(), 4)]);
    }

    #[test]
    fn a_number_is_taken_when_it_is_a_socket_and_once() {
        let (mine, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let file = std::fs::File::open("/dev/null").expect("a file");
        let number = std::os::fd::IntoRawFd::into_raw_fd(mine);
        assert!(take_socket(std::os::fd::AsRawFd::as_raw_fd(&file)).is_none());
        assert!(take_socket(1).is_none() && take_socket(1 << 19).is_none());
        let taken = take_socket(number).expect("a socket");
        assert!(take_socket(number).is_none());
        drop((taken, theirs));
    }

    #[test]
    fn descriptors_of_another_process_are_left_alone() {
        // LISTEN_PID is not set, or not ours, in a test.
        assert!(take("ringdisk-").is_empty());
    }
}
