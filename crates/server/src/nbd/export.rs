//! The one place that talks to the side that serves NBD clients.
//!
//! Promises: what is known about NBD here is [`Export`] and its errors; commands see disks that are
//! served, a handle for other threads, and an end.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use ringdisk_daemon::control::serving::{Serving, SocketClient};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::stats::Report;
use ringdisk_daemon::topology;
use ringdisk_disk::Layer;
use ringdisk_export::stats::{QueueView, Stats};
use ringdisk_nbd::{
    DiskHandle, Export, HandOverHandle, HandedClients, NamedDisk, NbdOptions, Peer, StopHandle,
};
use ringdisk_ring::Topology;
use serde_json::Value;

/// Disks that are served; dropping it ends that.
#[derive(Debug)]
pub struct Served {
    export: Export,
    name: String,
    requires_tls: bool,
    since: Instant,
}

/// Stops the disks and reads their counters, from any thread, also after their end.
#[derive(Clone)]
pub struct Handle {
    stop: StopHandle,
    stats: Arc<dyn Fn() -> Stats + Send + Sync>,
    queues: Arc<dyn Fn() -> Vec<QueueView> + Send + Sync>,
    peers: Arc<dyn Fn() -> Vec<Peer> + Send + Sync>,
    name: String,
    requires_tls: bool,
    since: Instant,
}

impl Served {
    /// Serves.
    ///
    /// Errors: options that cannot be, those of the sockets and of the rings.
    pub fn start(
        disks: Vec<NamedDisk>,
        listeners: Vec<OwnedFd>,
        options: NbdOptions,
    ) -> Result<Served, Failure> {
        let name = options.common.name.clone();
        let requires_tls = options.tls.as_ref().is_some_and(|tls| tls.required);
        let export = Export::start(disks, listeners, options)?;
        Ok(Served { export, name, requires_tls, since: Instant::now() })
    }

    /// Makes all that serving takes, for disks and clients of another process. Nobody is served
    /// before [`Served::take_charge`] and [`Served::release`].
    ///
    /// Errors: as [`Served::start`].
    pub fn prepare(
        disks: Vec<NamedDisk>,
        listeners: Vec<OwnedFd>,
        clients: HandedClients,
        options: NbdOptions,
    ) -> Result<Served, Failure> {
        let name = options.common.name.clone();
        let requires_tls = options.tls.as_ref().is_some_and(|tls| tls.required);
        let export = Export::prepare(disks, listeners, clients, options)?;
        Ok(Served { export, name, requires_tls, since: Instant::now() })
    }

    /// The other process has ended, or will never go on.
    pub fn take_charge(&mut self) {
        self.export.take_charge();
    }

    /// Goes on with clients of the other process; new ones wait for [`Served::release`].
    pub fn take_up(&mut self) {
        self.export.take_up();
    }

    /// For a process that takes the disks over.
    pub fn hand_over_handle(&self) -> HandOverHandle {
        self.export.hand_over_handle()
    }

    /// Leaves a disk with its clients, and the listening sockets if it `listens`, to the process
    /// that has them. Before [`Served::take_up`].
    pub fn leave_out(&mut self, name: &str, listens: bool) {
        self.export.leave_out(name, listens);
    }

    /// Takes clients from now on.
    pub fn release(&mut self) {
        self.export.release();
    }

    /// Ends one disk for the export that is in charge of it.
    pub fn disk_handle(&self, name: &str) -> DiskHandle {
        self.export.disk_handle(name)
    }

    /// What was asked for and could not be had.
    pub fn notes(&self) -> &[String] {
        self.export.notes()
    }

    /// For other threads.
    pub fn handle(&self) -> Handle {
        Handle {
            stop: self.export.stop_handle(),
            stats: Arc::from(self.export.stats_reader()),
            queues: Arc::new(self.export.queues_reader()),
            peers: Arc::from(self.export.peers_reader()),
            name: self.name.clone(),
            requires_tls: self.requires_tls,
            since: self.since,
        }
    }

    /// Blocks until nothing is served any longer.
    ///
    /// * `fault`: what a disk knows of why its last flush failed.
    ///
    /// Errors: why that ended, if nobody asked for it, or what went wrong at the end.
    pub fn wait(self, fault: impl FnOnce() -> Option<String>) -> Result<(), Failure> {
        let halted = |reason| Failure::of_halt(&reason, fault()).context(&self.name);
        self.export.wait().map(|_| ()).map_err(halted)
    }
}

impl Handle {
    /// Asks for a clean stop; returns at once.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Whether another process has the disks, with their clients.
    pub fn has_moved(&self) -> bool {
        self.stop.has_moved()
    }

    /// Whether one was asked for.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    /// The counters, for people.
    pub fn text(&self, layers: &[Arc<Layer>]) -> String {
        self.report().with_layers(layers, None)
    }
}

impl Serving for Handle {
    fn report(&self) -> Report {
        Report {
            name: self.name.clone(),
            elapsed: self.since.elapsed(),
            stats: (self.stats)(),
            device: None,
            accel: None,
        }
    }

    fn clients(&self) -> Vec<SocketClient> {
        let client =
            |Peer { export, address, pid }| SocketClient { pid, address, export: Some(export) };
        (self.peers)().into_iter().map(client).collect()
    }

    fn requires_tls(&self) -> bool {
        self.requires_tls
    }

    fn queues(&self) -> Vec<QueueView> {
        (self.queues)()
    }

    fn topology(&self) -> Value {
        topology::machine_to_json(&Topology::read())
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.name).finish_non_exhaustive()
    }
}
