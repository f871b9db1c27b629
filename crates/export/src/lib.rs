//! What every export has, whatever its protocol.
//!
//! An export serves a disk to clients: as a file (FUSE), to a virtual machine (vhost-user), or as
//! the next protocol has it.
//!
//! Promises: this crate knows no protocol. It holds what exports have in common; a protocol adds
//! how requests are fetched, parsed and answered, and nothing else.
//!
//! Where the queue threads of an export would run on this machine:
//!
//! ```
//! use ringdisk_export::{PlacementRule, ThreadOptions, place_threads};
//! use ringdisk_ring::Topology;
//!
//! let (machine, rule) = (Topology::read(), PlacementRule::default());
//! let options = ThreadOptions { threads: "2".parse()?, ..ThreadOptions::default() };
//! let mut warnings = Vec::new();
//! let places = place_threads(&machine, &options, &rule, &mut warnings)?;
//! assert_eq!(places.threads.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A complete export is `examples/socket.rs`; docs/adding-an-export.md walks through it.

#![forbid(unsafe_code)]

mod control;
mod depth;
mod drain;
mod error;
mod halt;
mod hand_over;
mod idle;
mod in_flight;
pub mod keep;
mod options;
mod pending;
mod placement;
mod pulse;
mod retry;
mod second_export;
pub mod stats;
mod thread;
mod trial;

pub use control::ControlThread;
pub use depth::DepthRule;
pub use drain::{Admission, wait_drained};
pub use error::{Error, ErrorKind};
pub use halt::{HaltReason, close_disk};
pub use hand_over::{
    HandOverRequest, HandOverState, HandOverSteps, HandedOver, ask_hand_over, carry_out,
};
pub use idle::IdleMemory;
pub use in_flight::{Clock, InFlight};
pub use options::{CommonOptions, Numa, THREADS_MAX, ThreadOptions, Threads};
pub use pending::{Gone, Pending};
pub use placement::{OwnCpu, PlacementRule, ThreadPlaces, cpus_are, cpus_named, place_threads};
pub use pulse::Pulse;
pub use retry::{retry_while, wait_until};
pub use second_export::SecondExport;
pub use thread::{EndThread, POLL_MAX, QueueThread, QueueWork, Running, ThreadHandle, ThreadSetup};
pub use thread::{ask_all, stop_threads};
pub use trial::{Measured, Pause, Trial, TrialRule, per_second};
