//! The sandbox of a process that serves disks over sockets: to virtual machines or to NBD clients.
//!
//! Promises: what is named here is all that serving takes after the start: images of every disk,
//! names that go at the end, front ends that are connected to again. Main thread, once, when
//! everything has been made and before a front end is listened to; guests of disks that were taken
//! over (`--upgrade`) are served already, and then nothing that happens here ends the process.

use std::path::{Path, PathBuf};

use ringdisk_daemon::confine::{self, Confinement, Named, Reach, Tasks};
use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::helper;
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::{Decision, Wanted};
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_sandbox::{Calls, Plan};

/// A disk that is served, as the sandbox sees it.
#[derive(Debug)]
pub struct Inside<'a> {
    /// The disk.
    pub disk: &'a Disk,
    /// Told how far the process is confined.
    pub commands: &'a DiskControl,
    /// Where the command line allows images to lead.
    pub allowed: &'a [PathBuf],
    /// What that and its image lead to.
    pub reach: &'a Reach,
    /// The image that was on top at the start, if another one is now.
    pub first_top: Option<&'a Path>,
    /// The socket of a front end that listens itself.
    pub front: Option<PathBuf>,
    /// What goes at the end, if it is still there.
    pub names: Vec<Named>,
    /// The host kernel may come to serve it.
    pub has_kernel: bool,
}

/// Takes everything away that serving does not need, and lets `ringdisk ctl` tell.
///
/// * `user`: whom the process becomes.
/// * `notify`: the helper process speaks to the service manager from then on.
/// * `taken`: these disks were another process's, which has nothing of them any more. What is
///   missing then is complained of, however much it was insisted on: a guest without its disk is
///   worse.
/// * `mark`: of new overlays; empty: they get none.
///
/// Errors: those of [`Decision::enter`] and [`Wanted::decide`]; none if `taken`.
pub fn give_up(
    word: Confinement,
    user: Wanted,
    disks: &[Inside<'_>],
    pidfile: Option<&Pidfile>,
    notify: &Notify,
    taken: bool,
    mark: String,
) -> Result<(), Failure> {
    let all: Vec<&Disk> = disks.iter().map(|disk| disk.disk).collect();
    let mut user = decide(user, word, &all, taken)?;
    if !confine::is_wanted(word) && !user.is_change() {
        return Ok(());
    }
    let mut files: Vec<Named> = disks.iter().flat_map(|disk| disk.names.clone()).collect();
    let mut plan = confine::plan(word);
    let (mut places, mut trees, mut images) = (Vec::new(), Vec::new(), Vec::new());
    for disk in disks {
        let trusted_within = taken.then_some(disk.reach);
        if let Some(directory) = confine::directory_for(word, disk.disk, trusted_within) {
            disk.commands.held_outside(&directory);
            places.push(directory);
            // As in the process that was there before a command put another image on top.
            let first = disk.first_top.and_then(confine::directory_of);
            if let Some(first) = first.and_then(helper::named) {
                disk.commands.held_outside(&first);
                places.push(first);
            }
        }
        let disk_trees = confine::trees_for(word, disk.disk, disk.allowed);
        disk_trees.iter().for_each(|tree| disk.commands.held_outside(tree));
        trees.extend(disk_trees);
        images.extend(confine::images_of(disk.disk, trusted_within));
        images.extend(confine::images_allowed(disk.allowed));
        plan = confine::images(plan, disk.disk, disk.allowed, trusted_within);
    }
    files.extend(pidfile.and_then(Pidfile::identity));
    let servers = disks.iter().flat_map(|disk| confine::servers_of(disk.disk)).collect();
    let fronts = disks.iter().filter_map(|disk| disk.front.clone()).collect();
    let kept = !mark.is_empty();
    let vhost = disks.iter().any(|disk| disk.has_kernel);
    let tasks = Tasks {
        files,
        fronts,
        servers,
        directories: places,
        trees,
        maker: user.user(),
        images,
        mark,
        ..Tasks::default()
    };
    let (mut plan, no_helper) = through_helper(plan, &tasks, vhost, kept);
    match &no_helper {
        None => notify.leave_to_helper(helper::say),
        Some(why) => {
            match user.stay(why) {
                Err(failure) if taken => stays_root(failure),
                stays => stays?,
            }
            plan = plan.without_files(format!("no landlock, since {why}"));
        }
    }
    let in_force = user.enter(word, plan, taken)?;
    for disk in disks {
        if let Some(in_force) = &in_force {
            disk.commands.confined(in_force.clone());
        }
        if let Some(user) = user.name() {
            disk.commands.runs_as(user);
        }
    }
    Ok(())
}

/// Says that the process stays root, and why.
fn stays_root(failure: Failure) {
    terminal::complain(&failure.context("it stays root"));
}

/// Whom the process becomes.
///
/// Errors: those of [`Wanted::decide`]; none if `taken`.
fn decide(
    user: Wanted,
    word: Confinement,
    disks: &[&Disk],
    taken: bool,
) -> Result<Decision, Failure> {
    match user.decide(word, disks) {
        Err(failure) if taken => {
            stays_root(failure);
            Ok(Decision::default())
        }
        decided => decided,
    }
}

/// Sets a process to do what this one will not be able to; what it cannot do stays possible here.
/// Gives why there is no such process, too, for people.
///
/// * `vhost`: rings may be handed to the host kernel.
/// * `kept`: the disks are kept for a successor.
fn through_helper(plan: Plan, tasks: &Tasks, vhost: bool, kept: bool) -> (Plan, Option<String>) {
    let helper = helper::current::start(tasks);
    let is_ours = |front: &Path| helper.is_err() || !helper::is_for_helper(front);
    let sockets = tasks.fronts.iter().any(|front| is_ours(front));
    let plan = plan.calls(Calls { sockets, vhost, kept, ..Calls::default() });
    let why = helper.err().map(|error| format!("nobody outside could remove sockets: {error}"));
    (plan, why)
}
