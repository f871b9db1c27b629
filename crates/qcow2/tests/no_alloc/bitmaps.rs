//! Recording a write allocates nothing: counted.

use std::sync::Arc;

use ringdisk_qcow2::{GuestOffset, Nothing, OpenOptions, Qcow2};
use ringdisk_ring::IoBuf;
use ringdisk_storage::{Lock, Storage};

use ringdisk_testkit::allocations::of_this_thread;

use crate::common::{Images, MIB, runtime};

/// Allocations of 1000 writes to space that is there, recorded by so many bitmaps.
fn allocations(bitmaps: u32) -> u64 {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("image", "preallocation=metadata", 8 * MIB);
    for number in 0..bitmaps {
        let name = number.to_string();
        images.qemu_img(&["bitmap", "--add", "-g", "512", "image", &name]);
    }
    let options = ringdisk_storage::OpenOptions { lock: Lock::None, ..Default::default() };
    let storage = Arc::new(Storage::open(&path, &options).expect("the image"));
    let ring = runtime.ring().clone();
    let options = OpenOptions { writable: true, ..Default::default() };
    runtime.block_on(async {
        let image = Qcow2::open(&ring, storage, &options).await.expect("a good image");
        let buf = IoBuf::new(4096, 4096);
        // The first write marks the bitmaps and loads the L2 table.
        image.write(&ring, GuestOffset(0), &buf, &Nothing).await.expect("room");
        let before = of_this_thread();
        for number in 0..1000 {
            image.write(&ring, GuestOffset(number * 8192), &buf, &Nothing).await.expect("room");
        }
        let allocations = of_this_thread() - before;
        image.close(&ring).await.expect("a clean close");
        allocations
    })
}

#[test]
fn recording_allocates_nothing() {
    let without = allocations(0);
    assert_eq!(allocations(1), without);
    assert_eq!(allocations(3), without);
}
