//! An export: a disk served as a file, from its mount to its end.
//!
//! Promises: several exports live in one process independently of each other; what an attempt to
//! start has made is undone when it fails. Control path; any thread. How a start goes is in
//! [`start`], one attempt of it in [`attempt`], and the end in [`crate::control`].

mod attempt;
mod control_thread;
mod fallback;
mod forced;
mod options;
mod phases;
pub(crate) mod start;
mod take_over;

use std::sync::Arc;
use std::thread::JoinHandle;

use ringdisk_disk::{Disk, SizeWatch};
use ringdisk_export::stats::{QueueView, Stats};
use ringdisk_export::{Error, HaltReason, HandedOver, ask_hand_over};

use crate::control::InUseSlot;
use crate::events::{Event, EventSender};
use crate::kept::{HandedMount, Parked, TakenMount};
use crate::mount::{Remover, RemoverSlot};
use crate::topology::{Live, MountTopology, watch};
use crate::transport::Transport;
use crate::uring::RingMode;

pub use crate::queue::{QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX};
pub use forced::Forced;
pub use options::ExportOptions;
pub use take_over::Prepared;

/// Asks an export to stop. Any thread.
#[derive(Clone, Debug)]
pub struct StopHandle(EventSender);

impl StopHandle {
    /// Asks for a clean stop: the name goes, clients that have the file open are served until the
    /// last one has closed it ([`ExportOptions::stop_timeout`]), and the image is flushed. Returns
    /// at once.
    pub fn stop(&self) {
        self.0.send(Event::Stop);
    }

    /// Asks for the end now: clients get errors, requests in flight get 2 s to end, the image is
    /// flushed. Returns at once.
    pub fn force(&self) {
        self.0.send(Event::Force);
    }
}

/// Hands a mount over to another process, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct HandOverHandle(EventSender);

impl HandOverHandle {
    /// Makes the mount stand still and gives its state. It goes on when [`HandedOver`] is dropped,
    /// or when the other process takes too long; it ends when that is committed.
    ///
    /// Errors: why that cannot be at the moment, or never ([`crate::ErrorKind::Unsupported`]: over
    /// io_uring, with passthrough); the mount goes on.
    pub fn hand_over(&self) -> Result<(HandedMount, HandedOver), Error> {
        ask_hand_over(|request| self.0.send(Event::HandOver(request)))
    }
}

/// A disk that is being served. Dropping it ends it at once, also while clients use it.
#[derive(Debug)]
pub struct Export {
    control: Option<JoinHandle<Result<(), HaltReason>>>,
    events: EventSender,
    queues: Vec<QueueView>,
    topology: MountTopology,
    live: Vec<Live>,
    parked: Option<Parked>,
    remover: RemoverSlot,
    in_use: InUseSlot,
    connection: Option<u32>,
    _size_watch: SizeWatch,
}

impl Export {
    /// Mounts and serves; when it returns, the file answers.
    ///
    /// Errors: those of [`crate::mount::mount`]; [`crate::ErrorKind::Usage`] for CPUs that cannot
    /// be used; [`crate::ErrorKind::RingForbidden`] and [`crate::ErrorKind::System`] when no ring
    /// can be made.
    pub fn start(disk: Arc<Disk>, options: ExportOptions) -> Result<Export, Error> {
        start::start(disk, options, Forced::default(), Vec::new())
    }

    /// Prepares to go on with a mount that another process hands over
    /// ([`HandOverHandle::hand_over`]). Nothing is served before [`Prepared::go`], which is for
    /// when the other process will never go on.
    ///
    /// * `disk`: what the other process hands over.
    /// * `options`: as the other process was given; the transport is `/dev/fuse`.
    ///
    /// Errors: as [`Export::start`], but for those of mounting; the other process goes on then.
    pub fn take_over(
        disk: Arc<Disk>,
        options: ExportOptions,
        mount: TakenMount,
    ) -> Result<Prepared, Error> {
        take_over::prepare(disk, options, mount)
    }

    /// How requests travel: never [`Transport::Auto`].
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.topology.transport
    }

    /// What the rings do; `None` without rings.
    #[must_use]
    pub fn ring_mode(&self) -> Option<RingMode> {
        self.topology.ring_mode
    }

    /// What a helper process keeps so that another process can go on with this mount; once, and
    /// only with [`ExportOptions::keep`].
    pub fn take_parked(&mut self) -> Option<Parked> {
        self.parked.take()
    }

    /// Number of the connection, if the mount was seen ([`crate::mount::Mount::connection`]).
    #[must_use]
    pub fn connection(&self) -> Option<u32> {
        self.connection
    }

    /// From now on another process takes the mount away and aborts its connection: this one gives
    /// up the right to do so. Once.
    pub fn remove_through(&self, remover: Arc<dyn Remover>) {
        // The first one stays.
        let _ = self.remover.set(remover);
    }

    /// Calls `tell`, with the number of open files, when the mount is to stop and is in use, before
    /// its name goes, and again for each further [`StopHandle::stop`]. Called by a thread that
    /// serves no request; the stop waits for it. The first one stays.
    pub fn watch_users(&self, report: impl Fn(u64) + Send + Sync + 'static) {
        self.in_use.set(Box::new(report));
    }

    /// What was asked for and could not be had, each with what would enable it.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.topology.warnings
    }

    /// Looks at the threads, queues and buffers of this export now, later and from elsewhere. Any
    /// thread; takes some milliseconds for each gigabyte in buffers.
    pub fn topology_reader(&self) -> impl Fn() -> MountTopology + Send + Sync + 'static {
        watch(self.topology.clone(), self.live.clone())
    }

    /// Counters of all queues. Any thread, any time.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&self.queues)
    }

    /// Reads the counters later and from elsewhere.
    pub fn stats_reader(&self) -> impl Fn() -> Stats + Send + Sync + 'static {
        let queues = self.queues.clone();
        move || Stats::of(&queues)
    }

    /// Gives the queues later and from elsewhere.
    pub fn queues_reader(&self) -> impl Fn() -> Vec<QueueView> + Send + Sync + 'static {
        let queues = self.queues.clone();
        move || queues.clone()
    }

    /// A handle that asks for a clean stop.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(self.events.clone())
    }

    /// Hands the mount over, from any thread.
    #[must_use]
    pub fn hand_over_handle(&self) -> HandOverHandle {
        HandOverHandle(self.events.clone())
    }

    /// Makes a queue thread panic, for [`crate::testing`].
    pub(crate) fn panic_on_a_queue(&self) {
        self.queues[0].remote.run(|_| panic!("asked to panic"));
    }

    /// Waits until the export has ended: unmounted or stopped.
    ///
    /// Errors: [`HaltReason`] when it ended by itself; the process and its other exports go on.
    pub fn wait(mut self) -> Result<Stats, HaltReason> {
        self.join()?;
        Ok(self.stats())
    }

    fn join(&mut self) -> Result<(), HaltReason> {
        match self.control.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if self.control.is_some() {
            self.events.send(Event::Force);
            if let Err(reason) = self.join() {
                tracing::warn!("{reason}");
            }
        }
    }
}
