//! REGISTER, wrong in each way there is: before the rings are live that is survived on `/dev/fuse`,
//! after that it ends the mount.

use ringdisk_ring::{Errno, RawCommand};
use ringdisk_testkit::limits::part_needs;

use crate::kernel_orders::entry::Register;
use crate::kernel_orders::wire::{COMPLETES, Sent, Wire, possible_cpus};

/// A REGISTER spoilt by `spoil` ends with `errno`; the mount is served over `/dev/fuse` then, and
/// takes no other entry if the kernel remembers the failure.
fn refused_before_it_is_live(errno: Errno, spoil: impl Fn(&mut Register)) {
    let Some(mut wire) = Wire::negotiated() else { return };
    // All queues but the last: as close to live as it gets.
    for queue in 0..possible_cpus() - 1 {
        let entry = wire.new_entry();
        wire.register(queue, entry);
    }
    let waiting = wire.client(4096);
    assert!(wire.waits(&waiting));

    let entry = wire.new_entry();
    let mut register = Register::of(possible_cpus() - 1, &entry);
    spoil(&mut register);
    let command = wire.register_command(&register);
    assert_eq!(wire.result(command), Err(errno));

    // The client that waited for the rings, and one that comes later.
    let got = wire.finish(&waiting);
    assert!(got.is_ok(), "{got:?}");
    let (got, by_device, by_entry) = wire.serve_client(4096);
    assert!(got.is_ok() && by_device > 0 && by_entry == 0, "{got:?}");

    let command = wire.register_command(&Register::of(possible_cpus() - 1, &entry));
    let sent = wire.send(command);
    if wire.has_pools() {
        assert_eq!(wire.end_of(&sent), Err(Errno::OPNOTSUPP), "it remembers");
    } else {
        assert!(wire.pends(&sent), "{:?}", sent.get());
    }
}

#[test]
fn a_queue_that_is_not_there() {
    refused_before_it_is_live(Errno::INVAL, |register| register.queue = possible_cpus());
    refused_before_it_is_live(Errno::INVAL, |register| register.queue = u16::MAX);
}

#[test]
fn not_two_vectors() {
    refused_before_it_is_live(Errno::INVAL, |register| register.count = 1);
    refused_before_it_is_live(Errno::INVAL, |register| register.count = 3);
}

#[test]
fn a_header_that_is_too_small() {
    refused_before_it_is_live(Errno::INVAL, |register| register.vectors[0].1 = 287);
}

#[test]
fn a_payload_that_is_too_small() {
    refused_before_it_is_live(Errno::INVAL, |register| register.vectors[1].1 -= 1);
}

#[test]
fn vectors_that_are_no_memory() {
    refused_before_it_is_live(Errno::FAULT, |register| register.address = Some(16));
}

/// The header is written when a request comes: only then is it known that it is no memory.
#[test]
fn a_header_that_is_no_memory_fails_the_client_and_not_the_mount() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let mut bad = Vec::new();
    for queue in 0..possible_cpus() {
        let entry = wire.new_entry();
        let mut register = Register::of(queue, &entry);
        register.vectors[0].0 = 4096;
        let command = wire.register_command(&register);
        bad.push(wire.send(command));
    }
    for sent in &bad {
        assert!(wire.pends(sent), "{:?}", sent.get());
    }
    let (got, _, _) = wire.serve_client(4096);
    assert!(got.is_err(), "{got:?}");
}

#[test]
fn an_entry_that_comes_late_is_used() {
    let Some(mut wire) = Wire::live(1) else { return };
    assert!(wire.serve_client(4096).0.is_ok());
    wire.settle();
    for queue in 0..possible_cpus() {
        let entry = wire.new_entry();
        wire.register(queue, entry);
    }
    let sent: Vec<Sent> = wire.entries.iter().map(|entry| entry.sent.clone()).collect();
    assert!(sent.iter().all(|sent| wire.pends(sent)));
    let (got, _, by_entry) = wire.serve_client(4096);
    assert!(got.is_ok() && by_entry > 0, "{got:?}");
}

#[test]
fn a_refusal_while_it_is_live_ends_the_rings_of_a_kernel_with_pools() {
    let Some(mut wire) = Wire::live(1) else { return };
    assert!(wire.serve_client(4096).0.is_ok());
    let entry = wire.new_entry();
    let mut register = Register::of(0, &entry);
    register.count = 1;
    let command = wire.register_command(&register);
    assert_eq!(wire.result(command), Err(Errno::INVAL));

    if !part_needs("FUSE buffer pools (Linux 7.3)", wire.has_pools()) {
        let (got, _, by_entry) = wire.serve_client(4096);
        assert!(got.is_ok() && by_entry > 0, "{got:?}");
        return;
    }
    // Requests still come in the rings; replies are not taken any more. Only an abort lets the
    // client go.
    let client = wire.client(4096);
    let full = |wire: &mut Wire| (0..wire.entries.len()).find(|index| wire.is_full(*index));
    let index = wire.wait(COMPLETES, full).expect("a request comes");
    wire.serve_entry(index);
    let sent = wire.entries[index].sent.clone();
    assert_eq!(wire.end_of(&sent), Err(Errno::OPNOTSUPP));
    assert!(wire.waits(&client));
    assert!(wire.mount().abort());
    let got = wire.wait(COMPLETES, |_| client.try_recv().ok());
    assert!(got.is_some_and(|got| got.is_err()));
}

/// Only a registered pool has a buffer to name; elsewhere it is not looked at.
#[test]
fn a_fixed_buffer_means_nothing_without_a_pool() {
    let Some(mut wire) = Wire::negotiated() else { return };
    let entry = wire.new_entry();
    let command = wire.register_command(&Register::of(0, &entry));
    let sent = wire.send(RawCommand { fixed_buffer: Some(3), ..command });
    assert!(wire.pends(&sent), "{:?}", sent.get());
}
