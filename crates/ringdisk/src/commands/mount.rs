//! `ringdisk mount`: from the words to a mount that answers, and from its end to an exit code.
//!
//! Promises: whatever was made on the way (an image, a mountpoint, a pid file, a mount) is removed
//! again when the start fails; at a clean end everything but the image is. Signals are honoured
//! from the first moment.

mod plan;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use plan::{FREE, FREE_STOPPED, Plan};
use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::confine::{self, Confinement, Tasks};
use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper;
use ringdisk_daemon::helper::start::Role;
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::keep::{self, Kept, State};
use ringdisk_daemon::mount_lock;
use ringdisk_daemon::mount_users::{self, Place};
use ringdisk_daemon::mountpoint::MountpointState;
use ringdisk_daemon::new_file::{NewFile, NewFiles};
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::{Decision, Wanted};
use ringdisk_daemon::signals::{AT_ONCE, Actions, Phase, Watcher};
use ringdisk_daemon::stopping::{Asked, Insist, Stopping};
use ringdisk_daemon::terminal::{self, bold, shell_word};
use ringdisk_disk::{Disk, Format, Layer};
use ringdisk_fuse::kept::{Ended, Parked, is_over, remove};
use ringdisk_fuse::placement::THREADS_AUTO_MAX_DEV;
use ringdisk_ring::{Config, Runtime, Topology};
use ringdisk_sandbox::{Calls, CapabilitySet, Keep};

use crate::cli::{MountArgs, MountPaths, Threads};
use crate::commands::open::new_image;
use crate::serve::{self, Served};

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
    let user = Wanted::of(&args.user.word)?;
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
                return keep::holder::run(args.pidfile.as_deref(), &paths.mountpoint, background);
            }
            Some(keep::Role::Serves(kept)) => Some(kept),
        };
    serve(args, paths, background, kept, user)
}

/// Queues that a mount with these options has at most, where it may be kept.
fn queues_max(args: &MountArgs) -> usize {
    match args.placement.threads {
        Threads::Auto => THREADS_AUTO_MAX_DEV,
        Threads::Count(count) => usize::from(count),
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
    mut kept: Option<Kept>,
    user: Wanted,
) -> Result<u8, Failure> {
    let resumed = kept.as_ref().and_then(Kept::resumed);
    let new = if resumed.is_some() { None } else { new_image(&args.disk, paths.image.as_deref())? };
    if resumed.is_none() {
        // CPUs that cannot be used are told before anything is made.
        serve::foresee(&args.placement, &Topology::read())?;
    }
    // The file may become a loop device.
    io_flusher::become_one_if(true);
    let made = Made::default();
    let has_holder = kept.as_ref().is_some_and(Kept::has_holder);
    let watcher = match resumed {
        Some(_) => watch_resumed(has_holder)?,
        None => watch_start(&made, has_holder)?,
    };
    if let Some(kept) = &kept {
        kept.listens();
    }
    // Until this process has taken it over, a mount that was kept stays as it is, with the file
    // below it.
    let mut plan = match &resumed {
        Some((state, _)) => Plan::resumed(args, paths, state, kept.as_ref().and_then(Kept::first))?,
        None => Plan::new(args, paths)?,
    };
    if has_holder {
        // It has the pid file.
        plan.pidfile = None;
    }
    if let Some(pidfile) = &plan.pidfile {
        Pidfile::check(pidfile)?;
    }
    // The thread that takes signals knows what was made too, so it does not go by itself.
    let opened = match &resumed {
        Some((state, parked)) if is_over(parked) => {
            // Only to bring home what was answered.
            let disk = plan.open_when_free(&watcher, FREE_STOPPED);
            return ended_meanwhile(kept.as_mut(), &made, state, parked, disk);
        }
        Some(_) => plan.open_when_free(&watcher, FREE),
        None => plan.open_disk(&made.images, new.as_ref()),
    };
    let disk = opened.inspect_err(|_| made.undo())?;
    let word = args.sandbox.word;
    let mut user = user.decide(word, &[&disk]).inspect_err(|_| made.undo())?;
    if let Some(reason) = disk.protection_reason() {
        terminal::note(reason);
    }
    if plan.wants_to_size_a_part(&disk) && resumed.is_none() {
        terminal::note(
            "the size of a part of a disk is fixed, so --growable and --resizable change nothing",
        );
    }
    // A mount that is there goes on, and ends cleanly then.
    if watcher.enter(Phase::Mounting).is_some() && resumed.is_none() {
        return Ok(Exit::General.code());
    }
    let alive = match kept.as_mut().filter(|_| resumed.is_some()) {
        Some(kept) => kept.take_alive(),
        None => {
            made.mountpoint(&plan.mountpoint)?;
            mount_lock::hold(&plan.mountpoint)
        }
    };
    let alive = alive.map(Arc::new);
    let mut options = plan.options(&disk);
    options.keep = kept.as_ref().map(Kept::keep).transpose()?;
    let stop_timeout = options.stop_timeout;
    let mut served = match Served::start(Arc::clone(&disk), options) {
        Err(failure) => match &resumed {
            Some((state, parked)) if is_over(parked) => {
                return ended_meanwhile(kept.as_mut(), &made, state, parked, Ok(disk));
            }
            _ => return Err(failure),
        },
        Ok(served) => served,
    };
    if let Some((state, _)) = &resumed {
        made.adopt(&plan.mountpoint, state.made);
    }
    for note in served.notes() {
        terminal::warn(note);
    }
    // The image is in use from now on: a failure below does not take it away.
    made.keep_image();
    if let Some(kept) = &mut kept {
        let created = new.as_ref().map(|(new, _)| new.format);
        let may_be_top = plan.may_be_top();
        let parked = park(
            kept,
            &mut served,
            &made,
            &disk,
            alive.as_deref(),
            created,
            (may_be_top, plan.mark.clone()),
        );
        if let Err(failure) = parked {
            served.handle().force();
            let _ = served.wait(&disk);
            kept.forget(alive.as_deref());
            return Err(failure);
        }
    }
    let pidfile = match plan.pidfile.as_deref().map(Pidfile::create).transpose() {
        Ok(pidfile) => pidfile,
        Err(failure) => {
            served.handle().force();
            let _ = served.wait(&disk);
            return Err(failure);
        }
    };
    let notify = match &kept {
        Some(kept) => Arc::clone(&kept.notify),
        None => Arc::new(Notify::from_environment()),
    };
    let handle = served.handle();
    let stopping = Arc::new(Stopping::default());
    watch_users(&served, &plan, stop_timeout, &stopping, &notify, alive.clone());
    let for_control = handle.clone();
    let told = Arc::clone(&notify);
    let stop = move |at_once: bool| {
        told.stopping("stopping on request");
        if at_once { for_control.force() } else { for_control.stop() }
    };
    if let Some(number) = served.connection() {
        disk.set_shown_on(rustix::fs::makedev(0, number));
    }
    let commands = DiskControl::new(Arc::clone(&disk), handle.clone(), stop);
    let commands = commands.in_stages(Arc::clone(&stopping));
    let commands = Arc::new(commands.confined_later(confine::is_wanted(word)));
    let (control, control_names) = match control(&plan, &served, &commands, word) {
        Some((server, names)) => (Some(server), names),
        None => (None, Vec::new()),
    };
    if confine::is_wanted(word) || user.is_change() {
        let mut removed = control_names.clone();
        removed.extend(made.mountpoint_id().map(|id| (plan.mountpoint.clone(), id)));
        removed.extend(pidfile.as_ref().and_then(Pidfile::identity));
        let confinement = plan.confinement(&disk);
        match confine_to(
            confinement,
            &plan,
            &disk,
            &served,
            removed,
            (&notify, kept.as_ref()),
            &mut user,
        ) {
            Ok(in_force) => {
                if let Some(in_force) = in_force {
                    commands.confined(in_force);
                }
                if let Some(user) = user.name() {
                    commands.runs_as(user);
                }
            }
            Err(failure) => {
                served.handle().force();
                let _ = served.wait(&disk);
                return Err(failure);
            }
        }
    }
    let ready = plan.ready_line(&disk);
    tracing::info!("requests travel over {}", served.transport());
    notify.ready(&ready);
    if kept.as_ref().is_some_and(Kept::has_holder) && notify.barrier().is_err() {
        tracing::warn!("the process that keeps the mount does not answer");
    }
    if resumed.is_some() {
        terminal::note(format_args!("{ready} again: requests that were not answered go on"));
    } else if background.is_some() || !terminal::is_interactive() {
        terminal::say(format_args!("{}: {ready}", terminal::NAME));
    } else {
        greet(&plan, &ready);
    }
    match background {
        Some(background) => background.ready(),
        // The parent that keeps the mount is in the background; so are we.
        None if kept.is_some() && args.daemonize => background::let_go(),
        None => {}
    }
    if let Some(kept) = &kept {
        let (for_end, told) = (handle.clone(), Arc::clone(&notify));
        kept.watch(move || {
            tracing::error!("the process that keeps the mount is gone: the mount ends when nobody uses it any more");
            told.stopping("the process that keeps the mount is gone");
            for_end.stop();
        });
    }
    let (for_print, shown) = (handle.clone(), Arc::clone(&disk));
    let for_stop = handle.clone();
    let told = Arc::clone(&notify);
    let insist = Arc::new(Insist::default());
    let counted = Arc::clone(&insist);
    let farewell = Arc::clone(&commands);
    let actions = Actions {
        stop: Box::new(move |signal| {
            let asked = match signal {
                AT_ONCE => Asked::Again,
                // The process that keeps the mount counts, and its signals may come beside those of
                // a terminal.
                _ => counted.count(signal != "SIGHUP" && !has_holder),
            };
            commands.cancel();
            match asked {
                Asked::First => {
                    told.stopping(&format!("stopping on {signal}"));
                    for_stop.stop();
                }
                Asked::Echo => {}
                Asked::Again => {
                    told.stopping("ending at once");
                    for_stop.force();
                }
            }
        }),
        print: Box::new(move || {
            let fault = shown.fault();
            terminal::say_error(for_print.stats().with_layers(&shown.layers(), fault.as_deref()));
        }),
    };
    terminal::serves();
    if let Some(signal) = watcher.enter(Phase::Serving(actions)) {
        insist.count(false);
        notify.stopping(&format!("stopping on {signal}"));
        handle.stop();
    }
    let result = served.wait(&disk);
    farewell.end(&result);
    drop(farewell);
    stopping.end();
    watcher.enter(Phase::Ending);
    let why = match (&result, watcher.stopped_by()) {
        (Err(failure), _) => failure.message().to_owned(),
        (Ok(()), Some(signal)) => format!("stopped by {signal}"),
        (Ok(()), None) => String::from("unmounted"),
    };
    match watcher.stopped_by() {
        Some(_) => notify.status(&why),
        None => notify.stopping(&why),
    }
    if args.stats {
        terminal::say_error(handle.stats().with_layers(&disk.layers(), disk.fault().as_deref()));
    }
    // Clients of the control socket are sent away before anything that they may use goes.
    drop(control);
    // The image's lock goes before the names that others watch.
    drop(disk);
    drop(made);
    drop(pidfile);
    if let Some(kept) = &kept {
        kept.forget(alive.as_deref());
    }
    if let Some(alive) = &alive {
        mount_lock::release(alive);
    }
    helper::leave();
    result.map(|()| Exit::Clean.code())
}

/// Gives the mount to whoever keeps it, unless it comes from there. When this returns, this process
/// may be killed.
///
/// * `created`: format of the image that was made just now.
/// * `may_be_top`: whether the next process would take an image that a command puts on top.
///
/// Errors: it is not taken.
fn park(
    kept: &mut Kept,
    served: &mut Served,
    made: &Made,
    disk: &Disk,
    alive: Option<&fs::File>,
    created: Option<Format>,
    (may_be_top, mark): (impl Fn(&Layer) -> Result<(), String> + Send + Sync + 'static, String),
) -> Result<(), Failure> {
    let state_file = kept.state_file();
    let top = Mutex::new(disk.layers().first().map(|top| top.name().to_owned()));
    disk.watch_chain(may_be_top, move |chain| {
        let mut top = top.lock().unwrap_or_else(PoisonError::into_inner);
        let new = chain.first().map(|top| top.name().to_owned());
        state_file.set_chain(chain, *top != new);
        *top = new;
    });
    match served.take_parked() {
        Some(parked) if kept.resumed().is_none() => {
            let devices = parked.devices.len();
            let mut state = State::new(&parked.terms, devices, made.mountpoint_id(), created);
            state = state.begun_on(&disk.layers());
            state.window = disk.window();
            state.protect_raw = disk.protects_raw();
            state.mark = mark;
            kept.park(&parked, state, alive)
        }
        _ => Ok(()),
    }
}

/// The mount has ended while nobody served it. Gives the exit code of a clean end.
///
/// * `disk`: what was served.
///
/// Errors: its connection was aborted, so clients got errors; what was answered cannot be brought
/// to stable storage.
fn ended_meanwhile(
    kept: Option<&mut Kept>,
    made: &Made,
    state: &State,
    parked: &Parked,
    disk: Result<Arc<Disk>, Failure>,
) -> Result<u8, Failure> {
    let ended = kept.as_ref().and_then(|kept| kept.ended());
    if ended == Some(Ended::Aborted)
        && let Err(error) = remove(parked)
    {
        terminal::warn(error);
    }
    made.adopt(&state.terms().mountpoint, state.made);
    let flushed = match disk {
        Ok(disk) => flush(&disk),
        // Somebody else may have it by now, and then it is his to flush.
        Err(failure) => {
            let why = failure.message();
            terminal::warn(format_args!(
                "what was answered before may not be on stable storage: {why}"
            ));
            Ok(())
        }
    };
    let what = match ended {
        Some(Ended::Aborted) => {
            "the connection was aborted (`umount -f`, or fusectl) while no process served the mount: requests that waited ended with errors, \
             and what the users had not written yet is lost"
        }
        _ => "the mount was removed while no process served it",
    };
    if let Some(kept) = kept {
        kept.notify.stopping(what);
        let alive = kept.take_alive();
        kept.forget(alive.as_ref());
    }
    flushed?;
    if ended == Some(Ended::Aborted) {
        return Err(Failure::new(Exit::Forced, what));
    }
    terminal::note(what);
    Ok(Exit::Clean.code())
}

/// Brings all to stable storage, also what a process before this one has answered, and lets go of
/// the images.
///
/// Errors: those of the storage.
fn flush(disk: &Disk) -> Result<(), Failure> {
    let failed = |what: String| {
        Failure::new(
            Exit::Storage,
            format!("the last flush failed ({what}): recent writes may be lost"),
        )
    };
    let mut runtime = Runtime::new(Config::default()).map_err(|error| failed(error.to_string()))?;
    let ring = runtime.ring().clone();
    runtime.block_on(disk.close(&ring)).map_err(|errno| failed(errno.to_string()))
}

/// Takes everything away that serving does not need. Gives what is in force, in words.
///
/// * `removed`: files that go at the end.
/// * `notify`: the helper process speaks to the service manager from then on.
///
/// Errors: those of [`Decision::enter`].
fn confine_to(
    confinement: ringdisk_sandbox::Plan,
    plan: &Plan<'_>,
    disk: &Disk,
    served: &Served,
    removed: Vec<helper::Named>,
    (notify, kept): (&Notify, Option<&Kept>),
    user: &mut Decision,
) -> Result<Option<String>, Failure> {
    let mount = served.connection().map(|connection| (plan.mountpoint.clone(), connection));
    let directories = plan.directories(disk);
    let maker = user.user();
    let mark = plan.mark.clone();
    let images = confine::images_of(disk, None);
    let tasks =
        Tasks { mount, files: removed, directories, maker, mark, images, ..Tasks::default() };
    let there = kept.map_or(Ok(None), Kept::ask_for_help);
    let helper = there.and_then(|there| helper::ours::start(&tasks, there));
    let confinement = match helper {
        Ok(remover) => {
            served.remove_through(remover);
            notify.leave_to_helper(helper::say);
            confinement
        }
        Err(error) => {
            user.stay(&format!("nobody outside could remove the mount: {error}"))?;
            let keep = Keep(Keep::default().0 | CapabilitySet::SYS_ADMIN);
            let why = format!("no landlock, since nobody outside could remove the mount: {error}");
            confinement.without_files(why).calls(Calls::unmounting()).keep(keep)
        }
    };
    user.enter(plan.sandbox_word(), confinement, false)
}

/// Says who uses the mount when a stop has to wait for them.
///
/// * `limit`: how long it waits at most.
/// * `alive`: the lock of the file below the mount. Who waits for it there waits for the next mount
///   from then on.
fn watch_users(
    served: &Served,
    plan: &Plan<'_>,
    limit: Option<Duration>,
    stopping: &Arc<Stopping>,
    notify: &Arc<Notify>,
    alive: Option<Arc<fs::File>>,
) {
    let most = limit.map_or_else(String::new, |limit| format!(" ({limit:?} at most)"));
    let place = served.connection().map(|number| Place::of(&plan.mountpoint, number));
    let shown = shell_word(&plan.mountpoint.display().to_string());
    let (stopping, notify) = (Arc::clone(stopping), Arc::clone(notify));
    served.watch_users(move |open_files| {
        let found = helper::users().or_else(|| place.as_ref().map(mount_users::look));
        let text = found.unwrap_or_default().text(Some(open_files));
        terminal::warn(format_args!(
            "{shown} is in use by {text}: it goes on without its name until they have closed it{most}, and then ends; \
             a second signal, or `ringdisk ctl {shown} stop --force`, ends it at once, and what they have not written yet is lost"
        ));
        notify.in_use(&format!("stopping; still in use by {text}"));
        if let Some(alive) = &alive {
            mount_lock::release(alive);
        }
        stopping.wait_for(text);
    });
}

/// Makes the control socket; gives its names. Without one the mount serves all the same.
fn control(
    plan: &Plan<'_>,
    served: &Served,
    commands: &Arc<DiskControl>,
    word: Confinement,
) -> Option<(Server, Vec<helper::Named>)> {
    let start = || -> Result<_, Failure> {
        // Also of a mount that has left the tree, when this process goes on with it.
        let number = served.connection();
        let number = number.ok_or_else(|| Failure::new(Exit::Mountpoint, "the mount is gone"))?;
        let cannot = |error| Failure::system("no control socket", &error, Exit::General);
        let mut listening =
            registry::listen(&registry::name_of_mount((0, number))).map_err(cannot)?;
        listening.add_name(&registry::name_of_path(&plan.mountpoint));
        let named = listening.all_named();
        let restricted = confine::is_wanted(word);
        let server = Server::start(listening, Arc::clone(commands), restricted).map_err(cannot)?;
        Ok((server, named))
    };
    match start() {
        Ok(started) => Some(started),
        Err(failure) => {
            tracing::warn!("`ringdisk ctl` cannot be used: {}", failure.message());
            None
        }
    }
}

/// Takes signals while nothing is mounted: a stop removes what was made and ends the process.
///
/// * `has_holder`: another process keeps the mount, and passes signals on.
fn watch_start(made: &Made, has_holder: bool) -> Result<Watcher, Failure> {
    let made = made.clone();
    let quit = move |signal: &'static str| {
        made.undo();
        terminal::say_error(format_args!(
            "{}: stopped by {signal} before the mount was ready",
            terminal::NAME
        ));
        std::process::exit(i32::from(Exit::General.code()));
    };
    start_watcher(Phase::Starting(Box::new(quit)), has_holder)
        .map_err(|error| Failure::system("cannot watch for signals", &error, Exit::General))
}

/// Takes signals from the start of a process that goes on with a mount: a stop is remembered.
fn watch_resumed(has_holder: bool) -> Result<Watcher, Failure> {
    start_watcher(Phase::Mounting, has_holder)
        .map_err(|error| Failure::system("cannot watch for signals", &error, Exit::General))
}

fn start_watcher(phase: Phase, has_holder: bool) -> std::io::Result<Watcher> {
    if has_holder { Watcher::start_kept(phase) } else { Watcher::start(phase) }
}

/// On a terminal: what is ready, what to try, how to stop.
fn greet(plan: &Plan<'_>, ready: &str) {
    let file = shell_word(&plan.mountpoint_shown);
    let (program, what) = match plan.image.image {
        Some(_) => (format!("fdisk -l {file}"), "see its partitions"),
        None => (format!("dd if={file} of=/dev/null bs=1M count=1000 iflag=direct"), "measure it"),
    };
    terminal::say(bold(ready));
    terminal::say(format_args!("  {what}: {program}"));
    terminal::say(format_args!("  stop: Ctrl-C here, or `ringdisk umount {file}` anywhere"));
}

/// Files that we made and may have to remove. Shared with the signal thread until the mount is
/// there.
#[derive(Clone, Default)]
struct Made {
    /// The image, and its data file if it has one.
    images: NewFiles,
    files: Arc<Mutex<MadeFiles>>,
}

#[derive(Default)]
struct MadeFiles {
    mountpoint: Option<NewFile>,
}

impl Made {
    /// Makes the mountpoint when there is none.
    fn mountpoint(&self, path: &Path) -> Result<(), Failure> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let made = NewFile::make_there(path, 0o600).map_err(|error| {
            let doing = format!("cannot make the mountpoint '{}'", path.display());
            Failure::system(doing, &error, Exit::Mountpoint)
        })?;
        files.mountpoint = made;
        Ok(())
    }

    /// The mountpoint that a process before this one has made.
    fn adopt(&self, path: &Path, id: Option<(u64, u64)>) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint = id.map(|id| NewFile::adopt(path, id));
    }

    /// Device and inode number of the mountpoint, if we made it.
    fn mountpoint_id(&self) -> Option<(u64, u64)> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint.as_ref().map(NewFile::id)
    }

    /// From now on the image is the user's.
    fn keep_image(&self) {
        self.images.keep();
    }

    /// Removes what was made.
    fn undo(&self) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.mountpoint = None;
        self.images.undo();
    }
}
