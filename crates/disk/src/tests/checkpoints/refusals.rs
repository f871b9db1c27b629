//! What is refused, in which words.

use ringdisk_qcow2::Bytes;
use std::time::Duration;

use ringdisk_ring::{Errno, IoBuf};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::{HOLD, chain, fleece, freeze, options, raw, writable};
use crate::tests::{buffer, directory, qemu_img, reading, run};
use crate::{
    CheckpointEnd, CheckpointOptions, Disk, Error, ErrorKind, ImageOptions, NewBitmap, NullOptions,
    SnapshotChange,
};

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: ErrorKind, words: &str) {
    let error = result.expect_err("it must be refused");
    assert!(error.kind() == kind && error.message().contains(words), "{kind:?} {words}: {error:?}");
}

#[test]
fn a_disk_that_cannot_be_kept_is_refused() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| {
        let null = Disk::null(&NullOptions::default());
        let made = null.prepare_checkpoint(&ring, options()).await;
        refused(made, ErrorKind::Unsupported, "null disk");
        let disk = writable(&ring, &place, name).await;
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        let made = checkpoint.disk().prepare_checkpoint(&ring, options()).await;
        refused(made, ErrorKind::Unsupported, "frozen");
        let second = disk.prepare_checkpoint(&ring, options()).await;
        refused(second, ErrorKind::Busy, "a checkpoint of the disk is running");
        let wanted = CheckpointOptions { since: Some("a".into()), ..options() };
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        let made = disk.prepare_checkpoint(&ring, wanted).await;
        refused(made, ErrorKind::Unsupported, "has no bitmaps");
        let bitmap = Some(NewBitmap { name: "a".into(), granularity_bytes: None });
        let made = disk.prepare_checkpoint(&ring, CheckpointOptions { bitmap, ..options() }).await;
        refused(made, ErrorKind::Unsupported, "not a qcow2 image");
    });
}

#[test]
fn a_disk_that_the_kernel_writes_is_refused() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        let lent = disk.lend();
        refused(lent, ErrorKind::Unsupported, "a checkpoint is running");
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        let _lent = disk.lend().expect("a descriptor");
        let made = disk.prepare_checkpoint(&ring, options()).await;
        refused(made, ErrorKind::Unsupported, "--passthrough");
        refused(disk.hold(&ring, HOLD).await, ErrorKind::Unsupported, "--passthrough");
    });
}

#[test]
fn a_file_that_has_something_is_refused() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let mut wanted = options();
        wanted.fleece = fleece();
        wanted.fleece.write(&ring, 0, &IoBuf::new(512, 512)).await.expect("write");
        let made = disk.prepare_checkpoint(&ring, wanted).await;
        refused(made, ErrorKind::Invalid, "it is not empty");
        let device = SimStorage::device(0, 1);
        let made = CheckpointOptions::new(device.storage(), Bytes(1));
        refused(disk.prepare_checkpoint(&ring, made).await, ErrorKind::Invalid, "no regular file");
    });
}

#[test]
fn bitmaps_that_are_not_right_are_refused() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", name, "there"]);
    run(async |ring| {
        let bitmap = |name: &str| Some(NewBitmap { name: name.into(), granularity_bytes: None });
        let disk = writable(&ring, &place, name).await;
        let twice = CheckpointOptions { bitmap: bitmap("there"), ..options() };
        let made = disk.prepare_checkpoint(&ring, twice).await;
        refused(made, ErrorKind::Invalid, "is there already");
        let missing = CheckpointOptions { since: Some("not".into()), ..options() };
        let made = disk.prepare_checkpoint(&ring, missing).await;
        refused(made, ErrorKind::Invalid, "is not there");
        drop(disk);
        let disk = crate::tests::open(&ring, place.path().join(name), &reading()).await;
        let disk = disk.expect("open");
        let new = CheckpointOptions { bitmap: bitmap("new"), ..options() };
        let made = disk.prepare_checkpoint(&ring, new).await;
        refused(made, ErrorKind::PermissionDenied, "for reading only");
        // A state that cannot change can be kept.
        let since = CheckpointOptions { since: Some("there".into()), ..options() };
        let checkpoint = freeze(&ring, &disk, since).await.expect("a checkpoint");
        assert_eq!(checkpoint.dirty().expect("a bitmap").ranges.len(), 0);
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
    });
}

#[test]
fn changes_that_would_take_the_state_away_are_refused() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        disk.snapshot(&ring, SnapshotChange::Create("s".into())).await.expect("a snapshot");
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        let words = "a checkpoint of the disk is running";
        let resize = crate::ResizeOptions { shrink: true, ..Default::default() };
        refused(disk.resize_with(&ring, Bytes(1 << 20), resize).await, ErrorKind::Busy, words);
        let apply = SnapshotChange::Apply("s".into());
        refused(disk.snapshot(&ring, apply.clone()).await, ErrorKind::Busy, words);
        refused(disk.deactivate(&ring).await, ErrorKind::Busy, words);
        refused(disk.hand_over(&ring).await, ErrorKind::Busy, words);
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        disk.snapshot(&ring, apply).await.expect("applied");
        disk.resize_with(&ring, Bytes(1 << 20), resize).await.expect("smaller");
    });
}

#[test]
fn a_disk_that_has_changed_since_it_was_prepared_is_refused() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let bitmap = Some(NewBitmap { name: "new".into(), granularity_bytes: None });
        let wanted = CheckpointOptions { bitmap, ..options() };
        let prepared = disk.prepare_checkpoint(&ring, wanted).await.expect("prepared");
        let over = place.path().join("over.qcow2");
        disk.add_overlay(&ring, over, Default::default()).await.expect("an overlay");
        let frozen = disk.hold(&ring, HOLD).await.expect("held").freeze(&prepared);
        refused(frozen, ErrorKind::Busy, "its bitmaps");
        let prepared = disk.prepare_checkpoint(&ring, options()).await.expect("prepared");
        disk.resize(&ring, Bytes(5 << 20)).await.expect("it grows");
        let frozen = disk.hold(&ring, HOLD).await.expect("held").freeze(&prepared);
        let checkpoint = frozen.expect("frozen");
        assert_eq!(checkpoint.disk().size(), Bytes(5 << 20));
        let again = disk.hold(&ring, HOLD).await.expect("held").freeze(&prepared);
        refused(again, ErrorKind::Busy, "a checkpoint of the disk is running");
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        let again = disk.hold(&ring, HOLD).await.expect("held").freeze(&prepared);
        refused(again, ErrorKind::Invalid, "was used before");
    });
}

#[test]
fn a_hold_that_takes_too_long_is_given_up() {
    run(async |ring| {
        let sim = SimStorage::new(1 << 20, 1);
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        sim.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let (handle, reading) = (ring.clone(), disk.clone());
        ring.spawn(async move {
            reading.read(&handle, 0, &IoBuf::new(512, 512)).await.expect("read");
        });
        for _ in 0..20 {
            ring.yield_now().await;
        }
        let held = disk.hold(&ring, Duration::from_millis(20)).await;
        refused(held, ErrorKind::Busy, "did not end within 20 ms");
        // Requests go on.
        assert_eq!(disk.write(&ring, 4096, &buffer(&[1; 512])).await, Ok(512));
        sim.release_all();
        let held = disk.hold(&ring, HOLD).await.expect("held");
        // A second hold waits for the first.
        let second = disk.hold(&ring, Duration::from_millis(20)).await;
        refused(second, ErrorKind::Busy, "did not end within 20 ms");
        let data = buffer(&[2; 512]);
        let write = disk.write(&ring, 4096, &data);
        assert!(ring.within(Duration::from_millis(20), write).await.is_err(), "it waits");
        drop(held);
        assert_eq!(disk.write(&ring, 4096, &buffer(&[3; 512])).await, Ok(512));
        let closed = disk.close(&ring).await;
        assert_eq!(closed, Ok::<(), Errno>(()));
    });
}
