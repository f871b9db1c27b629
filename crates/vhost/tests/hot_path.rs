//! A request in a device that has warmed up allocates nothing on its queue thread: counted by the
//! allocator of this program.

mod common;

use std::time::Duration;

use common::{MIB, open, serve};
use ringdisk_disk::{Bytes, Disk, Format, NullOptions};
use ringdisk_testkit::allocations::{Counting, leave_this_thread_out, of_all_threads};
use ringdisk_testkit::images;
use ringdisk_testkit::model::{Cut, Request, Vm, VmOptions, bits};
use ringdisk_testkit::mount::scratch;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests that are counted, after as many that warm up.
const REQUESTS: u64 = 400;
const DEPTH: u64 = 8;

/// Allocations of the device while it serves reads, writes and flushes.
///
/// * `between`: what is done between the others.
fn allocations(vm: &mut Vm, warm_up: u64, between: &Request) -> u64 {
    let mut before = 0;
    for round in 0..warm_up + REQUESTS / DEPTH {
        if round == warm_up {
            before = of_all_threads();
        }
        // The device makes a task for each request that it has at once: on a busy machine the first
        // rounds may not get as deep as the others.
        let depth = if round < warm_up { 2 * DEPTH } else { DEPTH };
        for number in 0..depth {
            let sector = (round * DEPTH + number) % 97 * 8;
            let request = match number % 4 {
                0 => Request::write(sector, vec![1; 8192]).cut(Cut::Pieces(4)),
                1 => between.clone(),
                2 => Request::read(sector, 4096).cut(Cut::Anywhere(9)),
                _ => Request::read(sector, 4096),
            };
            vm.submit(0, request.indirect()).expect("room");
        }
        (0..depth).for_each(|_| assert_eq!(vm.queues[0].wait(&vm.ram).status, 0));
    }
    of_all_threads() - before
}

#[test]
fn requests_allocate_nothing() {
    leave_this_thread_out();
    let directory = scratch();
    let (raw, qcow2) = (directory.path().join("raw"), directory.path().join("qcow2"));
    images::raw(&raw, MIB, 1);
    images::qcow2(&qcow2, "1M", "");
    images::qemu_io(&qcow2, "qcow2", &["write -P 1 0 1M"]);
    let null = || {
        Disk::null(&NullOptions { size: Bytes(MIB), read_zeroes: true, latency: Duration::ZERO })
    };
    // The end of an export closes its disk.
    let disk = |name| match name {
        "raw" => open(&raw, Format::Raw),
        "qcow2" => open(&qcow2, Format::Qcow2),
        _ => null(),
    };
    for name in ["null", "raw", "qcow2"] {
        for packed in [0, bits::PACKED] {
            let served = serve(disk(name), |options| options.queues = 1);
            let features = VmOptions::default().features | packed;
            let mut vm = served.vm(VmOptions { features, indirect: 16, ..VmOptions::default() });
            // A flush of a qcow2 image writes tables: no hot path.
            let read = Request::read(0, 512);
            let between = if name == "qcow2" { read } else { Request::flush() };
            assert_eq!(allocations(&mut vm, 50, &between), 0, "{name}, packed: {}", packed != 0);
        }
    }
}
