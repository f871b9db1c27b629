//! An export from its start to its end.
//!
//! Promises: one disk, one device; what goes wrong with it ends it and nothing else. Control path.

mod accel;
mod backend;
mod control;
pub(crate) mod hand_over;
mod host;
mod kept;
mod kernel_device;
mod options;
mod ownership;
mod place;
mod record;
mod reply_pipe;
mod ring_nodes;
mod sockets;
mod start;
mod state;
mod vring;
mod vrings;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_disk::{Disk, ImageOptions, SizeWatch};
use ringdisk_export::keep::KeptState;
use ringdisk_export::stats::{QueueView, Stats};
use ringdisk_export::{ControlThread, HaltReason, SecondExport, ask_hand_over};
pub use ringdisk_export::{HandOverState, HandedOver};
use ringdisk_ring::Ring;

use crate::device::Device;
use crate::hand_over_state::{Role, Unpacked};
use crate::keep;
use crate::signals::{Signals, Switch};
use crate::{Error, ErrorKind};

pub use crate::device::{Health, OnError};
pub use options::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, Connector, ExportOptions, Listen, Packed, QUEUE_SIZE_MAX,
    QUEUES_MAX, SERIAL_BYTES_MAX, Second, check_block_size, check_serial, queues_default,
};

use host::Host;
use kernel_device::KernelStatus;
pub use kernel_device::{AccelOptions, Acceleration, Engine, QueueCounters, QueueInKernel, State};
use ring_nodes::Views;

/// A thread that switches acceleration waits so long for the control thread's answer. The switch
/// itself waits for as long as requests in flight take: one that is late is done all the same,
/// without an answer.
const SWITCHING: Duration = Duration::from_secs(30);

/// Asks an export for a clean stop, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<Signals>);

impl StopHandle {
    /// Asks for a clean stop; returns at once.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Whether one was asked for.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.is_stopped()
    }
}

/// Hands an export over to another process, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct HandOverHandle(Arc<Signals>);

impl HandOverHandle {
    /// Makes the export stand still and packs it. It goes on when [`HandedOver`] is dropped, or
    /// when the other process takes too long; it ends when that is committed.
    ///
    /// Errors: why that cannot be at the moment; the export goes on.
    pub fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error> {
        ask_hand_over(|request| self.0.request(request))
    }
}

/// Switches the host kernel's part on and off, from any thread; also after the export's end.
#[derive(Clone, Debug)]
pub struct AccelHandle {
    signals: Arc<Signals>,
    /// Why the kernel never serves, if that is so.
    never: Option<&'static str>,
}

impl AccelHandle {
    /// Waits until virtqueues are where they are to be, or half a minute. Gives whether the kernel
    /// serves now: without a guest whose virtqueues run it will serve the next one.
    ///
    /// Errors: why that cannot be, then the export goes on as it was; or there is no answer yet, as
    /// requests in flight are waited for, or no export any more: then virtqueues move as soon as
    /// they can.
    pub fn switch(&self, on: bool) -> Result<bool, String> {
        if let Some(why) = self.never {
            return Err(String::from(why));
        }
        let (answer, answered) = sync_channel(1);
        self.signals.switch(Switch { on, answer });
        answered.recv_timeout(SWITCHING).unwrap_or_else(|error| {
            Err(String::from(match error {
                RecvTimeoutError::Timeout => {
                    "requests in flight are still waited for; the virtqueues move as soon as they \
                     are done"
                }
                RecvTimeoutError::Disconnected => "the disk is served no longer",
            }))
        })
    }
}

/// An export that is complete but does nothing yet.
#[derive(Debug)]
#[must_use = "nothing is served yet"]
pub struct Prepared {
    host: Host,
    thread: ControlThread<Host>,
    export: Export,
    disk: Arc<Disk>,
    /// What another process has handed over of a second export of the disk.
    clients: Option<HandOverState>,
}

impl Prepared {
    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// What another process has handed over of a second export of the disk
    /// ([`SecondExport::stand_still`]); once.
    pub fn take_beside(&mut self) -> Option<HandOverState> {
        self.clients.take()
    }

    /// A second export of the disk, which could not be made before the disk was there; else
    /// [`ExportOptions::beside`]. Not with `accel`.
    pub fn set_beside(&mut self, beside: Arc<dyn SecondExport>) {
        self.host.beside = Some(beside);
        self.export.never_in_kernel = Some(start::NBD_AND_KERNEL);
    }

    /// Serves from now on.
    #[must_use]
    pub fn go(mut self) -> Export {
        self.disk.take_charge();
        self.export.thread = Some(self.thread.start(self.host));
        self.export
    }
}

/// A disk that is being served. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    thread: Option<JoinHandle<Result<(), HaltReason>>>,
    signals: Arc<Signals>,
    device: Arc<Device>,
    views: Views,
    notes: Vec<String>,
    accel: Option<Arc<KernelStatus>>,
    /// Why the kernel never serves, if that is so.
    never_in_kernel: Option<&'static str>,
    _size_watch: SizeWatch,
}

impl Export {
    /// Serves from now on: the socket answers when this returns, or when it is released
    /// ([`ExportOptions::held`]).
    ///
    /// Errors: [`ErrorKind::Usage`] for options that cannot be; those of sockets, threads and
    /// rings.
    pub fn start(disk: Arc<Disk>, options: ExportOptions) -> Result<Export, Error> {
        start::prepare(disk, options, None, Vec::new()).map(Prepared::go)
    }

    /// Takes an export over that another process has packed ([`HandOverHandle::hand_over`]).
    /// Nothing runs before [`Prepared::go`], which is for when the other process will never go on.
    ///
    /// * `ring`: of the calling thread, to open the disk on.
    /// * `image`: as the other process was given.
    /// * `options`: where front ends come from is replaced by the socket of the other process, if
    ///   it had one.
    ///
    /// Errors: the state is not understood, or does not fit the options; the other process goes on
    /// then.
    pub async fn take_over(
        ring: &Ring,
        state: HandOverState,
        image: &ImageOptions,
        mut options: ExportOptions,
    ) -> Result<Prepared, Error> {
        let mut state = Unpacked::open(state)?;
        let disk = hand_over::open_disk(ring, &mut state, image).await.map_err(|error| {
            Error::new(ErrorKind::Refused, "the disk cannot be taken over").source(error)
        })?;
        if let Some(listener) = state.one(Role::Listener) {
            options.listen = Listen::Listener(listener);
        }
        let clients = state.beside();
        let prepared = start::prepare(disk, options, Some(state), Vec::new())?;
        Ok(Prepared { clients, ..prepared })
    }

    /// Goes on with an export whose process was killed, from what was kept of it
    /// ([`ExportOptions::keep`]). Nothing runs before [`Prepared::go`].
    ///
    /// * `disk`: the same one, opened when the process that was killed had let go of it.
    /// * `options`: as that process was given; where front ends come from is replaced by the
    ///   socket that was kept, if there is one.
    ///
    /// Errors: the state is not understood, or does not fit the options.
    pub fn go_on(
        disk: Arc<Disk>,
        state: KeptState,
        mut options: ExportOptions,
    ) -> Result<Prepared, Error> {
        let parked = state.numbers();
        let mut state = keep::open(state)?;
        if let Some(listener) = state.one(Role::Listener) {
            options.listen = Listen::Listener(listener);
        }
        start::prepare(disk, options, Some(state), parked)
    }

    /// Takes front ends from now on, if they had to wait for it ([`ExportOptions::held`]).
    pub fn release(&self) {
        self.signals.release();
    }

    /// Hands the export over, from any thread.
    #[must_use]
    pub fn hand_over_handle(&self) -> HandOverHandle {
        HandOverHandle(Arc::clone(&self.signals))
    }

    /// What was asked for and could not be had, each with what would enable it.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// A handle that asks for a clean stop.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(Arc::clone(&self.signals))
    }

    /// Reads the counters later and from elsewhere.
    pub fn stats_reader(&self) -> Box<dyn Fn() -> Stats + Send + Sync> {
        let views = Arc::clone(&self.views);
        Box::new(move || stats_of(&views))
    }

    /// Gives the queues later and from elsewhere.
    pub fn queues_reader(&self) -> impl Fn() -> Vec<QueueView> + Send + Sync + 'static {
        let views = Arc::clone(&self.views);
        move || ring_nodes::locked(&views).clone()
    }

    /// Reads how the device is, later and from elsewhere.
    pub fn health_reader(&self) -> Box<dyn Fn() -> Health + Send + Sync> {
        let device = Arc::clone(&self.device);
        Box::new(move || device.health())
    }

    /// Reads how it is with the host kernel, later and from elsewhere; `None`: it never serves.
    pub fn accel_reader(&self) -> Option<Box<dyn Fn() -> Acceleration + Send + Sync>> {
        let status = Arc::clone(self.accel.as_ref()?);
        Some(Box::new(move || status.read()))
    }

    /// Whether there is a device through which the host kernel may come to serve.
    #[must_use]
    pub fn has_kernel(&self) -> bool {
        self.accel.as_ref().is_some_and(|status| status.has_kernel())
    }

    /// Switches acceleration, from any thread.
    #[must_use]
    pub fn accel_handle(&self) -> AccelHandle {
        AccelHandle { signals: Arc::clone(&self.signals), never: self.never_in_kernel }
    }

    /// Why the device needs a reset by its driver, if it does.
    #[must_use]
    pub fn broken_reason(&self) -> Option<String> {
        self.device.broken_reason()
    }

    /// Makes a queue thread panic, for [`crate::testing`].
    pub(crate) fn panic_on_a_queue(&self) {
        let view = ring_nodes::locked(&self.views)[0].clone();
        view.remote.run(|_| panic!("asked to panic"));
    }

    /// Waits until the export has ended: it was stopped, or the one front end of [`Listen::Stream`]
    /// has gone.
    ///
    /// Errors: [`HaltReason`] when it ended by itself; the process and its other exports go on.
    pub fn wait(mut self) -> Result<Stats, HaltReason> {
        self.join()?;
        Ok(stats_of(&self.views))
    }

    fn join(&mut self) -> Result<(), HaltReason> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.signals.stop();
            if let Err(reason) = self.join() {
                tracing::warn!("{reason}");
            }
        }
    }
}

/// The counters of all queue threads now.
fn stats_of(views: &Views) -> Stats {
    // A copy: reading takes longer than the lock may be held.
    let views = ring_nodes::locked(views).clone();
    Stats::of(&views)
}
