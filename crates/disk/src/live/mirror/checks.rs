//! Whether a disk can be mirrored to a target.
//!
//! Promises: nothing is changed.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::layer::{Layer, Node};
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind};

/// Runs of a target that are looked at to find out that it is empty.
const RUNS_MAX: u32 = 4096;

/// Errors: as [`Disk::mirror`].
pub(super) fn check(disk: &Disk, target: &Arc<Disk>) -> Result<(), Error> {
    let graph = disk.graph();
    let refuse = |kind, why: String| Err(Error::new(kind, why));
    if matches!(graph.top().node, Node::Null(_) | Node::Frozen(_)) {
        let why = "only a disk of images can be mirrored; copy this one with `ringdisk convert`";
        return refuse(ErrorKind::Unsupported, why.to_owned());
    }
    if disk.is_lent() {
        let why = "the kernel reads and writes the image itself (--passthrough), so a mirror \
                   would miss writes; serve the disk without it";
        return refuse(ErrorKind::Unsupported, why.to_owned());
    }
    if graph.window.is_part() {
        let why = "a part of an image (--offset, --size or --partition) cannot be mirrored; serve \
                   the whole image";
        return refuse(ErrorKind::Unsupported, why.to_owned());
    }
    check_target(disk, target, graph.size())
}

/// Whether another disk can get what this one holds.
///
/// * `size`: of what is copied, bytes.
///
/// Errors: as [`Disk::mirror`], of the target.
pub(crate) fn check_target(disk: &Disk, target: &Disk, size: Bytes) -> Result<(), Error> {
    let (graph, other) = (disk.graph(), target.graph());
    let name = printable_path(other.top().name());
    let refuse = |kind, why: String| Err(Error::new(kind, why));
    if other.window.is_part() {
        let why = format!("the target '{name}' is a part of an image; name a whole one");
        return refuse(ErrorKind::Unsupported, why);
    }
    if target.is_read_only() {
        let why = format!("the target '{name}' is open for reading only; make it writable");
        return refuse(ErrorKind::PermissionDenied, why);
    }
    if let Some(layer) = shared(&graph.layers, &other.layers) {
        let layer = printable_path(layer.name());
        let why = format!(
            "the target '{name}' and the disk share the image '{layer}', which one of them \
             writes; name another target"
        );
        return refuse(ErrorKind::Invalid, why);
    }
    disk.check_others(&other.layers)?;
    let len = other.size();
    if len < size {
        let why = format!(
            "the target '{name}' has {len} bytes and the disk has {size}; make the target as large \
             as the disk"
        );
        return refuse(ErrorKind::Invalid, why);
    }
    Ok(())
}

/// The image that one of two chains writes and the other one has too.
fn shared<'a>(disk: &'a [Arc<Layer>], target: &'a [Arc<Layer>]) -> Option<&'a Arc<Layer>> {
    let same = |a: &Arc<Storage>, b: &Arc<Storage>| {
        Arc::ptr_eq(a, b) || a.identity().is_some() && a.identity() == b.identity()
    };
    let meet = |a: &Arc<Layer>, b: &Arc<Layer>| {
        a.storages().any(|one| b.storages().any(|other| same(one, other)))
    };
    let written = target.iter().take(1).find(|top| disk.iter().any(|layer| meet(top, layer)));
    written.or_else(|| target.iter().find(|layer| meet(layer, &disk[0])))
}

/// Why the disk cannot switch over to the target, which may be a copy all the same.
pub(super) fn pivot_refusal(disk: &Disk, target: &Disk) -> Option<String> {
    if disk.is_read_only() {
        return Some("the disk is open for reading only".to_owned());
    }
    if disk.options().temporary {
        return Some(
            "the disk has a temporary overlay, which is dropped at its end; use one that is kept"
                .to_owned(),
        );
    }
    if let Err(why) = disk.chain_watch().check(&target.graph().layers[0]) {
        return Some(format!(
            "the target would be the image on top, which the next process of a kept disk opens by \
             its name, and {why}"
        ));
    }
    let (size, len) = (disk.graph().size(), target.graph().size());
    if size != len {
        return Some(format!(
            "it has {len} bytes and the disk has {size}, so clients would see another size; resize \
             the disk first, or leave the target as a copy"
        ));
    }
    None
}

/// Whether a target certainly reads as zeroes.
pub(crate) async fn is_empty(ring: &Ring, target: &Disk) -> bool {
    let mut at = 0;
    for _ in 0..RUNS_MAX {
        match target.block_status(ring, at, Bytes::MAX).await {
            Ok(status) if status.len.is_zero() => return true,
            Ok(status) if status.zero => at += status.len.0,
            _ => return false,
        }
    }
    false
}
