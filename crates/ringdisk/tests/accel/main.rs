//! `ringdisk serve --accel`. What needs the kernel module runs where it is loaded (`tests/vm/run
//! vhost-blk`), one test at a time.

#![allow(clippy::unwrap_used)]

mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
mod disks;
mod memory;
mod qemu;
mod refused;
mod serving;
mod threads;
