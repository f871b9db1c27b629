//! The disk that an export serves: a null, raw or qcow2 image with its backing chain.
//!
//! A program that only wants to read or change an image uses [`blocking`], without async functions
//! or rings:
//!
//! ```
//! use ringdisk_disk::Bytes;
//! use ringdisk_disk::blocking::{CreateOptions, Image, create};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk.qcow2");
//! create(&path, &CreateOptions { size: Bytes(1 << 30), ..CreateOptions::default() })?;
//!
//! let image = Image::open(&path)?;
//! image.write_at(&[7; 4096], 1 << 20)?;
//! let mut bytes = [0; 4096];
//! image.read_at(&mut bytes, 1 << 20)?;
//! assert_eq!(bytes, [7; 4096]);
//!
//! for run in image.map(0, image.size())? {
//!     println!("{} bytes at {}: allocated {}", run.status.len, run.start, run.status.present);
//! }
//! image.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! An export uses [`Disk`] on the ring of each of its queue threads.
//!
//! Promises:
//! 1. **No lock, no allocation, no shared reference count** for a request whose mapping is cached.
//! 2. **An image is not trusted.** The files that it names are opened inside the allowed
//!    directories only, with the format that the image states; no format is guessed for them.
//! 3. **Chains are flat.** Layers are a list and look-ups loop over it, so a deep chain costs no
//!    stack.
//! 4. **Nothing from outside ends the process**: malformed images give an [`Error`], failing
//!    storage gives an errno.
//!
//! Modules use one another in one direction only, from left to right:
//!
//! ```text
//! options, name, resolve ◄ layer ◄ chain ◄ graph ◄ disk ◄ request ◄ partition ◄ open
//! open ◄ live ◄ ownership, operations, checkpoint ◄ backup      open ◄ blocking
//! ```

#![forbid(unsafe_code)]
// Tests await an open inside several blocks of their own, and the compiler counts the depth.
#![cfg_attr(test, recursion_limit = "256")]

mod background;
mod backup;
pub mod blocking;
mod cause;
mod chain;
mod checkpoint;
mod client_errors;
mod clock;
mod commit_options;
pub mod describe;
mod disk;
mod error;
mod events;
mod format_note;
mod frozen_layout;
mod graph;
mod kept_reads;
mod layer;
mod limits;
mod live;
mod long_changes;
mod lost_names;
pub mod name;
pub mod names_note;
mod notices;
mod open;
pub mod operations;
mod options;
mod ownership;
mod partition;
mod passthrough;
pub mod probe;
mod progress;
mod request;
pub mod resolve;
mod task_join;
mod task_mutex;
#[cfg(test)]
mod tests;
mod watch;
pub mod xattr;

pub use backup::{Backup, BackupOptions, BackupSync};
pub use cause::Cause;
pub use chain::{BlockStatus, PIECES_MAX};
pub use checkpoint::{
    Checkpoint, CheckpointEnd, CheckpointOptions, CheckpointState, DirtyRanges, Held, NewBitmap,
    Prepared,
};
pub use client_errors::ClientErrors;
pub use commit_options::CommitOptions;
pub use disk::Disk;
pub use error::{Error, ErrorKind};
pub use events::{Batch, Event, Events, QUEUE_MAX as EVENTS_MAX};
pub use frozen_layout::Plain;
pub use layer::Layer;
pub use layer::guard::SECTOR_ALIGN;
pub use limits::BlockLimits;
pub use live::{
    Backing, MirrorControl, MirrorEnd, MirrorLeft, MirrorOptions, MirrorSync, NewSize,
    OverlayOptions, ResizeOptions, Resized, SnapshotChange, StreamOptions,
};
pub use lost_names::LOST_NAMES_TARGET;
pub use open::{StoredImage, guess, note_file};
pub use options::{
    AllowedHost, Cache, DetectZeroes, Discard, Format, ImageOptions, NullOptions, SnapshotChoice,
    Source,
};
pub use ownership::HandOver;
pub use progress::{OnError, Pause, Progress, SPACE_RETRY_INTERVAL, Tries};
pub use request::{MapEntry, Mapped, Mapping, View};
pub use ringdisk_qcow2::Bytes;
pub use ringdisk_ring::Errno;
pub use watch::{Change, SizeWatch};

/// Layers of a backing chain, top image included. Each holds a descriptor (two with a data file),
/// so 256 fit into the usual limit of 1024 descriptors beside everything else; chains longer than
/// that come from loops or scripts gone wild.
pub const LAYERS_MAX: usize = 256;
