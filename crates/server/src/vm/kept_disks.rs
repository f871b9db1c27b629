//! `--keep`: disks whose process may be killed without their virtual machines noticing more than a
//! pause.
//!
//! Promises: the next server goes on with the same connections; a disk with which it cannot go on
//! ends alone. What all kept disks have is in [`crate::keep`].

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::keep::disks::FoundDisk;
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::keep::succession::Succession;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::sockets::{MadeSocket, Opened, Place, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_export::keep::{Keeper, KeptState};
use ringdisk_vhost::ExportOptions;
use ringdisk_vhost::export::Export;
use ringdisk_vhost::keep;

use super::nbd_export::{NbdExport, OpenDisk};
use super::nbd_start;
use super::request::options;
use super::{Placed, Plan, Running, Started, front};
use crate::keep::{Kept, reopen};
use crate::vhost::Served;

impl Kept {
    /// Goes on with all disks that have not ended. One that cannot be served ends alone: its front
    /// end is disconnected, and the others go on.
    ///
    /// * `beside`: the NBD export of the disks, if there is one. Where it cannot start, virtual
    ///   machines go on without it.
    ///
    /// Errors: none of them can be served; what was kept goes with this process.
    pub(super) fn go_on(
        &mut self,
        plans: Vec<Plan>,
        watcher: &Watcher,
        beside: Option<nbd_start::Wanted<'_>>,
    ) -> Result<Started, Failure> {
        let found = self.found.take().unwrap_or_default();
        let mut failures = Vec::new();
        let (mut opened, mut running) = (Vec::new(), Vec::new());
        for (number, (plan, found)) in plans.into_iter().zip(found).enumerate() {
            let FoundDisk { first, images, export, keeper, late, succession } = found;
            let jobs = self.disks.keep_jobs(number, &images);
            let found_jobs = jobs.found(late);
            let Some(export) = export else { continue };
            let (name, place) = (plan.image.name(), made_socket(&plan));
            let mut plan = Plan { new: None, ..plan };
            let of = (&first, &images);
            match reopen(&mut plan.image, plan.confines, of, keep::is_inactive(&export), watcher) {
                Ok(disk) => {
                    let kept = (export, keeper);
                    opened.push((number, plan, disk, kept, (jobs, found_jobs), succession));
                }
                Err(failure) => {
                    drop(place.and_then(|path| MadeSocket::adopt(&path).ok()));
                    keep::end(export, keeper);
                    failures.push(failure.context(name));
                }
            }
        }
        watcher.enter(Phase::Mounting);
        // Before threads are made, which inherit it.
        io_flusher::become_one_if(
            opened.iter().any(|(_, _, disk, ..)| io_flusher::is_on_a_device(disk)),
        );
        let open = opened.iter().map(|(number, plan, disk, ..)| (*number, plan, disk));
        let open = open.map(|(number, plan, disk)| OpenDisk { number, plan, disk });
        let beside = start_beside(beside, &open.collect::<Vec<_>>());
        for (at, (_, plan, disk, kept, jobs, right)) in opened.into_iter().enumerate() {
            let name = plan.image.name();
            let beside = beside.as_ref().map(|beside| (at, beside));
            match go_on(plan, disk, kept, jobs, (right, beside)) {
                Ok(disk) => running.push(disk),
                Err(failure) => failures.push(failure.context(name)),
            }
        }
        self.failed = failures.first().map(Failure::code);
        if running.is_empty() && failures.len() == 1 {
            return failures.pop().map_or(Ok((running, beside)), Err);
        }
        failures.iter().for_each(terminal::complain);
        Ok((running, beside))
    }
}

/// Serves NBD clients again. `None`: they were not served, or cannot be.
fn start_beside(beside: Option<nbd_start::Wanted<'_>>, open: &[OpenDisk<'_>]) -> Option<NbdExport> {
    // All disks may have ended already.
    let wanted = beside.filter(|_| !open.is_empty())?;
    let complain = |failure: Failure| {
        terminal::complain(&failure.context("virtual machines go on, and NBD clients do not"));
    };
    wanted.start(open, true).map_err(complain).ok()
}

/// Goes on with one disk.
///
/// * `beside`: the number of the disk in an NBD export.
///
/// Errors: its state is not understood; the export cannot be made.
fn go_on(
    plan: Plan,
    disk: Arc<Disk>,
    (export, keeper): (KeptState, Box<dyn Keeper>),
    (jobs, found): (KeptJobs, Vec<HandedJob>),
    (right, beside): (Option<Succession>, Option<(usize, &NbdExport)>),
) -> Result<Running, Failure> {
    let name = plan.image.name();
    let makes = plan.request.socket.make.is_some();
    let mut placed = plan.placed(&disk);
    placed.ready.push_str(" again");
    (placed.kept_jobs, placed.jobs) = (Some(jobs), found);
    placed.nbd = beside.map(|(at, beside)| beside.place(at));
    let Opened { listen, path, .. } = plan.place.open()?;
    let front = front(&listen).filter(|_| !makes);
    let read_only = disk.is_read_only();
    let options = options(&plan.request, read_only, plan.restricted, listen, name.clone());
    let handle = beside.map(|(at, beside)| beside.disk_handle(at));
    let keep = Some(keeper);
    let options = ExportOptions { held: true, accel: None, keep, beside: handle, ..options };
    let prepared = Export::go_on(Arc::clone(&disk), export, options)?;
    let mut served = Served::go(prepared, name.clone());
    if let Some((_, beside)) = beside {
        served.counts_with(beside.handle());
    }
    for note in served.notes() {
        terminal::warn(note);
    }
    let made = path.as_deref().filter(|_| makes).and_then(|path| MadeSocket::adopt(path).ok());
    Ok(Placed { path, front, made, ..placed }.attend(served, disk, right))
}

/// The name of the socket that the process before has made.
fn made_socket(plan: &Plan) -> Option<PathBuf> {
    let Place::Take(path) = &plan.place else { return None };
    plan.request.socket.make.is_some().then(|| path.clone())
}

/// The paths of the sockets of disks whose server was killed.
pub(super) fn place(options: &SocketOptions) -> Place {
    let path = options.make.clone().or_else(|| options.connect.clone());
    Place::Take(path.unwrap_or_default())
}
