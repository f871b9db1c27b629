//! Power cuts, storage that fails and storage that is full, while bitmaps are changed and recorded.

use std::ops::Range;

use ringdisk_qcow2::{Bytes, CreateOptions, GuestOffset, Nothing};
use ringdisk_ring::{IoBuf, Runtime};
use ringdisk_testkit::sim::{Fault, SimStorage, When};

use crate::bitmaps::session::{Session, Work, check, info};
use crate::common::{Images, KIB, MIB, runtime};

/// An image in memory with two bitmaps: `one` records, `two` does not.
pub(super) fn simulated(runtime: &mut Runtime, cluster_size: u64) -> Vec<u8> {
    let ring = runtime.ring().clone();
    let sim = SimStorage::new(0, 1);
    let options = CreateOptions {
        size: Bytes(4 * MIB),
        cluster_size: Bytes(cluster_size),
        ..Default::default()
    };
    runtime
        .block_on(ringdisk_qcow2::create(&ring, &sim.storage(), None, &options))
        .expect("an image");
    let mut session = Session::new(runtime, sim.storage(), true);
    session.add("one", Some(512)).expect("added");
    session.add("two", Some(512)).expect("added");
    session.enable("two", false).expect("disabled");
    session.close();
    sim.durable_image()
}

/// What an image that another process left says about its bitmaps: name, in use, ranges.
pub(super) type State = Vec<(String, bool, Vec<Range<u64>>)>;

pub(super) fn state_of(runtime: &mut Runtime, image: &[u8]) -> State {
    let mut session = Session::new(runtime, SimStorage::from_image(image, 1).storage(), false);
    let list = session.list();
    let one = |(name, in_use, _): (String, bool, bool)| {
        let ranges = if in_use { Vec::new() } else { session.ranges(&name).expect("valid") };
        (name, in_use, ranges)
    };
    list.into_iter().map(one).collect()
}

/// Runs `work` on the image with a fault at every single storage operation, and looks at what a
/// power cut leaves then.
pub(super) fn every_crash(
    runtime: &mut Runtime,
    image: &[u8],
    work: &Work,
    allowed: &dyn Fn(&State) -> bool,
) {
    let images = Images::new();
    let mut stop = 0;
    loop {
        let sim = SimStorage::from_image(image, 1);
        let mut session = Session::new(runtime, sim.storage(), true);
        sim.on(When::any().skip(stop), Fault::Fail(ringdisk_ring::Errno::IO));
        let done = work(&mut session).is_ok();
        drop(session);
        for seed in 0..6 {
            let left = sim.crash_image(seed);
            let state = state_of(runtime, &left);
            assert!(allowed(&state), "stopped after {stop}, seed {seed}: {state:?}");
            if seed == stop % 6 {
                // Leaks are allowed (exit code 3), and are gone after a repair.
                std::fs::write(images.path("left"), &left).expect("a copy");
                images.qemu_img(&["check", "-q", "-r", "leaks", "left"]);
            }
        }
        if done {
            break;
        }
        stop += 1;
    }
    assert!(stop > 5, "{stop}");
}

#[test]
fn a_crash_in_an_operation_leaves_the_old_or_the_new_bitmaps() {
    let mut runtime = runtime();
    let steps: [&Work; 6] = [
        &|session| session.add("three", None),
        &|session| session.remove("one"),
        &|session| session.clear("one"),
        &|session| session.enable("two", true),
        &|session| session.merge("one", "two"),
        &|session| {
            let (image, ring) = (&mut session.image, &session.ring);
            session.runtime.block_on(image.bitmap_remove_all(ring))
        },
    ];
    for cluster_size in [512, 4096, 65536] {
        let mut image = simulated(&mut runtime, cluster_size);
        let sim = SimStorage::from_image(&image, 1);
        let mut session = Session::new(&mut runtime, sim.storage(), true);
        session.write(MIB, 70_000);
        session.close();
        image = sim.durable_image();
        let before = state_of(&mut runtime, &image);
        assert_eq!(before[0].2.len(), 1);
        for step in steps {
            let sim = SimStorage::from_image(&image, 1);
            let mut session = Session::new(&mut runtime, sim.storage(), true);
            step(&mut session).expect("it works");
            drop(session);
            let after = state_of(&mut runtime, &sim.durable_image());
            every_crash(&mut runtime, &image, step, &|state| *state == before || *state == after);
        }
    }
}

#[test]
fn a_crash_while_recording_never_leaves_a_stale_bitmap() {
    let mut runtime = runtime();
    for cluster_size in [512, 4096, 65536] {
        let image = simulated(&mut runtime, cluster_size);
        let work = |session: &mut Session<'_>| {
            let buf = IoBuf::new(4096, 4096);
            buf.fill(1);
            let (image, ring) = (&session.image, &session.ring);
            let all = session.runtime.block_on(async {
                image.write(ring, GuestOffset(64 * KIB), &buf, &Nothing).await?;
                image.flush(ring).await?;
                image.write(ring, GuestOffset(MIB), &buf, &Nothing).await?;
                image.close(ring).await
            });
            match all {
                Ok(()) => Ok(()),
                Err(_) => session.remove("no such bitmap"),
            }
        };
        let two = ("two".to_owned(), false, Vec::new());
        let first = 64 * KIB..64 * KIB + 4096;
        let both = vec![first, MIB..MIB + 4096];
        every_crash(&mut runtime, &image, &work, &|state| {
            let one = &state[0];
            // Nothing was written yet, or it is in use, or it is complete.
            state[1] == two && (one.1 || one.2.is_empty() || one.2 == both)
        });
    }
}

#[test]
fn a_stale_bitmap_is_never_called_empty_after_a_flush() {
    let mut runtime = runtime();
    let image = simulated(&mut runtime, 65536);
    let sim = SimStorage::from_image(&image, 1);
    let mut session = Session::new(&mut runtime, sim.storage(), true);
    session.write(0, 4096);
    session.runtime.block_on(session.image.flush(&session.ring)).expect("a flush");
    drop(session);
    for seed in 0..20 {
        let state = state_of(&mut runtime, &sim.crash_image(seed));
        assert!(state[0].1 && !state[1].1, "{state:?}");
    }
}

#[test]
fn without_room_the_bitmap_is_lost_and_the_data_is_not() {
    let mut runtime = runtime();
    let image = simulated(&mut runtime, 65536);
    let sim = SimStorage::from_image(&image, 1);
    let mut session = Session::new(&mut runtime, sim.storage(), true);
    session.write(0, 4096);
    session.runtime.block_on(session.image.flush(&session.ring)).expect("a flush");
    let end = sim.image().len() as u64;
    sim.on(When::any().at(end..u64::MAX), Fault::Fail(ringdisk_ring::Errno::NOSPC));
    session.close();
    let state = state_of(&mut runtime, &sim.durable_image());
    assert!(state[0].1 && !state[1].1, "{state:?}");
}

#[test]
fn bitmaps_that_are_given_up_are_believed_by_nobody() {
    let images = Images::new();
    images.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "64M"]);
    images.qemu_img(&["bitmap", "--add", "a.qcow2", "records"]);
    images.qemu_img(&["bitmap", "--add", "--disable", "a.qcow2", "still"]);
    let path = images.path("a.qcow2");
    let mut runtime = runtime();
    let mut session = Session::open(&mut runtime, &path);
    session.write(0, 4096);
    session.close();
    let mut session = Session::open(&mut runtime, &path);
    let done = session.runtime.block_on(session.image.bitmaps_give_up(&session.ring));
    done.expect("they are given up");
    let expected = [("records".to_owned(), true, true), ("still".to_owned(), false, false)];
    assert_eq!(session.list(), expected);
    session.close();
    let session = Session::open(&mut runtime, &path);
    assert_eq!(session.list(), expected);
    session.close();
    assert!(info(&images, "a.qcow2").contains("in-use"), "{}", info(&images, "a.qcow2"));
    check(&images, "a.qcow2");
}

#[test]
fn bitmaps_that_cannot_be_given_up_are_as_they_were() {
    let images = Images::new();
    images.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "64M"]);
    for name in ["one", "two"] {
        images.qemu_img(&["bitmap", "--add", "a.qcow2", name]);
    }
    let content = std::fs::read(images.path("a.qcow2")).expect("read");
    let mut runtime = runtime();
    let mut failures = 0;
    for number in 0.. {
        let sim = SimStorage::from_image(&content, 1);
        let mut session = Session::new(&mut runtime, sim.storage(), true);
        let begin = sim.log().len() as u64;
        sim.on(When::number(begin + number), Fault::Fail(ringdisk_storage::Errno::IO));
        let done = session.runtime.block_on(session.image.bitmaps_give_up(&session.ring));
        failures += u32::from(done.is_err());
        drop(session);
        sim.clear_rules();
        let session = Session::new(&mut runtime, sim.storage(), true);
        let in_use: Vec<bool> = session.list().into_iter().map(|(_, in_use, _)| in_use).collect();
        assert_eq!(in_use, [done.is_ok(); 2]);
        if done.is_ok() {
            break;
        }
    }
    // Two flags and a flush.
    assert_eq!(failures, 3);
}
