//! What a frozen disk shows.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;

use ringdisk_ring::{IoBuf, Ring};

use super::{HOLD, chain, fleece, freeze, options, raw, writable};
use crate::tests::{assert_same, buffer, directory, read_steps, run};
use crate::{CheckpointEnd, CheckpointState, Disk, Errno, ImageOptions, Mapping, Progress};

/// Changes of all kinds, all over a disk of 4 MiB.
async fn change_all(ring: &Ring, disk: &Disk) {
    let byte = |at: u64, len: usize, byte: u8| (at, vec![byte; len]);
    for (at, bytes) in [byte(100, 300, 7), byte(1 << 20, 200_000, 8), byte((4 << 20) - 10, 10, 9)] {
        assert_eq!(disk.write(ring, at, &buffer(&bytes)).await, Ok(bytes.len()));
    }
    assert_eq!(disk.discard(ring, 256 << 10, Bytes(128 << 10)).await, Ok(()));
    assert_eq!(disk.punch(ring, 2 << 20, Bytes(300 << 10)).await, Ok(()));
    assert_eq!(disk.write_zeroes(ring, (3 << 20) + 5, Bytes(70_000), false).await, Ok(()));
}

async fn stays(ring: &Ring, disk: &Arc<Disk>) {
    let before = read_steps(ring, disk, 1 << 20).await;
    let checkpoint = freeze(ring, disk, options()).await.expect("a checkpoint");
    assert_eq!(checkpoint.fleeced_bytes(), Bytes::ZERO);
    change_all(ring, disk).await;
    let now = read_steps(ring, disk, 1 << 20).await;
    assert!(now != before);
    let frozen = checkpoint.disk();
    assert!(frozen.is_read_only() && frozen.size() == disk.size());
    for step in [4096, 100_000, 1 << 20] {
        assert_same(&read_steps(ring, frozen, step).await, &before);
    }
    assert_eq!(frozen.write(ring, 0, &buffer(&[0; 512])).await, Err(Errno::ROFS));
    assert_eq!(checkpoint.state(), CheckpointState::Running);
    assert!(
        checkpoint.fleeced_bytes() > Bytes::ZERO && checkpoint.fleeced_bytes() < Bytes(4 << 20)
    );

    checkpoint.end(ring, CheckpointEnd::Drop).await.expect("the end");
    assert_eq!(checkpoint.over().await, CheckpointState::Ended);
    assert_eq!(frozen.read(ring, 0, &IoBuf::new(512, 512)).await, Err(Errno::IO));
    assert_eq!(frozen.block_status(ring, 0, Bytes(512)).await, Err(Errno::IO));
    change_all(ring, disk).await;
    assert_same(&read_steps(ring, disk, 1 << 20).await, &now);
    // Another one.
    let second = freeze(ring, disk, options()).await.expect("a checkpoint");
    assert_same(&read_steps(ring, second.disk(), 1 << 20).await, &now);
    assert_eq!(disk.close(ring).await, Ok(()));
    assert_eq!(second.state(), CheckpointState::Ended);
    assert_eq!(second.disk().read(ring, 0, &IoBuf::new(512, 512)).await, Err(Errno::IO));
}

#[test]
fn the_frozen_state_of_a_chain_stays() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| stays(&ring, &writable(&ring, &place, name).await).await);
}

#[test]
fn the_frozen_state_of_a_raw_image_stays() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| stays(&ring, &writable(&ring, &place, name).await).await);
}

#[test]
fn a_frozen_window_shows_the_window() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let options = ImageOptions {
            allow_paths: vec![place.path().to_owned()],
            window_offset: 700_000,
            window_size: Some(Bytes(1_500_000)),
            ..ImageOptions::default()
        };
        let path = place.path().join(name);
        let disk = crate::tests::open(&ring, path, &options).await.expect("open");
        let before = read_steps(&ring, &disk, 1 << 20).await;
        let checkpoint = freeze(&ring, &disk, super::options()).await.expect("a checkpoint");
        assert_eq!(disk.write(&ring, 0, &buffer(&[9; 100_000])).await, Ok(100_000));
        assert_eq!(disk.write(&ring, 1_490_000, &buffer(&[9; 20_000])).await, Ok(10_000));
        assert_eq!(checkpoint.disk().size(), Bytes(1_500_000));
        assert_same(&read_steps(&ring, checkpoint.disk(), 1 << 20).await, &before);
    });
}

/// Zero or not, of each sector.
async fn zeroes(ring: &Ring, disk: &Disk) -> Vec<bool> {
    let mut found = Vec::new();
    disk.map_entries(ring, 0, Bytes::MAX, |entry| {
        let sectors = usize::try_from(entry.status.len / 512).expect("small");
        found.resize(found.len() + sectors, entry.status.zero);
    })
    .await
    .expect("a map");
    found
}

#[test]
fn holes_stay_known_and_data_stays_data() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let before = zeroes(&ring, &disk).await;
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        assert_eq!(zeroes(&ring, checkpoint.disk()).await, before);
        // A hole gets data, data becomes a hole.
        assert_eq!(disk.write(&ring, 7 << 18, &buffer(&[9; 100_000])).await, Ok(100_000));
        assert_eq!(disk.punch(&ring, 0, Bytes(1 << 20)).await, Ok(()));
        assert!(zeroes(&ring, &disk).await != before);
        assert_eq!(zeroes(&ring, checkpoint.disk()).await, before);
        // What was a hole takes no space.
        assert_eq!(checkpoint.fleeced_bytes(), Bytes(1 << 20));
        let view = checkpoint.disk().view().await;
        let mapped = view.map(&ring, 0, Bytes(1 << 20)).await.expect("a mapping");
        assert!(matches!(mapped.mapping, Mapping::ReadOnly { len } if len == Bytes(1 << 20)));
        let mapped = view.map(&ring, 7 << 18, Bytes(4096)).await.expect("a mapping");
        assert!(matches!(mapped.mapping, Mapping::Zero { len: Bytes(4096) }));
        let mapped = view.map(&ring, 4 << 20, Bytes(4096)).await.expect("a mapping");
        assert!(matches!(mapped.mapping, Mapping::PastEnd));
    });
}

#[test]
fn zeroes_of_a_raw_image_take_no_space() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let before = read_steps(&ring, &disk, 1 << 20).await;
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        assert_eq!(disk.write_zeroes(&ring, 0, Bytes(4 << 20), true).await, Ok(()));
        // 1 MiB and 1000 KiB.
        assert_eq!(checkpoint.fleeced_bytes(), Bytes((1 << 20) + (1000 << 10)));
        assert_same(&read_steps(&ring, checkpoint.disk(), 1 << 20).await, &before);
    });
}

#[test]
fn disks_that_are_held_together_are_of_one_instant() {
    let place = directory();
    let (first, second) = (chain(&place), raw(&place));
    run(async |ring| {
        let disks = [writable(&ring, &place, first).await, writable(&ring, &place, second).await];
        let prepared = [
            disks[0].prepare_checkpoint(&ring, options()).await.expect("prepared"),
            disks[1].prepare_checkpoint(&ring, options()).await.expect("prepared"),
        ];
        // A writer that counts on one disk, then on the other.
        let (handle, written) = (ring.clone(), disks.clone());
        ring.spawn(async move {
            for count in 1..=250u8 {
                for disk in &written {
                    disk.write(&handle, 0, &buffer(&[count; 512])).await.expect("write");
                }
            }
        });
        for _ in 0..40 {
            ring.yield_now().await;
        }
        let mut held = Vec::new();
        for disk in &disks {
            held.push(disk.hold(&ring, HOLD).await.expect("held"));
        }
        let frozen: Vec<_> = held
            .iter_mut()
            .zip(&prepared)
            .map(|(held, prepared)| held.freeze(prepared).expect("frozen"))
            .collect();
        drop(held);
        let buf = IoBuf::new(512, 512);
        let mut counts = Vec::new();
        for checkpoint in &frozen {
            checkpoint.disk().read(&ring, 0, &buf).await.expect("read");
            counts.push(buf.to_vec()[0]);
        }
        assert!(counts[0] == counts[1] || counts[0] == counts[1] + 1, "{counts:?}");
    });
}

#[test]
fn changes_of_the_disk_leave_the_frozen_state() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let before = read_steps(&ring, &disk, 1 << 20).await;
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        let frozen = checkpoint.disk();
        let progress = Arc::new(Progress::new());
        let same = async || assert_same(&read_steps(&ring, frozen, 1 << 20).await, &before);
        disk.resize(&ring, Bytes(6 << 20)).await.expect("it grows");
        same().await;
        change_all(&ring, &disk).await;
        disk.write(&ring, 5 << 20, &buffer(&[1; 4096])).await.expect("write");
        let over = place.path().join("over.qcow2");
        disk.add_overlay(&ring, over, Default::default()).await.expect("an overlay");
        same().await;
        disk.write(&ring, 600 << 10, &buffer(&[5; 300_000])).await.expect("write");
        same().await;
        disk.commit(&ring, crate::CommitOptions::TOP, &progress).await.expect("a commit");
        disk.write(&ring, 1 << 19, &buffer(&[6; 100_000])).await.expect("write");
        same().await;
        disk.snapshot(&ring, crate::SnapshotChange::Create("a".into())).await.expect("snapshot");
        disk.write(&ring, 900 << 10, &buffer(&[4; 100_000])).await.expect("write");
        same().await;
        assert_eq!(frozen.size(), Bytes(4 << 20));
        assert_eq!(checkpoint.state(), CheckpointState::Running);
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
    });
}

#[test]
fn the_space_of_the_file_is_given_back_at_the_end() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let mut options = options();
        options.fleece = fleece();
        let file = Arc::downgrade(&options.fleece);
        let prepared = disk.prepare_checkpoint(&ring, options).await.expect("prepared");
        let frozen = disk.hold(&ring, HOLD).await.expect("held").freeze(&prepared);
        let checkpoint = frozen.expect("a checkpoint");
        assert_eq!(disk.write(&ring, 0, &buffer(&[9; 4096])).await, Ok(4096));
        assert!(file.upgrade().is_some());
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        assert!(file.upgrade().is_none(), "the file is open");
    });
}
