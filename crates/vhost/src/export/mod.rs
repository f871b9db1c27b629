//! An export from its start to its end.
//!
//! Promises: one disk, one device; what goes wrong with it ends it and nothing else. Control path.

mod accel;
mod backend;
mod control;
mod custody;
pub(crate) mod hand_over;
mod home;
mod options;
mod place;
mod sockets;
mod state;
mod vrings;

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ringdisk_disk::{Disk, ImageOptions, SizeWatch};
use ringdisk_export::ThreadPlaces;
use ringdisk_export::stats::Stats;
use ringdisk_ring::{Ring, Topology};

use crate::blk::SEGMENTS_MAX;
use crate::blk::config::Config;
use crate::blk::features::{Offer, offered};
use crate::device::Device;
use crate::protocol::features as protocol;
use crate::session::{Session, SessionConfig};
use crate::worker::{ThreadSetup, WorkerThread};
use crate::{Error, ErrorKind};

pub use crate::device::Health;
pub use crate::device::OnError;
pub use crate::parcel::Parcel;
pub use hand_over::HandedOver;
pub use options::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, Connector, ExportOptions, Listen, Packed, QUEUE_SIZE_MAX,
    QUEUES_MAX, SERIAL_BYTES_MAX, Second, check_block_size, check_serial, queues_default,
};

use crate::parcel::{Role, Unpacked};
use crate::signals::{Signals, Switch};
use accel::{Accel, Shown};
pub use accel::{AccelOptions, Acceleration, Engine, QueueCounters, QueueInKernel, State};
use backend::Control;
use control::Host;
use home::{Homes, Views};
use sockets::Door;

/// Regions of guest memory that a front end may add.
const MEM_SLOTS: u16 = 509;
/// Whoever switches acceleration waits so long for the control thread's answer. The switch itself
/// waits for as long as requests in flight take: one that is late is done all the same, and nobody
/// is told.
const SWITCHING: Duration = Duration::from_secs(30);

/// Asks an export for a clean stop, from any thread; also after its end.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<Signals>);

impl StopHandle {
    /// Asks for a clean stop; returns at once.
    pub fn stop(&self) {
        self.0.stop();
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
    pub fn hand_over(&self) -> Result<(Parcel, HandedOver), Error> {
        hand_over::ask(&self.0)
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
                    "requests in flight are still waited for; the virtqueues move as soon as they are done"
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
    export: Export,
    disk: Arc<Disk>,
}

impl Prepared {
    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Serves from now on.
    ///
    /// Errors: the system has no thread for it.
    pub fn go(mut self) -> Result<Export, Error> {
        self.disk.take_charge();
        let host = self.host;
        let thread = std::thread::Builder::new()
            .name(String::from("vhost"))
            .spawn(move || host.run())
            .map_err(|error| {
                Error::new(ErrorKind::System, "no thread for the export").source(error)
            })?;
        self.export.thread = Some(thread);
        Ok(self.export)
    }
}

/// A disk that is being served. Dropping it stops it.
#[derive(Debug)]
pub struct Export {
    thread: Option<JoinHandle<Result<(), Error>>>,
    signals: Arc<Signals>,
    device: Arc<Device>,
    views: Views,
    notes: Vec<String>,
    accel: Option<Arc<Shown>>,
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
        Export::prepare(disk, options, None)?.go()
    }

    /// Takes an export over that another process has packed ([`HandOverHandle::hand_over`]).
    /// Nothing runs before [`Prepared::go`], which is for when the other process will never go on.
    ///
    /// * `ring`: of the calling thread, to open the disk on.
    /// * `image`: as the other process was given.
    /// * `options`: where front ends come from is replaced by the socket of the other process, if
    ///   it had one.
    ///
    /// Errors: the parcel is not understood, or does not fit the options; the other process goes on
    /// then.
    pub async fn take_over(
        ring: &Ring,
        parcel: Parcel,
        image: &ImageOptions,
        mut options: ExportOptions,
    ) -> Result<Prepared, Error> {
        let mut parcel = parcel.open()?;
        let disk = hand_over::open_disk(ring, &mut parcel, image).await.map_err(|error| {
            Error::new(ErrorKind::Refused, "the disk cannot be taken over").source(error)
        })?;
        if let Some(listener) = parcel.one(Role::Listener) {
            options.listen = Listen::Listener(listener);
        }
        Export::prepare(disk, options, Some(parcel))
    }

    fn prepare(
        disk: Arc<Disk>,
        options: ExportOptions,
        parcel: Option<Unpacked>,
    ) -> Result<Prepared, Error> {
        options.check()?;
        let signals = Arc::new(Signals::new(options.held)?);
        let read_only = options.read_only || disk.is_read_only();
        let device = Arc::new(Device::new(
            &options.name,
            &options.serial,
            options.logical_block_size,
            read_only,
            options.write_cache,
            options.on_error,
            Arc::clone(&signals),
        ));
        let mut notes = Vec::new();
        let topology = Topology::read();
        let places = place::place(&topology, &options, &place::PLACED, &mut notes)?;
        let ThreadPlaces { threads: placed, usable } = places;
        let pins = options.pin_guest_memory.then(Arc::default);
        let mut threads = Vec::with_capacity(placed.len());
        for (index, cpus) in placed.iter().cloned().enumerate() {
            let thread = WorkerThread::start(ThreadSetup {
                index,
                cpus,
                disk: Arc::clone(&disk),
                device: Arc::clone(&device),
                pins: pins.clone(),
                restricted: options.restricted,
            });
            let thread = thread.map_err(Error::of_ring)?;
            notes.extend(thread.thread.pin_error.clone());
            threads.push(thread);
        }
        let views = threads.iter().map(|thread| thread.thread.view.clone()).collect();
        let views: Views = Arc::new(Mutex::new(views));
        let homes = Homes::new(topology, usable, options.numa, placed, Arc::clone(&views));
        let limits = disk.block_limits();
        let logical = options.logical_block_size;
        let config = Config {
            seg_max: SEGMENTS_MAX.min(u32::from(options.queue_size_max.max(3) - 2)),
            logical_block: logical,
            physical_block: options
                .physical_block_size
                .unwrap_or(limits.physical_block)
                .max(logical),
            min_transfer: limits.min_io,
            optimal_transfer: limits.opt_io,
            discard_align: limits.discard_align,
            discard_max: limits.discard_max,
            zeroes_max: limits.zeroes_max,
            queues: options.queues,
            may_unmap: limits.zeroes_may_unmap,
        };
        let never_in_kernel = match (options.accel, options.packed) {
            (Some(_), _) => None,
            (None, Packed::On) => {
                Some("it was started with --packed on, and the kernel knows no packed virtqueues")
            }
            (None, _) => Some("it was started with --accel off"),
        };
        let accel = options.accel.map(|accel| Accel::open(accel, options.queues)).transpose()?;
        let shown = accel.as_ref().map(|accel| Arc::clone(&accel.shown));
        let changed = Arc::clone(&signals);
        let size_watch = disk.watch_size(move |_| changed.changed());
        let mut control = Control::new(
            Arc::clone(&disk),
            Arc::clone(&device),
            config,
            threads,
            homes,
            accel,
            Arc::clone(&signals),
        );
        let is_for_kernel = control.check_accel()?;
        if control.accel.is_some() {
            let told = Arc::clone(&signals);
            disk.watch_changes(move |change| told.disk_changes(change));
        }
        let offer = Offer {
            read_only,
            discard: limits.can_discard,
            several_queues: options.queues > 1,
            packed: match options.packed {
                Packed::Auto => !is_for_kernel,
                Packed::On => true,
                Packed::Off => false,
            },
        };
        let session = SessionConfig {
            features: offered(offer),
            protocol_features: protocol::ALL,
            queues_max: options.queues,
            queue_size_max: options.queue_size_max,
            mem_slots_max: MEM_SLOTS,
        };
        let mut front_end = None;
        if let Some(mut parcel) = parcel {
            control.unpack(&mut parcel)?;
            if let (Some(state), Some(socket)) = (parcel.session(), parcel.one(Role::Connection)) {
                front_end = Some((Session::restore(session, state)?, socket.into()));
            }
        }
        let host = Host {
            control,
            door: Door::open(options.listen, options.connector)?,
            session,
            second: options.second,
            signals: Arc::clone(&signals),
            name: options.name,
            front_end,
            is_deaf: false,
        };
        let export = Export {
            thread: None,
            signals,
            device,
            views,
            notes,
            accel: shown,
            never_in_kernel,
            _size_watch: size_watch,
        };
        Ok(Prepared { host, export, disk })
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

    /// Reads how the device is, later and from elsewhere.
    pub fn health_reader(&self) -> Box<dyn Fn() -> Health + Send + Sync> {
        let device = Arc::clone(&self.device);
        Box::new(move || device.health())
    }

    /// Reads how it is with the host kernel, later and from elsewhere; `None`: it never serves.
    pub fn accel_reader(&self) -> Option<Box<dyn Fn() -> Acceleration + Send + Sync>> {
        let shown = Arc::clone(self.accel.as_ref()?);
        Some(Box::new(move || shown.read()))
    }

    /// Whether there is a device through which the host kernel may come to serve.
    #[must_use]
    pub fn has_kernel(&self) -> bool {
        self.accel.as_ref().is_some_and(|shown| shown.has_kernel())
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

    /// Waits until the export has ended: it was stopped, or the one front end of [`Listen::Stream`]
    /// has gone.
    ///
    /// Errors: why it ended by itself; the process and its other exports go on.
    pub fn wait(mut self) -> Result<Stats, Error> {
        self.join()?;
        Ok(stats_of(&self.views))
    }

    fn join(&mut self) -> Result<(), Error> {
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
            if let Err(error) = self.join() {
                tracing::warn!("{}", error.with_hint());
            }
        }
    }
}

/// The counters of all queue threads now.
fn stats_of(views: &Views) -> Stats {
    // A copy: reading takes longer than the lock may be held.
    let views = home::locked(views).clone();
    Stats::of(&views)
}
