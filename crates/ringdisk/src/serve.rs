//! The one place that talks to the serving side.
//!
//! Promises: what is known about the transport here is [`Export`] and its errors; commands see a
//! mount that answers, a handle for other threads, and an end.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_daemon::control::disk::Serving;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::stats::Report;
use ringdisk_daemon::stopping::{Stop, StopAsked};
use ringdisk_daemon::topology;
use ringdisk_disk::Disk;
use ringdisk_export::CommonOptions;
use ringdisk_export::stats::QueueView;
use ringdisk_fuse::kept::{Keep, Parked, TakenMount, refuse, refuse_successor};
use ringdisk_fuse::mount::Remover;
use ringdisk_fuse::topology::{MountTopology, preview};
use ringdisk_fuse::{
    Export, ExportOptions, HandOverHandle, Prepared, RingMode, Stats, Stay, StopHandle,
    TestSettings, Transport, ZeroCopy,
};
use ringdisk_ring::Topology;
use serde_json::Value;

use crate::cli::{MountArgs, PlacementArgs};

/// What to serve, and how.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) mountpoint: PathBuf,
    pub(crate) placement: PlacementArgs,
    pub(crate) zero_copy: ZeroCopy,
    pub(crate) passthrough: bool,
    pub(crate) no_pools: bool,
    pub(crate) stay: Option<Stay>,
    pub(crate) growable: bool,
    pub(crate) resizable: bool,
    pub(crate) read_only: bool,
    pub(crate) allow_other: bool,
    pub(crate) kernel_cache: bool,
    pub(crate) io_timeout: Option<Duration>,
    /// How long a stop waits for users; `None`: as long as they take.
    pub(crate) stop_timeout: Option<Duration>,
    /// Rings do nothing but what they are for.
    pub(crate) restricted: bool,
    /// The mount outlives this process.
    pub(crate) keep: Option<Keep>,
    /// Shown as the source of the mount and in statistics.
    pub(crate) name: String,
}

/// Whether a mount with these options can outlive its process.
///
/// Errors: `Unsupported` with the option that excludes it.
pub(crate) fn check_keeps(args: &MountArgs) -> Result<(), Failure> {
    check(args, refuse)
}

/// Whether a mount with these options can be taken over from a live process.
///
/// Errors: `Unsupported` with the option that excludes it.
pub(crate) fn check_upgrades(args: &MountArgs) -> Result<(), Failure> {
    if args.keep_mount {
        let what = "a mount with --keep-mount cannot be taken over: the process that keeps it \
            starts each process that serves it";
        return Err(Failure::new(Exit::Unsupported, what).hint(
            "with a service manager that keeps it, `systemctl restart` goes on with it in the new \
             version (docs/lifecycle.md); else end it with `ringdisk umount` and mount the image \
             anew",
        ));
    }
    check(args, refuse_successor)
}

fn check(
    args: &MountArgs,
    refuse: fn(Transport, ZeroCopy, bool) -> Option<ringdisk_fuse::Error>,
) -> Result<(), Failure> {
    let (transport, zero_copy) = (args.placement.transport, args.zero_copy);
    let Some(why) = refuse(transport, zero_copy, args.passthrough) else {
        return Ok(());
    };
    let mut refused = Failure::from(why);
    refused.exit = Exit::Unsupported;
    Err(refused)
}

/// What a mount with these options would get.
///
/// Errors: CPUs that the machine does not have or that cannot be used; rings that were asked for
/// and that there are none of.
pub(crate) fn foresee(args: &PlacementArgs, machine: &Topology) -> Result<MountTopology, Failure> {
    Ok(preview(machine, &args.thread_options(), args.transport, args.queue_depth)?)
}

fn export_options(options: Options) -> ExportOptions {
    ExportOptions {
        common: CommonOptions {
            name: options.name,
            threads: options.placement.thread_options(),
            read_only: options.read_only,
            restricted: options.restricted,
        },
        transport: options.placement.transport,
        zero_copy: options.zero_copy,
        passthrough: options.passthrough,
        test: TestSettings {
            ring_mode_max: if options.no_pools { RingMode::Entries } else { RingMode::ZeroCopy },
            stay: options.stay,
            ..TestSettings::default()
        },
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
pub(crate) struct Served {
    export: Export,
    asked: Arc<StopAsked>,
    name: String,
    since: Instant,
}

/// Stops a mount and reads its counters, from any thread, also after its end.
#[derive(Clone)]
pub(crate) struct Handle {
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
    pub(crate) fn start(disk: Arc<Disk>, options: Options) -> Result<Served, Failure> {
        let name = options.name.clone();
        let export = Export::start(disk, export_options(options))?;
        Ok(Served::of(export, name))
    }

    /// Prepares to go on with a mount that another process hands over.
    ///
    /// Errors: those of [`Export::take_over`].
    pub(crate) fn prepare(
        disk: Arc<Disk>,
        options: Options,
        mount: TakenMount,
    ) -> Result<Prepared, Failure> {
        Ok(Export::take_over(disk, export_options(options), mount)?)
    }

    /// Goes on with it.
    pub(crate) fn go(prepared: Prepared, name: String) -> Served {
        Served::of(prepared.go(), name)
    }

    fn of(export: Export, name: String) -> Served {
        Served { export, asked: Arc::default(), name, since: Instant::now() }
    }

    /// Hands the mount over.
    pub(crate) fn hand_over_handle(&self) -> HandOverHandle {
        self.export.hand_over_handle()
    }

    /// How requests travel.
    pub(crate) fn transport(&self) -> &'static str {
        topology::transport(self.export.ring_mode())
    }

    /// Number of the connection, if the mount was seen.
    pub(crate) fn connection(&self) -> Option<u32> {
        self.export.connection()
    }

    /// From now on another process takes the mount away.
    pub(crate) fn remove_through(&self, remover: Arc<dyn Remover>) {
        self.export.remove_through(remover);
    }

    /// Calls `tell`, with the number of open files, when the mount is to stop and is in use.
    pub(crate) fn watch_users(&self, tell: impl Fn(u64) + Send + Sync + 'static) {
        self.export.watch_users(tell);
    }

    /// What another process has to keep of a mount that outlives this one; once.
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
    pub(crate) fn wait(self, disk: &Disk) -> Result<(), Failure> {
        let halted = |reason| Failure::of_halt(&reason, disk.fault());
        self.export.wait().map(|_| ()).map_err(halted)
    }
}

impl Handle {
    /// Asks for a clean stop, once no client uses the mount; returns at once.
    pub(crate) fn stop(&self) {
        self.asked.ask(Stop::Clean);
        self.stop.stop();
    }

    /// Asks for the end now, also while clients use the mount; returns at once.
    pub(crate) fn force(&self) {
        self.asked.ask(Stop::AtOnce);
        self.stop.force();
    }

    /// The stop that was asked for.
    pub(crate) fn asked(&self) -> Option<Stop> {
        self.asked.get()
    }

    /// The counters now.
    pub(crate) fn stats(&self) -> Report {
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
