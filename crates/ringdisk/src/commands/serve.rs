//! `ringdisk serve`: from the words to disks that virtual machines can use, and from their end to
//! an exit code.
//!
//! Promises: whatever was made on the way (images, sockets, a pid file) is removed again when the
//! start fails; at a clean end everything but the images is. One disk that breaks down ends alone.
//! Signals are honoured from the first moment.

mod beside;
mod disk;
pub(super) mod end;
mod greet;
mod kept;
mod nbd;
mod privileges;
pub(super) mod take;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::DiskControl;
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
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::sockets::{self, Inherited, MadeSocket, Place, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{Shown, SuccessorSocket};
use ringdisk_daemon::watchdog::Watchdog;
use ringdisk_disk::Disk;

use crate::cli::{DiskArgs, ServeArgs, ServedDisk};
use crate::commands::metrics::MetricsSockets;
use crate::commands::open::ImagePlan;
use crate::new_image::NewImage;
use crate::vhost::{Handle, Served};

use beside::{Beside, Wanted as WantedBeside};
use disk::{Placed, control, front, plan, start};
use end::{actions, wait};
use kept::{Begun, Kept};
pub(super) use nbd::listen_on;

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
    /// In the log.
    name: String,
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

/// Disks that have been started, and their NBD export.
type Started = (Vec<Running>, Option<Beside>);

/// Serves until the end. Gives the exit code.
///
/// Errors: everything that can go wrong; see [`Exit`].
pub(crate) fn run(args: &ServeArgs, disks: Vec<ServedDisk>) -> Result<u8, Failure> {
    args.log.prepare(args.daemonize)?;
    let background = match args.daemonize {
        // Its parent is in the background already.
        true if args.keep && Role::Kept.is_ours() => None,
        true if Role::Background.is_ours() || Role::Device.is_ours() => Some(Background::enter()?),
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
    let is_for_guests = disks.iter().any(|disk| disk.args.place.is_given());
    if !args.nbd.nbd.is_empty() && !is_for_guests {
        let result = nbd::serve(args, &disks, background, user);
        helper::leave();
        return result;
    }
    // Before any descriptor is opened here that could have the number of one that is inherited.
    let beside = WantedBeside::of(args, &disks)?;
    let options: Vec<_> = disks.iter().map(|disk| disk.args.place.options()).collect();
    let inherited = sockets::take(&options)?;
    let result = serve(args, &disks, (&options, inherited), beside, background, user);
    helper::leave();
    result
}

fn serve(
    args: &ServeArgs,
    disks: &[ServedDisk],
    (options, inherited): (&[SocketOptions], Vec<Option<Inherited>>),
    beside: Option<WantedBeside<'_>>,
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
    let (running, mut beside) = match args.upgrade {
        true => {
            confine::check(args.sandbox.word)?;
            (take::take_over(plans, &watcher)?, None)
        }
        false if resumes => match &mut kept {
            Some(kept) => match kept.go_on(plans, &watcher)? {
                // All had ended already.
                none if none.is_empty() => return Ok(kept.code(Exit::Clean.code())),
                running => (running, None),
            },
            None => (Vec::new(), None),
        },
        false => match begin(plans, &fresh, &watcher, kept.as_ref(), beside)? {
            Some(started) => started,
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
    let commands: Vec<_> = running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
    let _watchdog = Watchdog::start(&notify, &commands);
    let _answering = metrics.start(commands)?;
    let mut inside = running.iter().map(Running::inside).collect::<Vec<_>>();
    if let Some(first) = inside.first_mut() {
        first.names.extend(metrics.named());
        first.names.extend(beside.iter().flat_map(Beside::named));
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
    beside.iter_mut().for_each(Beside::release);
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
    let beside = beside.map(|beside| beside.attend(handles.clone()));
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
    let result = beside.map_or(Ok(()), beside::Attended::end).and(result);
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
/// * `beside`: NBD clients have the disks, too.
///
/// Errors: why one cannot be served; nothing that was made stays.
fn begin(
    plans: Vec<Plan<'_>>,
    fresh: &NewFiles,
    watcher: &Watcher,
    kept: Option<&Kept>,
    beside: Option<WantedBeside<'_>>,
) -> Result<Option<Started>, Failure> {
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
    let beside = beside.map(|wanted| wanted.start(&plans, &opened)).transpose();
    let beside = beside.inspect_err(|_| fresh.undo())?;
    let each = plans.into_iter().zip(opened).enumerate();
    let started: Result<Vec<Running>, Failure> =
        each.map(|(n, (plan, disk))| start(n, plan, disk, kept, beside.as_ref())).collect();
    let running = started.inspect_err(|_| fresh.undo())?;
    kept.map_or(Ok(()), |kept| kept.disks.is_kept())?;
    // The images are in use from now on: a failure below does not take them away.
    fresh.keep();
    Ok(Some((running, beside)))
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
