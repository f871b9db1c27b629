//! `ringdisk serve --nbd`: disks for NBD clients, from the words to an exit code.
//!
//! Promises: whatever was made on the way (images, sockets, a pid file) is removed again when the
//! start fails; at a clean end everything but the images is. No word of a client is read before the
//! process is confined. All disks end together.

mod access;

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::background::Background;
use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::{DiskControl, ServedAs};
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
use ringdisk_daemon::sockets::{self, GivenListener, MadeSocket, Opened, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_nbd::{CommonOptions, DirtyBitmap, NamedDisk, NbdOptions};
use ringdisk_ring::Ring;
use ringdisk_vhost::Listen;

use access::{Access, access};

use super::privileges::{self, Inside};
use super::{control, watch_start};
use crate::cli::{Address, NbdArgs, ServeArgs, ServedDisk};
use crate::commands::look;
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

/// Where clients connect.
struct Listening {
    listeners: Vec<OwnedFd>,
    made: Vec<MadeSocket>,
    /// As users know them.
    shown: Vec<String>,
    /// The path of the first socket that has one: `ringdisk ctl` finds the disk by it.
    path: Option<PathBuf>,
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
    io_flusher::become_one_if(opened.iter().any(is_on_a_device));
    let started = listen(places, is_encrypted).and_then(|mut listening| {
        let listeners = std::mem::take(&mut listening.listeners);
        let mut options = options(args, restricted, &plans);
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
        let socket = listening.control_socket();
        let path = socket.map(|path| control_path(&path, is_only, &named.name));
        attend(plan, disk, named, &handle, (path, restricted), &listening.shown)
    };
    let running: Vec<Running> = plans.iter().zip(disks).zip(opened).map(attend).collect();
    let notify = Arc::new(Notify::from_environment());
    let pidfile = pidfile.as_deref().map(Pidfile::create).transpose()?;
    let mut metrics = MetricsSockets::make(&args.log.metrics)?;
    let commands = running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
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

/// Errors: two disks of one name.
fn check_names(disks: &[ServedDisk]) -> Result<(), Failure> {
    let name = |disk: &ServedDisk| disk.args.nbd.export_name.clone().unwrap_or_default();
    for (number, disk) in disks.iter().enumerate() {
        let this = name(disk);
        if disks[..number].iter().any(|other| name(other) == this) {
            let text = match this.as_str() {
                "" => String::from("several disks need names: add export-name=NAME to each --disk"),
                this => format!("two disks are named '{this}': give each its own export-name"),
            };
            return Err(Failure::new(Exit::Usage, text));
        }
    }
    Ok(())
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

/// A disk with its name and its bitmaps.
///
/// Errors: a bitmap that is not there, cannot be used, or records.
fn named(disk: &ServedDisk, opened: Arc<Disk>) -> Result<NamedDisk, Failure> {
    let words = &disk.args.nbd;
    let mut bitmaps = Vec::new();
    if !words.bitmap.is_empty() && opened.window().is_some() {
        let text = "a bitmap is one of a whole image: --bitmap does not go with a part of it";
        return Err(Failure::new(Exit::Usage, text));
    }
    if !words.bitmap.is_empty() {
        let mut runtime = look::runtime()?;
        let ring = runtime.ring().clone();
        for name in &words.bitmap {
            bitmaps.push(runtime.block_on(bitmap(&ring, &opened, name))?);
        }
    }
    let name = words.export_name.clone().unwrap_or_default();
    let description = words.description.clone().unwrap_or_default();
    Ok(NamedDisk { description, bitmaps, ..NamedDisk::new(name, opened) })
}

/// A bitmap of the topmost image that has it.
async fn bitmap(ring: &Ring, disk: &Disk, name: &str) -> Result<DirtyBitmap, Failure> {
    for layer in disk.layers() {
        let Some(image) = layer.qcow2() else { continue };
        let Some(bitmap) = image.info().bitmaps.iter().find(|bitmap| bitmap.name == name) else {
            continue;
        };
        if bitmap.in_use {
            let text = format!("Bitmap '{name}' is inconsistent and cannot be used");
            return Err(Failure::new(Exit::Image, text));
        }
        if bitmap.auto && layer.is_writable() {
            let text = format!("the bitmap '{name}' records, so it changes while it is read");
            let hint = "serve the disk with --read-only, or end the recording first: `ringdisk \
                        bitmap --disable`";
            return Err(Failure::new(Exit::Usage, text).hint(hint));
        }
        let contents = image.bitmap_contents(ring, name).await?;
        let ranges = contents.ranges().map(|range| (range.start.0, range.end.0));
        return Ok(DirtyBitmap { name: name.to_owned(), ranges: ranges.collect() });
    }
    let image = disk.layers().first().map(|layer| layer.name().display().to_string());
    let image = terminal::visible(&image.unwrap_or_default()).to_string();
    let word = terminal::shell_word(&image);
    Err(Failure::new(Exit::Image, format!("Bitmap '{name}' is not found in '{image}'"))
        .hint(format!("`ringdisk info {word}` names those that are there")))
}

fn options(args: &ServeArgs, restricted: bool, plans: &[ImagePlan<'_>]) -> NbdOptions {
    let NbdArgs { max_connections, handshake_limit, idle_exit, .. } = &args.nbd;
    let name = match plans {
        [only] => only.name(),
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

/// An address before anything is made.
enum Where {
    Unix(sockets::Place),
    Tcp(Address),
    Given(GivenListener),
}

/// Errors: paths that cannot be.
fn places(args: &ServeArgs) -> Result<Vec<Where>, Failure> {
    let names = args.nbd.nbd.iter().filter_map(|address| match address {
        Address::Given(name) => Some(name.as_str()),
        _ => None,
    });
    let mut given = sockets::take_listeners(names)?.into_iter();
    let socket = &args.socket();
    let mut place = |address: &Address| match address {
        Address::Unix(path) => {
            let options = SocketOptions {
                make: Some(path.clone()),
                mode: socket.socket_mode,
                group: socket.socket_group.clone(),
                ..SocketOptions::default()
            };
            let mut places = sockets::places(&[options], vec![None])?;
            places.pop().map(Where::Unix).ok_or_else(|| Failure::new(Exit::General, "no place"))
        }
        Address::Tcp { .. } => Ok(Where::Tcp(address.clone())),
        Address::Given(_) => {
            given.next().map(Where::Given).ok_or_else(|| Failure::new(Exit::General, "no place"))
        }
    };
    args.nbd.nbd.iter().map(&mut place).collect()
}

/// Makes all sockets.
///
/// Errors: an address is in use, or cannot be listened on; what was made goes again.
fn listen(places: Vec<Where>, is_encrypted: bool) -> Result<Listening, Failure> {
    let mut listening =
        Listening { listeners: Vec::new(), made: Vec::new(), shown: Vec::new(), path: None };
    for place in places {
        match place {
            Where::Unix(place) => {
                let shown = place.shown();
                let Opened { listen, path, made } = place.open()?;
                if let Listen::Listener(listener) = listen {
                    listening.listeners.push(listener);
                }
                listening.shown.push(shown);
                listening.made.extend(made);
                listening.path = listening.path.or(path);
            }
            Where::Tcp(address) => {
                listening.listeners.extend(listen_on(&address, is_encrypted)?);
                listening.shown.push(format!("at {address}"));
            }
            Where::Given(GivenListener { socket, path, shown }) => {
                listening.listeners.push(socket);
                listening.shown.push(format!("at {shown}"));
                listening.path = listening.path.or(path);
            }
        }
    }
    Ok(listening)
}

/// Listens on all addresses of a host that there are here.
pub(in crate::commands) fn listen_on(
    address: &Address,
    is_encrypted: bool,
) -> Result<Vec<OwnedFd>, Failure> {
    let Address::Tcp { host, port } = address else { return Ok(Vec::new()) };
    let cannot = |error: &std::io::Error| {
        let exit = match error.kind() {
            std::io::ErrorKind::AddrInUse => Exit::Locked,
            std::io::ErrorKind::PermissionDenied => Exit::Permission,
            _ => Exit::Mountpoint,
        };
        Failure::system(format!("cannot listen at {address}"), error, exit)
    };
    let found = (host.as_str(), *port).to_socket_addrs().map_err(|error| cannot(&error))?;
    let (mut listeners, mut why) = (Vec::new(), None);
    for found in found {
        match TcpListener::bind(found) {
            Ok(listener) => {
                if !found.ip().is_loopback() && !is_encrypted {
                    terminal::warn(format_args!(
                        "{found} is no loopback address: anybody who reaches it can use the disk, \
                         without encryption and without a password; --tls-creds changes that"
                    ));
                }
                listeners.push(OwnedFd::from(listener));
            }
            // A host may have an address of a family that is not there.
            Err(error) => why = Some(error),
        }
    }
    match why {
        Some(error) if listeners.is_empty() => Err(cannot(&error)),
        _ => Ok(listeners),
    }
}

impl Listening {
    /// What control sockets are named after: the Unix socket, or the first address. By the latter
    /// `ringdisk ps` finds a disk, and `ringdisk ctl` does not.
    fn control_socket(&self) -> Option<PathBuf> {
        self.path.clone().or_else(|| self.shown.first().map(PathBuf::from))
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
    let export = named.name.clone();
    let commands = commands.served_as(ServedAs::Nbd { addresses: shown.to_vec(), export });
    let commands = Arc::new(commands.confined_later(restricted));
    let source = &disk.args.source;
    let name = match named.name.as_str() {
        "" => String::new(),
        name => format!(" as '{}'", terminal::visible(name)),
    };
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
