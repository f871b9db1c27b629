//! How NBD clients come to disks that virtual machines use.
//!
//! Promises: NBD clients read, and write only where that was asked for.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::sockets::Address;
use ringdisk_daemon::terminal;
use ringdisk_export::{HandOverState, retry_while};
use ringdisk_nbd::{Handed, HandedClients, NamedDisk, NbdOptions};

use super::nbd_export::{NbdExport, OpenDisk};
use crate::client_view::ClientViewWords;
use crate::nbd::access::{Access, access};
use crate::nbd::addresses::{Listening, Where, listen, places, taken};
use crate::nbd::exports::{check_names, named, say_what_clients_see};
use crate::nbd::request::{DiskRequest, Request};
use crate::nbd::{Served, options};
use crate::reopen::FREE_POLL_INTERVAL;

/// The sockets of a process that was killed are gone after this time: the kernel ends its rings
/// after it.
const FREE: Duration = Duration::from_secs(3);

/// The NBD export that the command line asks for, before any disk is open.
#[derive(Debug)]
pub struct Wanted<'a> {
    request: &'a Request,
    disks: &'a [DiskRequest],
    /// An address that cannot be bound is an error only when the process listens: it may be that of
    /// a process that was killed, and be free in a moment.
    places: Result<Vec<Where>, Failure>,
    access: Access,
}

impl<'a> Wanted<'a> {
    /// `None`: there is no address. Takes descriptors that the process is started with.
    ///
    /// * `disks`: all of them, in their order.
    ///
    /// Errors: addresses, names and keys that cannot be.
    pub fn of(
        request: &'a Request,
        disks: &'a [DiskRequest],
    ) -> Result<Option<Wanted<'a>>, Failure> {
        if request.addresses.is_empty() {
            return Ok(None);
        }
        let places = places(request);
        check_names(disks)?;
        Ok(Some(Wanted { request, disks, places, access: access(&request.access)? }))
    }

    /// What NBD clients see of a disk.
    ///
    /// * `number`: which one it is on the command line.
    pub(super) fn say(&self, words: &mut ClientViewWords, number: usize) {
        if let Some(disk) = self.disks.get(number) {
            say_what_clients_see(words, self.request, disk);
        }
        words.switch("--share-rw", self.request.share_rw);
    }

    /// Makes the sockets and the export. No client is served yet.
    ///
    /// * `again`: a process that served the same was killed, and its sockets may be there for a
    ///   moment.
    ///
    /// Errors: an address that cannot be had; bitmaps; those of threads and rings.
    pub(super) fn start(self, opened: &[OpenDisk<'_>], again: bool) -> Result<NbdExport, Failure> {
        let (exports, names) = self.exports(opened)?;
        let Wanted { request, places, access, .. } = self;
        let is_encrypted = access.tls.as_ref().is_some_and(|tls| tls.required);
        let options = options_of(request, access, opened);
        let mut listening = match again {
            false => listen(places?, is_encrypted)?,
            true => listen_when_free(request, is_encrypted)?,
        };
        let listeners = std::mem::take(&mut listening.listeners);
        let served = Served::start(exports, listeners, options)?;
        served.notes().iter().for_each(terminal::warn);
        let Listening { display_names, made, .. } = listening;
        let (left, listens_there) = (Vec::new(), Vec::new());
        Ok(NbdExport { served, display_names, made, left, listens_there, names })
    }

    /// Makes the export for sockets and clients of the process that has the disks until now, and
    /// goes on with them unless it hands the disks over. No client is served yet.
    ///
    /// * `handed`: of each disk: its clients and the listening sockets. `None`: that process serves
    ///   it over NBD no longer. Where no process has sockets to hand over, they are made.
    ///
    /// Errors: the sockets are not those of the addresses; NBD clients have another disk of the
    /// same process; as [`Wanted::start`].
    pub(super) fn take_over(
        self,
        opened: &[OpenDisk<'_>],
        handed: Vec<Option<HandOverState>>,
    ) -> Result<NbdExport, Failure> {
        let (exports, names) = self.exports(opened)?;
        let (mut sockets, mut all) = (Vec::new(), HandedClients::default());
        let mut listens_there = Vec::new();
        for state in handed {
            let Some(state) = state else {
                listens_there.push(false);
                continue;
            };
            let Handed { listeners, clients, names: theirs, .. } = Handed::open(state)?;
            if let Some(other) = theirs.iter().find(|name| !names.contains(name)) {
                let text = format!(
                    "NBD clients have another disk of the same process, '{}'",
                    terminal::visible(other)
                );
                let hint = "it goes on as before; name all its disks with --disk";
                return Err(Failure::new(Exit::Unsupported, text).hint(hint));
            }
            listens_there.push(!listeners.is_empty());
            // Each disk of one process comes with copies of the same ones.
            if sockets.is_empty() {
                sockets = listeners;
            }
            all.extend(clients);
        }
        let Wanted { request, access, .. } = self;
        let is_encrypted = access.tls.as_ref().is_some_and(|tls| tls.required);
        let mut left = Vec::new();
        let mut listening = if sockets.is_empty() {
            // The NBD export of that process has ended, or another process has its sockets.
            listen_when_free(request, is_encrypted).unwrap_or_else(|failure| {
                terminal::complain(&failure.context("no further NBD client can connect"));
                Listening::default()
            })
        } else {
            let path = |address: &Address| match address {
                Address::Unix(path) => Some(path.clone()),
                _ => None,
            };
            left.extend(request.addresses.iter().filter_map(path));
            taken(&request.addresses, sockets)?
        };
        let options = options_of(request, access, opened);
        let listeners = std::mem::take(&mut listening.listeners);
        let served = Served::prepare(exports, listeners, all, options)?;
        served.notes().iter().for_each(terminal::warn);
        let Listening { display_names, made, .. } = listening;
        Ok(NbdExport { served, display_names, made, left, listens_there, names })
    }

    /// The disks as NBD clients see them, and their names.
    ///
    /// Errors: bitmaps.
    fn exports(&self, opened: &[OpenDisk<'_>]) -> Result<(Vec<NamedDisk>, Vec<String>), Failure> {
        let read_only = !self.request.share_rw;
        let each = opened.iter().filter_map(|open| Some((self.disks.get(open.number)?, open.disk)));
        let each = each.map(|(asked, disk)| {
            let disk = named(asked, Arc::clone(disk))?;
            Ok(NamedDisk { read_only, ..disk })
        });
        let exports = each.collect::<Result<Vec<NamedDisk>, Failure>>()?;
        let names = exports.iter().map(|export| export.name.clone()).collect();
        Ok((exports, names))
    }
}

/// What is asked of the export.
fn options_of(request: &Request, access: Access, opened: &[OpenDisk<'_>]) -> NbdOptions {
    let restricted = opened.iter().any(|open| open.plan.restricted);
    let images = opened.iter().map(|open| open.plan.image.name()).collect();
    NbdOptions {
        tls: access.tls,
        allowed_users: access.users,
        beside_another: true,
        ..options(request, restricted, images)
    }
}

/// Listens where a process that was killed did, as soon as its sockets are gone.
///
/// Errors: as [`listen`].
fn listen_when_free(request: &Request, is_encrypted: bool) -> Result<Listening, Failure> {
    retry_while(FREE, FREE_POLL_INTERVAL, Result::is_err, || {
        places(request).and_then(|places| listen(places, is_encrypted))
    })
}
