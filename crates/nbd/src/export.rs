//! An export from its start to its end.
//!
//! Promises: what a start has made ends when a later step fails; no word of a client is read before
//! [`Export::release`] where the options say so; at the end requests in flight are answered, later
//! ones get ESHUTDOWN, and what clients wrote is on stable storage. Control path.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::Disk;
use ringdisk_export::stats::{QueueView, Stats};
use ringdisk_export::{
    Error, ErrorKind, HaltReason, HandOverState, HandOverSteps, POLL_MAX, Pending, PlacementRule,
    QueueThread, ThreadSetup, ask_all, carry_out, close_disk, place_threads, stop_threads,
};
use ringdisk_ring::{Config, Errno, SpinPolicy, Topology};
use rustix::net::listen;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay};
use rustix::process::{Resource, getrlimit};

use crate::accept;
use crate::disk_handle::DiskHandle;
use crate::exported_disk::{Exported, Exports};
use crate::hand_over::{self, HandedClients};
use crate::options::{NamedDisk, NbdOptions, check};
use crate::peers::{Peer, log_name};
use crate::queue::{Queue, Shared, Work};
use crate::stop_request::{Ending, HandOverHandle, Next, Request, StopHandle, Why};
use crate::suspended_connections::{STANDING_LIMIT, STANDING_REPLIES};

/// At the end, requests in flight and the last flush have so long.
const END_LIMIT: Duration = Duration::from_secs(10);
/// At the end, clients have so long to take the last replies.
const LAST_REPLIES: Duration = Duration::from_secs(2);
/// Clients that wait to be accepted; further ones are refused by the kernel, which may hold fewer
/// (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;
/// Submission entries of a ring.
const ENTRIES: u32 = 256;
/// Operations of requests in flight on a ring; further ones wait for a slot. Each connection has
/// two of its own beside them: what it waits for may never come.
const SLOTS: usize = 1024;
/// Clients in their handshakes beside those that use the export. Those that say nothing go after
/// 0.2 to 0.3 s while others wait, so at least 6600 each second: those of a full backlog within
/// one. Each has 256 KiB for its words (a page, unless it fills them) and two options of 64 KiB.
const HANDSHAKES: usize = 2000;
/// Descriptors that are left for the rest of the process: images, control sockets; at most half of
/// its limit.
const OTHER_FILES: usize = 256;

/// Disks that are being served. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    threads: Vec<QueueThread<Work>>,
    shared: Arc<Shared>,
    ending: Arc<Ending>,
    notes: Vec<String>,
    /// Listening sockets that no queue thread has yet.
    listeners: Vec<OwnedFd>,
    /// Connections of another process that no queue thread has yet.
    clients: HandedClients,
    /// The disks are opened and closed with this export, not with another one.
    is_in_charge: bool,
    is_taken_up: bool,
    is_released: bool,
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
        let (beside_another, held) = (options.beside_another, options.held);
        let mut export = Export::prepare(disks, listeners, HandedClients::default(), options)?;
        if !beside_another {
            export.take_charge();
        }
        if !held {
            export.release();
        }
        Ok(export)
    }

    /// Makes all that serving takes, for disks that another process has until
    /// [`Export::take_charge`]; nobody is served before [`Export::release`]. Dropped before the
    /// first, it touches neither disks nor clients.
    ///
    /// * `listeners`, `clients`: as [`crate::Handed::open`] gives them.
    ///
    /// Errors: as [`Export::start`].
    pub fn prepare(
        disks: Vec<NamedDisk>,
        listeners: Vec<OwnedFd>,
        clients: HandedClients,
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
        let sockets_max = sockets_max(options.max_connections, &mut notes);
        let exports = disks.into_iter().map(|disk| Exported::new(disk, &options));
        let exports = Arc::new(Exports::new(exports.map(Arc::new).collect()));
        let ending = Arc::new(Ending::default());
        let shared = Arc::new(Shared::new(exports, &options, places.threads.len(), sockets_max));
        let mut export = Export {
            threads: Vec::new(),
            shared,
            ending,
            notes: Vec::new(),
            listeners,
            clients: HandedClients::default(),
            is_in_charge: false,
            is_taken_up: false,
            is_released: false,
            has_ended: false,
        };
        // All connections may come to be on one thread. Only those in use take memory.
        let slots = u32::try_from(SLOTS + 2 * sockets_max).unwrap_or(u32::MAX);
        for (number, cpus) in places.threads.into_iter().enumerate() {
            let ring = Config {
                entries: ENTRIES,
                slots,
                spin: SpinPolicy::adaptive(POLL_MAX),
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
        (export.notes, export.clients) = (notes, clients);
        Ok(export)
    }

    /// The disks are opened and closed with this export from now on.
    pub fn take_charge(&mut self) {
        self.is_in_charge = true;
        self.shared.exports.all().iter().for_each(|export| export.disk.take_charge());
    }

    /// Goes on with clients of another process; new ones wait for [`Export::release`].
    ///
    /// Once; later calls do nothing.
    pub fn take_up(&mut self) {
        let Some(first) = self.threads.first().filter(|_| !self.is_taken_up) else { return };
        self.is_taken_up = true;
        let peers: Vec<_> = self.threads.iter().map(QueueThread::handle).collect();
        self.shared.set_threads(peers.clone());
        let copies: io::Result<Vec<OwnedFd>> =
            self.listeners.iter().map(OwnedFd::try_clone).collect();
        match copies {
            Ok(copies) => self.shared.set_listeners(copies),
            Err(error) => tracing::warn!("no successor can take the export over: {error}"),
        }
        let clients = std::mem::take(&mut self.clients.0);
        let _ = first.ask(move |queue| accept::take_up(queue, clients, &peers));
    }

    /// Takes clients from now on, if they had to wait for it ([`NbdOptions::held`]).
    ///
    /// Once; later calls do nothing.
    pub fn release(&mut self) {
        self.take_up();
        let Some(first) = self.threads.first().filter(|_| !self.is_released) else { return };
        self.is_released = true;
        let peers: Vec<_> = self.threads.iter().map(QueueThread::handle).collect();
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

    /// A handle that gives the export to another process.
    #[must_use]
    pub fn hand_over_handle(&self) -> HandOverHandle {
        HandOverHandle::new(&self.ending)
    }

    /// A handle for one disk, for the export that is in charge of it
    /// ([`NbdOptions::beside_another`]).
    ///
    /// * `name`: of the disk.
    #[must_use]
    pub fn disk_handle(&self, name: &str) -> DiskHandle {
        let threads = self.threads.iter().map(QueueThread::handle).collect();
        DiskHandle::new(name, Arc::clone(&self.shared), Arc::clone(&self.ending), threads)
    }

    /// Leaves a disk with its clients to the process that has them, if the export was prepared for
    /// all of them ([`Export::prepare`]). Before [`Export::take_up`].
    ///
    /// * `name`: of the disk.
    /// * `listens`: that process goes on with the listening sockets; they are not used here.
    pub fn leave_out(&mut self, name: &str, listens: bool) {
        self.shared.exports.remove(name);
        self.clients.0.retain(|client| client.before.export != name);
        if listens {
            self.listeners.clear();
        }
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
        Box::new(move || shared.places.connections())
    }

    /// The counters now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        (self.stats_reader())()
    }

    /// Waits until a stop was asked for, then stops; or until another process has the export.
    ///
    /// Errors: a queue thread panicked; the last flush failed; requests did not end in time.
    pub fn wait(mut self) -> Result<Stats, HaltReason> {
        let why = loop {
            match self.ending.wait() {
                Next::End(why) => break why,
                Next::HandOver(request) => self.hand_over(request),
            }
        };
        let result = self.end(why);
        let stats = self.stats();
        result.map(|()| stats)
    }

    /// Ends the export: clients, disks, threads.
    fn end(&mut self, why: Why) -> Result<(), HaltReason> {
        self.has_ended = true;
        self.listeners.clear();
        self.shared.set_listeners(Vec::new());
        if why == Why::Moved {
            // Its sockets are the other process's, too: they are closed, and not shut down.
            stop_threads(&mut self.threads, END_LIMIT, "nbd");
            return Ok(());
        }
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

    /// Flushes and closes all disks that are ours to close, all at once: one whose storage does not
    /// answer keeps no other one from its end.
    fn close_disks(&self, drained: bool) -> Result<(), HaltReason> {
        let Some(first) = self.threads.first() else { return Ok(()) };
        let disks = if self.is_in_charge { self.shared.exports.all() } else { Vec::new() };
        let begun = Instant::now();
        let close = |export: Arc<Exported>| {
            first.ask_task(async move |queue: Rc<Queue>| {
                close_disk(&export.disk, &queue.ring, drained).await
            })
        };
        let closing: Vec<_> = disks.into_iter().map(close).collect();
        let still_in_flight = || HaltReason::StillInFlight(self.in_flight());
        let closed = |closing: Pending<Result<(), Errno>>| {
            let closed = closing.wait(|| begun.elapsed() < END_LIMIT);
            closed.map_err(|_| still_in_flight())?.map_err(HaltReason::Flush)
        };
        // All of them are waited for.
        let results: Vec<_> = closing.into_iter().map(closed).collect();
        results.into_iter().collect::<Result<(), _>>()?;
        if drained { Ok(()) } else { Err(still_in_flight()) }
    }

    /// Hands the export over, or goes on with it here.
    fn hand_over(&mut self, request: Request) {
        if !carry_out(request, self) {
            return;
        }
        let disks = self.shared.exports.all();
        disks.iter().for_each(|export| self.shared.peers.have_moved(&export.name));
        let left: Vec<_> = self.threads.iter().map(|it| it.ask(|queue| queue.leave())).collect();
        left.into_iter().for_each(|left| drop(left.within(END_LIMIT)));
        self.ending.moved();
    }

    fn pack_still(&self) -> Result<HandOverState, Error> {
        let in_flight =
            || Error::new(ErrorKind::Refused, "requests in flight are not done; try again later");
        let suspend = async |queue: Rc<Queue>| queue.suspend(STANDING_REPLIES).await;
        let moved = ask_all(&self.threads, STANDING_LIMIT, suspend).map_err(|_| in_flight())?;
        let clients: Vec<_> = moved.into_iter().flatten().flatten().collect();
        let first = self.threads.first().ok_or_else(in_flight)?;
        let hand_over = async |queue: Rc<Queue>| -> Result<_, ringdisk_disk::Error> {
            let mut handed = Vec::new();
            for export in queue.shared.exports.all() {
                let disk = export.disk.hand_over(&queue.ring).await?;
                handed.push((export.name.clone(), disk));
            }
            Ok(handed)
        };
        let handed = first.ask_task(hand_over).within(STANDING_LIMIT);
        let handed = handed.map_err(|_| in_flight())?.map_err(|error| {
            let text = format!("the disk cannot be handed over: {error}");
            Error::new(ErrorKind::Refused, text)
        })?;
        let listeners = self.shared.listeners().map_err(|error| {
            Error::new(ErrorKind::System, "a listening socket cannot be handed over").source(error)
        })?;
        hand_over::pack(listeners, handed, Vec::new(), clients)
    }

    fn in_flight(&self) -> usize {
        usize::try_from(self.stats().total().in_flight).unwrap_or(usize::MAX)
    }
}

impl HandOverSteps for Export {
    type State = HandOverState;

    fn disks(&self) -> Vec<Arc<Disk>> {
        self.shared.exports.all().iter().map(|export| Arc::clone(&export.disk)).collect()
    }

    fn refusal(&mut self) -> Option<Error> {
        None
    }

    fn flush(&mut self, is_awaited: &dyn Fn() -> bool) {
        let flush = async |queue: Rc<Queue>| {
            for export in queue.shared.exports.all() {
                let _ = export.disk.flush(&queue.ring).await;
            }
        };
        let flushed = self.threads.first().map(|first| first.ask_task(flush));
        let _ = flushed.map(|flushed| flushed.wait(is_awaited));
    }

    fn stand_still(&mut self) -> Result<HandOverState, Error> {
        self.pack_still()
    }

    fn go_on(&mut self) {
        let resume = async |queue: Rc<Queue>| {
            for export in queue.shared.exports.all() {
                // One that was not handed over yet is as it was.
                if let Err(error) = export.disk.resume(&queue.ring).await {
                    let disk = log_name(&export.name);
                    tracing::error!("{disk} cannot go on after a hand-over that failed: {error}");
                }
            }
        };
        let resumed = self.threads.first().map(|first| first.ask_task(resume));
        let _ = resumed.map(|resumed| resumed.within(END_LIMIT));
        let went: Vec<_> = self.threads.iter().map(|it| it.ask(|queue| queue.go_on())).collect();
        went.into_iter().for_each(|went| drop(went.within(END_LIMIT)));
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // Connections that another process has are not ended.
        let why = self.ending.reason().unwrap_or(Why::Stopped);
        if !self.has_ended
            && let Err(reason) = self.end(why)
        {
            tracing::warn!("{reason}");
        }
    }
}

/// Clients at once with those in their handshakes, as far as descriptors suffice.
///
/// * `notes`: is told where they do not suffice for those that use the export.
fn sockets_max(max_connections: usize, notes: &mut Vec<String>) -> usize {
    let wanted = max_connections + HANDSHAKES;
    let limit = getrlimit(Resource::Nofile).current;
    let Some(files) = limit.and_then(|files| usize::try_from(files).ok()) else { return wanted };
    let room = files - OTHER_FILES.min(files / 2);
    if room < max_connections {
        notes.push(format!(
            "{room} of {max_connections} NBD connections are possible with {files} open files; \
             raise RLIMIT_NOFILE (`ulimit -Hn`, `LimitNOFILE=`)"
        ));
    }
    wanted.min(room)
}

fn of_socket(errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Socket, "a listening socket cannot be used").errno(errno)
}
