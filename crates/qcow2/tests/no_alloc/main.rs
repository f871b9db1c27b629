//! Operations that allocate nothing, in a program whose allocator counts.

mod bitmaps;
#[path = "../common/mod.rs"]
mod common;
mod look_ups;

use ringdisk_testkit::allocations::{Counting, of_this_thread};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_counter_counts() {
    let before = of_this_thread();
    drop(std::hint::black_box(Box::new(5)));
    assert_eq!(of_this_thread() - before, 1);
}
