//! Any writes of a driver to its split ring, between any steps of the device: nothing panics, and
//! every segment is in memory.

use ringdisk_guest::Layout;

use crate::rings::drive;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    drive(Layout::Split, bytes);
}
