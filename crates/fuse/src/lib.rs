//! A disk as a file: mount, FUSE protocol, and what each file operation does on a disk.
//!
//! Rooms, from the wire inwards:
//! - [`abi`]: structures and numbers of the protocol;
//! - [`request`], [`reply`], [`negotiate`]: bytes to typed requests, results to bytes, the INIT exchange; shared by all transports
//!   and tested without a kernel;
//! - [`file`]: what each operation does on a disk;
//! - [`mount`]: making and removing the mount, without libfuse.

#![deny(unsafe_code)]

pub mod abi;
mod error;
pub mod file;
pub mod mount;
pub mod negotiate;
pub mod reply;
pub mod request;

pub use error::{Error, ErrorKind};
