//! The commands for images, beside those of `qemu-img`, and the command line itself.

mod chain;
mod change;
mod cli;
#[path = "../common/mod.rs"]
mod common;
mod copy;
mod create;
mod mount;
