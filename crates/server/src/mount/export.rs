//! The one place of this crate that uses the FUSE export.
//!
//! Promises: what is known about the transport here is [`Export`] and its errors; commands see a
//! mount that answers, a handle for other threads, and an end.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_daemon::control::serving::Serving;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::stats::Report;
use ringdisk_daemon::stopping::{Stop, StopAsked};
use ringdisk_daemon::topology;
use ringdisk_disk::Disk;
use ringdisk_export::CommonOptions;
use ringdisk_export::stats::QueueView;
use ringdisk_fuse::kept::{Keep, Parked, TakenMount, refuse, refuse_successor};
use ringdisk_fuse::mount::Remover;
use ringdisk_fuse::testing::{self, Forced};
use ringdisk_fuse::topology::{MountTopology, preview};
use ringdisk_fuse::{
    Export, ExportOptions, HandOverHandle, Prepared, RingMode, Stats, Stay, StopHandle, Transport,
    ZeroCopy,
};
use ringdisk_ring::Topology;
use serde_json::Value;

use super::request::{Placement, Request};

/// The disk to serve, and how.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) mountpoint: PathBuf,
    pub(super) placement: Placement,
    pub(super) zero_copy: ZeroCopy,
    pub(super) passthrough: bool,
    pub(super) no_pools: bool,
    pub(super) stay: Option<Stay>,
    pub(super) growable: bool,
    pub(super) resizable: bool,
    pub(super) read_only: bool,
    pub(super) allow_other: bool,
    pub(super) kernel_cache: bool,
    pub(super) io_timeout: Option<Duration>,
    /// How long a stop waits for users; `None`: as long as they take.
    pub(super) stop_timeout: Option<Duration>,
    /// Rings are restricted to the operations that serving needs.
    pub(super) restricted: bool,
    /// The mount outlives this process.
    pub(super) keep: Option<Keep>,
    /// The source in the mount table, and the name in statistics.
    pub(super) name: String,
}

/// Whether a mount with these options can outlive its process.
///
/// Errors: `Unsupported` with the option that excludes it.
pub(super) fn check_keeps(request: &Request) -> Result<(), Failure> {
    check(request, refuse)
}

/// Whether a mount with these options can be taken over from a live process.
///
/// Errors: `Unsupported` with the option that excludes it.
pub(super) fn check_upgrades(request: &Request) -> Result<(), Failure> {
    check(request, refuse_successor)
}

fn check(
    request: &Request,
    refuse: fn(Transport, ZeroCopy, bool) -> Option<ringdisk_fuse::Error>,
) -> Result<(), Failure> {
    let (transport, zero_copy) = (request.placement.transport, request.zero_copy);
    let Some(why) = refuse(transport, zero_copy, request.passthrough) else {
        return Ok(());
    };
    let mut refused = Failure::from(why);
    refused.exit = Exit::Unsupported;
    Err(refused)
}

/// The transport and placement that a mount with these options would get.
///
/// Errors: CPUs that the machine does not have or that cannot be used; the options ask for
/// rings, and there are none.
pub fn foresee(request: &Placement, machine: &Topology) -> Result<MountTopology, Failure> {
    Ok(preview(machine, &request.threads, request.transport, request.queue_depth)?)
}

/// Choices that hidden options force, for measurements.
fn forced(options: &Options) -> Forced {
    let ring_mode_max = if options.no_pools { RingMode::Entries } else { RingMode::ZeroCopy };
    Forced { ring_mode_max, stay: options.stay, ..Forced::default() }
}

fn export_options(options: Options) -> ExportOptions {
    ExportOptions {
        common: CommonOptions {
            name: options.name,
            threads: options.placement.threads,
            read_only: options.read_only,
            restricted: options.restricted,
        },
        transport: options.placement.transport,
        zero_copy: options.zero_copy,
        passthrough: options.passthrough,
        queue_depth: options.placement.queue_depth,
        growable: options.growable,
        resizable: options.resizable,
        allow_other: options.allow_other,
        kernel_cache: options.kernel_cache,
        io_timeout: options.io_timeout,
        stop_timeout: options.stop_timeout,
        keep: options.keep,
        ..ExportOptions::new(options.mountpoint)
    }
}

/// A mount that answers; dropping it ends it.
#[derive(Debug)]
pub(super) struct Served {
    export: Export,
    asked: Arc<StopAsked>,
    name: String,
    since: Instant,
}

/// Stops a mount and reads its counters, from any thread, also after its end.
#[derive(Clone)]
pub(super) struct Handle {
    stop: StopHandle,
    asked: Arc<StopAsked>,
    stats: Arc<dyn Fn() -> Stats + Send + Sync>,
    topology: Arc<dyn Fn() -> MountTopology + Send + Sync>,
    queues: Arc<dyn Fn() -> Vec<QueueView> + Send + Sync>,
    name: String,
    since: Instant,
}

impl Served {
    /// Mounts and serves.
    ///
    /// Errors: those of the mount and of the rings.
    pub(super) fn start(disk: Arc<Disk>, options: Options) -> Result<Served, Failure> {
        let name = options.name.clone();
        let forced = forced(&options);
        let export = testing::start(disk, export_options(options), forced)?;
        Ok(Served::of(export, name))
    }

    /// Prepares to go on with a mount that another process hands over.
    ///
    /// Errors: those of [`Export::take_over`].
    pub(super) fn prepare(
        disk: Arc<Disk>,
        options: Options,
        mount: TakenMount,
    ) -> Result<Prepared, Failure> {
        Ok(Export::take_over(disk, export_options(options), mount)?)
    }

    /// Goes on with the mount of the predecessor.
    pub(super) fn go(prepared: Prepared, name: String) -> Served {
        Served::of(prepared.go(), name)
    }

    fn of(export: Export, name: String) -> Served {
        Served { export, asked: Arc::default(), name, since: Instant::now() }
    }

    /// Hands the mount over.
    pub(super) fn hand_over_handle(&self) -> HandOverHandle {
        self.export.hand_over_handle()
    }

    /// How requests travel.
    pub(super) fn transport(&self) -> &'static str {
        topology::transport(self.export.ring_mode())
    }

    /// Number of the connection, if the mount was seen.
    pub(super) fn connection(&self) -> Option<u32> {
        self.export.connection()
    }

    /// From now on another process takes the mount away.
    pub(super) fn remove_through(&self, remover: Arc<dyn Remover>) {
        self.export.remove_through(remover);
    }

    /// Calls `report`, with the number of open files, when a stop finds the mount in use.
    pub(super) fn watch_users(&self, report: impl Fn(u64) + Send + Sync + 'static) {
        self.export.watch_users(report);
    }

    /// The descriptors that the helper process or the manager has to keep; returned once.
    pub(super) fn take_parked(&mut self) -> Option<Parked> {
        self.export.take_parked()
    }

    /// Requested features that are missing, each with what would enable it.
    pub(super) fn notes(&self) -> &[String] {
        self.export.notes()
    }

    /// For other threads.
    pub(super) fn handle(&self) -> Handle {
        Handle {
            stop: self.export.stop_handle(),
            asked: Arc::clone(&self.asked),
            stats: Arc::new(self.export.stats_reader()),
            topology: Arc::new(self.export.topology_reader()),
            queues: Arc::new(self.export.queues_reader()),
            name: self.name.clone(),
            since: self.since,
        }
    }

    /// Blocks until the mount has ended.
    ///
    /// Errors: why it ended, if nobody asked for that, or what went wrong at the end.
    ///
    /// * `disk`: what was served; it may know better why the last flush failed.
    pub(super) fn wait(self, disk: &Disk) -> Result<(), Failure> {
        let halted = |reason| Failure::of_halt(&reason, disk.fault());
        self.export.wait().map(|_| ()).map_err(halted)
    }
}

impl Handle {
    /// Asks for a clean stop, once no client uses the mount; returns at once.
    pub(super) fn stop(&self) {
        self.asked.ask(Stop::Clean);
        self.stop.stop();
    }

    /// Asks for the end now, also while clients use the mount; returns at once.
    pub(super) fn force(&self) {
        self.asked.ask(Stop::AtOnce);
        self.stop.force();
    }

    /// The stop that was asked for.
    pub(super) fn asked(&self) -> Option<Stop> {
        self.asked.get()
    }

    /// The counters now.
    pub(super) fn stats(&self) -> Report {
        Report {
            name: self.name.clone(),
            elapsed: self.since.elapsed(),
            stats: (self.stats)(),
            device: None,
            accel: None,
        }
    }
}

impl Serving for Handle {
    fn report(&self) -> Report {
        self.stats()
    }

    fn queues(&self) -> Vec<QueueView> {
        (self.queues)()
    }

    fn topology(&self) -> Value {
        topology::to_json(&Topology::read(), &(self.topology)())
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.name).finish_non_exhaustive()
    }
}
