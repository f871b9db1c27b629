//! What a mount is asked for, as plain values.
//!
//! Promises: plain values; what does not go together is refused where the mount begins.

use std::path::PathBuf;
use std::time::Duration;

use ringdisk_daemon::confine::Confinement;
use ringdisk_daemon::run_as::RequestedUser;
use ringdisk_daemon::sockets::Address;
use ringdisk_export::ThreadOptions;
use ringdisk_fuse::{Stay, Transport, ZeroCopy};

use crate::request::ImageRequest;

/// How long a stop waits; `None`: as long as it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopTimeout(pub Option<Duration>);

/// What is mounted, and where.
#[derive(Debug, PartialEq, Eq)]
pub struct Paths {
    /// `None`: a null disk.
    pub image: Option<PathBuf>,
    /// The file that the disk appears as.
    pub mountpoint: PathBuf,
}

/// Where a mount is served.
#[derive(Clone, Debug)]
pub struct Placement {
    /// How requests travel.
    pub transport: Transport,
    /// Queue threads, their CPUs and nodes.
    pub threads: ThreadOptions,
    /// Requests of each queue that run at once; `None`: by the transport.
    pub queue_depth: Option<u32>,
}

/// A mount with its options.
#[derive(Clone, Debug)]
pub struct Request {
    /// The disk.
    pub disk: ImageRequest,
    /// The process goes into the background when the mount answers.
    pub daemonize: bool,
    /// Writes past the end make the disk larger.
    pub growable: bool,
    /// Clients make the disk larger and smaller.
    pub resizable: bool,
    /// Other users may open the file.
    pub allow_other: bool,
    /// The kernel's page cache keeps the contents.
    pub kernel_cache: bool,
    /// Threads, CPUs, nodes, transport.
    pub placement: Placement,
    /// Whether requests over io_uring use the pages of clients.
    pub zero_copy: ZeroCopy,
    /// The kernel reads and writes a raw image itself.
    pub passthrough: bool,
    /// Each entry of a ring has a payload of its own: to compare.
    pub no_pools: bool,
    /// Threads and entries of rings stay in one spot: to compare.
    pub stay: Option<Stay>,
    /// The mount is given up when storage takes longer for one request.
    pub io_timeout: Option<Duration>,
    /// How long a stop waits for users; `None`: not said.
    pub stop_timeout: Option<StopTimeout>,
    /// Where metrics are served.
    pub metrics: Vec<Address>,
    /// How far the process is confined.
    pub sandbox: Confinement,
    /// Whom the process becomes.
    pub user: RequestedUser,
    /// The mount outlives its process.
    pub keep_mount: bool,
    /// The mount is taken over from the process that serves it.
    pub upgrade: bool,
    /// Gets the pid.
    pub pidfile: Option<PathBuf>,
    /// Counters are printed at the end.
    pub stats: bool,
}
