//! One disk of a virtual machine, from its words to an export with its control sockets.
//!
//! Promises: nothing that was made stays when the export cannot be started.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::{DiskControl, NbdPlace, ServedAs};
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::helper;
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::sockets::{MadeSocket, Opened, Place};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{Shown, SuccessorSocket};
use ringdisk_disk::Disk;
use ringdisk_vhost::{ExportOptions, Listen};

use super::beside::Beside;
use super::kept::Kept;
use super::{Plan, Running};
use crate::cli::{PACKED, ServeArgs, ServedDisk, word_of};
use crate::commands::open::{ImagePlan, new_image, reach};
use crate::commands::shown::ShownWords;
use crate::vhost::{self, Served};

/// A process that served the disk and was killed has it until its last write has landed.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// Errors: options of an image that it cannot have.
pub(super) fn plan<'a>(
    args: &ServeArgs,
    disk: &'a ServedDisk,
    place: Place,
) -> Result<Plan<'a>, Failure> {
    let source = &disk.args.source;
    Ok(Plan {
        args: &disk.args,
        shown: shown(disk),
        new: new_image(source, disk.image.as_deref())?,
        image: ImagePlan {
            // The guest lives on when this process is killed, and was told that its writes are
            // there. A temporary overlay is gone anyway.
            outlives_process: !source.snapshot,
            leaves_directory: args.daemonize || args.keep,
            inactive: disk.args.device.incoming,
            wait_for_locks: Some(LOCK_WAIT),
            ask_for_raw: true,
            note_names: confine::is_wanted(args.sandbox.word),
            ..ImagePlan::new(source, disk.image.clone())
        },
        place,
        restricted: confine::is_wanted(args.sandbox.word),
        confines: confine::confines_files(args.sandbox.word),
    })
}

/// What the guest is shown, as the words of a disk say it now.
fn shown(disk: &ServedDisk) -> Shown {
    let device = &disk.args.device;
    let mut words = ShownWords::of_source(&disk.args.source);
    words.say("--queues", Some(vhost::queues(&disk.args).to_string()));
    words.say("--queue-size", Some(device.queue_size.to_string()));
    words.say("--serial", Some(device.serial.clone()));
    words.say("--logical-block-size", Some(device.logical_block_size.to_string()));
    words.number("--physical-block-size", device.physical_block_size.map(u64::from));
    words.say("--packed", Some(word_of(PACKED, device.packed).to_owned()));
    words.shown(&disk.args.source, disk.image.as_deref())
}

/// Serves one disk.
///
/// * `number`: which one it is.
/// * `beside`: NBD clients have the disks, too.
///
/// Errors: the socket cannot be made, or the export not be started; nothing stays then.
pub(super) fn start(
    number: usize,
    plan: Plan<'_>,
    disk: Arc<Disk>,
    kept: Option<&Kept>,
    beside: Option<&Beside>,
) -> Result<Running, Failure> {
    let keep = kept.map(|kept| kept.keep(number, &plan, &disk)).transpose()?;
    let (keep, kept_jobs) = keep.unzip();
    let mut placed = plan.placed(&disk);
    placed.kept_jobs = kept_jobs;
    placed.nbd = beside.map(|beside| beside.place(number));
    let Opened { listen, path, made } = plan.place.open()?;
    let front = front(&listen);
    let (read_only, name) = (disk.is_read_only(), plan.image.name());
    let options = vhost::options(plan.args, read_only, plan.restricted, listen, name);
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
    Ok(Placed { path, front, made, ..placed }.attend(served, disk))
}

impl Plan<'_> {
    /// What is known of the disk once its images are open, but for its sockets.
    pub(super) fn placed(&self, disk: &Disk) -> Placed {
        let source = &self.args.source;
        let first = source.overlay.clone().or(self.image.image.clone());
        Placed {
            ready: format!("{} is served {}", self.image.describe(disk), self.place.shown()),
            name: self.image.name(),
            path: None,
            front: None,
            queues: vhost::queues(self.args),
            allowed: source.allow_path.clone(),
            reach: reach(source, self.image.image.as_deref()),
            // A command has put another image on top of it.
            first_top: first.filter(|_| self.image.top.is_some()),
            restricted: self.restricted,
            made: None,
            nbd: None,
            shown: self.shown.clone(),
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

/// What is known of a disk before it is served.
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
    pub(super) shown: Shown,
    /// Jobs that the process before this one has begun.
    pub(super) jobs: Vec<HandedJob>,
    /// What keeps its jobs for the next process.
    pub(super) kept_jobs: Option<KeptJobs>,
}

impl Placed {
    /// Makes the sockets for `ringdisk ctl`, and for the process after this one.
    pub(super) fn attend(self, served: Served, disk: Arc<Disk>) -> Running {
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
            shown,
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
            let successor = SuccessorSocket::start(&socket, handle, shown, &disk, commands.jobs());
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

/// Makes the control socket. Without one the disk is served all the same.
pub(super) fn control(
    path: Option<&PathBuf>,
    commands: &Arc<DiskControl>,
    restricted: bool,
) -> Option<(Server, helper::Named)> {
    // Nobody could name a disk without a path.
    let name = registry::name_of_disk(path?);
    let started = registry::listen(&name).and_then(|listening| {
        let named = listening.named();
        Ok((Server::start(listening, Arc::clone(commands), restricted)?, named))
    });
    match started {
        Ok(started) => Some(started),
        Err(error) => {
            tracing::warn!("`ringdisk ctl` cannot be used: {error}");
            commands.lose_jobs();
            None
        }
    }
}
