//! `mount --upgrade`: a mount that another process serves until now.
//!
//! Promises: until this process has everything that serving takes, the other one goes on when
//! anything fails. Its descriptors count, not its words: it is confined, and may have been taken
//! over.

use std::sync::Arc;

use ringdisk_daemon::confine;
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::keep::Kept;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::{Decision, Wanted};
use ringdisk_daemon::signals::Phase;
use ringdisk_daemon::upgrade::{self, Kind, Predecessor};
use ringdisk_disk::Disk;
use ringdisk_images::inspect;
use ringdisk_ring::Topology;

use super::created_files::Made;
use super::export::{self, Served};
use super::plan::Plan;
use super::request::{Paths, Request};
use super::serving::{Answering, Serving};
use super::signals::watch_start;
use crate::hand_over::check_top;
use crate::keep::{keep_changes, keep_handed};
use crate::limits;

/// A mount that is served here now.
pub(super) struct Taken<'a> {
    pub(super) serving: Serving<'a>,
    /// Which user this process becomes.
    pub(super) user: Decision,
    /// The process before, which lets go of the rest.
    pub(super) predecessor: Predecessor,
}

/// Takes the mount over.
///
/// * `kept`: it outlives this process.
///
/// Errors: it cannot be had, or not be served here; the other process goes on.
pub(super) fn take_over(
    request: &Request,
    paths: Paths,
    kept: Option<Kept>,
    user: Wanted,
) -> Result<Taken<'_>, Failure> {
    let mut kept = kept;
    confine::check(request.sandbox)?;
    export::foresee(&request.placement, &Topology::read())?;
    let made = Made::default();
    let watcher = watch_start(&made, kept.is_some())?;
    kept.iter().for_each(Kept::listens);
    let (mut plan, connection) = Plan::taken(request, paths)?;
    if kept.is_some() {
        // The process that keeps the mount has it.
        plan.pidfile = None;
    }
    if let Some(pidfile) = &plan.pidfile {
        Pidfile::check_for(pidfile, true)?;
    }
    // The file may become a loop device.
    io_flusher::become_one_if(true);
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    let socket = registry::name_for_successor_of_mount((0, connection));
    let (state, offer) = upgrade::ask(Kind::Mount, &plan.mountpoint, &socket, &plan.client_view())?;
    let handed = upgrade::mount::open(state, &plan.mountpoint, connection)?;
    let image = plan.image.options(request.disk.format);
    let disk = runtime.block_on(Disk::open_handed(&ring, handed.disk, &image));
    let disk =
        disk.map_err(|error| Failure::from(error).context("the disk cannot be taken over"))?;
    if confine::confines_files(request.sandbox) {
        check_top(&disk, &request.disk, plan.image.image.as_deref())?;
    }
    disk.note_handed();
    if offer.jobs(0).iter().any(HandedJob::needs_changes) {
        runtime.block_on(disk.record_changes(&ring));
    }
    limits::apply_to_handed(&request.disk.limit, &disk)?;
    let user = user.decide(request.sandbox, &[&disk])?;
    let mut options = plan.options(&disk);
    options.keep = kept.as_ref().map(Kept::keep).transpose()?;
    let (stop_timeout, name) = (options.stop_timeout, options.name.clone());
    let mut prepared = Served::prepare(Arc::clone(&disk), options, handed.mount)?;
    // The process that keeps the mount has everything before the other one gives it up.
    if let (Some(kept), Some(parked)) = (&mut kept, prepared.take_parked()) {
        let state = plan.state(&disk, &parked, (handed.made, handed.created));
        kept.park(&parked, state, handed.lock.as_ref(), true)?;
        let names = [request.disk.overlay.as_deref(), plan.image.image.as_deref()];
        keep_handed(&disk, &kept.state_file(), names, request.disk.copy_on_read);
        keep_changes(&disk, kept.state_file(), plan.may_be_top());
    }
    // From here on a signal stops a mount that is ours, which takes more than the end of the
    // process.
    if let Some(signal) = watcher.enter(Phase::Mounting) {
        let text = format!("stopped by {signal} before the mount was taken over");
        return Err(Failure::new(Exit::General, text));
    }
    let predecessor = offer.take()?;
    kept.iter().for_each(Kept::took_over);
    let served = Served::go(prepared, name);
    made.adopt(&plan.mountpoint, handed.made);
    let handle = served.handle();
    let serving = Serving::new(
        request,
        plan,
        watcher,
        (Answering::new(served, disk), handle),
        made,
        kept,
        handed.created,
        handed.lock.map(Arc::new),
        stop_timeout,
    );
    Ok(Taken { serving, user, predecessor })
}
