//! Model of the parts that threads share: the very source files `slices.rs`, `loads_in_flight.rs`,
//! `registry.rs`, `grace.rs`, `unlinked.rs`, `region.rs`, `marks.rs` and `named_clusters.rs`, built
//! on simulated atomics and locks, under every order of steps that the checker finds.
//!
//! Promises: a failure prints the schedule, which repeats it. Only tests build it.

mod freeing;
mod guard;
mod sync;
mod writing;

#[path = "../concurrent/loads_in_flight.rs"]
mod flight;
#[allow(dead_code, unreachable_pub)]
#[path = "../concurrent/grace.rs"]
mod grace;
#[allow(dead_code)]
#[path = "../refcounts/marks.rs"]
mod marks;
#[allow(dead_code)]
#[path = "../refcounts/named_clusters.rs"]
mod named;
#[allow(dead_code)]
#[path = "../concurrent/region.rs"]
mod region;
#[allow(dead_code)]
#[path = "../concurrent/registry.rs"]
mod registry;
// The counters are looked at elsewhere.
#[allow(dead_code)]
#[path = "../concurrent/slices.rs"]
mod slices;
#[path = "../concurrent/unlinked.rs"]
mod unlinked;

use crate::units::Bytes;
use shuttle::future::block_on;
use shuttle::{check_random, thread};

use flight::{Flights, Join};
use slices::{SliceCache, SliceIndex};
use sync::{Arc, AtomicU64, Ordering};

/// Schedules to try. Each takes well under a millisecond.
const SCHEDULES: usize = 2000;
/// Words of a slice: enough to be torn.
const WORDS: usize = 3;

/// What the words of `slice` hold.
fn contents(slice: SliceIndex) -> [u64; WORDS] {
    std::array::from_fn(|word| u64::from(slice.0) * 100 + word as u64)
}

/// Looks up `slice`: `None` when it is not there or went away meanwhile.
fn look_up(cache: &SliceCache, slice: SliceIndex) -> Option<[u64; WORDS]> {
    let found = cache.find(slice)?;
    let words = std::array::from_fn(|word| found.word(word));
    found.still_there().then_some(words)
}

/// A cache of one set: 8 slots for 40 slices.
fn small_cache() -> SliceCache {
    SliceCache::new(40, WORDS, Bytes(8 * WORDS as u64 * 8)).expect("memory")
}

#[test]
fn a_reader_never_sees_words_of_another_slice_while_slots_are_reused() {
    check_random(
        || {
            let cache = Arc::new(small_cache());
            for slice in 0..8 {
                cache.publish(SliceIndex(slice), &contents(SliceIndex(slice)));
            }
            let writers: Vec<_> = [8, 24]
                .into_iter()
                .map(|first| {
                    let cache = cache.clone();
                    thread::spawn(move || {
                        for slice in (first..first + 3).chain([0]).map(SliceIndex) {
                            cache.publish(slice, &contents(slice));
                        }
                    })
                })
                .collect();
            for slice in [0, 1, 8, 0].map(SliceIndex) {
                if let Some(words) = look_up(&cache, slice) {
                    assert_eq!(words, contents(slice));
                }
            }
            for writer in writers {
                writer.join().expect("writer");
            }
            // A slice is in one slot at most, and whole.
            let slices = (0..40).map(SliceIndex);
            let loaded = slices.filter_map(|slice| Some((slice, look_up(&cache, slice)?)));
            assert_eq!(loaded.map(|(slice, words)| assert_eq!(words, contents(slice))).count(), 8);
        },
        SCHEDULES,
    );
}

/// Loads `slice` as the image does: lead, follow or find it.
async fn load(
    cache: &SliceCache,
    flights: &Flights<SliceIndex, ()>,
    reads: &AtomicU64,
    slice: SliceIndex,
) -> [u64; WORDS] {
    loop {
        if let Some(words) = look_up(cache, slice) {
            return words;
        }
        match flights.join(slice, || cache.find(slice).map(drop)) {
            Join::Ready(()) => {}
            Join::Follow(follower) => {
                if let Some(result) = follower.await {
                    result.expect("no error was made");
                }
            }
            Join::Lead(leader) => {
                reads.fetch_add(1, Ordering::SeqCst);
                cache.publish(slice, &contents(slice));
                leader.finish(Ok(()));
            }
        }
    }
}

#[test]
fn several_threads_that_miss_one_slice_load_it_once() {
    check_random(
        || {
            let cache = Arc::new(SliceCache::new(2, WORDS, Bytes(1 << 20)).expect("memory"));
            let flights = Arc::new(Flights::new());
            let reads = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let (cache, flights) = (cache.clone(), flights.clone());
                    let reads = reads.clone();
                    thread::spawn(move || {
                        let words = block_on(load(&cache, &flights, &reads, SliceIndex(1)));
                        assert_eq!(words, contents(SliceIndex(1)));
                    })
                })
                .collect();
            for thread in threads {
                thread.join().expect("thread");
            }
            assert_eq!(reads.load(Ordering::SeqCst), 1);
        },
        SCHEDULES,
    );
}

#[test]
fn a_leader_that_is_dropped_lets_a_follower_lead() {
    check_random(
        || {
            let flights: Arc<Flights<u32, u32>> = Arc::new(Flights::new());
            let other = flights.clone();
            let dropper = thread::spawn(move || drop(other.join(7, || None)));
            let value = block_on(async {
                loop {
                    match flights.join(7, || None) {
                        Join::Ready(value) => return value,
                        Join::Lead(leader) => {
                            leader.finish(Ok(9));
                            return 9;
                        }
                        Join::Follow(follower) => {
                            if let Some(result) = follower.await {
                                return result.expect("no error was made");
                            }
                        }
                    }
                }
            });
            assert_eq!(value, 9);
            dropper.join().expect("dropper");
            assert_eq!(flights.len(), 0);
        },
        SCHEDULES,
    );
}
