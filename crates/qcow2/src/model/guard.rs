//! Models of the guard that keeps data off metadata: writers in place look at the marks without a
//! lock, while tables take clusters under the lock of the reference counts.
//!
//! Promises: a schedule in which data get onto metadata fails the test and is printed. Only tests
//! build it.

use shuttle::{check_random, thread};

use super::grace::Graces;
use super::marks::{BITS_MIN, Marks};
use super::named::Named;
use super::slices::{SliceCache, SliceIndex};
use super::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use super::{SCHEDULES, WORDS, small_cache};
use crate::units::HostCluster;

/// The host cluster that all threads use; 0 is none.
const CLUSTER: u64 = 70;
/// Its bit is in the same word of the marks.
const NEIGHBOUR: u64 = 71;
const SLICE: SliceIndex = SliceIndex(1);

/// What was written to the cluster last.
const NOTHING: u64 = 0;
const DATA: u64 = 1;
const TABLE: u64 = 2;

/// What the lock of the reference counts guards.
struct Counts {
    count: u64,
    is_metadata: bool,
    named: Named,
}

/// How a table takes its cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Take {
    /// Counted and marked in one step (`Refcounts::allocate_metadata`).
    Marked,
    /// With the lock free in between.
    ThenMarked,
}

struct Image {
    counts: Mutex<Counts>,
    marks: Marks,
    graces: Graces,
    slices: SliceCache,
    /// The entry of the slice in the file.
    entry: u64,
    /// The cluster in the file.
    content: AtomicU64,
    /// Metadata was named as data: no change is made any more.
    is_corrupt: AtomicU64,
}

impl Image {
    /// * `count`: of the cluster.
    /// * `entry`: what the slice says in the file.
    fn new(count: u64, entry: u64) -> Arc<Image> {
        Arc::new(Image {
            counts: Mutex::new(Counts { count, is_metadata: false, named: Named::default() }),
            marks: Marks::new(1),
            graces: Graces::new(),
            slices: small_cache(),
            entry,
            content: AtomicU64::new(NOTHING),
            is_corrupt: AtomicU64::new(0),
        })
    }

    /// As `Qcow2::check_loaded`, before the slice is published.
    fn load(&self) {
        let found = self.marks.may_be(HostCluster(self.entry)) && lock(&self.counts).is_metadata;
        lock(&self.counts).named.insert(HostCluster(self.entry), 1);
        if found {
            self.is_corrupt.store(1, Ordering::SeqCst);
        }
        self.slices.publish(SLICE, &[self.entry; WORDS]);
    }

    /// As `Qcow2::write_in_place`: one load of the marks, and the lock only where that says
    /// "perhaps".
    fn write(&self) {
        let _grace = self.graces.enter();
        let Some(found) = self.slices.find(SLICE) else { return };
        let host = found.word(0);
        if !found.still_there() || host == 0 || self.is_corrupt.load(Ordering::SeqCst) != 0 {
            return;
        }
        if self.marks.may_be(HostCluster(host)) && lock(&self.counts).is_metadata {
            self.is_corrupt.store(1, Ordering::SeqCst);
            return;
        }
        // In flight, for about as long as a table takes: only two long steps meet in so many
        // schedules that a model sees each time what it is to see (a hundred schedules in place of
        // all find it).
        (0..24).for_each(|_| thread::yield_now());
        self.content.store(DATA, Ordering::SeqCst);
    }

    /// As `Qcow2::store_table`. Returns whether the cluster could be had.
    fn store_table(&self, take: Take) -> bool {
        {
            let mut counts = lock(&self.counts);
            let is_free = counts.count == 0 && !counts.is_metadata;
            if !is_free || counts.named.first_in(HostCluster(CLUSTER), 1).is_some() {
                return false;
            }
            counts.count = 1;
            if take == Take::Marked {
                self.mark(&mut counts);
            }
        }
        // It takes a while until the table is written.
        (0..24).for_each(|_| thread::yield_now());
        if take == Take::ThenMarked {
            self.mark(&mut lock(&self.counts));
        }
        self.content.store(TABLE, Ordering::SeqCst);
        true
    }

    fn mark(&self, counts: &mut Counts) {
        counts.is_metadata = true;
        self.marks.set(HostCluster(CLUSTER), 1);
    }

    /// Other metadata comes and goes in the same word of the marks.
    fn mark_neighbour(&self) {
        for _ in 0..2 {
            let counts = lock(&self.counts);
            self.marks.set(HostCluster(NEIGHBOUR), 1);
            drop(counts);
            let counts = lock(&self.counts);
            self.marks.clear(HostCluster(NEIGHBOUR), 1);
            drop(counts);
        }
    }
}

/// An entry that is in the file already names a cluster that is counted as free; it is loaded and
/// written through while a table is made.
fn a_free_cluster_that_an_entry_names(take: Take) {
    check_random(
        move || {
            let image = Image::new(0, CLUSTER);
            let loader = {
                let image = image.clone();
                thread::spawn(move || {
                    image.load();
                    image.write();
                })
            };
            let writer = {
                let image = image.clone();
                thread::spawn(move || {
                    image.write();
                    image.write();
                })
            };
            let other = {
                let image = image.clone();
                thread::spawn(move || image.mark_neighbour())
            };
            let is_taken = image.store_table(take);
            for thread in [loader, writer, other] {
                thread.join().expect("no panic");
            }
            let content = image.content.load(Ordering::SeqCst);
            assert!(!is_taken || content == TABLE, "data was written over a table");
            assert!(!is_taken || image.marks.may_be(HostCluster(CLUSTER)), "the mark is gone");
        },
        SCHEDULES,
    );
}

#[test]
fn data_never_lands_on_a_table_that_took_a_cluster_meanwhile() {
    a_free_cluster_that_an_entry_names(Take::Marked);
}

/// That the model can see it: with the lock free between count and mark a slice comes in between.
#[test]
#[should_panic(expected = "data was written over a table")]
fn a_cluster_that_is_taken_first_and_marked_later_is_written_over() {
    a_free_cluster_that_an_entry_names(Take::ThenMarked);
}

/// A cluster of data is freed while it is written through, and a table takes it.
#[test]
fn data_that_is_in_flight_when_its_cluster_is_freed_lands_before_the_table() {
    check_random(
        || {
            let image = Image::new(1, CLUSTER);
            image.load();
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    let image = image.clone();
                    thread::spawn(move || {
                        image.write();
                        image.write();
                    })
                })
                .collect();
            // A discard: the entry goes, and when no request can use it any more, the cluster is
            // free.
            image.slices.update(SLICE, false, true, |words| words.set(0, 0));
            let mark = image.graces.mark();
            let mut is_taken = false;
            for _ in 0..4 {
                if image.graces.passed(mark) {
                    {
                        let mut counts = lock(&image.counts);
                        counts.named.remove(HostCluster(CLUSTER), 1);
                        counts.count = 0;
                    }
                    is_taken = image.store_table(Take::Marked);
                    assert!(is_taken, "it is free");
                    break;
                }
                assert!(!image.store_table(Take::Marked), "it is counted");
                thread::yield_now();
            }
            writers.into_iter().for_each(|writer| writer.join().expect("writer"));
            assert!(!is_taken || image.content.load(Ordering::SeqCst) == TABLE);
        },
        SCHEDULES,
    );
}

/// Where several clusters share a bit, the mark of one is never taken off with that of another.
#[test]
fn a_mark_that_is_shared_stays() {
    check_random(
        || {
            let marks = Arc::new(Marks::new(1));
            let counts = Arc::new(Mutex::new(()));
            let far = CLUSTER + BITS_MIN;
            let near = {
                let (marks, counts) = (marks.clone(), counts.clone());
                thread::spawn(move || {
                    let held = lock(&counts);
                    marks.set(HostCluster(CLUSTER), 1);
                    drop(held);
                    assert!(marks.may_be(HostCluster(CLUSTER)), "it is metadata");
                    thread::yield_now();
                    assert!(marks.may_be(HostCluster(CLUSTER)), "and stays so");
                })
            };
            for clear in [false, true] {
                let held = lock(&counts);
                if clear {
                    marks.clear(HostCluster(far), 1);
                } else {
                    marks.set(HostCluster(far), 1);
                }
                drop(held);
            }
            near.join().expect("no panic");
            assert!(marks.may_be(HostCluster(CLUSTER)));
        },
        SCHEDULES,
    );
}
