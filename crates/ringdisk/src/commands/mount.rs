//! `ringdisk mount`: from the words to a mount that answers, and from its end to an exit code.
//!
//! Promises: whatever was made on the way (an image, a mountpoint, a pid file, a mount) is removed
//! again when the start fails; at a clean end everything but the image is. Signals are honoured
//! from the first moment.
//!
//! The phases, in order: [`start::Start`] makes a plan, opens the disk and mounts it;
//! [`serving::Serving`] gives the mount to the process that keeps it, makes the control socket,
//! confines the process, says that it is ready, and waits for the end.

mod ended;
mod made;
mod plan;
mod serving;
mod signals;
mod start;
mod take;
mod users;

use std::path::Path;

use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::start::Role;
use ringdisk_daemon::keep::{self, HeldMount, Kept};
use ringdisk_daemon::mountpoint::MountpointState;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_export::Threads;
use ringdisk_fuse::placement::THREADS_AUTO_MAX_DEV;

use crate::cli::{MountArgs, MountPaths};
use crate::commands::metrics::MetricsSockets;
use crate::serve;

use start::{Opened, Start};
use take::Taken;

/// Starts the background process. If it was killed before it was ready, nobody else removes what it
/// had made so far.
///
/// Errors: as [`background::run_child`].
fn run_child(path: &Path) -> Result<u8, Failure> {
    let before = MountpointState::of(path);
    background::run_child().inspect_err(|_| before.restore())
}

/// Serves until the end. Gives the exit code.
///
/// Errors: everything that can go wrong; see [`Exit`].
pub(crate) fn run(args: &MountArgs, paths: MountPaths) -> Result<u8, Failure> {
    args.log.prepare(args.daemonize)?;
    let user = Wanted::of(&args.user.word)?;
    if args.upgrade {
        serve::check_upgrades(args)?;
    }
    if args.keep_mount {
        // Before a process is started that would find it out.
        serve::check_keeps(args)?;
    }
    let is_kept = args.keep_mount && Role::Kept.is_ours();
    let background = match args.daemonize {
        true if is_kept => None,
        true if Role::Background.is_ours() => Some(Background::enter()?),
        true => return run_child(&paths.mountpoint),
        false => None,
    };
    let kept =
        match args.keep_mount.then(|| keep::role(args.daemonize, queues_max(args))).transpose()? {
            None => None,
            Some(keep::Role::Holds) => {
                let held = &mut HeldMount::at(&paths.mountpoint);
                return keep::holder::run(args.pidfile.as_deref(), held, background);
            }
            Some(keep::Role::Serves(kept)) => Some(kept),
        };
    serve(args, paths, background, kept, user)
}

/// Queues that a mount with these options has at most, where it may be kept.
fn queues_max(args: &MountArgs) -> usize {
    match args.placement.threads {
        Threads::Auto => THREADS_AUTO_MAX_DEV,
        Threads::Count(count) => count,
    }
}

/// Serves until the end, in this process.
///
/// * `kept`: the mount outlives this process.
/// * `user`: whom it becomes when it answers.
fn serve(
    args: &MountArgs,
    paths: MountPaths,
    background: Option<Background>,
    kept: Option<Kept>,
    user: Wanted,
) -> Result<u8, Failure> {
    if args.upgrade {
        return upgrade(args, paths, background, user);
    }
    // What cannot be had is found out before anything is made.
    let metrics = MetricsSockets::make(&args.log.metrics)?;
    let mut start = Start::plan(args, paths, kept)?;
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
/// Errors: it cannot be had, and is served there on; why it ended here.
fn upgrade(
    args: &MountArgs,
    paths: MountPaths,
    background: Option<Background>,
    user: Wanted,
) -> Result<u8, Failure> {
    let Taken { mut serving, user, predecessor } = take::take_over(args, paths, user)?;
    // Names, the pid file and the control socket are free when the process before lets go of them.
    serving.succeed(predecessor);
    let metrics = MetricsSockets::make_for(&args.log.metrics, true)?;
    let mut serving = serving.with_metrics(metrics);
    serving.make_pidfile()?;
    let control = serving.attend()?;
    serving.confine(user, &control)?;
    serving.announce(background)?;
    serving.wait(control)
}
