//! What the kernel makes of restrictions.

use std::os::fd::{AsFd, AsRawFd};

use io_uring::{opcode, squeue, types};

use crate::Config;
use crate::counters::Counters;
use crate::uring::Uring;

fn ring(restricted: bool, sqe128: bool) -> Uring {
    Uring::new(&Config { restricted, sqe128, ..Config::default() }).expect("io_uring")
}

/// Submits one entry and gives its result.
fn result_of(ring: &Uring, entry: squeue::Entry) -> i32 {
    ring.push(entry);
    ring.enter(&Counters::default(), 1, None).expect("an enter");
    ring.next_completion().expect("a completion").result
}

fn refused() -> [squeue::Entry; 5] {
    let at = types::Fd(libc::AT_FDCWD);
    [
        opcode::OpenAt::new(at, c"/dev/null".as_ptr()).build(),
        opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
        opcode::UnlinkAt::new(at, c"/nowhere/at/all".as_ptr()).build(),
        opcode::Close::new(types::Fd(-1)).build(),
        opcode::Nop::new().build(),
    ]
}

#[test]
fn an_operation_that_is_not_ours_is_refused() {
    for sqe128 in [false, true] {
        let ring = ring(true, sqe128);
        for entry in refused() {
            assert_eq!(result_of(&ring, entry), -libc::EACCES);
        }
    }
}

#[test]
fn without_restrictions_it_is_carried_out() {
    let ring = ring(false, false);
    let [open, _, unlink, close, nop] = refused();
    assert!(result_of(&ring, open) >= 0);
    assert_eq!(result_of(&ring, unlink), -libc::ENOENT);
    assert_eq!(result_of(&ring, close), -libc::EBADF);
    assert_eq!(result_of(&ring, nop), 0);
}

#[test]
fn commands_of_drivers_are_for_wide_rings_only() {
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    let command = || opcode::UringCmd16::new(types::Fd(null.as_fd().as_raw_fd()), 1).build();
    assert_eq!(result_of(&ring(true, false), command()), -libc::EACCES);
    // The device has none, which it says itself.
    assert_ne!(result_of(&ring(true, true), command()), -libc::EACCES);
}

#[test]
fn flags_that_are_not_ours_are_refused() {
    let ring = ring(true, false);
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    let entry = || opcode::Fsync::new(types::Fd(null.as_fd().as_raw_fd())).build();
    assert_eq!(result_of(&ring, entry()), -libc::EINVAL);
    assert_eq!(result_of(&ring, entry().flags(squeue::Flags::ASYNC)), -libc::EACCES);
}

#[test]
fn other_registrations_are_refused() {
    let ring = ring(true, false);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("eventfd");
    let error = ring.submitter().register_eventfd(event.as_raw_fd()).expect_err("refused");
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    assert!(ring.submitter().register_files_update(0, &[-1]).is_ok());
}
