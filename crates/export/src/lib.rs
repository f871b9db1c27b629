//! What every export has, whatever its protocol.
//!
//! An export serves a disk to clients: as a file (FUSE), to a virtual machine (vhost-user), or as
//! the next protocol has it. This crate holds what they have in common; a protocol adds how
//! requests are fetched, parsed and answered, and nothing else.

#![forbid(unsafe_code)]

mod error;
mod options;
mod placement;
pub mod stats;

pub use error::{Error, ErrorKind};
pub use options::{Numa, THREADS_MAX, ThreadOptions, Threads};
pub use placement::{OwnCpu, cpus_are, cpus_named, cpus_of_threads, usable_cpus};
