//! NBD clients of disks that virtual machines use.
//!
//! Promises: a disk is closed by the export of its virtual machine, after it has left the NBD
//! export ([`ringdisk_export::SecondExport`]). The end of the NBD export is the end of the process
//! only if it was idle for too long. A successor gets the clients of each disk with the disk.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use ringdisk_daemon::control::disk::NbdPlace;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::Named;
use ringdisk_daemon::sockets::MadeSocket;
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;

use super::Plan;
use crate::nbd::{Handle, Served};
use crate::vhost;

/// A disk that is open and not served yet.
#[derive(Clone, Copy, Debug)]
pub struct OpenDisk<'a> {
    /// Its number on the command line.
    pub number: usize,
    /// How it is served.
    pub plan: &'a Plan,
    /// The disk.
    pub disk: &'a Arc<Disk>,
}

/// The NBD export of all disks of the process.
#[derive(Debug)]
pub struct NbdExport {
    /// The export; it takes no client yet.
    pub served: Served,
    /// Its addresses, as messages name them.
    pub display_names: Vec<String>,
    /// Sockets that were made.
    pub made: Vec<MadeSocket>,
    /// Names of sockets that the process before has made, and lets go of when it ends.
    pub left: Vec<PathBuf>,
    /// Whether the process before listens for clients of a disk, in the order of the disks; empty:
    /// there was none.
    pub listens_there: Vec<bool>,
    /// Of the disks that are served, in their order.
    pub names: Vec<String>,
}

impl NbdExport {
    /// What ends one disk here before its virtual machine's export closes it.
    ///
    /// * `number`: which one it is of those that are served.
    pub(super) fn disk_handle(&self, number: usize) -> Arc<dyn ringdisk_export::SecondExport> {
        Arc::new(self.served.disk_handle(&self.names[number]))
    }

    /// Where clients find one disk.
    pub(super) fn place(&self, number: usize) -> NbdPlace {
        let addresses = self.display_names.clone();
        NbdPlace { addresses, export: self.names[number].clone() }
    }

    /// For other threads.
    pub(super) fn handle(&self) -> Handle {
        self.served.handle()
    }

    /// What goes at the end, if it is still there.
    pub(super) fn named(&self) -> Vec<Named> {
        self.made.iter().map(MadeSocket::named).collect()
    }

    /// Takes clients from now on.
    pub(super) fn release(&mut self) {
        self.served.release();
    }

    /// Leaves a disk and its clients to the process before, and the listening sockets where that
    /// one goes on with them.
    ///
    /// * `number`: as for [`NbdExport::place`].
    /// * `is_served`: a process goes on with the disk.
    pub(super) fn leave_out(&mut self, number: usize, is_served: bool) {
        let listens = is_served && self.listens_there.get(number).copied().unwrap_or(false);
        if listens {
            terminal::warn(format_args!(
                "NBD clients connect to the process before this one, which has a disk still; \
                 clients of other disks go on here"
            ));
            self.left.clear();
        }
        self.served.leave_out(&self.names[number], listens);
    }

    /// Goes on with the clients of the process before.
    pub(super) fn take_up(&mut self) {
        self.served.take_up();
    }

    /// Takes over the names that the process before has let go of.
    pub(super) fn adopt(&mut self) {
        self.made.extend(self.left.drain(..).filter_map(|path| MadeSocket::adopt(&path).ok()));
    }

    /// Ends the disks of virtual machines, too, when nobody has used any for too long.
    pub(super) fn attend(self, guests: Vec<vhost::Handle>) -> Attended {
        let NbdExport { served, made, .. } = self;
        let handle = served.handle();
        let for_end = handle.clone();
        let stop = move || {
            let result = served.wait(|| None);
            match &result {
                Ok(()) if for_end.has_moved() => {}
                Ok(()) => guests.iter().for_each(vhost::Handle::stop),
                Err(failure) => tracing::error!(
                    "the disks are served over NBD no longer, and virtual machines go on: {}",
                    failure.message()
                ),
            }
            result
        };
        let thread = std::thread::Builder::new().name(String::from("nbd-beside")).spawn(stop);
        Attended { thread: thread.ok(), handle, made }
    }
}

/// The same, with a thread that waits for its end.
pub(super) struct Attended {
    thread: Option<JoinHandle<Result<(), Failure>>>,
    handle: Handle,
    made: Vec<MadeSocket>,
}

impl Attended {
    /// Ends it: no disk is left. The names of the sockets go with it, unless a successor has it.
    ///
    /// Errors: it had ended before by a defect of ours.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        let panicked = || Failure::new(Exit::Halted, "a thread of the NBD export panicked");
        if self.handle.has_moved() {
            self.made.drain(..).for_each(MadeSocket::leave);
        }
        ended.map_or(Ok(()), |ended| ended.unwrap_or_else(|_| Err(panicked())))
    }
}
