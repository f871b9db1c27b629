//! The daemon's side of the kernel module vhost-blk (`kernel/vhost-blk`): gives rings of a guest to
//! the kernel, and takes them back.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use ringdisk_guest::Memory;
//! use ringdisk_vblk::{DiskSetup, Error, RingSetup, Vblk};
//!
//! /// The kernel serves one ring of a guest until `wait` returns.
//! fn serve(
//!     memory: Arc<Memory>,
//!     disk: &DiskSetup<'_>,
//!     ring: RingSetup<'_>,
//!     wait: impl FnOnce(),
//! ) -> Result<u16, Error> {
//!     let mut vblk = Vblk::open(1)?;
//!     let features = vblk.info().features;
//!     vblk.set_features(features)?;
//!     vblk.set_memory(memory)?;
//!     vblk.set_disk(Some(disk))?;
//!     vblk.start(0, ring)?;
//!     wait();
//!     // The next request is at this index of the avail ring.
//!     vblk.stop(0)
//! }
//! ```
//!
//! Promises, in this order:
//! 1. **The kernel writes to mapped memory only.** It gets addresses of this process; [`Vblk`]
//!    keeps the memory from the start of a ring until its stop has succeeded, whatever the caller
//!    drops, and leaks it when the ring cannot be stopped.
//! 2. **A module that does not fit is refused**: another module, another version, or one that was
//!    built for another vhost ([`Error::Layout`]), before it has done anything.
//! 3. **No action without a call**: the crate loads no module, starts no thread but the requested
//!    workers of the kernel, and logs nothing. Every error is one line that says what the user can
//!    do.
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
