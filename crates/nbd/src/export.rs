//! An export from its start to its end.
//!
//! Promises: what a start has made ends when a later step fails; no word of a client is read before
//! [`Export::release`] where the options say so; at the end requests in flight are answered, later
//! ones get ESHUTDOWN, and what clients wrote is on stable storage. Control path.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_export::stats::{QueueView, Stats};
use ringdisk_export::{
    Error, ErrorKind, HaltReason, PlacementRule, QueueThread, ThreadSetup, ask_all, close_disk,
    place_threads, stop_threads,
};
use ringdisk_ring::{Config, SpinPolicy, Topology};
use rustix::net::listen;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay};

use crate::accept;
use crate::ending::{Ending, StopHandle, Why};
use crate::exported::{Exported, Exports};
use crate::leaving::DiskHandle;
use crate::options::{NamedDisk, NbdOptions, check};
use crate::peers::Peer;
use crate::queue::{Queue, Shared, Work};

/// At the end, requests in flight and the last flush have so long.
const END_LIMIT: Duration = Duration::from_secs(10);
/// At the end, clients have so long to take the last replies.
const LAST_REPLIES: Duration = Duration::from_secs(2);
/// Clients that wait to be accepted; further ones are refused by the kernel, which may hold fewer
/// (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;
/// Submission entries of a ring.
const ENTRIES: u32 = 256;
/// Operations in flight on a ring; further ones wait for a slot.
const SLOTS: u32 = 1024;
/// Longest poll for clients and storage before a sleep, as for virtual machines.
const POLL: Duration = Duration::from_micros(80);

/// Disks that are being served. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    threads: Vec<QueueThread<Work>>,
    shared: Arc<Shared>,
    ending: Arc<Ending>,
    notes: Vec<String>,
    /// Listening sockets that no queue thread has yet.
    listeners: Vec<OwnedFd>,
    /// The disks are opened and closed with this export, not with another one.
    is_in_charge: bool,
    has_ended: bool,
}

impl Export {
    /// Serves from now on, or from [`Export::release`] on ([`NbdOptions::held`]).
    ///
    /// * `listeners`: listening stream sockets; their names, if they have any, are the caller's to
    ///   remove.
    ///
    /// Errors: [`ErrorKind::Usage`] for options that cannot be; those of sockets, threads and
    /// rings.
    pub fn start(
        disks: Vec<NamedDisk>,
        listeners: Vec<OwnedFd>,
        options: NbdOptions,
    ) -> Result<Export, Error> {
        check(&disks, &options)?;
        for listener in &listeners {
            // Between its poll and its accept a client may go away.
            rustix::io::ioctl_fionbio(listener, true).map_err(of_socket)?;
            // Those who listen first do not know how many clients come at once.
            let _ = listen(listener, BACKLOG);
            // The connections have these, too. Unix sockets know neither.
            let _ = set_tcp_nodelay(listener, true);
            let _ = set_socket_keepalive(listener, true);
        }
        let (rule, mut notes) = (PlacementRule::default(), Vec::new());
        let common = &options.common;
        let places = place_threads(&Topology::read(), &common.threads, &rule, &mut notes)?;
        let exports = disks.into_iter().map(|disk| Exported::new(disk, &options));
        let exports = Arc::new(Exports::new(exports.map(Arc::new).collect()));
        let ending = Arc::new(Ending::default());
        let shared = Arc::new(Shared::new(exports, &options, places.threads.len()));
        let mut export = Export {
            threads: Vec::new(),
            shared,
            ending,
            notes: Vec::new(),
            listeners,
            is_in_charge: !options.beside_another,
            has_ended: false,
        };
        for (number, cpus) in places.threads.into_iter().enumerate() {
            let ring = Config {
                entries: ENTRIES,
                slots: SLOTS,
                spin: SpinPolicy::adaptive(POLL),
                name: format!("nbd-{number}"),
                restricted: common.restricted,
                ..Config::default()
            };
            let work = Work::new(number, Arc::clone(&export.shared), Arc::clone(&export.ending));
            let started = QueueThread::start(ThreadSetup { number, cpus, ring }, work);
            let (thread, ()) = started.map_err(Error::of_ring)?;
            notes.extend(thread.pin_error.clone());
            export.threads.push(thread);
        }
        export.notes = notes;
        if export.is_in_charge {
            export.shared.exports.all().iter().for_each(|export| export.disk.take_charge());
        }
        if !options.held {
            export.release();
        }
        Ok(export)
    }

    /// Takes clients from now on, if they had to wait for it ([`NbdOptions::held`]).
    pub fn release(&mut self) {
        let Some(first) = self.threads.first() else { return };
        let peers: Vec<_> = self.threads.iter().map(QueueThread::handle).collect();
        self.shared.set_first(first.handle());
        for listener in self.listeners.drain(..) {
            let peers = peers.clone();
            let _ = first.ask(move |queue| accept::listen(queue, listener, peers));
        }
        let _ = first.ask(Queue::nobody_has_come);
    }

    /// What was asked for and could not be had.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// A handle that asks for a clean stop.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle::new(&self.ending)
    }

    /// A handle for one disk, for the export that is in charge of it
    /// ([`NbdOptions::beside_another`]).
    ///
    /// * `name`: of the disk.
    #[must_use]
    pub fn disk_handle(&self, name: &str) -> DiskHandle {
        let threads = self.threads.iter().map(QueueThread::handle).collect();
        DiskHandle::new(name, Arc::clone(&self.shared), threads)
    }

    /// Reads the counters later and from elsewhere.
    pub fn stats_reader(&self) -> Box<dyn Fn() -> Stats + Send + Sync> {
        let views: Vec<_> = self.threads.iter().map(|thread| thread.view.clone()).collect();
        Box::new(move || Stats::of(&views))
    }

    /// Gives the queues later and from elsewhere.
    pub fn queues_reader(&self) -> impl Fn() -> Vec<QueueView> + Send + Sync + 'static {
        let views: Vec<_> = self.threads.iter().map(|thread| thread.view.clone()).collect();
        move || views.clone()
    }

    /// Lists the clients later and from elsewhere.
    pub fn peers_reader(&self) -> Box<dyn Fn() -> Vec<Peer> + Send + Sync> {
        let peers = Arc::clone(&self.shared.peers);
        Box::new(move || peers.list())
    }

    /// Reads the number of connections later and from elsewhere.
    pub fn connections_reader(&self) -> Box<dyn Fn() -> usize + Send + Sync> {
        let shared = Arc::clone(&self.shared);
        Box::new(move || shared.connections())
    }

    /// The counters now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        (self.stats_reader())()
    }

    /// Waits until a stop was asked for, then stops.
    ///
    /// Errors: a queue thread panicked; the last flush failed; requests did not end in time.
    pub fn wait(mut self) -> Result<Stats, HaltReason> {
        let why = self.ending.wait();
        let result = self.end(why);
        let stats = self.stats();
        result.map(|()| stats)
    }

    /// Ends the export: clients, disks, threads.
    fn end(&mut self, why: Why) -> Result<(), HaltReason> {
        self.has_ended = true;
        self.listeners.clear();
        let is_whole = why == Why::Stopped;
        let drained = is_whole && self.drain();
        let closed = self.close_disks(drained);
        stop_threads(&mut self.threads, END_LIMIT, "nbd");
        if !is_whole {
            return Err(HaltReason::Panicked);
        }
        closed
    }

    /// Answers what is in flight and sends clients away. `false`: some did not end in time.
    fn drain(&self) -> bool {
        let disks = self.shared.exports.all();
        let _lifted: Vec<_> = disks.iter().map(|export| export.disk.lift_limits()).collect();
        let hold = async |queue: Rc<Queue>| queue.drain(LAST_REPLIES).await;
        ask_all(&self.threads, END_LIMIT, hold).is_ok()
    }

    /// Flushes and closes all disks that are ours to close.
    fn close_disks(&self, drained: bool) -> Result<(), HaltReason> {
        let Some(first) = self.threads.first() else { return Ok(()) };
        let is_in_charge = self.is_in_charge;
        let close = async move |queue: Rc<Queue>| {
            let mut result = Ok(());
            let disks = if is_in_charge { queue.shared.exports.all() } else { Vec::new() };
            for export in disks {
                result = result.and(close_disk(&export.disk, &queue.ring, drained).await);
            }
            result
        };
        let begun = Instant::now();
        let closed = first.ask_task(close).wait(|| begun.elapsed() < END_LIMIT);
        match closed {
            Ok(Ok(())) if drained => Ok(()),
            Ok(Err(errno)) => Err(HaltReason::Flush(errno)),
            Ok(Ok(())) | Err(_) => Err(HaltReason::StillInFlight(self.in_flight())),
        }
    }

    fn in_flight(&self) -> usize {
        usize::try_from(self.stats().total().in_flight).unwrap_or(usize::MAX)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if !self.has_ended
            && let Err(reason) = self.end(Why::Stopped)
        {
            tracing::warn!("{reason}");
        }
    }
}

fn of_socket(errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Socket, "a listening socket cannot be used").errno(errno)
}
