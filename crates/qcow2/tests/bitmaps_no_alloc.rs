//! Recording a write allocates nothing: counted.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use common::{Images, MIB, runtime};
use ringdisk_qcow2::{GuestOffset, Nothing, OpenOptions, Qcow2};
use ringdisk_ring::IoBuf;
use ringdisk_storage::{Lock, Storage};

struct Counting;

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator as it is; the counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
        let before = ALLOCATIONS.get();
        for number in 0..1000 {
            image.write(&ring, GuestOffset(number * 8192), &buf, &Nothing).await.expect("room");
        }
        let allocations = ALLOCATIONS.get() - before;
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
