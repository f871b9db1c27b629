//! Two threads with rings of their own on one image: every read is compared, and the image is
//! looked through at the end.

use std::sync::{Arc, Mutex};

use ringdisk_qcow2::{Bytes, GuestOffset, OpenOptions, Qcow2};
use ringdisk_ring::{Ring, Runtime};
use ringdisk_storage::{Lock, Storage};
use ringdisk_testkit::layout::{Guest, Layout, Shape};
use ringdisk_testkit::oracle::{Below, Content, Oracle};
use ringdisk_testkit::sim::{Prng, SimStorage};

use crate::common::runtime;
use crate::live::{self, Base, buffer, writable};

const DISK: u16 = 3;
const SIZE: u64 = 6 << 20;
const BELOW: Below = Below { disk: 1, len: SIZE / 2 };

/// What the tasks of all threads share.
struct Shared {
    image: Arc<Qcow2>,
    oracle: Mutex<Oracle>,
}

impl Shared {
    fn oracle<T>(&self, look: impl FnOnce(&mut Oracle) -> T) -> T {
        look(&mut self.oracle.lock().expect("no panic while it is held"))
    }

    async fn step(&self, ring: &Ring, prng: &mut Prng) {
        let base = Base(BELOW);
        // Few clusters, so that tasks meet; in several tables.
        let start = prng.below(3) * (2 << 20) + prng.below(96) * 512;
        let range = start..(start + 512 * (1 + prng.below(24))).min(SIZE);
        let len = range.end - range.start;
        match prng.below(20) {
            0..=9 => {
                let begun = self.oracle(|oracle| oracle.begin(range.clone(), Content::Stamped));
                let buf = buffer(&self.oracle(|oracle| oracle.bytes(&begun)));
                let done = self.image.write(ring, GuestOffset(start), &buf, &base).await;
                assert_eq!(done, Ok(buf.len()));
                self.oracle(|oracle| oracle.end(&begun, true));
            }
            10 | 11 => {
                let begun = self.oracle(|oracle| oracle.begin(range, Content::Zero));
                let unmap = prng.coin();
                self.image
                    .write_zeroes(ring, GuestOffset(start), Bytes(len), unmap, &base)
                    .await
                    .expect("zeroes");
                self.oracle(|oracle| oracle.end(&begun, true));
            }
            12 | 13 => {
                let begun = self.oracle(|oracle| oracle.begin(range, Content::Zero));
                self.image
                    .discard(ring, GuestOffset(start), Bytes(len), &base)
                    .await
                    .expect("a discard");
                self.oracle(|oracle| oracle.end(&begun, true));
            }
            14 => {
                let begun = self.oracle(Oracle::begin_flush);
                self.image.flush(ring).await.expect("a flush");
                self.oracle(|oracle| oracle.end_flush(&begun));
            }
            _ => {
                let begun = self.oracle(|oracle| oracle.begin_read(range));
                let mut bytes = vec![0; usize::try_from(len).expect("small")];
                live::read(ring, &self.image, &base, start, &mut bytes).await.expect("a read");
                let seen = self.oracle(|oracle| oracle.end_read(&begun, &bytes));
                seen.unwrap_or_else(|mismatch| panic!("{mismatch}"));
            }
        }
    }
}

/// One thread: tasks that work until each has made its steps.
fn thread(shared: &Arc<Shared>, seed: u64, tasks: u64, steps: u64) {
    let mut runtime = Runtime::new(ringdisk_ring::Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let (done, left) = (std::rc::Rc::new(std::cell::Cell::new(0)), tasks);
    for task in 0..tasks {
        let (shared, handle, done) = (shared.clone(), ring.clone(), done.clone());
        ring.spawn(async move {
            let mut prng = Prng::new(seed * 1000 + task);
            for _ in 0..steps {
                shared.step(&handle, &mut prng).await;
            }
            done.set(done.get() + 1);
        });
    }
    runtime.block_on(async {
        while done.get() < left {
            ring.sleep(std::time::Duration::from_millis(1)).await;
        }
    });
}

fn shape(cluster_bits: u32) -> Shape {
    let backing = Some(("base".to_owned(), "raw".to_owned()));
    Shape { cluster_bits, size: SIZE, backing, ..Shape::default() }
}

/// Works on the image with two threads and closes it; returns what must be there.
fn work(file: Arc<Storage>, options: &OpenOptions, seed: u64, steps: u64) -> Oracle {
    let mut own = runtime();
    let ring = own.ring().clone();
    let image = own.block_on(Qcow2::open(&ring, file, options)).expect("a sound image");
    let oracle = Mutex::new(Oracle::new(DISK, SIZE, BELOW));
    let shared = Arc::new(Shared { image: Arc::new(image), oracle });
    std::thread::scope(|scope| {
        for number in 0..2 {
            let shared = &shared;
            scope.spawn(move || thread(shared, seed * 2 + number, 12, steps));
        }
    });
    own.block_on(shared.image.close(&ring)).expect("a close");
    shared.oracle(Oracle::settle);
    shared.oracle(|oracle| oracle.clone())
}

/// The image is sound and holds what it must hold.
fn look(file: &SimStorage, oracle: &Oracle) {
    let layout = Layout::of(file);
    assert!(layout.is_sound() && layout.leaks == 0, "{layout}");
    let guest = Guest::active(file, file).expect("a sound header");
    let seen = oracle
        .judge_crash(|at, bytes| guest.read(at, bytes, &|at, out| oracle.fill_below(at, out)));
    seen.unwrap_or_else(|mismatch| panic!("{mismatch}"));
}

fn steps(some: u64) -> u64 {
    if std::env::var_os("RINGDISK_FULL").is_some() { some * 30 } else { some }
}

#[test]
fn two_threads_on_one_image_in_memory() {
    for (seed, cluster_bits) in [(1, 9), (2, 12), (3, 16)] {
        let sim = SimStorage::from_image(&shape(cluster_bits).make(), seed);
        let options = OpenOptions { metadata_cache_bytes: Some(Bytes::ZERO), ..writable() };
        let oracle = work(sim.storage(), &options, seed, steps(120));
        look(&sim, &oracle);
    }
}

#[test]
fn two_threads_on_one_image_in_a_file() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("image");
    for (seed, cluster_bits) in [(4, 12), (5, 16)] {
        std::fs::write(&path, shape(cluster_bits).make()).expect("room");
        let options = ringdisk_storage::OpenOptions { lock: Lock::None, ..Default::default() };
        let file = Arc::new(Storage::open(&path, &options).expect("a file"));
        let oracle = work(file, &writable(), seed, steps(80));
        let sim = SimStorage::from_image(&std::fs::read(&path).expect("readable"), 1);
        look(&sim, &oracle);
    }
}

/// No test: `./test races` runs it to see that the thread sanitizer finds what it is there for.
/// Without the sanitizer nothing can be seen of it.
#[test]
#[ignore = "run by ./test races: a race on purpose"]
fn a_race_that_is_there() {
    struct Shared(std::cell::UnsafeCell<u64>);
    // SAFETY: not sound, which is the point; nothing depends on the number.
    unsafe impl Sync for Shared {}
    let shared = Shared(std::cell::UnsafeCell::new(0));
    let start = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (shared, start) = (&shared, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..1000 {
                    // SAFETY: as above.
                    unsafe { shared.0.get().write_volatile(number + round) }
                }
            });
        }
    });
}
