//! The steps of the protocol: the content of the area when a process dies between two of its
//! writes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

use super::super::{InflightArea, PackedArea, SplitArea, Taken};
use crate::driver::GuestRam;
use crate::layout::Layout;
use crate::layout::packed::{NONE, Place};
use crate::memory::{RingMemory, kill};

const SIZE: u16 = 8;
/// Where both layouts keep their version.
const VERSION_AT: usize = 8;
/// Of a split area.
const LAST_BATCH_HEAD: usize = 12;
/// Of a packed area.
const FREE_HEADS: usize = 12;
const USED_PLACES: usize = 16;
const START: Place = Place { index: 0, wrap: true };

fn area(layout: Layout) -> InflightArea {
    InflightArea::create(2, SIZE, layout).unwrap()
}

fn split(area: &InflightArea) -> SplitArea {
    area.queue(1).unwrap().split(SIZE).unwrap()
}

fn packed(area: &InflightArea) -> PackedArea {
    let mut packed = area.queue(1).unwrap().packed(SIZE).unwrap();
    packed.begin(START);
    packed
}

/// The memory of the queue.
fn memory(area: &InflightArea) -> RingMemory {
    area.queue(1).unwrap().memory
}

/// What a new process finds in flight.
fn found(area: &InflightArea, used: u16, avail: u16) -> Vec<u16> {
    let mut again = Vec::new();
    split(area).recover(used, avail, &mut again);
    again
}

/// Descriptors of a ring of which nothing is used.
fn ring(ram: &mut GuestRam) -> RingMemory {
    let driver = crate::driver::DriverConfig {
        layout: Layout::Packed,
        size: SIZE,
        event_idx: false,
        indirect: 0,
    };
    crate::driver::Driver::new(ram, driver).unwrap().areas().descriptors.clone()
}

/// Dies after one write of `work`.
fn die_after_one_write(work: impl FnOnce()) {
    kill::after(1);
    let died = catch_unwind(AssertUnwindSafe(work)).is_err_and(|it| it.is::<kill::Killed>());
    kill::never();
    assert!(died, "it has one write only");
}

#[test]
fn each_queue_has_a_part_of_its_own_and_no_more_descriptors_than_it_has_room_for() {
    let areas = area(Layout::Split);
    let mut one = split(&areas);
    one.recover(0, 0, &mut Vec::new());
    one.take(3);
    assert!(areas.queue(1).unwrap().is_busy() && !areas.queue(0).unwrap().is_busy());
    assert!(areas.is_busy());
    assert!(areas.queue(0).unwrap().split(SIZE + 1).is_none());
    assert!(areas.queue(0).unwrap().packed(SIZE).is_none());
    let areas = area(Layout::Packed);
    assert!(areas.queue(0).unwrap().packed(SIZE + 1).is_none());
    assert!(areas.queue(0).unwrap().split(SIZE).is_none());
}

#[test]
fn split_chains_are_taken_again_in_their_order_also_after_the_second_time() {
    let area = area(Layout::Split);
    assert_eq!(found(&area, 0, 0), []);
    let mut first = split(&area);
    first.recover(0, 0, &mut Vec::new());
    [5, 2, 7].into_iter().for_each(|head| first.take(head));
    let mut again = Vec::new();
    let mut second = split(&area);
    second.recover(0, 3, &mut again);
    assert_eq!(again, [5, 2, 7]);
    second.take(1);
    assert_eq!(found(&area, 0, 4), [5, 2, 7, 1]);
    // For a queue of another size it says nothing.
    let mut other = area.queue(1).unwrap().split(4).unwrap();
    again.clear();
    other.recover(0, 4, &mut again);
    assert_eq!((again, other.given_up()), (vec![], None));
}

#[test]
fn a_split_batch_of_all_descriptors_is_finished_and_one_that_makes_no_sense_given_up() {
    let area = area(Layout::Split);
    let mut first = split(&area);
    first.recover(0, 0, &mut Vec::new());
    (0..SIZE).for_each(|head| first.take(head));
    (0..SIZE).for_each(|head| first.link(head));
    // The driver sees the batch, and the process is gone.
    let mut second = split(&area);
    let mut again = Vec::new();
    second.recover(SIZE, SIZE, &mut again);
    assert_eq!((again, second.given_up()), (vec![], None));
    memory(&area).store_u16(LAST_BATCH_HEAD, SIZE, Relaxed);
    let mut third = split(&area);
    third.recover(SIZE + 1, SIZE + 1, &mut Vec::new());
    assert!(third.given_up().is_some());
}

#[test]
fn a_split_area_is_true_after_the_first_write_of_each_step() {
    let area = area(Layout::Split);
    let mut first = split(&area);
    first.recover(0, 0, &mut Vec::new());
    first.take(5);
    die_after_one_write(|| first.take(2));
    assert_eq!(found(&area, 0, 1), [5], "it is in flight with the last write");
    first.link(5);
    die_after_one_write(|| first.link(3));
    assert_eq!(memory(&area).load_u16(LAST_BATCH_HEAD, Relaxed), 5, "named when it has a next");
    // An area that begins anew, here for another size, says nothing until it is whole.
    let mut other = area.queue(1).unwrap().split(4).unwrap();
    die_after_one_write(|| other.recover(0, 0, &mut Vec::new()));
    assert_eq!(memory(&area).load_u16(VERSION_AT, Relaxed), 0);
}

fn taken(slot: u16) -> Taken {
    Taken { slot, last: slot, count: 1, free: slot + 1 }
}

#[test]
fn a_packed_area_is_true_after_the_first_write_of_each_step() {
    let area = area(Layout::Packed);
    let mut first = packed(&area);
    die_after_one_write(|| first.take(&taken(0)));
    assert!(!area.is_busy(), "it is in flight with the last write");
    first.take(&taken(0));
    let next = START.plus(1, SIZE);
    first.promise(0, next);
    let before = memory(&area).load_u64(USED_PLACES, Relaxed);
    let heads = memory(&area).load_u32(FREE_HEADS, Relaxed);
    die_after_one_write(|| first.give([0].into_iter(), 0, next));
    assert!(!area.is_busy());
    assert_eq!(memory(&area).load_u64(USED_PLACES, Relaxed), before);
    assert_eq!(memory(&area).load_u32(FREE_HEADS, Relaxed), heads);
    die_after_one_write(|| first.begin(START));
    assert_eq!(memory(&area).load_u16(VERSION_AT, Relaxed), 0);
}

#[test]
fn a_packed_area_that_is_retired_is_not_in_use() {
    let area = area(Layout::Packed);
    packed(&area).take(&taken(0));
    assert!(area.is_busy() && area.queue(1).unwrap().packed(SIZE).unwrap().is_in_use());
    assert!(!area.queue(1).unwrap().packed(4).unwrap().is_in_use(), "of another size");
    area.retire(1);
    assert!(!area.is_busy() && !area.queue(1).unwrap().packed(SIZE).unwrap().is_in_use());
}

#[test]
fn a_packed_area_that_contradicts_itself_is_refused() {
    let mut ram = GuestRam::new(1 << 20).unwrap();
    let ring = ring(&mut ram);
    let area = area(Layout::Packed);
    let recover = || area.queue(1).unwrap().packed(SIZE).unwrap().recover(&ring);
    packed(&area).take(&taken(0));
    assert_eq!(recover().unwrap().heads.len(), 1);
    // Entries that are neither free nor in flight.
    let none = u32::from(NONE) | u32::from(NONE) << 16;
    memory(&area).store_u32(FREE_HEADS, none, Relaxed);
    assert!(recover().is_err());
    // A chain that does not end where it says.
    packed(&area).take(&Taken { last: 3, ..taken(0) });
    assert!(recover().is_err());
}
