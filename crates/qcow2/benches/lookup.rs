//! What a cached look-up costs, and whether it scales: two threads on one image against two threads
//! on an image each.
//!
//! `cargo bench -p ringdisk-qcow2 --bench lookup`. Needs `qemu-img` to make the images.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use ringdisk_qcow2::{Bytes, GuestOffset, OpenOptions, Qcow2};
use ringdisk_ring::{Config, Runtime};
use ringdisk_storage::Storage;

/// Size of the disk: 32 slices.
const DISK_BYTES: u64 = 1 << 30;
/// Bytes of one request.
const REQUEST_BYTES: u64 = 4096;

/// A fully mapped image with all its slices in the cache.
fn image(directory: &Path, name: &str, writable: bool) -> Arc<Qcow2> {
    let path = directory.join(name);
    let status = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"])
        .arg(&path)
        .arg(DISK_BYTES.to_string())
        .status()
        .expect("qemu-img");
    assert!(status.success());
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let storage = ringdisk_storage::OpenOptions { read_only: !writable, ..Default::default() };
    let storage = Arc::new(Storage::open(&path, &storage).expect("open"));
    runtime.block_on(async {
        let options = OpenOptions { writable, ..OpenOptions::default() };
        let image = Qcow2::open(&ring, storage, &options).await.expect("a good image");
        for offset in (0..DISK_BYTES).step_by(1 << 20) {
            image
                .map(&ring, GuestOffset(offset), Bytes(REQUEST_BYTES))
                .await
                .expect("a good image");
        }
        Arc::new(image)
    })
}

/// `count` look-ups all over the disk, with what a request holds around them.
fn look_up(image: &Qcow2, seed: u64, count: u64) {
    let mut state = seed;
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (state >> 20) % (DISK_BYTES / REQUEST_BYTES) * REQUEST_BYTES;
        let _grace = image.enter();
        let extent = image.map_cached(black_box(GuestOffset(offset)), Bytes(REQUEST_BYTES));
        assert!(black_box(extent).is_ok_and(|extent| extent.is_some()));
    }
}

/// How long two threads take for `count` look-ups each.
fn two_threads(first: &Arc<Qcow2>, second: &Arc<Qcow2>, count: u64) -> Duration {
    let barrier = Arc::new(Barrier::new(3));
    let threads: Vec<_> = [(first.clone(), 1), (second.clone(), 2)]
        .into_iter()
        .map(|(image, seed)| {
            let barrier = barrier.clone();
            std::thread::spawn(move || {
                barrier.wait();
                look_up(&image, seed, count);
            })
        })
        .collect();
    barrier.wait();
    let start = Instant::now();
    threads.into_iter().for_each(|thread| thread.join().expect("thread"));
    start.elapsed()
}

fn bench(criterion: &mut Criterion) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (one, other) =
        (image(directory.path(), "one", true), image(directory.path(), "other", true));
    let fixed = image(directory.path(), "fixed", false);
    let mut group = criterion.benchmark_group("look-up");
    group.bench_function("read-only image", |bencher| {
        bencher.iter_custom(|count| {
            let start = Instant::now();
            look_up(&fixed, 1, count);
            start.elapsed()
        });
    });
    group.bench_function("writable image, with its grace period", |bencher| {
        bencher.iter_custom(|count| {
            let start = Instant::now();
            look_up(&one, 1, count);
            start.elapsed()
        });
    });
    group.bench_function("2 threads, one image", |bencher| {
        bencher.iter_custom(|count| two_threads(&one, &one, count));
    });
    group.bench_function("2 threads, an image each", |bencher| {
        bencher.iter_custom(|count| two_threads(&one, &other, count));
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
