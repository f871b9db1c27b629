//! An aligned request of a file allocates nothing. A program of its own, since it counts all
//! allocations of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use ringdisk_ring::{Config, IoBuf, Runtime};
use ringdisk_storage::{OpenOptions, Storage};
use ringdisk_testkit::mount::scratch;

/// The system's allocator, counted.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations_of_requests(direct: bool) -> u64 {
    let directory = scratch();
    let path = directory.path().join("image");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let options = OpenOptions { direct, ..OpenOptions::default() };
    let storage = Storage::open(&path, &options).unwrap();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(4096, 4096);
    runtime.block_on(async {
        let mut before = 0;
        for round in 0..300u64 {
            if round == 100 {
                before = ALLOCATIONS.load(Ordering::Relaxed);
            }
            let offset = round % 250 * 4096;
            assert_eq!(storage.read(&ring, offset, &buf).await, Ok(4096));
            assert_eq!(storage.write(&ring, offset, &buf).await, Ok(4096));
        }
        assert_eq!(storage.flush(&ring).await, Ok(()));
        ALLOCATIONS.load(Ordering::Relaxed) - before
    })
}

#[test]
fn aligned_requests_allocate_nothing() {
    assert_eq!(allocations_of_requests(false), 0, "buffered");
    assert_eq!(allocations_of_requests(true), 0, "direct");
}
