//! Disks of virtual machines: from a request to disks that they can use, and from their end to an
//! exit code.
//!
//! Promises: whatever was made on the way (images, sockets, a pid file) is removed again when the
//! start fails; at a clean end everything but the images is. One disk that breaks down ends alone.
//! Signals are honoured from the first moment.

mod disk;
mod kept_disks;
pub mod nbd_export;
pub mod nbd_start;
mod ready_text;
pub mod request;
mod serving;
mod shutdown;
mod take_over;

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_daemon::background::Background;
use ringdisk_daemon::confine::{self, Reach};
use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper::{self, Named};
use ringdisk_daemon::io_flusher;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::run_as::Wanted;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::sockets::{self, Inherited, MadeSocket, Place, SocketOptions};
use ringdisk_daemon::terminal;
use ringdisk_daemon::upgrade::{ClientView, SuccessorSocket};
use ringdisk_disk::Disk;
use ringdisk_images::new_image::NewImage;

use crate::keep::{self, Begun, Kept};
use crate::open::ImagePlan;
use crate::privileges::Inside;
use crate::start::pidfile_of;
use crate::vhost::Served;

use disk::{Placed, front, plan, start};
use nbd_export::{NbdExport, OpenDisk};
use request::{DiskRequest, Request};
use serving::Serving;

/// One disk before it is served.
#[derive(Debug)]
pub struct Plan {
    request: DiskRequest,
    /// The image, and how it is opened.
    pub image: ImagePlan,
    /// What the guest is shown.
    client_view: ClientView,
    new: Option<(NewImage, u64)>,
    place: Place,
    /// Rings do nothing but what serving takes.
    pub restricted: bool,
    /// A process with this command line is confined in its files.
    confines: bool,
}

/// One disk that is served.
struct Running {
    /// In the log.
    name: String,
    /// What is served, and where, in one line.
    ready: String,
    /// Where front ends and `ringdisk ctl` find it.
    path: Option<PathBuf>,
    /// The front end's socket, where it is the front end that listens.
    front: Option<PathBuf>,
    queues: u16,
    /// Where the command line allows images to lead.
    allowed: Vec<PathBuf>,
    /// What that and its image lead to.
    reach: Reach,
    /// The image that was on top at the start of a disk that was kept, if another one is now.
    first_top: Option<PathBuf>,
    served: Served,
    disk: Arc<Disk>,
    /// The name of the socket.
    made: Option<MadeSocket>,
    commands: Arc<DiskControl>,
    control: Option<(Server, helper::Named)>,
    /// For the process that takes the disk over.
    successor: Option<SuccessorSocket>,
}

/// Disks that have been started, and their NBD export.
type Started = (Vec<Running>, Option<NbdExport>);

/// Serves until the end. Gives the exit code. Where messages go is prepared before
/// ([`ringdisk_daemon::log_target::prepare`]).
///
/// * `inherited`: descriptors that the process was started with, for each disk.
/// * `beside`: NBD clients have the disks, too.
/// * `background`: the process is in the background already, and its parent waits.
/// * `user`: whom the process becomes when the disks answer.
///
/// Errors: everything that can go wrong; see [`Exit`].
pub fn serve(
    request: &Request,
    disks: Vec<DiskRequest>,
    inherited: Vec<Option<Inherited>>,
    beside: Option<nbd_start::Wanted<'_>>,
    background: Option<Background>,
    user: Wanted,
) -> Result<u8, Failure> {
    let mut background = background;
    let pidfile = request.pidfile.as_deref();
    let mut kept =
        match keep::begin(request.keep, pidfile, disks.len(), &mut background, request.upgrade)? {
            Begun::Serves(kept) => kept,
            Begun::Held(code) => return Ok(code),
        };
    let is_resumed = kept.as_ref().is_some_and(Kept::resumes);
    let plans = plans(request, disks, inherited, (kept.as_ref(), beside.as_ref()))?;
    let fresh = NewFiles::default();
    let watcher = keep::watch(&fresh, kept.as_ref(), is_resumed)?;
    // Where another process holds the disks, that one has the pid file.
    let pidfile = pidfile_of(pidfile, request.upgrade).filter(|_| kept.is_none()).transpose()?;
    let (running, beside) = match &mut kept {
        Some(kept) if is_resumed => match kept.go_on(plans, &watcher, beside)? {
            // All had ended already.
            (none, _) if none.is_empty() => return Ok(kept.code(Exit::Clean.code())),
            started => started,
        },
        kept if request.upgrade => {
            confine::check(request.sandbox)?;
            take_over::take_over(plans, &watcher, kept.as_ref(), beside)?
        }
        _ => match begin(plans, &fresh, &watcher, kept.as_ref(), beside)? {
            Some(started) => started,
            None => return Ok(Exit::General.code()),
        },
    };
    let mut serving =
        Serving::attend(request, (running, beside), watcher, kept, is_resumed, pidfile.as_deref())?;
    serving.confine(user)?;
    serving.announce(background);
    serving.wait()
}

/// What is to be served, and where.
///
/// Errors: a socket cannot be made, or a disk is not as it was asked for.
fn plans(
    request: &Request,
    disks: Vec<DiskRequest>,
    inherited: Vec<Option<Inherited>>,
    (kept, beside): (Option<&Kept>, Option<&nbd_start::Wanted<'_>>),
) -> Result<Vec<Plan>, Failure> {
    let options: Vec<SocketOptions> = disks.iter().map(|disk| disk.socket.clone()).collect();
    let places = match request.upgrade {
        _ if kept.is_some_and(Kept::resumes) => options.iter().map(kept_disks::place).collect(),
        true => sockets::taken_places(&options, inherited)?,
        false => sockets::places(&options, inherited)?,
    };
    let each = disks.into_iter().zip(places).enumerate();
    let plans = each.map(|(number, (disk, place))| {
        let beside = beside.map(|beside| (beside, number));
        plan(request, disk, place, beside)
    });
    plans.collect()
}

/// Opens and serves all disks. `None`: a signal came meanwhile.
///
/// * `beside`: NBD clients have the disks, too.
///
/// Errors: why one cannot be served; nothing that was made stays.
fn begin(
    plans: Vec<Plan>,
    fresh: &NewFiles,
    watcher: &Watcher,
    kept: Option<&Kept>,
    beside: Option<nbd_start::Wanted<'_>>,
) -> Result<Option<Started>, Failure> {
    let opened: Result<Vec<Arc<Disk>>, Failure> =
        plans.iter().map(|plan| plan.image.open(fresh, plan.new.as_ref())).collect();
    // The thread that takes signals knows what was made too, so it does not go by itself.
    let opened = opened.inspect_err(|_| fresh.undo())?;
    for reason in opened.iter().filter_map(|disk| disk.protection_reason()) {
        terminal::note(reason);
    }
    if watcher.enter(Phase::Mounting).is_some() {
        fresh.undo();
        return Ok(None);
    }
    // Before there are threads that shall have it too.
    io_flusher::become_one_if(opened.iter().any(|disk| io_flusher::is_on_a_device(disk)));
    let open = plans.iter().zip(&opened).enumerate();
    let open = open.map(|(number, (plan, disk))| OpenDisk { number, plan, disk });
    let open: Vec<_> = open.collect();
    let beside = beside.map(|wanted| wanted.start(&open, false)).transpose();
    let beside = beside.inspect_err(|_| fresh.undo())?;
    let each = plans.into_iter().zip(opened).enumerate();
    let started: Result<Vec<Running>, Failure> =
        each.map(|(n, (plan, disk))| start(n, plan, disk, kept, beside.as_ref())).collect();
    let running = started.inspect_err(|_| fresh.undo())?;
    kept.map_or(Ok(()), |kept| kept.disks.is_kept())?;
    // The images are in use from now on: a failure below does not take them away.
    fresh.keep();
    Ok(Some((running, beside)))
}

impl Running {
    /// For the sandbox.
    pub(super) fn inside(&self) -> Inside<'_> {
        Inside {
            disk: &self.disk,
            commands: &self.commands,
            allowed: &self.allowed,
            reach: &self.reach,
            first_top: self.first_top.as_deref(),
            front: self.front.clone(),
            names: self.names(),
            has_kernel: self.served.has_kernel(),
        }
    }

    /// What goes at the end, if it is still there.
    fn names(&self) -> Vec<Named> {
        let made = self.made.as_ref().map(MadeSocket::named);
        let control = self.control.as_ref().map(|(_, named)| named.clone());
        let successor = self.successor.as_ref().map(SuccessorSocket::named);
        [made, control, successor].into_iter().flatten().collect()
    }
}
