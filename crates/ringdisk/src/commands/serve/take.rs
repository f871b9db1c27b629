//! `--upgrade`: disks that another process serves until now.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ringdisk_disk::Disk;
use ringdisk_vhost::Listen;
use ringdisk_vhost::export::{Export, Prepared};

use super::{Placed, Plan, Running};
use crate::commands::look;
use crate::commands::open::reach;
use crate::control::place::real_path;
use crate::io_flusher;
use crate::report::{Exit, Failure};
use crate::sandbox::{self, Reach};
use crate::signals::{Phase, Watcher};
use crate::sockets::{MadeSocket, Place};
use crate::terminal::{self, visible};
use crate::upgrade::{Offer, Predecessor, ask};
use crate::vhost::{self, Served};

/// A disk that stands still: not served there any more, and not yet here.
struct Waiting {
    placed: Placed,
    /// The socket has a name that was made for it, by us or by the process before us: not by a front end or a service manager.
    makes: bool,
    prepared: Prepared,
    offer: Offer,
}

/// A disk that is served here.
struct Taken {
    placed: Placed,
    makes: bool,
    served: Served,
    disk: Arc<Disk>,
    predecessor: Predecessor,
}

/// Takes all disks over. Until all are prepared the other process can go on with them.
///
/// Errors: one of them cannot be had, or not be served here; the other process goes on with all.
pub(super) fn take_over(plans: Vec<Plan<'_>>, watcher: &Watcher) -> Result<Vec<Running>, Failure> {
    let waiting = plans.into_iter().map(prepare).collect::<Result<Vec<_>, _>>()?;
    // From here on a signal stops disks that are ours, which takes more than the end of the process.
    if let Some(signal) = watcher.enter(Phase::Mounting) {
        let text = format!("stopped by {signal} before a disk was taken over");
        return Err(Failure::new(Exit::General, text));
    }
    let mut taken = Vec::new();
    for Waiting { placed, makes, prepared, offer } in waiting {
        match offer.take() {
            Ok(predecessor) => {
                let disk = Arc::clone(prepared.disk());
                match Served::go(prepared, placed.name.clone()) {
                    Ok(served) => taken.push(Taken { placed, makes, served, disk, predecessor }),
                    // Other guests have nobody but this process.
                    Err(failure) => terminal::complain(&failure.context(placed.name)),
                }
            }
            // Its guest goes on where it was.
            Err(failure) => terminal::complain(&failure.context(placed.name)),
        }
    }
    if taken.is_empty() {
        return Err(Failure::new(Exit::General, "no disk was handed over"));
    }
    let since = Instant::now();
    let attend = |Taken { mut placed, makes, served, disk, predecessor }| {
        // Guests go on meanwhile; names for `ringdisk ctl` are free when it is gone.
        predecessor.wait(since);
        if let Some(path) = placed.path.as_deref().filter(|_| makes) {
            placed.made = MadeSocket::adopt(path).ok();
        }
        placed.attend(served, disk)
    };
    Ok(taken.into_iter().map(attend).collect())
}

fn prepare(plan: Plan<'_>) -> Result<Waiting, Failure> {
    let Place::Take(path) = &plan.place else {
        return Err(Failure::new(Exit::Usage, "--upgrade needs the path of the disk's socket"));
    };
    let path = real_path(path).map_err(|error| {
        Failure::system(format!("cannot find '{}'", path.display()), &error, Exit::Mountpoint)
    })?;
    let front = plan.args.place.connect.is_some().then(|| path.clone());
    let name = plan.image.name();
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let image = plan.image.options(plan.image.args.format);
    let listen = Listen::Connect(path.clone());
    let (parcel, offer) = ask(&path, &plan.shown)?;
    // Before there are threads that shall have it too.
    io_flusher::become_one_if(parcel.fds.iter().any(io_flusher::is_device));
    let restricted = plan.restricted;
    let reach = reach(&plan.args.source, plan.image.image.as_deref());
    let options = vhost::options(plan.args, false, restricted, listen, name.clone());
    let prepared = runtime.block_on(Export::take_over(&ring, parcel, &image, options))?;
    if plan.confines {
        check_top(prepared.disk(), &reach, plan.image.image.is_some())?;
    }
    let ready =
        format!("{} is served {}", plan.image.describe(prepared.disk()), plan.place.shown());
    let queues = vhost::queues(plan.args);
    let allowed = plan.args.source.allow_path.clone();
    let (path, shown) = (Some(path), plan.shown);
    let placed =
        Placed { ready, name, path, front, queues, allowed, reach, restricted, made: None, shown };
    Ok(Waiting { placed, makes: plan.args.place.vhost_user_blk.is_some(), prepared, offer })
}

/// The image on top, as the process before this one hands it over, is one that the command line leads to. That process was confined, and may have
/// been taken over.
///
/// * `has_image`: the command line names one; else it is a null disk.
///
/// Errors: it is another one.
fn check_top(disk: &Disk, reach: &Reach, has_image: bool) -> Result<(), Failure> {
    let layers = disk.layers();
    let Some(top) = layers.first() else { return Ok(()) };
    let is_led_to = match top.file() {
        None => !has_image,
        // Without a name it is an overlay that goes with its process, or an image that was removed while it was served.
        Some(file) => sandbox::by_descriptor(file)
            .is_some_and(|open| reach.has_open(&open) || has_no_name(&open)),
    };
    if is_led_to {
        return Ok(());
    }
    let what = format!(
        "the process that serves the disk hands over '{}', which is not beside the image of the command line, nor where --allow-path allows",
        visible(&top.name().display().to_string())
    );
    Err(Failure::new(Exit::Permission, what)
        .hint("if a command of yours put it on top, name its directory with --allow-path"))
}

/// Whether no name leads to an open file any more.
fn has_no_name(open: &Path) -> bool {
    open.metadata().is_ok_and(|meta| meta.nlink() == 0)
}
