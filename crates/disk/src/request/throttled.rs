//! Limits of the clients of a disk: requests and bytes per second.
//!
//! Promises: a request waits for the limit before it enters the graph, so a change of the graph
//! never waits for a limit; jobs of the disk itself (a commit, a resize) are not limited. A disk
//! that never had a limit pays one load for each request.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_throttle::{Changed, Group, Kind, Lifted, Limits, Member, Waits};

use crate::watch::LimitWatch;
use crate::{Disk, Error, ErrorKind};

impl Disk {
    /// Puts the disk into a group of disks that share limits, before it is served.
    ///
    /// Errors: `Invalid` when it has limits already; `Unsupported` where the kernel reads and
    /// writes the image itself.
    pub fn join_limits(&self, group: &Arc<Group>) -> Result<(), Error> {
        self.check_limits()?;
        self.limit.set(Member::of(group)).map_err(|_| {
            Error::new(ErrorKind::Invalid, "the disk has limits already: change those")
        })?;
        self.notices.wake();
        Ok(())
    }

    /// Changes the limits of the disk, and of all that share them. Any thread.
    ///
    /// * `limits`: gets the limits in force, and gives the new ones.
    ///
    /// Errors: those of `limits`; `Unsupported` where the kernel reads and writes the image itself.
    pub fn change_limits(
        &self,
        limits: impl FnOnce(&Limits) -> Result<Limits, Error>,
    ) -> Result<Limits, Error> {
        let current = self.limits();
        let wanted = limits(&current)?;
        if !wanted.are_none() {
            self.check_limits()?;
        }
        if wanted != current {
            self.own_limits().group().set(&wanted);
            self.notices.wake();
        }
        Ok(wanted)
    }

    /// The membership of a disk that may have had no limits.
    fn own_limits(&self) -> &Arc<Member> {
        self.limit.get_or_init(|| {
            let group = Group::new(&Limits::default());
            if let Some(watch) = self.limit_watch.get() {
                group.watch(watch.of_group());
            }
            Member::of(&group)
        })
    }

    /// The limits, where a command has changed them. Any thread.
    pub fn changed_limits(&self) -> Option<Changed> {
        self.limit.get()?.group().changed()
    }

    /// Those that the predecessor has handed over with the disk.
    pub fn handed_limits(&self) -> Option<&Changed> {
        self.handed_limits.get()
    }

    /// Takes over what a command has changed in the process before this one, before the disk is
    /// served. Where that one began with other limits, those of this one stay.
    ///
    /// Errors: `Unsupported` where the kernel reads and writes the image itself.
    pub fn follow_limits(&self, changed: &Changed) -> Result<(), Error> {
        self.check_limits()?;
        self.own_limits().group().follow(changed);
        self.notices.wake();
        Ok(())
    }

    /// Calls `watch` after each change of the limits, with what [`Disk::changed_limits`] gives;
    /// once. Before the disk is served. The callback must not block.
    pub fn watch_limits(&self, watch: impl Fn(Option<Changed>) + Send + Sync + 'static) {
        if self.limit_watch.set(LimitWatch::new(watch)).is_err() {
            return;
        }
        if let (Some(member), Some(watch)) = (self.limit.get(), self.limit_watch.get()) {
            member.group().watch(watch.of_group());
        }
    }

    /// The limits in force. Any thread.
    pub fn limits(&self) -> Limits {
        self.limit.get().map(|member| member.group().limits()).unwrap_or_default()
    }

    /// How much requests waited for the limits. Any thread.
    pub fn limit_waits(&self) -> Waits {
        self.limit.get().map(|member| member.waits()).unwrap_or_default()
    }

    /// Lets all requests go on until the guard is dropped. Called by threads that wait
    /// until none is in flight; any thread.
    pub fn lift_limits(&self) -> Option<Lifted> {
        self.limit.get().map(ringdisk_throttle::Member::lift)
    }

    fn check_limits(&self) -> Result<(), Error> {
        if !self.is_lent() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            "the kernel reads and writes the image itself (--passthrough), so its clients cannot \
             be limited: serve it without --passthrough",
        ))
    }

    /// Waits until the limits let a request go on. Queue thread; before the request enters the
    /// graph. The requests of this crate do so themselves, but for [`Disk::read_part`].
    #[inline]
    pub async fn pass_limits(&self, ring: &Ring, kind: Kind, bytes: Bytes) {
        if let Some(member) = self.limit.get() {
            member.pass(ring, kind, bytes.0).await;
        }
    }
}
