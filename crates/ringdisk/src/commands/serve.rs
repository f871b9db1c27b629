//! `ringdisk serve`: from the words to disks that virtual machines can use, and from their end to
//! an exit code.
//!
//! Promises: whatever was made on the way (images, sockets, a pid file) is removed again when the
//! start fails; at a clean end everything but the images is. One disk that breaks down ends alone.
//! Signals are honoured from the first moment.

mod greet;
mod kept;
mod nbd;
mod privileges;
pub(super) mod take;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::{DiskControl, ServedAs, Serving};
use ringdisk_daemon::control::registry;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper;
use ringdisk_daemon::helper::start::Role;
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::log_target;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_daemon::signals::{Actions, Phase, Watcher};
use ringdisk_daemon::sockets::{self, Inherited, MadeSocket, Opened, Place, SocketOptions};
use ringdisk_daemon::stopping::Stop;
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{Shown, SuccessorSocket};
use ringdisk_disk::Disk;
use ringdisk_vhost::{ExportOptions, Listen};

use crate::cli::{DiskArgs, PACKED, ServeArgs, ServedDisk, word_of};
use crate::commands::metrics::MetricsSockets;
use crate::commands::open::{ImagePlan, new_image, reach};
use crate::commands::shown::ShownWords;
use crate::new_image::NewImage;
use crate::vhost::{self, Handle, Served};

use kept::{Begun, Kept};
pub(super) use nbd::listen_on;

/// A process that served the disk and was killed has it until its last write has landed.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// One disk before it is served.
struct Plan<'a> {
    args: &'a DiskArgs,
    image: ImagePlan<'a>,
    /// What the guest is shown.
    shown: Shown,
    new: Option<(NewImage, u64)>,
    place: Place,
    /// Rings do nothing but what serving takes.
    restricted: bool,
    /// A process with this command line is confined in its files.
    confines: bool,
}

/// One disk that is served.
struct Running {
    /// What is served, and where, in one line.
    ready: String,
    /// Where front ends and `ringdisk ctl` find it.
    path: Option<PathBuf>,
    /// The front end's socket, where it is the front end that listens.
    front: Option<PathBuf>,
    queues: u16,
    /// Where the command line allows images to lead.
    allowed: Vec<PathBuf>,
    /// What that and its image lead to.
    reach: Reach,
    /// The image that was on top at the start of a disk that was kept, if another one is now.
    first_top: Option<PathBuf>,
    served: Served,
    disk: Arc<Disk>,
    /// The name of the socket.
    made: Option<MadeSocket>,
    commands: Arc<DiskControl>,
    control: Option<(Server, helper::Named)>,
    /// For the process that takes the disk over.
    successor: Option<SuccessorSocket>,
}

/// Serves until the end. Gives the exit code.
///
/// Errors: everything that can go wrong; see [`Exit`].
pub(crate) fn run(args: &ServeArgs, disks: Vec<ServedDisk>) -> Result<u8, Failure> {
    args.log.prepare(args.daemonize)?;
    let background = match args.daemonize {
        // Its parent is in the background already.
        true if args.keep && Role::Kept.is_ours() => None,
        true if Role::Background.is_ours() => Some(Background::enter()?),
        // The background process of `qemu-nbd` takes the socket by its number.
        true if !args.nbd.is_quiet
            && std::env::var("LISTEN_PID")
                .is_ok_and(|pid| pid == std::process::id().to_string()) =>
        {
            return Err(Failure::new(
                Exit::Usage,
                "a process in the background does not get the sockets of the service manager",
            )
            .hint("leave --daemonize out; the manager waits for Type=notify"));
        }
        true => return background::run_child(),
        false => None,
    };
    let user = Wanted::of(&args.user.word)?;
    if !args.nbd.nbd.is_empty() {
        let result = nbd::serve(args, &disks, background, user);
        helper::leave();
        return result;
    }
    // Before any descriptor is opened here that could have the number of one that is inherited.
    let options: Vec<_> = disks.iter().map(|disk| disk.args.place.options()).collect();
    let inherited = sockets::take(&options)?;
    let result = serve(args, &disks, &options, inherited, background, user);
    helper::leave();
    result
}

fn serve(
    args: &ServeArgs,
    disks: &[ServedDisk],
    options: &[SocketOptions],
    inherited: Vec<Option<Inherited>>,
    background: Option<Background>,
    user: Wanted,
) -> Result<u8, Failure> {
    let mut background = background;
    let mut kept = match kept::begin(args, disks.len(), &mut background)? {
        Begun::Serves(kept) => kept,
        Begun::Held(code) => return Ok(code),
    };
    let resumes = kept.as_ref().is_some_and(Kept::resumes);
    let places = match args.upgrade {
        _ if resumes => options.iter().map(kept::place).collect(),
        true => sockets::taken_places(options, inherited)?,
        false => sockets::places(options, inherited)?,
    };
    let plans = disks.iter().zip(places).map(|(disk, place)| plan(args, disk, place));
    let plans = plans.collect::<Result<Vec<_>, _>>()?;
    let fresh = NewFiles::default();
    let watcher = watch_start(&fresh, kept.as_ref())?;
    // Where another process holds the disks, that one has the pid file.
    let pidfile = args.pidfile.as_deref().filter(|_| kept.is_none());
    let pidfile = pidfile.map(std::path::absolute).transpose();
    let pidfile = pidfile
        .map_err(|error| Failure::system("the name of the pid file", &error, Exit::General))?;
    if let Some(pidfile) = &pidfile {
        // That of the process whose disk we take is locked until it ends.
        let held_before = |failure: &Failure| args.upgrade && failure.exit == Exit::Locked;
        Pidfile::check(pidfile).or_else(|why| if held_before(&why) { Ok(()) } else { Err(why) })?;
    }
    let running = match args.upgrade {
        true => {
            confine::check(args.sandbox.word)?;
            take::take_over(plans, &watcher)?
        }
        false if resumes => match &mut kept {
            Some(kept) => match kept.go_on(plans, &watcher)? {
                // All had ended already.
                none if none.is_empty() => return Ok(kept.code(Exit::Clean.code())),
                running => running,
            },
            None => Vec::new(),
        },
        false => match begin(plans, &fresh, &watcher, kept.as_ref())? {
            Some(running) => running,
            None => return Ok(Exit::General.code()),
        },
    };
    let notify = match &kept {
        Some(kept) => Arc::clone(&kept.disks.notify),
        None => Arc::new(Notify::from_environment()),
    };
    let pidfile = match pidfile.as_deref().map(Pidfile::create) {
        // A guest depends on us already, and the process before us goes on with other disks.
        Some(Err(failure)) if args.upgrade => {
            terminal::complain(&failure.context("the disk is served without a pid file"));
            None
        }
        created => created.transpose()?,
    };
    let mut metrics = MetricsSockets::make_for(&args.log.metrics, args.upgrade)?;
    let _answering =
        metrics.start(running.iter().map(|disk| Arc::clone(&disk.commands)).collect())?;
    let mut inside = running.iter().map(Running::inside).collect::<Vec<_>>();
    if let Some(first) = inside.first_mut() {
        first.names.extend(metrics.named());
    }
    privileges::give_up(
        args.sandbox.word,
        user,
        &inside,
        pidfile.as_ref(),
        &notify,
        args.upgrade,
        kept.as_ref().map(|kept| kept.mark.clone()).unwrap_or_default(),
    )?;
    // What front ends say is read inside; those that were taken over have been served already.
    running.iter().for_each(|disk| disk.served.release());
    let ready = match running.as_slice() {
        [only] => only.ready.clone(),
        several => format!("{} disks are served", several.len()),
    };
    notify.ready(&ready);
    if resumes {
        terminal::note(format_args!("{ready}: requests that were not answered go on"));
    } else if background.is_some() || !terminal::is_interactive() {
        for disk in &running {
            terminal::say(format_args!("{}: {}", terminal::NAME, disk.ready));
        }
    } else {
        greet::greet(&running);
    }
    match background {
        Some(background) => background.ready(),
        None if kept.is_some() && args.daemonize => background::let_go(),
        None => log_target::begin(),
    }
    let handles: Vec<Handle> = running.iter().map(|disk| disk.served.handle()).collect();
    if let Some(kept) = &kept {
        let (handles, notify) = (handles.clone(), Arc::clone(&notify));
        kept.disks.watch(move || {
            tracing::error!("the process that keeps the disks is gone: they are served no longer");
            notify.stopping("the process that keeps the disks is gone");
            handles.iter().for_each(Handle::stop);
        });
    }
    terminal::serves();
    if let Some(signal) = watcher.enter(Phase::Serving(actions(&running, &notify))) {
        notify.stopping(&format!("stopping on {signal}"));
        handles.iter().for_each(Handle::stop);
    }
    let given: Vec<_> = running
        .iter()
        .map(|disk| disk.successor.as_ref().map(SuccessorSocket::was_given))
        .collect();
    let result = wait(args, running);
    watcher.enter(Phase::Ending);
    let is_given = |flag: &Option<Arc<AtomicBool>>| {
        flag.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire))
    };
    if given.iter().all(is_given) {
        // The other process speaks to the service manager from now on, and has the pid file as soon
        // as this one has ended.
        if let Some(pidfile) = pidfile {
            pidfile.leave();
        }
        terminal::note("handed over to another process");
        return result;
    }
    let why = match (&result, watcher.stopped_by()) {
        (Err(failure), _) => failure.message().to_owned(),
        (Ok(_), Some(signal)) => format!("stopped by {signal}"),
        (Ok(_), None) => String::from("stopped"),
    };
    match watcher.stopped_by() {
        Some(_) => notify.status(&why),
        None => notify.stopping(&why),
    }
    drop(pidfile);
    result.map(|code| kept.map_or(code, |kept| kept.code(code)))
}

/// Opens and serves all disks. `None`: a signal came meanwhile.
///
/// Errors: why one cannot be served; nothing that was made stays.
fn begin(
    plans: Vec<Plan<'_>>,
    fresh: &NewFiles,
    watcher: &Watcher,
    kept: Option<&Kept>,
) -> Result<Option<Vec<Running>>, Failure> {
    let opened: Result<Vec<Arc<Disk>>, Failure> =
        plans.iter().map(|plan| plan.image.open(fresh, plan.new.as_ref())).collect();
    // The thread that takes signals knows what was made too, so it does not go by itself.
    let opened = opened.inspect_err(|_| fresh.undo())?;
    for reason in opened.iter().filter_map(|disk| disk.protection_reason()) {
        terminal::note(reason);
    }
    if watcher.enter(Phase::Mounting).is_some() {
        fresh.undo();
        return Ok(None);
    }
    // Before there are threads that shall have it too.
    io_flusher::become_one_if(opened.iter().any(|disk| io_flusher::is_on_a_device(disk)));
    let started: Result<Vec<Running>, Failure> =
        plans.into_iter().zip(opened).enumerate().map(|(n, (p, d))| start(n, p, d, kept)).collect();
    let running = started.inspect_err(|_| fresh.undo())?;
    kept.map_or(Ok(()), |kept| kept.disks.is_kept())?;
    // The images are in use from now on: a failure below does not take them away.
    fresh.keep();
    Ok(Some(running))
}

/// Errors: options of an image that it cannot have.
fn plan<'a>(args: &ServeArgs, disk: &'a ServedDisk, place: Place) -> Result<Plan<'a>, Failure> {
    let source = &disk.args.source;
    Ok(Plan {
        args: &disk.args,
        shown: shown(disk),
        new: new_image(source, disk.image.as_deref())?,
        image: ImagePlan {
            // The guest lives on when this process is killed, and was told that its writes are
            // there. A temporary overlay is gone anyway.
            outlives_process: !source.snapshot,
            leaves_directory: args.daemonize || args.keep,
            inactive: disk.args.device.incoming,
            wait_for_locks: Some(LOCK_WAIT),
            ask_for_raw: true,
            note_names: confine::is_wanted(args.sandbox.word),
            ..ImagePlan::new(source, disk.image.clone())
        },
        place,
        restricted: confine::is_wanted(args.sandbox.word),
        confines: confine::confines_files(args.sandbox.word),
    })
}

/// What the guest is shown, as the words of a disk say it now.
fn shown(disk: &ServedDisk) -> Shown {
    let device = &disk.args.device;
    let mut words = ShownWords::of_source(&disk.args.source);
    words.say("--queues", Some(vhost::queues(&disk.args).to_string()));
    words.say("--queue-size", Some(device.queue_size.to_string()));
    words.say("--serial", Some(device.serial.clone()));
    words.say("--logical-block-size", Some(device.logical_block_size.to_string()));
    words.number("--physical-block-size", device.physical_block_size.map(u64::from));
    words.say("--packed", Some(word_of(PACKED, device.packed).to_owned()));
    words.shown(&disk.args.source, disk.image.as_deref())
}

/// Serves one disk.
///
/// * `number`: which one it is.
///
/// Errors: the socket cannot be made, or the export not be started; nothing stays then.
fn start(
    number: usize,
    plan: Plan<'_>,
    disk: Arc<Disk>,
    kept: Option<&Kept>,
) -> Result<Running, Failure> {
    let keep = kept.map(|kept| kept.keep(number, &plan, &disk)).transpose()?;
    let placed = plan.placed(&disk);
    let Opened { listen, path, made } = plan.place.open()?;
    let front = front(&listen);
    let (read_only, name) = (disk.is_read_only(), plan.image.name());
    let options = vhost::options(plan.args, read_only, plan.restricted, listen, name);
    let accel = options.accel.filter(|_| keep.is_none());
    let options = ExportOptions { held: true, keep, accel, ..options };
    let served = Served::start(Arc::clone(&disk), options)?;
    for note in served.notes() {
        terminal::warn(note);
    }
    Ok(Placed { path, front, made, ..placed }.attend(served, disk))
}

impl Plan<'_> {
    /// What is known of the disk once its images are open, but for its sockets.
    fn placed(&self, disk: &Disk) -> Placed {
        let source = &self.args.source;
        let first = source.overlay.clone().or(self.image.image.clone());
        Placed {
            ready: format!("{} is served {}", self.image.describe(disk), self.place.shown()),
            name: self.image.name(),
            path: None,
            front: None,
            queues: vhost::queues(self.args),
            allowed: source.allow_path.clone(),
            reach: reach(source, self.image.image.as_deref()),
            // A command has put another image on top of it.
            first_top: first.filter(|_| self.image.top.is_some()),
            restricted: self.restricted,
            made: None,
            shown: self.shown.clone(),
        }
    }
}

/// The socket of a front end that listens itself.
fn front(listen: &Listen) -> Option<PathBuf> {
    match listen {
        Listen::Connect(path) => Some(path.clone()),
        Listen::Listener(_) | Listen::Stream(_) => None,
    }
}

/// What is known of a disk before it is served.
struct Placed {
    ready: String,
    name: String,
    path: Option<PathBuf>,
    front: Option<PathBuf>,
    queues: u16,
    allowed: Vec<PathBuf>,
    reach: Reach,
    first_top: Option<PathBuf>,
    restricted: bool,
    made: Option<MadeSocket>,
    shown: Shown,
}

impl Placed {
    /// Makes the sockets for `ringdisk ctl`, and for the process after this one.
    fn attend(self, served: Served, disk: Arc<Disk>) -> Running {
        let Placed {
            ready,
            name: _,
            path,
            front,
            queues,
            allowed,
            reach,
            first_top,
            restricted,
            made,
            shown,
        } = self;
        let handle = served.handle();
        let for_control = handle.clone();
        let commands = DiskControl::new(Arc::clone(&disk), handle, move |_| for_control.stop());
        let socket = path.clone().unwrap_or_default();
        let commands = commands.served_as(ServedAs::VhostUser { socket });
        let commands = Arc::new(commands.confined_later(restricted));
        let control = control(path.as_ref(), &commands, restricted);
        let successor = path.as_ref().and_then(|path| {
            let socket = registry::name_for_successor(path);
            let handle = served.hand_over_handle();
            let successor = SuccessorSocket::start(&socket, handle, shown, &disk);
            successor.inspect_err(|e| tracing::warn!("`--upgrade` cannot be used: {e}")).ok()
        });
        Running {
            ready,
            path,
            front,
            queues,
            allowed,
            reach,
            first_top,
            served,
            disk,
            made,
            commands,
            control,
            successor,
        }
    }
}

/// Makes the control socket. Without one the disk is served all the same.
fn control(
    path: Option<&PathBuf>,
    commands: &Arc<DiskControl>,
    restricted: bool,
) -> Option<(Server, helper::Named)> {
    // Nobody could name a disk without a path.
    let name = registry::name_of_disk(path?);
    let started = registry::listen(&name).and_then(|listening| {
        let named = listening.named();
        Ok((Server::start(listening, Arc::clone(commands), restricted)?, named))
    });
    match started {
        Ok(started) => Some(started),
        Err(error) => {
            tracing::warn!("`ringdisk ctl` cannot be used: {error}");
            None
        }
    }
}

/// What signals do to disks that are served.
fn actions(running: &[Running], notify: &Arc<Notify>) -> Actions {
    let disks: Vec<(Handle, Arc<DiskControl>)> =
        running.iter().map(|disk| (disk.served.handle(), Arc::clone(&disk.commands))).collect();
    // Weak: an image is let go of as soon as its disk has ended, not with the last one.
    let shown: Vec<_> =
        running.iter().map(|disk| (disk.served.handle(), Arc::downgrade(&disk.disk))).collect();
    let told = Arc::clone(notify);
    Actions {
        stop: Box::new(move |signal| {
            told.stopping(&format!("stopping on {signal}"));
            for (handle, commands) in &disks {
                commands.cancel();
                handle.stop();
            }
        }),
        print: Box::new(move || {
            for (handle, disk) in &shown {
                if let Some(disk) = disk.upgrade() {
                    print(handle, &disk);
                }
            }
        }),
    }
}

fn print(handle: &Handle, disk: &Disk) {
    terminal::say_error(handle.report().with_layers(&disk.layers(), disk.fault().as_deref()));
}

/// Waits until no disk is served any longer. Gives the exit code.
///
/// Errors: why the only disk ended; of several each has said it by itself.
fn wait(args: &ServeArgs, mut running: Vec<Running>) -> Result<u8, Failure> {
    let left = AtomicUsize::new(running.len());
    if running.len() == 1
        && let Some(disk) = running.pop()
    {
        return disk.end(args.stats, &left).map(|()| Exit::Clean.code());
    }
    let codes: Vec<u8> = std::thread::scope(|scope| {
        let waiting = running.into_iter().map(|disk| {
            let left = &left;
            scope.spawn(move || match disk.end(args.stats, left) {
                Ok(()) => Exit::Clean.code(),
                Err(failure) => {
                    terminal::complain(&failure);
                    failure.code()
                }
            })
        });
        let waiting: Vec<_> = waiting.collect();
        waiting.into_iter().map(|end| end.join().unwrap_or(Exit::General.code())).collect()
    });
    Ok(codes.into_iter().find(|code| *code != Exit::Clean.code()).unwrap_or(Exit::Clean.code()))
}

impl Running {
    /// Waits until it is served no longer, and takes away what is left.
    ///
    /// * `left`: disks of this process that are served, with this one.
    ///
    /// Errors: as [`Served::wait`].
    fn end(self, stats: bool, left: &AtomicUsize) -> Result<(), Failure> {
        let handle = self.served.handle();
        let result = self.served.wait(&self.disk);
        if stats {
            print(&handle, &self.disk);
        }
        let was_given = self
            .successor
            .as_ref()
            .is_some_and(|successor| successor.was_given().load(Ordering::Acquire));
        match self.made {
            // It is the name of the other process now.
            Some(made) if was_given => made.leave(),
            made => drop(made),
        }
        // The image is free before clients of the control socket hear of the end.
        self.commands.end(&result);
        self.commands.let_go();
        drop(self.disk);
        drop(self.control);
        // Who has taken the disk may use its names. With the last disk it gets the pid file, too,
        // which is free when this process has ended.
        let successor = self.successor.and_then(|successor| match handle.is_stopped() {
            true => successor.end_with_stop(Stop::Clean),
            false => successor.end(),
        });
        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
            std::mem::forget(successor);
        }
        result
    }
}

/// Takes signals while nothing is served: a stop removes what was made and ends the process.
///
/// * `kept`: where another process holds the disks it counts signals; where this one goes on with
///   them a stop is remembered.
fn watch_start(fresh: &NewFiles, kept: Option<&Kept>) -> Result<Watcher, Failure> {
    let cannot = |error| Failure::system("cannot watch for signals", &error, Exit::General);
    if let Some(kept) = kept.filter(|kept| kept.resumes()) {
        let watcher = Watcher::start_kept(Phase::Mounting).map_err(cannot)?;
        kept.disks.listens();
        return Ok(watcher);
    }
    let fresh = fresh.clone();
    let quit = move |signal: &'static str| {
        fresh.undo();
        terminal::say_error(format_args!(
            "{}: stopped by {signal} before the disk was served",
            terminal::NAME
        ));
        std::process::exit(i32::from(Exit::General.code()));
    };
    let phase = Phase::Starting(Box::new(quit));
    let Some(kept) = kept else { return Watcher::start(phase).map_err(cannot) };
    let watcher = Watcher::start_kept(phase).map_err(cannot)?;
    kept.disks.listens();
    Ok(watcher)
}
