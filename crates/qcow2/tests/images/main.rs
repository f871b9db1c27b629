//! Images: opened, mapped, written, made, changed, measured, checked and repaired, beside QEMU.

mod bitmaps;
mod bitmaps_broken;
mod broken;
mod check;
#[path = "../common/mod.rs"]
mod common;
mod create;
mod differential;
mod engine;
mod formats;
#[path = "../common/live.rs"]
mod live;
mod measure;
#[path = "../ops/mod.rs"]
mod ops;
mod ops_crash;
mod ops_damaged;
mod ops_resize;
mod ops_snapshots;
mod overlaps;
mod random;
mod second_reader;
mod waiting;
