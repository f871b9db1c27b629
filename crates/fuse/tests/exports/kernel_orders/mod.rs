//! What the kernel does with each wrong or early command of FUSE over io_uring, one by one, on real
//! mounts: what our transport is built on, and what differs between kernels. Runs on the kernel
//! that is there; `tests/vm/run fuse` runs it on a newer one.
//!
//! A kernel that has buffer pools (Linux 7.3) is stricter than Linux 6.18 in other places too.
//! Where they differ the test names both.

mod commits;
mod entry;
mod life;
mod pools;
mod registers;
mod serve;
mod wire;

use ringdisk_fuse::mount::Unmount;
use ringdisk_ring::{Errno, Fd, RawCommand};

use entry::{Register, area};
use wire::{ADD_BUFPOOL, ADD_QUEUE, COMMIT_AND_FETCH, REGISTER, Wire, possible_cpus};

#[test]
fn a_descriptor_without_a_mount_takes_no_command() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let other = std::fs::File::options().read(true).write(true).open("/dev/fuse").expect("fuse");
    for operation in [REGISTER, COMMIT_AND_FETCH] {
        let command = RawCommand { fd: Fd::of(&other), ..wire.command(operation, area(0, 0, 0)) };
        assert_eq!(wire.result(command), Err(Errno::PERM), "{operation}");
    }
}

#[test]
fn before_init_is_answered_a_command_is_told_to_come_again_and_nothing_is_lost() {
    let Some(mut wire) = Wire::mounted() else { return };
    for _ in 0..2 {
        let entry = wire.new_entry();
        let command = wire.register_command(&Register::of(0, &entry));
        assert_eq!(wire.result(command), Err(Errno::AGAIN));
    }
    wire.answer_init(true);
    for queue in 0..possible_cpus() {
        let entry = wire.new_entry();
        wire.register(queue, entry);
    }
    let (got, _, by_entry) = wire.serve_client(4096);
    assert_eq!(got.expect("a read"), vec![0; 4096]);
    assert!(by_entry > 0, "the rings are live");
}

#[test]
fn io_uring_that_was_not_agreed_is_refused_by_a_kernel_with_pools_only() {
    let Some(mut wire) = Wire::mounted() else { return };
    wire.answer_init(false);
    let entry = wire.new_entry();
    let command = wire.register_command(&Register::of(0, &entry));
    let sent = wire.send(command);
    if wire.has_pools() {
        assert_eq!(wire.end_of(&sent), Err(Errno::OPNOTSUPP));
    } else {
        assert!(wire.pends(&sent), "{:?}", sent.get());
    }
    let (got, by_device, by_entry) = wire.serve_client(4096);
    assert!(got.is_ok() && by_device > 0 && by_entry == 0, "{got:?}");
}

#[test]
fn commands_that_the_kernel_does_not_know_are_refused_and_harm_nothing() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let pools = [ADD_QUEUE, ADD_BUFPOOL];
    let unknown = if wire.has_pools() { &[][..] } else { &pools[..] };
    for operation in [&[0, 5, 99, u32::MAX], unknown].concat() {
        let command = wire.command(operation, area(0, 0, 0));
        assert_eq!(wire.result(command), Err(Errno::INVAL), "{operation}");
    }
    for queue in 0..possible_cpus() {
        let entry = wire.new_entry();
        wire.register(queue, entry);
    }
    let (got, _, by_entry) = wire.serve_client(4096);
    assert!(got.is_ok() && by_entry > 0, "{got:?}");
}

#[test]
fn after_an_abort_entries_end_and_commands_are_refused() {
    let Some(mut wire) = Wire::live(1) else { return };
    assert!(wire.serve_client(4096).0.is_ok());
    wire.settle();
    assert!(wire.mount().abort());
    for index in 0..wire.entries.len() {
        let sent = wire.entries[index].sent.clone();
        assert_eq!(wire.end_of(&sent), Err(Errno::NOTCONN), "{index}");
    }
    let entry = wire.new_entry();
    let command = wire.register_command(&Register::of(0, &entry));
    assert_eq!(wire.result(command), Err(Errno::CONNABORTED));
    let command = wire.commit_command(0, 1);
    assert_eq!(wire.result(command), Err(Errno::CONNABORTED));
}

#[test]
fn after_an_unmount_entries_end_and_commands_are_refused() {
    let Some(mut wire) = Wire::live(1) else { return };
    assert!(wire.serve_client(4096).0.is_ok());
    wire.settle();
    let device = wire.mount().device().try_clone_to_owned().expect("a duplicate");
    let path = wire.path.clone();
    let thread = std::thread::spawn(move || ringdisk_fuse::mount::unmount(&path, Unmount::Lazy));
    for index in 0..wire.entries.len() {
        let sent = wire.entries[index].sent.clone();
        assert_eq!(wire.end_of(&sent), Err(Errno::NOTCONN), "{index}");
    }
    assert!(thread.join().expect("no panic").is_ok());
    let entry = wire.new_entry();
    let command = wire.register_command(&Register::of(0, &entry));
    let command = RawCommand { fd: Fd::of(&device), ..command };
    assert_eq!(wire.result(command), Err(Errno::NOTCONN));
}
