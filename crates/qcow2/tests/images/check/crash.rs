//! Power cuts and failures at every write and flush of a repair.

use ringdisk_qcow2::{ErrorKind, Repair, check_bytes};
use ringdisk_ring::{Errno, Runtime};
use ringdisk_testkit::sim::{Fault, OpKind, Prng, SimStorage, When};

use crate::check::damage::damage;
use crate::check::repair::rank;
use crate::check::{repair_on, seeds, shapes};
use crate::common::{Images, runtime};

/// States that are judged at each place.
const STATES: u64 = 3;

/// Judges what power cuts leave of a repair that fails from each of its changes on. Gives the
/// number of states.
fn no_worse(runtime: &mut Runtime, bytes: &[u8], repair: Repair, seed: u64, what: &str) -> u64 {
    let Ok(before) = check_bytes(bytes) else { return 0 };
    let whole = SimStorage::from_image(bytes, seed);
    if repair_on(runtime, &whole, repair).is_err() {
        return 0;
    }
    let places = whole.log().into_iter().enumerate();
    let changes = places.filter(|(_, record)| record.kind != OpKind::Read).map(|(at, _)| at);
    let mut judged = 0;
    for at in changes {
        let sim = SimStorage::from_image(bytes, seed);
        sim.on(When::any().skip(at as u64), Fault::Fail(Errno::IO));
        // Cutting the file back may fail unseen.
        if let Err(error) = repair_on(runtime, &sim, repair) {
            assert_eq!(error.kind(), ErrorKind::Io, "{what}, operation {at}");
        }
        for state in 0..STATES {
            let after = check_bytes(&sim.crash_image(state)[..])
                .unwrap_or_else(|error| panic!("{what}, operation {at}: {error}"));
            let case = format!("{what}, operation {at}, state {state}:\n{before:?}\n{after:?}");
            assert!(after.corruptions <= before.corruptions, "{case}");
            assert!(before.check_errors > 0 || after.check_errors == 0, "{case}");
            assert!(before.corruptions > 0 || after.leaks <= before.leaks, "{case}");
            judged += 1;
        }
    }
    judged
}

#[test]
fn a_refcount_block_whose_entry_is_damaged_is_read_until_the_header_leads_to_another() {
    let images = Images::new();
    let mut runtime = runtime();
    for (name, mut bytes) in shapes::make(&images) {
        // Offset of the refcount table: bytes 48 to 55 of the header; one reserved bit of its first
        // entry.
        let table = u64::from_be_bytes(bytes[48..56].try_into().expect("eight"));
        let entry = usize::try_from(table).expect("small");
        bytes[entry + 7] |= 0x10;
        for seed in 0..4 {
            let judged = no_worse(&mut runtime, &bytes, Repair::All, seed, name);
            assert!(judged > 0, "{name}");
        }
    }
}

#[test]
fn a_power_cut_during_a_repair_leaves_an_image_that_is_no_worse() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    let mut judged = 0u64;
    for seed in seeds(90) {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (bytes, what) = damage(good, &mut prng);
        let repair = if seed % 4 == 0 { Repair::Leaks } else { Repair::All };
        let case = format!("seed {seed}, {repair:?} of {name} with {what:?}");
        judged += no_worse(&mut runtime, &bytes, repair, seed, &case);
    }
    assert!(judged > 500 || seeds(90).end < 90, "only {judged} states");
}

#[test]
fn a_repair_that_failed_once_succeeds_the_next_time() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    let mut judged = 0u64;
    for seed in seeds(20) {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (bytes, what) = damage(good, &mut prng);
        let whole = SimStorage::from_image(&bytes, seed);
        let Ok(expected) = repair_on(&mut runtime, &whole, Repair::All) else { continue };
        for (at, _) in whole.log().iter().enumerate() {
            let sim = SimStorage::from_image(&bytes, seed);
            sim.on(When::number(at as u64), Fault::Fail(Errno::NOSPC));
            let _ = repair_on(&mut runtime, &sim, Repair::All);
            sim.clear_rules();
            let report = repair_on(&mut runtime, &sim, Repair::All).unwrap_or_else(|error| {
                panic!("seed {seed}, {name} with {what:?}, operation {at}: {error}")
            });
            let case = format!("seed {seed}, {name} with {what:?}, operation {at}: {report:?}");
            // What the first one kept for the user to look at, the second one may find to be leaks
            // alone.
            let is_no_worse = rank(report.verdict()) <= rank(expected.verdict());
            assert!(is_no_worse, "{case}\n{expected:?}");
            judged += 1;
        }
    }
    assert!(judged > 100 || seeds(20).end < 20, "only {judged} repairs");
}
