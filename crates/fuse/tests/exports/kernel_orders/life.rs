//! What keeps a connection alive, who waits for whom, and what a thread leaves behind: the pitfalls
//! that our transport is built around.

use ringdisk_fuse::mount::Unmount;
use ringdisk_ring::{CpuList, Fd, RawCommand, Topology};
use ringdisk_testkit::process::{Process, command, patient};
use rustix::process::Signal;

use crate::kernel_orders::entry::Register;
use crate::kernel_orders::wire::{COMPLETES, PENDS, Wire, possible_cpus};

/// Closing every descriptor ends a connection, but a place in the ring's table of files is a
/// descriptor too.
#[test]
fn a_registered_file_keeps_the_connection_alive() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let (mount, _directory, _switch) = wire.take_apart();
    let fixed = wire.ring.register_file(&mount.device()).expect("a place");
    let path = mount.mountpoint().to_owned();
    drop(mount.into_device().expect("the descriptor"));
    let client = wire.client(4096);
    assert!(wire.waits(&client), "nobody has aborted it");
    wire.ring.unregister_file(fixed);
    let got = wire.wait(COMPLETES, |_| client.try_recv().ok());
    assert!(got.is_some_and(|got| got.is_err()), "that was the last one");
    ringdisk_fuse::mount::unmount(&path, Unmount::Lazy).expect("unmount");
}

#[test]
fn commands_may_name_the_registered_file() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let fixed = wire.ring.register_file(&wire.mount().device()).expect("a place");
    assert!(matches!(fixed, Fd::Fixed(_)));
    for queue in 0..possible_cpus() {
        let mut entry = wire.new_entry();
        let command = wire.register_command(&Register::of(queue, &entry));
        entry.queue = queue;
        entry.sent = wire.send(RawCommand { fd: fixed, ..command });
        wire.entries.push(entry);
    }
    let (got, _, by_entry) = wire.serve_client(4096);
    assert!(got.is_ok() && by_entry > 0, "{got:?}");
}

#[test]
fn a_client_that_is_killed_while_its_request_is_served_ends_with_the_reply() {
    let Some(mut wire) = Wire::live(1) else { return };
    let input = format!("if={}", wire.path.display());
    let mut client = Process::spawn(&mut command(&["dd", &input, "of=/dev/null", "bs=4k"]));
    let held = wire.hold_a_read();
    client.signal(Signal::KILL);
    assert!(wire.watch(PENDS, |_| client.ended()).is_none(), "the kernel waits for the reply");
    wire.serve_entry(held);
    let ended = wire.wait(COMPLETES, |wire| {
        wire.turn();
        client.ended()
    });
    assert!(ended.is_some_and(|status| !status.success()), "{ended:?}");
    assert!(wire.serve_client(4096).0.is_ok());
}

/// An entry that comes while requests wait does not take one: the next commit does.
#[test]
fn a_new_entry_does_not_take_a_request_that_waits() {
    let Some(mut wire) = Wire::live(1) else { return };
    let cpu: CpuList = Topology::read().allowed.first().into_iter().collect();
    let first = wire.client_on(cpu.clone(), 4096);
    let held = wire.hold_a_read();
    let queue = wire.entries[held].queue;
    let second = wire.client_on(cpu, 4096);
    wire.wait_for_requests(2);
    assert!(wire.waits(&second), "its queue has no entry left");
    let entry = wire.new_entry();
    let late = wire.register(queue, entry);
    let sent = wire.entries[late].sent.clone();
    assert!(wire.pends(&sent));
    wire.serve_entry(held);
    assert!(wire.finish(&first).is_ok());
    assert!(wire.finish(&second).is_ok());
}

/// Queues belong to CPUs, not to rings: a client on a CPU whose entries went with their ring waits
/// until the mount is aborted.
#[test]
fn a_ring_that_is_closed_leaves_its_queues_without_entries() {
    let Some(mut wire) = Wire::live(1) else { return };
    assert!(wire.serve_client(4096).0.is_ok());
    wire.settle();
    let (mount, _directory, _switch) = wire.take_apart();
    let client = wire.client(4096);
    drop(wire);
    assert!(client.recv_timeout(PENDS * 3).is_err(), "nobody serves it, and nobody tells it");
    assert!(mount.abort());
    let got = client.recv_timeout(patient(COMPLETES));
    assert!(got.is_ok_and(|got| got.is_err()));
}
