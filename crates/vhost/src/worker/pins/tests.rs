//! Regions in pieces, slots that are used again, and which requests name them.

use std::io::Write;
use std::os::fd::AsFd;

use ringdisk_ring::{Config, Fd, Runtime};
use ringdisk_testkit::limits::needs;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

/// Bytes of a small piece, as a power of two.
const SHIFT: u32 = 16;
const PIECE: u64 = 1 << SHIFT;

/// A region of zeroes that takes no memory before it is touched.
fn region(guest_addr: u64, size: u64) -> Arc<Region> {
    let fd = memfd_create(c"pins", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, size).expect("a size");
    Region::map(fd, guest_addr, guest_addr, size, 0).expect("a region")
}

fn memory(regions: &[&Arc<Region>]) -> Arc<Memory> {
    Arc::new(Memory::new(regions.iter().map(|r| Arc::clone(r)).collect()).expect("memory"))
}

/// Reads a file of ones to an address of the guest. Whether that was an operation of registered
/// memory.
fn is_fixed(runtime: &mut Runtime, view: &View, guest_addr: u64, len: usize) -> bool {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&vec![1; len]).expect("bytes");
    let ring = runtime.ring().clone();
    let before = ring.counters().snapshot().fixed;
    let buf = view.piece(guest_addr, len).expect("memory of the guest");
    let read = runtime.block_on(ring.read(Fd::of(&file.as_fd()), 0, &buf));
    assert_eq!(read.map(|n| n as usize), Ok(len));
    assert_eq!(buf.to_vec(), vec![1; len]);
    ring.counters().snapshot().fixed > before
}

#[test]
fn data_in_one_piece_of_a_region_name_its_slot_and_others_go_the_ordinary_way() {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let mut pins = Pins::sized(&ring, Arc::default(), 8, SHIFT).expect("a table");
    // Three pieces, the last one shorter; and one that begins and ends anywhere.
    let (large, small) = (region(0, 2 * PIECE + 4096), region(1 << 30, 5000));

    let view = pins.view(&ring, memory(&[&large, &small]));

    for (guest_addr, len, fixed) in [
        (0, 4096, true),
        (0, 1 << SHIFT, true),
        (PIECE - 512, 512, true),
        (PIECE - 512, 1024, false),
        (PIECE, 4096, true),
        (2 * PIECE, 4096, true),
        (2 * PIECE - 4096, 8192, false),
        ((1 << 30) + 1, 4999, true),
    ] {
        assert_eq!(
            is_fixed(&mut runtime, &view, guest_addr, len),
            fixed,
            "{len} at {guest_addr:#x}"
        );
    }
    assert!(pins.reported.lock().expect("reported").is_empty());
}

#[test]
fn slots_of_memory_that_is_gone_are_used_again() {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let mut pins = Pins::sized(&ring, Arc::default(), 4, SHIFT).expect("a table");
    let kept = region(1 << 30, PIECE);
    for _ in 0..3 {
        let other = region(0, 3 * PIECE);
        let view = pins.view(&ring, memory(&[&kept, &other]));
        for piece in 0..3 {
            assert!(is_fixed(&mut runtime, &view, piece * PIECE, 4096));
        }
        let view = pins.view(&ring, memory(&[&kept]));
        assert!(is_fixed(&mut runtime, &view, 1 << 30, 4096));
    }
    assert!(pins.reported.lock().expect("reported").is_empty());
}

#[test]
fn what_finds_no_slot_works_unpinned_and_is_told_once() {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let mut pins = Pins::sized(&ring, Arc::default(), 2, SHIFT).expect("a table");
    let large = region(0, 4 * PIECE);

    let view = pins.view(&ring, memory(&[&large]));

    assert!(is_fixed(&mut runtime, &view, PIECE, 4096));
    assert!(!is_fixed(&mut runtime, &view, 2 * PIECE, 4096));
    assert!(!is_fixed(&mut runtime, &view, 4 * PIECE - 4096, 4096));
    assert_eq!(pins.reported.lock().expect("reported").len(), 1);
}

/// A front end can announce other regions for as long as it likes.
#[test]
fn of_regions_that_come_and_go_only_the_first_are_told() {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let mut pins = Pins::sized(&ring, Arc::default(), 1, SHIFT).expect("a table");
    for number in 0..1000 {
        let view = pins.view(&ring, memory(&[&region(number << 32, 2 * PIECE)]));
        assert!(!is_fixed(&mut runtime, &view, (number << 32) + PIECE, 4096));
    }
    assert_eq!(pins.reported.lock().expect("reported").len(), 16);
}

/// Bytes of memory that could be had.
fn memory_available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[test]
fn a_region_above_the_limit_of_the_kernel_is_pinned() {
    let size = (1 << 30) + (2 << 20);
    if !needs("4 GiB of free memory", memory_available() > 4 << 30) {
        return;
    }
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let mut pins = Pins::new(&ring, Arc::default()).expect("a table");
    let large = region(0, size);

    let view = pins.view(&ring, memory(&[&large]));

    if !needs("locked memory of 1 GiB", pins.reported.lock().expect("reported").is_empty()) {
        return;
    }
    assert!(is_fixed(&mut runtime, &view, (1 << 30) - 4096, 4096));
    assert!(is_fixed(&mut runtime, &view, 1 << 30, 4096));
    assert!(is_fixed(&mut runtime, &view, size - 512, 512));
    assert!(!is_fixed(&mut runtime, &view, (1 << 30) - 512, 1024));
}
