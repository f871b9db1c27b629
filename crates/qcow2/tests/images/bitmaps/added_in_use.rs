//! A bitmap that is added while the image is in use: what it records, and what a power cut or a
//! failing storage leaves.

use ringdisk_qcow2::{Bytes, Error};
use ringdisk_testkit::sim::{Fault, SimStorage, When};

use super::faults::{State, every_crash, simulated, state_of};
use super::session::{Session, according_to_qemu, check, ranges};
use crate::common::{Images, KIB, MIB, runtime};

fn add_beside(session: &mut Session<'_>, name: &str) -> Result<(), Error> {
    let (image, ring) = (&session.image, &session.ring);
    session.runtime.block_on(image.bitmap_add_beside(ring, name, Some(Bytes(512))))
}

/// Name, whether it is in use, and what is marked in it.
fn bitmap<'a>(
    state: &'a State,
    name: &str,
) -> Option<&'a (String, bool, Vec<std::ops::Range<u64>>)> {
    state.iter().find(|(found, ..)| found == name)
}

#[test]
fn it_records_what_is_written_afterwards_and_the_others_record_all() {
    let images = Images::new();
    let mut runtime = runtime();
    for cluster in [512, 4096, 65536] {
        images.create("image", &format!("cluster_size={cluster}"), 8 * MIB);
        images.qemu_img(&["bitmap", "--add", "-g", "512", "image", "old"]);
        let path = images.path("image");
        let mut session = Session::open(&mut runtime, &path);
        session.write(0, 4096);
        add_beside(&mut session, "new").expect("added");
        session.write(MIB, 4096);
        let listed: Vec<(String, bool)> =
            session.image.bitmaps().into_iter().map(|one| (one.name, one.in_use)).collect();
        assert_eq!(listed, [("old".to_owned(), false), ("new".to_owned(), false)]);
        let error = add_beside(&mut session, "new").expect_err("a second one of this name");
        assert!(error.to_string().contains("is there already"), "{error}");
        session.close();
        check(&images, "image");
        let (first, second) = (0..4096, MIB..MIB + 4096);
        assert_eq!(ranges(&mut runtime, &path, "old"), [first, second.clone()]);
        let new = ranges(&mut runtime, &path, "new");
        assert_eq!(new, std::slice::from_ref(&second));
        assert_eq!(according_to_qemu(&mut runtime, &images, "image", "new", "512"), [second]);
    }
}

#[test]
fn without_a_write_all_bitmaps_stay_valid() {
    let mut runtime = runtime();
    let image = simulated(&mut runtime, 65536);
    let sim = SimStorage::from_image(&image, 1);
    let mut session = Session::new(&mut runtime, sim.storage(), true);
    add_beside(&mut session, "new").expect("added");
    drop(session);
    let empty = |name: &str| (name.to_owned(), false, Vec::new());
    let wanted = ["one", "two", "new"].map(empty);
    assert_eq!(state_of(&mut runtime, &sim.durable_image()), wanted);
    // The first write marks those that record.
    let mut session = Session::new(&mut runtime, sim.storage(), true);
    add_beside(&mut session, "newer").expect("added");
    session.write(0, 4096);
    drop(session);
    let in_use: Vec<bool> =
        state_of(&mut runtime, &sim.durable_image()).into_iter().map(|one| one.1).collect();
    assert_eq!(in_use, [true, false, true, true]);
}

#[test]
fn a_power_cut_leaves_no_bitmap_that_lacks_something() {
    let mut runtime = runtime();
    let first = 64 * KIB..64 * KIB + 4096;
    let second = MIB..MIB + 4096;
    for cluster_size in [512, 4096, 65536] {
        let image = simulated(&mut runtime, cluster_size);
        let before = state_of(&mut runtime, &image);
        // Nothing is written: valid with nothing marked, or in use.
        every_crash(&mut runtime, &image, &|session| add_beside(session, "new"), &|state| {
            let is_right = |one: &(String, bool, Vec<_>)| one.1 || one.2.is_empty();
            let two = bitmap(state, "two") == bitmap(&before, "two");
            two && bitmap(state, "one").is_some_and(is_right) && state.iter().all(is_right)
        });
        let work = |session: &mut Session<'_>| {
            let failed = |session: &mut Session<'_>| session.remove("no such bitmap");
            if session.try_write(64 * KIB, 4096).is_err() || session.try_flush().is_err() {
                return failed(session);
            }
            add_beside(session, "new")?;
            if session.try_write(MIB, 4096).is_err() || session.try_close().is_err() {
                return failed(session);
            }
            Ok(())
        };
        let all = vec![first.clone(), second.clone()];
        every_crash(&mut runtime, &image, &work, &|state| {
            let one = bitmap(state, "one").is_some_and(|one| {
                // Nothing was written yet, or it is in use, or it is complete.
                one.1 || one.2.is_empty() || one.2 == all
            });
            let new = bitmap(state, "new").is_none_or(|new| new.1 || new.2 == [second.clone()]);
            one && new && bitmap(state, "two") == bitmap(&before, "two")
        });
    }
}

#[test]
fn an_operation_that_fails_leaves_the_bitmaps_as_they_were() {
    let mut runtime = runtime();
    let mut failures = 0;
    for is_changed in [false, true] {
        let image = simulated(&mut runtime, 65536);
        for number in 0.. {
            let sim = SimStorage::from_image(&image, 1);
            let mut session = Session::new(&mut runtime, sim.storage(), true);
            if is_changed {
                session.write(64 * KIB, 4096);
            }
            let begin = sim.log().len() as u64;
            sim.on(When::number(begin + number), Fault::Fail(ringdisk_storage::Errno::IO));
            let done = add_beside(&mut session, "new");
            let is_over = sim.log().len() as u64 <= begin + number;
            failures += u32::from(done.is_err());
            sim.clear_rules();
            // A flush that failed lets no later one succeed.
            let goes_on = session.try_write(MIB, 4096).is_ok() && session.try_flush().is_ok();
            let crashed = sim.crash_image(number);
            let is_closed = goes_on && session.try_close().is_ok();
            assert_eq!(is_closed, goes_on, "{number}: the close");
            drop(session);
            if goes_on {
                let left = state_of(&mut runtime, &crashed);
                assert!(bitmap(&left, "one").is_some_and(|one| one.1), "{number}: {left:?}");
                assert!(bitmap(&left, "new").is_none_or(|new| new.1), "{number}: {left:?}");
                let saved = state_of(&mut runtime, &sim.durable_image());
                let marked = |name| bitmap(&saved, name).map(|one| (one.1, one.2.last().cloned()));
                let last = Some((false, Some(MIB..MIB + 4096)));
                assert_eq!(marked("one"), last, "{number}");
                assert_eq!(marked("new"), last.filter(|_| done.is_ok()), "{number}");
            }
            if is_over {
                break;
            }
        }
    }
    assert!(failures > 8, "{failures}");
}
