//! The one place that talks to the side that serves virtual machines.
//!
//! Promises: what is known about vhost-user here is [`Export`] and its errors; commands see a disk
//! that is served, a handle for other threads, and an end.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use ringdisk_daemon::control::serving::{Serving, SocketClient};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::stats::Report;
use ringdisk_daemon::topology;
use ringdisk_disk::Disk;
use ringdisk_export::stats::{QueueStats, QueueView, Stats};
use ringdisk_ring::Topology;
use ringdisk_vhost::export::{AccelHandle, Acceleration, HandOverHandle, Health, Prepared};
use ringdisk_vhost::{Export, ExportOptions, StopHandle};
use serde_json::Value;

use crate::nbd;

/// A disk that is served; dropping it ends that.
#[derive(Debug)]
pub struct Served {
    export: Export,
    name: String,
    since: Instant,
    /// NBD clients have it, too.
    nbd: Option<nbd::Handle>,
}

/// Stops a disk and reads its counters, from any thread, also after its end.
#[derive(Clone)]
pub struct Handle {
    stop: StopHandle,
    stats: Arc<dyn Fn() -> Stats + Send + Sync>,
    queues: Arc<dyn Fn() -> Vec<QueueView> + Send + Sync>,
    health: Arc<dyn Fn() -> Health + Send + Sync>,
    accel: Option<Arc<dyn Fn() -> Acceleration + Send + Sync>>,
    switch: AccelHandle,
    name: String,
    since: Instant,
    nbd: Option<nbd::Handle>,
}

impl Served {
    /// Serves.
    ///
    /// Errors: options that cannot be, those of the socket and of the rings.
    pub fn start(disk: Arc<Disk>, options: ExportOptions) -> Result<Served, Failure> {
        let name = options.common.name.clone();
        Ok(Served::of(Export::start(disk, options)?, name))
    }

    /// Serves what another process has handed over.
    pub fn go(prepared: Prepared, name: String) -> Served {
        Served::of(prepared.go(), name)
    }

    fn of(export: Export, name: String) -> Served {
        Served { export, name, since: Instant::now(), nbd: None }
    }

    /// NBD clients have the disk, too: they are listed and counted with it.
    pub fn counts_with(&mut self, nbd: nbd::Handle) {
        self.nbd = Some(nbd);
    }

    /// Takes front ends from now on, if they had to wait for it ([`ExportOptions::held`]).
    pub fn release(&self) {
        self.export.release();
    }

    /// Whether the host kernel may come to serve it.
    pub fn has_kernel(&self) -> bool {
        self.export.has_kernel()
    }

    /// For a process that takes the disk over.
    pub fn hand_over_handle(&self) -> HandOverHandle {
        self.export.hand_over_handle()
    }

    /// What was asked for and could not be had, each with what would enable it.
    pub fn notes(&self) -> &[String] {
        self.export.notes()
    }

    /// For other threads.
    pub fn handle(&self) -> Handle {
        Handle {
            stop: self.export.stop_handle(),
            stats: Arc::new(self.export.stats_reader()),
            queues: Arc::new(self.export.queues_reader()),
            health: Arc::new(self.export.health_reader()),
            accel: self.export.accel_reader().map(Arc::from),
            switch: self.export.accel_handle(),
            name: self.name.clone(),
            since: self.since,
            nbd: self.nbd.clone(),
        }
    }

    /// Blocks until the disk is served no longer.
    ///
    /// Errors: why that ended, if nobody asked for it, or what went wrong at the end.
    ///
    /// * `disk`: what was served; it may know better why the last flush failed.
    pub fn wait(self, disk: &Disk) -> Result<(), Failure> {
        let halted = |reason| Failure::of_halt(&reason, disk.fault()).context(&self.name);
        self.export.wait().map(|_| ()).map_err(halted)
    }
}

impl Handle {
    /// Asks for a clean stop; returns at once.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Whether one was asked for.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }
}

impl Serving for Handle {
    fn report(&self) -> Report {
        let mut stats = (self.stats)();
        if let Some(nbd) = &self.nbd {
            let first = stats.queues.len();
            let theirs = nbd.report().stats.queues.into_iter();
            let renumber = |queue: QueueStats| QueueStats { thread: first + queue.thread, ..queue };
            stats.queues.extend(theirs.map(renumber));
        }
        Report {
            name: self.name.clone(),
            elapsed: self.since.elapsed(),
            stats,
            device: Some((self.health)()),
            accel: self.accel.as_ref().map(|read| read()),
        }
    }

    fn queues(&self) -> Vec<QueueView> {
        let nbd = self.nbd.iter().flat_map(Serving::queues);
        (self.queues)().into_iter().chain(nbd).collect()
    }

    fn topology(&self) -> Value {
        topology::machine_to_json(&Topology::read())
    }

    fn clients(&self) -> Vec<SocketClient> {
        let pid = (self.health)().front_end_pid;
        pid.map(|pid| SocketClient { pid: Some(pid), ..SocketClient::default() })
            .into_iter()
            .chain(self.nbd.iter().flat_map(nbd::Handle::clients))
            .collect()
    }

    fn is_accelerated(&self) -> bool {
        self.accel.as_ref().is_some_and(|read| read().on)
    }

    fn switch_accel(&self, on: bool) -> Result<bool, String> {
        self.switch.switch(on)
    }

    fn serve_here(&self) -> Result<(), String> {
        let Some(accel) = &self.accel else { return Ok(()) };
        if accel().required {
            return Err(String::from(
                "the disk is served with `--accel require`, and the host kernel knows no limits",
            ));
        }
        self.switch.switch(false).map(|_| {
            tracing::info!("{}: the queue threads serve the disk, since it has limits", self.name);
        })
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.name).finish_non_exhaustive()
    }
}
