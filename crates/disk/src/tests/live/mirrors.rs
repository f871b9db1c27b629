//! Mirrors while clients work on the disk.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ringdisk_storage::Storage;
use ringdisk_testkit::sim::{Fault, OpKind, Prng, When};

use super::mirroring::{BACKGROUND, BLOCKING, Running, simulated, source, target, until, writable};
use super::{SIZE, SOME, opened};
use crate::disk::Parts;
use crate::layer::{Layer, Node, Raw};
use crate::tests::load::Load;
use crate::tests::{assert_same, buffer, directory, open, qemu_img, read_steps, reading, run};
use crate::{
    CommitOptions, Disk, Errno, ErrorKind, Format, ImageOptions, MirrorControl, MirrorEnd,
    MirrorOptions, MirrorSync, OnError, Progress, ResizeOptions,
};

/// Mirrors under clients and switches over; the target has everything, also what came afterwards.
fn switch_over(is_raw: bool, name: &str, options: MirrorOptions, seed: u64) {
    let directory = directory();
    let (top, mut bytes) = source(&directory, is_raw);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, seed);
        load.progress(&ring, SOME).await;
        let target = target(&ring, &directory, name, SIZE).await;
        let mirror = Running::start(&ring, &disk, target, options);
        assert!(mirror.control.ready().await);
        load.progress(&ring, SOME).await;
        assert!(!mirror.is_over());
        mirror.control.complete(true).expect("it can switch over");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
        assert_eq!(mirror.progress.done(), mirror.progress.total());
        assert_eq!(disk.layers().len(), 1);
        assert_eq!(disk.layers()[0].name(), directory.path().join(name));
        // The former images are not in use any more.
        let former = fs::read(directory.path().join(top)).expect("read");
        drop(opened(&ring, &directory, top).await);
        load.progress(&ring, SOME).await;
        assert_same(&former, &fs::read(directory.path().join(top)).expect("read"));
        super::finish(&ring, &directory, disk, load, name, &mut bytes).await;
    });
    if !is_raw {
        qemu_img(&directory, &["check", "-q", "-f", "qcow2", top]);
    }
}

#[test]
fn a_chain_is_mirrored_to_a_qcow2_image_under_clients() {
    switch_over(false, "copy.qcow2", BACKGROUND, 51);
}

#[test]
fn a_chain_is_mirrored_to_a_raw_image_under_clients() {
    switch_over(false, "copy.raw", BACKGROUND, 52);
}

#[test]
fn a_raw_disk_is_mirrored_under_clients() {
    switch_over(true, "copy.qcow2", BACKGROUND, 53);
    switch_over(true, "copy.raw", BLOCKING, 54);
}

#[test]
fn a_mirror_that_blocks_writes_stays_in_step_under_clients() {
    switch_over(false, "copy.qcow2", BLOCKING, 55);
    switch_over(false, "copy.raw", BLOCKING, 56);
}

/// Leaves the target as a copy of one instant, to which clients write nothing afterwards.
#[test]
fn a_target_is_left_as_a_copy_of_one_instant() {
    for (options, old) in [(BACKGROUND, 0u8), (BLOCKING, 7)] {
        let directory = directory();
        let (top, bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let target = target(&ring, &directory, "copy.raw", SIZE + 4096).await;
            // What the target held before must not show.
            let junk = buffer(&vec![old; 1 << 20]);
            assert_eq!(target.write(&ring, 9 << 20, &junk).await, Ok(1 << 20));
            let load = Load::start(&disk, &bytes, 57);
            let mirror = Running::start(&ring, &disk, Arc::clone(&target), options);
            assert!(mirror.control.ready().await);
            load.progress(&ring, SOME).await;
            let error = mirror.control.complete(true).expect_err("another size");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            let known = load.halt(&ring).await;
            mirror.control.complete(false).expect("complete");
            assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
            assert_eq!(disk.write(&ring, 0, &junk).await, Ok(1 << 20));
            assert_eq!(disk.layers().len(), 2);
            let copied = read_steps(&ring, &target, 1 << 20).await;
            assert_same(&copied[..known.len()], &known);
            assert_eq!(target.close(&ring).await, Ok(()));
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

/// A copy that is left is closed: what became zeroes in it takes no space.
#[test]
fn a_target_that_is_left_has_no_space_that_nothing_uses() {
    let directory = directory();
    let small = 4 << 20;
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", &small.to_string()]);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.raw").await;
        let target = target(&ring, &directory, "copy.qcow2", small).await;
        assert_eq!(target.write(&ring, 0, &buffer(&vec![7; 1 << 20])).await, Ok(1 << 20));
        let mirror = Running::start(&ring, &disk, target, BACKGROUND);
        assert!(mirror.control.ready().await);
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
    });
    qemu_img(&directory, &["check", "-q", "-f", "qcow2", "copy.qcow2"]);
}

/// Whichever of them the disk keeps, the target keeps the same; also where one of the two writes
/// takes longer, and of writes that are copied afterwards since they are zeroes.
#[test]
fn writes_of_one_range_at_once_leave_the_same_on_the_target() {
    let directory = directory();
    let (_, bytes) = source(&directory, true);
    run(async |ring| {
        let (disk, from) = simulated(SIZE);
        for (at, part) in bytes.chunks(1 << 20).enumerate() {
            disk.write_all(&ring, (at << 20) as u64, &buffer(part)).await.expect("a write");
        }
        let (target, to) = simulated(SIZE);
        let mirror = Running::start(&ring, &disk, target, BLOCKING);
        assert!(mirror.control.ready().await);
        until(&ring, || mirror.is_in_step(&disk)).await;
        let mut prng = Prng::new(61);
        for round in 0..200u64 {
            let area = 5 << 20 | (round % 16) << 16;
            // One of the sides is late with a write.
            let slow = [&from, &to][usize::try_from(prng.below(2)).expect("small")];
            slow.on(When::kind(OpKind::Write).once(), Fault::Hold);
            let writes = (1..=12u8).map(|byte| {
                let (at, len) = (area + prng.below(100 << 10), 1 + prng.below(80 << 10));
                let data = buffer(&vec![byte; usize::try_from(len).expect("small")]);
                let zeroes = prng.below(6) == 0;
                let (disk, ring) = (&disk, &ring);
                async move {
                    match zeroes {
                        true => {
                            assert_eq!(disk.write_zeroes(ring, at, Bytes(len), true).await, Ok(()));
                        }
                        false => assert_eq!(disk.write(ring, at, &data).await, Ok(data.len())),
                    }
                }
            });
            let mut writes = Box::pin(join_all(writes.collect::<Vec<_>>()));
            let _ = ring.within(Duration::from_millis(3), &mut writes).await;
            from.release_all();
            to.release_all();
            writes.await;
        }
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
        let copy = Disk::from_storage(to.storage(), &Default::default());
        let copied = read_steps(&ring, &copy, 1 << 20).await;
        assert_same(&copied, &read_steps(&ring, &disk, 1 << 20).await);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

/// Bytes of the top only go to an overlay over the same base.
#[test]
fn the_top_alone_is_mirrored_to_another_overlay() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, 58);
        let create = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "copy.qcow2"];
        qemu_img(&directory, &create);
        let options = MirrorOptions { sync: MirrorSync::Top, write_blocking: false, left: None };
        let target = writable(&ring, &directory, "copy.qcow2").await;
        let mirror = Running::start(&ring, &disk, target, options);
        mirror.control.complete(true).expect("also before it is ready");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
        assert_eq!(disk.layers().len(), 2);
        load.progress(&ring, SOME).await;
        super::finish(&ring, &directory, disk, load, "copy.qcow2", &mut bytes).await;
    });
}

/// The disk goes to and fro under load; no request fails, and no byte is lost.
#[test]
fn a_disk_switches_over_again_and_again_under_load() {
    let rounds = if ringdisk_testkit::limits::full() { 200 } else { 24 };
    let directory = directory();
    let small = 4 << 20;
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", &small.to_string()]);
    let mut bytes = vec![0; small];
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.raw").await;
        let load = Load::start(&disk, &bytes, 59);
        let mut name = String::from("a.raw");
        for round in 0..rounds {
            let next = format!("{round}.{}", if round % 2 == 0 { "qcow2" } else { "raw" });
            let target = target(&ring, &directory, &next, small).await;
            let options = if round % 3 == 0 { BLOCKING } else { BACKGROUND };
            let mirror = Running::start(&ring, &disk, target, options);
            mirror.control.complete(true).expect("complete");
            assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
            fs::remove_file(directory.path().join(&name)).expect("nobody needs it");
            name = next;
            load.progress(&ring, 10).await;
        }
        super::finish(&ring, &directory, disk, load, &name, &mut bytes).await;
    });
}

#[test]
fn a_cancelled_mirror_leaves_the_disk_at_every_step() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, 60);
        for step in 0..=9u64 {
            let target = target(&ring, &directory, &format!("{step}.qcow2"), SIZE).await;
            let options = if step % 2 == 0 { BLOCKING } else { BACKGROUND };
            let mirror = Running::start(&ring, &disk, target, options);
            // The last steps: it is ready.
            while mirror.progress.done() < Bytes((step * (3 << 20)).min(SIZE as u64)) {
                ring.yield_now().await;
            }
            load.progress(&ring, SOME / 4).await;
            mirror.progress.cancel();
            let error = mirror.end(&ring).await.expect_err("cancelled");
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
            assert_eq!(disk.layers().len(), 2);
        }
        // Nothing is left of them.
        disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await.expect("commit");
        super::finish(&ring, &directory, disk, load, "base.raw", &mut bytes).await;
    });
}

#[test]
fn other_changes_are_refused_during_a_mirror() {
    let directory = directory();
    let (top, bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target(&ring, &directory, "copy.qcow2", SIZE).await;
        let mirror = Running::start(&ring, &disk, Arc::clone(&target), BACKGROUND);
        assert!(mirror.control.ready().await);
        let larger = SIZE as u64 + (1 << 20);
        assert_eq!(disk.grow(&ring, Bytes(larger)).await, Err(Errno::BUSY));
        for disk in [&disk, &target] {
            let error = disk.resize_with(&ring, Bytes(larger), ResizeOptions::default()).await;
            assert_eq!(error.expect_err("busy").kind(), ErrorKind::Busy);
        }
        let error = disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await;
        assert_eq!(error.expect_err("busy").kind(), ErrorKind::Busy);
        mirror.control.complete(true).expect("complete");
        mirror.end(&ring).await.expect("mirror");
        assert_eq!(disk.resize(&ring, Bytes(larger)).await, Ok(()));
        assert_same(&read_steps(&ring, &disk, 1 << 20).await[..SIZE], &bytes);
        assert_eq!(target.close(&ring).await, Ok(()));
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    qemu_img(&directory, &["check", "-q", "-f", "qcow2", "copy.qcow2"]);
}

#[test]
fn a_wrong_target_is_refused_before_anything_changes() {
    let directory = directory();
    let (top, bytes) = source(&directory, false);
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "small.qcow2", "1M"]);
    qemu_img(&directory, &["create", "-q", "-f", "raw", "ro.raw", &SIZE.to_string()]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let refused = async |target: Arc<Disk>| {
            let control = Arc::new(MirrorControl::new());
            let progress = Arc::default();
            let mirror = disk.mirror(&ring, target, BACKGROUND, &progress, &control);
            let error = mirror.await.expect_err("refused");
            assert!(!control.ready().await);
            error.kind()
        };
        let small = writable(&ring, &directory, "small.qcow2").await;
        assert_eq!(refused(small).await, ErrorKind::Invalid);
        let path = directory.path().join("ro.raw");
        let read_only = open(&ring, path, &reading()).await.expect("open");
        assert_eq!(refused(read_only).await, ErrorKind::PermissionDenied);
        assert_eq!(refused(Arc::clone(&disk)).await, ErrorKind::Invalid);
        // An image below the disk, and one above it.
        let layers = disk.layers();
        let storage = |layer: usize| Arc::clone(layers[layer].file().expect("a file"));
        let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        for layer in [0, 1] {
            let raw = Disk::build(vec![writable_over(storage(layer))], Parts::new(&options));
            assert_eq!(refused(raw).await, ErrorKind::Invalid);
        }
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

/// A raw layer that can be written, as a process without locks would have it.
fn writable_over(storage: Arc<Storage>) -> Layer {
    let size = storage.len();
    let mut layer = Layer::new(Node::Raw(Raw::new(storage)), Bytes(size));
    layer.is_writable = true;
    layer
}

/// Mirrors to a target that fails in some way at the first write of each number; clients see
/// nothing of it.
fn target_fails(options: MirrorOptions, on_error: OnError, errno: Errno) {
    let directory = directory();
    let (top, bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, 61);
        for number in [0, 3, 10] {
            let (target, sim) = simulated(SIZE);
            sim.on(When::kind(OpKind::Write).skip(number).once(), Fault::Fail(errno));
            let progress = Arc::new(Progress::new());
            progress.set_on_error(on_error);
            let mirror = Running::with(
                &ring,
                &disk,
                Arc::clone(&target),
                options.clone(),
                Arc::clone(&progress),
            );
            match on_error {
                OnError::Report => {
                    let error = mirror.end(&ring).await.expect_err("reported");
                    assert_eq!(error.errno(), Some(errno), "{error}");
                    continue;
                }
                OnError::Stop | OnError::StopWhenFull => {
                    while progress.paused().is_none() {
                        ring.sleep(Duration::from_millis(1)).await;
                    }
                    load.progress(&ring, SOME / 4).await;
                    assert!(!mirror.is_over());
                    progress.resume();
                }
                OnError::Ignore => {}
            }
            assert!(mirror.control.ready().await);
            load.progress(&ring, SOME / 4).await;
            mirror.progress.cancel();
            mirror.end(&ring).await.expect_err("cancelled");
        }
        // Once more, to the end.
        let (target, sim) = simulated(SIZE);
        sim.on(When::kind(OpKind::Write).skip(7).once(), Fault::Fail(errno));
        let progress = Arc::new(Progress::new());
        progress.set_on_error(OnError::Ignore);
        let mirror = Running::with(&ring, &disk, Arc::clone(&target), options, progress);
        assert!(mirror.control.ready().await);
        let known = load.halt(&ring).await;
        mirror.control.complete(false).expect("complete");
        mirror.end(&ring).await.expect("mirror");
        assert_same(&sim.image()[..known.len()], &known);
        assert_same(&read_steps(&ring, &disk, 1 << 20).await[..known.len()], &known);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn an_error_of_the_target_ends_the_mirror_or_rests_and_no_client_sees_it() {
    target_fails(BACKGROUND, OnError::Report, Errno::IO);
    target_fails(BACKGROUND, OnError::Stop, Errno::IO);
    target_fails(BACKGROUND, OnError::StopWhenFull, Errno::NOSPC);
    target_fails(BACKGROUND, OnError::Ignore, Errno::IO);
}

#[test]
fn an_error_of_a_target_in_step_is_not_an_error_of_a_client() {
    target_fails(BLOCKING, OnError::Report, Errno::IO);
    target_fails(BLOCKING, OnError::Ignore, Errno::NOSPC);
}

/// A client's write does not wait for a target that does not answer for longer than it may.
#[test]
fn a_target_that_hangs_holds_clients_up_for_a_limited_time_only() {
    let directory = directory();
    let (top, _) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let (target, sim) = simulated(SIZE);
        let mirror = Running::start(&ring, &disk, target, BLOCKING);
        assert!(mirror.control.ready().await);
        ring.sleep(Duration::from_millis(100)).await;
        sim.on(When::kind(OpKind::Write), Fault::Hold);
        let data = buffer(&[9; 4096]);
        let begun = Instant::now();
        assert_eq!(disk.write(&ring, 0, &data).await, Ok(4096));
        let first = begun.elapsed();
        assert!(first > Duration::from_secs(1), "it was sent before it was answered: {first:?}");
        assert!(first < Duration::from_secs(10), "{first:?}");
        // From now on it is left to the copying task.
        let begun = Instant::now();
        for at in 1..20u64 {
            assert_eq!(disk.write(&ring, at << 20, &data).await, Ok(4096));
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(!mirror.is_over());
        mirror.control.complete(false).expect("complete");
        ring.sleep(Duration::from_millis(300)).await;
        assert!(!mirror.is_over());
        sim.clear_rules();
        sim.release_all();
        mirror.end(&ring).await.expect("mirror");
        assert_same(&sim.image(), &read_steps(&ring, &disk, 1 << 20).await);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

/// Holes stay holes, and an empty target is not filled with zeroes.
#[test]
fn a_mirrored_disk_is_not_larger_than_its_data() {
    let directory = directory();
    let size = 1 << 30;
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", &size.to_string()]);
    super::qemu_io(&directory, "raw", "a.raw", &["write -P 5 700M 1M"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.raw").await;
        for name in ["copy.raw", "copy.qcow2"] {
            let target = target(&ring, &directory, name, size).await;
            let mirror = Running::start(&ring, &disk, Arc::clone(&target), BACKGROUND);
            mirror.control.complete(false).expect("complete");
            mirror.end(&ring).await.expect("mirror");
            let taken = target.allocated_bytes().0;
            assert!((1 << 20..2 << 20).contains(&taken), "{name}: {taken} bytes");
            assert_eq!(target.close(&ring).await, Ok(()));
        }
    });
    let same = ["compare", "-f", "raw", "-F", "qcow2", "a.raw", "copy.qcow2"];
    qemu_img(&directory, &same);
}

/// Suspends a mirror at some moment, hands target and disk over, and goes on with what was left.
///
/// * `records`: what clients change before the mirror goes on is recorded; else all is copied.
fn suspended(options: &MirrorOptions, is_ready: bool, records: bool) {
    // In memory: a target whose flush takes longer than 2 s counts as one that hangs, and then it
    // is not known what is left.
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let (top, bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target(&ring, &directory, "copy.qcow2", SIZE).await;
        let load = Load::start(&disk, &bytes, 71);
        let progress = Arc::new(Progress::new());
        progress.set_speed(if is_ready { 0 } else { 1 << 20 });
        let mirror = Running::with(
            &ring,
            &disk,
            Arc::clone(&target),
            options.clone(),
            Arc::clone(&progress),
        );
        if is_ready {
            assert!(mirror.control.ready().await);
        }
        load.progress(&ring, SOME).await;
        let known = load.halt(&ring).await;
        disk.suspend_for_hand_over(vec![Arc::clone(&progress)]);
        let handed = disk.hand_over(&ring).await.expect("the mirror stops");
        mirror.end(&ring).await.expect_err("suspended");
        let left = mirror.control.take_left().expect("it is known");
        assert_eq!(left.first.is_empty(), is_ready);
        let other = target.hand_over(&ring).await.expect("the target");
        let new = Disk::open_handed(&ring, handed, &ImageOptions::default()).await.expect("a disk");
        new.take_charge();
        let there = new.take_mirror(&ring, other, None, false).await.expect("the target");
        drop((disk, target));
        if records {
            new.record_changes(&ring).await;
        }
        assert_same(&read_steps(&ring, &new, 1 << 20).await[..known.len()], &known);
        let load = Load::start(&new, &known, 72);
        load.progress(&ring, SOME / 4).await;
        let options = MirrorOptions { left: Some(left), ..options.clone() };
        let mirror = Running::start(&ring, &new, there, options);
        assert!(mirror.control.ready().await);
        load.progress(&ring, SOME).await;
        mirror.control.complete(true).expect("it can switch over");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
        let known = load.halt(&ring).await;
        assert_same(&read_steps(&ring, &new, 1 << 20).await[..known.len()], &known);
        assert_eq!(new.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_suspended_mirror_goes_on_with_what_was_left() {
    for (is_ready, records) in [(false, true), (true, true), (true, false)] {
        suspended(&BACKGROUND, is_ready, records);
        suspended(&BLOCKING, is_ready, records);
    }
}

#[test]
fn a_long_change_that_is_not_to_stop_has_the_hand_over_fail() {
    let directory = directory();
    let (top, bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target(&ring, &directory, "copy.raw", SIZE).await;
        let mirror = Running::start(&ring, &disk, target, BACKGROUND);
        assert!(mirror.control.ready().await);
        let error = disk.hand_over(&ring).await.expect_err("the mirror runs");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(!mirror.is_over());
        // One that stops, and a hand-over that is given up: it can begin again.
        disk.suspend_for_hand_over(vec![Arc::clone(&mirror.progress)]);
        drop(disk.hand_over(&ring).await.expect("the mirror stops"));
        disk.resume(&ring).await.expect("it goes on");
        mirror.end(&ring).await.expect_err("suspended");
        mirror.progress.begin_again();
        mirror.control.begin_again();
        let target = writable(&ring, &directory, "copy.raw").await;
        let (progress, control) = (&mirror.progress, &mirror.control);
        control.complete(false).expect("complete");
        let end = disk.mirror(&ring, target, BACKGROUND, progress, control).await;
        assert_eq!(end.expect("mirror"), MirrorEnd::Copied);
        assert_same(&read_steps(&ring, &disk, 1 << 20).await[..bytes.len()], &bytes);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}
