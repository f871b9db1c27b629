//! Models of what writers do: claims, grace periods, changed and evicted slices.
//!
//! Promises: a failure prints the schedule, which repeats it. Only tests build it.

// A few clusters.
#![allow(clippy::cast_possible_truncation)]

use shuttle::future::block_on;
use shuttle::{check_random, thread};

use super::grace::Graces;
use super::region::{MovingRegion, Region};
use super::registry::Registry;
use super::slices::SliceIndex;
use super::sync::{Arc, AtomicU64, Ordering};
use super::{SCHEDULES, WORDS, contents, small_cache};
use crate::units::{Bytes, HostOffset};

#[test]
fn claims_that_overlap_never_hold_together_and_all_end() {
    check_random(
        || {
            let registry = Arc::new(Registry::new());
            let held: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
            let threads: Vec<_> = [(0, 2), (1, 3), (2, 4), (0, 4)]
                .into_iter()
                .map(|(start, end)| {
                    let (registry, held) = (registry.clone(), held.clone());
                    thread::spawn(move || {
                        block_on(async {
                            let _claim = registry.claim(start, end).await;
                            for cluster in start..end {
                                assert_eq!(
                                    held[cluster as usize].fetch_add(1, Ordering::SeqCst),
                                    0
                                );
                            }
                            for cluster in start..end {
                                held[cluster as usize].fetch_sub(1, Ordering::SeqCst);
                            }
                        });
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().expect("thread"));
            assert!(registry.try_claim(0, 4).is_some());
        },
        SCHEDULES,
    );
}

#[test]
fn a_cluster_is_not_used_again_while_a_request_may_still_use_it() {
    check_random(
        || {
            let graces = Arc::new(Graces::new());
            // The host cluster that the table names, and whether each one was given to others.
            let table = Arc::new(AtomicU64::new(0));
            let reused: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let (graces, table, reused) = (graces.clone(), table.clone(), reused.clone());
                    thread::spawn(move || {
                        for _ in 0..2 {
                            let _grace = graces.enter();
                            let host = table.load(Ordering::SeqCst) as usize;
                            thread::yield_now();
                            assert_eq!(reused[host].load(Ordering::SeqCst), 0, "cluster {host}");
                        }
                    })
                })
                .collect();
            for host in 0..3 {
                table.store(host + 1, Ordering::SeqCst);
                let mark = graces.mark();
                for _ in 0..3 {
                    if graces.passed(mark) {
                        reused[host as usize].store(1, Ordering::SeqCst);
                        break;
                    }
                    thread::yield_now();
                }
            }
            readers.into_iter().for_each(|reader| reader.join().expect("reader"));
            let mark = graces.mark();
            assert!(graces.passed(mark), "nobody is left");
        },
        SCHEDULES,
    );
}

#[test]
fn the_words_of_an_entry_change_together() {
    check_random(
        || {
            let cache = Arc::new(small_cache());
            cache.publish(SliceIndex(1), &[0; WORDS]);
            let writer = {
                let cache = cache.clone();
                thread::spawn(move || {
                    for value in 1..4 {
                        cache.update(SliceIndex(1), true, true, |words| {
                            (0..WORDS).for_each(|word| words.set(word, value));
                        });
                    }
                })
            };
            for _ in 0..3 {
                let found = cache.find(SliceIndex(1)).expect("never evicted");
                let words: [u64; WORDS] = std::array::from_fn(|word| found.word(word));
                if found.still_there() {
                    assert!(words.iter().all(|word| *word == words[0]), "{words:?}");
                }
            }
            writer.join().expect("writer");
        },
        SCHEDULES,
    );
}

#[test]
fn a_change_is_never_lost_to_eviction() {
    check_random(
        || {
            let cache = Arc::new(small_cache());
            cache.publish(SliceIndex(0), &contents(SliceIndex(0)));
            // What the image file has.
            let disk = Arc::new(AtomicU64::new(0));
            let writer = {
                let (cache, disk) = (cache.clone(), disk.clone());
                thread::spawn(move || {
                    cache.update(SliceIndex(0), false, true, |words| words.set(0, 77));
                    let taken = cache.take_dirty(usize::MAX);
                    for slice in &taken {
                        assert!(slice.links);
                        disk.store(slice.words[0], Ordering::SeqCst);
                    }
                    cache.written(&taken, true);
                })
            };
            for slice in (8..40).step_by(8).map(SliceIndex) {
                cache.publish(slice, &contents(slice));
            }
            writer.join().expect("writer");
            let loaded = cache.find(SliceIndex(0)).map(|found| found.word(0));
            // Evicted before the change: the update said so. After it: it was written first.
            let written = disk.load(Ordering::SeqCst);
            assert!(written == 77 || written == 0 && loaded.is_none(), "{loaded:?} {written}");
        },
        SCHEDULES,
    );
}

#[test]
fn a_range_that_neither_place_touches_never_overlaps_a_region_that_moves() {
    check_random(
        || {
            let places = [(50, 60), (10, 20), (70, 80)]
                .map(|(start, end)| Region { start: HostOffset(start), end: HostOffset(end) });
            let region = Arc::new(MovingRegion::new(places[0]));
            let looker = {
                let region = region.clone();
                thread::spawn(move || {
                    for _ in 0..3 {
                        assert!(!region.overlaps(HostOffset(30), HostOffset(31)), "between");
                        assert!(!region.overlaps(HostOffset(65), HostOffset(66)), "behind");
                    }
                })
            };
            for place in &places[1..] {
                region.set(*place);
                assert!(region.overlaps(place.start, place.start + Bytes(1)), "it is there now");
            }
            looker.join().expect("looker");
            assert!(
                !region.overlaps(HostOffset(50), HostOffset(60))
                    && !region.overlaps(HostOffset(10), HostOffset(20))
                    && region.overlaps(HostOffset(79), HostOffset(90))
            );
        },
        SCHEDULES,
    );
}

#[test]
fn a_grace_period_passes_while_new_requests_always_overlap() {
    check_random(
        || {
            let graces = Arc::new(Graces::new());
            let old = graces.enter();
            let mark = graces.mark();
            assert!(!graces.passed(mark));
            // From now on there is always a request in flight, but none of before.
            let mut current = graces.enter();
            let other = graces.clone();
            let helper = thread::spawn(move || {
                for _ in 0..3 {
                    let _grace = other.enter();
                    thread::yield_now();
                }
            });
            drop(old);
            let mut looks = 0;
            while !graces.passed(mark) {
                // The next one begins before this one ends.
                current = graces.enter();
                looks += 1;
                assert!(looks < 100, "requests that came later hold it up");
                thread::yield_now();
            }
            drop(current);
            helper.join().expect("helper");
        },
        SCHEDULES,
    );
}
