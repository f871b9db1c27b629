//! How NBD clients come to disks that virtual machines use.
//!
//! Promises: NBD clients read, and write only where that was asked for.

use std::sync::Arc;

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_nbd::{NamedDisk, NbdOptions};

use super::Plan;
use super::beside::{Beside, Start};
use crate::nbd::access::{Access, access};
use crate::nbd::addresses::{Where, listen, places};
use crate::nbd::exports::{check_names, named};
use crate::nbd::request::{DiskRequest, Request};
use crate::nbd::{Served, options};

/// What is asked for, before any disk is open.
#[derive(Debug)]
pub struct Wanted<'a> {
    request: &'a Request,
    disks: &'a [DiskRequest],
    places: Vec<Where>,
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
        let places = places(request)?;
        check_names(disks)?;
        Ok(Some(Wanted { request, disks, places, access: access(&request.access)? }))
    }

    /// Makes the sockets and the export when it is called. No client is served yet.
    pub fn starter(self) -> Start<'a> {
        Box::new(move |plans, opened| self.start(plans, opened))
    }

    /// Errors: an address that cannot be had; bitmaps; those of threads and rings.
    fn start(self, plans: &[Plan], opened: &[Arc<Disk>]) -> Result<Beside, Failure> {
        let Wanted { request, disks, places, access: Access { tls, users } } = self;
        let read_only = !request.share_rw;
        let each = disks.iter().zip(opened).map(|(asked, disk)| {
            let disk = named(asked, Arc::clone(disk))?;
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
            ..options(request, restricted, images)
        };
        let mut listening = listen(places, is_encrypted)?;
        let listeners = std::mem::take(&mut listening.listeners);
        let served = Served::start(exports, listeners, options)?;
        served.notes().iter().for_each(terminal::warn);
        Ok(Beside { served, shown: listening.shown, made: listening.made, names })
    }
}
