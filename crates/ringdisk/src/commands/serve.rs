//! `ringdisk serve`: disks for virtual machines and for NBD clients.
//!
//! Promises: returns when all disks have ended, in the foreground; the work is that of
//! `ringdisk_server::vm` and `ringdisk_server::nbd`.

use ringdisk_daemon::background::{self, Turn};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::helper;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_daemon::sockets;
use ringdisk_server::vm::nbd_start::Wanted as WantedBeside;
use ringdisk_server::{nbd, vm};

use crate::cli::{ServeArgs, ServedDisk};

/// Serves until the end. Gives the exit code.
///
/// Errors: everything that can go wrong; see `Exit` of crate `daemon`.
pub(crate) fn run(args: &ServeArgs, disks: Vec<ServedDisk>) -> Result<u8, Failure> {
    args.log.prepare(args.daemonize)?;
    let start = || {
        // The background process of `qemu-nbd` takes the socket by its number.
        if !args.nbd.is_quiet {
            background::refuse_passed_sockets()?;
        }
        background::run_child()
    };
    let background = match args.daemonize {
        true => match Turn::take(args.keep, start)? {
            Turn::Serves(background) => background,
            Turn::Parent(code) => return Ok(code),
        },
        false => None,
    };
    let user = Wanted::of(&args.user.word)?;
    let is_for_guests = disks.iter().any(|disk| disk.args.place.is_given());
    let of_nbd: Vec<nbd::request::DiskRequest> = disks.iter().map(Into::into).collect();
    if !args.nbd.nbd.is_empty() && !is_for_guests {
        let result = nbd::serve(&args.into(), &of_nbd, background, user);
        helper::leave();
        return result;
    }
    // Before any descriptor is opened here that could have the number of one that is inherited.
    let request = args.into();
    let beside = WantedBeside::of(&request, &of_nbd)?;
    let options: Vec<_> = disks.iter().map(|disk| disk.args.place.options()).collect();
    let inherited = sockets::take(&options)?;
    let wanted = disks.iter().map(vm::request::DiskRequest::from).collect();
    let result = vm::serve(&args.into(), wanted, inherited, beside, background, user);
    helper::leave();
    result
}
