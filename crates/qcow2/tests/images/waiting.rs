//! What is missing is loaded once, and only those who need it wait.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use ringdisk_qcow2::{Bytes, Compressed, ExtentKind, GuestOffset, OpenOptions, Qcow2};
use ringdisk_ring::{Errno, IoBuf, Ring, Runtime};

use crate::common::memory::{Control, memory};
use crate::common::{Images, KIB, MIB, runtime};

/// An image in memory with data in its first two L2 slices: guest offsets 0 and 32 MiB.
fn two_slices(runtime: &mut Runtime) -> (Arc<Qcow2>, Arc<Control>, [u64; 2]) {
    let images = Images::new();
    let path = images.create("image", "", 64 * MIB);
    images.qemu_io("image", &["write -q -P 1 0 64k".into(), "write -q -P 2 32M 64k".into()]);
    let bytes = std::fs::read(path).expect("the image");
    let word = |at: u64| {
        let at = at as usize;
        u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
    };
    let table = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    let (image, control) = open(runtime, bytes);
    (image, control, [table, table + 4096])
}

fn open(runtime: &mut Runtime, bytes: Vec<u8>) -> (Arc<Qcow2>, Arc<Control>) {
    let (storage, control) = memory(bytes);
    let ring = runtime.ring().clone();
    let options = OpenOptions::default();
    let image = runtime.block_on(Qcow2::open(&ring, storage, &options)).expect("a good image");
    control.reads.lock().expect("lock").clear();
    (Arc::new(image), control)
}

/// Runs `count` tasks that share nothing but the image, and gives their results.
fn run_together<T, F>(
    runtime: &mut Runtime,
    count: usize,
    task: impl Fn(Ring, usize) -> F,
) -> Vec<T>
where
    T: 'static,
    F: Future<Output = T> + 'static,
{
    let results = Rc::new(RefCell::new(Vec::new()));
    let ring = runtime.ring().clone();
    for index in 0..count {
        let results = results.clone();
        let task = task(ring.clone(), index);
        ring.spawn(async move {
            let result = task.await;
            results.borrow_mut().push(result);
        });
    }
    let done = results.clone();
    runtime.block_on(async move {
        while done.borrow().len() < count {
            ring.yield_now().await;
        }
    });
    results.take()
}

#[test]
fn a_slice_that_many_requests_miss_is_read_once() {
    let mut runtime = runtime();
    let (image, control, [first, _]) = two_slices(&mut runtime);
    control.slow.store(true, Ordering::SeqCst);
    let shared = image.clone();
    let extents = run_together(&mut runtime, 20, move |ring, index| {
        let image = shared.clone();
        async move { image.map(&ring, GuestOffset(index as u64 * 512), Bytes(512)).await }
    });
    assert_eq!(extents.len(), 20);
    assert!(
        extents.iter().all(|e| matches!(e, Ok(e) if matches!(e.kind, ExtentKind::Data { .. })))
    );
    assert_eq!(control.reads_at(first), 1);
    assert_eq!(image.cache_counters().loads, 1);
}

#[test]
fn an_error_of_the_load_reaches_all_who_wait_and_the_next_tries_again() {
    let mut runtime = runtime();
    let (image, control, [first, _]) = two_slices(&mut runtime);
    control.slow.store(true, Ordering::SeqCst);
    *control.failing.lock().expect("lock") = Some(first);
    let shared = image.clone();
    let errors = run_together(&mut runtime, 5, move |ring, _| {
        let image = shared.clone();
        async move { image.map(&ring, GuestOffset(0), Bytes(512)).await }
    });
    assert_eq!(errors, vec![Err(Errno::IO); 5]);
    assert_eq!(control.reads_at(first), 1);
    *control.failing.lock().expect("lock") = None;
    let ring = runtime.ring().clone();
    assert!(runtime.block_on(image.map(&ring, GuestOffset(0), Bytes(512))).is_ok());
}

#[test]
fn a_load_that_hangs_stops_only_those_who_need_it() {
    let mut runtime = runtime();
    let (image, control, [first, _]) = two_slices(&mut runtime);
    *control.held.lock().expect("lock") = Some(first);
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut stuck = pin!(image.map(&ring, GuestOffset(0), Bytes(512)));
        poll_fn(|context| {
            assert!(stuck.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        let other = image.map(&ring, GuestOffset(32 * MIB), Bytes(512)).await;
        assert!(matches!(other.expect("not held").kind, ExtentKind::Data { .. }));
        control.release();
        assert!(matches!(stuck.await.expect("released").kind, ExtentKind::Data { .. }));
    });
}

#[test]
fn a_cancelled_load_is_taken_over_by_one_who_waits() {
    let mut runtime = runtime();
    let (image, control, [first, _]) = two_slices(&mut runtime);
    *control.held.lock().expect("lock") = Some(first);
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut leader = Box::pin(image.map(&ring, GuestOffset(0), Bytes(512)));
        let mut follower = pin!(image.map(&ring, GuestOffset(512), Bytes(512)));
        poll_fn(|context| {
            assert!(leader.as_mut().poll(context).is_pending());
            assert!(follower.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(leader);
        control.release();
        assert!(matches!(follower.await.expect("released").kind, ExtentKind::Data { .. }));
    });
    assert_eq!(control.reads_at(first), 2);
}

/// An image in memory whose clusters are all compressed, and the first of them.
fn compressed(runtime: &mut Runtime, kind: &str) -> (Arc<Qcow2>, Arc<Control>, Compressed) {
    let images = Images::new();
    let source: Vec<u8> = (0..4 * MIB).map(|i| ((i / 100) ^ (i / 70_000)) as u8).collect();
    std::fs::write(images.path("source"), source).expect("the source");
    let options = format!("compression_type={kind}");
    images.qemu_img(&[
        "convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "source", "image",
    ]);
    let bytes = std::fs::read(images.path("image")).expect("the image");
    let (image, control) = open(runtime, bytes);
    let ring = runtime.ring().clone();
    let extent =
        runtime.block_on(image.map(&ring, GuestOffset(0), Bytes(1))).expect("a good image");
    let ExtentKind::Compressed(cluster) = extent.kind else { panic!("{extent:?}") };
    (image, control, cluster)
}

fn expected(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|i| ((i / 100) ^ (i / 70_000)) as u8).collect()
}

#[test]
fn sequential_small_reads_read_neighbours_together_and_each_cluster_once() {
    let mut runtime = runtime();
    // The start of a deflated cluster is had for less than the whole; a second read needs it again.
    for (kind, first) in [("zlib", 2), ("zstd", 1)] {
        let (image, control, cluster) = compressed(&mut runtime, kind);
        let ours = crate::common::read_all(&mut runtime, &image, &[], 4096);
        crate::common::assert_same(kind, &ours, &expected(0, ours.len()));
        assert_eq!(control.reads_at(cluster.host_offset().0), first, "{kind}");
        let reads = control.reads.lock().expect("lock").len();
        // One L2 slice, the first clusters, then half a read-ahead window (16 clusters) at a time.
        assert!(reads <= 12, "{kind}: {reads} reads for 64 clusters");
    }
}

#[test]
fn neighbours_of_a_cluster_that_cannot_be_read_are_read_all_the_same() {
    let mut runtime = runtime();
    for kind in ["zlib", "zstd"] {
        let (image, control, cluster) = compressed(&mut runtime, kind);
        *control.failing.lock().expect("lock") = Some(cluster.host_offset().0);
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            let buf = IoBuf::new(64 * KIB as usize, 4096);
            // The start of a request over four clusters, which are one read at first.
            let ahead = 3 * 64 * KIB;
            let first =
                image.read_compressed_of(&ring, cluster, GuestOffset(0), &buf, Bytes(ahead)).await;
            assert_eq!(first, Err(Errno::IO));
            for number in 1..4 {
                let at = number * 64 * KIB;
                let extent =
                    image.map(&ring, GuestOffset(at), Bytes(1)).await.expect("a good image");
                let ExtentKind::Compressed(next) = extent.kind else { panic!("{extent:?}") };
                image
                    .read_compressed(&ring, next, GuestOffset(at), &buf)
                    .await
                    .expect("a good cluster");
                assert_eq!(buf.to_vec(), expected(at, 64 * KIB as usize));
            }
        });
        assert_eq!(control.reads_at(cluster.host_offset().0), 2, "together, then alone");
    }
}

#[test]
fn several_who_wait_for_one_cluster_decompress_it_once() {
    let mut runtime = runtime();
    let (image, control, cluster) = compressed(&mut runtime, "zstd");
    control.slow.store(true, Ordering::SeqCst);
    let results = run_together(&mut runtime, 16, move |ring, index| {
        let image = image.clone();
        async move {
            let buf = IoBuf::new(4096, 4096);
            let at = index as u64 * 4096;
            image
                .read_compressed(&ring, cluster, GuestOffset(at), &buf)
                .await
                .map(|()| (at, buf.to_vec()))
        }
    });
    assert_eq!(results.len(), 16);
    for result in results {
        let (at, bytes) = result.expect("a good cluster");
        assert_eq!(bytes, expected(at, 4096));
    }
    assert_eq!(control.reads_at(cluster.host_offset().0), 1);
}

#[test]
fn reads_that_leave_their_compressed_cluster_are_refused() {
    let mut runtime = runtime();
    let (image, _, cluster) = compressed(&mut runtime, "zlib");
    let ring = runtime.ring().clone();
    for (offset, len) in [(0, 64 * KIB as usize + 1), (60 * KIB, 8192), (u64::MAX, 2)] {
        let buf = IoBuf::new(len, 512);
        let result =
            runtime.block_on(image.read_compressed(&ring, cluster, GuestOffset(offset), &buf));
        assert_eq!(result, Err(Errno::INVAL), "{offset} {len}");
    }
}

#[test]
fn a_cluster_of_rubbish_is_an_error_each_time() {
    let mut runtime = runtime();
    for kind in ["zlib", "zstd"] {
        let (image, control, cluster) = rubbish(&mut runtime, kind);
        let ring = runtime.ring().clone();
        let buf = IoBuf::new(512, 512);
        for _ in 0..2 {
            let result =
                runtime.block_on(image.read_compressed(&ring, cluster, GuestOffset(0), &buf));
            assert_eq!(result, Err(Errno::IO), "{kind}");
        }
        assert_eq!(control.reads_at(cluster.host_offset().0), 2);
    }
}

/// The image of [`compressed`], with its first cluster overwritten.
fn rubbish(runtime: &mut Runtime, kind: &str) -> (Arc<Qcow2>, Arc<Control>, Compressed) {
    let (good, _, cluster) = compressed(runtime, kind);
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(good.file().len() as usize, 4096);
    runtime.block_on(good.file().read(&ring, 0, &buf)).expect("memory");
    let mut bytes = buf.to_vec();
    let start = cluster.host_offset().0 as usize;
    bytes[start..start + 40].fill(0xee);
    let (image, control) = open(runtime, bytes);
    (image, control, cluster)
}
