//! Power cuts while the graph changes and clients work: the chain that names itself on the media
//! reads as it may, at every moment.
//!
//! Storage operations wait until the driver lets them go, in an order that the seed decides, and
//! what would be offloaded runs at once: a seed repeats itself. The disk is `top.qcow2` over
//! `mid.qcow2` over `base.qcow2`, of which the lowest is full of stamps and the top has some
//! writes.

mod clients;
mod judge;

use ringdisk_qcow2::Bytes;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::layout::Shape;
use ringdisk_testkit::oracle::{Below, Oracle};
use ringdisk_testkit::sim::{Fault, Prng, SimStorage, When};
use tempfile::TempDir;

use super::commit_faults::{Images, chain, chain_in};
use super::{directory, run};
use crate::layer::Layer;
use crate::open::simulated::Simulated;
use crate::{
    Backing, CommitOptions, Disk, Format, OverlayOptions, Progress, ResizeOptions, SnapshotChange,
    StreamOptions,
};

use clients::client;
use judge::{State, cut, judge};

/// Size of the disk, bytes.
const SIZE: u64 = 512 << 10;
/// What the disk has grown to after a resize.
const GROWN: u64 = SIZE + (64 << 10);
/// What it has shrunk to: part of a cluster is cut off too.
const SMALL: u64 = SIZE / 2 + 2560;
const CLUSTER_BITS: u32 = 12;
/// What the base holds: stamps of another disk.
const BELOW: Below = Below { disk: 1, len: SIZE / 2 + 700 };
/// Clients at once.
const CLIENTS: u64 = 3;
/// Rounds without progress before a run counts as hung; some of them sleep a millisecond.
const IDLE_ROUNDS_MAX: u32 = 4000;

const TOP: &str = "top.qcow2";
/// An overlay that is put on top.
const OVER: &str = "over.qcow2";
/// Holds the same as all below the top.
const OTHER: &str = "other.qcow2";
/// The internal snapshot that is looked at.
const KEPT: &str = "kept";
/// The one that is deleted.
const GONE: &str = "gone";

/// A change of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// With the name of the top afterwards.
    Commit(CommitOptions, &'static str),
    Grow,
    Shrink,
    /// An overlay is put on top.
    Overlay,
    /// An internal snapshot is taken.
    Create,
    /// The disk becomes what it was in the snapshot.
    Apply,
    /// An older snapshot is deleted.
    Delete,
    Backing,
    Stream(StreamOptions),
}

/// How far the change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Stage {
    Before,
    /// It may be on the media, but requests do not see it.
    Under,
    /// Requests see it.
    Put,
}

/// What clients and driver share.
struct Shore {
    ring: Ring,
    disk: Arc<Disk>,
    what: Change,
    images: Images,
    stage: Cell<Stage>,
    /// The top layer before the change.
    top: RefCell<Arc<Layer>>,
    /// What the disk may hold.
    oracle: RefCell<Oracle>,
    /// What the snapshot, or the former top, holds.
    then: RefCell<Option<Oracle>>,
    /// The bytes of the image that is below the overlay.
    frozen: RefCell<Option<Vec<u8>>>,
    running: Cell<u64>,
}

impl Shore {
    fn is_put(&self) -> bool {
        self.stage.get() == Stage::Put
    }

    /// What the disk holds after the change; `None`: what it holds before.
    fn changed(&self, now: &Oracle) -> Option<Oracle> {
        let resized = |size| {
            let mut other = now.clone();
            other.resize(size);
            other
        };
        match self.what {
            Change::Grow => {
                let mut grown = resized(GROWN);
                grown.watch(SIZE..GROWN);
                Some(grown)
            }
            Change::Shrink => Some(resized(SMALL)),
            Change::Apply => self.then.borrow().as_ref().map(|then| now.restored_beside(then)),
            _ => None,
        }
    }

    /// Sees whether the change is put in place. To be called before the oracle is told or asked
    /// anything: the gate opens after that, so whatever begins from now on, or ends from a
    /// beginning after it, sees the change.
    fn look(&self) {
        let is_new = || !Arc::ptr_eq(&self.top.borrow(), self.disk.graph().top());
        if self.stage.get() != Stage::Under || !is_new() {
            return;
        }
        self.stage.set(Stage::Put);
        let now = self.oracle.borrow().clone();
        if matches!(self.what, Change::Create | Change::Overlay) {
            // All of it was made durable before.
            let mut then = now.clone();
            then.settle();
            *self.then.borrow_mut() = Some(then);
        }
        if self.what == Change::Overlay {
            let below = &self.images[TOP];
            assert_eq!(below.unflushed(), 0, "the former top is on stable storage");
            *self.frozen.borrow_mut() = Some(below.image());
        }
        if let Some(changed) = self.changed(&now) {
            *self.oracle.borrow_mut() = changed;
        }
    }
}

fn image(backing: Option<&str>) -> Vec<u8> {
    let backing = backing.map(|name| (name.to_owned(), "qcow2".to_owned()));
    Shape { cluster_bits: CLUSTER_BITS, size: SIZE, backing, ..Shape::default() }.make()
}

fn buffer(bytes: &[u8]) -> IoBuf {
    let buf = IoBuf::new(bytes.len(), 512);
    buf.copy_from_slice(0, bytes);
    buf
}

/// The three images, the lowest full of stamps, and those that a change makes or opens.
async fn images(ring: &Ring, what: Change, seed: u64) -> Images {
    let made = [("base.qcow2", None), ("mid.qcow2", Some("base.qcow2")), (TOP, Some("mid.qcow2"))];
    let mut images: Images = made
        .into_iter()
        .map(|(name, below)| (name.to_owned(), SimStorage::from_image(&image(below), seed)))
        .collect();
    let base = chain(ring, &images, "base.qcow2", true).await;
    let mut bytes = vec![0; usize::try_from(BELOW.len).expect("small")];
    BELOW.fill(0, &mut bytes);
    assert_eq!(base.write(ring, 0, &buffer(&bytes)).await, Ok(bytes.len()));
    assert_eq!(base.close(ring).await, Ok(()));
    if what == Change::Overlay {
        images.insert(OVER.to_owned(), SimStorage::new(0, seed));
    }
    if what == Change::Backing {
        // The middle one is empty.
        let same = images["base.qcow2"].fork(seed);
        images.insert(OTHER.to_owned(), same);
    }
    images
}

fn spawn(shore: &Rc<Shore>, work: impl Future<Output = ()> + 'static) {
    shore.running.set(shore.running.get() + 1);
    let counted = shore.clone();
    shore.ring.spawn(async move {
        work.await;
        counted.running.set(counted.running.get() - 1);
    });
}

async fn change(shore: &Shore) {
    let (ring, disk) = (&shore.ring, &shore.disk);
    let progress = Arc::new(Progress::new());
    let shrink = ResizeOptions { shrink: true, ..ResizeOptions::default() };
    let snapshot = |change| disk.snapshot(ring, change);
    let done = match shore.what {
        Change::Commit(options, _) => disk.commit(ring, options, &progress).await,
        Change::Grow => {
            disk.resize_with(ring, Bytes(GROWN), ResizeOptions::default()).await.map(drop)
        }
        Change::Shrink => disk.resize_with(ring, Bytes(SMALL), shrink).await.map(drop),
        Change::Overlay => disk.add_overlay(ring, OVER, OverlayOptions::default()).await,
        Change::Create => snapshot(SnapshotChange::Create(KEPT.to_owned())).await,
        Change::Apply => snapshot(SnapshotChange::Apply(KEPT.to_owned())).await,
        Change::Delete => snapshot(SnapshotChange::Delete(GONE.to_owned())).await,
        Change::Backing => {
            let backing = Backing { file: OTHER.into(), format: Format::Qcow2 };
            disk.change_backing(ring, Some(backing), &progress).await
        }
        Change::Stream(options) => disk.stream(ring, options, &progress).await,
    };
    done.unwrap_or_else(|error| panic!("{:?}: {error}", shore.what));
}

/// What happens before anything is held: writes, and the snapshots that the change needs.
async fn prepare(shore: &Rc<Shore>, prng: &mut Prng) {
    let alone = Rc::new(Cell::new(true));
    let mut write = async || client(shore.clone(), alone.clone(), prng.next_u64()).await;
    let take = async |name: &str| {
        let taken = shore.disk.snapshot(&shore.ring, SnapshotChange::Create(name.to_owned())).await;
        taken.expect("a snapshot");
        // It made everything durable.
        shore.oracle.borrow_mut().settle();
    };
    write().await;
    if shore.what == Change::Delete {
        take(GONE).await;
        write().await;
    }
    if matches!(shore.what, Change::Delete | Change::Apply) {
        take(KEPT).await;
        *shore.then.borrow_mut() = Some(shore.oracle.borrow().clone());
        write().await;
    }
    *shore.top.borrow_mut() = Arc::clone(shore.disk.graph().top());
}

/// Runs until nothing runs any more, with power cuts on the way.
async fn drive(shore: &Rc<Shore>, is_over: &Cell<bool>, prng: &mut Prng) -> Vec<State> {
    let (mut states, mut idle) = (Vec::new(), 0);
    while shore.running.get() > 0 {
        for _ in 0..3 {
            shore.ring.yield_now().await;
        }
        let held: Vec<(&SimStorage, u64)> = shore
            .images
            .values()
            .flat_map(|sim| sim.held().into_iter().map(move |held| (sim, held.number)))
            .collect();
        idle = if held.is_empty() { idle + 1 } else { 0 };
        if let Some((sim, number)) =
            held.get(usize::try_from(prng.below(held.len() as u64)).unwrap_or(0))
        {
            sim.release(*number);
        }
        if idle > 20 {
            shore.ring.sleep(Duration::from_millis(1)).await;
        }
        assert!(idle < IDLE_ROUNDS_MAX, "{:?} hangs", shore.what);
        // The change itself is rich in moments that matter; but for a commit it is short.
        let chance = match (shore.stage.get(), shore.what) {
            (Stage::Under, Change::Commit(..)) => 40,
            (Stage::Under, _) => 250,
            _ if is_over.get() => 10,
            _ => 4,
        };
        if prng.below(1000) < chance {
            states.push(cut(shore, prng.next_u64()));
        }
    }
    states
}

/// One seed: clients and a change at once, then every state that was taken.
fn one(what: Change, seed: u64) -> usize {
    run(async |ring| {
        ring.offload_here();
        let images = images(&ring, what, seed).await;
        let place = place();
        let simulated = |name: &str| Some((PathBuf::from(name), images.get(name)?.storage()));
        let _files = Simulated::new([OVER, OTHER].into_iter().filter_map(simulated));
        let mut prng = Prng::new(seed);
        let disk = chain_in(&ring, &images, TOP, true, place.path()).await;
        let shore = Rc::new(Shore {
            ring: ring.clone(),
            top: RefCell::new(Arc::clone(disk.graph().top())),
            disk,
            what,
            images,
            stage: Cell::new(Stage::Before),
            oracle: RefCell::new(Oracle::new(7, SIZE, BELOW)),
            then: RefCell::default(),
            frozen: RefCell::default(),
            running: Cell::new(0),
        });
        prepare(&shore, &mut prng).await;
        for sim in shore.images.values() {
            sim.on(When::any().chance(700), Fault::Hold);
        }
        let is_over = Rc::new(Cell::new(false));
        for _ in 0..CLIENTS {
            spawn(&shore, client(shore.clone(), is_over.clone(), prng.next_u64()));
        }
        let (other, over) = (shore.clone(), is_over.clone());
        let wait = prng.below(400);
        spawn(&shore, async move {
            for _ in 0..wait {
                other.ring.yield_now().await;
            }
            other.stage.set(Stage::Under);
            change(&other).await;
            other.look();
            assert!(other.is_put(), "{what:?} has put another top in place");
            over.set(true);
        });
        let states = drive(&shore, &is_over, &mut prng).await;
        shore.images.values().for_each(SimStorage::clear_rules);
        shore.images.values().for_each(|sim| assert_eq!(sim.release_all(), 0, "nothing waits"));
        assert_eq!(shore.disk.close(&ring).await, Ok(()), "seed {seed}");
        shore.oracle.borrow_mut().settle();
        if let Some(frozen) = &*shore.frozen.borrow() {
            assert!(
                shore.images[TOP].image() == *frozen,
                "the former top has changed, seed {seed}"
            );
        }
        let last = cut(&shore, 1);
        for state in states.iter().chain([&last]) {
            let judged = judge(&ring, state).await;
            judged
                .unwrap_or_else(|wrong| panic!("{what:?}, seed {seed}, {}: {wrong}", state.label));
        }
        states.len() + 1
    })
}

/// A directory with an empty file where a backing file is looked for.
fn place() -> TempDir {
    let place = directory();
    std::fs::write(place.path().join(OTHER), []).expect("write");
    place
}

/// Seeds of a test; more of them for a night.
fn seeds() -> u64 {
    let wanted = std::env::var("RINGDISK_CRASH_SEEDS").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if ringdisk_testkit::limits::full() { 100 } else { 12 })
}

fn all(what: Change) {
    let first = std::env::var("RINGDISK_CRASH_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let states: usize = (first..first + seeds()).map(|seed| one(what, seed)).sum();
    assert!(states > 5, "{states} states");
    println!("{what:?}: {states} states of seeds {first}..{}", first + seeds());
}

#[test]
fn a_commit_of_the_top_under_clients() {
    all(Change::Commit(CommitOptions { top: 0, base: 1, keep_top: false }, "mid.qcow2"));
}

#[test]
fn a_commit_through_the_chain_under_clients() {
    all(Change::Commit(CommitOptions { top: 0, base: 2, keep_top: false }, "base.qcow2"));
}

#[test]
fn a_commit_in_the_middle_under_clients() {
    all(Change::Commit(CommitOptions { top: 1, base: 2, keep_top: false }, TOP));
}

#[test]
fn a_disk_that_grows_under_clients() {
    all(Change::Grow);
}

#[test]
fn a_disk_that_shrinks_under_clients() {
    all(Change::Shrink);
}

#[test]
fn an_overlay_under_clients() {
    all(Change::Overlay);
}

#[test]
fn a_snapshot_under_clients() {
    all(Change::Create);
}

#[test]
fn a_snapshot_that_is_applied_under_clients() {
    all(Change::Apply);
}

#[test]
fn a_snapshot_that_is_deleted_under_clients() {
    all(Change::Delete);
}

#[test]
fn another_backing_file_under_clients() {
    all(Change::Backing);
}

#[test]
fn a_stream_of_the_whole_chain_under_clients() {
    all(Change::Stream(StreamOptions { base: None }));
}

#[test]
fn a_stream_down_to_a_base_under_clients() {
    all(Change::Stream(StreamOptions { base: Some(2) }));
}
