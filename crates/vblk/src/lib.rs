//! The daemon's side of the kernel module vhost-blk (`kernel/vhost-blk`): rings of a guest are
//! handed to the kernel, and taken back.
//!
//! Promises, in this order:
//! 1. **The kernel writes to nothing that is not there.** It is told addresses of ours; the memory
//!    behind them is kept by [`Vblk`] from the start of a ring until its stop has succeeded,
//!    whatever the caller drops, and is leaked when it cannot be stopped.
//! 2. **Nothing is used that does not fit**: another module, another version of it, or one that was
//!    built for another vhost ([`Error::Layout`]) is refused before it has done anything.
//! 3. **It does nothing by itself**: loads no module, starts no thread but the kernel's workers
//!    that were asked for, logs nothing. Every error is one line that says what the user can do.
//!
//! For control threads: calls block, and [`Vblk::stop`] waits for requests in flight. Only the
//! process that opened a [`Vblk`] can use it, not its children (the kernel's workers run in the
//! memory of the owner). `unsafe` is in `kernel` only.

#![deny(unsafe_code)]

mod btf;
mod device;
mod error;
mod kernel;
mod layout;
mod stats;
mod worker;

pub use device::{DiskSetup, Engine, Info, RingSetup, Vblk};
pub use error::Error;
pub use layout::{LayoutError, check as check_layout};
pub use stats::{State, Stats};
pub use worker::{Placement, Worker};
