//! What an export serves: null, raw and qcow2 images with their backing chains.
//!
//! Promises:
//! 1. **No lock, no allocation, no shared reference count** for a request whose mapping is cached.
//! 2. **An image is not trusted.** The files that it names are opened inside the allowed
//!    directories only, with the format that the image states; nothing is guessed.
//! 3. **Chains are flat.** Layers are a list and look-ups loop over it, so a deep chain costs no
//!    stack.
//! 4. **Nothing from outside ends the process**: malformed images give an [`Error`], failing
//!    storage gives an errno.

#![forbid(unsafe_code)]

mod below;
mod chain;
mod client_errors;
pub mod describe;
mod disk;
mod error;
mod gate;
mod graph;
mod guard;
pub mod jobs;
mod layer;
mod lend;
mod life;
mod limits;
mod live;
mod lost;
mod map;
pub mod name;
pub mod names_note;
mod note;
mod null;
mod open;
mod options;
mod partition;
mod plain;
pub mod probe;
mod progress;
mod read;
pub mod resolve;
mod status;
#[cfg(test)]
mod tests;
mod watch;
mod window;
mod write;
mod write_back;

pub use client_errors::ClientErrors;
pub use disk::Disk;
pub use error::{Error, ErrorKind};
pub use layer::Layer;
pub use life::HandOver;
pub use limits::BlockLimits;
pub use live::{
    Backing, CommitOptions, NewSize, OverlayOptions, ResizeOptions, Resized, SnapshotChange,
};
pub use map::{Mapped, Mapping, View};
pub use open::guess;
pub use options::{Cache, DetectZeroes, Discard, Format, ImageOptions, NullOptions, Source};
pub use plain::Plain;
pub use progress::Progress;
pub use read::PIECES_MAX;
pub use ringdisk_ring::Errno;
pub use status::{BlockStatus, MapEntry};
pub use watch::{Change, SizeWatch};

/// Layers of a backing chain, top image included. Each holds a descriptor (two with a data file),
/// so 256 fit into the usual limit of 1024 descriptors beside everything else; chains longer than
/// that come from loops or scripts gone wild.
pub const LAYERS_MAX: usize = 256;
