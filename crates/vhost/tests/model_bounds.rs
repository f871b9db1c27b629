//! What a guest and its front end can make us use is bounded. Alone in its program: it counts what
//! all of the process holds.

mod common;

use std::time::{Duration, Instant};

use common::raw::{INDIRECT, NEXT, WRITE, avail, entry, send};
use common::{MIB, Served, open, serve, simulated};
use ringdisk_disk::Format;
use ringdisk_guest::Layout;
use ringdisk_guest::driver::GUEST_BASE;
use ringdisk_testkit::images;
use ringdisk_testkit::limits::{Holds, resident_bytes};
use ringdisk_testkit::model::{Request, Vm, VmOptions, ask};
use ringdisk_testkit::mount::scratch;

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

/// Regions of a few bytes that follow one another: each segment over all of them is as many pieces.
#[test]
fn segments_over_many_regions_take_no_more_memory_than_others() {
    /// Of each region, bytes; and how many there are.
    const REGION: u64 = 16;
    const REGIONS: u64 = 256;
    const AT: u64 = 1 << 40;
    const PLACE: u64 = GUEST_BASE + (200 << 20);
    /// Requests, all by the same table.
    const REQUESTS: u16 = 64;
    let directory = scratch();
    let path = directory.path().join("disk");
    images::sparse(&path, 8 * MIB);
    let served = serve(open(&path, Format::Raw), |_| {});
    let mut vm = served.vm(VmOptions { indirect: 8, ..VmOptions::default() });
    for number in 0..REGIONS {
        let at = number * REGION;
        let fd = vm.ram.fd();
        vm.front.add_region([AT + at, REGION, (1 << 46) + at, at], fd).expect("there is room");
    }
    let pid = std::process::id();
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
    vm.reset().expect("a reset");
    let len = u32::try_from(REGIONS * REGION).expect("small");
    let mut table = vec![entry(Layout::Split, (PLACE, 16, NEXT, 1))];
    for next in 2..1026 {
        table.push(entry(Layout::Split, (AT, len, NEXT | WRITE, next)));
    }
    table.push(entry(Layout::Split, (PLACE + 64, 1, WRITE, 0)));
    vm.ram.write(PLACE + 4096, &table.concat());
    vm.ram.write(PLACE, &[0; 16]);
    let bytes = u32::try_from(table.concat().len()).expect("small");
    for head in 0..REQUESTS {
        let chain = entry(Layout::Split, (PLACE + 4096, bytes, INDIRECT, 0));
        vm.queues[0].driver.areas().descriptors.write_bytes(usize::from(head) * 16, &chain);
    }
    let before = resident_bytes(pid);
    let heads: Vec<u16> = (0..REQUESTS).collect();
    avail(&mut vm, 0, &heads, REQUESTS);
    let end = Instant::now() + Duration::from_secs(60);
    let answered = || served.export.stats_reader()().queues.iter().map(|q| q.requests).sum::<u64>();
    while served.export.broken_reason().is_none() && answered() < u64::from(REQUESTS) {
        assert!(Instant::now() < end, "neither served nor refused");
        std::thread::sleep(Duration::from_millis(1));
    }
    let grown = resident_bytes(pid).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more");
    let reason = served.export.broken_reason().expect("no driver has such buffers");
    assert!(reason.contains("regions of memory"), "{reason}");
    vm.reset().expect("a reset");
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
}
