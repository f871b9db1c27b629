//! A disk that goes from an export to another one (`ringdisk serve --upgrade`, here in one process), at moments at which its virtqueues do
//! not simply run; and a hand-over that comes to nothing.

mod common;

use std::time::{Duration, Instant};

use common::{MIB, Served, close, load, open, serve};
use ringdisk_disk::{Disk, Format, ImageOptions};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images;
use ringdisk_testkit::model::{Load, Vm, VmOptions, ask, bits};
use ringdisk_testkit::mount::scratch;
use ringdisk_vhost::export::Threads;
use ringdisk_vhost::{Export, ExportOptions, Listen};

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
    let (parcel, still) = served.export.hand_over_handle().hand_over().expect("a parcel");
    let options = ExportOptions {
        queues: 8,
        threads: Threads::Count(2),
        serial: String::from("model"),
        ..ExportOptions::new(Listen::Connect(served.path.clone()))
    };
    let image = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let prepared = runtime.block_on(Export::take_over(&ring, parcel, &image, options));
    let prepared = prepared.expect("it fits");
    assert!(still.commit());
    let disk = prepared.disk().clone();
    let export = prepared.go().expect("a thread");
    served.export.wait().expect("it was handed over");
    (export, disk)
}

/// A hand-over that nobody takes.
fn in_vain(served: &Served) {
    drop(served.export.hand_over_handle().hand_over().expect("a parcel"));
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
