//! An allocator that counts, for tests of paths that allocate nothing.
//!
//! Promises: every allocation and reallocation is counted; counting allocates nothing and takes no
//! lock.
//!
//! A test program that counts makes it its allocator:
//!
//! ```
//! use ringdisk_testkit::allocations::{Counting, of_this_thread};
//!
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//!
//! let before = of_this_thread();
//! drop(std::hint::black_box(Box::new(5)));
//! assert_eq!(of_this_thread() - before, 1);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, counted.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    static OF_THREAD: Cell<u64> = const { Cell::new(0) };
    static IS_LEFT_OUT: Cell<bool> = const { Cell::new(false) };
}

static OF_ALL: AtomicU64 = AtomicU64::new(0);

/// Allocations of this thread so far. Tests run side by side, each on a thread.
#[must_use]
pub fn of_this_thread() -> u64 {
    OF_THREAD.get()
}

/// Allocations so far of all threads but those that have left themselves out.
#[must_use]
pub fn of_all_threads() -> u64 {
    OF_ALL.load(Ordering::SeqCst)
}

/// Leaves this thread out of [`of_all_threads`] from now on: it is one of the test.
pub fn leave_this_thread_out() {
    IS_LEFT_OUT.set(true);
}

// SAFETY: every call goes to the system's allocator as it is; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller's promises are passed on.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        OF_THREAD.set(OF_THREAD.get() + 1);
        OF_ALL.fetch_add(u64::from(!IS_LEFT_OUT.get()), Ordering::SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller's promises are passed on.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}
