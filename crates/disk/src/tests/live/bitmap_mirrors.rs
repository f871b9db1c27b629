//! Mirrors that copy at the beginning what a bitmap of the image on top has marked.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::sync::Arc;

use ringdisk_ring::Ring;
use tempfile::TempDir;

use super::mirroring::{BACKGROUND, Running, source, target, writable};
use super::{SIZE, SOME, opened};
use crate::tests::load::Load;
use crate::tests::{assert_same, buffer, directory, open, qemu_img, read_steps, run};
use crate::{
    Disk, ErrorKind, Format, ImageOptions, MirrorEnd, MirrorOptions, MirrorSync, Progress,
};

const MIB: usize = 1 << 20;
/// Clients work below this place.
const WORKED: usize = 12 * MIB;
/// What a target holds in its last mebibyte, where nothing is marked.
const UNLIKE: u8 = 0x77;

fn since(write_blocking: bool) -> MirrorOptions {
    named("since", write_blocking)
}

fn named(bitmap: &str, write_blocking: bool) -> MirrorOptions {
    MirrorOptions { sync: MirrorSync::Bitmap(bitmap.to_owned()), write_blocking, left: None }
}

/// A target that has these bytes, but for its last mebibyte: that one shows what is not copied.
async fn target_with(ring: &Ring, directory: &TempDir, name: &str, bytes: &[u8]) -> Arc<Disk> {
    let target = target(ring, directory, name, SIZE).await;
    for (number, part) in bytes.chunks(MIB).enumerate() {
        target.write_all(ring, (number * MIB) as u64, &buffer(part)).await.expect("a write");
    }
    let unlike = buffer(&vec![UNLIKE; MIB]);
    target.write_all(ring, (SIZE - MIB) as u64, &unlike).await.expect("a write");
    target
}

/// A target has these bytes, but for what was never marked.
async fn assert_copied(ring: &Ring, target: &Disk, bytes: &[u8]) {
    let copied = read_steps(ring, target, MIB).await;
    assert_same(&copied[..SIZE - MIB], &bytes[..SIZE - MIB]);
    assert!(copied[SIZE - MIB..].iter().all(|byte| *byte == UNLIKE), "all of it was copied");
}

/// Ends a disk, so that another program may use its images.
async fn close(ring: &Ring, disk: Arc<Disk>) {
    assert_eq!(disk.close(ring).await, Ok(()));
    for _ in 0..10 {
        ring.yield_now().await;
    }
}

/// Clients write before the mirror begins and while it runs; what nobody touched is not copied.
///
/// * `granularity`: of the bitmap.
fn under_clients(write_blocking: bool, granularity: &str, seed: u64) {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    qemu_img(&directory, &["bitmap", "--add", "-g", granularity, top, "since"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target_with(&ring, &directory, "copy.raw", &bytes).await;
        let load = Load::start(&disk, &bytes[..WORKED], seed);
        load.progress(&ring, SOME).await;
        let options = since(write_blocking);
        let mirror = Running::start(&ring, &disk, Arc::clone(&target), options);
        assert!(mirror.control.ready().await);
        load.progress(&ring, SOME).await;
        let known = load.halt(&ring).await;
        bytes[..known.len()].copy_from_slice(&known);
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
        assert_eq!(mirror.progress.done(), mirror.progress.total());
        assert_copied(&ring, &target, &bytes).await;
        // The bitmap goes on, with all that it had.
        let graph = disk.graph();
        let image = graph.top_image().expect("a qcow2 image");
        let contents = image.bitmap_recorded("since").expect("it records");
        assert!(contents.ranges().next().is_some(), "it was emptied");
        drop(graph);
        close(&ring, disk).await;
    });
}

#[test]
fn what_a_bitmap_has_marked_is_mirrored_under_clients() {
    under_clients(false, "64k", 111);
    under_clients(false, "4k", 112);
    under_clients(true, "1M", 113);
}

/// To an overlay over the last copy, over which the disk goes on then.
#[test]
fn a_disk_switches_over_to_an_overlay_over_its_last_copy() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    qemu_img(&directory, &["bitmap", "--add", top, "since"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let full = target(&ring, &directory, "full.qcow2", SIZE).await;
        let mirror = Running::start(&ring, &disk, full, BACKGROUND);
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
        let data = buffer(&vec![8; 3 * MIB]);
        assert_eq!(disk.write(&ring, 5 << 20, &data).await, Ok(data.len()));
        bytes[5 * MIB..8 * MIB].fill(8);
        disk.write_zeroes(&ring, 14 << 20, Bytes(2 << 20), true).await.expect("zeroes");
        bytes[14 * MIB..16 * MIB].fill(0);
        let create =
            ["create", "-q", "-f", "qcow2", "-b", "full.qcow2", "-F", "qcow2", "inc.qcow2"];
        qemu_img(&directory, &create);
        let load = Load::start(&disk, &bytes, 114);
        load.progress(&ring, SOME / 4).await;
        let inc = writable(&ring, &directory, "inc.qcow2").await;
        let mirror = Running::start(&ring, &disk, inc, since(false));
        assert!(mirror.control.ready().await);
        load.progress(&ring, SOME).await;
        mirror.control.complete(true).expect("it can switch over");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
        assert_eq!(disk.layers().len(), 2);
        load.progress(&ring, SOME).await;
        super::finish(&ring, &directory, disk, load, "inc.qcow2", &mut bytes).await;
    });
    qemu_img(&directory, &["check", "-q", "-f", "qcow2", top]);
}

/// Such a bitmap says what was written until it was disabled.
#[test]
fn a_bitmap_that_does_not_record_says_what_is_copied() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    qemu_img(&directory, &["bitmap", "--add", top, "since"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let data = buffer(&vec![8; 2 * MIB]);
        assert_eq!(disk.write(&ring, 5 << 20, &data).await, Ok(data.len()));
        close(&ring, disk).await;
    });
    qemu_img(&directory, &["bitmap", "--disable", top, "since"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target_with(&ring, &directory, "copy.raw", &bytes).await;
        bytes[5 * MIB..7 * MIB].fill(8);
        let data = buffer(&vec![9; MIB]);
        assert_eq!(disk.write(&ring, 15 << 20, &data).await, Ok(data.len()));
        let mirror = Running::start(&ring, &disk, Arc::clone(&target), since(false));
        assert!(mirror.control.ready().await);
        assert_eq!(mirror.progress.total(), Bytes(2 << 20));
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
        assert_copied(&ring, &target, &bytes).await;
        close(&ring, disk).await;
    });
}

/// The next process copies what is left of what was marked, whatever the bitmap has marked since.
#[test]
fn a_suspended_mirror_goes_on_with_what_is_left_of_a_bitmap() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    qemu_img(&directory, &["bitmap", "--add", top, "since"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target_with(&ring, &directory, "copy.raw", &bytes).await;
        let load = Load::start(&disk, &bytes[..WORKED], 115);
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        progress.set_speed(1 << 20);
        let mirror =
            Running::with(&ring, &disk, Arc::clone(&target), since(false), Arc::clone(&progress));
        load.progress(&ring, SOME).await;
        let known = load.halt(&ring).await;
        bytes[..known.len()].copy_from_slice(&known);
        disk.suspend_for_hand_over(vec![progress]);
        let handed = disk.hand_over(&ring).await.expect("the mirror stops");
        mirror.end(&ring).await.expect_err("suspended");
        let left = mirror.control.take_left().expect("it is known");
        assert!(!left.first.is_empty() && !left.is_new);
        assert!(left.first.iter().all(|(at, len)| at + len <= WORKED as u64), "{left:?}");
        let other = target.hand_over(&ring).await.expect("the target");
        let new = Disk::open_handed(&ring, handed, &ImageOptions::default()).await.expect("a disk");
        new.take_charge();
        let raw = Some(Format::Raw);
        let there = new.take_mirror(&ring, other, raw, false).await.expect("the target");
        drop((disk, target));
        new.record_changes(&ring).await;
        let load = Load::start(&new, &known, 116);
        load.progress(&ring, SOME / 4).await;
        let options = MirrorOptions { left: Some(left), ..since(false) };
        let mirror = Running::start(&ring, &new, Arc::clone(&there), options);
        assert!(mirror.control.ready().await);
        let known = load.halt(&ring).await;
        bytes[..known.len()].copy_from_slice(&known);
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
        assert_copied(&ring, &there, &bytes).await;
        close(&ring, new).await;
    });
}

#[test]
fn a_bitmap_that_cannot_be_used_is_refused_and_leaves_disk_and_target_free() {
    let directory = directory();
    let (top, _) = source(&directory, false);
    qemu_img(&directory, &["bitmap", "--add", top, "since"]);
    run(async |ring| {
        let copy = target(&ring, &directory, "copy.raw", SIZE).await;
        let refused = async |disk: &Arc<Disk>, name: &str, kind, words: &str| {
            let mirror = Running::start(&ring, disk, Arc::clone(&copy), named(name, false));
            let error = mirror.end(&ring).await.expect_err("refused");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(disk.graph().tracker.is_none() && disk.graph().mirror.is_none());
            disk.check_free().expect("the disk is free");
            copy.check_free().expect("the target is free");
        };
        let disk = opened(&ring, &directory, top).await;
        refused(&disk, "other", ErrorKind::Invalid, "other").await;
        // Of a program that was killed: what is written while the bitmap is in use is not saved.
        let data = buffer(&vec![8; MIB]);
        assert_eq!(disk.write(&ring, 5 << 20, &data).await, Ok(data.len()));
        assert_eq!(disk.flush(&ring).await, Ok(()));
        let at = |name: &str| directory.path().join(name);
        fs::copy(at(top), at("killed.qcow2")).expect("a copy");
        let killed = opened(&ring, &directory, "killed.qcow2").await;
        refused(&killed, "since", ErrorKind::Invalid, "is inconsistent").await;
        close(&ring, killed).await;
        qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", &SIZE.to_string()]);
        let raw = writable(&ring, &directory, "a.raw").await;
        refused(&raw, "since", ErrorKind::Unsupported, "has no bitmaps").await;
        close(&ring, raw).await;
        close(&ring, disk).await;
        let part = ImageOptions { window_size: Some(Bytes(4 << 20)), ..ImageOptions::default() };
        let part = open(&ring, at(top), &part).await.expect("open");
        refused(&part, "since", ErrorKind::Unsupported, "a part of an image").await;
        close(&ring, part).await;
        let disk = opened(&ring, &directory, top).await;
        let mirror = Running::start(&ring, &disk, Arc::clone(&copy), since(false));
        mirror.control.complete(false).expect("complete");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Copied);
        close(&ring, disk).await;
    });
}
