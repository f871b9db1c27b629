//! `--upgrade`: disks that another process serves until now.
//!
//! Promises: until all disks are prepared here, the other process can go on with all of them, with
//! their guests and NBD clients; any failure leaves them there. After that a disk that it does not
//! give goes on there, and the others are served here. Control path.

use std::sync::Arc;
use std::time::Instant;

use ringdisk_daemon::control::jobs::HandedJob;
use ringdisk_daemon::control::registry::{name_for_successor, real_path};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::keep::succession::Succession;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::sockets::{MadeSocket, Place};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{Kind, Offer, Predecessor, ask};
use ringdisk_disk::Disk;
use ringdisk_images::inspect;
use ringdisk_vhost::export::{Export, Prepared};
use ringdisk_vhost::{ExportOptions, Listen};

use super::nbd_export::{NbdExport, OpenDisk};
use super::nbd_start::Wanted;
use super::request::options;
use super::{Placed, Plan, Running, Started};
use crate::hand_over::{check_top, complain_of};
use crate::keep::{Kept, KeptImage};
use crate::limits;
use crate::vhost::Served;

/// A disk that stands still: not served there any more, and not yet here.
struct Waiting {
    plan: Plan,
    placed: Placed,
    /// The socket has a name that was made for it, by us or by the process before us: not by a
    /// front end or a service manager.
    makes: bool,
    prepared: Prepared,
    offer: Offer,
    /// For the process after this one.
    right: Option<Succession>,
}

/// A disk that is served here.
struct Taken {
    placed: Placed,
    makes: bool,
    served: Served,
    disk: Arc<Disk>,
    predecessor: Predecessor,
    right: Option<Succession>,
}

/// Takes all disks over. Until all are prepared the other process can go on with them.
///
/// * `kept`: the helper process keeps them from now on.
/// * `beside`: NBD clients have the disks, too, and come along.
///
/// Errors: one of them cannot be had, or not be served here; the other process goes on with all.
pub(super) fn take_over(
    plans: Vec<Plan>,
    watcher: &Watcher,
    kept: Option<&Kept>,
    beside: Option<Wanted<'_>>,
) -> Result<Started, Failure> {
    let each = plans.into_iter().enumerate();
    let has_nbd = beside.is_some();
    let waiting = each.map(|(number, plan)| prepare(number, plan, kept, has_nbd));
    let mut waiting = waiting.collect::<Result<Vec<_>, _>>()?;
    let mut beside = beside.map(|wanted| take_clients(wanted, &mut waiting)).transpose()?;
    // The helper process has everything before the other process gives it up.
    kept.map_or(Ok(()), |kept| kept.disks.is_kept())?;
    // From here on a signal stops disks that are ours, which takes more than the end of the
    // process.
    if let Some(signal) = watcher.enter(Phase::Mounting) {
        let text = format!("stopped by {signal} before a disk was taken over");
        return Err(Failure::new(Exit::General, text));
    }
    let (mut taken, mut left) = (Vec::new(), Vec::new());
    for (number, waiting) in waiting.into_iter().enumerate() {
        let Waiting { placed, makes, prepared, offer, right, .. } = waiting;
        let old = offer.old_process();
        match offer.take() {
            Ok(predecessor) => {
                right.iter().for_each(Succession::is_ours);
                kept.iter().for_each(|kept| kept.disks.took_over());
                let disk = Arc::clone(prepared.disk());
                let mut served = Served::go(prepared, placed.name.clone());
                beside.iter().for_each(|beside| served.counts_with(beside.handle()));
                taken.push(Taken { placed, makes, served, disk, predecessor, right });
            }
            // Its guest goes on where it was, and so do NBD clients.
            Err(failure) => {
                terminal::complain(&failure.context(placed.name));
                left.push((number, old.may_serve()));
            }
        }
    }
    if taken.is_empty() {
        return Err(Failure::new(Exit::General, "no disk was handed over"));
    }
    if let Some(beside) = &mut beside {
        left.into_iter().for_each(|(number, is_served)| beside.leave_out(number, is_served));
        beside.take_up();
    }
    let since = Instant::now();
    let running = taken.into_iter().map(|taken| taken.attend(since)).collect();
    beside.iter_mut().for_each(NbdExport::adopt);
    Ok((running, beside))
}

impl Taken {
    /// Waits for the end of the other process, and makes the control sockets of the disk.
    ///
    /// * `since`: as for [`Predecessor::wait`].
    fn attend(self, since: Instant) -> Running {
        let Taken { mut placed, makes, served, disk, mut predecessor, right } = self;
        // Guests go on meanwhile; names for `ringdisk ctl` are free when it is gone.
        if let Some(lingering) = predecessor.wait(since) {
            complain_of(&lingering, &disk, &placed.name);
        }
        if predecessor.stop().is_some() {
            served.handle().stop();
        }
        placed.jobs = predecessor.take_jobs(0);
        if let Some(path) = placed.path.as_deref().filter(|_| makes) {
            placed.made = MadeSocket::adopt(path).ok();
        }
        placed.attend(served, disk, right)
    }
}

/// Makes the export of NBD clients that come along. None is served yet.
///
/// Errors: as [`Wanted::take_over`].
fn take_clients(wanted: Wanted<'_>, waiting: &mut [Waiting]) -> Result<NbdExport, Failure> {
    let clients = waiting.iter_mut().map(|disk| disk.prepared.take_beside()).collect();
    let open = waiting.iter().enumerate();
    let open = open.map(|(number, Waiting { plan, prepared, .. })| {
        let disk = prepared.disk();
        OpenDisk { number, plan, disk }
    });
    let beside = wanted.take_over(&open.collect::<Vec<_>>(), clients)?;
    for (number, disk) in waiting.iter_mut().enumerate() {
        disk.prepared.set_beside(beside.disk_handle(number));
        disk.placed.nbd = Some(beside.place(number));
    }
    Ok(beside)
}

/// * `number`: which disk it is.
/// * `has_nbd`: NBD clients have it, too.
fn prepare(
    number: usize,
    plan: Plan,
    kept: Option<&Kept>,
    has_nbd: bool,
) -> Result<Waiting, Failure> {
    let Place::Take(path) = &plan.place else {
        return Err(Failure::new(Exit::Usage, "--upgrade needs the path of the disk's socket"));
    };
    let path = real_path(path).map_err(|error| {
        Failure::system(format!("cannot find '{}'", path.display()), &error, Exit::Mountpoint)
    })?;
    let front = plan.request.socket.connect.is_some().then(|| path.clone());
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    let image = plan.image.options(plan.image.request.format);
    let listen = Listen::Connect(path.clone());
    let (state, offer) = ask(Kind::Disk, &path, &name_for_successor(&path), &plan.client_view)?;
    // Before there are threads that shall have it too.
    io_flusher::become_one_if(state.fds.iter().any(io_flusher::is_device));
    let right = kept.map(|kept| kept.disks.keep_succession(number, true)).transpose()?;
    let keep = kept.map(|kept| kept.disks.keep(number, right.as_ref())).transpose()?;
    let options = options(&plan.request, false, plan.restricted, listen, plan.image.name());
    let accel = options.accel.filter(|_| keep.is_none() && !has_nbd);
    let options = ExportOptions { keep, accel, ..options };
    let prepared = runtime.block_on(Export::take_over(&ring, state, &image, options))?;
    if plan.confines {
        check_top(prepared.disk(), &plan.image.request, plan.image.image.as_deref())?;
    }
    prepared.disk().note_handed();
    if offer.jobs(0).iter().any(HandedJob::needs_changes) {
        runtime.block_on(prepared.disk().record_changes(&ring));
    }
    limits::apply_to_handed(&plan.image.request.limit, prepared.disk())?;
    let image = KeptImage { plan: &plan.image, confines: plan.confines };
    let keep = |kept: &Kept| kept.keep_handed(number, &image, prepared.disk());
    let kept_jobs = kept.map(keep).transpose()?;
    let makes = plan.request.socket.make.is_some();
    let placed = plan.placed(prepared.disk());
    let placed = Placed { path: Some(path), front, kept_jobs, ..placed };
    Ok(Waiting { plan, placed, makes, prepared, offer, right })
}
