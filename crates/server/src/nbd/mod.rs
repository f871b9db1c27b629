//! Disks for NBD clients, from a request to an exit code.
//!
//! Promises: whatever was made on the way (images, sockets, a pid file) is removed again when the
//! start fails; at a clean end everything but the images is. No word of a client is read before the
//! process is confined, but of clients that another process has served. All disks end together.

pub(crate) mod access;
pub mod addresses;
mod export;
pub(crate) mod exports;
pub mod request;
mod serving;
mod start;

use std::path::Path;

use ringdisk_daemon::background::Background;
use ringdisk_daemon::confine;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::run_as::Wanted as WantedUser;
use ringdisk_daemon::signals::Watcher;
use ringdisk_daemon::terminal;
use ringdisk_nbd::{CommonOptions, NbdOptions};

use crate::keep::{self, Kept};
use crate::open::{ImagePlan, LOCK_WAIT};
use crate::start::pidfile_of;

use access::{Access, access};
use addresses::{Where, places};
pub use export::{Handle, Served};
use exports::check_names;
use request::{DiskRequest, Request};
use serving::Serving;
use start::{Begun, Wanted};

/// Serves until the end. Gives the exit code.
///
/// * `background`: the process is in the background already, and its parent waits.
/// * `user`: whom the process becomes when the disks answer.
///
/// Errors: everything that can go wrong; see [`Exit`].
pub fn serve(
    request: &Request,
    disks: &[DiskRequest],
    background: Option<Background>,
    user: WantedUser,
) -> Result<u8, Failure> {
    let mut background = background;
    let pidfile: Option<&Path> = request.pidfile.as_deref();
    let mut kept =
        match keep::begin(request.keep, pidfile, disks.len(), &mut background, request.upgrade)? {
            keep::Begun::Serves(kept) => kept,
            keep::Begun::Held(code) => return Ok(code),
        };
    let is_resumed = kept.as_ref().is_some_and(Kept::resumes);
    // Before any descriptor is opened here that could have the number of one that is inherited.
    let places = if request.upgrade || is_resumed { Vec::new() } else { places(request)? };
    check_names(disks)?;
    let access = access(&request.access)?;
    let fresh = NewFiles::default();
    let watcher = keep::watch(&fresh, kept.as_ref(), is_resumed)?;
    // Where another process holds the disks, that one has the pid file.
    let pidfile = pidfile_of(pidfile, request.upgrade).filter(|_| kept.is_none()).transpose()?;
    let wanted = wanted(request, disks, access);
    let view = wanted.client_view();
    let begun = match begin(wanted, places, &mut kept, (&fresh, &watcher))? {
        Ok(begun) => begun,
        Err(exit) => return Ok(exit.code()),
    };
    begun.served.notes().iter().for_each(terminal::warn);
    // The images are in use from now on: a failure below does not take them away.
    fresh.keep();
    let kept = kept.map(|kept| (kept, is_resumed));
    let mut serving = Serving::attend(request, begun, view, watcher, kept, pidfile.as_deref())?;
    serving.confine(user)?;
    serving.announce(background);
    serving.wait()
}

/// What is asked for.
fn wanted<'a>(
    request: &'a Request,
    disks: &'a [DiskRequest],
    Access { tls, users }: Access,
) -> Wanted<'a> {
    let is_encrypted = tls.as_ref().is_some_and(|tls| tls.required);
    let restricted = confine::is_wanted(request.sandbox);
    let plans: Vec<ImagePlan> = disks.iter().map(|disk| image_plan(request, disk)).collect();
    let names = plans.iter().map(ImagePlan::name).collect();
    let options = options(request, restricted, names);
    let options = NbdOptions { tls, allowed_users: users, ..options };
    Wanted { request, disks, plans, options, is_encrypted }
}

/// Opens the disks, takes them over, or goes on with them. An exit code: there is nothing to serve.
///
/// Errors: why they cannot be served.
fn begin(
    wanted: Wanted<'_>,
    places: Vec<Where>,
    kept: &mut Option<Kept>,
    (fresh, watcher): (&NewFiles, &Watcher),
) -> Result<Result<Begun, Exit>, Failure> {
    let found = kept.as_mut().and_then(|kept| kept.found.take());
    Ok(match (found, &*kept) {
        // All may have ended already.
        (Some(found), Some(kept)) => wanted.go_on(kept, found, watcher)?.ok_or(Exit::Clean),
        (_, kept) if wanted.request.upgrade => Ok(wanted.take_over(watcher, kept.as_ref())?),
        (_, kept) => wanted.begin(places, kept.as_ref(), (fresh, watcher))?.ok_or(Exit::General),
    })
}

/// How the image of a disk is opened.
fn image_plan(request: &Request, disk: &DiskRequest) -> ImagePlan {
    let source = disk.source.clone();
    ImagePlan {
        // Clients were told that their writes are there; a temporary overlay is gone anyway.
        outlives_process: !source.snapshot,
        leaves_directory: request.daemonize || request.keep,
        note_names: confine::is_wanted(request.sandbox),
        wait_for_locks: Some(LOCK_WAIT),
        ..ImagePlan::new(source, disk.image.clone())
    }
}

/// What is asked of an export.
///
/// * `names`: of the images, for messages.
pub(crate) fn options(request: &Request, restricted: bool, names: Vec<String>) -> NbdOptions {
    let name = match names.as_slice() {
        [only] => only.clone(),
        several => format!("{} disks", several.len()),
    };
    NbdOptions {
        common: CommonOptions {
            name,
            threads: request.threads.clone(),
            read_only: false,
            restricted,
        },
        max_connections: request.max_connections,
        handshake_limit: request.handshake_limit,
        idle_exit: request.idle_exit,
        held: true,
        ..NbdOptions::default()
    }
}
