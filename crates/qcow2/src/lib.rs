//! The qcow2 format, for reading.
//!
//! Promises:
//! - [`Qcow2::open`] accepts exactly the images it understands: an unknown incompatible feature,
//!   encryption or a broken header is refused with a message that names the file, the field and
//!   what the user can do. Every table size is bounded before memory is asked for it
//!   ([`limits`]).
//! - [`Qcow2::map_cached`] takes no lock, allocates nothing and writes to no cache line that
//!   other threads write.
//! - [`Qcow2::map`] loads a missing piece of an L2 table once; only the requests that need that
//!   piece wait for it.
//! - Whatever an image holds, nothing here panics or reads outside the image file: a bad entry is
//!   `EIO` for the requests that touch it and for no other.
//!
//! One [`Qcow2`] is shared by all queue threads. It knows storage, and knows no export and no
//! backing chain: it says what the header names, the disk layer opens it.
//!
//! Source of the format: the public qcow2 specification ("Header", "Header extensions", "Cluster
//! mapping", "Extended L2 entries", "Snapshots", "Bitmaps").
#![forbid(unsafe_code)]

mod bitmaps;
mod check;
mod compressed;
mod concurrent;
mod create;
mod engine;
mod entry;
mod error;
mod extensions;
mod geometry;
mod header;
mod info;
pub mod limits;
mod measure;
mod open;
mod ops;
mod refcounts;
mod run;
mod snapshots;
mod sync;
mod table;
mod units;

// The model builds the files of `concurrent` a second time, on simulated primitives.
#[cfg(test)]
#[allow(clippy::duplicate_mod)]
mod model;
#[cfg(test)]
mod tests;

pub use check::{CheckHooks, CheckOptions, CheckReport, CheckVerdict, Repair, check};
#[doc(hidden)]
pub use check::{ImageBytes, check_bytes};
pub use compressed::{Compressed, compress};
pub use concurrent::grace::Grace;
pub use create::{CreateOptions, Preallocation, check_options, create};
pub use engine::below::{Below, Nothing};
pub use engine::{CacheCounters, Discard, OpenOptions, Qcow2, WriteBack};
pub use error::{Error, ErrorKind};
pub use header::is_qcow2;
pub use info::{Bitmap, CompressionType, FeatureClass, FeatureName};
pub use info::{Info, Snapshot, UnknownExtension};
pub use measure::{Measure, Measurement, measure_raw};
pub use ops::{BitmapContents, ResizeOptions, SnapshotMap, SnapshotNeed};
pub use run::{Extent, ExtentKind};
pub use units::{GuestCluster, GuestOffset, HostCluster, HostOffset};
