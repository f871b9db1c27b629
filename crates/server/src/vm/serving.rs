//! Disks of virtual machines that are served: announcement, confinement of the process, and end.
//!
//! Promises: what front ends say is read inside the sandbox only. A disk that was taken over has
//! guests that depend on it already, so what fails here is complained of and does not end it. Main
//! thread.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_daemon::background::{self, Background};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::log_target;
use ringdisk_daemon::notify::Word;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::SuccessorSocket;

use super::nbd_export::{Attended, NbdExport};
use super::ready_text;
use super::request::Request;
use super::shutdown::{actions, wait};
use super::{Running, Started};
use crate::keep::Kept;
use crate::observers::Observers;
use crate::privileges;
use crate::start::say_why;
use crate::vhost::Handle;

/// Disks that are served. The fields are dropped in the order in which others rely on them.
pub(super) struct Serving<'a> {
    request: &'a Request,
    observers: Observers,
    beside: Option<NbdExport>,
    running: Vec<Running>,
    watcher: Watcher,
    kept: Option<Kept>,
    /// A process before this one was killed.
    is_resumed: bool,
}

impl<'a> Serving<'a> {
    /// Makes the pid file and what others watch the disks by.
    ///
    /// Errors: one of these cannot be made.
    pub(super) fn attend(
        request: &'a Request,
        (running, beside): Started,
        watcher: Watcher,
        kept: Option<Kept>,
        is_resumed: bool,
        pidfile: Option<&Path>,
    ) -> Result<Serving<'a>, Failure> {
        let (metrics, is_upgrade) = (&request.metrics, request.upgrade);
        let commands: Vec<_> = running.iter().map(|disk| Arc::clone(&disk.commands)).collect();
        let threads = commands.len();
        let observers =
            Observers::make(kept.as_ref(), pidfile, metrics, is_upgrade, commands, threads)?;
        Ok(Serving { request, observers, beside, running, watcher, kept, is_resumed })
    }

    /// Confines the process to what serving needs; then listens to front ends.
    ///
    /// * `user`: the user that the process becomes.
    ///
    /// Errors: as [`privileges::give_up`].
    pub(super) fn confine(&mut self, user: Wanted) -> Result<(), Failure> {
        let mut inside = self.running.iter().map(Running::inside).collect::<Vec<_>>();
        if let Some(first) = inside.first_mut() {
            first.names.extend(self.observers.metrics.named());
            first.names.extend(self.beside.iter().flat_map(NbdExport::named));
        }
        let mark = self.kept.as_ref().map(|kept| kept.mark.clone()).unwrap_or_default();
        privileges::give_up(
            self.request.sandbox,
            user,
            &inside,
            self.observers.pidfile.as_ref(),
            &self.observers.notify,
            self.request.upgrade,
            mark,
        )?;
        // Messages of front ends are read inside the sandbox only; those that were taken over are
        // served already.
        self.running.iter().for_each(|disk| disk.served.release());
        self.beside.iter_mut().for_each(NbdExport::release);
        Ok(())
    }

    /// Says that the disks answer: to the service manager, the user, and the process that waits for
    /// that in the foreground.
    pub(super) fn announce(&self, background: Option<Background>) {
        let ready = match self.running.as_slice() {
            [only] => only.ready.clone(),
            several => format!("{} disks are served", several.len()),
        };
        self.observers.notify.ready(&ready);
        if self.is_resumed {
            terminal::note(format_args!("{ready}: requests that were not answered go on"));
        } else if background.is_some() || !terminal::is_interactive() {
            for disk in &self.running {
                terminal::say(format_args!("{}: {}", terminal::NAME, disk.ready));
            }
        } else {
            ready_text::greet(&self.running);
        }
        match background {
            Some(background) => background.ready(),
            None if self.kept.is_some() && self.request.daemonize => background::let_go(),
            None => log_target::begin(),
        }
        if let Some(kept) = &self.kept {
            kept.watch_parent("a disk");
        }
    }

    /// Serves until the end. Gives the exit code.
    ///
    /// Errors: why a disk has ended, if nobody asked for that.
    pub(super) fn wait(self) -> Result<u8, Failure> {
        let Serving { request, running, watcher, observers, .. } = self;
        let Observers {
            notify,
            pidfile,
            metrics: _metrics,
            watchdog: _watchdog,
            answering: _answering,
        } = observers;
        let handles: Vec<Handle> = running.iter().map(|disk| disk.served.handle()).collect();
        let beside = self.beside.map(|beside| beside.attend(handles.clone()));
        terminal::serves();
        if let Some(signal) = watcher.enter(Phase::Serving(actions(&running, &notify))) {
            notify.stopping(&format!("stopping on {signal}"));
            handles.iter().for_each(Handle::stop);
        }
        let given: Vec<_> = running
            .iter()
            .map(|disk| disk.successor.as_ref().map(SuccessorSocket::was_given))
            .collect();
        let result = wait(request.stats, running);
        let result = beside.map_or(Ok(()), Attended::end).and(result);
        watcher.enter(Phase::Ending);
        let is_given = |flag: &Option<Arc<AtomicBool>>| {
            flag.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire))
        };
        if given.iter().all(is_given) {
            // The other process speaks to the service manager from now on, and has the pid file as
            // soon as this one has ended, and the helper process that has kept the disks.
            if self.kept.is_some() {
                notify.say(Word::HandedOver, "another process serves the disks");
            }
            if let Some(pidfile) = pidfile {
                pidfile.leave();
            }
            return result;
        }
        say_why(&notify, &watcher, result.as_ref().err());
        drop(pidfile);
        result.map(|code| self.kept.map_or(code, |kept| kept.code(code)))
    }
}
