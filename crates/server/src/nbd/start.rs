//! Three ways to start serving NBD clients: open the images and listen, take over from another
//! process (`--upgrade`), or go on after a kill (`--keep`).
//!
//! Promises: what was made goes again when a start fails; another process goes on with its disks
//! and clients until everything here is prepared. An attacker may have taken
//! that process over: its descriptors count, and its words do not.

use std::os::fd::{AsFd, OwnedFd};

use ringdisk_daemon::confine;
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry::name_for_successor;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::keep::disks::FoundDisk;
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::keep::succession::Succession;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{ClientView, Kind, Predecessor, ask};
use ringdisk_disk::Disk;
use ringdisk_export::keep::Keeper;
use ringdisk_images::inspect;
use ringdisk_messages::state::Versions;
use ringdisk_nbd::{Handed, HandedClients, NamedDisk, NbdOptions};
use serde::{Deserialize, Serialize};

use super::addresses::{Listening, Where, listen, taken, target_of};
use super::export::Served;
use super::exports::{named, say_what_clients_see};
use super::request::{DiskRequest, Request};
use crate::client_view::ClientViewWords;
use crate::hand_over::check_top;
use crate::keep::{Kept, KeptImage, reopen};
use crate::limits;
use crate::open::ImagePlan;

/// Versions of the state of a kept export.
const VERSIONS: Versions = Versions::new(1, 1);

/// The request, before any disk is open.
pub(super) struct Wanted<'a> {
    pub(super) request: &'a Request,
    pub(super) disks: &'a [DiskRequest],
    pub(super) plans: Vec<ImagePlan>,
    pub(super) options: NbdOptions,
    pub(super) is_encrypted: bool,
}

/// Disks that are about to be served.
pub(super) struct Begun {
    pub(super) plans: Vec<ImagePlan>,
    pub(super) disks: Vec<NamedDisk>,
    pub(super) listening: Listening,
    pub(super) served: Served,
    /// Of each disk: jobs of the process before.
    pub(super) jobs: Vec<Vec<HandedJob>>,
    /// Of each disk that is kept.
    pub(super) kept: Vec<KeptDisk>,
    /// The right to go on with them, for a successor.
    pub(super) right: Option<Succession>,
    /// The process that has served until now, and ends.
    pub(super) predecessor: Option<Predecessor>,
}

/// Keeps a disk for the next server. Dropped at the end of the export, so that no server goes on.
pub(super) struct KeptDisk {
    pub(super) jobs: Option<KeptJobs>,
    keeper: Box<dyn Keeper>,
}

impl KeptDisk {
    /// Leaves what is kept as it is: another process has the disk.
    pub(super) fn leave(mut self) {
        self.keeper.leave();
    }
}

impl<'a> Wanted<'a> {
    /// Opens the images, and listens. `None`: a signal came meanwhile.
    ///
    /// Errors: why the disks cannot be served; nothing that was made stays.
    pub(super) fn begin(
        self,
        places: Vec<Where>,
        kept: Option<&Kept>,
        (fresh, watcher): (&NewFiles, &Watcher),
    ) -> Result<Option<Begun>, Failure> {
        let open = |(words, plan): (&DiskRequest, &ImagePlan)| -> Result<NamedDisk, Failure> {
            let new = plan.new_image()?;
            named(words, plan.open(fresh, new.as_ref())?)
        };
        let opened: Result<Vec<NamedDisk>, Failure> =
            self.disks.iter().zip(&self.plans).map(open).collect();
        let opened = opened.inspect_err(|_| fresh.undo())?;
        for reason in opened.iter().filter_map(|named| named.disk.protection_reason()) {
            terminal::note(reason);
        }
        if watcher.enter(Phase::Mounting).is_some() {
            fresh.undo();
            return Ok(None);
        }
        self.become_io_flusher(&opened);
        let Wanted { request, plans, options, is_encrypted, .. } = self;
        let start = || -> Result<Begun, Failure> {
            let mut listening = listen(places, is_encrypted)?;
            let (kept, right) = match kept {
                Some(kept) => {
                    let sockets = &listening.listeners;
                    let fresh = |number, image: &KeptImage<'_>, disk: &Disk, right: Right<'_>| {
                        let created = image.plan.new_image()?.map(|(new, _)| new.format);
                        kept.keep(number, image, created, disk, right)
                    };
                    keep(request, kept, &plans, &opened, (sockets, &fresh))?
                }
                None => (Vec::new(), None),
            };
            let listeners = std::mem::take(&mut listening.listeners);
            let served = Served::start(opened.clone(), listeners, options)?;
            let (jobs, predecessor) = (Vec::new(), None);
            Ok(Begun { plans, disks: opened, listening, served, jobs, kept, right, predecessor })
        };
        start().inspect_err(|_| fresh.undo()).map(Some)
    }

    /// Takes the disks over from the process that serves them. Clients are served here when this
    /// returns.
    ///
    /// * `kept`: the helper process keeps them from now on.
    ///
    /// Errors: they cannot be had, or not be served here; the other process goes on.
    pub(super) fn take_over(
        self,
        watcher: &Watcher,
        kept: Option<&Kept>,
    ) -> Result<Begun, Failure> {
        confine::check(self.request.sandbox)?;
        let target = target_of(self.request)?;
        let view = self.client_view();
        let mut runtime = inspect::runtime()?;
        let ring = runtime.ring().clone();
        let (state, offer) = ask(Kind::Nbd, &target, &name_for_successor(&target), &view)?;
        let Wanted { request, disks, plans, options, .. } = self;
        // Before threads are made, which inherit it.
        io_flusher::become_one_if(state.fds.iter().any(io_flusher::is_device));
        let Handed { disks: handed, listeners, clients, .. } = Handed::open(state)?;
        if handed.len() != disks.len() {
            let text = format!("{} disks are handed over, not {}", handed.len(), disks.len());
            return Err(Failure::new(Exit::Unsupported, text));
        }
        let mut opened = Vec::new();
        let each = disks.iter().zip(&plans).zip(handed).enumerate();
        for (number, ((words, plan), (_, handed))) in each {
            let image = plan.options(plan.request.format);
            let disk = runtime.block_on(Disk::open_handed(&ring, handed, &image));
            let disk = disk
                .map_err(|error| Failure::from(error).context("the disk cannot be taken over"))?;
            if confine::confines_files(request.sandbox) {
                check_top(&disk, &plan.request, plan.image.as_deref())?;
            }
            disk.note_handed();
            if offer.jobs(number).iter().any(HandedJob::needs_changes) {
                runtime.block_on(disk.record_changes(&ring));
            }
            limits::apply_to_handed(&plan.request.limit, &disk)?;
            opened.push(named(words, disk)?);
        }
        let mut listening = taken(&request.addresses, listeners)?;
        // The helper process has everything before the other process gives it up.
        let (keepers, right) = match kept {
            Some(kept) => {
                let handed = |number, image: &KeptImage<'_>, disk: &Disk, right: Right<'_>| {
                    let jobs = kept.keep_handed(number, image, disk)?;
                    Ok((kept.disks.keep(number, right)?, jobs))
                };
                keep(request, kept, &plans, &opened, (&listening.listeners, &handed))?
            }
            None => (Vec::new(), None),
        };
        let listeners = std::mem::take(&mut listening.listeners);
        let mut served = Served::prepare(opened.clone(), listeners, clients, options)?;
        if let Some(signal) = watcher.enter(Phase::Mounting) {
            let text = format!("stopped by {signal} before the disks were taken over");
            return Err(Failure::new(Exit::General, text));
        }
        let mut predecessor = offer.take()?;
        right.iter().for_each(Succession::is_ours);
        kept.iter().for_each(|kept| kept.disks.took_over());
        served.take_charge();
        served.take_up();
        let jobs = (0..opened.len()).map(|disk| predecessor.take_jobs(disk)).collect();
        let (kept, predecessor) = (keepers, Some(predecessor));
        Ok(Begun { plans, disks: opened, listening, served, jobs, kept, right, predecessor })
    }

    /// Goes on with the disks of a process that was killed. `None`: they had ended.
    ///
    /// Errors: a disk that cannot be opened again, or is another one by now.
    pub(super) fn go_on(
        self,
        kept: &Kept,
        found: Vec<FoundDisk>,
        watcher: &Watcher,
    ) -> Result<Option<Begun>, Failure> {
        let confines = confine::confines_files(self.request.sandbox);
        let mut this = self;
        let (mut opened, mut jobs, mut keepers) = (Vec::new(), Vec::new(), Vec::new());
        let (mut listeners, mut right) = (None, None);
        let each = this.disks.iter().zip(&mut this.plans).zip(found).enumerate();
        for (number, ((words, plan), found)) in each {
            let FoundDisk { first, images, export, keeper, late, succession } = found;
            // They end together, the first one first.
            let Some(export) = export else { return Ok(None) };
            if number == 0 {
                let mut sockets = export.descriptors;
                sockets.sort_by_key(|(number, _)| *number);
                let sockets: Vec<OwnedFd> = sockets.into_iter().map(|(_, fd)| fd).collect();
                check(&export.words, sockets.len())?;
                (listeners, right) = (Some(sockets), succession);
            }
            let disk = reopen(plan, confines, (&first, &images), false, watcher)?;
            opened.push(named(words, disk)?);
            let kept_jobs = kept.disks.keep_jobs(number, &images);
            jobs.push(kept_jobs.found(late));
            keepers.push(KeptDisk { jobs: Some(kept_jobs), keeper });
        }
        watcher.enter(Phase::Mounting);
        this.become_io_flusher(&opened);
        let Wanted { request, plans, options, .. } = this;
        let mut listening = taken(&request.addresses, listeners.unwrap_or_default())?;
        listening.adopt(request);
        let listeners = std::mem::take(&mut listening.listeners);
        let clients = HandedClients::default();
        let mut served = Served::prepare(opened.clone(), listeners, clients, options)?;
        served.take_charge();
        let (kept, predecessor) = (keepers, None);
        Ok(Some(Begun { plans, disks: opened, listening, served, jobs, kept, right, predecessor }))
    }

    /// Makes this process an I/O flusher where an image lies on a device. Before threads are made,
    /// which inherit that.
    fn become_io_flusher(&self, opened: &[NamedDisk]) {
        let is_on_a_device = |named: &NamedDisk| io_flusher::is_on_a_device(&named.disk);
        let is_below_one = self.request.is_for_a_device;
        io_flusher::become_one_if(is_below_one || opened.iter().any(is_on_a_device));
    }

    /// What clients are shown of all disks.
    pub(super) fn client_view(&self) -> ClientView {
        client_view(self.request, self.disks, &self.plans)
    }
}

/// What clients are shown of all disks, as the words say it now.
fn client_view(request: &Request, disks: &[DiskRequest], plans: &[ImagePlan]) -> ClientView {
    let each = disks.iter().zip(plans).map(|(disk, plan)| {
        let mut words = ClientViewWords::of_source(&plan.request);
        say_what_clients_see(&mut words, request, disk);
        words.view(&plan.request, plan.image.as_deref())
    });
    let mut each = each.collect::<Vec<_>>().into_iter();
    let first = each.next().unwrap_or_default();
    first.with(each.collect())
}

/// Keeps what the images of one disk are.
type KeepImages<'a> =
    dyn Fn(usize, &KeptImage<'_>, &Disk, Right<'_>) -> Result<KeptParts, Failure> + 'a;

/// What keeps the export of a disk, and its jobs.
type KeptParts = (Box<dyn Keeper>, KeptJobs);

/// To go on with a disk: with the first one of an export, which goes as a whole.
type Right<'a> = Option<&'a Succession>;

/// Keeps the disks and the listening sockets from now on. When this returns, the process may be
/// killed. Gives the right to go on with them, too.
///
/// Errors: memory is short; the helper process is gone.
fn keep(
    request: &Request,
    kept: &Kept,
    plans: &[ImagePlan],
    opened: &[NamedDisk],
    (listeners, keep_images): (&[OwnedFd], &KeepImages<'_>),
) -> Result<(Vec<KeptDisk>, Option<Succession>), Failure> {
    let cannot = |error| {
        Failure::system("the disk cannot be kept", &error, Exit::General).hint("leave --keep out")
    };
    let confines = confine::confines_files(request.sandbox);
    let mut all = Vec::new();
    let right = kept.disks.keep_succession(0, request.upgrade)?;
    for (number, (plan, named)) in plans.iter().zip(opened).enumerate() {
        let image = KeptImage { plan, confines };
        let right = Some(&right).filter(|_| number == 0);
        let (mut keeper, jobs) = keep_images(number, &image, &named.disk, right)?;
        // The sockets are all disks', and stay with the first one.
        let sockets = if number == 0 { listeners } else { &[] };
        for (at, socket) in (1..).zip(sockets) {
            keeper.park(at, socket.as_fd()).map_err(cannot)?;
        }
        let words = KeptWords { listeners: sockets.len() };
        keeper.write(&VERSIONS.to_text(&words).map_err(cannot)?).map_err(cannot)?;
        all.push(KeptDisk { jobs: Some(jobs), keeper });
    }
    kept.disks.is_kept()?;
    Ok((all, Some(right)))
}

/// What is kept of one disk besides its images.
#[derive(Debug, Deserialize, Serialize)]
struct KeptWords {
    listeners: usize,
}

/// Errors: what was kept is of a version that is not known, or not all there.
fn check(words: &str, listeners: usize) -> Result<(), Failure> {
    let why = match VERSIONS.from_text::<KeptWords>(words.as_bytes()) {
        Ok(words) if words.listeners == listeners => return Ok(()),
        Ok(words) => format!("{listeners} of its {} sockets are there", words.listeners),
        Err(why) => why.into(),
    };
    let text = format!("what was kept of the disks cannot be gone on with: {why}");
    Err(Failure::new(Exit::Unsupported, text).hint("stop the process, then start it anew"))
}
