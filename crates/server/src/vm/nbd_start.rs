//! How NBD clients come to disks that virtual machines use.
//!
//! Promises: NBD clients read, and write only where that was asked for.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal;
use ringdisk_export::retry_while;
use ringdisk_nbd::{NamedDisk, NbdOptions};

use super::nbd_export::{Beside, OpenDisk, Start};
use crate::nbd::access::{Access, access};
use crate::nbd::addresses::{Listening, Where, listen, places};
use crate::nbd::exports::{check_names, named};
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

    /// Makes the sockets and the export when it is called. No client is served yet.
    pub fn starter(self) -> Start<'a> {
        Box::new(move |opened, again| self.start(opened, again))
    }

    /// * `again`: a process that served the same was killed.
    ///
    /// Errors: an address that cannot be had; bitmaps; those of threads and rings.
    fn start(self, opened: &[OpenDisk<'_>], again: bool) -> Result<Beside, Failure> {
        let Wanted { request, disks, places, access: Access { tls, users } } = self;
        let read_only = !request.share_rw;
        let each = opened.iter().filter_map(|open| Some((disks.get(open.number)?, open.disk)));
        let each = each.map(|(asked, disk)| {
            let disk = named(asked, Arc::clone(disk))?;
            Ok(NamedDisk { read_only, ..disk })
        });
        let exports = each.collect::<Result<Vec<NamedDisk>, Failure>>()?;
        let names = exports.iter().map(|export| export.name.clone()).collect();
        let restricted = opened.iter().any(|open| open.plan.restricted);
        let images = opened.iter().map(|open| open.plan.image.name()).collect();
        let is_encrypted = tls.as_ref().is_some_and(|tls| tls.required);
        let options = NbdOptions {
            tls,
            allowed_users: users,
            beside_another: true,
            ..options(request, restricted, images)
        };
        let mut listening = match again {
            false => listen(places?, is_encrypted)?,
            true => listen_when_free(request, is_encrypted)?,
        };
        let listeners = std::mem::take(&mut listening.listeners);
        let served = Served::start(exports, listeners, options)?;
        served.notes().iter().for_each(terminal::warn);
        Ok(Beside { served, display_names: listening.display_names, made: listening.made, names })
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
