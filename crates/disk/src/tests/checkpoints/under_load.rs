//! Frozen disks are read while clients of several threads write.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_testkit::sim::Prng;

use super::{chain, freeze, options, raw, writable};
use crate::tests::load::Load;
use crate::tests::{assert_same, directory, read_steps, run};
use crate::{CheckpointEnd, CheckpointState, Disk, Progress};

/// Requests of clients between two steps.
const REQUESTS: u64 = 300;

/// A thread that reads a disk at random places, which must have the bytes of `expected`.
fn reader(disk: &Arc<Disk>, expected: &Arc<Vec<u8>>, stop: &Arc<AtomicBool>) -> JoinHandle<u64> {
    let (disk, expected, stop) = (Arc::clone(disk), Arc::clone(expected), Arc::clone(stop));
    std::thread::spawn(move || {
        let mut runtime = Runtime::new(Config::default()).expect("io_uring");
        let ring = runtime.ring().clone();
        let mut prng = Prng::new(77);
        let mut count = 0;
        runtime.block_on(async {
            while !stop.load(Ordering::Relaxed) || count == 0 {
                let at = prng.below(expected.len() as u64);
                let len = usize::try_from(1 + prng.below(400_000)).expect("small");
                let from = usize::try_from(at).expect("small");
                let wanted = &expected[from..expected.len().min(from + len)];
                let buf = IoBuf::new(wanted.len(), 4096);
                assert_eq!(disk.read(&ring, at, &buf).await, Ok(wanted.len()));
                assert_same(&buf.to_vec(), wanted);
                let status = disk.block_status(&ring, at, Bytes::of(len)).await.expect("status");
                let known = usize::try_from(status.len).expect("small");
                assert!(known > 0 && known <= wanted.len());
                assert!(!status.zero || wanted[..known].iter().all(|byte| *byte == 0));
                count += 1;
            }
        });
        count
    })
}

/// Stops all clients of a disk for a moment, looks, and freezes it at that moment; clients go on.
async fn at_once(ring: &Ring, disk: &Arc<Disk>, expected: &[u8], seed: u64) -> Vec<u8> {
    let load = Load::start(disk, expected, seed);
    load.progress(ring, REQUESTS).await;
    let checkpoint = freeze(ring, disk, options()).await.expect("a checkpoint");
    // What it shows now it must show from now on.
    let before = Arc::new(read_steps(ring, checkpoint.disk(), 1 << 20).await);
    let stop = Arc::new(AtomicBool::new(false));
    let readers = [0, 1].map(|_| reader(checkpoint.disk(), &before, &stop));
    load.progress(ring, REQUESTS).await;
    assert_same(&read_steps(ring, checkpoint.disk(), 300_000).await, &before);
    load.progress(ring, REQUESTS).await;
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.join().expect("a reader") > 0);
    }
    assert_same(&read_steps(ring, checkpoint.disk(), 1 << 20).await, &before);
    assert_eq!(checkpoint.state(), CheckpointState::Running);
    checkpoint.end(ring, CheckpointEnd::Drop).await.expect("the end");
    let expected = load.halt(ring).await;
    assert_same(&read_steps(ring, disk, 1 << 20).await[..expected.len()], &expected);
    expected
}

/// As [`at_once`], where the state of the instant is known beforehand.
async fn known(ring: &Ring, disk: &Arc<Disk>, expected: Vec<u8>, seed: u64) -> Vec<u8> {
    let checkpoint = freeze(ring, disk, options()).await.expect("a checkpoint");
    let before = Arc::new(expected.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let readers = [0, 1].map(|_| reader(checkpoint.disk(), &before, &stop));
    let load = Load::start(disk, &expected, seed);
    load.progress(ring, 2 * REQUESTS).await;
    assert_same(&read_steps(ring, checkpoint.disk(), 1 << 20).await, &before);
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.join().expect("a reader") > 0);
    }
    checkpoint.end(ring, CheckpointEnd::Drop).await.expect("the end");
    load.halt(ring).await
}

#[test]
fn the_frozen_state_of_a_chain_stays_under_load() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let mut expected = read_steps(&ring, &disk, 1 << 20).await;
        for seed in 0..6 {
            expected = known(&ring, &disk, expected, seed).await;
            expected = at_once(&ring, &disk, &expected, seed + 1000).await;
        }
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn the_frozen_state_of_a_raw_image_stays_under_load() {
    let place = directory();
    let name = raw(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let mut expected = read_steps(&ring, &disk, 1 << 20).await;
        for seed in 0..6 {
            expected = known(&ring, &disk, expected, seed).await;
            expected = at_once(&ring, &disk, &expected, seed + 1000).await;
        }
    });
}

#[test]
fn changes_under_load_leave_the_frozen_state() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let before = Arc::new(read_steps(&ring, &disk, 1 << 20).await);
        let progress = Arc::new(Progress::new());
        let load = Load::start(&disk, &before, 5);
        load.progress(&ring, REQUESTS).await;
        let checkpoint = freeze(&ring, &disk, options()).await.expect("a checkpoint");
        let frozen = Arc::new(read_steps(&ring, checkpoint.disk(), 1 << 20).await);
        let stop = Arc::new(AtomicBool::new(false));
        let readers = [0, 1].map(|_| reader(checkpoint.disk(), &frozen, &stop));
        for round in 0..3 {
            let path = place.path().join(format!("over{round}.qcow2"));
            disk.add_overlay(&ring, path, Default::default()).await.expect("an overlay");
            load.progress(&ring, REQUESTS).await;
            disk.commit(&ring, crate::CommitOptions::TOP, &progress).await.expect("a commit");
            disk.resize(&ring, Bytes((5 + round) << 20)).await.expect("it grows");
            load.progress(&ring, REQUESTS).await;
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().expect("a reader") > 0);
        }
        assert_same(&read_steps(&ring, checkpoint.disk(), 1 << 20).await, &frozen);
        assert_eq!(checkpoint.state(), CheckpointState::Running);
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        let expected = load.halt(&ring).await;
        assert_same(&read_steps(&ring, &disk, 1 << 20).await[..expected.len()], &expected);
    });
}
