use crate::concurrent::slices::{SliceCache, SliceIndex};
use crate::units::Bytes;

const WORDS: usize = 64;

fn first_word(cache: &SliceCache, slice: u32) -> Option<u64> {
    let found = cache.find(SliceIndex(slice))?;
    let word = found.word(0);
    found.still_there().then_some(word)
}

fn publish(cache: &SliceCache, slice: u32) {
    cache.publish(SliceIndex(slice), &[u64::from(slice) + 1000; WORDS]);
}

#[test]
fn an_empty_cache_finds_nothing() {
    let cache = SliceCache::new(100, WORDS, Bytes(1 << 20)).unwrap();
    assert_eq!(first_word(&cache, 0), None);
}

#[test]
fn a_disk_of_size_zero_has_an_empty_cache() {
    let cache = SliceCache::new(0, WORDS, Bytes(1 << 20)).unwrap();
    publish(&cache, 0);
    assert_eq!(first_word(&cache, 0), None);
}

#[test]
fn a_cache_for_the_whole_image_evicts_nothing() {
    let cache = SliceCache::new(1000, WORDS, Bytes(1 << 20)).unwrap();
    (0..1000).for_each(|slice| publish(&cache, slice));
    assert!((0..1000).all(|slice| first_word(&cache, slice) == Some(u64::from(slice) + 1000)));
    assert_eq!(cache.counters().evictions, 0);
}

#[test]
fn a_capped_cache_stays_in_its_cap_and_evicts() {
    let cap = 100 * WORDS as u64 * 8;
    let cache = SliceCache::new(1_000_000, WORDS, Bytes(cap)).unwrap();
    (0..1000).for_each(|slice| publish(&cache, slice));
    let found = (0..1000).filter(|slice| first_word(&cache, *slice).is_some()).count();
    assert!(cache.capacity_bytes() <= Bytes(cap));
    assert_eq!(Bytes::of(found * WORDS * 8), cache.capacity_bytes());
    assert_eq!(cache.counters().loads - cache.counters().evictions, found as u64);
}

#[test]
fn what_is_used_stays_while_a_scan_goes_by() {
    let cache = SliceCache::new(1_000_000, WORDS, Bytes(8 * WORDS as u64 * 8)).unwrap();
    publish(&cache, 5);
    for slice in 100..200 {
        assert!(first_word(&cache, 5).is_some(), "gone before slice {slice}");
        publish(&cache, slice);
    }
}

#[test]
fn a_slice_that_was_replaced_is_noticed() {
    let cache = SliceCache::new(1_000_000, WORDS, Bytes(8 * WORDS as u64 * 8)).unwrap();
    publish(&cache, 0);
    let found = cache.find(SliceIndex(0)).unwrap();
    (1..20).for_each(|slice| publish(&cache, slice));
    assert!(!found.still_there());
}

#[test]
fn a_slice_that_was_replaced_and_loaded_again_is_noticed() {
    let cache = SliceCache::new(1_000_000, WORDS, Bytes(8 * WORDS as u64 * 8)).unwrap();
    publish(&cache, 0);
    let found = cache.find(SliceIndex(0)).unwrap();
    (1..20).chain([0]).for_each(|slice| publish(&cache, slice));
    assert!(first_word(&cache, 0).is_some());
    assert!(!found.still_there());
}

#[test]
fn a_tiny_cap_still_holds_one_set() {
    let cache = SliceCache::new(1_000_000, WORDS, Bytes::ZERO).unwrap();
    publish(&cache, 999_999);
    assert_eq!(first_word(&cache, 999_999), Some(1_000_999));
}

#[test]
fn the_largest_image_gets_a_cache_of_its_cap_only() {
    let cache = SliceCache::new(1 << 31, 512, Bytes(1 << 20)).unwrap();
    let last = (1 << 31) - 1;
    cache.publish(SliceIndex(last), &[7; 512]);
    assert_eq!(first_word(&cache, last), Some(7));
    assert_eq!(cache.capacity_bytes(), Bytes(1 << 20));
}
