//! Storage that fails, stops short, and takes its time.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, Qcow2};
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::{assert_same, buffer, directory, qemu_img, qemu_io, run};
use crate::disk::Parts;
use crate::layer::{Layer, Node};
use crate::{Cache, Disk, Errno, ImageOptions, PIECES_MAX};

/// Clusters of the image, bytes.
const CLUSTER: usize = 4096;
/// Clusters that hold data; every run is one cluster, since they lie in reverse order.
const RUNS: usize = 9;

/// A qcow2 image in simulated storage, and the bytes of its disk.
async fn scattered(ring: &Ring) -> (SimStorage, Arc<Disk>, Vec<u8>) {
    let directory = directory();
    let size = (CLUSTER * RUNS).to_string();
    let options = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "a.qcow2", &size];
    qemu_img(&directory, &options);
    let mut expected = vec![0; CLUSTER * RUNS];
    for run in (0..RUNS).rev() {
        let command = format!("write -P {} {} {CLUSTER}", run + 1, run * CLUSTER);
        qemu_io(&directory, "qcow2", "a.qcow2", &[&command]);
        expected[run * CLUSTER..(run + 1) * CLUSTER].fill(u8::try_from(run + 1).expect("byte"));
    }
    let image = std::fs::read(directory.path().join("a.qcow2")).expect("read");
    let sim = SimStorage::from_image(&image, 1);
    let options = ringdisk_qcow2::OpenOptions::default();
    let image = Qcow2::open(ring, sim.storage(), &options).await.expect("open");
    let size = image.info().virtual_size;
    let parts = Parts::new(&ImageOptions { read_only: true, ..ImageOptions::default() });
    let disk = Disk::build(vec![Layer::new(Node::Qcow2(Arc::new(image)), size)], parts);
    // The table is loaded, so only data is read from now on.
    disk.read(ring, 0, &IoBuf::new(CLUSTER, CLUSTER)).await.expect("read");
    (sim, disk, expected)
}

/// Starts a read of the whole disk; the cell has its result when it is done.
fn start(ring: &Ring, disk: &Arc<Disk>, buf: &IoBuf) -> Rc<Cell<Option<Result<usize, Errno>>>> {
    let result = Rc::new(Cell::new(None));
    let (disk, handle, buf, cell) = (Arc::clone(disk), ring.clone(), buf.clone(), result.clone());
    ring.spawn(async move { cell.set(Some(disk.read(&handle, 0, &buf).await)) });
    result
}

/// Lets other tasks run until they wait.
async fn settle(ring: &Ring) {
    for _ in 0..50 {
        ring.yield_now().await;
    }
}

#[test]
fn runs_of_one_request_are_in_flight_together_and_bounded() {
    run(async |ring| {
        let (sim, disk, expected) = scattered(&ring).await;
        sim.on(When::kind(OpKind::Read), Fault::Hold);
        let buf = IoBuf::new(expected.len(), CLUSTER);
        let result = start(&ring, &disk, &buf);
        settle(&ring).await;
        assert_eq!(sim.held().len(), PIECES_MAX);
        while result.get().is_none() {
            // In any order.
            sim.release_shuffled();
            settle(&ring).await;
            assert!(sim.held().len() <= PIECES_MAX);
        }
        assert_eq!(result.get(), Some(Ok(expected.len())));
        assert_same(&buf.to_vec(), &expected);
    });
}

#[test]
fn a_failed_run_waits_for_the_others() {
    run(async |ring| {
        let (sim, disk, expected) = scattered(&ring).await;
        sim.on(When::kind(OpKind::Read).skip(1).once(), Fault::Fail(Errno::IO));
        sim.on(When::kind(OpKind::Read), Fault::Hold);
        let buf = IoBuf::new(expected.len(), CLUSTER);
        let result = start(&ring, &disk, &buf);
        settle(&ring).await;
        let begun = sim.held().len();
        assert!(begun > 0);
        assert_eq!(result.get(), None, "the buffer is still being written");
        sim.release_all();
        settle(&ring).await;
        assert_eq!(result.get(), Some(Err(Errno::IO)));
        // Nothing new was begun after the failure.
        assert_eq!(sim.held().len(), 0);
    });
}

#[test]
fn short_transfers_of_the_storage_are_made_whole() {
    run(async |ring| {
        let (sim, disk, expected) = scattered(&ring).await;
        sim.on(When::kind(OpKind::Read), Fault::Short(1000));
        let buf = IoBuf::new(expected.len(), CLUSTER);
        assert_eq!(disk.read(&ring, 0, &buf).await, Ok(expected.len()));
        assert_same(&buf.to_vec(), &expected);
    });
}

#[test]
fn clusters_that_were_cut_off_are_errors_and_the_rest_is_readable() {
    run(async |ring| {
        let (sim, disk, expected) = scattered(&ring).await;
        let image = sim.image();
        let last = u8::try_from(RUNS).expect("byte");
        let at = image.iter().position(|byte| *byte == last).expect("last cluster");
        // Clusters were written from the last to the first, so only the last one is left.
        sim.set_len_behind((at + CLUSTER) as u64);
        let buf = IoBuf::new(expected.len(), CLUSTER);
        assert_eq!(disk.read(&ring, 0, &buf).await, Err(Errno::IO));
        let buf = IoBuf::new(CLUSTER, CLUSTER);
        let offset = (RUNS - 1) * CLUSTER;
        assert_eq!(disk.read(&ring, offset as u64, &buf).await, Ok(CLUSTER));
        assert_same(&buf.to_vec(), &expected[offset..]);
    });
}

#[test]
fn errors_of_a_raw_storage_reach_the_caller_as_they_are() {
    run(async |ring| {
        for errno in [Errno::IO, Errno::NOSPC, Errno::DQUOT] {
            let sim = SimStorage::new(1 << 20, 1);
            let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
            sim.on(When::any(), Fault::Fail(errno));
            let buf = buffer(&[1; 4096]);
            assert_eq!(disk.read(&ring, 0, &buf).await, Err(errno));
            assert_eq!(disk.write(&ring, 0, &buf).await, Err(errno));
            assert_eq!(disk.flush(&ring).await, Err(errno));
            assert_eq!(disk.write_zeroes(&ring, 0, Bytes(4096), true).await, Err(errno));
            assert_eq!(disk.discard(&ring, 0, Bytes(4096)).await, Err(errno));
            assert_eq!(disk.resize(&ring, Bytes(1)).await, Err(errno));
            assert_eq!(disk.size(), Bytes(1 << 20));
        }
    });
}

#[test]
fn a_full_disk_in_the_middle_of_a_write_shows_as_a_short_write() {
    run(async |ring| {
        let sim = SimStorage::new(1 << 20, 1);
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        sim.on(When::kind(OpKind::Write), Fault::FailAfter(1024, Errno::NOSPC));
        let done = disk.write(&ring, 0, &buffer(&[1; 4096])).await;
        assert!(done == Ok(1024) || done == Err(Errno::NOSPC), "{done:?}");
    });
}

#[test]
fn cache_modes_decide_what_is_flushed() {
    run(async |ring| {
        let cases = [
            (Cache::Writeback, 1, 0),
            (Cache::None, 1, 0),
            (Cache::Writethrough, 0, 0),
            (Cache::DirectSync, 0, 0),
            (Cache::Unsafe, 1, 1),
        ];
        for (cache, after_write, after_flush) in cases {
            let sim = SimStorage::new(1 << 20, 1);
            let options = ImageOptions { cache, ..ImageOptions::default() };
            let disk = Disk::from_storage(sim.storage(), &options);
            assert_eq!(disk.write(&ring, 0, &buffer(&[1; 512])).await, Ok(512));
            assert_eq!(sim.unflushed(), after_write, "{cache:?}");
            assert_eq!(disk.flush(&ring).await, Ok(()));
            assert_eq!(sim.unflushed(), after_flush, "{cache:?}");
        }
    });
}

#[test]
fn a_dropped_resize_lets_the_next_one_in() {
    run(async |ring| {
        let sim = SimStorage::new(1 << 20, 1);
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        sim.on(When::any().once(), Fault::Hang);
        {
            let mut hanging = std::pin::pin!(disk.resize(&ring, Bytes(100)));
            std::future::poll_fn(|cx| {
                assert!(hanging.as_mut().poll(cx).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
        }
        assert_eq!(disk.resize(&ring, Bytes(200)).await, Ok(()));
        assert_eq!(disk.size(), Bytes(200));
    });
}
