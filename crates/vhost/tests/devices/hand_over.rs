//! A disk that goes from an export to another one (`ringdisk serve --upgrade`, here in one
//! process), at moments at which its virtqueues do not simply run; and a hand-over that comes to
//! nothing.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, Format, ImageOptions};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images;
use ringdisk_testkit::model::{FrontEnd, Load, Vm, VmOptions, ask, bits};
use ringdisk_testkit::mount::scratch;
use ringdisk_vhost::{CommonOptions, Export, ExportOptions, Listen};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::{MIB, Served, close, load, open, serve};

const QUEUES: usize = 3;

fn options(packed: bool) -> VmOptions {
    let packed = if packed { bits::PACKED } else { 0 };
    let features = VmOptions::default().features | packed;
    VmOptions { features, queues: 3, indirect: 16, regions: 3, seed: 4, ..VmOptions::default() }
}

/// A raw image of 2 MiB under a machine with a load.
fn scene(packed: bool, what: impl FnOnce(Served, Vm, Load)) {
    let directory = scratch();
    let path = directory.path().join("disk");
    images::sparse(&path, 2 * MIB);
    let served = serve(open(&path, Format::Raw), |_| {});
    let vm = served.vm(options(packed));
    what(served, vm, Load::new(load(2 * MIB, 4)));
}

/// Another export has the disk, and the one before has ended.
fn taken_over(served: Served) -> (Export, std::sync::Arc<Disk>) {
    let (state, still) = served.export.hand_over_handle().hand_over().expect("a state");
    let options = ExportOptions {
        queues: 8,
        common: CommonOptions::with_threads(2),
        serial: String::from("model"),
        ..ExportOptions::new(Listen::Connect(served.path.clone()))
    };
    let image = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let prepared = runtime.block_on(Export::take_over(&ring, state, &image, options));
    let prepared = prepared.expect("it fits");
    assert!(still.commit());
    let disk = prepared.disk().clone();
    let export = prepared.go();
    served.export.wait().expect("it was handed over");
    (export, disk)
}

/// A hand-over that nobody takes.
fn in_vain(served: &Served) {
    drop(served.export.hand_over_handle().hand_over().expect("a state"));
}

#[test]
fn virtqueues_that_wait_for_their_memory_wait_in_the_next_export_too() {
    for packed in [false, true] {
        scene(packed, |served, mut vm, mut load| {
            load.run(&mut vm, 100);
            let regions = vm.regions.clone();
            let away = |vm: &mut Vm, load: &mut Load| {
                for region in &regions {
                    vm.front.remove_region(*region).expect("it was added");
                }
                load.reap(vm);
                for index in 0..QUEUES {
                    load.fill(vm, index);
                    vm.queues[index].kick_anyway();
                }
            };
            let back = |vm: &mut Vm, load: &mut Load| {
                assert_eq!(load.reap(vm), 0, "answered without memory");
                for region in vm.regions.clone().iter().rev() {
                    vm.front.add_region(*region, vm.ram.fd()).expect("it fits again");
                }
                load.run(vm, 100);
            };
            away(&mut vm, &mut load);
            in_vain(&served);
            back(&mut vm, &mut load);
            away(&mut vm, &mut load);
            let (export, disk) = taken_over(served);
            back(&mut vm, &mut load);
            load.drain(&mut vm);
            load.read_all(&mut vm);
            assert_eq!(export.broken_reason(), None);
            drop((vm, export));
            close(&disk);
        });
    }
}

#[test]
fn where_virtqueues_stood_at_a_reset_is_told_by_the_next_export() {
    scene(false, |served, mut vm, mut load| {
        load.run(&mut vm, 100);
        load.drain(&mut vm);
        // As QEMU up to 8.1 stops a device that goes on.
        vm.front.set(ask::SET_STATUS, 0).expect("a reset");
        let (export, _disk) = taken_over(served);
        let bases = (0..3).map(|index| vm.front.vring_base(index).expect("a base"));
        assert!(bases.sum::<u32>() >= 100);
        drop((vm, export));
    });
}

/// A process hands all of its disks over or none: what a front end does with its own files stops no
/// other disk.
#[test]
fn a_front_end_that_has_truncated_its_memory_is_let_go_and_the_disk_is_taken() {
    scene(false, |served, mut vm, mut load| {
        load.run(&mut vm, 100);
        load.drain(&mut vm);
        let file = memfd_create(c"going", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, MIB).expect("a memfd");
        vm.front.add_region([1 << 40, MIB, 1 << 46, 0], file.as_fd()).expect("there is room");
        ftruncate(&file, 0).expect("truncate");
        let path = served.path.clone();
        let directory = served.directory;
        let served = Served { directory: scratch(), ..served };
        let (export, _disk) = taken_over(served);
        vm.front.expect_end();
        let mut vm = Vm::started(FrontEnd::connect(&path), options(false));
        load.read_all(&mut vm);
        assert_eq!(export.broken_reason(), None);
        drop((vm, export, directory));
    });
}

#[test]
fn a_message_that_is_half_here_is_waited_for() {
    scene(false, |served, mut vm, mut load| {
        load.run(&mut vm, 100);
        let message = [15_u32.to_ne_bytes(), 1_u32.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        assert!(vm.front.send_raw(&message[..5], &[]));
        let handle = served.export.hand_over_handle();
        std::thread::sleep(Duration::from_millis(20));
        std::thread::scope(|scope| {
            let asked = scope.spawn(move || handle.hand_over().map(drop));
            std::thread::sleep(Duration::from_millis(200));
            assert!(vm.front.send_raw(&message[5..], &[]));
            asked.join().expect("an answer").expect("a state");
        });
        let (protocol, _) = vm.front.reply(ask::GET_PROTOCOL_FEATURES).expect("a reply");
        assert_eq!(protocol.len(), 8);
        load.run(&mut vm, 100);
        load.drain(&mut vm);
    });
}

#[test]
fn who_asks_for_an_export_that_has_ended_hears_it_at_once() {
    scene(false, |served, vm, _| {
        let handle = served.export.hand_over_handle();
        drop(vm);
        drop(served);
        let begun = Instant::now();
        let error = handle.hand_over().expect_err("it has ended");
        assert!(error.to_string().contains("served no longer"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    });
}
