//! Features and numbers of virtqueues: what is written is read, however requests are cut and laid.

use std::sync::Arc;

use ringdisk_disk::Format;
use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{Load, VmOptions, bits};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::sim::{Fault, OpKind, When};

use crate::common::{MIB, close, load, open, serve, simulated};

/// One kind of virtqueue.
#[derive(Clone, Copy, Debug)]
struct Shape {
    packed: bool,
    event_idx: bool,
    indirect: bool,
    queues: u16,
    size: u16,
}

/// All kinds; each pair of two properties occurs in the sixteen that are taken otherwise: for each
/// number of queues one combination of the others and its opposite.
fn shapes() -> Vec<Shape> {
    let mut all = Vec::new();
    for packed in [false, true] {
        for event_idx in [false, true] {
            for indirect in [false, true] {
                for queues in 1..=8 {
                    // Packed rings of any size.
                    let size = if packed { 61 + 7 * queues } else { 16 << (queues % 4) };
                    all.push(Shape { packed, event_idx, indirect, queues, size });
                }
            }
        }
    }
    let pairs = |(number, shape): (usize, Shape)| {
        let combination = number / 8;
        let one = usize::from(shape.queues) - 1;
        (combination == one || combination == 7 - one).then_some(shape)
    };
    if full() { all } else { all.into_iter().enumerate().filter_map(pairs).collect() }
}

fn options(shape: Shape) -> VmOptions {
    let Shape { packed, event_idx, indirect, queues, size } = shape;
    let not = |there: bool, bit: u64| if there { 0 } else { bit };
    let without = not(packed, bits::PACKED)
        | not(event_idx, bits::EVENT_IDX)
        | not(indirect, bits::INDIRECT)
        | bits::LOG_ALL;
    VmOptions {
        features: !without,
        queues,
        size,
        indirect: 16,
        regions: 1 + u64::from(queues),
        seed: u64::from(size),
        ..VmOptions::default()
    }
}

#[test]
fn every_kind_of_virtqueue_reads_what_was_written_on_simulated_storage() {
    let mut discards = 0;
    for (seed, shape) in (1..).zip(shapes()) {
        println!("{shape:?}");
        let (sim, disk) = simulated(2 * MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(shape));
        let mut load = Load::new(load(2 * MIB, seed));
        load.run(&mut vm, 300);
        load.drain(&mut vm);
        load.read_all(&mut vm);
        load.judge(&sim.image());
        assert_eq!(served.export.broken_reason(), None);
        discards += sim.count(OpKind::Discard);
    }
    assert!(discards > 20, "{discards}");
}

#[test]
#[should_panic(expected = "it may hold")]
fn a_discard_that_does_nothing_is_found() {
    let (sim, disk) = simulated(2 * MIB);
    sim.on(When::kind(OpKind::Discard), Fault::Lie);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(shapes()[0]));
    let mut load = Load::new(load(2 * MIB, 1));
    load.run(&mut vm, 2000);
    load.drain(&mut vm);
    load.read_all(&mut vm);
}

#[test]
fn every_kind_of_virtqueue_reads_what_was_written_on_a_file() {
    let directory = scratch();
    let path = directory.path().join("disk.raw");
    for (seed, shape) in (100..).zip(shapes()) {
        images::sparse(&path, 4 * MIB);
        let served = serve(open(&path, Format::Raw), |_| {});
        let mut vm = served.vm(options(shape));
        let mut load = Load::new(load(4 * MIB, seed));
        load.run(&mut vm, 500);
        load.drain(&mut vm);
        load.judge(&std::fs::read(&path).expect("the image"));
    }
}

#[test]
fn every_kind_of_virtqueue_reads_what_was_written_in_a_qcow2_image() {
    let directory = scratch();
    let path = directory.path().join("disk.qcow2");
    for (seed, shape) in (200..).zip(shapes()) {
        images::qcow2(&path, "4M", "cluster_size=4k");
        let disk = open(&path, Format::Qcow2);
        let served = serve(Arc::clone(&disk), |_| {});
        let mut vm = served.vm(options(shape));
        let mut load = Load::new(load(4 * MIB, seed));
        load.run(&mut vm, 500);
        load.drain(&mut vm);
        load.read_all(&mut vm);
        drop(vm);
        drop(served);
        close(&disk);
        drop(disk);
        images::assert_clean(&path);
        load.judge(&std::fs::read(images::reference(&path, "qcow2")).expect("the image"));
    }
}
