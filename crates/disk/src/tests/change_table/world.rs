//! The disk of a cell: images, changes, faults.

use std::sync::Arc;

use ringdisk_qcow2::Bytes;
use ringdisk_ring::Ring;
pub(super) use ringdisk_testkit::sim::Injected;
use ringdisk_testkit::sim::SimStorage;
use tempfile::TempDir;

use super::clients::Request;
use crate::disk::Parts;
use crate::layer::{Layer, Node, Raw};
use crate::open::qcow2_layer;
use crate::tests::{directory, qemu_img, qemu_io};
use crate::{Disk, ImageOptions};

/// Cluster size of the images, bytes.
pub(super) const CLUSTER: usize = 16 << 10;
/// Size of the disk, bytes: 64 clusters.
pub(super) const SIZE: usize = 64 * CLUSTER;
/// Size after it has shrunk, bytes.
pub(super) const SMALL: usize = 40 * CLUSTER;
/// Size after it has grown, bytes: not a whole number of clusters.
pub(super) const LARGE: usize = 80 * CLUSTER + 4096;
/// The bitmap that records, of the top and of a layer between.
pub(super) const BITMAP: &str = "backup";
/// The overlay that is put on top.
pub(super) const OVERLAY: &str = "overlay.qcow2";

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
    /// The top and what lies between go into the base.
    CommitThrough,
    /// What lies between goes into the base.
    CommitBelow,
    /// All that is below the top goes into it.
    Stream,
    /// What lies between goes into the top.
    StreamDown,
    /// A checkpoint with a new bitmap is made and ended.
    Checkpoint,
    /// The disk is mirrored to a qcow2 image, and switches over to it.
    Mirror,
    /// The same to a raw one, with writes of clients sent before they are answered.
    MirrorRaw,
    /// The disk is mirrored, and stays where it is.
    MirrorLeft,
    /// The disk is backed up to a qcow2 image.
    Backup,
    /// To a raw one.
    BackupRaw,
    /// What the top has is mirrored to an image over the same layers, and the disk switches over.
    MirrorTop,
    /// Nothing is mirrored but what clients write: the target has the rest.
    MirrorNone,
    /// All is read, and kept in the top.
    CopyOnRead,
}

/// What the disk is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A qcow2 image over another one.
    Chain,
    /// With a third one between.
    Deep,
    /// As `Chain`, of version 2 (compat 0.10).
    Old,
    /// A qcow2 image over a raw one.
    OverRaw,
    /// As `Chain`, with an external data file on top.
    Data,
    /// A qcow2 image with a raw external data file, which reads like the disk.
    DataRaw,
    /// A raw image.
    Raw,
}

impl Shape {
    /// The files, from the top down.
    fn files(self) -> &'static [(Victim, &'static str)] {
        const TOP: (Victim, &str) = (Victim::Top, "top.qcow2");
        const BASE: (Victim, &str) = (Victim::Base, "base.qcow2");
        const DATA: (Victim, &str) = (Victim::Data, "data.bin");
        match self {
            Shape::Chain | Shape::Old => &[TOP, BASE],
            Shape::Deep => &[TOP, (Victim::Between, "between.qcow2"), BASE],
            Shape::OverRaw => &[TOP, (Victim::Base, "base.raw")],
            Shape::Data => &[TOP, DATA, BASE],
            Shape::DataRaw => &[TOP, DATA],
            Shape::Raw => &[(Victim::Top, "top.raw")],
        }
    }

    /// The name of what is on top.
    pub(super) fn top(self) -> &'static str {
        self.files()[0].1
    }

    /// The name of the layer below that.
    fn below(self) -> Option<&'static str> {
        let files = self.files().iter().filter(|(victim, _)| *victim != Victim::Data);
        files.map(|(_, name)| *name).nth(1)
    }

    /// Number of layers.
    pub(super) fn depth(self) -> usize {
        self.files().iter().filter(|(victim, _)| *victim != Victim::Data).count()
    }

    pub(super) fn has_snapshots(self, change: Change) -> bool {
        match self {
            // Backing files are compared for snapshots too, and a commit is refused.
            Shape::Chain => !change.changes_below(),
            // Of version 2 such an image keeps its size.
            Shape::Old => matches!(change, Change::Create | Change::Apply | Change::Delete),
            Shape::Deep | Shape::OverRaw | Shape::Data | Shape::DataRaw | Shape::Raw => false,
        }
    }

    fn has_bitmap(self, change: Change) -> bool {
        // An image with bitmaps refuses to apply a snapshot.
        let can = matches!(self, Shape::Chain | Shape::Deep | Shape::OverRaw | Shape::Data);
        can && change != Change::Apply
    }
}

/// The storage whose operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Top,
    /// The data file of the top.
    Data,
    /// The layer between top and base.
    Between,
    Base,
    /// The overlay that is put on top.
    Overlay,
    /// The fleecing file of a checkpoint.
    Fleece,
    /// What the disk is mirrored to.
    Target,
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) change: Change,
    pub(super) shape: Shape,
    /// In flight when the change begins.
    pub(super) request: Request,
    pub(super) victim: Victim,
    /// The operation of the victim that fails, counted from the beginning of the change.
    pub(super) number: u64,
    /// So many operations after it another one fails.
    pub(super) again: Option<u64>,
    pub(super) injected: Injected,
    /// A checkpoint is running when the change begins.
    pub(super) is_frozen: bool,
    /// Clients that come while the change is made wait for a limit of the disk.
    pub(super) is_limited: bool,
}

/// The images of all cells of one change.
pub(super) struct Fixture {
    pub(super) place: TempDir,
    files: Vec<(Victim, &'static str, Vec<u8>)>,
    /// What the disk shows; also what it showed when the bitmap was made.
    pub(super) bytes: Vec<u8>,
    /// What the snapshot `old` shows.
    pub(super) old: Vec<u8>,
    pub(super) has_bitmap: bool,
    /// The empty target of a mirror.
    target: Option<Vec<u8>>,
}

fn fill(bytes: &mut [u8], clusters: std::ops::Range<usize>, byte: u8) -> String {
    bytes[clusters.start * CLUSTER..clusters.end * CLUSTER].fill(byte);
    let (at, len) = (clusters.start * CLUSTER, clusters.len() * CLUSTER);
    format!("write -P {byte} {at} {len}")
}

pub(super) fn format_of(name: &str) -> &'static str {
    if name.ends_with(".qcow2") { "qcow2" } else { "raw" }
}

impl Fixture {
    /// The images, each over the next one; `other.qcow2` has the content of the base.
    pub(super) fn new(change: Change, shape: Shape) -> Fixture {
        let place = directory();
        let mut bytes = vec![0; SIZE];
        let layers = shape.files().iter().filter(|(victim, _)| *victim != Victim::Data).rev();
        let mut below: Option<&str> = None;
        for &(victim, name) in layers {
            create(&place, shape, name, below);
            let format = format_of(name);
            let has_bitmap = shape.has_bitmap(change) && format == "qcow2";
            match victim {
                Victim::Base => qemu_io(&place, format, name, &[&fill(&mut bytes, 0..48, 1)]),
                Victim::Between => {
                    let (first, second) = (fill(&mut bytes, 6..24, 4), fill(&mut bytes, 50..52, 4));
                    qemu_io(&place, format, name, &[&first, &second]);
                    if has_bitmap {
                        qemu_img(&place, &["bitmap", "--add", "-g", "16k", name, BITMAP]);
                    }
                }
                Victim::Top | Victim::Data | Victim::Overlay | Victim::Fleece | Victim::Target => {}
            }
            below = Some(name);
        }
        let (top, format) = (shape.top(), format_of(shape.top()));
        if below == Some(top) && shape.depth() == 1 {
            qemu_io(&place, format, top, &[&fill(&mut bytes, 0..48, 1)]);
        }
        let (first, second) = (fill(&mut bytes, 0..8, 2), fill(&mut bytes, 60..64, 2));
        qemu_io(&place, format, top, &[&first, &second]);
        let old = bytes.clone();
        if shape.has_snapshots(change) {
            qemu_img(&place, &["snapshot", "-c", "old", top]);
        }
        let third = fill(&mut bytes, 4..16, 3);
        bytes[17 * CLUSTER..18 * CLUSTER].fill(0);
        let zero = format!("write -z {} {CLUSTER}", 17 * CLUSTER);
        qemu_io(&place, format, top, &[&third, &zero]);
        let has_bitmap = shape.has_bitmap(change);
        if has_bitmap {
            qemu_img(&place, &["bitmap", "--add", "-g", "16k", top, BITMAP]);
        }
        let read = |name: &str| std::fs::read(place.path().join(name)).expect("read");
        let files: Vec<_> =
            shape.files().iter().map(|&(victim, name)| (victim, name, read(name))).collect();
        if change == Change::Backing {
            let base = &files.last().expect("a base").2;
            std::fs::write(place.path().join("other.qcow2"), base).expect("write");
        }
        let target = change.target().map(|name| {
            let (size, format) = (SIZE.to_string(), format_of(name));
            let options: &[&str] =
                if format == "qcow2" { &["-o", "cluster_size=16k"] } else { &[] };
            let below = shape.below().filter(|_| change == Change::MirrorTop);
            let over = below.map(|below| ["-b", below, "-F", format_of(below)]);
            let over = over.as_ref().map_or(&[][..], |words| &words[..]);
            let words = [&["create", "-q", "-f", format], options, over, &[name, &size]].concat();
            qemu_img(&place, &words);
            read(name)
        });
        Fixture { files, bytes, old, has_bitmap, target, place }
    }

    /// An empty target of a mirror.
    fn new_target(&self) -> Option<SimStorage> {
        self.target.as_ref().map(|content| SimStorage::from_image(content, 8))
    }

    pub(super) fn world(&self, change: Change) -> World {
        let mut seed = 0;
        let mut storages: Vec<_> = self
            .files
            .iter()
            .map(|(victim, name, content)| {
                seed += 1;
                (*victim, *name, SimStorage::from_image(content, seed))
            })
            .collect();
        if change == Change::External {
            storages.push((Victim::Overlay, OVERLAY, SimStorage::new(0, 5)));
        }
        if let (Some(name), Some(sim)) = (change.target(), self.new_target()) {
            storages.push((Victim::Target, name, sim));
        }
        if change.can_meet_a_checkpoint() {
            storages.push((Victim::Fleece, "", SimStorage::new(0, 6)));
        }
        World { storages }
    }
}

/// Makes an image of 64 clusters.
fn create(place: &TempDir, shape: Shape, name: &str, below: Option<&str>) {
    let format = format_of(name);
    let is_top = name == shape.top();
    let mut words = vec!["create", "-q", "-f", format];
    if format == "qcow2" {
        words.extend(["-o", "cluster_size=16k"]);
        let more: &[&str] = match shape {
            Shape::Old => &["-o", "compat=0.10"],
            Shape::Data if is_top => &["-o", "data_file=data.bin"],
            Shape::DataRaw if is_top => &["-o", "data_file=data.bin,data_file_raw=on"],
            _ => &[],
        };
        words.extend(more);
    }
    if let Some(below) = below {
        words.extend(["-b", below, "-F", format_of(below)]);
    }
    let size = SIZE.to_string();
    words.extend([name, &size]);
    qemu_img(place, &words);
}

/// The storages of one cell.
pub(super) struct World {
    /// Each with the name of its file.
    pub(super) storages: Vec<(Victim, &'static str, SimStorage)>,
}

impl World {
    /// The storages of a change, as far as there are any.
    pub(super) fn victims(&self) -> Vec<Victim> {
        self.storages.iter().map(|(victim, ..)| *victim).collect()
    }

    pub(super) fn victim(&self, victim: Victim) -> &SimStorage {
        let found = self.storages.iter().find(|(it, ..)| *it == victim);
        &found.expect("a storage of this cell").2
    }

    /// The storage of a new overlay, or of the target of a mirror.
    pub(super) fn new_image(&self) -> Option<SimStorage> {
        let is_new = |victim| matches!(victim, Victim::Overlay | Victim::Target);
        let found = self.storages.iter().find(|(it, ..)| is_new(*it));
        found.map(|(.., sim)| sim.clone())
    }

    /// Another mirror goes to another target: the one before may still get what was sent to it.
    pub(super) fn renew_target(&mut self, fixture: &Fixture) {
        let found = self.storages.iter_mut().find(|(it, ..)| *it == Victim::Target);
        if let (Some((.., sim)), Some(new)) = (found, fixture.new_target()) {
            *sim = new;
        }
    }

    /// The target of a mirror has these bytes already.
    pub(super) fn fill_target(&mut self, bytes: &[u8]) {
        let found = self.storages.iter_mut().find(|(it, ..)| *it == Victim::Target);
        found.expect("a target").2 = SimStorage::from_image(bytes, 8);
    }

    pub(super) fn release(&self) -> usize {
        self.storages.iter().map(|(.., sim)| sim.release_all()).sum()
    }

    /// Opens the chain for writing.
    pub(super) async fn open(&self, ring: &Ring, fixture: &Fixture) -> Arc<Disk> {
        let mut layers = Vec::new();
        let place = fixture.place.path();
        let data = self.storages.iter().find(|(victim, ..)| *victim == Victim::Data);
        for (victim, name, sim) in &self.storages {
            if matches!(victim, Victim::Data | Victim::Overlay | Victim::Fleece | Victim::Target) {
                continue;
            }
            let writable = *victim == Victim::Top;
            let mut layer = if format_of(name) == "qcow2" {
                let open = ringdisk_qcow2::OpenOptions { writable, ..Default::default() };
                let image = ringdisk_qcow2::Qcow2::open(ring, sim.storage(), &open).await;
                let mut image = image.expect("the image opens");
                let data = data.filter(|_| image.info().external_data_file);
                if let Some((_, _, data)) = data {
                    image.set_data_file(data.storage()).expect("it takes a data file");
                }
                let mut layer = qcow2_layer(image, writable);
                layer.data_name = data.map(|(_, name, _)| place.join(name));
                layer
            } else {
                Layer::new(Node::Raw(Raw::new(sim.storage())), Bytes(sim.len()))
            };
            layer.is_writable = writable;
            layer.name = place.join(name);
            layer.directory = Some(place.to_owned());
            layers.push(layer);
        }
        let options =
            ImageOptions { allow_paths: vec![place.to_owned()], ..ImageOptions::default() };
        Disk::build(layers, Parts::new(&options))
    }
}
