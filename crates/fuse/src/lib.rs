//! A disk as a file: mount, FUSE protocol, and what each file operation does on a disk.
//!
//! Rooms, from the wire inwards:
//! - [`abi`]: structures and numbers of the protocol;
//! - [`request`], [`reply`], [`negotiate`]: bytes to typed requests, results to bytes, the INIT
//!   exchange; shared by all transports and tested without a kernel;
//! - [`file`]: what each operation does on a disk;
//! - [`mount`]: making and removing the mount, without libfuse;
//! - `serve`: what every transport does with a request;
//! - `uring`: the transport over io_uring, beside `dev`, which such a mount keeps for what does not
//!   travel in rings;
//! - [`placement`]: which thread runs where, serves which queue, and has its memory on which node;
//! - `dev`: the transport over `/dev/fuse`: queues, entries, and where requests are served;
//! - `idle`: memory of large requests, taken at once and given back;
//! - [`export`], `keeper`: an export from its mount to its end;
//! - [`kept`]: what of it another process can go on with.

#![deny(unsafe_code)]

pub mod abi;
mod dev;
pub mod export;
pub mod file;
mod idle;
mod keeper;
pub mod kept;
pub mod mount;
pub mod negotiate;
pub mod placement;
pub mod reply;
pub mod request;
mod serve;
mod uring;

pub use export::{Export, ExportOptions, StopHandle, Transport};
pub use keeper::HaltReason;
pub use ringdisk_export::stats::{Histogram, QueueStats, Stats};
pub use ringdisk_export::{Error, ErrorKind, Numa, ThreadOptions, Threads};
#[doc(hidden)]
pub use uring::{Refuse, RingEntries, Stay};
pub use uring::{RingMode, ZeroCopy};
