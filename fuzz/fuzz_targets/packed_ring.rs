//! Any writes of a driver to its packed ring, between any steps of the device: nothing panics, and
//! every segment is in memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ringdisk_fuzz::rings::drive;
use ringdisk_guest::Layout;

fuzz_target!(|bytes: &[u8]| drive(Layout::Packed, bytes));
