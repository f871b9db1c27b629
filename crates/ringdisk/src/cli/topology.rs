//! The words of `ringdisk topology`.
//!
//! Promises: parses only; neither the machine nor a server is looked at.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use crate::cli::PlacementArgs;

const TOPOLOGY_EXAMPLES: &str = "\
Examples:
  ringdisk topology
      this machine, and what a mount would get here
  ringdisk topology --transport uring --threads 2 --cpus 0-7
      what a mount with these options would get
  ringdisk topology /srv/disk
      what a mount has got: threads with their CPUs, queues, entries, and where its buffers are";

/// Show CPUs and nodes, and where a mount is served
///
/// Without MOUNTPOINT: the machine as this process may use it, and the threads, queues and buffers
/// that a mount with the given options would get here. With MOUNTPOINT: what that mount has got, as
/// its server sees it now. Buffers are looked up page by page; where the system does not tell (a
/// container), their node is unknown.
#[derive(Args, Debug)]
#[command(after_help = TOPOLOGY_EXAMPLES)]
pub(crate) struct TopologyArgs {
    /// The file that an image is served as
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["transport", "threads", "cpus", "numa", "queue_depth", "root"])]
    pub(crate) mountpoint: Option<PathBuf>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) placement: PlacementArgs,

    /// A directory with the files of /sys and /proc of another machine
    #[arg(long, value_name = "DIR", hide = true)]
    pub(crate) root: Option<PathBuf>,
}
