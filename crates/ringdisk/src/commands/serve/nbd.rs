//! `ringdisk serve --nbd`: disks for NBD clients, from the words to an exit code.
//!
//! Promises: whatever was made on the way (images, sockets, a pid file) is removed again when the
//! start fails; at a clean end everything but the images is. No word of a client is read before the
//! process is confined. All disks end together.

pub(super) mod access;
pub(super) mod addresses;
pub(super) mod exports;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::background::Background;
use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::{DiskControl, NbdPlace, ServedAs};
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper;
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::log_target;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_daemon::signals::{Actions, Phase};
use ringdisk_daemon::sockets::MadeSocket;
use ringdisk_daemon::terminal;
use ringdisk_daemon::watchdog::Watchdog;
use ringdisk_disk::Disk;
use ringdisk_nbd::{CommonOptions, NamedDisk, NbdOptions};

use access::{Access, access};
pub(in crate::commands) use addresses::listen_on;
use addresses::{Listening, listen, places};
use exports::{as_name, check_names, named};

use super::privileges::{self, Inside};
use super::{control, watch_start};
use crate::cli::{NbdArgs, ServeArgs, ServedDisk};
use crate::commands::metrics::MetricsSockets;
use crate::commands::open::{ImagePlan, new_image, reach};
use crate::nbd::{Handle, Served};

/// One disk that is served.
struct Running {
    ready: String,
    allowed: Vec<PathBuf>,
    reach: Reach,
    disk: Arc<Disk>,
    commands: Arc<DiskControl>,
    control: Option<(Server, helper::Named)>,
}

/// Serves until the end. Gives the exit code.
///
/// Errors: everything that can go wrong; see [`Exit`].
pub(super) fn serve(
    args: &ServeArgs,
    disks: &[ServedDisk],
    background: Option<Background>,
    user: Wanted,
) -> Result<u8, Failure> {
    // Before any descriptor is opened here that could have the number of one that is inherited.
    let places = places(args)?;
    check_names(disks)?;
    let Access { tls, users } = access(&args.nbd.access)?;
    let is_encrypted = tls.as_ref().is_some_and(|tls| tls.required);
    let fresh = NewFiles::default();
    let watcher = watch_start(&fresh, None)?;
    let pidfile = args.pidfile.as_deref().map(std::path::absolute).transpose();
    let pidfile = pidfile
        .map_err(|error| Failure::system("the name of the pid file", &error, Exit::General))?;
    pidfile.as_deref().map_or(Ok(()), Pidfile::check)?;
    let restricted = confine::is_wanted(args.sandbox.word);
    let plans: Vec<ImagePlan<'_>> = disks.iter().map(|disk| image_plan(args, disk)).collect();
    let open = |(disk, plan): (&ServedDisk, &ImagePlan<'_>)| -> Result<NamedDisk, Failure> {
        let new = new_image(&disk.args.source, disk.image.as_deref())?;
        let opened = plan.open(&fresh, new.as_ref())?;
        named(disk, opened)
    };
    let opened: Result<Vec<NamedDisk>, Failure> = disks.iter().zip(&plans).map(open).collect();
    let opened = opened.inspect_err(|_| fresh.undo())?;
    for reason in opened.iter().filter_map(|named| named.disk.protection_reason()) {
        terminal::note(reason);
    }
    if watcher.enter(Phase::Mounting).is_some() {
        fresh.undo();
        return Ok(Exit::General.code());
    }
    // Before there are threads that shall have it too.
    let is_on_a_device = |named: &NamedDisk| io_flusher::is_on_a_device(&named.disk);
    let is_below_one = args.nbd.is_for_a_device;
    io_flusher::become_one_if(is_below_one || opened.iter().any(is_on_a_device));
    let started = listen(places, is_encrypted).and_then(|mut listening| {
        let listeners = std::mem::take(&mut listening.listeners);
        let names = plans.iter().map(ImagePlan::name).collect();
        let mut options = options(args, restricted, names);
        (options.tls, options.allowed_users) = (tls, users);
        let served = Served::start(opened.clone(), listeners, options)?;
        Ok((listening, served))
    });
    let (listening, mut served) = started.inspect_err(|_| fresh.undo())?;
    served.notes().iter().for_each(terminal::warn);
    // The images are in use from now on: a failure below does not take them away.
    fresh.keep();
    let handle = served.handle();
    let is_only = opened.len() == 1;
    let attend = |((plan, disk), named): ((&ImagePlan<'_>, &ServedDisk), NamedDisk)| {
        let path = listening.target().map(|path| control_path(&path, is_only, &named.name));
        attend(plan, disk, named, &handle, (path, restricted), &listening.shown)
    };
    let running: Vec<Running> = plans.iter().zip(disks).zip(opened).map(attend).collect();
    let notify = Arc::new(Notify::from_environment());
    let pidfile = pidfile.as_deref().map(Pidfile::create).transpose()?;
    let mut metrics = MetricsSockets::make(&args.log.metrics)?;
    let commands: Vec<_> = running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
    // All disks have the same queue threads.
    let _watchdog = Watchdog::start(&notify, commands.get(..1).unwrap_or_default());
    let metrics_server = metrics.start(commands)?;
    let mut inside: Vec<Inside<'_>> =
        running.iter().enumerate().map(|(number, disk)| disk.inside(number, &listening)).collect();
    if let Some(first) = inside.first_mut() {
        first.names.extend(metrics.named());
    }
    let (word, mark) = (args.sandbox.word, String::new());
    privileges::give_up(word, user, &inside, pidfile.as_ref(), &notify, false, mark)?;
    // What clients say is read inside.
    served.release();
    let ready = match running.as_slice() {
        [only] => only.ready.clone(),
        several => format!("{} disks are served over NBD", several.len()),
    };
    notify.ready(&ready);
    if !args.nbd.is_quiet {
        announce(&running, &listening, background.is_some());
    }
    match background {
        Some(background) if args.nbd.keeps_output => background.ready_here(),
        Some(background) => background.ready(),
        None => log_target::begin(),
    }
    terminal::serves();
    if let Some(signal) = watcher.enter(Phase::Serving(actions(&running, &handle, &notify))) {
        notify.stopping(&format!("stopping on {signal}"));
        handle.stop();
    }
    let fault = || running.iter().find_map(|disk| disk.disk.fault());
    let result = served.wait(fault);
    if args.stats {
        print(&handle, running.iter().map(|disk| &*disk.disk));
    }
    watcher.enter(Phase::Ending);
    match (&result, watcher.stopped_by()) {
        (_, Some(signal)) => notify.status(&format!("stopped by {signal}")),
        (Err(failure), None) => notify.stopping(failure.message()),
        (Ok(()), None) => notify.stopping("stopped"),
    }
    drop(metrics_server);
    drop(metrics);
    drop(listening.made);
    for disk in running {
        // The image is free before clients of the control socket hear of the end.
        disk.commands.end(&result);
        disk.commands.let_go();
        drop(disk.disk);
        drop(disk.control);
    }
    drop(pidfile);
    result.map(|()| Exit::Clean.code())
}

/// How the image of a disk is opened.
fn image_plan<'a>(args: &ServeArgs, disk: &'a ServedDisk) -> ImagePlan<'a> {
    let source = &disk.args.source;
    ImagePlan {
        // Clients were told that their writes are there; a temporary overlay is gone anyway.
        outlives_process: !source.snapshot,
        leaves_directory: args.daemonize,
        note_names: confine::is_wanted(args.sandbox.word),
        ..ImagePlan::new(source, disk.image.clone())
    }
}

/// What the words ask for.
///
/// * `names`: of the images, for messages.
pub(super) fn options(args: &ServeArgs, restricted: bool, names: Vec<String>) -> NbdOptions {
    let NbdArgs { max_connections, handshake_limit, idle_exit, .. } = &args.nbd;
    let name = match names.as_slice() {
        [only] => only.clone(),
        several => format!("{} disks", several.len()),
    };
    NbdOptions {
        common: CommonOptions {
            name,
            threads: args.device().thread_options(),
            read_only: false,
            restricted,
        },
        max_connections: *max_connections,
        handshake_limit: handshake_limit.0,
        idle_exit: *idle_exit,
        held: true,
        ..NbdOptions::default()
    }
}

/// What `ringdisk ctl` finds a disk by.
fn control_path(socket: &Path, is_only: bool, name: &str) -> PathBuf {
    if is_only { socket.to_owned() } else { socket.join(name) }
}

/// Makes the control socket of a disk.
fn attend(
    plan: &ImagePlan<'_>,
    disk: &ServedDisk,
    named: NamedDisk,
    handle: &Handle,
    (path, restricted): (Option<PathBuf>, bool),
    shown: &[String],
) -> Running {
    let stop = handle.clone();
    let commands = DiskControl::new(Arc::clone(&named.disk), handle.clone(), move |_| stop.stop());
    let place = NbdPlace { addresses: shown.to_vec(), export: named.name.clone() };
    let commands = commands.served_as(ServedAs::Nbd { target: path.clone(), place });
    let commands = Arc::new(commands.confined_later(restricted));
    let source = &disk.args.source;
    let name = as_name(&named.name);
    let described = plan.describe(&named.disk);
    Running {
        ready: format!("{described} is served over NBD{name} {}", shown.join(", ")),
        allowed: source.allow_path.clone(),
        reach: reach(source, disk.image.as_deref()),
        control: control(path.as_ref(), &commands, restricted),
        commands,
        disk: named.disk,
    }
}

impl Running {
    /// For the sandbox; the sockets of clients are named with the first disk.
    fn inside(&self, number: usize, listening: &Listening) -> Inside<'_> {
        let sockets = listening.made.iter().filter(|_| number == 0).map(MadeSocket::named);
        let control = self.control.as_ref().map(|(_, named)| named.clone());
        Inside {
            disk: &self.disk,
            commands: &self.commands,
            allowed: &self.allowed,
            reach: &self.reach,
            first_top: None,
            front: None,
            names: sockets.chain(control).collect(),
            has_kernel: false,
        }
    }
}

/// Says what is served.
fn announce(running: &[Running], listening: &Listening, is_background: bool) {
    if is_background || !terminal::is_interactive() {
        for disk in running {
            terminal::say(format_args!("{}: {}", terminal::NAME, disk.ready));
        }
        return;
    }
    for disk in running {
        terminal::say(terminal::bold(&disk.ready));
    }
    if let Some(path) = &listening.path {
        let uri = format!("nbd+unix:///?socket={}", path.display());
        let word = terminal::shell_word(&uri);
        terminal::say(format_args!("  clients: `nbdinfo {word}`, `qemu-img info {word}`"));
    }
    terminal::say("  stop: Ctrl-C here");
}

/// What signals do.
fn actions(running: &[Running], handle: &Handle, notify: &Arc<Notify>) -> Actions {
    let commands: Vec<Arc<DiskControl>> =
        running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
    // Weak: an image is let go of as soon as its disk has ended.
    let shown: Vec<_> = running.iter().map(|disk| Arc::downgrade(&disk.disk)).collect();
    let (told, stop, read) = (Arc::clone(notify), handle.clone(), handle.clone());
    Actions {
        stop: Box::new(move |signal| {
            told.stopping(&format!("stopping on {signal}"));
            commands.iter().for_each(|commands| commands.cancel());
            stop.stop();
        }),
        print: Box::new(move || {
            let disks: Vec<Arc<Disk>> = shown.iter().filter_map(std::sync::Weak::upgrade).collect();
            print(&read, disks.iter().map(|disk| &**disk));
        }),
    }
}

fn print<'a>(handle: &Handle, disks: impl Iterator<Item = &'a Disk>) {
    let layers: Vec<_> = disks.flat_map(Disk::layers).collect();
    terminal::say_error(handle.text(&layers));
}
