//! The start of a mount: a plan, the images, the mount.
//!
//! Promises: a failure, or a signal before the mount is there, leaves nothing that was made here. A
//! mount that another process left stays as it is, with the file below it, until this process has
//! taken it over.

use std::fs::File;
use std::sync::Arc;

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::keep::{Kept, State};
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::run_as::{Decision, Wanted};
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::{io_flusher, mount_lock, terminal};
use ringdisk_disk::Disk;
use ringdisk_fuse::kept::{Parked, is_over};
use ringdisk_images::new_image::NewImage;
use ringdisk_ring::Topology;

use super::cleanup::ended_meanwhile;
use super::created_files::Made;
use super::export::{self, Served};
use super::plan::Plan;
use super::request::{Paths, Request};
use super::serving::{Answering, Serving};
use super::signals::{watch_resumed, watch_start};
use crate::keep::follow_changes;
use crate::open::ImagePlan;
use crate::reopen::{FREE, FREE_STOPPED};

/// A mount before it answers.
pub(super) struct Start<'a> {
    request: &'a Request,
    plan: Plan<'a>,
    /// An image that is to be made, with the size of its disk.
    new: Option<(NewImage, u64)>,
    made: Made,
    watcher: Watcher,
    kept: Option<Kept>,
    /// The mount that a process before this one has left.
    resumed: Option<(State, Arc<Parked>)>,
}

/// What a step gives: something to go on with, or the exit code of a mount that ended while no
/// process served it.
pub(super) enum Opened<T> {
    Disk(T),
    Ended(u8),
}

impl<'a> Start<'a> {
    /// Makes a plan and takes signals from now on. Nothing is made yet.
    ///
    /// * `kept`: the mount outlives this process.
    ///
    /// Errors: options, CPUs, a mountpoint or a pid file that cannot be used.
    pub(super) fn plan(
        request: &'a Request,
        paths: Paths,
        kept: Option<Kept>,
    ) -> Result<Start<'a>, Failure> {
        let resumed = kept.as_ref().and_then(Kept::resumed);
        let mut new = None;
        if resumed.is_none() {
            new = ImagePlan::new(&request.disk, paths.image.clone()).new_image()?;
            // CPUs that cannot be used are told before anything is made.
            export::foresee(&request.placement, &Topology::read())?;
        }
        // The file may become a loop device.
        io_flusher::become_one_if(true);
        let made = Made::default();
        let has_supervisor = kept.as_ref().is_some_and(Kept::has_supervisor);
        let watcher = match resumed {
            Some(_) => watch_resumed(has_supervisor)?,
            None => watch_start(&made, has_supervisor)?,
        };
        if let Some(kept) = &kept {
            kept.listens();
        }
        let mut plan = match &resumed {
            Some((state, _)) => {
                Plan::resumed(request, paths, state, kept.as_ref().and_then(Kept::first))?
            }
            None => Plan::new(request, paths)?,
        };
        if has_supervisor {
            // It has the pid file.
            plan.pidfile = None;
        }
        if let Some(pidfile) = &plan.pidfile {
            Pidfile::check(pidfile)?;
        }
        Ok(Start { request, plan, new, made, watcher, kept, resumed })
    }

    /// Opens the images.
    ///
    /// Errors: those of the images, and as [`ended_meanwhile`].
    pub(super) fn open(&mut self) -> Result<Opened<Arc<Disk>>, Failure> {
        let opened = match &self.resumed {
            Some((_, parked)) if is_over(parked) => {
                // Only to bring to stable storage what was answered.
                let disk = self.plan.open_when_free(&self.watcher, FREE_STOPPED);
                return self.ended(disk).map(Opened::Ended);
            }
            Some(_) => self.plan.open_when_free(&self.watcher, FREE),
            None => self.plan.open_disk(&self.made.images, self.new.as_ref()),
        };
        // The signal thread knows what was made too, so it does not go by itself.
        let disk = opened.inspect_err(|_| self.made.undo())?;
        if let Some((state, _)) = &self.resumed {
            follow_changes(&disk, state)?;
        }
        Ok(Opened::Disk(disk))
    }

    /// Decides which user the process becomes, and says what the user should know of the disk.
    ///
    /// Errors: as [`Wanted::decide`].
    pub(super) fn decide(&self, user: Wanted, disk: &Disk) -> Result<Decision, Failure> {
        let decision = user.decide(self.request.sandbox, &[disk]);
        let decision = decision.inspect_err(|_| self.made.undo())?;
        if let Some(reason) = disk.protection_reason() {
            terminal::note(reason);
        }
        if self.plan.wants_to_size_a_part(disk) && self.resumed.is_none() {
            terminal::note(
                "the size of a part of a disk is fixed, so --growable and --resizable change \
                 nothing",
            );
        }
        Ok(decision)
    }

    /// Whether a signal has asked for the end of a mount that is not there yet. From here on one
    /// that comes is remembered.
    pub(super) fn is_stopped(&self) -> bool {
        self.watcher.enter(Phase::Mounting).is_some() && self.resumed.is_none()
    }

    /// Mounts the disk.
    ///
    /// Errors: those of the mountpoint and of the export, and as [`ended_meanwhile`].
    pub(super) fn mount(mut self, disk: Arc<Disk>) -> Result<Opened<Serving<'a>>, Failure> {
        let lock = self.lock()?.map(Arc::new);
        let mut options = self.plan.options(&disk);
        options.keep = self.kept.as_ref().map(Kept::keep).transpose()?;
        let stop_timeout = options.stop_timeout;
        let served = match Served::start(Arc::clone(&disk), options) {
            Ok(served) => served,
            Err(failure) => {
                let is_over = |(_, parked): &(State, Arc<Parked>)| is_over(parked);
                if self.resumed.as_ref().is_some_and(is_over) {
                    return self.ended(Ok(disk)).map(Opened::Ended);
                }
                return Err(failure);
            }
        };
        if let Some((state, _)) = &self.resumed {
            self.made.adopt(&self.plan.mountpoint, state.made);
        }
        for note in served.notes() {
            terminal::warn(note);
        }
        // The image is in use from now on: a failure after this does not take it away.
        self.made.keep_image();
        let handle = served.handle();
        Ok(Opened::Disk(Serving::new(
            self.request,
            self.plan,
            self.watcher,
            (Answering::new(served, disk), handle),
            self.made,
            self.kept,
            self.new.map(|(new, _)| new.format),
            lock,
            stop_timeout,
        )))
    }

    /// The lock of the file below the mount, which says that the mount is served. Makes the file.
    fn lock(&mut self) -> Result<Option<File>, Failure> {
        let is_resumed = self.resumed.is_some();
        if let Some(kept) = self.kept.as_mut().filter(|_| is_resumed) {
            return Ok(kept.take_alive());
        }
        self.made.mountpoint(&self.plan.mountpoint)?;
        Ok(mount_lock::hold(&self.plan.mountpoint))
    }

    /// The mount of the process before this one is over.
    fn ended(&mut self, disk: Result<Arc<Disk>, Failure>) -> Result<u8, Failure> {
        let Some((state, parked)) = &self.resumed else { return disk.map(|_| 0) };
        ended_meanwhile(self.kept.as_mut(), &self.made, state, parked, disk)
    }
}
