//! The disk of a cell: its images on simulated storage, the change, and what fails.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Disk, Format, ImageOptions, StoredImage};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images;
pub(super) use ringdisk_testkit::sim::Injected;
use ringdisk_testkit::sim::SimStorage;
use tempfile::TempDir;

use super::clients::{FIRST, Range, left_by};

/// Size of the disk; before it shrinks, and before it grows.
pub(super) const SIZE: u64 = 1 << 20;
pub(super) const SMALL: u64 = 640 << 10;
pub(super) const LARGE: u64 = 2 << 20;
/// The byte of the first half of the disk, which the lowest image has; the second half reads as
/// zeroes.
pub(super) const OLD: u8 = 7;
/// What images above have: of the one between, and of the top since its snapshot.
const BETWEEN: (Range, u8) = (Range { start: 208 << 10, len: 32 << 10 }, 8);
const TOP: (Range, u8) = (Range { start: 400 << 10, len: 32 << 10 }, 9);
pub(super) const OVERLAY: &str = "overlay.qcow2";

/// What is done to the disk: the list of the table of the crate `disk`, with its names.
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
    Deactivate,
    HandOver,
    Close,
    CommitThrough,
    CommitBelow,
    Stream,
    StreamDown,
    /// A checkpoint begins, is read, and ends.
    Checkpoint,
    Mirror,
    MirrorRaw,
    MirrorLeft,
    Backup,
    BackupRaw,
    MirrorTop,
    MirrorNone,
    CopyOnRead,
}

/// What the disk is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A qcow2 image over another one.
    Chain,
    /// With a third one between.
    Deep,
    Raw,
}

/// The storage that has the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Top,
    Between,
    Base,
    /// The overlay that is put on top.
    Overlay,
    /// The fleecing file of a checkpoint or a backup.
    Fleece,
    /// Of a mirror or a backup.
    Target,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) change: Change,
    pub(super) shape: Shape,
    pub(super) victim: Victim,
    /// Of [`super::clients::REQUESTS`]: in flight when the change begins.
    pub(super) request: usize,
    pub(super) injected: Injected,
    /// Of the operations of the victim since the change began.
    pub(super) number: u64,
}

impl Change {
    pub(super) const ALL: [Change; 26] = [
        Change::External,
        Change::Create,
        Change::Apply,
        Change::Delete,
        Change::Commit,
        Change::Backing,
        Change::Grow,
        Change::GrowFalloc,
        Change::GrowFull,
        Change::Shrink,
        Change::Deactivate,
        Change::HandOver,
        Change::Close,
        Change::CommitThrough,
        Change::CommitBelow,
        Change::Stream,
        Change::StreamDown,
        Change::Checkpoint,
        Change::Mirror,
        Change::MirrorRaw,
        Change::MirrorLeft,
        Change::Backup,
        Change::BackupRaw,
        Change::MirrorTop,
        Change::MirrorNone,
        Change::CopyOnRead,
    ];

    /// What disks the change is made with.
    pub(super) fn shapes(self) -> &'static [Shape] {
        use Shape::{Chain, Deep, Raw};
        match self {
            Change::CommitThrough | Change::CommitBelow | Change::StreamDown => &[Deep],
            Change::External
            | Change::Grow
            | Change::GrowFalloc
            | Change::GrowFull
            | Change::Shrink
            | Change::Deactivate
            | Change::HandOver
            | Change::Close
            | Change::Checkpoint
            | Change::Mirror
            | Change::MirrorRaw
            | Change::MirrorLeft
            | Change::Backup
            | Change::BackupRaw => &[Chain, Raw],
            Change::Stream => &[Chain, Deep],
            Change::Create
            | Change::Apply
            | Change::Delete
            | Change::Commit
            | Change::Backing
            | Change::MirrorTop
            | Change::MirrorNone
            | Change::CopyOnRead => &[Chain],
        }
    }

    /// Name of the target of a mirror or a backup.
    pub(super) fn target(self) -> Option<&'static str> {
        match self {
            Change::Mirror | Change::MirrorLeft | Change::MirrorTop | Change::Backup => {
                Some("target.qcow2")
            }
            Change::MirrorRaw | Change::MirrorNone | Change::BackupRaw => Some("target.raw"),
            _ => None,
        }
    }

    fn has_fleece(self) -> bool {
        matches!(self, Change::Checkpoint | Change::Backup | Change::BackupRaw)
    }

    pub(super) fn switches_over(self) -> bool {
        matches!(self, Change::Mirror | Change::MirrorRaw | Change::MirrorTop | Change::MirrorNone)
    }

    /// Simulated storage has no descriptors that could be handed over.
    pub(super) fn is_refused_always(self) -> bool {
        self == Change::HandOver
    }

    /// Requests meet a disk that takes none: until it is active again, or for good.
    pub(super) fn refuses_requests(self) -> bool {
        matches!(self, Change::Deactivate | Change::Close)
    }

    /// The size of the disk after the change.
    pub(super) fn size(self) -> u64 {
        match self {
            Change::Grow | Change::GrowFalloc | Change::GrowFull => LARGE,
            Change::Shrink => SMALL,
            _ => SIZE,
        }
    }

    fn needs_snapshot(self) -> bool {
        matches!(self, Change::Create | Change::Apply | Change::Delete)
    }
}

impl Shape {
    /// The files, from the top down.
    fn files(self) -> &'static [(Victim, &'static str)] {
        const TOP: (Victim, &str) = (Victim::Top, "top.qcow2");
        const BASE: (Victim, &str) = (Victim::Base, "base.qcow2");
        match self {
            Shape::Chain => &[TOP, BASE],
            Shape::Deep => &[TOP, (Victim::Between, "between.qcow2"), BASE],
            Shape::Raw => &[(Victim::Top, "top.raw")],
        }
    }
}

fn format_of(name: &str) -> Format {
    if name.ends_with(".qcow2") { Format::Qcow2 } else { Format::Raw }
}

/// The images of all cells of a change and a shape.
pub(super) struct Fixture {
    place: TempDir,
    files: Vec<(Victim, &'static str, Vec<u8>)>,
    target: Option<Vec<u8>>,
    /// What the disk shows.
    pub(super) bytes: Vec<u8>,
    /// What its snapshot shows.
    pub(super) snapshot: Vec<u8>,
}

fn fill(bytes: &mut [u8], range: Range, byte: u8) -> String {
    bytes[range.indices()].fill(byte);
    format!("write -P {byte} {} {}", range.start, range.len)
}

impl Fixture {
    pub(super) fn new(change: Change, shape: Shape) -> Fixture {
        let place = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; SIZE as usize];
        let mut below: Option<&str> = None;
        let mut snapshot = bytes.clone();
        for &(victim, name) in shape.files().iter().rev() {
            let path = place.path().join(name);
            create(place.path(), name, below);
            let format = format_of(name).name();
            if below.is_none() {
                let half = Range { start: 0, len: SIZE / 2 };
                images::qemu_io(&path, format, &[&fill(&mut bytes, half, OLD)]);
            }
            if victim == Victim::Between {
                images::qemu_io(&path, format, &[&fill(&mut bytes, BETWEEN.0, BETWEEN.1)]);
            }
            if victim == Victim::Top {
                snapshot.clone_from(&bytes);
                if change.needs_snapshot() {
                    images::qemu_img(&["snapshot", "-c", "old", path.to_str().unwrap()]);
                }
                images::qemu_io(&path, format, &[&fill(&mut bytes, TOP.0, TOP.1)]);
            }
            below = Some(name);
        }
        let read = |name: &str| std::fs::read(place.path().join(name)).unwrap();
        let files: Vec<_> =
            shape.files().iter().map(|&(victim, name)| (victim, name, read(name))).collect();
        if change == Change::Backing {
            let base = &files.last().expect("a base").2;
            std::fs::write(place.path().join("other.qcow2"), base).unwrap();
        }
        let target = change.target().map(|name| {
            let below = shape.files().get(1).map(|(_, name)| *name);
            create(place.path(), name, below.filter(|_| change == Change::MirrorTop));
            read(name)
        });
        Fixture { place, files, target, bytes, snapshot }
    }

    /// Storages in which a failure makes sense.
    pub(super) fn victims(&self, change: Change) -> Vec<Victim> {
        let mut victims: Vec<_> = self.files.iter().map(|(victim, ..)| *victim).collect();
        victims.extend((change == Change::External).then_some(Victim::Overlay));
        victims.extend(change.has_fleece().then_some(Victim::Fleece));
        victims.extend(change.target().map(|_| Victim::Target));
        victims
    }

    /// An empty target; where nothing is copied to it, one that has everything.
    ///
    /// * `bytes`: what the disk shows.
    fn new_target(&self, cell: Cell, bytes: &[u8]) -> SimStorage {
        let content = self.target.as_deref().unwrap_or_default();
        if cell.change != Change::MirrorNone {
            return SimStorage::from_image(content, 8);
        }
        let mut bytes = bytes.to_vec();
        if let Some(byte) = left_by(cell.request) {
            bytes[FIRST.indices()].fill(byte);
        }
        SimStorage::from_image(&bytes, 8)
    }
}

/// Makes an image of [`SIZE`].
fn create(place: &Path, name: &str, below: Option<&str>) {
    let path = place.join(name);
    let format = format_of(name).name();
    let (path, size) = (path.to_str().unwrap(), SIZE.to_string());
    let mut words = vec!["create", "-q", "-f", format];
    if format == "qcow2" {
        words.extend(["-o", "cluster_size=16k"]);
    }
    if let Some(below) = below {
        words.extend(["-b", below, "-F", format_of(below).name()]);
    }
    words.extend([path, &size]);
    images::qemu_img(&words);
}

/// The disk of one cell, and its storages.
pub(super) struct World {
    pub(super) disk: Arc<Disk>,
    own: Vec<(Victim, SimStorage)>,
    pub(super) beside: SecondExport,
}

/// What a change needs beside the disk.
#[derive(Clone)]
pub(super) struct SecondExport {
    pub(super) place: Arc<Path>,
    pub(super) overlay: SimStorage,
    pub(super) fleece: SimStorage,
    pub(super) target: SimStorage,
    /// The images below the top, each with its storage.
    below: Vec<StoredImage>,
    name: Option<&'static str>,
}

impl SecondExport {
    /// * `bytes`: what the disk shows.
    pub(super) fn new(
        fixture: &Fixture,
        cell: Cell,
        own: &[(Victim, SimStorage)],
        bytes: &[u8],
    ) -> SecondExport {
        let place: Arc<Path> = Arc::from(fixture.place.path());
        let _ = std::fs::remove_file(place.join(OVERLAY));
        let below = fixture.files.iter().zip(own).skip(1);
        let below = below.map(|((_, name, _), (_, sim))| stored(&place, name, sim)).collect();
        let target = fixture.new_target(cell, bytes);
        let (overlay, fleece) = (SimStorage::new(0, 5), SimStorage::new(0, 6));
        SecondExport { place, overlay, fleece, target, below, name: cell.change.target() }
    }

    /// The target of a mirror or a backup, as a disk; over the images below the top where only that
    /// is copied.
    pub(super) fn target_images(&self, change: Change) -> Vec<StoredImage> {
        let name = self.name.expect("a change with a target");
        let mut images = vec![stored(&self.place, name, &self.target)];
        if change == Change::MirrorTop {
            images.extend(self.below.iter().cloned());
        }
        images
    }

    pub(super) fn options(&self) -> ImageOptions {
        ImageOptions { allow_paths: vec![self.place.to_path_buf()], ..ImageOptions::default() }
    }
}

fn stored(place: &Path, name: &str, sim: &SimStorage) -> StoredImage {
    StoredImage { storage: sim.storage(), format: format_of(name), name: place.join(name) }
}

impl World {
    pub(super) fn new(fixture: &Fixture, cell: Cell) -> World {
        let own: Vec<_> = fixture
            .files
            .iter()
            .zip(1..)
            .map(|((victim, _, content), seed)| (*victim, SimStorage::from_image(content, seed)))
            .collect();
        let beside = SecondExport::new(fixture, cell, &own, &fixture.bytes);
        let images = fixture.files.iter().zip(&own);
        let images =
            images.map(|((_, name, _), (_, sim))| stored(&beside.place, name, sim)).collect();
        let mut runtime = Runtime::new(Config::default()).unwrap();
        let ring = runtime.ring().clone();
        let disk = runtime.block_on(Disk::from_storages(&ring, images, &beside.options()));
        World { disk: disk.unwrap(), own, beside }
    }

    /// What a change that failed is made with again: what has failed may still get what was sent
    /// to it.
    ///
    /// * `bytes`: what the disk shows now.
    pub(super) fn renewed(&self, fixture: &Fixture, cell: Cell, bytes: &[u8]) -> SecondExport {
        SecondExport::new(fixture, cell, &self.own, bytes)
    }

    pub(super) fn victim(&self, victim: Victim) -> &SimStorage {
        match victim {
            Victim::Top | Victim::Between | Victim::Base => {
                let found = self.own.iter().find(|(it, _)| *it == victim);
                &found.expect("a storage of this disk").1
            }
            Victim::Overlay => &self.beside.overlay,
            Victim::Fleece => &self.beside.fleece,
            Victim::Target => &self.beside.target,
        }
    }

    /// The storages of the disk itself.
    pub(super) fn own(&self) -> impl Iterator<Item = &SimStorage> {
        self.own.iter().map(|(_, sim)| sim)
    }

    /// Lets what is held go on.
    pub(super) fn release(&self) {
        let beside = [&self.beside.overlay, &self.beside.fleece, &self.beside.target];
        self.own().chain(beside).for_each(|sim| {
            sim.release_all();
        });
    }

    /// Whether the disk has other layers than before.
    pub(super) fn is_made(&self, cell: Cell) -> bool {
        let layers = self.disk.layers();
        match cell.change.target() {
            Some(name) => layers[0].name().ends_with(name),
            None => layers.len() != cell.shape.files().len(),
        }
    }
}
