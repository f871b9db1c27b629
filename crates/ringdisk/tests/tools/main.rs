//! The commands for images, beside those of `qemu-img`, the command line itself, and the examples
//! of the README.

#![allow(clippy::unwrap_used)]

mod backup;
mod backup_rounds;
mod chain;
mod change;
mod cli;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod copy;
mod create;
mod error_hints;
mod mount;
mod names;
mod nbd;
mod nbd_bitmap;
mod nbd_tls;
mod nbdkit;
mod package;
mod progress_bars;
mod promtool;
mod ps;
mod qemu_img;
mod readme;
mod report;
mod top;
mod watch;
