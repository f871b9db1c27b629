//! The one place that talks to the serving side.
//!
//! Promises: what is known about the transport here is [`Export`] and its errors; commands see a
//! mount that answers, a handle for other threads, and an end.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::Disk;
use ringdisk_fuse::kept::{Keep, Parked};
use ringdisk_fuse::{Export, ExportOptions, HaltReason, RingMode, Stats, StopHandle};

use crate::cli::{Threads, TransportWord, ZeroCopyWord};
use crate::report::{Exit, Failure};
use crate::stats::Report;

/// What to serve, and how.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) mountpoint: PathBuf,
    pub(crate) transport: TransportWord,
    pub(crate) zero_copy: ZeroCopyWord,
    pub(crate) threads: Threads,
    pub(crate) queue_depth: Option<u32>,
    pub(crate) growable: bool,
    pub(crate) read_only: bool,
    pub(crate) allow_other: bool,
    pub(crate) kernel_cache: bool,
    pub(crate) io_timeout: Option<Duration>,
    /// The mount outlives this process.
    pub(crate) keep: Option<Keep>,
    /// Shown as the source of the mount and in statistics.
    pub(crate) name: String,
}

/// A mount that answers; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Served {
    export: Export,
    name: String,
    since: Instant,
}

/// Stops a mount and reads its counters, from any thread, also after its end.
#[derive(Clone)]
pub(crate) struct Handle {
    stop: StopHandle,
    stats: Arc<dyn Fn() -> Stats + Send + Sync>,
    name: String,
    since: Instant,
}

impl Served {
    /// Mounts and serves.
    ///
    /// Errors: those of the mount and of the rings.
    pub(crate) fn start(disk: Arc<Disk>, options: Options) -> Result<Served, Failure> {
        let threads = match options.threads {
            Threads::Auto => ringdisk_fuse::Threads::Auto,
            Threads::Count(count) => ringdisk_fuse::Threads::Count(count.into()),
        };
        let transport = match options.transport {
            TransportWord::Auto => ringdisk_fuse::Transport::Auto,
            TransportWord::Dev => ringdisk_fuse::Transport::Dev,
            TransportWord::Uring => ringdisk_fuse::Transport::Uring,
        };
        let zero_copy = match options.zero_copy {
            ZeroCopyWord::Auto => ringdisk_fuse::ZeroCopy::Auto,
            ZeroCopyWord::On => ringdisk_fuse::ZeroCopy::On,
            ZeroCopyWord::Off => ringdisk_fuse::ZeroCopy::Off,
        };
        let name = options.name.clone();
        let export = Export::start(
            disk,
            ExportOptions {
                transport,
                zero_copy,
                threads,
                queue_depth: options.queue_depth,
                growable: options.growable,
                read_only: options.read_only,
                allow_other: options.allow_other,
                kernel_cache: options.kernel_cache,
                io_timeout: options.io_timeout,
                name: options.name,
                keep: options.keep,
                ..ExportOptions::new(options.mountpoint)
            },
        )?;
        Ok(Served { export, name, since: Instant::now() })
    }

    /// How requests travel.
    pub(crate) fn transport(&self) -> &'static str {
        match self.export.ring_mode() {
            None => "/dev/fuse",
            Some(RingMode::Entries) => "io_uring",
            Some(RingMode::Pools) => "io_uring with buffer pools",
            Some(RingMode::ZeroCopy) => "io_uring with buffer pools and zero-copy",
        }
    }

    /// What somebody has to keep, for a mount that outlives this process; once.
    pub(crate) fn take_parked(&mut self) -> Option<Parked> {
        self.export.take_parked()
    }

    /// What was asked for and could not be had, each with what would enable it.
    pub(crate) fn notes(&self) -> &[String] {
        self.export.notes()
    }

    /// For other threads.
    pub(crate) fn handle(&self) -> Handle {
        Handle {
            stop: self.export.stop_handle(),
            stats: Arc::new(self.export.stats_reader()),
            name: self.name.clone(),
            since: self.since,
        }
    }

    /// Blocks until the mount has ended.
    ///
    /// Errors: why it ended, if nobody asked for that, or what went wrong at the end.
    ///
    /// * `disk`: what was served; it may know better why the last flush failed.
    pub(crate) fn wait(self, disk: &Disk) -> Result<(), Failure> {
        match self.export.wait() {
            Ok(_) => Ok(()),
            Err(reason) => Err(match (&reason, disk.fault()) {
                (HaltReason::Flush(_), Some(fault)) => Failure::new(Exit::Storage, fault),
                _ => halted(&reason),
            }),
        }
    }
}

/// The failure of a mount that was serving.
fn halted(reason: &HaltReason) -> Failure {
    let exit = match reason {
        HaltReason::Timeout(_) | HaltReason::Flush(_) | HaltReason::StillInFlight(_) => {
            Exit::Storage
        }
        HaltReason::Device(_)
        | HaltReason::Reply(_)
        | HaltReason::Protocol(_)
        | HaltReason::Panicked => Exit::Halted,
    };
    Failure::new(exit, reason.to_string())
}

impl Handle {
    /// Asks for a clean stop; returns at once.
    pub(crate) fn stop(&self) {
        self.stop.stop();
    }

    /// The counters now.
    pub(crate) fn stats(&self) -> Report {
        Report { name: self.name.clone(), elapsed: self.since.elapsed(), stats: (self.stats)() }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_and_transport_have_codes_of_their_own() {
        let timeout = halted(&HaltReason::Timeout(Duration::from_secs(5)));
        assert_eq!(timeout.exit, Exit::Storage);
        let device = halted(&HaltReason::Device(ringdisk_ring::Errno::IO));
        assert_eq!(device.exit, Exit::Halted);
        assert!(device.message().contains("FUSE device"));
    }
}
