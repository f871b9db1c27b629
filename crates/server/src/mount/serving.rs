//! A mount that is served: announcement, confinement of the process, and end.
//!
//! Promises: a failure of a step ends the mount, with errors to clients that are there already, and
//! removes what was made. At the end names and locks go in the order in which others rely on them.
//! Main thread.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::confine;
use ringdisk_daemon::control::disk::{DiskControl, ServedAs};
use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::{self, Tasks};
use ringdisk_daemon::keep::Kept;
use ringdisk_daemon::log_target;
use ringdisk_daemon::metrics::MetricsServer;
use ringdisk_daemon::mount_lock;
use ringdisk_daemon::notify::{Notify, Word};
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::Decision;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::stopping::{Insist, Stop, Stopping};
use ringdisk_daemon::terminal::{self, bold, shell_word};
use ringdisk_daemon::upgrade::mount::{ManagerKeeps, MountToHandOver};
use ringdisk_daemon::upgrade::{DiskToHandOver, Predecessor, SuccessorSocket};
use ringdisk_daemon::watchdog::Watchdog;
use ringdisk_disk::{Disk, Format};
use ringdisk_sandbox::{Calls, CapabilitySet, Keep};

use super::created_files::Made;
use super::export::{Handle, Served};
use super::plan::Plan;
use super::request::Request;
use super::{signals, users};
use crate::hand_over::{complain_of, handed_over};
use crate::keep::keep_changes;
use crate::metrics::MetricsSockets;

/// A mount that ends when this is dropped, also while clients use it.
pub(super) struct Answering {
    served: Option<Served>,
    disk: Arc<Disk>,
}

impl Answering {
    pub(super) fn new(served: Served, disk: Arc<Disk>) -> Answering {
        Answering { served: Some(served), disk }
    }

    /// The export; an error once it has ended.
    fn served(&mut self) -> Result<&mut Served, Failure> {
        self.served.as_mut().ok_or_else(|| Failure::new(Exit::Halted, "the mount has ended"))
    }

    /// Ends the mount now.
    fn end(&mut self) {
        if let Some(served) = self.served.take() {
            served.handle().force();
            let _ = served.wait(&self.disk);
        }
    }

    /// Waits for its end.
    ///
    /// Errors: as [`Served::wait`].
    fn wait(&mut self) -> Result<(), Failure> {
        self.served.take().map_or(Ok(()), |served| served.wait(&self.disk))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.end();
    }
}

/// The control socket and the other ways in which users and programs control the mount. Dropping it
/// disconnects them.
pub(super) struct Control {
    commands: Arc<DiskControl>,
    server: Option<Server>,
    /// Names of the control socket, which are removed at the end.
    names: Vec<helper::Named>,
    /// Waits for a successor.
    successor: Option<SuccessorSocket>,
    /// Answers requests of Prometheus.
    metrics: Option<MetricsServer>,
    /// Reports to the service manager that the queue threads answer.
    watchdog: Option<Watchdog>,
}

/// A mount that answers.
pub(super) struct Serving<'a> {
    request: &'a Request,
    plan: Plan<'a>,
    watcher: Watcher,
    answering: Answering,
    handle: Handle,
    disk: Arc<Disk>,
    made: Made,
    pidfile: Option<Pidfile>,
    kept: Option<Kept>,
    /// Format of an image that was made at the start.
    created: Option<Format>,
    /// The lock of the file below the mount.
    lock: Option<Arc<File>>,
    /// How long a stop waits for users.
    stop_timeout: Option<Duration>,
    notify: Arc<Notify>,
    stopping: Arc<Stopping>,
    metrics: MetricsSockets,
    /// Jobs that the process before this one has begun.
    jobs: Vec<HandedJob>,
}

impl<'a> Serving<'a> {
    #[allow(clippy::too_many_arguments)] // The fields of a start, once.
    pub(super) fn new(
        request: &'a Request,
        plan: Plan<'a>,
        watcher: Watcher,
        (answering, handle): (Answering, Handle),
        made: Made,
        kept: Option<Kept>,
        created: Option<Format>,
        lock: Option<Arc<File>>,
        stop_timeout: Option<Duration>,
    ) -> Serving<'a> {
        let notify = match &kept {
            Some(kept) => Arc::clone(&kept.notify),
            None => Arc::new(Notify::from_environment()),
        };
        let (disk, stopping) = (Arc::clone(&answering.disk), Arc::default());
        Serving {
            request,
            plan,
            watcher,
            answering,
            handle,
            disk,
            made,
            pidfile: None,
            kept,
            created,
            lock,
            stop_timeout,
            notify,
            stopping,
            metrics: MetricsSockets::default(),
            jobs: Vec::new(),
        }
    }

    /// Serves metrics over these sockets.
    pub(super) fn with_metrics(self, metrics: MetricsSockets) -> Serving<'a> {
        Serving { metrics, ..self }
    }

    /// Gives the descriptors of a new mount to the process that keeps it. When this returns, this
    /// process may be killed.
    ///
    /// Errors: it is not taken; the mount has ended then.
    pub(super) fn park(&mut self) -> Result<(), Failure> {
        let Some(mut kept) = self.kept.take() else { return Ok(()) };
        let parked = self.park_with(&mut kept);
        if parked.is_err() {
            self.answering.end();
            kept.forget(self.lock.as_deref());
        }
        self.kept = Some(kept);
        parked
    }

    fn park_with(&mut self, kept: &mut Kept) -> Result<(), Failure> {
        keep_changes(&self.disk, kept.state_file(), self.plan.may_be_top());
        let parked = self.answering.served()?.take_parked();
        let Some(parked) = parked.filter(|_| kept.resumed().is_none()) else { return Ok(()) };
        let made = (self.made.mountpoint_id(), self.created);
        let state = self.plan.state(&self.disk, &parked, made);
        kept.park(&parked, state, self.lock.as_deref(), false)
    }

    /// Waits until the process before this one has let go of the mount.
    pub(super) fn succeed(&mut self, mut predecessor: Predecessor) {
        self.jobs = predecessor.take_jobs(0);
        if let Some(lingering) = predecessor.wait(Instant::now()) {
            complain_of(&lingering, &self.disk, &self.plan.image.name());
        }
        match predecessor.stop() {
            Some(Stop::AtOnce) => self.handle.force(),
            Some(Stop::Clean) => self.handle.stop(),
            None => {}
        }
    }

    /// Makes the pid file.
    ///
    /// Errors: as [`Pidfile::create`].
    pub(super) fn make_pidfile(&mut self) -> Result<(), Failure> {
        let pidfile = self.plan.pidfile.as_deref();
        self.pidfile = Pidfile::create_for(pidfile, self.plan.is_taken)?;
        Ok(())
    }

    /// Watches for users when the mount is to stop, and makes the control socket.
    ///
    /// Errors: the mount has ended.
    pub(super) fn attend(&mut self) -> Result<Control, Failure> {
        let mut jobs = std::mem::take(&mut self.jobs);
        let kept_jobs = self.kept.as_mut().map(Kept::jobs);
        let served = self.answering.served()?;
        let (limit, lock) = (self.stop_timeout, self.lock.clone());
        users::watch(served, &self.plan, limit, &self.stopping, &self.notify, lock);
        let connection = served.connection();
        if let Some(number) = connection {
            self.disk.set_mounted_on(rustix::fs::makedev(0, number));
        }
        let (handle, notify) = (self.handle.clone(), Arc::clone(&self.notify));
        let stop = move |at_once: bool| {
            notify.stopping("stopping on request");
            if at_once { handle.force() } else { handle.stop() }
        };
        let commands = DiskControl::new(Arc::clone(&self.disk), self.handle.clone(), stop);
        let mountpoint = self.plan.mountpoint.clone();
        let commands = commands.served_as(ServedAs::Mount { mountpoint, connection });
        let commands = commands.in_stages(Arc::clone(&self.stopping));
        let is_confined_later = confine::is_wanted(self.request.sandbox);
        let mut commands = commands.confined_later(is_confined_later);
        if let Some((keeper, found)) = kept_jobs {
            jobs.extend(found);
            commands = commands.keeps_jobs_at(keeper);
        }
        let commands = commands.takes_up(jobs);
        let commands = Arc::new(commands);
        let (server, mut names) = match self.listen(connection, &commands) {
            Ok((server, names)) => (Some(server), names),
            Err(failure) => {
                // The mount serves all the same.
                tracing::warn!("`ringdisk ctl` cannot be used: {}", failure.message());
                commands.lose_jobs();
                (None, Vec::new())
            }
        };
        let successor = connection.and_then(|number| self.wait_for_successor(number, &commands));
        names.extend(successor.as_ref().map(SuccessorSocket::named));
        let metrics = self.metrics.start(vec![Arc::clone(&commands)]);
        let metrics = metrics.or_else(|why| self.complain_if_taken(Err(why)).map(|()| None))?;
        names.extend(self.metrics.named());
        let watchdog = Watchdog::start(&self.notify, &[Arc::clone(&commands)]);
        Ok(Control { commands, server, names, successor, metrics, watchdog })
    }

    /// Waits for a process that takes the mount over (`--upgrade`).
    ///
    /// * `connection`: number of the connection.
    /// * `commands`: whose jobs go along.
    fn wait_for_successor(
        &self,
        connection: u32,
        commands: &DiskControl,
    ) -> Option<SuccessorSocket> {
        let mount = MountToHandOver {
            handle: self.answering.served.as_ref()?.hand_over_handle(),
            made: self.made.mountpoint_id(),
            created: self.created,
            lock: self.lock.clone(),
        };
        let name = registry::name_for_successor_of_mount((0, connection));
        let given = vec![DiskToHandOver::new(self.plan.client_view(), &self.disk, commands.jobs())];
        let right = self.kept.as_ref().map_or(Ok(None), Kept::right);
        let socket = right.and_then(|right| match &self.kept {
            Some(kept) if !kept.has_supervisor() => {
                SuccessorSocket::start(&name, ManagerKeeps, given, None)
            }
            _ => SuccessorSocket::start(&name, mount, given, right),
        });
        socket.inspect_err(|error| tracing::warn!("`--upgrade` cannot be used: {error}")).ok()
    }

    /// Makes the control socket; gives its names.
    ///
    /// Errors: no socket.
    fn listen(
        &self,
        connection: Option<u32>,
        commands: &Arc<DiskControl>,
    ) -> Result<(Server, Vec<helper::Named>), Failure> {
        // Also of a mount that has left the tree, when this process goes on with it.
        let number =
            connection.ok_or_else(|| Failure::new(Exit::Mountpoint, "the mount is gone"))?;
        let cannot = |error| Failure::system("no control socket", &error, Exit::General);
        let name = registry::name_of_mount((0, number));
        let mut listening = registry::listen(&name).map_err(cannot)?;
        listening.add_name(&registry::name_of_path(&self.plan.mountpoint));
        let named = listening.all_named();
        let restricted = confine::is_wanted(self.request.sandbox);
        let server = Server::start(listening, Arc::clone(commands), restricted).map_err(cannot)?;
        Ok((server, named))
    }

    /// Confines the process to what serving needs, and gives up root's capabilities.
    ///
    /// * `user`: the user that the process becomes.
    ///
    /// Errors: those of [`Decision::enter`].
    pub(super) fn confine(&mut self, user: Decision, control: &Control) -> Result<(), Failure> {
        if !confine::is_wanted(self.request.sandbox) && !user.is_change() {
            return Ok(());
        }
        let mut user = user;
        let confinement = self.get_helper(&mut user, &control.names)?;
        let is_taken = self.plan.is_taken;
        if let Some(in_force) = user.enter(self.plan.sandbox_word(), confinement, is_taken)? {
            control.commands.confined(in_force);
        }
        if let Some(user) = user.name() {
            control.commands.runs_as(user);
        }
        Ok(())
    }

    /// Gets a helper process for what a confined process may not do. Returns the plan of the
    /// sandbox, which is wider where there is no helper process.
    ///
    /// * `control_names`: of the control socket.
    ///
    /// Errors: without a helper the process cannot become the user that was named.
    fn get_helper(
        &mut self,
        user: &mut Decision,
        control_names: &[helper::Named],
    ) -> Result<ringdisk_sandbox::Plan, Failure> {
        let confinement = self.plan.confinement(&self.disk);
        let mountpoint = &self.plan.mountpoint;
        let mut files = control_names.to_vec();
        files.extend(self.made.mountpoint_id().map(|id| (mountpoint.clone(), id)));
        files.extend(self.pidfile.as_ref().and_then(Pidfile::identity));
        let served = self.answering.served()?;
        let tasks = Tasks {
            mount: served.connection().map(|connection| (mountpoint.clone(), connection)),
            files,
            servers: confine::servers_of(&self.disk),
            directories: self.plan.directories(&self.disk),
            trees: self.plan.trees(&self.disk),
            maker: user.user(),
            mark: self.plan.mark.clone(),
            images: self.plan.images(&self.disk),
            ..Tasks::default()
        };
        match helper::current::start(&tasks) {
            Ok(remover) => {
                served.remove_through(remover);
                self.notify.leave_to_helper(helper::say);
                Ok(confinement)
            }
            Err(error) => {
                let stays = user.stay(&format!("nobody outside could remove the mount: {error}"));
                self.complain_if_taken(stays)?;
                let keep = Keep(Keep::default().0 | CapabilitySet::SYS_ADMIN);
                let why =
                    format!("no landlock, since nobody outside could remove the mount: {error}");
                Ok(confinement.without_files(why).calls(Calls::unmounting()).keep(keep))
            }
        }
    }

    /// Of a mount that was taken over a failure is only logged: its users have no other server.
    ///
    /// Errors: that failure, of another mount.
    fn complain_if_taken(&self, result: Result<(), Failure>) -> Result<(), Failure> {
        match result {
            Err(failure) if self.plan.is_taken => {
                terminal::complain(&failure.context("the mount is served all the same"));
                Ok(())
            }
            result => result,
        }
    }

    /// Says that the mount answers: to the service manager, the user, and the process that waits
    /// for that in the foreground.
    ///
    /// Errors: the mount has ended.
    pub(super) fn announce(&mut self, background: Option<Background>) -> Result<(), Failure> {
        let ready = self.plan.ready_line(&self.disk);
        tracing::info!("requests travel over {}", self.answering.served()?.transport());
        self.notify.ready(&ready);
        let has_supervisor = self.kept.as_ref().is_some_and(Kept::has_supervisor);
        if has_supervisor && self.notify.barrier().is_err() {
            tracing::warn!("the process that keeps the mount does not answer");
        }
        if self.kept.as_ref().is_some_and(|kept| kept.resumed().is_some()) {
            terminal::note(format_args!("{ready} again: requests that were not answered go on"));
        } else if background.is_some() || self.request.daemonize {
            terminal::say(format_args!("{}: {ready}", terminal::NAME));
        } else if !terminal::is_interactive() {
            let file = shell_word(&self.plan.mountpoint_name);
            terminal::say(format_args!(
                "{}: {ready}; Ctrl-C here, or `ringdisk umount {file}`, ends it",
                terminal::NAME
            ));
        } else {
            greet(&self.plan, &ready);
        }
        match background {
            Some(background) => background.ready(),
            // The helper process that keeps the mount is in the background; so is this process.
            None if self.kept.is_some() && self.request.daemonize => background::let_go(),
            None => log_target::begin(),
        }
        if let Some(kept) = &self.kept {
            let shown = shell_word(&self.plan.mountpoint_name);
            kept.watch(move || {
                tracing::error!(
                    "the process that keeps the mount is gone: this one goes on, and nothing would \
                     go on after it; `ringdisk umount {shown}` ends the mount, which is removed by \
                     nothing else"
                );
            });
        }
        Ok(())
    }

    /// Serves until the end. Gives the exit code.
    ///
    /// Errors: why the mount ended, if nobody asked for that; what went wrong at the end.
    pub(super) fn wait(mut self, control: Control) -> Result<u8, Failure> {
        let has_supervisor = self.kept.as_ref().is_some_and(Kept::has_supervisor);
        let insist = Arc::new(Insist::default());
        let Control { commands, server, names: _, successor, metrics, watchdog: _watchdog } =
            control;
        let actions = signals::actions(
            &self.handle,
            &self.disk,
            &self.notify,
            Arc::clone(&commands),
            Arc::clone(&insist),
            has_supervisor,
        );
        terminal::serves();
        if let Some(signal) = self.watcher.enter(Phase::Serving(actions)) {
            insist.count(false);
            self.notify.stopping(&format!("stopping on {signal}"));
            self.handle.stop();
        }
        let result = self.answering.wait();
        drop(metrics);
        commands.end(&result);
        drop(commands);
        self.stopping.end();
        self.watcher.enter(Phase::Ending);
        let is_taken = |it: &SuccessorSocket| it.was_given().load(Ordering::Acquire);
        let is_handed_over = successor.as_ref().is_some_and(is_taken);
        if !is_handed_over {
            self.say_why(&result);
        }
        if self.request.stats {
            let stats = self.handle.stats();
            let fault = self.disk.fault();
            terminal::say_error(stats.with_layers(&self.disk.layers(), fault.as_deref()));
        }
        match successor.filter(|_| is_handed_over) {
            Some(successor) => self.leave(server, successor),
            None => self.let_go(server),
        }
        result.map(|()| Exit::Clean.code())
    }

    /// Tells the service manager why the mount has ended.
    fn say_why(&self, result: &Result<(), Failure>) {
        let why = match (result, self.watcher.stopped_by()) {
            (Err(failure), _) => failure.message().to_owned(),
            (Ok(()), Some(signal)) => format!("stopped by {signal}"),
            (Ok(()), None) => String::from("unmounted"),
        };
        match self.watcher.stopped_by() {
            Some(_) => self.notify.status(&why),
            None => self.notify.stopping(&why),
        }
    }

    /// Leaves the mount to the successor, which serves it now.
    fn leave(self, server: Option<Server>, successor: SuccessorSocket) {
        // Signals and commands that came during the hand-over had no effect here.
        let signal = self.watcher.stopped_by().map(|_| Stop::Clean);
        let stop = self.handle.asked().max(signal);
        let Serving { plan, answering, disk, made, pidfile, .. } = self;
        handed_over(&disk, &plan.image.name());
        made.leave();
        if self.kept.is_some() {
            self.notify.say(Word::HandedOver, "another process serves the mount");
        }
        drop(server);
        drop(answering);
        drop(disk);
        if let Some(pidfile) = pidfile {
            pidfile.leave();
        }
        helper::leave();
        // The successor gets the pid file, too, which is free when this process has ended.
        let stream = match stop {
            Some(stop) => successor.end_with_stop(stop),
            None => successor.end(),
        };
        std::mem::forget(stream);
    }

    /// Closes and removes everything, in the order in which others rely on it.
    fn let_go(self, server: Option<Server>) {
        let Serving { answering, disk, made, pidfile, kept, lock, .. } = self;
        // Clients of the control socket are sent away before anything that they may use goes.
        drop(server);
        // The image's lock goes before the names that others watch.
        drop(answering);
        drop(disk);
        drop(made);
        drop(pidfile);
        if let Some(kept) = &kept {
            kept.forget(lock.as_deref());
        }
        if let Some(lock) = &lock {
            mount_lock::release(lock);
        }
        helper::leave();
    }
}

/// On a terminal: what is ready, what to try, how to stop.
fn greet(plan: &Plan<'_>, ready: &str) {
    let file = shell_word(&plan.mountpoint_name);
    let (program, what) = match plan.image.image {
        Some(_) => (format!("fdisk -l {file}"), "see its partitions"),
        None => (format!("dd if={file} of=/dev/null bs=1M count=1000 iflag=direct"), "measure it"),
    };
    terminal::say(bold(ready));
    terminal::say(format_args!("  {what}: {program}"));
    terminal::say(format_args!("  stop: Ctrl-C here, or `ringdisk umount {file}` anywhere"));
}
