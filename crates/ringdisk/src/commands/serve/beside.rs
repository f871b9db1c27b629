//! `--nbd` beside `--vhost-user-blk`: NBD clients of disks that virtual machines use.
//!
//! Promises: a disk is closed by the export of its virtual machine, after it has left the NBD
//! export ([`ringdisk_export::Beside`]). NBD clients read, and write only where that was asked for.
//! The end of the NBD export is the end of the process only if it was idle for too long.

use std::sync::Arc;
use std::thread::JoinHandle;

use ringdisk_daemon::control::disk::NbdPlace;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::Named;
use ringdisk_daemon::sockets::MadeSocket;
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_nbd::{NamedDisk, NbdOptions};

use super::Plan;
use super::nbd::access::{Access, access};
use super::nbd::addresses::{Listening, Where, listen, places};
use super::nbd::exports::{check_names, named};
use super::nbd::options;
use crate::cli::{ServeArgs, ServedDisk};
use crate::nbd::{Handle, Served};
use crate::vhost;

/// What is asked for, before any disk is open.
pub(super) struct Wanted<'a> {
    args: &'a ServeArgs,
    disks: &'a [ServedDisk],
    places: Vec<Where>,
    access: Access,
}

impl<'a> Wanted<'a> {
    /// `None`: there is no `--nbd`. Takes descriptors that the process is started with.
    ///
    /// Errors: addresses, names and keys that cannot be.
    pub(super) fn of(
        args: &'a ServeArgs,
        disks: &'a [ServedDisk],
    ) -> Result<Option<Wanted<'a>>, Failure> {
        if args.nbd.nbd.is_empty() {
            return Ok(None);
        }
        let places = places(args)?;
        check_names(disks)?;
        Ok(Some(Wanted { args, disks, places, access: access(&args.nbd.access)? }))
    }

    /// Makes the sockets and the export. No client is served yet.
    ///
    /// Errors: an address that cannot be had; bitmaps; those of threads and rings.
    pub(super) fn start(self, plans: &[Plan<'_>], opened: &[Arc<Disk>]) -> Result<Beside, Failure> {
        let Wanted { args, disks, places, access: Access { tls, users } } = self;
        let read_only = !args.nbd.share_rw;
        let each = disks.iter().zip(opened).map(|(words, disk)| {
            let disk = named(words, Arc::clone(disk))?;
            Ok(NamedDisk { read_only, ..disk })
        });
        let exports = each.collect::<Result<Vec<NamedDisk>, Failure>>()?;
        let names = exports.iter().map(|export| export.name.clone()).collect();
        let restricted = plans.iter().any(|plan| plan.restricted);
        let images = plans.iter().map(|plan| plan.image.name()).collect();
        let is_encrypted = tls.as_ref().is_some_and(|tls| tls.required);
        let options = NbdOptions {
            tls,
            allowed_users: users,
            beside_another: true,
            ..options(args, restricted, images)
        };
        let mut listening = listen(places, is_encrypted)?;
        let listeners = std::mem::take(&mut listening.listeners);
        let served = Served::start(exports, listeners, options)?;
        served.notes().iter().for_each(terminal::warn);
        Ok(Beside { served, listening, names })
    }
}

/// The NBD export of all disks of the process.
pub(super) struct Beside {
    served: Served,
    listening: Listening,
    /// Of the disks, in their order.
    names: Vec<String>,
}

impl Beside {
    /// What ends one disk here before its virtual machine's export closes it.
    pub(super) fn disk_handle(&self, number: usize) -> Arc<dyn ringdisk_export::Beside> {
        Arc::new(self.served.disk_handle(&self.names[number]))
    }

    /// Where clients find one disk.
    pub(super) fn place(&self, number: usize) -> NbdPlace {
        let addresses = self.listening.shown.clone();
        NbdPlace { addresses, export: self.names[number].clone() }
    }

    /// For other threads.
    pub(super) fn handle(&self) -> Handle {
        self.served.handle()
    }

    /// What goes at the end, if it is still there.
    pub(super) fn named(&self) -> Vec<Named> {
        self.listening.made.iter().map(MadeSocket::named).collect()
    }

    /// Takes clients from now on.
    pub(super) fn release(&mut self) {
        self.served.release();
    }

    /// Ends the disks of virtual machines, too, when nobody has used any for too long.
    pub(super) fn attend(self, guests: Vec<vhost::Handle>) -> Attended {
        let Beside { served, listening, names: _ } = self;
        let handle = served.handle();
        let stop = move || {
            let result = served.wait(|| None);
            match &result {
                Ok(()) => guests.iter().for_each(vhost::Handle::stop),
                Err(failure) => tracing::error!(
                    "the disks are served over NBD no longer, and virtual machines go on: {}",
                    failure.message()
                ),
            }
            result
        };
        let thread = std::thread::Builder::new().name(String::from("nbd-beside")).spawn(stop);
        Attended { thread: thread.ok(), handle, _made: listening.made }
    }
}

/// The same, with a thread that waits for its end.
pub(super) struct Attended {
    thread: Option<JoinHandle<Result<(), Failure>>>,
    handle: Handle,
    /// The names of the sockets go with it.
    _made: Vec<MadeSocket>,
}

impl Attended {
    /// Ends it: no disk is left.
    ///
    /// Errors: it had ended before by a defect of ours.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        let panicked = || Failure::new(Exit::Halted, "a thread of the NBD export panicked");
        ended.map_or(Ok(()), |ended| ended.unwrap_or_else(|_| Err(panicked())))
    }
}
