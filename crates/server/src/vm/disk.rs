//! One disk of a virtual machine, from its words to an export with its control sockets.
//!
//! Promises: nothing that was made stays when the export cannot be started.

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::{DiskControl, NbdPlace, ServedAs};
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::keep::succession::Succession;
use ringdisk_daemon::sockets::{MadeSocket, Opened, Place};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{ClientView, DiskToHandOver, SuccessorSocket};
use ringdisk_disk::Disk;
use ringdisk_vhost::export::Packed;
use ringdisk_vhost::{ExportOptions, Listen};

use super::nbd_export::NbdExport;
use super::nbd_start::Wanted;
use super::request::{DiskRequest, Request, options};
use super::{Plan, Running};
use crate::client_view::ClientViewWords;
use crate::keep::{Kept, KeptImage};
use crate::open::{ImagePlan, LOCK_WAIT};
use crate::start::control;
use crate::vhost::Served;

/// * `beside`: NBD clients have the disks, too; which one it is of them.
///
/// Errors: options of an image that it cannot have.
pub(super) fn plan(
    all: &Request,
    request: DiskRequest,
    place: Place,
    beside: Option<(&Wanted<'_>, usize)>,
) -> Result<Plan, Failure> {
    let source = &request.source;
    let image = ImagePlan {
        // The guest outlives this process, and its writes were answered. A temporary overlay is
        // lost with the process anyway.
        outlives_process: !source.snapshot,
        leaves_directory: all.daemonize || all.keep,
        inactive: request.incoming,
        wait_for_locks: Some(LOCK_WAIT),
        ask_for_raw: true,
        note_names: confine::is_wanted(all.sandbox),
        ..ImagePlan::new(source, request.image.clone())
    };
    Ok(Plan {
        client_view: client_view(&request, beside),
        new: image.new_image()?,
        request,
        image,
        place,
        restricted: confine::is_wanted(all.sandbox),
        confines: confine::confines_files(all.sandbox),
    })
}

/// What the guest and NBD clients see of the disk, according to the request.
fn client_view(request: &DiskRequest, beside: Option<(&Wanted<'_>, usize)>) -> ClientView {
    let packed = match request.packed {
        Packed::Auto => "auto",
        Packed::On => "on",
        Packed::Off => "off",
    };
    let mut words = ClientViewWords::of_source(&request.source);
    words.say("--queues", Some(request.queues.to_string()));
    words.say("--queue-size", Some(request.queue_size.to_string()));
    words.say("--serial", Some(request.serial.clone()));
    words.say("--logical-block-size", Some(request.logical_block_size.to_string()));
    words.number("--physical-block-size", request.physical_block_size.map(u64::from));
    words.say("--packed", Some(String::from(packed)));
    match beside {
        Some((beside, number)) => beside.say(&mut words, number),
        None => words.say("--nbd", None),
    }
    words.view(&request.source, request.image.as_deref())
}

/// Serves one disk.
///
/// * `number`: of the disk in the command line.
/// * `beside`: the NBD export of the same disks.
///
/// Errors: the socket cannot be made, or the export not be started; nothing stays then.
pub(super) fn start(
    number: usize,
    plan: Plan,
    disk: Arc<Disk>,
    kept: Option<&Kept>,
    beside: Option<&NbdExport>,
) -> Result<Running, Failure> {
    let image = KeptImage { plan: &plan.image, confines: plan.confines };
    let created = plan.new.as_ref().map(|(new, _)| new.format);
    let right = kept.map(|kept| kept.disks.keep_succession(number, false)).transpose()?;
    let keep = |kept: &Kept| kept.keep(number, &image, created, &disk, right.as_ref());
    let (keep, kept_jobs) = kept.map(keep).transpose()?.unzip();
    let mut placed = plan.placed(&disk);
    placed.kept_jobs = kept_jobs;
    placed.nbd = beside.map(|beside| beside.place(number));
    let Opened { listen, path, made } = plan.place.open()?;
    let front = front(&listen);
    let (read_only, name) = (disk.is_read_only(), plan.image.name());
    let options = options(&plan.request, read_only, plan.restricted, listen, name);
    let accel = options.accel.filter(|_| keep.is_none() && beside.is_none());
    let handle = beside.map(|beside| beside.disk_handle(number));
    let options = ExportOptions { held: true, keep, accel, beside: handle, ..options };
    let mut served = Served::start(Arc::clone(&disk), options)?;
    if let Some(beside) = beside {
        served.counts_with(beside.handle());
    }
    for note in served.notes() {
        terminal::warn(note);
    }
    Ok(Placed { path, front, made, ..placed }.attend(served, disk, right))
}

impl Plan {
    /// The disk once its images are open, before it has sockets.
    pub(super) fn placed(&self, disk: &Disk) -> Placed {
        let source = &self.image.request;
        let first = source.overlay.clone().or(self.image.image.clone());
        Placed {
            ready: format!("{} is served {}", self.image.describe(disk), self.place.display_name()),
            name: self.image.name(),
            path: None,
            front: None,
            queues: self.request.queues,
            allowed: source.allow_path.clone(),
            reach: self.image.reach(),
            // A command has put another image on top of it.
            first_top: first.filter(|_| self.image.top.is_some()),
            restricted: self.restricted,
            made: None,
            nbd: None,
            client_view: self.client_view.clone(),
            jobs: Vec::new(),
            kept_jobs: None,
        }
    }
}

/// The socket of a front end that listens itself.
pub(super) fn front(listen: &Listen) -> Option<PathBuf> {
    match listen {
        Listen::Connect(path) => Some(path.clone()),
        Listen::Listener(_) | Listen::Stream(_) => None,
    }
}

/// A disk before it is served.
pub(super) struct Placed {
    pub(super) ready: String,
    pub(super) name: String,
    pub(super) path: Option<PathBuf>,
    pub(super) front: Option<PathBuf>,
    pub(super) queues: u16,
    pub(super) allowed: Vec<PathBuf>,
    pub(super) reach: Reach,
    pub(super) first_top: Option<PathBuf>,
    pub(super) restricted: bool,
    pub(super) made: Option<MadeSocket>,
    /// Where NBD clients find it.
    pub(super) nbd: Option<NbdPlace>,
    pub(super) client_view: ClientView,
    /// Jobs that the process before this one has begun.
    pub(super) jobs: Vec<HandedJob>,
    /// Keeps its jobs for the next server.
    pub(super) kept_jobs: Option<KeptJobs>,
}

impl Placed {
    /// Makes the sockets for `ringdisk ctl`, and for the process after this one.
    ///
    /// * `right`: to go on with the disk, where it is kept.
    pub(super) fn attend(
        self,
        served: Served,
        disk: Arc<Disk>,
        right: Option<Succession>,
    ) -> Running {
        let Placed {
            mut ready,
            name,
            path,
            front,
            queues,
            allowed,
            reach,
            first_top,
            restricted,
            made,
            nbd,
            client_view,
            jobs,
            kept_jobs,
        } = self;
        if let Some(nbd) = &nbd {
            ready.push_str(&format!(", and over NBD{}", nbd.text()));
        }
        let handle = served.handle();
        let for_control = handle.clone();
        let commands = DiskControl::new(Arc::clone(&disk), handle, move |_| for_control.stop());
        let socket = path.clone().unwrap_or_default();
        let commands = commands.served_as(ServedAs::VhostUser { socket, nbd });
        let mut commands = commands.confined_later(restricted).takes_up(jobs);
        if let Some(keeper) = kept_jobs {
            commands = commands.keeps_jobs_at(keeper);
        }
        let commands = Arc::new(commands);
        let control = control(path.as_ref(), &commands, restricted);
        let successor = path.as_ref().and_then(|path| {
            let socket = registry::name_for_successor(path);
            let handle = served.hand_over_handle();
            let given = DiskToHandOver::new(client_view, &disk, commands.jobs());
            let successor = SuccessorSocket::start(&socket, handle, vec![given], right);
            successor.inspect_err(|e| tracing::warn!("`--upgrade` cannot be used: {e}")).ok()
        });
        Running {
            name,
            ready,
            path,
            front,
            queues,
            allowed,
            reach,
            first_top,
            served,
            disk,
            made,
            commands,
            control,
            successor,
        }
    }
}
