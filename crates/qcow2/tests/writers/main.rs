//! Who waits for whom: only writers to the same cluster for each other, and only those who need a
//! piece of metadata for its load.

#![allow(clippy::large_futures)]

#[path = "../common/mod.rs"]
mod common;
mod discards;
#[path = "../common/live.rs"]
mod live;
mod space;
mod stress;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use common::runtime;
use live::{Base, Shared, buffer, open, writable};
use ringdisk_qcow2::{Bytes, ExtentKind, GuestOffset, HostOffset, Nothing};
use ringdisk_ring::Ring;
use ringdisk_testkit::layout::{Class, Layout, Shape};
use ringdisk_testkit::oracle::Below;
use ringdisk_testkit::process::LIMIT;
use ringdisk_testkit::sim::{Fault, OpKind, Record, SimStorage, When};

const CLUSTER: u64 = 4096;
/// Bytes of the disk that one L2 table maps.
const COVERED: u64 = CLUSTER / 8 * CLUSTER;

/// An image whose first change is behind it, so that nothing but the requests themselves goes to
/// the storage.
struct Stage {
    ring: Ring,
    sim: SimStorage,
    image: Shared,
    /// Tasks that have begun what they are for.
    begun: Rc<Cell<usize>>,
    /// Names of the tasks that have ended.
    ended: Rc<RefCell<Vec<&'static str>>>,
}

impl Stage {
    async fn new(ring: Ring) -> Stage {
        let shape = Shape { cluster_bits: 12, size: 8 * COVERED, ..Shape::default() };
        let sim = SimStorage::from_image(&shape.make(), 1);
        let stage = Stage::over(ring, sim).await;
        // Tables for all of the disk.
        for table in 0..8 {
            stage.write(table * COVERED + 100 * CLUSTER, 512).await;
        }
        stage.image.flush(&stage.ring).await.expect("a flush");
        stage
    }

    async fn over(ring: Ring, sim: SimStorage) -> Stage {
        let image = open(&ring, &sim, None, &writable()).await.expect("a sound image");
        Stage { ring, sim, image: Arc::new(image), begun: Rc::default(), ended: Rc::default() }
    }

    async fn write(&self, offset: u64, len: usize) {
        let done = self
            .image
            .write(&self.ring, GuestOffset(offset), &buffer(&vec![7; len]), &Nothing)
            .await;
        assert_eq!(done, Ok(len));
    }

    fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + 'static) {
        let (begun, ended) = (self.begun.clone(), self.ended.clone());
        self.ring.spawn(async move {
            begun.set(begun.get() + 1);
            work.await;
            ended.borrow_mut().push(name);
        });
    }

    fn spawn_write(&self, name: &'static str, offset: u64, len: usize) {
        let (ring, image) = (self.ring.clone(), self.image.clone());
        self.spawn(name, async move {
            let done =
                image.write(&ring, GuestOffset(offset), &buffer(&vec![9; len]), &Nothing).await;
            assert_eq!(done, Ok(len));
        });
    }

    fn spawn_read(&self, name: &'static str, offset: u64) {
        let (ring, image) = (self.ring.clone(), self.image.clone());
        self.spawn(name, async move {
            let base = Base(Below::NOTHING);
            live::read(&ring, &image, &base, offset, &mut [0; 512]).await.expect("a read");
        });
    }

    fn spawn_flush(&self, name: &'static str) {
        let (ring, image) = (self.ring.clone(), self.image.clone());
        self.spawn(name, async move { image.flush(&ring).await.expect("a flush") });
    }

    /// Lets the others run until it is so.
    async fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !is_so() {
            assert!(Instant::now() < end, "{what}; ended: {}", self.ended.borrow().len());
            self.ring.yield_now().await;
        }
    }

    async fn settle(&self) {
        for _ in 0..50 {
            self.ring.yield_now().await;
        }
    }

    /// What has ended, in alphabetical order.
    fn ended(&self) -> Vec<&'static str> {
        let mut names = self.ended.borrow().clone();
        names.sort_unstable();
        names
    }
}

/// Polls once.
async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_pending())).await
}

fn on_stage<F: Future<Output = ()>>(test: impl FnOnce(Stage) -> F) {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async { test(Stage::new(ring).await).await });
}

#[test]
fn only_writers_to_the_same_new_cluster_wait_for_each_other() {
    on_stage(|stage| async move {
        stage.sim.on(When::kind(OpKind::Write).once(), Fault::Hold);
        stage.spawn_write("first", 0, 512);
        stage.settle().await;
        assert_eq!(stage.sim.held().len(), 1);
        stage.spawn_write("same cluster", 1024, 512);
        stage.spawn_write("neighbour", CLUSTER, 512);
        stage.spawn_write("other table", 3 * COVERED, 512);
        stage.spawn_write("in place", 100 * CLUSTER, 512);
        stage.spawn_read("read of it", 0);
        stage.spawn_read("read", 100 * CLUSTER);
        stage.settle().await;
        assert_eq!(stage.ended(), ["in place", "neighbour", "other table", "read", "read of it"]);
        stage.sim.release_all();
        stage.settle().await;
        assert_eq!(stage.ended().len(), 7);
    });
}

#[test]
fn a_flush_does_not_wait_for_writes_that_are_not_answered() {
    on_stage(|stage| async move {
        stage.sim.on(When::kind(OpKind::Write).once(), Fault::Hold);
        stage.spawn_write("held", 0, 512);
        stage.spawn_write("other", 50 * CLUSTER, 512);
        stage.settle().await;
        stage.spawn_flush("flush");
        stage.settle().await;
        assert_eq!(stage.ended(), ["flush", "other"]);
        stage.sim.release_all();
        stage.settle().await;
    });
}

#[test]
fn writes_and_reads_go_on_while_a_flush_is_under_way() {
    on_stage(|stage| async move {
        stage.write(0, 512).await;
        stage.sim.on(When::kind(OpKind::Flush).once(), Fault::Hold);
        stage.spawn_flush("flush");
        stage.settle().await;
        stage.spawn_write("same cluster", 1024, 512);
        stage.spawn_write("new cluster", CLUSTER, 512);
        stage.spawn_read("read", 0);
        stage.settle().await;
        assert_eq!(stage.ended(), ["new cluster", "read", "same cluster"]);
        stage.sim.release_all();
        stage.settle().await;
        assert_eq!(stage.ended().len(), 4);
    });
}

/// Writes the first cluster again, is answered or dropped while the write is under way, discards
/// the cluster, and tells whether its place was given to another one afterwards.
async fn is_reused(stage: &Stage, is_dropped: bool) -> bool {
    let (ring, image) = (&stage.ring, &stage.image);
    let host = async |offset: u64| match image
        .map(ring, GuestOffset(offset), Bytes(1))
        .await
        .expect("a map")
        .kind
    {
        ExtentKind::Data { offset } => Some(offset),
        _ => None,
    };
    stage.write(0, 4096).await;
    let place = host(0).await.expect("just written");
    stage
        .sim
        .on(When::kind(OpKind::Write).at(place.0..(place + Bytes(CLUSTER)).0).once(), Fault::Hold);
    let data = buffer(&[8; 4096]);
    let mut write = Box::pin(image.write(ring, GuestOffset(0), &data, &Nothing));
    poll_fn(|context| {
        assert!(write.as_mut().poll(context).is_pending(), "it is held");
        Poll::Ready(())
    })
    .await;
    if is_dropped {
        drop(write);
    } else {
        assert_eq!(stage.sim.release_all(), 1);
        assert_eq!(write.await, Ok(4096));
    }
    image.discard(ring, GuestOffset(0), Bytes(CLUSTER), &Nothing).await.expect("a discard");
    for _ in 0..3 {
        image.flush(ring).await.expect("a flush");
    }
    for cluster in 1..40 {
        stage.write(cluster * CLUSTER, 4096).await;
        if host(cluster * CLUSTER).await == Some(place) {
            return true;
        }
    }
    false
}

#[test]
fn the_place_of_a_write_that_was_dropped_in_the_middle_is_not_used_again() {
    on_stage(async |stage| assert!(is_reused(&stage, false).await));
    on_stage(async |stage| assert!(!is_reused(&stage, true).await));
}

/// A new cluster is not linked yet, so nothing but the request knew of it: no one else uses it
/// until the image is opened by a process that the write cannot reach.
#[test]
fn a_new_cluster_whose_write_was_dropped_is_given_to_nobody() {
    on_stage(|stage| async move {
        let ring = stage.ring.clone();
        stage.sim.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let data = buffer(&[8; 4096]);
        let mut write = Box::pin(stage.image.write(&ring, GuestOffset(0), &data, &Nothing));
        while stage.sim.held().is_empty() {
            assert!(is_pending(&mut write).await, "nothing was held");
            ring.yield_now().await;
        }
        let place = stage.sim.held()[0].offset;
        drop(write);
        let fills = async |stage: &Stage, places: Vec<u64>| {
            for at in places {
                stage.write(at, 4096).await;
                let map = stage.image.map(&ring, GuestOffset(at), Bytes(1)).await.expect("a map");
                assert_ne!(
                    map.kind,
                    ExtentKind::Data { offset: HostOffset(place) },
                    "the cluster at {at}"
                );
            }
        };
        fills(&stage, (1..30).map(|cluster| cluster * CLUSTER).collect()).await;
        // Nor at the end, which says nothing of the write.
        stage.image.close(&ring).await.expect("a close");
        let again = Stage::over(ring.clone(), stage.sim.fork(2)).await;
        // Without a neighbour whose place they would go behind.
        fills(&again, (0..8).map(|table| table * COVERED + 50 * CLUSTER).collect()).await;
    });
}

#[test]
fn discards_stop_nobody() {
    on_stage(|stage| async move {
        stage.sim.on(When::kind(OpKind::Discard), Fault::Hold);
        let (ring, image) = (stage.ring.clone(), stage.image.clone());
        stage.spawn("discard", async move {
            image
                .discard(&ring, GuestOffset(100 * CLUSTER), Bytes(CLUSTER), &Nothing)
                .await
                .expect("a discard");
        });
        stage.spawn_flush("flush");
        stage.spawn_write("same place", 100 * CLUSTER, 512);
        stage.spawn_write("write", 0, 512);
        stage.settle().await;
        stage.spawn_flush("second flush");
        stage.settle().await;
        let ended = stage.ended();
        assert!(
            ["discard", "same place", "write"].iter().all(|name| ended.contains(name)),
            "{ended:?}"
        );
        stage.sim.clear_rules();
        while stage.sim.release_all() > 0 {
            stage.settle().await;
        }
        assert_eq!(stage.ended().len(), 5);
    });
}

#[test]
fn a_slow_load_delays_only_those_who_need_it() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let first = Stage::new(ring.clone()).await;
        first.image.close(&ring).await.expect("a close");
        let stage = Stage::over(ring, first.sim.fork(2)).await;
        let layout = Layout::of(&stage.sim);
        let l2 = layout.references.iter().find(|(_, (class, _))| *class == Class::L2);
        // Made first, so it is that of the start of the disk.
        let table = l2.expect("tables").0 * CLUSTER;
        stage.sim.on(When::kind(OpKind::Read).at(table..table + CLUSTER), Fault::Hold);
        stage.spawn_read("read there", 0);
        stage.spawn_write("write there", 512, 512);
        stage.settle().await;
        assert!(!stage.sim.held().is_empty());
        stage.spawn_read("read", COVERED);
        stage.spawn_write("write", COVERED + CLUSTER, 512);
        stage.spawn_write("overwrite", 2 * COVERED + 100 * CLUSTER, 512);
        stage.settle().await;
        stage.spawn_flush("flush");
        stage.settle().await;
        assert_eq!(stage.ended(), ["flush", "overwrite", "read", "write"]);
        stage.sim.clear_rules();
        stage.sim.release_all();
        stage.settle().await;
        assert_eq!(stage.ended().len(), 6);
        assert_eq!(stage.sim.held().len(), 0);
    });
}

#[test]
fn as_many_clusters_are_allocated_at_once_as_there_are_writers() {
    on_stage(|stage| async move {
        stage.sim.on(When::kind(OpKind::Write), Fault::Hold);
        for number in 0..64 {
            stage.spawn_write("write", number % 8 * COVERED + number / 8 * 2 * CLUSTER, 4096);
        }
        stage.settle().await;
        assert_eq!(stage.sim.held().len(), 64);
        let mut places: Vec<u64> = stage.sim.held().iter().map(|held| held.offset).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 64, "two writers in one place");
        stage.sim.clear_rules();
        stage.sim.release_shuffled();
        stage.settle().await;
        assert_eq!(stage.ended().len(), 64);
    });
}

#[test]
fn a_large_write_is_one_write_of_adjacent_clusters() {
    on_stage(|stage| async move {
        let before = stage.sim.log().len();
        stage.write(COVERED / 2, 1 << 20).await;
        let log = stage.sim.log();
        let writes: Vec<_> = log[before..].iter().filter(|r| r.kind == OpKind::Write).collect();
        assert_eq!(writes.iter().map(|write| write.len).collect::<Vec<u64>>(), [1 << 20]);
    });
}

#[test]
fn sequential_writes_get_adjacent_clusters() {
    on_stage(|stage| async move {
        let before = stage.sim.log().len();
        for piece in 0..16 {
            stage.write(COVERED / 2 + piece * 16 * CLUSTER, 16 * 4096).await;
        }
        let log = stage.sim.log();
        let writes: Vec<_> = log[before..].iter().filter(|r| r.kind == OpKind::Write).collect();
        assert_eq!(writes.len(), 16);
        let adjacent = |pair: &[&ringdisk_testkit::sim::Record]| {
            pair[0].offset + pair[0].len == pair[1].offset
        };
        assert!(writes.windows(2).all(adjacent), "{writes:?}");
    });
}

#[test]
fn a_flush_writes_what_is_dirty_and_nothing_else() {
    on_stage(|stage| async move {
        stage.write(0, 512).await;
        let before = stage.sim.log().len();
        stage.image.flush(&stage.ring).await.expect("a flush");
        let log = stage.sim.log();
        let count = |kind| log[before..].iter().filter(|record| record.kind == kind).count();
        // The refcount block and the slice; a barrier after each.
        assert_eq!((count(OpKind::Write), count(OpKind::Flush), count(OpKind::Read)), (2, 2, 0));
        stage.image.flush(&stage.ring).await.expect("a flush");
        assert_eq!(stage.sim.log().len(), log.len() + 1, "with nothing dirty it is one flush");
    });
}

#[test]
fn many_writes_share_two_barriers() {
    on_stage(|stage| async move {
        for number in 0..200 {
            stage.spawn_write("write", number % 8 * COVERED + number / 8 * 3 * CLUSTER, 4096);
        }
        stage.until("200 writes end", || stage.ended().len() == 200).await;
        let before = stage.sim.count(OpKind::Flush);
        stage.sim.on(When::kind(OpKind::Flush).once(), Fault::Hold);
        for _ in 0..10 {
            stage.spawn_flush("flush");
        }
        let is_held = || stage.begun.get() == 210 && stage.sim.held().len() == 1;
        stage.until("ten flushes begin, and one is held", is_held).await;
        stage.sim.release_all();
        stage.until("ten flushes end", || stage.ended().len() == 210).await;
        // Two barriers for the first flush, and one for all those that came while it ran.
        assert_eq!(stage.sim.count(OpKind::Flush) - before, 3);
    });
}

/// Begins a flush, drops it when a write that `held` names is under way, and changes what that
/// write is about.
async fn drop_flush_and_change(stage: &Stage, held: When) -> (Record, u64) {
    let (ring, image) = (&stage.ring, &stage.image);
    stage.sim.on(held.once(), Fault::Hold);
    let mut flush = Box::pin(image.flush(ring));
    while stage.sim.held().is_empty() {
        assert!(is_pending(&mut flush).await, "nothing was held");
        ring.yield_now().await;
    }
    let held = stage.sim.held()[0];
    drop(flush);
    stage.write(CLUSTER, 512).await;
    let place = match image.map(ring, GuestOffset(CLUSTER), Bytes(1)).await.expect("a map").kind {
        ExtentKind::Data { offset } => offset,
        other => panic!("{other:?}"),
    };
    (held, place.0)
}

/// A metadata write of a flush that was dropped is held, and another flush follows.
async fn the_older_write_lands_first(stage: Stage, held: When) {
    stage.write(0, 512).await;
    let (old, place) = drop_flush_and_change(&stage, held).await;
    stage.spawn_flush("flush");
    stage.settle().await;
    let range = old.offset..old.offset + old.len;
    let overtaken = stage.sim.log().into_iter().any(|record| {
        record.kind == OpKind::Write
            && record.number > old.number
            && record.offset < range.end
            && range.start < record.offset + record.len
    });
    assert!(!overtaken, "the place of the held write {old:?} was written again");
    assert_eq!(stage.ended(), Vec::<&str>::new());
    assert!(stage.sim.release(old.number), "it is still under way");
    while stage.ended() != ["flush"] {
        stage.ring.yield_now().await;
    }
    let again =
        Stage::over(stage.ring.clone(), SimStorage::from_image(&stage.sim.durable_image(), 1));
    let map = again.await.image.map(&stage.ring, GuestOffset(CLUSTER), Bytes(1)).await;
    assert_eq!(map.expect("a map").kind, ExtentKind::Data { offset: HostOffset(place) });
}

#[test]
fn a_slice_that_a_dropped_flush_was_writing_lands_before_the_next_one() {
    on_stage(|stage| async move {
        let header = stage.sim.image();
        let word = |at: u64| {
            let at = usize::try_from(at).expect("small");
            u64::from_be_bytes(header[at..at + 8].try_into().expect("8 bytes"))
        };
        let table = word(word(40)) & 0x00ff_ffff_ffff_fe00;
        let held = When::kind(OpKind::Write).at(table..table + CLUSTER);
        the_older_write_lands_first(stage, held).await;
    });
}

/// Two slices of one table are written together; the flush is dropped, and the next one writes the
/// second of them.
#[test]
fn a_slice_inside_a_longer_write_of_a_dropped_flush_lands_before_the_next_one() {
    const LARGE: u64 = 64 << 10;
    /// Bytes of the disk that a slice of 4 KiB maps.
    const SLICE: u64 = 512 * LARGE;
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let shape = Shape { cluster_bits: 16, size: 4 * SLICE, ..Shape::default() };
        let sim = SimStorage::from_image(&shape.make(), 1);
        let stage = Stage::over(ring.clone(), sim).await;
        stage.write(0, 512).await;
        stage.image.flush(&ring).await.expect("a flush");
        stage.write(LARGE, 512).await;
        stage.write(SLICE, 512).await;
        let both = When::kind(OpKind::Write).skip(1);
        stage.sim.on(both.once(), Fault::Hold);
        let mut flush = Box::pin(stage.image.flush(&ring));
        while stage.sim.held().is_empty() {
            assert!(is_pending(&mut flush).await, "nothing was held");
            ring.yield_now().await;
        }
        let old = stage.sim.held()[0];
        assert_eq!(old.len, 8192, "both slices");
        drop(flush);
        stage.write(SLICE + LARGE, 512).await;
        stage.spawn_flush("flush");
        stage.settle().await;
        let second = old.offset + 4096..old.offset + old.len;
        let log = stage.sim.log();
        let overtaken = log.iter().any(|record| {
            record.kind == OpKind::Write
                && record.number > old.number
                && second.contains(&record.offset)
        });
        assert!(!overtaken, "a part of the held write {old:?} was written again");
        stage.sim.release_all();
        while stage.ended() != ["flush"] {
            ring.yield_now().await;
        }
    });
}

#[test]
fn reference_counts_that_a_dropped_flush_was_writing_land_before_the_next_ones() {
    on_stage(|stage| async move {
        let header = stage.sim.image();
        let word = |at: u64| {
            let at = usize::try_from(at).expect("small");
            u64::from_be_bytes(header[at..at + 8].try_into().expect("8 bytes"))
        };
        let block = word(word(48));
        let held = When::kind(OpKind::Write).at(block..block + CLUSTER);
        the_older_write_lands_first(stage, held).await;
    });
}
