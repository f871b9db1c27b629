//! What `/sys` says of block devices.
//!
//! Promises: reads only, a file or two for each question. Control path.

use std::path::PathBuf;

use rustix::fs::{major, minor};

/// A number that `/sys` shows of the request queue of a block device. Blocks for a read or two.
/// `None`: it is not shown.
///
/// * `device`: its number (`st_rdev`).
pub(crate) fn queue_number(device: u64, name: &str) -> Option<u64> {
    let path = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A partition has no queue of its own.
    let places = ["queue", "../queue"].map(|queue| PathBuf::from(&path).join(queue).join(name));
    // The name in /sys is a link, and `..` shall go up from what it leads to: the kernel resolves
    // it so.
    let text = places.iter().find_map(|place| std::fs::read_to_string(place).ok())?;
    text.trim().parse().ok()
}
