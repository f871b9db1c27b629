//! Where bytes live: regular files, block devices, and what else behaves like them.
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
//! [`Storage`] is shared by all queue threads; its asynchronous methods run on the thread of the
//! ring that they are given. Opening and the plain methods belong to control threads: they may
//! block briefly (one system call).
#![deny(unsafe_code)]

mod custom;
mod error;
mod extend;
mod failure;
#[allow(unsafe_code)]
mod ffi;
mod file;
mod gate;
mod holders;
mod life;
mod lock;
mod names;
mod open;
mod opener;
mod options;
mod pages;
mod probe;
mod read;
mod reopen;
mod retry;
mod space;
mod storage;
#[cfg(test)]
mod tests;
mod topology;
mod write;

pub use custom::{CustomStorage, LocalFuture};
pub use error::{Error, ErrorKind};
pub use failure::Failure;
pub use names::NameLost;
pub use opener::Opener;
pub use options::{Allocation, Kind, Limits, Lock, OpenOptions, Preallocation};
pub use ringdisk_ring::Errno;
pub use storage::Storage;
pub use topology::Topology;
