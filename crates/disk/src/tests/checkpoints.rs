//! Checkpoints: what the frozen disk shows, while clients and changes go on.

mod bitmaps;
mod crash;
mod failures;
mod frozen;
mod refusals;
mod under_load;

use ringdisk_qcow2::Bytes;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, Storage};
use tempfile::TempDir;

use crate::tests::{open, qemu_img, qemu_io};
use crate::{Checkpoint, CheckpointOptions, Disk, Error, Format, ImageOptions};

/// Longest wait for requests in flight.
const HOLD: Duration = Duration::from_secs(10);

/// An empty file without a name.
fn fleece() -> Arc<Storage> {
    let file = tempfile::tempfile().expect("a file");
    let options = ringdisk_storage::OpenOptions {
        no_flush: true,
        lock: Lock::None,
        ..ringdisk_storage::OpenOptions::default()
    };
    Arc::new(Storage::from_fd(file.into(), "fleecing file", &options).expect("a storage"))
}

fn options() -> CheckpointOptions {
    CheckpointOptions::new(fleece(), Bytes(1 << 30))
}

/// Makes a checkpoint of one disk.
async fn freeze(
    ring: &Ring,
    disk: &Disk,
    options: CheckpointOptions,
) -> Result<Arc<Checkpoint>, Error> {
    let prepared = disk.prepare_checkpoint(ring, options).await?;
    let mut held = disk.hold(ring, HOLD).await?;
    held.freeze(&prepared)
}

/// Makes a qcow2 image over another one, 64 KiB clusters, 4 MiB: data in both, and holes.
fn chain(place: &TempDir) -> &'static str {
    qemu_img(place, &["create", "-q", "-f", "qcow2", "base.qcow2", "4M"]);
    qemu_io(place, "qcow2", "base.qcow2", &["write -P 1 0 1M", "write -P 2 2M 1M"]);
    let words = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu_img(place, &words);
    qemu_io(place, "qcow2", "top.qcow2", &["write -P 3 512k 1M", "write -z 2560k 128k"]);
    "top.qcow2"
}

/// Makes a raw image of 4 MiB with a hole.
fn raw(place: &TempDir) -> &'static str {
    qemu_img(place, &["create", "-q", "-f", "raw", "disk.raw", "4M"]);
    qemu_io(place, "raw", "disk.raw", &["write -P 1 0 1M", "write -P 2 3M 1000k"]);
    "disk.raw"
}

/// Opens an image of `place` for writing.
async fn writable(ring: &Ring, place: &TempDir, name: &str) -> Arc<Disk> {
    let format = if name.ends_with(".raw") { Format::Raw } else { Format::Qcow2 };
    let options = ImageOptions {
        format: Some(format),
        allow_paths: vec![place.path().to_owned()],
        ..ImageOptions::default()
    };
    open(ring, place.path().join(name), &options).await.expect("the image opens")
}
