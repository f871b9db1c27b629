//! `ringdisk mount`: from the words to a mount that answers, and from its end to an exit code.
//!
//! Promises: whatever was made on the way (an image, a mountpoint, a pid file, a mount) is removed
//! again when the start fails; at a clean end everything but the image is. Signals are honoured
//! from the first moment.
//!
//! The phases, in order: [`start::Start`] makes a plan, opens the disk and mounts it;
//! [`serving::Serving`] gives the mount to the process that keeps it, makes the control socket,
//! confines the process, says that it is ready, and waits for the end.

mod cleanup;
mod created_files;
mod export;
mod plan;
pub mod request;
mod serving;
mod signals;
mod start;
mod take_over;
mod users;

use std::path::Path;

use ringdisk_daemon::background::{self, Background, Turn};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::keep::{self, HeldMount, Kept};
use ringdisk_daemon::mountpoint::MountpointState;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_export::Threads;
use ringdisk_fuse::placement::THREADS_AUTO_MAX_DEV;

use crate::metrics::MetricsSockets;

pub use export::foresee;
use request::{Paths, Request};
use start::{Opened, Start};
use take_over::Taken;

/// Starts the background process. If it was killed before it was ready, nobody else removes what it
/// had made so far.
///
/// Errors: as [`background::run_child`].
fn run_child(path: &Path) -> Result<u8, Failure> {
    let before = MountpointState::of(path);
    background::run_child().inspect_err(|_| before.restore())
}

/// Serves until the end. Gives the exit code. Where messages go is prepared before
/// ([`ringdisk_daemon::log_target::prepare`]).
///
/// Errors: everything that can go wrong; see [`Exit`].
pub fn run(request: &Request, paths: Paths) -> Result<u8, Failure> {
    let user = Wanted::of(&request.user)?;
    if request.upgrade {
        export::check_upgrades(request)?;
    }
    if request.keep_mount {
        // Before a process is started that would find it out.
        export::check_keeps(request)?;
    }
    let background = match request.daemonize {
        true => match Turn::take(request.keep_mount, || run_child(&paths.mountpoint))? {
            Turn::Serves(background) => background,
            Turn::Parent(code) => return Ok(code),
        },
        false => None,
    };
    let kept = match request
        .keep_mount
        .then(|| keep::role(request.daemonize || request.upgrade, queues_max(request)))
        .transpose()?
    {
        None => None,
        Some(keep::Role::Holds) => {
            let held = &mut HeldMount::at(&paths.mountpoint);
            let pidfile = request.pidfile.as_deref();
            return keep::supervisor::run(pidfile, held, background, request.upgrade);
        }
        Some(keep::Role::Serves(kept)) => Some(kept),
    };
    serve(request, paths, background, kept, user)
}

/// Queues that a mount with these options has at most, where it may be kept.
fn queues_max(request: &Request) -> usize {
    match request.placement.threads.threads {
        Threads::Auto => THREADS_AUTO_MAX_DEV,
        Threads::Count(count) => count,
    }
}

/// Serves until the end, in this process.
///
/// * `kept`: the mount outlives this process.
/// * `user`: whom it becomes when it answers.
fn serve(
    request: &Request,
    paths: Paths,
    background: Option<Background>,
    kept: Option<Kept>,
    user: Wanted,
) -> Result<u8, Failure> {
    // A process that goes on after a kill has the words of the one before.
    let is_resumed = kept.as_ref().is_some_and(|kept| kept.resumed().is_some());
    if request.upgrade && !is_resumed {
        return upgrade(request, paths, background, kept, user);
    }
    // What cannot be had is found out before anything is made.
    let metrics = MetricsSockets::make(&request.metrics)?;
    let mut start = Start::plan(request, paths, kept)?;
    let disk = match start.open()? {
        Opened::Disk(disk) => disk,
        Opened::Ended(code) => return Ok(code),
    };
    let user = start.decide(user, &disk)?;
    // A mount that is there goes on, and ends cleanly then.
    if start.is_stopped() {
        return Ok(Exit::General.code());
    }
    let mut serving = match start.mount(disk)? {
        Opened::Disk(serving) => serving.with_metrics(metrics),
        Opened::Ended(code) => return Ok(code),
    };
    serving.park()?;
    serving.make_pidfile()?;
    let control = serving.attend()?;
    serving.confine(user, &control)?;
    serving.announce(background)?;
    serving.wait(control)
}

/// Takes the mount over from the process that serves it, and serves it until the end.
///
/// * `kept`: the mount outlives this process.
///
/// Errors: it cannot be had, and is served there on; why it ended here.
fn upgrade(
    request: &Request,
    paths: Paths,
    background: Option<Background>,
    kept: Option<Kept>,
    user: Wanted,
) -> Result<u8, Failure> {
    let Taken { mut serving, user, predecessor } =
        take_over::take_over(request, paths, kept, user)?;
    // Names, the pid file and the control socket are free when the process before lets go of them.
    serving.succeed(predecessor);
    let metrics = MetricsSockets::make_for(&request.metrics, true)?;
    let mut serving = serving.with_metrics(metrics);
    serving.make_pidfile()?;
    let control = serving.attend()?;
    serving.confine(user, &control)?;
    serving.announce(background)?;
    serving.wait(control)
}
