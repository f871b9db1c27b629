//! What queue threads that nobody uses take: memory of this process, so this test is alone in its
//! program.

mod common;

use common::{MIB, serve, simulated};
use ringdisk_testkit::limits::resident_bytes;
use ringdisk_vhost::Threads;

/// Bytes for a thread: 52 KiB of its ring, which the kernel takes at once, and some pages of stack
/// and heap.
const BYTES_MAX: u64 = 192 << 10;

#[test]
fn a_queue_thread_without_requests_takes_little() {
    let taken = |threads| {
        let (_sim, disk) = simulated(MIB);
        let before = resident_bytes(std::process::id());
        let served = serve(disk, |options| {
            options.queues = 64;
            options.common.threads.threads = Threads::Count(threads);
        });
        let taken = resident_bytes(std::process::id()).saturating_sub(before);
        drop(served);
        taken
    };
    // What only the first takes: code, the log of the test.
    let one = taken(1);

    let many = taken(61);

    let each = many / 61;
    println!("{} KiB for each thread, {} for the first", each >> 10, one >> 10);
    assert!(each <= BYTES_MAX);
}
