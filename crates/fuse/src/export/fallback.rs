//! What a mount takes of what the kernel and the image offer, and why not more: modes of rings,
//! passthrough, descriptors.
//!
//! Promises: whatever is refused has a reason that a user understands. Control path.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::Disk;
use ringdisk_ring::Errno;

use crate::mount::{Mount, clone_device};
use crate::uring::{RingMode, ZeroCopy};
use crate::{Error, ErrorKind};

/// The highest mode to try.
///
/// Errors: [`ErrorKind::PermissionDenied`] for zero-copy that was asked for and is root's.
pub(super) fn first_mode(zero_copy: ZeroCopy) -> Result<RingMode, Error> {
    let allowed = rustix::process::geteuid().is_root();
    match zero_copy {
        ZeroCopy::Off => Ok(RingMode::Pools),
        ZeroCopy::On if !allowed => {
            Err(Error::new(ErrorKind::PermissionDenied, "zero-copy is for root (CAP_SYS_ADMIN)")
                .hint("run as root, or leave out `--zero-copy on`"))
        }
        ZeroCopy::Auto if !allowed => Ok(RingMode::Pools),
        ZeroCopy::On | ZeroCopy::Auto => Ok(RingMode::ZeroCopy),
    }
}

/// Why `auto` does not try it.
pub(super) fn why_no_zero_copy() -> Option<String> {
    let is_root = rustix::process::geteuid().is_root();
    (!is_root).then(|| String::from("no zero-copy: it is for root (CAP_SYS_ADMIN)"))
}

/// The image file, for the kernel.
///
/// Errors: [`ErrorKind::TransportMissing`] with the reason.
pub(super) fn lend(disk: &Disk) -> Result<OwnedFd, Error> {
    disk.lend().map_err(|error| {
        Error::new(ErrorKind::TransportMissing, format!("no passthrough: {error}"))
            .hint("leave out `--passthrough`")
    })
}

pub(super) fn no_passthrough(errno: Errno) -> Error {
    let (kind, why) = match errno {
        Errno::PERM => (ErrorKind::PermissionDenied, "it is for root (CAP_SYS_ADMIN)"),
        Errno::LOOP => (
            ErrorKind::TransportMissing,
            "the image lies on a stacked file system (overlayfs, FUSE)",
        ),
        Errno::NOSYS | Errno::OPNOTSUPP => (
            ErrorKind::TransportMissing,
            "the kernel does not have it (Linux 6.9, CONFIG_FUSE_PASSTHROUGH)",
        ),
        _ => (ErrorKind::System, "the kernel does not take the image"),
    };
    Error::new(kind, format!("no passthrough: {why}"))
        .errno(errno)
        .hint("leave out `--passthrough`")
}

/// Whether some of the image is read and written past the host's page cache.
pub(super) fn is_direct(disk: &Disk) -> bool {
    let layers = disk.layers();
    layers.iter().any(|layer| layer.data_storage().is_some_and(|it| it.limits().direct))
}

/// Whether zero-copy can be of use with this disk. Blocks for a few reads.
pub(super) fn may_zero_copy(disk: &Disk, wanted: ZeroCopy) -> bool {
    // Also where it was asked for: what may be given to the kernel as it is has to be known.
    let takes = disk.probe_client_pages();
    if !takes && wanted == ZeroCopy::Auto {
        tracing::info!(
            "no zero-copy: with O_DIRECT, this storage was not seen to take memory of any alignment"
        );
    }
    takes || wanted == ZeroCopy::On
}

/// Why rings cannot be had.
///
/// * `errno`: what an entry was refused with; `None`: nothing, but it took too long.
pub(super) fn refusal(errno: Option<Errno>) -> String {
    match errno {
        Some(errno) => format!("the kernel refused a ring of this mount ({errno})"),
        None => String::from("the rings of this mount were not ready in time"),
    }
}

/// One descriptor for each queue: clones, or the first one shared where cloning is not allowed (a
/// user without access to /dev/fuse).
pub(super) fn queue_devices(
    mount: &Mount,
    count: usize,
    notes: &mut Vec<String>,
) -> Result<Vec<Arc<OwnedFd>>, Error> {
    let first = mount.device().try_clone_to_owned().map_err(|source| {
        Error::new(ErrorKind::System, "cannot duplicate the FUSE descriptor").source(source)
    })?;
    let first = Arc::new(first);
    let mut devices = vec![Arc::clone(&first)];
    while devices.len() < count {
        match clone_device(mount.device()) {
            Ok(device) => devices.push(Arc::new(device)),
            Err(errno) => {
                notes.push(format!(
                    "all threads share one FUSE descriptor, since /dev/fuse cannot be opened \
                     ({errno}); \
                     `chmod 666 /dev/fuse` gives each its own"
                ));
                devices.resize(count, first);
                break;
            }
        }
    }
    Ok(devices)
}
