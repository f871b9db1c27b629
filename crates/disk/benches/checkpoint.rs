//! What a checkpoint costs clients: the pause of eight disks that are frozen at one instant, and
//! the time of a request while the frozen state is read as fast as possible.
//!
//! `cargo bench -p ringdisk-disk --bench checkpoint [DIRECTORY]`. Needs `qemu-img` to make the
//! images, in a directory below DIRECTORY (default: /var/tmp).

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_disk::{
    Bytes, Cache, Checkpoint, CheckpointEnd, CheckpointOptions, Disk, ImageOptions, NewBitmap,
    Source,
};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_storage::{OpenOptions, Storage};

/// Disks of one instant.
const DISKS: u32 = 8;
/// Requests in flight on each disk while it is frozen; half of them are writes.
const DEPTH: u64 = 16;
/// Size of a disk that is only frozen, and of one that is read, bytes.
const FROZEN_BYTES: u64 = 1 << 30;
const READ_BYTES: u64 = 2 << 30;
const REQUEST_BYTES: u64 = 4096;
/// Checkpoints that are made, of which the median and the worst pause are told.
const ROUNDS: usize = 9;
/// How long requests are measured, with and without a reader.
const MEASURED: Duration = Duration::from_secs(5);

fn qemu_img(directory: &Path, arguments: &[&str]) {
    let status = Command::new("qemu-img").args(arguments).current_dir(directory).status();
    assert!(status.expect("qemu-img").success());
}

async fn disk(ring: &Ring, directory: &Path, name: &str, size: u64, cache: Cache) -> Arc<Disk> {
    let words = ["create", "-q", "-f", "qcow2", name, &size.to_string()];
    qemu_img(directory, &words);
    let options = ImageOptions { cache, ..ImageOptions::default() };
    let disk = Disk::open(ring, Source::Path(directory.join(name)), &options).await.expect("open");
    let buf = IoBuf::new(1 << 20, 4096);
    buf.fill(1);
    for at in (0..size).step_by(1 << 20) {
        disk.write(ring, at, &buf).await.expect("write");
    }
    disk.flush(ring).await.expect("flush");
    disk
}

fn options(directory: &Path) -> CheckpointOptions {
    let file = tempfile::tempfile_in(directory).expect("a file");
    let file = Storage::from_fd(
        file.into(),
        "fleecing file",
        &OpenOptions { no_flush: true, ..OpenOptions::default() },
    );
    CheckpointOptions::new(Arc::new(file.expect("a storage")), Bytes(READ_BYTES))
}

/// A number below `bound`; a simple generator is good enough for places.
fn next(state: &mut u64, bound: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % bound
}

/// Clients until `stop`; gives the times of their requests.
fn clients(
    ring: &Ring,
    disk: &Arc<Disk>,
    depth: u64,
    stop: &Arc<AtomicBool>,
) -> std::sync::mpsc::Receiver<Vec<Duration>> {
    let (sender, receiver) = std::sync::mpsc::channel();
    for client in 0..depth {
        let (ring_, disk, stop) = (ring.clone(), Arc::clone(disk), Arc::clone(stop));
        let sender = sender.clone();
        ring.spawn(async move {
            let buf = IoBuf::new(4096, 4096);
            buf.fill(2);
            let (mut state, mut times) = (client * 7919 + 1, Vec::new());
            let places = disk.size() / REQUEST_BYTES;
            while !stop.load(Ordering::Relaxed) {
                let at = next(&mut state, places.0) * REQUEST_BYTES;
                let begun = Instant::now();
                if client % 2 == 0 {
                    disk.write(&ring_, at, &buf).await.expect("write");
                } else {
                    disk.read(&ring_, at, &buf).await.expect("read");
                }
                times.push(begun.elapsed());
                ring_.yield_now().await;
            }
            let _ = sender.send(times);
        });
    }
    receiver
}

/// Pauses of checkpoints of all disks: from the first hold until requests go on.
async fn pauses(
    ring: &Ring,
    directory: &Path,
    disks: &[Arc<Disk>],
    bitmaps: bool,
) -> Vec<Duration> {
    let mut pauses = Vec::new();
    let mut since = None;
    for round in 0..ROUNDS {
        let stop = Arc::new(AtomicBool::new(false));
        let _running: Vec<_> = disks.iter().map(|it| clients(ring, it, DEPTH, &stop)).collect();
        ring.sleep(Duration::from_millis(100)).await;
        let name = format!("round{round}");
        let mut prepared = Vec::new();
        let begun = Instant::now();
        for disk in disks {
            let mut options = options(directory);
            if bitmaps {
                options.since = since.clone();
                options.bitmap = Some(NewBitmap { name: name.clone(), granularity_bytes: None });
            }
            prepared.push(disk.prepare_checkpoint(ring, options).await.expect("prepared"));
        }
        if round == ROUNDS - 1 {
            println!("preparing one disk, bitmaps: {bitmaps}: {:?}", begun.elapsed() / DISKS);
        }
        ring.sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        let holds = disks.iter().map(|disk| disk.hold(ring, Duration::from_secs(5)));
        let mut held: Vec<_> = futures_util::future::join_all(holds)
            .await
            .into_iter()
            .map(|held| held.expect("held"))
            .collect();
        let frozen: Vec<Arc<Checkpoint>> = held
            .iter_mut()
            .zip(&prepared)
            .map(|(held, prepared)| held.freeze(prepared).expect("frozen"))
            .collect();
        drop(held);
        pauses.push(begun.elapsed());
        ring.sleep(Duration::from_millis(50)).await;
        for checkpoint in &frozen {
            checkpoint.end(ring, CheckpointEnd::Drop).await.expect("the end");
        }
        since = bitmaps.then_some(name);
        stop.store(true, Ordering::Relaxed);
        ring.sleep(Duration::from_millis(50)).await;
    }
    pauses.sort();
    pauses
}

/// Times of requests of one disk, sorted; and what a reader got meanwhile, bytes.
async fn times(ring: &Ring, disk: &Arc<Disk>, read: Option<&Arc<Disk>>) -> (Vec<Duration>, u64) {
    let stop = Arc::new(AtomicBool::new(false));
    let running = clients(ring, disk, DEPTH, &stop);
    let reader = read.map(|frozen| {
        let (frozen, stop) = (Arc::clone(frozen), Arc::clone(&stop));
        std::thread::spawn(move || reader(&frozen, &stop))
    });
    ring.sleep(MEASURED).await;
    stop.store(true, Ordering::Relaxed);
    ring.sleep(Duration::from_millis(200)).await;
    let mut times: Vec<Duration> = running.try_iter().flatten().collect();
    times.sort();
    (times, reader.map_or(0, |reader| reader.join().expect("a reader")))
}

/// Reads a frozen disk from the start, again and again. Gives the bytes.
fn reader(frozen: &Arc<Disk>, stop: &AtomicBool) -> u64 {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let buf = IoBuf::new(1 << 20, 4096);
        let mut bytes = 0;
        while !stop.load(Ordering::Relaxed) {
            let at = bytes % frozen.size().0;
            bytes += frozen.read(&ring, at, &buf).await.expect("read") as u64;
        }
        bytes
    })
}

fn quantile(times: &[Duration], of_thousand: usize) -> Duration {
    times.get(times.len() * of_thousand / 1000).copied().unwrap_or_default()
}

fn main() {
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let place = words.first().map_or("/var/tmp", |word| word);
    let directory = tempfile::tempdir_in(place).expect("a directory");
    let path = directory.path();
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut disks = Vec::new();
        for number in 0..DISKS {
            let name = format!("{number}.qcow2");
            disks.push(disk(&ring, path, &name, FROZEN_BYTES / 8, Cache::None).await);
        }
        for bitmaps in [false, true] {
            let found = pauses(&ring, path, &disks, bitmaps).await;
            let (median, worst) = (found[found.len() / 2], found[found.len() - 1]);
            println!(
                "pause of {DISKS} disks, bitmaps: {bitmaps}: median {median:?}, worst {worst:?}"
            );
        }
        drop(disks);
        let disk = disk(&ring, path, "read.qcow2", READ_BYTES, Cache::None).await;
        for round in 0..3 {
            let (alone, _) = times(&ring, &disk, None).await;
            let prepared = disk.prepare_checkpoint(&ring, options(path)).await.expect("prepared");
            let mut held = disk.hold(&ring, Duration::from_secs(5)).await.expect("held");
            let checkpoint = held.freeze(&prepared).expect("frozen");
            drop(held);
            let (beside, bytes) = times(&ring, &disk, Some(checkpoint.disk())).await;
            let rate = bytes >> 20;
            let seconds = MEASURED.as_secs();
            let fleeced = checkpoint.fleeced_bytes() >> 20;
            for (what, times) in [("alone", &alone), ("beside a reader", &beside)] {
                println!(
                    "round {round}, {what}: {} requests, median {:?}, p99 {:?}, p99.9 {:?}",
                    times.len(),
                    quantile(times, 500),
                    quantile(times, 990),
                    quantile(times, 999)
                );
            }
            println!("reader: {} MiB/s; fleecing file: {fleeced} MiB", rate / seconds);
            checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        }
    });
}
