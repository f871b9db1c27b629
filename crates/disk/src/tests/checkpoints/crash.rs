//! The machine stops at each step of a round with bitmaps: a bitmap that says that it is valid has
//! a bit wherever the disk differs from what it was when the bitmap began.

use std::sync::Arc;

use ringdisk_qcow2::{Bytes, Qcow2, check_bytes};
use ringdisk_ring::Ring;
use ringdisk_testkit::sim::SimStorage;

use super::{fleece, freeze};
use crate::disk::Parts;
use crate::open::qcow2_layer;
use crate::tests::{buffer, directory, qemu_img, qemu_io, read_steps, run};
use crate::{CheckpointEnd, CheckpointOptions, Disk, ImageOptions, NewBitmap};

const CLUSTER: u64 = 64 << 10;

async fn disk(ring: &Ring, sim: &SimStorage, writable: bool) -> Arc<Disk> {
    let open = ringdisk_qcow2::OpenOptions { writable, ..Default::default() };
    let image = Qcow2::open(ring, sim.storage(), &open).await.expect("the image opens");
    let options = ImageOptions { read_only: !writable, ..ImageOptions::default() };
    Disk::build(vec![qcow2_layer(image, writable)], Parts::new(&options))
}

async fn write(ring: &Ring, disk: &Disk, cluster: u64, byte: u8) {
    let data = buffer(&[byte; 5000]);
    assert_eq!(disk.write(ring, cluster * CLUSTER + 300, &data).await, Ok(5000));
}

/// What each bitmap began with.
struct Began {
    name: &'static str,
    bytes: Vec<u8>,
}

/// Judges what a stop leaves. Gives which bitmaps are valid.
async fn judge(ring: &Ring, image: &[u8], all: &[Began], at: usize) -> Vec<&'static str> {
    let report = check_bytes(image).expect("the image can be checked");
    assert_eq!(report.corruptions, 0, "step {at}: {:?}", report.messages);
    let sim = SimStorage::from_image(image, 1);
    let now = read_steps(ring, &*disk(ring, &sim, false).await, 1 << 20).await;
    let image = Qcow2::open(ring, sim.storage(), &Default::default()).await.expect("it opens");
    let mut valid = Vec::new();
    for Began { name, bytes } in all {
        let Ok(contents) = image.bitmap_contents(ring, name).await else { continue };
        valid.push(*name);
        let mut marked = vec![false; now.len()];
        for range in contents.ranges() {
            let place = |at: u64| usize::try_from(at).expect("small");
            marked[place(range.start.0)..place(range.end.0)].fill(true);
        }
        let missing = (0..now.len()).find(|&at| !marked[at] && now[at] != bytes[at]);
        assert_eq!(missing, None, "step {at}: '{name}' has no bit there");
    }
    valid
}

fn steps(end: CheckpointEnd) {
    let place = directory();
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
    qemu_io(&place, "qcow2", "disk.qcow2", &["write -P 1 0 512k"]);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", "disk.qcow2", "old"]);
    let image = std::fs::read(place.path().join("disk.qcow2")).expect("read");
    run(async |ring| {
        ring.offload_here();
        let sim = SimStorage::from_image(&image, 3);
        let disk = disk(&ring, &sim, true).await;
        let mut all = vec![Began { name: "old", bytes: read_steps(&ring, &disk, 1 << 20).await }];
        sim.record();
        write(&ring, &disk, 2, 2).await;
        write(&ring, &disk, 9, 2).await;
        let checkpoint = CheckpointOptions {
            bitmap: Some(NewBitmap { name: "new".into(), granularity_bytes: None }),
            since: Some("old".into()),
            ..CheckpointOptions::new(fleece(), Bytes(1 << 30))
        };
        let checkpoint = freeze(&ring, &disk, checkpoint).await.expect("a checkpoint");
        all.push(Began { name: "new", bytes: read_steps(&ring, &disk, 1 << 20).await });
        write(&ring, &disk, 3, 3).await;
        write(&ring, &disk, 12, 3).await;
        assert_eq!(disk.flush(&ring).await, Ok(()));
        write(&ring, &disk, 3, 4).await;
        checkpoint.end(&ring, end).await.expect("the end");
        write(&ring, &disk, 5, 5).await;
        assert_eq!(disk.close(&ring).await, Ok(()));

        let mut replay = sim.replay().expect("it was recorded");
        let mut at = 0;
        let mut seen = std::collections::BTreeSet::new();
        loop {
            for seed in 0..3 {
                seen.insert(judge(&ring, &replay.sim().crash_image(seed), &all, at).await);
            }
            at += 1;
            if !replay.advance() {
                break;
            }
        }
        assert!(at > 50, "{at} steps");
        let last = judge(&ring, &replay.sim().image(), &all, at).await;
        let wanted: &[&str] = match end {
            CheckpointEnd::Drop => &["new"],
            CheckpointEnd::Keep => &["old", "new"],
            CheckpointEnd::Merge => &["old"],
        };
        assert_eq!(last, wanted);
        assert!(seen.contains(&vec![]) && seen.contains(&vec!["old"]), "{seen:?}");
    });
}

#[test]
fn bitmaps_are_right_wherever_a_backup_stops() {
    steps(CheckpointEnd::Drop);
}

#[test]
fn bitmaps_that_are_kept_are_right_wherever_it_stops() {
    steps(CheckpointEnd::Keep);
}

#[test]
fn bitmaps_that_are_merged_are_right_wherever_it_stops() {
    steps(CheckpointEnd::Merge);
}
