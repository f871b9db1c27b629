//! Cases that are no cell of the table: what comes before a change or after it, and images that are
//! damaged in a way of their own.

use ringdisk_qcow2::{Bytes, ErrorKind, GuestOffset, Nothing, Preallocation, ResizeOptions};
use ringdisk_ring::Errno;
use ringdisk_testkit::sim::{OpKind, SimStorage};

use crate::common::{Images, KIB, MIB, runtime};
use crate::live::{buffer, read, writable};
use crate::ops_damaged::change::{Change, assert_same, judge};
use crate::ops_damaged::damage::{Damage, Of};
use crate::ops_damaged::image::{CLUSTER, COPIED, Contents, OFFSET, PLACES, SIZE, good, scene};

/// Two entries name a cluster that is counted once, and one of them lets it go: a change looks
/// again, also after one that has looked.
#[test]
fn a_change_looks_again_at_what_was_let_go_since_the_last_one() {
    for change in [Change::Create, Change::Delete('s'), Change::Shrink] {
        let mut damaged = Damage::EntryOther.make(&good(), Of::Disk, PLACES[0]);
        // The only free one then, so that it would be taken first.
        for cluster in 0..damaged.clusters() {
            if damaged.count(cluster * CLUSTER) == 0 {
                damaged.set_count(cluster * CLUSTER, 1);
            }
        }
        let sim = SimStorage::from_image(&damaged.0, 1);
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        // Nobody reads there, so that only the change itself can know what the other entry names.
        let other = |bytes: &Contents| bytes.show(bytes.active())[(PLACES[1] / CLUSTER) as usize];
        runtime.block_on(async {
            let mut image = crate::live::open(&ring, &sim, None, &writable()).await.expect("open");
            Change::Grow.make(&ring, &mut image).await.expect("it grows");
            image
                .discard(&ring, GuestOffset(PLACES[0]), Bytes(CLUSTER), &Nothing)
                .await
                .expect("discard");
            assert_eq!(image.flush(&ring).await, Ok(()));
            let before = other(&Contents(sim.image()));
            // It may be refused.
            let _ = change.make(&ring, &mut image).await;
            let _ = image.close(&ring).await;
            assert_eq!(before, other(&Contents(sim.image())), "{change:?}");
        });
    }
}

/// What a snapshot names past the end of the file is in nobody's way: not in that of writes after a
/// change either.
#[test]
fn writes_go_round_what_a_snapshot_names_past_the_end_of_the_file() {
    let damaged = Damage::EntryPast(12).make(&good(), Of::Snapshot('s'), PLACES[1]);
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut image = crate::live::open(&ring, &sim, None, &writable()).await.expect("open");
        image.snapshot_create(&ring, "n").await.expect("a snapshot");
        let full = buffer(&[0x77; CLUSTER as usize]);
        for at in (7 * MIB..7 * MIB + 256 * KIB).step_by(CLUSTER as usize) {
            let written = image.write(&ring, GuestOffset(at), &full, &Nothing).await;
            assert_eq!(written, Ok(CLUSTER as usize), "at {at:#x}");
        }
        assert_eq!(image.flush(&ring).await, Ok(()));
        assert_eq!(image.fault(), None);
        image.close(&ring).await.expect("close");
    });
    let after = Contents(sim.image());
    let before = damaged.show(damaged.snapshot('s').expect("s"));
    assert_same(&before, &after.show(after.snapshot('s').expect("s")), "snapshot s");
}

/// And not by the writes that come after it.
#[test]
fn what_was_read_before_a_change_is_not_given_away_after_it() {
    let good = good();
    for change in [Change::Grow, Change::Shrink] {
        let mut damaged = good.clone();
        let host = damaged.word(damaged.entry_at(damaged.active(), PLACES[1])) & OFFSET;
        // The only free one, so that it would be taken first.
        for cluster in 0..damaged.clusters() {
            if damaged.count(cluster * CLUSTER) == 0 {
                damaged.set_count(cluster * CLUSTER, 1);
            }
        }
        damaged.set_count(host, 0);
        let sim = SimStorage::from_image(&damaged.0, 1);
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            let mut image = crate::live::open(&ring, &sim, None, &writable()).await.expect("open");
            let mut bytes = [0; 512];
            read(&ring, &image, &Nothing, PLACES[1], &mut bytes).await.expect("read");
            assert_eq!(bytes, [0x32; 512]);
            // It may be refused.
            let _ = change.make(&ring, &mut image).await;
            let full = buffer(&[0x77; CLUSTER as usize]);
            let written = image.write(&ring, GuestOffset(MIB), &full, &Nothing).await;
            let expected = [Err(Errno::IO), Err(Errno::ROFS), Ok(CLUSTER as usize)];
            assert!(expected.contains(&written), "{change:?}: {written:?}");
            read(&ring, &image, &Nothing, PLACES[1], &mut bytes).await.expect("read");
            assert_eq!(bytes, [0x32; 512], "{change:?}");
            let _ = image.close(&ring).await;
        });
        let after = Contents(sim.image());
        let at = after.word(after.entry_at(after.active(), PLACES[1])) & OFFSET;
        assert_eq!(after.0[at as usize], 0x32, "{change:?}");
    }
}

/// Where the file ends is found by the counts; a cluster that an entry names is no end.
#[test]
fn a_cluster_in_use_that_is_not_counted_is_not_cut_off_the_file() {
    let images = Images::new();
    let path = images.create("image", "cluster_size=4096", SIZE);
    // Free clusters in front, for what the change writes; in the last one data.
    let commands = ["write -q -P 1 6M 128k", "write -q -P 2 0 64k", "discard -q 6M 128k"];
    images.qemu_io("image", &commands.map(String::from));
    let mut damaged = Contents(std::fs::read(path).expect("the image"));
    let last = (damaged.clusters() - 1) * CLUSTER;
    assert_eq!(damaged.word(damaged.entry_at(damaged.active(), 60 * KIB)) & OFFSET, last);
    damaged.set_count(last, 0);
    for is_known in [false, true] {
        assert!(judge(&damaged, Change::Shrink, is_known, &format!("known: {is_known}")));
    }
}

/// The last cluster of the disk, which is not a whole one, cannot be right: the disk does not grow,
/// and reads go on.
#[test]
fn a_disk_whose_last_cluster_is_damaged_does_not_grow_and_is_still_read() {
    let images = Images::new();
    let path = images.create("image", "cluster_size=4096", SIZE + 512);
    images.qemu_io("image", &["write -q -P 7 0 64k", "write -q -P 8 8M 512"].map(String::from));
    let mut damaged = Contents(std::fs::read(path).expect("the image"));
    let l1 = damaged.active();
    damaged.set(damaged.entry_at(l1, SIZE), l1.0 | COPIED);
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut image = crate::live::open(&ring, &sim, None, &writable()).await.expect("open");
        for preallocation in [Preallocation::Off, Preallocation::Metadata] {
            let options = ResizeOptions { shrink: false, preallocation };
            let result = image.resize(&ring, Bytes(SIZE + 64 * KIB), &options, &Nothing).await;
            let error = result.expect_err("damage");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!(image.virtual_size(), Bytes(SIZE + 512));
            let mut bytes = [0; 512];
            read(&ring, &image, &Nothing, 4096, &mut bytes).await.expect("read");
            assert_eq!(bytes, [7; 512]);
        }
        let _ = image.close(&ring).await;
    });
    assert_eq!(Contents(sim.image()).word(24), SIZE + 512);
}

/// Thousands of bitmaps that all name one table: it is read once.
#[test]
fn a_change_does_not_read_a_table_of_bitmaps_more_often_than_the_file_is_long() {
    const BITMAPS: u64 = 5000;
    let mut damaged = scene(true);
    let table = damaged.bitmap_table().expect("a bitmap");
    let extension = damaged.0.windows(4).position(|four| four == [0x23, 0x85, 0x28, 0x75]);
    let extension = extension.expect("a bitmap") as u64;
    let directory = damaged.word(extension + 24);
    // 24 bytes and a name of up to 8.
    let entry = damaged.0[directory as usize..directory as usize + 32].to_vec();
    let at = damaged.clusters() * CLUSTER;
    for number in 0..BITMAPS {
        // Place and length of the table, no flags: they do not record.
        damaged.0.extend_from_slice(&entry[..12]);
        damaged.0.extend_from_slice(&[0, 0, 0, 0, entry[16], entry[17], 0, 8, 0, 0, 0, 0]);
        damaged.0.extend_from_slice(format!("{number:08}").as_bytes());
    }
    damaged.set(extension + 8, BITMAPS << 32);
    damaged.set(extension + 16, BITMAPS * 32);
    damaged.set(extension + 24, at);
    assert_eq!(damaged.bitmap_table(), Some(table));
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut image = crate::live::open(&ring, &sim, None, &writable()).await.expect("open");
        let before = sim.count(OpKind::Read);
        let _ = image.snapshot_create(&ring, "n").await;
        let reads = sim.count(OpKind::Read) - before;
        assert!((reads as u64) < BITMAPS / 2, "{reads} reads");
        let _ = image.close(&ring).await;
    });
}
