//! What every export has, whatever its protocol.
//!
//! An export serves a disk to clients: as a file (FUSE), to a virtual machine (vhost-user), or as
//! the next protocol has it. This crate holds what they have in common; a protocol adds how
//! requests are fetched, parsed and answered, and nothing else.

#![forbid(unsafe_code)]

mod drain;
mod error;
mod halt;
mod options;
mod pending;
mod placement;
pub mod stats;
mod thread;
mod trial;

pub use drain::{Admission, wait_drained};
pub use error::{Error, ErrorKind};
pub use halt::{HaltReason, close_disk};
pub use options::{Numa, THREADS_MAX, ThreadOptions, Threads};
pub use pending::{Gone, Pending};
pub use placement::{OwnCpu, PlacementRule, ThreadPlaces, cpus_are, cpus_named, place_threads};
pub use thread::{EndThread, QueueThread, QueueWork, Running, ThreadSetup, ask_all, stop_threads};
pub use trial::{Measured, Pause, Trial, TrialRule, per_second};
