//! The one place that talks to the serving side.
//!
//! Promises: everything about the transport that the command line shows goes through here, in the
//! types of this crate.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::Disk;

use crate::cli::Threads;
use crate::report::{Exit, Failure};
use crate::stats::Stats;

/// What to serve, and how.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) mountpoint: PathBuf,
    pub(crate) threads: Threads,
    pub(crate) queue_depth: Option<u32>,
    pub(crate) growable: bool,
    pub(crate) read_only: bool,
    pub(crate) allow_other: bool,
    pub(crate) kernel_cache: bool,
    pub(crate) io_timeout: Option<Duration>,
    /// Shown as the source of the mount and in statistics.
    pub(crate) name: String,
}

/// A mount that answers.
pub(crate) struct Served {}

/// Stops a mount and reads its counters, from any thread.
#[derive(Clone)]
pub(crate) struct Handle {}

impl Served {
    /// Mounts and serves.
    ///
    /// Errors: those of the mount and of the rings.
    pub(crate) fn start(disk: Arc<Disk>, options: &Options) -> Result<Served, Failure> {
        let _ = (disk, options.queue_depth, options.growable, options.read_only);
        let _ = (options.allow_other, options.kernel_cache, options.io_timeout, &options.name);
        let _ = (&options.mountpoint, options.threads);
        Err(Failure::new(Exit::Unsupported, "not there yet"))
    }

    /// What was asked for and could not be had, each with the command that would enable it.
    pub(crate) fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// For the signal thread.
    pub(crate) fn handle(&self) -> Handle {
        Handle {}
    }

    /// Blocks until the mount has ended. Its numbers, and why it ended if that was not asked for.
    pub(crate) fn wait(self) -> (Stats, Result<(), Failure>) {
        (Stats::default(), Ok(()))
    }
}

impl Handle {
    /// Asks for a clean stop; returns at once.
    pub(crate) fn stop(&self) {}

    /// The counters now.
    pub(crate) fn stats(&self) -> Stats {
        Stats::default()
    }
}
