//! The words that say where a mount is served: transport, threads, CPUs, nodes, depth.

use clap::Args;
use ringdisk_export::{Numa, ThreadOptions, Threads};
use ringdisk_fuse::Transport;
use ringdisk_fuse::export::QUEUE_DEPTH_MAX;
use ringdisk_ring::CpuList;

use crate::cli::words::{NUMA, TRANSPORT, one_of};

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

    /// Queue threads: a number, or auto
    ///
    /// auto is a thread for each CPU that may be used: up to 64 with uring, up to 4 with dev. With
    /// more than one, each has a CPU; over io_uring it may leave it, on its node, for clients that
    /// keep several requests in flight.
    #[arg(long, value_name = "N", default_value_t, help_heading = "Serving options")]
    pub(crate) threads: Threads,

    /// CPUs for the queue threads, such as 0-3,8 [default: all that the process may use]
    ///
    /// As the kernel and taskset write it: numbers and ranges; 10-14:2 is every second CPU of a
    /// range. CPUs that are offline, not allowed here or not in this machine are left out with a
    /// warning.
    #[arg(long, value_name = "LIST", help_heading = "Serving options")]
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

    /// Requests of each queue that run at once [default: 128; with uring up to 64, by memory]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(QUEUE_DEPTH_MAX)),
          help_heading = "Serving options")]
    pub(crate) queue_depth: Option<u32>,
}

impl PlacementArgs {
    /// As the library takes them.
    pub(crate) fn thread_options(&self) -> ThreadOptions {
        ThreadOptions { threads: self.threads, cpus: self.cpus.clone(), numa: self.numa }
    }
}
