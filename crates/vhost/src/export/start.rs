//! The start of an export, in phases: its device, its threads, what it offers, and the front end of
//! the process before.
//!
//! Promises: what a phase has made ends when a later one fails; nothing is served before
//! [`Prepared::go`]. Control path.

use std::sync::{Arc, Mutex};

use ringdisk_disk::Disk;
use ringdisk_export::{ControlThread, Error, ThreadPlaces};
use ringdisk_ring::Topology;

use super::backend::Control;
use super::hand_over::FrontEnd;
use super::host::{Host, Left};
use super::kept::{self, DiesWithPanic};
use super::kernel_device::Accel;
use super::options::{ExportOptions, Packed};
use super::ring_nodes::{RingNodes, Views};
use super::sockets::FrontEndSource;
use super::{Export, Prepared, place};
use crate::blk::SEGMENTS_MAX;
use crate::blk::config::Config;
use crate::blk::features::{Offer, offered};
use crate::device::Device;
use crate::hand_over_state::{Role, Unpacked};
use crate::protocol::features as protocol;
use crate::session::{Session, SessionConfig};
use crate::signals::Signals;
use crate::worker::{ThreadSetup, WorkerThread};

/// Regions of guest memory that a front end may add.
const MEM_SLOTS: u16 = 509;

/// Why the kernel does not serve a disk that has a second export.
pub(super) const NBD_AND_KERNEL: &str =
    "it is served over NBD, too, and NBD clients would not see what the kernel has in flight";

/// Makes an export that serves nothing yet.
///
/// * `state`: of the process before, whose export this one goes on with.
/// * `parked`: numbers of what that process has parked, if it was killed.
///
/// Errors: as [`Export::start`] and [`Export::take_over`].
pub(super) fn prepare(
    disk: Arc<Disk>,
    mut options: ExportOptions,
    mut state: Option<Unpacked>,
    parked: Vec<u64>,
) -> Result<Prepared, Error> {
    options.check()?;
    let keeper = options.keep.take();
    let record = keeper.map(|keeper| kept::record(keeper, state.as_mut(), parked)).transpose()?;
    let signals = Arc::new(Signals::new(options.held)?);
    let device = device(&disk, &options, &signals);
    let Threads { threads, ring_nodes, views, notes } = Threads::start(&disk, &options, &device)?;
    let never_in_kernel = never_in_kernel(&options);
    let accel = options.accel.map(|accel| Accel::open(accel, options.queues)).transpose()?;
    let status = accel.as_ref().map(|accel| Arc::clone(&accel.status));
    let changed = Arc::clone(&signals);
    let size_watch = disk.watch_size(move |_| changed.changed());
    let mut control = Control::new(
        Arc::clone(&disk),
        Arc::clone(&device),
        config(&disk, &options),
        threads,
        ring_nodes,
        accel,
        Arc::clone(&signals),
        (record.is_some(), options.queue_size_max),
    );
    let is_for_kernel = control.check_accel()?;
    if control.accel.is_some() {
        let changes = Arc::clone(&signals);
        disk.watch_changes(move |change| changes.disk_changes(change));
    }
    let session = session(&disk, &options, is_for_kernel);
    let (front_end, left) = match state {
        Some(state) => front_end(&mut control, session, state)?,
        None => (None, Left::Nothing),
    };
    let mut host = Host {
        control,
        source: FrontEndSource::open(options.listen, options.connector)?,
        session,
        second: options.second,
        signals: Arc::clone(&signals),
        name: options.common.name,
        front_end,
        is_deaf: false,
        record,
        left,
        beside: options.beside,
    };
    host.record_start()?;
    let export = Export {
        thread: None,
        signals,
        device,
        views,
        notes,
        accel: status,
        never_in_kernel,
        _size_watch: size_watch,
    };
    let thread = ControlThread::make("vhost", |host: Host| {
        let _dies = DiesWithPanic(host.record.is_some());
        host.run()
    })?;
    Ok(Prepared { host, thread, export, disk, clients: None })
}

/// Whether the guest cannot write.
fn is_read_only(disk: &Disk, options: &ExportOptions) -> bool {
    options.common.read_only || disk.is_read_only()
}

/// What all threads of the device share.
fn device(disk: &Disk, options: &ExportOptions, signals: &Arc<Signals>) -> Arc<Device> {
    let device = Device::new(
        (&options.common.name, Arc::clone(disk.events())),
        &options.serial,
        options.logical_block_size,
        is_read_only(disk, options),
        options.write_cache,
        options.on_error,
        Arc::clone(signals),
    );
    device.watch(disk);
    Arc::new(device)
}

/// The queue threads of the export. Dropped, they end.
struct Threads {
    threads: Vec<WorkerThread>,
    ring_nodes: RingNodes,
    views: Views,
    /// What was asked for and cannot be had.
    notes: Vec<String>,
}

impl Threads {
    /// Errors: CPUs that cannot be used; a thread or its ring cannot be made.
    fn start(
        disk: &Arc<Disk>,
        options: &ExportOptions,
        device: &Arc<Device>,
    ) -> Result<Threads, Error> {
        let (topology, mut notes) = (Topology::read(), Vec::new());
        let places = place::place(&topology, options, &place::PLACED, &mut notes)?;
        let ThreadPlaces { threads: placed, usable } = places;
        let pins = options.pin_guest_memory.then(Arc::default);
        let mut threads = Vec::with_capacity(placed.len());
        for (index, cpus) in placed.iter().cloned().enumerate() {
            let thread = WorkerThread::start(ThreadSetup {
                index,
                cpus,
                disk: Arc::clone(disk),
                device: Arc::clone(device),
                pins: pins.clone(),
                restricted: options.common.restricted,
            });
            let thread = thread.map_err(Error::of_ring)?;
            notes.extend(thread.thread.pin_error.clone());
            threads.push(thread);
        }
        let views = threads.iter().map(|thread| thread.thread.view.clone()).collect();
        let views: Views = Arc::new(Mutex::new(views));
        let ring_nodes = RingNodes::new(
            topology,
            usable,
            options.common.threads.numa,
            placed,
            Arc::clone(&views),
        );
        Ok(Threads { threads, ring_nodes, views, notes })
    }
}

/// The configuration space.
fn config(disk: &Disk, options: &ExportOptions) -> Config {
    let (limits, logical) = (disk.block_limits(), options.logical_block_size);
    Config {
        seg_max: SEGMENTS_MAX.min(u32::from(options.queue_size_max.max(3) - 2)),
        logical_block: logical,
        physical_block: options.physical_block_size.unwrap_or(limits.physical_block).max(logical),
        min_transfer: limits.min_io,
        optimal_transfer: limits.opt_io,
        discard_align: limits.discard_align,
        discard_max: limits.discard_max.0,
        zeroes_max: limits.zeroes_max.0,
        queues: options.queues,
        may_unmap: limits.zeroes_may_unmap,
    }
}

/// Why the kernel never serves, if that is so.
fn never_in_kernel(options: &ExportOptions) -> Option<&'static str> {
    match (options.accel, options.packed) {
        (Some(_), _) => None,
        (None, _) if options.keep.is_some() => Some(
            "it was started with --keep, and the kernel would lose virtqueues with the process",
        ),
        (None, _) if options.beside.is_some() => Some(NBD_AND_KERNEL),
        (None, Packed::On) => {
            Some("it was started with --packed on, and the kernel knows no packed virtqueues")
        }
        (None, _) => Some("it was started with --accel off"),
    }
}

/// What front ends are offered.
///
/// * `is_for_kernel`: the host kernel may serve the disk.
fn session(disk: &Disk, options: &ExportOptions, is_for_kernel: bool) -> SessionConfig {
    let offer = Offer {
        read_only: is_read_only(disk, options),
        discard: disk.block_limits().can_discard,
        several_queues: options.queues > 1,
        packed: match options.packed {
            Packed::Auto => !is_for_kernel,
            Packed::On => true,
            Packed::Off => false,
        },
    };
    SessionConfig {
        features: offered(offer),
        protocol_features: protocol::ALL,
        queues_max: options.queues,
        queue_size_max: options.queue_size_max,
        mem_slots_max: MEM_SLOTS,
    }
}

/// Takes the front end of the process before, if one was connected, and what that process left half
/// done.
///
/// Errors: the state is not understood, or does not fit.
fn front_end(
    control: &mut Control,
    config: SessionConfig,
    mut state: Unpacked,
) -> Result<(Option<FrontEnd>, Left), Error> {
    control.unpack(&mut state)?;
    let left = Left::of(&mut state);
    let Some(socket) = state.one(Role::Connection) else { return Ok((None, Left::Nothing)) };
    let session = match state.session() {
        Some(saved) => Session::restore(config, saved)?,
        None => Session::new(config),
    };
    Ok((Some((session, socket.into())), left))
}
