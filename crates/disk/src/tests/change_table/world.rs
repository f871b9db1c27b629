//! The disk of a cell: images, changes, faults.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::Preallocation;
use ringdisk_ring::{Errno, Ring};
use ringdisk_testkit::sim::{Fault, SimStorage};
use tempfile::TempDir;

use super::clients::Request;
use crate::disk::Parts;
use crate::open::qcow2_layer;
use crate::tests::{directory, qemu_img, qemu_io};
use crate::{
    Backing, CommitOptions, Disk, Error, Format, ImageOptions, OverlayOptions, Progress,
    ResizeOptions, SnapshotChange,
};

/// Cluster size of the images, bytes.
pub(super) const CLUSTER: usize = 16 << 10;
/// Size of the disk, bytes: 64 clusters.
pub(super) const SIZE: usize = 64 * CLUSTER;
/// Size after it has shrunk, bytes.
pub(super) const SMALL: usize = 40 * CLUSTER;
/// Size after it has grown, bytes: not a whole number of clusters.
pub(super) const LARGE: usize = 80 * CLUSTER + 4096;
/// The bitmap that records.
pub(super) const BITMAP: &str = "backup";

/// What is done to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    External,
    Create,
    Apply,
    Delete,
    Commit,
    Backing,
    Grow,
    GrowFalloc,
    GrowFull,
    Shrink,
    /// Deactivates and activates again.
    Deactivate,
    HandOver,
    Close,
}

/// The storage whose operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Top,
    Base,
}

/// What happens to the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Injected {
    Io,
    NoSpace,
    Hold,
}

impl Injected {
    pub(super) const ALL: [Injected; 3] = [Injected::Io, Injected::NoSpace, Injected::Hold];

    pub(super) fn fault(self) -> Fault {
        match self {
            Injected::Io => Fault::Fail(Errno::IO),
            Injected::NoSpace => Fault::Fail(Errno::NOSPC),
            Injected::Hold => Fault::Hold,
        }
    }
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) change: Change,
    /// In flight when the change begins.
    pub(super) request: Request,
    pub(super) victim: Victim,
    /// The operation of the victim that fails, counted from the beginning of the change.
    pub(super) number: u64,
    pub(super) injected: Injected,
}

/// The images of all cells of one change.
pub(super) struct Fixture {
    pub(super) place: TempDir,
    base: Vec<u8>,
    top: Vec<u8>,
    /// What the disk shows; also what it showed when the bitmap was made.
    pub(super) bytes: Vec<u8>,
    /// What the snapshot `old` shows.
    pub(super) old: Vec<u8>,
    pub(super) has_bitmap: bool,
}

fn fill(bytes: &mut [u8], clusters: std::ops::Range<usize>, byte: u8) -> String {
    bytes[clusters.start * CLUSTER..clusters.end * CLUSTER].fill(byte);
    let (at, len) = (clusters.start * CLUSTER, clusters.len() * CLUSTER);
    format!("write -P {byte} {at} {len}")
}

impl Fixture {
    /// `top.qcow2` over `base.qcow2`; `other.qcow2` has the content of the base.
    pub(super) fn new(change: Change) -> Fixture {
        let place = directory();
        let mut bytes = vec![0; SIZE];
        let (size, cluster) = (SIZE.to_string(), "cluster_size=16k");
        qemu_img(&place, &["create", "-q", "-f", "qcow2", "-o", cluster, "base.qcow2", &size]);
        let written = fill(&mut bytes, 0..48, 1);
        qemu_io(&place, "qcow2", "base.qcow2", &[&written]);
        let backing = ["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
        qemu_img(&place, &[&["create", "-q", "-f", "qcow2", "-o", cluster][..], &backing].concat());
        let (first, second) = (fill(&mut bytes, 0..8, 2), fill(&mut bytes, 60..64, 2));
        qemu_io(&place, "qcow2", "top.qcow2", &[&first, &second]);
        let old = bytes.clone();
        // Deletion of the only snapshot that backing files would be compared for is one of the changes.
        if change != Change::Backing && change != Change::Commit {
            qemu_img(&place, &["snapshot", "-c", "old", "top.qcow2"]);
        }
        let third = fill(&mut bytes, 4..16, 3);
        bytes[17 * CLUSTER..18 * CLUSTER].fill(0);
        let zero = format!("write -z {} {CLUSTER}", 17 * CLUSTER);
        qemu_io(&place, "qcow2", "top.qcow2", &[&third, &zero]);
        // An image with bitmaps refuses to apply a snapshot.
        let has_bitmap = change != Change::Apply;
        if has_bitmap {
            qemu_img(&place, &["bitmap", "--add", "-g", "16k", "top.qcow2", BITMAP]);
        }
        let read = |name: &str| std::fs::read(place.path().join(name)).expect("read");
        let (base, top) = (read("base.qcow2"), read("top.qcow2"));
        std::fs::write(place.path().join("other.qcow2"), &base).expect("write");
        Fixture { base, top, bytes, old, has_bitmap, place }
    }

    pub(super) fn world(&self) -> World {
        World {
            top: SimStorage::from_image(&self.top, 1),
            base: SimStorage::from_image(&self.base, 2),
        }
    }
}

/// The storages of one cell.
pub(super) struct World {
    pub(super) top: SimStorage,
    pub(super) base: SimStorage,
}

impl World {
    pub(super) fn victim(&self, victim: Victim) -> &SimStorage {
        match victim {
            Victim::Top => &self.top,
            Victim::Base => &self.base,
        }
    }

    pub(super) fn release(&self) -> usize {
        self.top.release_all() + self.base.release_all()
    }

    /// Opens the chain for writing.
    pub(super) async fn open(&self, ring: &Ring, fixture: &Fixture) -> Arc<Disk> {
        let mut layers = Vec::new();
        for (name, sim, writable) in
            [("top.qcow2", &self.top, true), ("base.qcow2", &self.base, false)]
        {
            let open = ringdisk_qcow2::OpenOptions { writable, ..Default::default() };
            let image = ringdisk_qcow2::Qcow2::open(ring, sim.storage(), &open).await;
            let mut layer = qcow2_layer(image.expect("the image opens"), writable);
            layer.name = fixture.place.path().join(name);
            layer.directory = Some(fixture.place.path().to_owned());
            layers.push(layer);
        }
        let options = ImageOptions {
            allow_paths: vec![fixture.place.path().to_owned()],
            ..ImageOptions::default()
        };
        Disk::build(layers, Parts::new(&options))
    }
}

impl Change {
    /// Makes the change.
    pub(super) async fn make(
        self,
        ring: &Ring,
        disk: &Disk,
        place: &std::path::Path,
    ) -> Result<(), Error> {
        let resize = |size: usize, preallocation, shrink| {
            disk.resize_with(ring, size as u64, ResizeOptions { shrink, preallocation })
        };
        let snapshot = |change| disk.snapshot(ring, change);
        let progress = Arc::new(Progress::new());
        match self {
            Change::External => {
                let path = place.join("overlay.qcow2");
                disk.add_overlay(ring, path, OverlayOptions::default()).await
            }
            Change::Create => snapshot(SnapshotChange::Create("new".to_owned())).await,
            Change::Apply => snapshot(SnapshotChange::Apply("old".to_owned())).await,
            Change::Delete => snapshot(SnapshotChange::Delete("old".to_owned())).await,
            Change::Commit => disk.commit(ring, CommitOptions::TOP, &progress).await,
            Change::Backing => {
                let backing = Backing { file: b"other.qcow2".to_vec(), format: Format::Qcow2 };
                disk.change_backing(ring, Some(backing), &progress).await
            }
            Change::Grow => resize(LARGE, Preallocation::Off, false).await.map(drop),
            Change::GrowFalloc => resize(LARGE, Preallocation::Falloc, false).await.map(drop),
            Change::GrowFull => resize(LARGE, Preallocation::Full, false).await.map(drop),
            Change::Shrink => resize(SMALL, Preallocation::Off, true).await.map(drop),
            Change::Deactivate => {
                disk.deactivate(ring).await?;
                match disk.activate(ring, Duration::ZERO).await {
                    Ok(()) => Ok(()),
                    // It stays given away, so that this can be tried again.
                    Err(_) => disk.activate(ring, Duration::ZERO).await,
                }
            }
            Change::HandOver => disk.hand_over(ring).await.map(drop),
            Change::Close => {
                disk.close(ring).await.map_err(|errno| Error::os("cannot close", errno))
            }
        }
    }

    /// The size of the disk after the change, bytes.
    pub(super) fn size(self, before: usize) -> usize {
        match self {
            Change::Grow | Change::GrowFalloc | Change::GrowFull => LARGE,
            Change::Shrink => SMALL,
            _ => before,
        }
    }
}
