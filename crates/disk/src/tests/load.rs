//! Clients that write, zero, discard and read a disk from threads of their own, and know what they
//! must read.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_testkit::sim::Prng;

use crate::Disk;

/// Threads, each with a ring.
const THREADS: u64 = 2;
/// Clients of each thread; each has a part of the disk for itself.
const CLIENTS: u64 = 4;
/// Longest time between two requests of a client, microseconds: clients that never rest would take
/// all CPUs from what is tested.
const THINK_MAX_MICROS: u64 = 600;
/// Longest request, bytes.
const REQUEST_MAX: u64 = 96 << 10;
/// How long what requests have begun beside themselves is waited for.
const AFTER_MAX: Duration = Duration::from_secs(5);

/// A running load.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Vec<Part>>>,
}

/// What one client has written.
#[derive(Clone)]
struct Part {
    start: u64,
    bytes: Vec<u8>,
}

impl Load {
    /// Starts clients on the first bytes of a disk.
    ///
    /// * `expected`: what the disk has; the clients use as much of it.
    pub(crate) fn start(disk: &Arc<Disk>, expected: &[u8], seed: u64) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let requests = Arc::new(AtomicU64::new(0));
        let len = expected.len() / usize::try_from(THREADS * CLIENTS).expect("small");
        let mut parts = expected
            .chunks(len)
            .enumerate()
            .map(|(number, bytes)| Part { start: (number * len) as u64, bytes: bytes.to_vec() });
        let threads = (0..THREADS)
            .map(|thread| {
                let count = usize::try_from(CLIENTS).expect("small");
                let mut mine: Vec<Part> = parts.by_ref().take(count).collect();
                if thread + 1 == THREADS {
                    mine.extend(parts.by_ref());
                }
                let (disk, stop) = (Arc::clone(disk), Arc::clone(&stop));
                let requests = Arc::clone(&requests);
                std::thread::spawn(move || run(&disk, mine, &stop, &requests, seed + thread * 100))
            })
            .collect();
        Load { stop, requests, threads }
    }

    /// Waits until the clients have made so many more requests.
    pub(crate) async fn progress(&self, ring: &Ring, requests: u64) {
        let until = self.requests.load(Ordering::Relaxed) + requests;
        while self.requests.load(Ordering::Relaxed) < until {
            assert!(!self.threads.iter().any(JoinHandle::is_finished), "a client has failed");
            ring.sleep(Duration::from_millis(2)).await;
        }
    }

    /// Ends the load; what the disk must have where the clients worked. Tasks of the ring go on
    /// meanwhile: clients may wait for them.
    pub(crate) async fn halt(self, ring: &Ring) -> Vec<u8> {
        self.stop.store(true, Ordering::Relaxed);
        while !self.threads.iter().all(JoinHandle::is_finished) {
            ring.sleep(Duration::from_millis(1)).await;
        }
        let mut bytes = Vec::new();
        for thread in self.threads {
            for part in thread.join().expect("the clients of a thread") {
                assert_eq!(part.start, bytes.len() as u64);
                bytes.extend(part.bytes);
            }
        }
        bytes
    }
}

/// One thread: its clients at once.
fn run(
    disk: &Arc<Disk>,
    parts: Vec<Part>,
    stop: &Arc<AtomicBool>,
    requests: &Arc<AtomicU64>,
    seed: u64,
) -> Vec<Part> {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let count = parts.len();
    let (sender, receiver) = std::sync::mpsc::channel();
    for (number, part) in parts.into_iter().enumerate() {
        let (disk, stop, requests) = (Arc::clone(disk), Arc::clone(stop), Arc::clone(requests));
        let (handle, sender) = (ring.clone(), sender.clone());
        let prng = Prng::new(seed + number as u64);
        ring.spawn(async move {
            let part = client(&handle, &disk, part, &stop, &requests, prng).await;
            sender.send(part).expect("the thread waits");
        });
    }
    drop(sender);
    let mut done = Vec::new();
    runtime.block_on(async {
        while done.len() < count {
            match receiver.try_recv() {
                Ok(part) => done.push(part),
                Err(std::sync::mpsc::TryRecvError::Empty) => {
                    ring.sleep(Duration::from_millis(2)).await;
                }
                Err(error) => panic!("a client has failed: {error}"),
            }
        }
        // What a request has begun beside itself (tables that are written) ends on this ring, too:
        // an image whose write is given up cannot be handed over.
        let begun = Instant::now();
        while ring.in_flight() > 0 && begun.elapsed() < AFTER_MAX {
            ring.sleep(Duration::from_millis(2)).await;
        }
    });
    done.sort_by_key(|part| part.start);
    done
}

async fn client(
    ring: &Ring,
    disk: &Disk,
    mut part: Part,
    stop: &AtomicBool,
    requests: &AtomicU64,
    mut prng: Prng,
) -> Part {
    let size = part.bytes.len() as u64;
    let buf = IoBuf::new(usize::try_from(REQUEST_MAX).expect("small"), 4096);
    while !stop.load(Ordering::Relaxed) {
        let at = prng.below(size);
        let len = (1 + prng.below(REQUEST_MAX)).min(size - at);
        let range = usize::try_from(at).expect("small")..usize::try_from(at + len).expect("small");
        let buf = buf.slice(0..range.len());
        let offset = part.start + at;
        match prng.below(16) {
            0..7 => {
                let byte = u8::try_from(prng.below(255)).expect("byte") + 1;
                part.bytes[range.clone()].fill(byte);
                buf.copy_from_slice(0, &part.bytes[range]);
                assert_eq!(disk.write(ring, offset, &buf).await, Ok(buf.len()), "write");
            }
            7 => {
                part.bytes[range].fill(0);
                assert_eq!(disk.write_zeroes(ring, offset, Bytes(len), true).await, Ok(()), "zero");
            }
            8 => {
                part.bytes[range].fill(0);
                assert_eq!(disk.punch(ring, offset, Bytes(len)).await, Ok(()), "punch");
            }
            9 => assert_eq!(disk.flush(ring).await, Ok(()), "flush"),
            _ => {
                buf.fill(0xa5);
                assert_eq!(disk.read(ring, offset, &buf).await, Ok(buf.len()), "read");
                let differs = buf.to_vec().iter().zip(&part.bytes[range]).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{len} bytes at {offset}");
            }
        }
        requests.fetch_add(1, Ordering::Relaxed);
        ring.sleep(Duration::from_micros(prng.below(THINK_MAX_MICROS))).await;
    }
    part
}
