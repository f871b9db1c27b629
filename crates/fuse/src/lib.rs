//! A disk as a file: mount, FUSE protocol, and what each file operation does on a disk.
//!
//! Promises: an export answers every request that the kernel hands it, or says why it has ended; a
//! request whose mapping is cached allocates nothing and takes no lock.
//!
//! ```
//! use ringdisk_disk::{Bytes, Disk, NullOptions};
//! use ringdisk_fuse::{Export, ExportOptions};
//!
//! # let directory = tempfile::tempdir()?;
//! # let file = directory.path().join("disk");
//! let disk = Disk::null(&NullOptions { size: Bytes(1 << 20), ..NullOptions::default() });
//! std::fs::write(&file, "")?;
//! match Export::start(disk, ExportOptions::new(&file)) {
//!     Ok(export) => {
//!         assert_eq!(std::fs::metadata(&file)?.len(), 1 << 20);
//!         export.stop_handle().stop();
//!         export.wait()?;
//!     }
//!     // Without /dev/fuse, or without the right to mount.
//!     Err(why) => eprintln!("{why}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
//!   [`topology`] shows it;
//! - `transport`: which transport is taken;
//! - `dev`: the transport over `/dev/fuse`: queues, entries, and where requests are served;
//! - `queue`: what a queue is to every transport; `thread`: what joins them on its thread;
//! - [`export`], `control`: an export from its mount to its end;
//! - [`kept`], `mount_terms`: what of it another process can go on with.

#![deny(unsafe_code)]

pub mod abi;
mod control;
mod dev;
mod events;
pub mod export;
pub mod file;
pub mod kept;
pub mod mount;
mod mount_terms;
pub mod negotiate;
pub mod placement;
mod queue;
pub mod reply;
pub mod request;
mod serve;
#[doc(hidden)]
pub mod testing;
mod thread;
pub mod topology;
mod transport;
mod uring;

pub use export::{Export, ExportOptions, HandOverHandle, Prepared, StopHandle};
pub use ringdisk_export::stats::{Histogram, QueueStats, Stats};
pub use ringdisk_export::{
    CommonOptions, Error, ErrorKind, HaltReason, Numa, ThreadOptions, Threads,
};
pub use transport::Transport;
#[doc(hidden)]
pub use uring::{Refuse, RingEntries, Stay};
pub use uring::{RingMode, ZeroCopy};
