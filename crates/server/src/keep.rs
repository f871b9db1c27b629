//! `--keep`: disks of a server with sockets that outlive the process that serves them.
//!
//! Promises: the helper process ([`supervisor`]), which serves nothing, has what the next process
//! needs before the first client is served, and at every moment after that; the next process opens
//! the images when the one before has let go of them, and takes no other ones.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_daemon::background::Background;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::mark;
use ringdisk_daemon::keep::disks::{self, FoundDisk, HeldDisks, KeptDisks, Role};
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::keep::succession::Succession;
use ringdisk_daemon::keep::{State, StateFile, supervisor};
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_disk::{Disk, Format, Layer};
use ringdisk_export::keep::Keeper;
use ringdisk_storage::Storage;

use crate::open::ImagePlan;
use crate::reopen::{AllowedImages, FREE, when_free};
use crate::start::{cannot_watch, stop_before, watch_start};

/// Whether this process serves, or has held the disks until their end.
#[derive(Debug)]
pub enum Begun {
    /// It serves; `Some`: the helper process keeps the disks.
    Serves(Option<Kept>),
    /// The exit code of the end.
    Held(u8),
}

/// The serving side of kept disks.
#[derive(Debug)]
pub struct Kept {
    /// What the helper process holds.
    pub disks: KeptDisks,
    /// Of a process that was killed.
    pub found: Option<Vec<FoundDisk>>,
    /// The exit code of a disk that could not be gone on with.
    pub(crate) failed: Option<u8>,
    /// What new overlays are marked with.
    pub mark: String,
}

/// Becomes the process that holds the disks, or one that serves.
///
/// * `keep`: that was asked for.
/// * `count`: disks.
/// * `upgrade`: another process serves them until now.
///
/// Errors: those of [`supervisor::run`]; what was kept cannot be used.
pub fn begin(
    keep: bool,
    pidfile: Option<&Path>,
    count: usize,
    background: &mut Option<Background>,
    upgrade: bool,
) -> Result<Begun, Failure> {
    if !keep {
        return Ok(Begun::Serves(None));
    }
    let mut disks = match disks::role(count)? {
        Role::Holds => {
            let code = supervisor::run(pidfile, &mut HeldDisks(count), background.take(), upgrade)?;
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
    pub fn resumes(&self) -> bool {
        self.found.is_some()
    }

    /// The exit code, where that of the disks which were served is known.
    pub(crate) fn code(&self, code: u8) -> u8 {
        self.failed.filter(|_| code == Exit::Clean.code()).unwrap_or(code)
    }

    /// Logs when the helper process has ended.
    ///
    /// * `noun`: what is served, "a disk" or "the disks".
    pub(crate) fn watch_parent(&self, noun: &'static str) {
        self.disks.watch(move || {
            tracing::error!(
                "the process that keeps the disks is gone: this one goes on, and nothing would go \
                 on after it; `ringdisk ctl SOCKET stop` ends {noun}"
            );
        });
    }

    /// The state of a disk that is about to be served for the first time.
    ///
    /// * `number`: which one it is.
    /// * `created`: the format of its image, if that was made.
    /// * `right`: to go on with it, if it is an export of its own.
    ///
    /// Errors: it is not kept.
    pub fn keep(
        &self,
        number: usize,
        image: &KeptImage<'_>,
        created: Option<Format>,
        disk: &Disk,
        right: Option<&Succession>,
    ) -> Result<(Box<dyn Keeper>, KeptJobs), Failure> {
        let images = self.keep_images(number, created, disk)?;
        let jobs = self.disks.keep_jobs(number, &images);
        keep_changes(disk, images, image.allowed().may_be_top());
        Ok((self.disks.keep(number, right)?, jobs))
    }

    /// The images of a disk, as they are from now on.
    ///
    /// Errors: they are not kept.
    fn keep_images(
        &self,
        number: usize,
        created: Option<Format>,
        disk: &Disk,
    ) -> Result<StateFile, Failure> {
        let mut state = State::of_images(created).begun_on(&disk.layers());
        state.window = disk.window().map(|(start, len)| (start, len.map(|len| len.0)));
        state.protect_raw = disk.protects_raw();
        state.mark = self.mark.clone();
        self.disks.keep_images(number, state)
    }

    /// The images of a disk that is taken over from another process, with what commands have
    /// changed there. What its export is was kept before ([`KeptDisks::keep`]).
    ///
    /// Errors: they are not kept.
    pub(crate) fn keep_handed(
        &self,
        number: usize,
        image: &KeptImage<'_>,
        disk: &Disk,
    ) -> Result<KeptJobs, Failure> {
        let layers = disk.layers();
        let named = layers.first().filter(|top| is_named(top, image.paths()));
        // What a guest has written to it since does not decide what it is. (An overlay is qcow2,
        // which says nothing of the image below.)
        let named = named.filter(|_| image.plan.request.overlay.is_none());
        let images = self.keep_images(number, named.and_then(|top| top.format()), disk)?;
        keep_handed(disk, &images, image.paths(), image.plan.request.copy_on_read);
        let jobs = self.disks.keep_jobs(number, &images);
        keep_changes(disk, images, image.allowed().may_be_top());
        Ok(jobs)
    }
}

/// Takes signals while nothing is served: a stop removes what was made and ends the process.
///
/// * `kept`: where another process holds the disks it counts signals.
/// * `resumes`: this process goes on with them: a stop is remembered.
///
/// Errors: no thread for signals.
pub fn watch(fresh: &NewFiles, kept: Option<&Kept>, resumes: bool) -> Result<Watcher, Failure> {
    let Some(kept) = kept else { return watch_start(fresh) };
    let phase = if resumes { Phase::Mounting } else { stop_before(fresh) };
    let watcher = Watcher::start_kept(phase).map_err(cannot_watch)?;
    kept.disks.listens();
    Ok(watcher)
}

/// The image of a kept disk, as the command line says it.
#[derive(Clone, Copy, Debug)]
pub struct KeptImage<'a> {
    /// What is served.
    pub plan: &'a ImagePlan,
    /// A process with this command line is confined in its files.
    pub confines: bool,
}

impl<'a> KeptImage<'a> {
    /// The overlay and the image that the command line names.
    fn paths(&self) -> [Option<&'a Path>; 2] {
        [self.plan.request.overlay.as_deref(), self.plan.image.as_deref()]
    }

    fn allowed(self) -> AllowedImages<'a> {
        AllowedImages {
            noun: "disk",
            request: &self.plan.request,
            image: self.plan.image.as_deref(),
            confines: self.confines,
        }
    }
}

/// Whether an image is the first one that the command line names.
///
/// * `paths`: an overlay, and an image.
fn is_named(top: &Layer, paths: [Option<&Path>; 2]) -> bool {
    let named = paths.into_iter().flatten().next();
    let (Some(file), Some(named)) = (top.file(), named) else {
        // A null disk, unless a mirror has moved it to a file.
        return top.file().is_none() && named.is_none();
    };
    match named.metadata() {
        Ok(meta) => file.identity() == Some(Storage::identity_of(&meta)),
        // One of another machine.
        Err(_) => top.name() == named,
    }
}

/// Keeps what commands have changed in the process before, of a disk that is taken over from it.
///
/// * `paths`: an overlay, and the image of the command line.
/// * `copy_on_read`: what the command line says of it.
pub(crate) fn keep_handed(
    disk: &Disk,
    images: &StateFile,
    paths: [Option<&Path>; 2],
    copy_on_read: bool,
) {
    let layers = disk.layers();
    if layers.first().is_some_and(|top| !is_named(top, paths)) {
        images.set_chain(&layers, true);
    }
    if let Some(changed) = disk.changed_limits() {
        images.set_limits(Some(changed));
    }
    if disk.copies_on_read() != copy_on_read {
        images.set_copy_on_read(disk.copies_on_read());
    }
}

/// Keeps from now on what the images and the limits of a disk are, and whether reads are kept, for
/// the process that goes on with it after this one.
///
/// * `may_be_top`: why the next process would not find an image on top of the chain.
pub(crate) fn keep_changes(
    disk: &Disk,
    state: StateFile,
    may_be_top: impl Fn(&Layer) -> Result<(), String> + Send + Sync + 'static,
) {
    let limited = state.clone();
    disk.watch_limits(move |limits| limited.set_limits(limits));
    let copied = state.clone();
    disk.watch_copy_on_read(move |is_on| copied.set_copy_on_read(is_on));
    let top = disk.layers().first().map(|top| top.name().to_owned());
    let top = Mutex::new(top);
    disk.watch_chain(may_be_top, move |chain| {
        let mut top = top.lock().unwrap_or_else(PoisonError::into_inner);
        let new = chain.first().map(|top| top.name().to_owned());
        state.set_chain(chain, *top != new);
        *top = new;
    });
}

/// Gives a disk that was opened again what commands had changed in the process before.
///
/// Errors: the disk takes no limits.
pub(crate) fn follow_changes(disk: &Disk, state: &State) -> Result<(), Failure> {
    if let Some(limits) = state.limits() {
        disk.follow_limits(&limits)?;
    }
    if let Some(is_on) = state.copy_on_read {
        disk.follow_copy_on_read(is_on);
    }
    Ok(())
}

/// Opens the images of a process that was killed, as the plan says it from then on.
///
/// * `first`, `images`: those of the start, and those that it has now.
/// * `inactive`: the disk may be another process's.
///
/// Errors: they are others by now, or not free in time.
pub fn reopen(
    plan: &mut ImagePlan,
    confines: bool,
    (first, images): (&State, &StateFile),
    inactive: bool,
    watcher: &Watcher,
) -> Result<Arc<Disk>, Failure> {
    let now = images.state().unwrap_or_else(|| first.clone());
    let top = KeptImage { plan, confines }.allowed().checked_top(first, &now)?;
    let overlay = plan.request.overlay.as_deref().filter(|_| top.is_none());
    // It would be made anew, empty.
    if let Some(gone) = overlay.filter(|overlay| !overlay.exists()) {
        let what = format!("the overlay '{}' of the disk is gone", gone.display());
        return Err(Failure::new(Exit::Image, what));
    }
    plan.top = top;
    plan.made_format = now.format();
    plan.window = now.window;
    plan.protect_raw = now.protect_raw;
    plan.wait_for_locks = None;
    plan.inactive |= inactive;
    let disk = when_free(watcher, FREE, || plan.open(&NewFiles::default(), None))?;
    let image = KeptImage { plan, confines };
    image.allowed().check_same(first, &now, &disk.layers())?;
    follow_changes(&disk, &now)?;
    keep_changes(&disk, images.clone(), image.allowed().may_be_top());
    Ok(disk)
}
