//! Disks that are served to NBD clients: announcement, confinement of the process, and end.
//!
//! Promises: no word of a client is read before the process is confined. The image of a disk is
//! free before clients of its control socket hear of the end. Main thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::{DiskControl, NbdPlace, ServedAs};
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper;
use ringdisk_daemon::keep::jobs::KeptJobs;
use ringdisk_daemon::keep::succession::Succession;
use ringdisk_daemon::log_target;
use ringdisk_daemon::notify::{Notify, Word};
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_daemon::signals::{Actions, Phase, Watcher};
use ringdisk_daemon::sockets::MadeSocket;
use ringdisk_daemon::stopping::Stop;
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{ClientView, DiskToHandOver, SuccessorSocket};
use ringdisk_disk::Disk;
use ringdisk_nbd::NamedDisk;

use super::addresses::Listening;
use super::export::{Handle, Served};
use super::exports::as_name;
use super::request::Request;
use super::start::{Begun, KeptDisk};
use crate::hand_over::{complain_of, handed_over};
use crate::keep::Kept;
use crate::observers::Observers;
use crate::open::ImagePlan;
use crate::privileges::{self, Inside};
use crate::start::{control, say_why};

/// One disk that is served.
struct Running {
    /// Of its image, for messages.
    name: String,
    ready: String,
    allowed: Vec<PathBuf>,
    reach: Reach,
    disk: Arc<Disk>,
    commands: Arc<DiskControl>,
    control: Option<(Server, helper::Named)>,
}

/// Disks that are served. The fields are dropped in the order in which others rely on them.
pub(super) struct Serving<'a> {
    request: &'a Request,
    observers: Observers,
    running: Vec<Running>,
    served: Served,
    listening: Listening,
    watcher: Watcher,
    kept: Option<Kept>,
    /// A process before this one was killed.
    is_resumed: bool,
    /// What keeps each disk for the next process.
    keepers: Vec<KeptDisk>,
    /// For the process that takes the disks over.
    successor: Option<SuccessorSocket>,
}

impl<'a> Serving<'a> {
    /// Makes the pid file and what others watch the disks by.
    ///
    /// * `view`: what clients see of all disks.
    /// * `kept`: the process that holds the disks, and whether one before this was killed.
    ///
    /// Errors: one of these cannot be made.
    pub(super) fn attend(
        request: &'a Request,
        begun: Begun,
        view: ClientView,
        watcher: Watcher,
        kept: Option<(Kept, bool)>,
        pidfile: Option<&Path>,
    ) -> Result<Serving<'a>, Failure> {
        let handle = begun.served.handle();
        let (kept, is_resumed) = kept.map_or((None, false), |(kept, is)| (Some(kept), is));
        let Attended { running, keepers, listening, served, right } =
            attend_all(request, begun, &handle);
        let successor = successor(&listening, &served, view, &running, right);
        let (metrics, is_upgrade) = (&request.metrics, request.upgrade);
        let commands: Vec<_> = running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
        // All disks have the same queue threads.
        let observers = Observers::make(kept.as_ref(), pidfile, metrics, is_upgrade, commands, 1)?;
        Ok(Serving {
            request,
            observers,
            running,
            served,
            listening,
            watcher,
            kept,
            is_resumed,
            keepers,
            successor,
        })
    }

    /// Confines the process to what serving needs; then listens to clients.
    ///
    /// * `user`: the user that the process becomes.
    ///
    /// Errors: as [`privileges::give_up`].
    pub(super) fn confine(&mut self, user: Wanted) -> Result<(), Failure> {
        let each = self.running.iter().enumerate();
        let mut inside: Vec<Inside<'_>> =
            each.map(|(number, disk)| disk.inside(number, &self.listening)).collect();
        if let Some(first) = inside.first_mut() {
            first.names.extend(self.observers.metrics.named());
            first.names.extend(self.successor.as_ref().map(SuccessorSocket::named));
        }
        let (word, upgrade) = (self.request.sandbox, self.request.upgrade);
        let mark = self.kept.as_ref().map(|kept| kept.mark.clone()).unwrap_or_default();
        let Observers { pidfile, notify, .. } = &self.observers;
        privileges::give_up(word, user, &inside, pidfile.as_ref(), notify, upgrade, mark)?;
        // Messages of clients are read inside the sandbox only; those that were taken over are
        // served already.
        self.served.release();
        Ok(())
    }

    /// Says that the disks answer: to the service manager, the user, and the process that waits for
    /// that in the foreground.
    pub(super) fn announce(&self, background: Option<Background>) {
        let ready = match self.running.as_slice() {
            [only] => only.ready.clone(),
            several => format!("{} disks are served over NBD", several.len()),
        };
        self.observers.notify.ready(&ready);
        if self.is_resumed {
            terminal::note(format_args!("{ready}, again: clients have to connect anew"));
        } else if !self.request.is_quiet {
            announce(&self.running, &self.listening, background.is_some());
        }
        match background {
            Some(background) if self.request.keeps_output => background.ready_here(),
            Some(background) => background.ready(),
            None if self.kept.is_some() && self.request.daemonize => background::let_go(),
            None => log_target::begin(),
        }
        if let Some(kept) = &self.kept {
            kept.watch_parent("the disks");
        }
    }

    /// Serves until the end. Gives the exit code.
    ///
    /// Errors: why the disks have ended, if nobody asked for that.
    pub(super) fn wait(self) -> Result<u8, Failure> {
        let Serving { observers, running, served, watcher, listening, successor, .. } = self;
        let Observers { notify, pidfile, metrics, watchdog: _watchdog, answering } = observers;
        let handle = served.handle();
        terminal::serves();
        if let Some(signal) = watcher.enter(Phase::Serving(actions(&running, &handle, &notify))) {
            notify.stopping(&format!("stopping on {signal}"));
            handle.stop();
        }
        let fault = || running.iter().find_map(|disk| disk.disk.fault());
        let result = served.wait(fault);
        if self.request.stats {
            print(&handle, running.iter().map(|disk| &*disk.disk));
        }
        watcher.enter(Phase::Ending);
        let given = successor.as_ref().map(SuccessorSocket::was_given);
        let was_given = given.is_some_and(|given| given.load(Ordering::Acquire));
        if was_given {
            running.iter().for_each(|disk| handed_over(&disk.disk, &disk.name));
            // They are the names of the other process now, which speaks to the service manager.
            listening.made.into_iter().for_each(MadeSocket::leave);
        } else {
            say_why(&notify, &watcher, result.as_ref().err());
            drop(listening.made);
        }
        drop(answering);
        drop(metrics);
        for disk in running {
            // The image is free before clients of the control socket hear of the end.
            disk.commands.end(&result);
            disk.commands.let_go();
            drop(disk.disk);
            drop(disk.control);
        }
        match was_given {
            true => self.keepers.into_iter().for_each(KeptDisk::leave),
            false => drop(self.keepers),
        }
        if was_given {
            let successor = successor.and_then(|successor| match handle.is_stopped() {
                true => successor.end_with_stop(Stop::Clean),
                false => successor.end(),
            });
            // It gets the pid file, too, which is free when this process has ended, and the helper
            // process that has kept the disks.
            std::mem::forget(successor);
            if self.kept.is_some() {
                notify.say(Word::HandedOver, "another process serves the disks");
            }
            pidfile.into_iter().for_each(Pidfile::leave);
            return result.map(|()| Exit::Clean.code());
        }
        drop(pidfile);
        result.map(|()| Exit::Clean.code())
    }
}

/// Disks whose control sockets are there.
struct Attended {
    running: Vec<Running>,
    keepers: Vec<KeptDisk>,
    listening: Listening,
    served: Served,
    /// To go on with the disks, for a process that takes them over.
    right: Option<Succession>,
}

/// Makes the control sockets of all disks, when a process before this one has let go of the names.
fn attend_all(request: &Request, mut begun: Begun, handle: &Handle) -> Attended {
    begun.let_go(request, handle);
    let restricted = confine::is_wanted(request.sandbox);
    let Begun { plans, disks, listening, served, mut jobs, kept, right, .. } = begun;
    let is_only = disks.len() == 1;
    jobs.resize_with(disks.len(), Vec::new);
    let (mut kept, mut keepers) = (kept.into_iter(), Vec::new());
    let each = plans.iter().zip(disks).zip(jobs);
    let running = each
        .map(|((plan, named), jobs)| {
            let path = listening.target().map(|path| control_path(&path, is_only, &named.name));
            let mut keeper = kept.next();
            let jobs = (jobs, keeper.as_mut().and_then(|keeper| keeper.jobs.take()));
            keepers.extend(keeper);
            attend(plan, named, handle, (path, restricted), &listening.display_names, jobs)
        })
        .collect();
    Attended { running, keepers, listening, served, right }
}

impl Begun {
    /// Waits until the process before has let go of the names, which are ours then.
    fn let_go(&mut self, request: &Request, handle: &Handle) {
        let Some(predecessor) = &mut self.predecessor else { return };
        if let Some(lingering) = predecessor.wait(Instant::now()) {
            for (plan, named) in self.plans.iter().zip(&self.disks) {
                complain_of(&lingering, &named.disk, &plan.name());
            }
        }
        if predecessor.stop().is_some() {
            handle.stop();
        }
        self.listening.adopt(request);
    }
}

/// Waits for a process that takes the disks over. Without one they are served all the same.
fn successor(
    listening: &Listening,
    served: &Served,
    view: ClientView,
    running: &[Running],
    right: Option<Succession>,
) -> Option<SuccessorSocket> {
    let name = registry::name_for_successor(&listening.target()?);
    let given = view.split().zip(running);
    let given: Vec<DiskToHandOver> =
        given.map(|(view, it)| DiskToHandOver::new(view, &it.disk, it.commands.jobs())).collect();
    let started = SuccessorSocket::start(&name, served.hand_over_handle(), given, right);
    started.inspect_err(|error| tracing::warn!("`--upgrade` cannot be used: {error}")).ok()
}

/// What `ringdisk ctl` finds a disk by.
fn control_path(socket: &Path, is_only: bool, name: &str) -> PathBuf {
    if is_only { socket.to_owned() } else { socket.join(name) }
}

/// Makes the control socket of a disk.
fn attend(
    plan: &ImagePlan,
    named: NamedDisk,
    handle: &Handle,
    (path, restricted): (Option<PathBuf>, bool),
    addresses: &[String],
    (jobs, keeper): (Vec<HandedJob>, Option<KeptJobs>),
) -> Running {
    let stop = handle.clone();
    let commands = DiskControl::new(Arc::clone(&named.disk), handle.clone(), move |_| stop.stop());
    let place = NbdPlace { addresses: addresses.to_vec(), export: named.name.clone() };
    let commands = commands.served_as(ServedAs::Nbd { target: path.clone(), place });
    let mut commands = commands.confined_later(restricted).takes_up(jobs);
    if let Some(keeper) = keeper {
        commands = commands.keeps_jobs_at(keeper);
    }
    let commands = Arc::new(commands);
    let name = as_name(&named.name);
    let described = plan.describe(&named.disk);
    Running {
        name: plan.name(),
        ready: format!("{described} is served over NBD{name} {}", addresses.join(", ")),
        allowed: plan.request.allow_path.clone(),
        reach: plan.reach(),
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

/// The actions of signals.
fn actions(running: &[Running], handle: &Handle, notify: &Arc<Notify>) -> Actions {
    let commands: Vec<Arc<DiskControl>> =
        running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
    // Weak: an image is closed as soon as its disk has ended.
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
