//! What an export is asked for.
//!
//! Promises: plain values; control path.

use std::path::PathBuf;
use std::time::Duration;

use ringdisk_export::CommonOptions;

use crate::kept::Keep;
use crate::transport::Transport;
use crate::uring::ZeroCopy;

/// How to serve a disk as a file.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Name (the source in the mount table), queue threads, whether writes are refused.
    pub common: CommonOptions,
    /// An existing regular file.
    pub mountpoint: PathBuf,
    /// How requests travel.
    pub transport: Transport,
    /// Whether requests over io_uring use pages of the client.
    pub zero_copy: ZeroCopy,
    /// The kernel reads and writes the image itself.
    pub passthrough: bool,
    /// Requests that each queue serves at once, 1..=4096; `None`:
    /// [`QUEUE_DEPTH_DEFAULT`](super::QUEUE_DEPTH_DEFAULT), and what memory allows on rings.
    pub queue_depth: Option<u32>,
    /// Clients may make the disk larger.
    pub growable: bool,
    /// Clients may make the disk larger and smaller.
    pub resizable: bool,
    /// Let other users in.
    pub allow_other: bool,
    /// Let the kernel cache pages.
    pub kernel_cache: bool,
    /// End the export when a request takes longer.
    pub io_timeout: Option<Duration>,
    /// How long a stop waits until clients have closed the file; `None`: as long as they take.
    pub stop_timeout: Option<Duration>,
    /// The mount outlives this process; over `/dev/fuse` only.
    pub keep: Option<Keep>,
}

impl ExportOptions {
    /// Defaults for a mountpoint.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>) -> ExportOptions {
        ExportOptions {
            common: CommonOptions::default(),
            mountpoint: mountpoint.into(),
            transport: Transport::Auto,
            zero_copy: ZeroCopy::Auto,
            passthrough: false,
            queue_depth: None,
            growable: false,
            resizable: false,
            allow_other: false,
            kernel_cache: false,
            io_timeout: None,
            stop_timeout: None,
            keep: None,
        }
    }
}
