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
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::{Decision, Wanted};
use ringdisk_daemon::signals::Phase;
use ringdisk_daemon::upgrade::{self, Kind, Predecessor};
use ringdisk_disk::Disk;
use ringdisk_images::look;
use ringdisk_ring::Topology;

use super::export::{self, Served};
use super::made::Made;
use super::plan::Plan;
use super::request::{Paths, Request};
use super::serving::{Answering, Serving};
use super::signals::watch_start;
use crate::hand_over::check_top;
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
/// Errors: it cannot be had, or not be served here; the other process goes on.
pub(super) fn take_over(
    request: &Request,
    paths: Paths,
    user: Wanted,
) -> Result<Taken<'_>, Failure> {
    confine::check(request.sandbox)?;
    export::foresee(&request.placement, &Topology::read())?;
    let made = Made::default();
    let watcher = watch_start(&made, false)?;
    let (plan, connection) = Plan::taken(request, paths)?;
    if let Some(pidfile) = &plan.pidfile {
        // That of the process before is locked until it ends.
        let is_held = |failure: &Failure| failure.exit == Exit::Locked;
        Pidfile::check(pidfile).or_else(|why| if is_held(&why) { Ok(()) } else { Err(why) })?;
    }
    // The file may become a loop device.
    io_flusher::become_one_if(true);
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let socket = registry::name_for_successor_of_mount((0, connection));
    let (state, offer) = upgrade::ask(Kind::Mount, &plan.mountpoint, &socket, &plan.shown())?;
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
    let options = plan.options(&disk);
    let (stop_timeout, name) = (options.stop_timeout, options.name.clone());
    let prepared = Served::prepare(Arc::clone(&disk), options, handed.mount)?;
    // From here on a signal stops a mount that is ours, which takes more than the end of the
    // process.
    if let Some(signal) = watcher.enter(Phase::Mounting) {
        let text = format!("stopped by {signal} before the mount was taken over");
        return Err(Failure::new(Exit::General, text));
    }
    let predecessor = offer.take()?;
    let served = Served::go(prepared, name);
    made.adopt(&plan.mountpoint, handed.made);
    let handle = served.handle();
    let serving = Serving::new(
        request,
        plan,
        watcher,
        (Answering::new(served, disk), handle),
        made,
        None,
        handed.created,
        handed.lock.map(Arc::new),
        stop_timeout,
    );
    Ok(Taken { serving, user, predecessor })
}
