//! Mirrors as tasks, and disks to mirror from and to.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;
use ringdisk_testkit::process::{LIMIT, patient};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use tempfile::TempDir;

use super::{image, overlay};
use crate::disk::Parts;
use crate::open::qcow2_layer;
use crate::tests::{open, qemu_img};
use crate::{
    Disk, Error, Format, ImageOptions, MirrorControl, MirrorEnd, MirrorOptions, MirrorSync,
    Progress,
};

pub(super) const BACKGROUND: MirrorOptions =
    MirrorOptions { sync: MirrorSync::Full, write_blocking: false, left: None };
pub(super) const BLOCKING: MirrorOptions =
    MirrorOptions { sync: MirrorSync::Full, write_blocking: true, left: None };

/// A mirror that runs as a task.
pub(super) struct Running {
    pub(super) progress: Arc<Progress>,
    pub(super) control: Arc<MirrorControl>,
    ended: Rc<RefCell<Option<Result<MirrorEnd, Error>>>>,
}

impl Running {
    pub(super) fn start(
        ring: &Ring,
        disk: &Arc<Disk>,
        target: Arc<Disk>,
        options: MirrorOptions,
    ) -> Running {
        Running::with(ring, disk, target, options, Arc::default())
    }

    pub(super) fn with(
        ring: &Ring,
        disk: &Arc<Disk>,
        target: Arc<Disk>,
        options: MirrorOptions,
        progress: Arc<Progress>,
    ) -> Running {
        let control = Arc::new(MirrorControl::new());
        let running = Running { progress, control, ended: Rc::default() };
        let (disk, handle, slot) = (Arc::clone(disk), ring.clone(), running.ended.clone());
        let (progress, control) = (Arc::clone(&running.progress), Arc::clone(&running.control));
        ring.spawn(async move {
            let end = disk.mirror(&handle, target, options, &progress, &control).await;
            *slot.borrow_mut() = Some(end);
        });
        running
    }

    /// Whether writes of clients go to the target before they are answered.
    pub(super) fn is_in_step(&self, disk: &Disk) -> bool {
        disk.graph().mirror.as_ref().is_some_and(|mirror| mirror.is_in_step())
    }

    pub(super) fn is_over(&self) -> bool {
        self.ended.borrow().is_some()
    }

    pub(super) async fn end(&self, ring: &Ring) -> Result<MirrorEnd, Error> {
        loop {
            if let Some(result) = self.ended.borrow_mut().take() {
                return result;
            }
            ring.sleep(Duration::from_millis(1)).await;
        }
    }
}

/// A new empty image, open for writing.
pub(super) async fn target(ring: &Ring, directory: &TempDir, name: &str, size: usize) -> Arc<Disk> {
    let format = if name.ends_with(".raw") { Format::Raw } else { Format::Qcow2 };
    qemu_img(directory, &["create", "-q", "-f", format.name(), name, &size.to_string()]);
    writable(ring, directory, name).await
}

pub(super) async fn writable(ring: &Ring, directory: &TempDir, name: &str) -> Arc<Disk> {
    let format = if name.ends_with(".raw") { Format::Raw } else { Format::Qcow2 };
    let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
    open(ring, directory.path().join(name), &options).await.expect("open")
}

/// A chain of two, or a raw image, and its name.
pub(super) fn source(directory: &TempDir, is_raw: bool) -> (&'static str, Vec<u8>) {
    let mut bytes = image(directory, "base.raw", "raw", 1);
    if is_raw {
        return ("base.raw", bytes);
    }
    overlay(directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    ("top.qcow2", bytes)
}

/// A raw disk in memory of the test, and its storage.
pub(super) fn simulated(len: usize) -> (Arc<Disk>, SimStorage) {
    let sim = SimStorage::new(len as u64, 3);
    (Disk::from_storage(sim.storage(), &ImageOptions::default()), sim)
}

/// Asks for the switch-over. A client flushes the disk while the target is flushed, so that the
/// last step has to flush it again.
pub(super) async fn complete_with_a_flush(
    ring: &Ring,
    disk: &Disk,
    mirror: &Running,
    sim: &SimStorage,
) {
    sim.on(When::kind(OpKind::Flush).once(), Fault::Hold);
    mirror.control.complete(true).expect("complete");
    until(ring, || !sim.held().is_empty()).await;
    assert_eq!(disk.flush(ring).await, Ok(()));
    sim.release_all();
}

/// A qcow2 disk over simulated storage.
pub(super) async fn simulated_image(ring: &Ring, sim: &SimStorage) -> Arc<Disk> {
    let open = ringdisk_qcow2::OpenOptions { writable: true, ..Default::default() };
    let image = ringdisk_qcow2::Qcow2::open(ring, sim.storage(), &open).await.expect("it opens");
    Disk::build(vec![qcow2_layer(image, true)], Parts::new(&ImageOptions::default()))
}

/// Waits until it is so.
pub(super) async fn until(ring: &Ring, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < patient(LIMIT), "it does not come to that");
        ring.sleep(Duration::from_millis(1)).await;
    }
}
