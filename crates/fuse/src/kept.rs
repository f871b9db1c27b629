//! The parts of an export that outlive its process, so that another process goes on with the mount.
//!
//! Promises: [`Terms`] and the descriptors in [`Parked`] are all that [`crate::Export::start`]
//! needs to serve a mount of a process that is gone, with no request lost, together with what a
//! [`FileRecord`] holds of the file itself. Control path.
//!
//! The kernel keeps a connection as long as any of its descriptors is open somewhere, and each
//! descriptor keeps the requests that were read from it and not answered. So *all* of them are
//! parked. The next process asks for those requests again (NOTIFY_RESEND): each comes once more,
//! its `unique` marked by bit 63, which goes back in the reply. INIT does not come again.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use crate::file::record::{FileRecord, FileState, RECORD_BYTES};
use crate::mount::{Mount, Unmount, was_aborted};
pub use crate::mount_terms::{HandedMount, Parked, TakenMount, Terms};
use crate::negotiate::{Negotiated, Profile};
use crate::reply::notify_resend;
use crate::transport::Transport;
use crate::uring::ZeroCopy;
use crate::{Error, ErrorKind};

/// How an export outlives its process.
#[derive(Clone, Debug)]
pub struct Keep {
    /// Where the state of the file is written.
    pub record: Arc<FileRecord>,
    /// The mount to go on with; `None`: a new one.
    pub resume: Option<Arc<Parked>>,
}

/// Whether the mount has ended: it was removed, or its connection was aborted.
#[must_use]
pub fn is_over(parked: &Parked) -> bool {
    parked.devices.first().is_some_and(|device| {
        let mut device = [PollFd::new(device, PollFlags::empty())];
        let polled = poll(&mut device, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && device[0].revents().contains(PollFlags::ERR)
    })
}

/// How a mount has ended that no process served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was unmounted.
    Unmounted,
    /// Its connection was aborted, and requests that waited ended with errors.
    Aborted,
}

/// How a mount has ended that no process serves; `None`: it has not.
///
/// An abort is known by one of these. Reading the device says so (after `ringdisk umount --force`,
/// and by fusectl; not after `umount -f`). The mount is still there: `umount -f` aborts at once,
/// and then leaves a mount in use where it is. A client had the file open for writing when the
/// process died: the client has to wait for a server to close it. What is left, an abort by `umount
/// -f` (from Linux 7.3 on any abort) of a mount that was only read or that a client waited to open,
/// looks like an unmount once it is unmounted and closed.
#[must_use]
pub fn ended(parked: &Parked, record: &FileRecord) -> Option<Ended> {
    let device = parked.devices.first().filter(|_| is_over(parked))?;
    let Terms { connection, mountpoint, .. } = &parked.terms;
    let place = Some((*connection, &**mountpoint));
    let is_aborted = was_aborted(device, place) || record.writable_files() > 0;
    Some(if is_aborted { Ended::Aborted } else { Ended::Unmounted })
}

/// Takes an aborted mount out of the tree, if it is there still.
///
/// Errors: those of [`Mount::unmount`].
pub fn remove(parked: &Parked) -> Result<(), Error> {
    adopt(parked)?.take_over().unmount(Unmount::Lazy)
}

/// Why a mount with these options cannot be kept; `None`: it can.
#[must_use]
pub fn refuse(transport: Transport, zero_copy: ZeroCopy, passthrough: bool) -> Option<Error> {
    if transport == Transport::Uring || zero_copy == ZeroCopy::On {
        return Some(no_rings());
    }
    passthrough.then(|| {
        Error::new(
            ErrorKind::Unsupported,
            "a mount with passthrough cannot be kept: between two processes the kernel would write \
             the image while nobody holds its locks",
        )
        .hint("leave out `--passthrough` or `--keep-mount`")
    })
}

/// Why a mount with these options cannot be taken over from a live process; `None`: it can.
#[must_use]
pub fn refuse_successor(
    transport: Transport,
    zero_copy: ZeroCopy,
    passthrough: bool,
) -> Option<Error> {
    let what = if passthrough {
        "a mount with passthrough cannot be taken over: the kernel reads and writes its image \
         itself"
    } else if transport == Transport::Uring || zero_copy == ZeroCopy::On {
        "a mount over io_uring cannot be taken over: the kernel ties its rings to the process that \
         registered them"
    } else {
        return None;
    };
    Some(
        Error::new(ErrorKind::Unsupported, what)
            .hint("end it with `ringdisk umount`, and mount the image anew without `--upgrade`"),
    )
}

/// Why the requests of a mount that was taken over do not travel in rings.
pub(crate) fn why_dev_taken() -> String {
    String::from("a mount that was taken over (--upgrade) stays on /dev/fuse")
}

/// Why requests do not travel in rings, for a mount that leaves the choice to us.
pub(crate) fn why_dev() -> String {
    String::from("a mount that outlives its process (--keep-mount) cannot be served over io_uring")
}

fn no_rings() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "a mount over io_uring cannot be kept: the kernel ties its rings to the process \
         and sends their requests to no other",
    )
    .hint(
        "use `--transport dev`, or `auto`, which takes it with --keep-mount; or leave \
        --keep-mount away: after a crash the next mount replaces the dead one",
    )
}

/// Takes the mount of another process; not yet responsible for it.
pub(crate) fn adopt(parked: &Parked) -> Result<Mount, Error> {
    let device = duplicate(parked.devices.first())?;
    Ok(Mount::adopt(device, parked.terms.mountpoint.clone(), parked.terms.connection))
}

/// The descriptors of a parked mount, one for each queue.
pub(crate) fn devices(parked: &Parked) -> Result<Vec<Arc<OwnedFd>>, Error> {
    let own = parked.devices.iter().map(|device| duplicate(Some(device)).map(Arc::new));
    let mut devices: Vec<_> = own.collect::<Result<_, _>>()?;
    let first = devices.first().cloned();
    devices
        .extend(first.into_iter().cycle().take(parked.terms.queues.saturating_sub(devices.len())));
    Ok(devices)
}

/// The descriptors and the state that a helper process has to keep.
///
/// Errors: [`ErrorKind::TransportMissing`] for a kernel that does not send requests again.
pub(crate) fn park(
    mount: &Mount,
    devices: &[Arc<OwnedFd>],
    profile: Profile,
    negotiated: Negotiated,
) -> Result<Parked, Error> {
    let connection = mount.connection().ok_or_else(|| {
        Error::new(ErrorKind::NotMounted, format!("{} was unmounted", mount.mountpoint().display()))
    })?;
    let mountpoint = mount.mountpoint().to_owned();
    let terms = Terms { mountpoint, connection, profile, negotiated, queues: devices.len() };
    if !terms.can_resend() {
        return Err(Error::new(
            ErrorKind::TransportMissing,
            "this kernel cannot send unanswered requests to another process",
        )
        .hint("use Linux 6.9 or newer, or leave out --keep-mount"));
    }
    let mut own: Vec<OwnedFd> = Vec::with_capacity(devices.len());
    for (index, device) in devices.iter().enumerate() {
        if index == 0 || !Arc::ptr_eq(device, &devices[0]) {
            own.push(duplicate(Some(&**device))?);
        }
    }
    Ok(Parked { terms, devices: own })
}

fn duplicate(device: Option<&OwnedFd>) -> Result<OwnedFd, Error> {
    let none = std::io::Error::from(std::io::ErrorKind::NotFound);
    device.map_or(Err(none), OwnedFd::try_clone).map_err(|source| {
        Error::new(ErrorKind::System, "cannot duplicate the FUSE descriptor").source(source)
    })
}

/// Makes the kernel send again what a process that is gone has read and not answered, oldest first.
/// Before any thread reads: it would send the requests of living threads again too.
pub(crate) fn ask_again(mount: &Mount) -> Result<(), Error> {
    rustix::io::write(mount.device(), &notify_resend()).map(drop).map_err(|errno| {
        Error::new(ErrorKind::System, "the kernel did not send the unanswered requests again")
            .errno(errno)
    })
}
