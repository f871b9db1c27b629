//! What a guest and its front end can make us use is bounded. Alone in its program: it counts what all of the process holds.

mod common;

use std::time::{Duration, Instant};

use common::raw::{NEXT, send};
use common::{MIB, Served, serve, simulated};
use ringdisk_guest::driver::GUEST_BASE;
use ringdisk_testkit::limits::{Holds, resident_bytes};
use ringdisk_testkit::model::{Request, Vm, VmOptions, ask};

fn break_and_mend(served: &Served, vm: &mut Vm) {
    // A chain that runs in a circle.
    send(vm, 0, &[(GUEST_BASE, 16, NEXT, 0)]);
    let end = Instant::now() + Duration::from_secs(20);
    while served.export.broken_reason().is_none() {
        assert!(Instant::now() < end, "the device has not noticed");
        std::thread::sleep(Duration::from_micros(100));
    }
    for _ in 0..10 {
        vm.change_call(0).expect("a call");
    }
    vm.reset().expect("a reset");
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
    vm.reset().expect("a reset");
}

#[test]
fn broken_devices_and_front_ends_that_come_and_go_leave_nothing_behind() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let pid = std::process::id();
    let options = VmOptions { slots: 4, slot_bytes: 8 << 10, ..VmOptions::default() };
    let round = || {
        let mut vm = served.vm(options);
        (0..5).for_each(|_| break_and_mend(&served, &mut vm));
        // Refused, with descriptors.
        let fds = [vm.ram.fd(); 32];
        assert!(vm.front.send(ask::GET_FEATURES, 0, &[], &fds));
        vm.front.expect_end();
    };
    (0..5).for_each(|_| round());
    let (holds, memory) = (Holds::of(pid), resident_bytes(pid));
    (0..40).for_each(|_| round());
    // The last front end may be on its way out.
    let now = Holds::of(pid);
    assert!(now.descriptors <= holds.descriptors + 16, "{holds:?}, then {now:?}");
    assert!(now.threads <= holds.threads + 4, "{holds:?}, then {now:?}");
    let grown = resident_bytes(pid).saturating_sub(memory);
    assert!(grown < 8 << 20, "{grown} bytes more");
}

#[test]
fn an_export_that_has_ended_holds_nothing() {
    let (_sim, disk) = simulated(MIB);
    let kept = std::sync::Arc::downgrade(&disk);
    let served = serve(disk, |_| {});
    drop(served.vm(VmOptions::default()));
    drop(served);
    assert!(kept.upgrade().is_none(), "the disk is still used");
}
