//! Storage for disk images: regular files, block devices, exports of NBD servers, and custom
//! storage behind a trait.
//!
//! ```
//! use ringdisk_ring::{Config, IoBuf, Runtime};
//! use ringdisk_storage::{OpenOptions, Storage};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk.raw");
//! let storage = Storage::open(&path, &OpenOptions { create: true, ..OpenOptions::default() })?;
//!
//! let mut runtime = Runtime::new(Config::default())?;
//! let ring = runtime.ring().clone();
//! let content = runtime.block_on(async {
//!     let buf = IoBuf::new(4096, 4096);
//!     buf.copy_from_slice(0, b"boot");
//!     // Written past the end: the file grows.
//!     storage.write(&ring, 8192, &buf).await?;
//!     storage.flush(&ring).await?;
//!     let len = storage.read(&ring, 8192, &buf).await?;
//!     Ok::<_, ringdisk_storage::Errno>(buf.slice(0..len).to_vec())
//! })?;
//! assert_eq!(&content[..4], b"boot");
//! assert_eq!(storage.len(), 8192 + 4096);
//! # Ok(())
//! # }
//! ```
//!
//! Promises:
//! 1. An aligned read or write of a file is one operation on the caller's ring, to or from the
//!    caller's memory: no allocation, no lock, no reference count.
//! 2. Any offset, length and memory address works. What O_DIRECT does not take is copied, and a
//!    write to a part of a block never loses a concurrent write to another part.
//! 3. Errors and short transfers are reported as what they are; storage that shrinks while in use
//!    reads short, and nothing panics.
//! 4. A flush that succeeds reached the device; after one that failed on the page cache none
//!    succeeds any more.
//! 5. Images are locked the way QEMU locks them (module `lock`), so the two refuse each other's
//!    writers.
//!
//! Each module uses only modules in rows above its own (a test of the workspace checks that there
//! is no circle):
//!
//! | row | modules |
//! |---|---|
//! | words | `error`, `failure`, `kinds`, `endpoint`, `opener` |
//! | system calls, waiting | `ffi`, `block_locks`, `holders`, `sysfs` |
//! | of an open file | `lock`, `options`, `pages`, `probe`, `retry` |
//! | a file | `file`, `read`, `write`, `extend`, `space` |
//! | opening | `open`, `reopen` |
//! | other storage | `nbd` |
//! | all kinds | `custom`, `storage`, `device_limits`, `names`, `life`, `outside` |
//!
//! [`Storage`] is shared by all queue threads; its asynchronous methods run on the thread of the
//! ring that they are given. Opening and the plain methods belong to control threads: they may
//! block briefly (one system call).
#![deny(unsafe_code)]

mod block_locks;
mod buffer_probe;
mod cause;
mod custom;
mod delegated_note;
mod device_limits;
mod endpoint;
mod error;
mod extend;
mod failure;
#[allow(unsafe_code)]
mod ffi;
mod file;
mod file_name;
mod holders;
mod kinds;
mod lock;
mod nbd;
mod open;
mod opener;
mod options;
mod ownership;
mod probe;
mod read;
mod reopen;
mod retry;
mod space;
mod storage;
mod sysfs;
#[cfg(test)]
mod tests;
mod write;

pub use cause::{Cause, OtherUse};
pub use custom::{CustomStorage, LocalFuture};
pub use device_limits::DeviceLimits;
pub use endpoint::NbdEndpoint;
pub use error::{Error, ErrorKind, words};
pub use failure::Failure;
pub use ffi::local_offset;
pub use file_name::NameLost;
pub use kinds::{Allocation, Kind, Limits, Lock, Preallocation};
pub use nbd::{
    BadAddress, NBD_PORT, NBD_RECONNECT_DEFAULT, NbdAddress, NbdOptions, NbdServer, NbdTls,
};
pub use opener::Opener;
pub use options::OpenOptions;
pub use ringdisk_ring::Errno;
pub use storage::Storage;
