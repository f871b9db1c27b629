//! `--keep`: disks whose process may be killed without their virtual machines noticing more than a
//! pause.
//!
//! Promises: a parent that serves nothing ([`holder`]) has what the next process needs before the
//! first front end is served, and at every moment after that; the next process opens the images
//! when the one before has let go of them, takes no other ones, and goes on with the same
//! connections. What cannot be kept is refused before anything is made.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_daemon::background::Background;
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::mark;
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::keep::disks::{self, FoundDisk, HeldDisks, KeptDisks, Role};
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::keep::{State, StateFile, holder};
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::sockets::{MadeSocket, Opened, Place, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_vhost::ExportOptions;
use ringdisk_vhost::export::Export;
use ringdisk_vhost::keep::{Keeper, KeptState};

use super::{Placed, Plan, Running, front};
use crate::cli::ServeArgs;
use crate::commands::reopen::{AllowedImages, FREE, when_free};
use crate::vhost::{self, Served};

/// Whether this process serves, or has held the disks until their end.
pub(super) enum Begun {
    /// It serves; `Some`: its parent holds the disks.
    Serves(Option<Kept>),
    /// The exit code of the end.
    Held(u8),
}

/// The serving side of kept disks.
pub(super) struct Kept {
    pub(super) disks: KeptDisks,
    /// Of a process that was killed.
    found: Option<Vec<FoundDisk>>,
    /// The exit code of a disk that could not be gone on with.
    failed: Option<u8>,
    /// What new overlays are marked with.
    pub(super) mark: String,
}

/// Becomes the process that holds the disks, or one that serves.
///
/// Errors: those of [`holder::run`]; what was kept cannot be used.
pub(super) fn begin(
    args: &ServeArgs,
    count: usize,
    background: &mut Option<Background>,
) -> Result<Begun, Failure> {
    if !args.keep {
        return Ok(Begun::Serves(None));
    }
    let mut disks = match disks::role(count)? {
        Role::Holds => {
            let code =
                holder::run(args.pidfile.as_deref(), &mut HeldDisks(count), background.take())?;
            return Ok(Begun::Held(code));
        }
        Role::Serves(disks) => disks,
    };
    let found = disks.take_found();
    let mark = match &found {
        Some(found) => found.first().map(|disk| disk.first.mark.clone()).unwrap_or_default(),
        None => mark::new().map_err(|error| {
            Failure::system("no random bytes for the disks", &error, Exit::General)
        })?,
    };
    Ok(Begun::Serves(Some(Kept { disks, found, failed: None, mark })))
}

impl Kept {
    /// Whether disks of another process are there to go on with.
    pub(super) fn resumes(&self) -> bool {
        self.found.is_some()
    }

    /// The exit code, where that of the disks which were served is known.
    pub(super) fn code(&self, code: u8) -> u8 {
        self.failed.filter(|_| code == Exit::Clean.code()).unwrap_or(code)
    }

    /// Goes on with all disks that have not ended. One that cannot be served ends alone: its front
    /// end is disconnected, and the others go on.
    ///
    /// Errors: none of them can be served; what was kept goes with this process.
    pub(super) fn go_on(
        &mut self,
        plans: Vec<Plan<'_>>,
        watcher: &Watcher,
    ) -> Result<Vec<Running>, Failure> {
        let found = self.found.take().unwrap_or_default();
        let mut failures = Vec::new();
        let (mut opened, mut running) = (Vec::new(), Vec::new());
        for (number, (plan, found)) in plans.into_iter().zip(found).enumerate() {
            let FoundDisk { first, images, export, keeper, late } = found;
            let jobs = self.disks.keep_jobs(number, &images);
            let found_jobs = jobs.found(late);
            let Some(export) = export else { continue };
            let (name, place) = (plan.image.name(), made_socket(&plan));
            match open(plan, (&first, &images), &export, watcher) {
                Ok((plan, disk)) => opened.push((plan, disk, export, keeper, (jobs, found_jobs))),
                Err(failure) => {
                    drop(place.and_then(|path| MadeSocket::adopt(&path).ok()));
                    export.end(keeper);
                    failures.push(failure.context(name));
                }
            }
        }
        watcher.enter(Phase::Mounting);
        // Before there are threads that shall have it too.
        io_flusher::become_one_if(
            opened.iter().any(|(_, disk, ..)| io_flusher::is_on_a_device(disk)),
        );
        for (plan, disk, export, keeper, jobs) in opened {
            let name = plan.image.name();
            match go_on(plan, disk, export, keeper, jobs) {
                Ok(disk) => running.push(disk),
                Err(failure) => failures.push(failure.context(name)),
            }
        }
        self.failed = failures.first().map(Failure::code);
        if running.is_empty() && failures.len() == 1 {
            return failures.pop().map_or(Ok(running), Err);
        }
        failures.iter().for_each(terminal::complain);
        Ok(running)
    }

    /// The state of a disk that is about to be served for the first time.
    ///
    /// * `number`: which one it is.
    ///
    /// Errors: it is not kept.
    pub(super) fn keep(
        &self,
        number: usize,
        plan: &Plan<'_>,
        disk: &Disk,
    ) -> Result<(Box<dyn Keeper>, KeptJobs), Failure> {
        let created = plan.new.as_ref().map(|(new, _)| new.format);
        let mut state = State::of_images(created).begun_on(&disk.layers());
        state.window = disk.window();
        state.protect_raw = disk.protects_raw();
        state.mark = self.mark.clone();
        let images = self.disks.keep_images(number, state)?;
        let jobs = self.disks.keep_jobs(number, &images);
        watch(plan, disk, images);
        Ok((self.disks.keep(number)?, jobs))
    }
}

/// Keeps from now on what the images and the limits are.
fn watch(plan: &Plan<'_>, disk: &Disk, images: StateFile) {
    let limited = images.clone();
    disk.watch_limits(move |limits| limited.set_limits(limits));
    let top = disk.layers().first().map(|top| top.name().to_owned());
    let top = Mutex::new(top);
    disk.watch_chain(allowed_images(plan).may_be_top(), move |chain| {
        let mut top = top.lock().unwrap_or_else(PoisonError::into_inner);
        let new = chain.first().map(|top| top.name().to_owned());
        images.set_chain(chain, *top != new);
        *top = new;
    });
}

fn allowed_images<'a>(plan: &'a Plan<'_>) -> AllowedImages<'a> {
    AllowedImages {
        noun: "disk",
        args: &plan.args.source,
        image: plan.image.image.as_deref(),
        confines: plan.confines,
    }
}

/// Opens the images of a process that was killed.
///
/// Errors: they are others by now, or not free in time.
///
/// * `first`, `images`: those of the start, and those that it has now.
fn open<'a>(
    mut plan: Plan<'a>,
    (first, images): (&State, &StateFile),
    export: &KeptState,
    watcher: &Watcher,
) -> Result<(Plan<'a>, Arc<Disk>), Failure> {
    let now = images.state().unwrap_or_else(|| first.clone());
    let top = allowed_images(&plan).checked_top(first, &now)?;
    let overlay = plan.args.source.overlay.as_deref().filter(|_| top.is_none());
    // It would be made anew, empty.
    if let Some(gone) = overlay.filter(|overlay| !overlay.exists()) {
        let what = format!("the overlay '{}' of the disk is gone", gone.display());
        return Err(Failure::new(Exit::Image, what));
    }
    plan.new = None;
    plan.image.top = top;
    plan.image.made_format = now.format();
    plan.image.window = now.window;
    plan.image.protect_raw = now.protect_raw;
    plan.image.wait_for_locks = None;
    plan.image.inactive |= export.is_inactive();
    let disk = when_free(watcher, FREE, || plan.image.open(&NewFiles::default(), None))?;
    allowed_images(&plan).check_same(first, &now, &disk.layers())?;
    if let Some(limits) = now.limits() {
        disk.follow_limits(&limits)?;
    }
    watch(&plan, &disk, images.clone());
    Ok((plan, disk))
}

/// Goes on with one disk.
///
/// Errors: its state is not understood; the export cannot be made.
fn go_on(
    plan: Plan<'_>,
    disk: Arc<Disk>,
    export: KeptState,
    keeper: Box<dyn Keeper>,
    (jobs, found): (KeptJobs, Vec<HandedJob>),
) -> Result<Running, Failure> {
    let name = plan.image.name();
    let makes = plan.args.place.vhost_user_blk.is_some();
    let mut placed = plan.placed(&disk);
    placed.ready.push_str(" again");
    (placed.kept_jobs, placed.jobs) = (Some(jobs), found);
    let Opened { listen, path, .. } = plan.place.open()?;
    let front = front(&listen).filter(|_| !makes);
    let read_only = disk.is_read_only();
    let options = vhost::options(plan.args, read_only, plan.restricted, listen, name.clone());
    let options = ExportOptions { held: true, accel: None, keep: Some(keeper), ..options };
    let prepared = Export::go_on(Arc::clone(&disk), export, options)?;
    let served = Served::go(prepared, name.clone());
    for note in served.notes() {
        terminal::warn(note);
    }
    let made = path.as_deref().filter(|_| makes).and_then(|path| MadeSocket::adopt(path).ok());
    Ok(Placed { path, front, made, ..placed }.attend(served, disk))
}

/// The name of the socket that the process before has made.
fn made_socket(plan: &Plan<'_>) -> Option<PathBuf> {
    let Place::Take(path) = &plan.place else { return None };
    plan.args.place.vhost_user_blk.is_some().then(|| path.clone())
}

/// Where the sockets of disks are whose process was killed.
pub(super) fn place(options: &SocketOptions) -> Place {
    let path = options.make.clone().or_else(|| options.connect.clone());
    Place::Take(path.unwrap_or_default())
}
