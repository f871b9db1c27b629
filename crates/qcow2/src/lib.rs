//! Reads and writes qcow2 images: look-ups, writes, snapshots, bitmaps, check and repair.
//!
//! ```
//! use std::sync::Arc;
//!
//! use ringdisk_qcow2::{
//!     Bytes, CreateOptions, ExtentKind, GuestOffset, Nothing, OpenOptions, Qcow2, create,
//! };
//! use ringdisk_ring::{Config, IoBuf, Runtime};
//! use ringdisk_storage::{self as storage, Storage};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk.qcow2");
//! let new = storage::OpenOptions { create: true, ..storage::OpenOptions::default() };
//! let file = Arc::new(Storage::open(&path, &new)?);
//! let mut runtime = Runtime::new(Config::default())?;
//! let ring = runtime.ring().clone();
//! runtime.block_on(async {
//!     let size = CreateOptions { size: Bytes(1 << 30), ..CreateOptions::default() };
//!     create(&ring, &file, None, &size).await?;
//!     let writable = OpenOptions { writable: true, ..OpenOptions::default() };
//!     let image = Qcow2::open(&ring, file, &writable).await?;
//!
//!     let buf = IoBuf::new(4096, 4096);
//!     buf.copy_from_slice(0, b"boot");
//!     let at = GuestOffset(1 << 20);
//!     // There is no backing file.
//!     image.write(&ring, at, &buf, &Nothing).await?;
//!     image.flush(&ring).await?;
//!
//!     let extent = image.map(&ring, at, Bytes(4096)).await?;
//!     let ExtentKind::Data { offset } = extent.kind else { unreachable!("it was written") };
//!     image.data_storage().read(&ring, offset.0, &buf).await?;
//!     assert_eq!(&buf.to_vec()[..4], b"boot");
//!     image.close(&ring).await?;
//!     Ok(())
//! })
//! # }
//! ```
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
//! - After a crash at any point an image that was written opens, a check finds leaked clusters at
//!   most, and everything is there that was written before a flush that was answered.
//! - Whatever an image holds, nothing here panics or reads outside the image file: a bad entry is
//!   `EIO` for the requests that touch it and for no other.
//!
//! One [`Qcow2`] is shared by all queue threads. It knows storage, and knows no export and no
//! backing chain: it says what the header names, the disk layer opens it.
//!
//! Each module uses only modules in rows above its own (a test of the workspace checks that there
//! is no circle):
//!
//! | row | modules |
//! |---|---|
//! | words | `units`, `limits`, `sync`, `error`, `info`, `table` |
//! | structures that threads share | `concurrent` (slice cache, claims, grace periods) |
//! | the format | `extensions`, `geometry`, `header`, `snapshots` |
//! | entries and clusters | `compressed`, `run`, `entry`, `refcounts`, `bitmaps` |
//! | the open image | `engine` (look-up, write, zero, flush) |
//! | without an open image | `check`, `create`, `measure` |
//! | opening | `open` |
//! | changes while no request runs | `ops` |
//!
//! Source of the format: the public qcow2 specification ("Header", "Header extensions", "Cluster
//! mapping", "Extended L2 entries", "Snapshots", "Bitmaps").
#![forbid(unsafe_code)]

mod bitmaps;
mod cause;
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

pub use cause::Cause;
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
pub use snapshots::SnapshotChoice;
pub use units::{Bytes, GuestCluster, GuestOffset, HostCluster, HostOffset};
