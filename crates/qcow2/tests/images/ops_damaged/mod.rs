//! Changes of damaged images, each damage × each change: what can be read before shows the same
//! afterwards, what cannot be read does not become bytes of another cluster, or the change is
//! refused.

// Test images are small.
#![allow(clippy::cast_possible_truncation, clippy::large_futures)]

mod alone;
mod change;
mod damage;
mod image;

use change::{CHANGES, Change, judge};
use damage::{DAMAGES, Of};
use image::{CLUSTER, COPIED, Contents, OFFSET, PLACES, good, scene};

use crate::common::KIB;

/// Of all tests below: a table in which every change is refused, or none is, says nothing.
fn assert_some_of(done: usize, cases: usize) {
    assert!(done > 0 && done < cases, "{done} of {cases} were made");
}

#[test]
fn a_damaged_image_shows_the_same_after_a_change_of_it_or_refuses_the_change() {
    let good = good();
    let (mut cases, mut done) = (0, 0);
    for damage in DAMAGES {
        for place in PLACES.iter().flat_map(|place| [0, 20, 40].map(|kib| place + kib * KIB)) {
            for of in [Of::Disk, Of::Snapshot('s'), Of::Snapshot('t')] {
                let damaged = damage.make(&good, of, place);
                for change in CHANGES {
                    let what = format!("{damage:?} of {of:?} at {place:#x}, {change:?}");
                    done += usize::from(judge(&damaged, change, false, &what));
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 16 * 9 * 3 * 10);
    assert_some_of(done, cases);
}

/// Bitmaps and what is on the disk share clusters, or those of the bitmap are not counted. (A
/// snapshot is not applied beside a bitmap.)
#[test]
fn a_bitmap_loses_nothing_by_a_change_and_takes_nothing_with_it() {
    let good = scene(true);
    let table = good.bitmap_table().expect("a bitmap");
    let bits = good.word(table) & OFFSET;
    assert!(good.bits(2048).expect("bits").iter().any(|byte| *byte != 0));
    let mut damaged: Vec<(String, Contents)> = Vec::new();
    for (name, host) in [("bits", bits), ("table", table)] {
        let mut one = good.clone();
        one.set_count(host, 0);
        damaged.push((format!("{name} not counted"), one));
    }
    let mut last = good.clone();
    let end = last.clusters() * CLUSTER;
    last.copy_to_end(bits);
    last.set_count(bits, 0);
    last.set(table, end);
    damaged.push((String::from("bits at the end, not counted"), last));
    for place in PLACES.iter().flat_map(|place| [0, 20, 40].map(|kib| place + kib * KIB)) {
        for l1 in [good.active(), good.snapshot('s').expect("s"), good.snapshot('t').expect("t")] {
            let entry_at = good.entry_at(l1, place);
            let (mut entry, mut word) = (good.clone(), good.clone());
            entry.set(entry_at, bits | COPIED);
            word.set(table, good.word(entry_at) & OFFSET);
            damaged.push((format!("the entry of {place:#x} in {l1:?} names the bits"), entry));
            damaged.push((format!("the bitmap names what {place:#x} in {l1:?} has"), word));
        }
    }
    let mut done = 0;
    for (what, damaged) in &damaged {
        for change in CHANGES {
            done += usize::from(judge(damaged, change, false, &format!("{what}, {change:?}")));
        }
    }
    assert_some_of(done, damaged.len() * CHANGES.len());
}

/// Each change opens the image again; what reads had shown to be in use is not forgotten.
#[test]
fn what_was_read_before_a_change_is_not_given_away_by_it() {
    let good = good();
    let (mut cases, mut done) = (0, 0);
    for damage in DAMAGES {
        for place in PLACES.iter().flat_map(|place| [*place, place + 40 * KIB]) {
            let damaged = damage.make(&good, Of::Disk, place);
            let changes = [Change::Create, Change::Grow, Change::Shrink, Change::Empty];
            for change in changes {
                let what = format!("{damage:?} at {place:#x}, {change:?}, read");
                done += usize::from(judge(&damaged, change, true, &what));
                cases += 1;
            }
        }
    }
    assert_some_of(done, cases);
}
