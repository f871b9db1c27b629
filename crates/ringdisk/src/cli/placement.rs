//! The words that say where a disk is served: transport, threads, CPUs, nodes, depth.
//!
//! Promises: parses only; whether the machine has such CPUs and nodes is for the export to say.

use clap::Args;
use ringdisk_export::{Numa, ThreadOptions, Threads};
use ringdisk_fuse::Transport;
use ringdisk_fuse::export::QUEUE_DEPTH_MAX;
use ringdisk_ring::CpuList;
use ringdisk_server::mount::request::Placement;

use crate::cli::words::{CPUS, NUMA, TRANSPORT, cpus_long_help, one_of};

/// Which threads serve, and where: the options that every export has. The help is that of a mount;
/// other commands say in its place what is different there.
#[derive(Args, Clone, Debug)]
pub(crate) struct ThreadArgs {
    /// Queue threads: a number, or auto
    ///
    /// auto is a thread for each CPU that may be used: up to 64 with uring, up to 4 with dev. With
    /// more than one, each has a CPU; over io_uring it may leave it, on its node, for clients that
    /// keep several requests in flight.
    #[arg(long, value_name = "N", default_value_t, help_heading = "Serving options")]
    pub(crate) threads: Threads,

    #[arg(long, value_name = "LIST", help = CPUS, long_help = cpus_long_help!(""),
          help_heading = "Serving options")]
    pub(crate) cpus: Option<CpuList>,

    /// Serve callers, and keep buffers, on their NUMA node (auto), or do not look at nodes (off)
    ///
    /// Where requests come can be chosen with uring only. `ringdisk topology` shows what was done.
    #[arg(
        long,
        value_name = "MODE",
        value_parser = one_of(NUMA),
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) numa: Numa,
}

impl ThreadArgs {
    /// As the library takes them.
    pub(crate) fn options(&self) -> ThreadOptions {
        ThreadOptions { threads: self.threads, cpus: self.cpus.clone(), numa: self.numa }
    }
}

/// Options of `mount` that `topology` takes too.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlacementArgs {
    /// How requests travel: over /dev/fuse (dev), in io_uring (uring), or the best that works
    ///
    /// uring needs Linux 6.14 or newer and, as root before the mount,
    /// `echo Y > /sys/module/fuse/parameters/enable_uring`.
    #[arg(
        long,
        value_name = "TRANSPORT",
        value_parser = one_of(TRANSPORT),
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) transport: Transport,

    #[command(flatten)]
    pub(crate) threads: ThreadArgs,

    /// Requests of each queue that run at once [default: 128; with uring up to 64, by memory]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(QUEUE_DEPTH_MAX)),
          help_heading = "Serving options")]
    pub(crate) queue_depth: Option<u32>,
}

impl From<&PlacementArgs> for Placement {
    fn from(args: &PlacementArgs) -> Placement {
        Placement {
            transport: args.transport,
            threads: args.threads.options(),
            queue_depth: args.queue_depth,
        }
    }
}
