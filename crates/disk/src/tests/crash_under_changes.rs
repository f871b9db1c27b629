//! Power cuts while the graph changes and clients work: the chain that names itself on the media reads as it may, at every moment.
//!
//! Storage operations wait until the driver lets them go, in an order that the seed decides, and what would be offloaded runs at once:
//! a seed repeats itself. The disk is `top.qcow2` over `mid.qcow2` over `base.qcow2`, all of it stamped.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::check_bytes;
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::layout::Shape;
use ringdisk_testkit::oracle::{Below, Content, Oracle, SECTOR};
use ringdisk_testkit::sim::{Fault, Prng, SimStorage, When};

use super::commit_faults::{Images, chain};
use super::run;
use crate::{CommitOptions, Disk, Progress, ResizeOptions, SnapshotChange};

/// Size of the disk, bytes.
const SIZE: u64 = 512 << 10;
/// What the disk has grown to after a resize.
const GROWN: u64 = SIZE + (64 << 10);
const CLUSTER_BITS: u32 = 12;
/// What the base holds: stamps of another disk.
const BELOW: Below = Below { disk: 1, len: SIZE / 2 + 700 };
/// Clients at once, and their operations at least.
const CLIENTS: u64 = 3;
const OPERATIONS: u64 = 40;
/// Looks without progress before a run hangs; some of them sleep a millisecond.
const PATIENCE: u32 = 4000;

/// A change of the graph, with the name of the top afterwards.
#[derive(Clone, Copy, Debug)]
enum Change {
    Commit(CommitOptions, &'static str),
    Grow,
    Snapshot,
}

/// What may be left of a moment.
struct State {
    images: BTreeMap<String, Vec<u8>>,
    /// Names under which the disk may be opened.
    tops: Vec<&'static str>,
    /// What it may hold; a size that changes makes two.
    worlds: Vec<Oracle>,
    label: String,
}

/// What clients and driver share.
struct Shore {
    ring: Ring,
    disk: Arc<Disk>,
    oracle: RefCell<Oracle>,
    running: Cell<u64>,
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

/// The three images, the lowest full of stamps.
async fn images(ring: &Ring, seed: u64) -> Images {
    let made =
        [("base.qcow2", None), ("mid.qcow2", Some("base.qcow2")), ("top.qcow2", Some("mid.qcow2"))];
    let images: Images = made
        .into_iter()
        .map(|(name, below)| (name.to_owned(), SimStorage::from_image(&image(below), seed)))
        .collect();
    let base = chain(ring, &images, "base.qcow2", true).await;
    let mut bytes = vec![0; usize::try_from(BELOW.len).expect("small")];
    BELOW.fill(0, &mut bytes);
    assert_eq!(base.write(ring, 0, &buffer(&bytes)).await, Ok(bytes.len()));
    assert_eq!(base.close(ring).await, Ok(()));
    images
}

/// A range of whole sectors; often a whole cluster.
fn range(prng: &mut Prng) -> std::ops::Range<u64> {
    let cluster = 1 << CLUSTER_BITS;
    if prng.below(3) == 0 {
        let at = prng.below(SIZE / cluster) * cluster;
        return at..at + cluster;
    }
    let at = prng.below(SIZE / SECTOR) * SECTOR;
    at..(at + (1 + prng.below(24)) * SECTOR).min(SIZE)
}

/// One client: at least its operations, and until the change is over.
async fn client(shore: Rc<Shore>, is_over: Rc<Cell<bool>>, seed: u64) {
    let mut prng = Prng::new(seed);
    let mut done = 0;
    while done < OPERATIONS || !is_over.get() {
        done += 1;
        let (ring, disk, at) = (&shore.ring, &shore.disk, range(&mut prng));
        let len = at.end - at.start;
        let begin = |content| shore.oracle.borrow_mut().begin(at.clone(), content);
        match prng.below(12) {
            0..=4 => {
                let begun = begin(Content::Stamped);
                let buf = buffer(&shore.oracle.borrow().bytes(&begun));
                assert_eq!(disk.write(ring, at.start, &buf).await, Ok(buf.len()), "write {at:?}");
                shore.oracle.borrow_mut().end(&begun, true);
            }
            5 => {
                let begun = begin(Content::Zero);
                let unmap = prng.coin();
                assert_eq!(
                    disk.write_zeroes(ring, at.start, len, unmap).await,
                    Ok(()),
                    "zero {at:?}"
                );
                shore.oracle.borrow_mut().end(&begun, true);
            }
            6 => {
                let begun = begin(Content::Zero);
                assert_eq!(disk.punch(ring, at.start, len).await, Ok(()), "punch {at:?}");
                shore.oracle.borrow_mut().end(&begun, true);
            }
            7 | 8 => {
                let begun = shore.oracle.borrow_mut().begin_flush();
                assert_eq!(disk.flush(ring).await, Ok(()), "flush");
                shore.oracle.borrow_mut().end_flush(&begun);
            }
            _ => {
                let begun = shore.oracle.borrow_mut().begin_read(at.clone());
                let buf = IoBuf::new(usize::try_from(len).expect("small"), 512);
                assert_eq!(disk.read(ring, at.start, &buf).await, Ok(buf.len()), "read {at:?}");
                let judged = shore.oracle.borrow_mut().end_read(&begun, &buf.to_vec());
                judged.unwrap_or_else(|wrong| panic!("read {at:?}: {wrong}"));
            }
        }
        for _ in 0..prng.below(3) {
            shore.ring.yield_now().await;
        }
    }
}

fn spawn(shore: &Rc<Shore>, work: impl Future<Output = ()> + 'static) {
    shore.running.set(shore.running.get() + 1);
    let counted = shore.clone();
    shore.ring.spawn(async move {
        work.await;
        counted.running.set(counted.running.get() - 1);
    });
}

async fn change(ring: &Ring, disk: &Disk, change: Change) {
    let progress = Arc::new(Progress::new());
    let done = match change {
        Change::Commit(options, _) => disk.commit(ring, options, &progress).await,
        Change::Grow => disk.resize_with(ring, GROWN, ResizeOptions::default()).await.map(drop),
        Change::Snapshot => disk.snapshot(ring, SnapshotChange::Create("s".to_owned())).await,
    };
    done.unwrap_or_else(|error| panic!("{change:?}: {error}"));
}

/// Runs until nothing runs any more, with power cuts on the way.
async fn drive(
    shore: &Rc<Shore>,
    images: &Images,
    what: Change,
    is_over: &Cell<bool>,
    prng: &mut Prng,
) -> Vec<State> {
    let (mut states, mut idle) = (Vec::new(), 0);
    while shore.running.get() > 0 {
        for _ in 0..3 {
            shore.ring.yield_now().await;
        }
        let held: Vec<(&SimStorage, u64)> = images
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
        assert!(idle < PATIENCE, "{what:?} hangs");
        // The change itself is rich in moments that matter.
        if prng.below(1000) < if is_over.get() { 4 } else { 15 } {
            states.push(cut(shore, images, what, is_over.get(), prng.next_u64()));
        }
    }
    states
}

/// The power fails: one of the states that this may leave.
fn cut(shore: &Shore, images: &Images, what: Change, is_over: bool, seed: u64) -> State {
    let now = shore.oracle.borrow().clone();
    let mut worlds = vec![now];
    if matches!(what, Change::Grow) {
        let mut grown = worlds[0].clone();
        grown.resize(GROWN);
        grown.watch(SIZE..GROWN);
        worlds.push(grown);
        if is_over {
            worlds.remove(0);
        }
    }
    let tops = match what {
        // Who was not told of the commit opens the old top; both show the same.
        Change::Commit(_, after) if is_over => vec![after],
        _ => vec!["top.qcow2"],
    };
    let left = |(name, sim): (&String, &SimStorage)| (name.clone(), sim.crash_image(seed));
    State {
        images: images.iter().map(left).collect(),
        tops,
        worlds,
        label: format!("over {is_over}, state {seed:#x}"),
    }
}

/// All images are sound, and the disk is one of the worlds.
async fn judge(ring: &Ring, state: &State) -> Result<(), String> {
    for (name, image) in &state.images {
        let report = check_bytes(image.as_slice()).map_err(|error| format!("{name}: {error}"))?;
        if report.corruptions > 0 {
            return Err(format!("{name}: {:?}", report.messages));
        }
    }
    let images: Images = state
        .images
        .iter()
        .map(|(name, bytes)| (name.clone(), SimStorage::from_image(bytes, 1)))
        .collect();
    for top in &state.tops {
        let disk = chain(ring, &images, top, false).await;
        let mut bytes = vec![0; usize::try_from(disk.size()).expect("small")];
        let buf = buffer(&bytes);
        let read = disk.read(ring, 0, &buf).await;
        if read != Ok(bytes.len()) {
            return Err(format!("{top}: {read:?}"));
        }
        buf.copy_to_slice(0, &mut bytes);
        let mut wrong = Vec::new();
        for world in &state.worlds {
            if world.size() != bytes.len() as u64 {
                wrong.push(format!("{} bytes, not {}", bytes.len(), world.size()));
                continue;
            }
            let seen = world.judge_crash(|at, out| {
                let at = usize::try_from(at).map_err(|error| error.to_string())?;
                out.copy_from_slice(&bytes[at..at + out.len()]);
                Ok(())
            });
            match seen {
                Ok(()) => wrong.clear(),
                Err(mismatch) => wrong.push(mismatch.to_string()),
            }
            if wrong.is_empty() {
                break;
            }
        }
        if !wrong.is_empty() {
            return Err(format!("{top}: {}", wrong.join("; or ")));
        }
    }
    Ok(())
}

/// One seed: clients and a change at once, then every state that was taken.
fn one(what: Change, seed: u64) -> usize {
    run(async |ring| {
        ring.offload_here();
        let images = images(&ring, seed).await;
        let mut prng = Prng::new(seed);
        let disk = chain(&ring, &images, "top.qcow2", true).await;
        for sim in images.values() {
            sim.on(When::any().chance(700), Fault::Hold);
        }
        let shore = Rc::new(Shore {
            ring: ring.clone(),
            disk,
            oracle: RefCell::new(Oracle::new(7, SIZE, BELOW)),
            running: Cell::new(0),
        });
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
            change(&other.ring, &other.disk, what).await;
            over.set(true);
        });
        let states = drive(&shore, &images, what, &is_over, &mut prng).await;
        images.values().for_each(SimStorage::clear_rules);
        images.values().for_each(|sim| assert_eq!(sim.release_all(), 0, "nothing waits"));
        assert_eq!(shore.disk.close(&ring).await, Ok(()), "seed {seed}");
        shore.oracle.borrow_mut().settle();
        let last = cut(&shore, &images, what, true, 1);
        for state in states.iter().chain([&last]) {
            let judged = judge(&ring, state).await;
            judged
                .unwrap_or_else(|wrong| panic!("{what:?}, seed {seed}, {}: {wrong}", state.label));
        }
        states.len() + 1
    })
}

/// Seeds of a test; more of them for a night.
fn seeds() -> u64 {
    let wanted = std::env::var("RINGDISK_CRASH_SEEDS").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if ringdisk_testkit::limits::full() { 100 } else { 6 })
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
    all(Change::Commit(CommitOptions { top: 1, base: 2, keep_top: false }, "top.qcow2"));
}

#[test]
fn a_disk_that_grows_under_clients() {
    all(Change::Grow);
}

#[test]
fn a_snapshot_under_clients() {
    all(Change::Snapshot);
}
