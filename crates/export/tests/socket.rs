//! The example export (`examples/socket.rs`) serves a qcow2 image: it answers, is taken over under
//! load, and stops under load.

#[allow(dead_code, unreachable_pub)]
#[path = "../examples/socket.rs"]
mod socket;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, Format, ImageOptions, Source};
use ringdisk_export::{ThreadOptions, Threads};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images::{assert_clean, pattern, piece, qcow2, reference};
use ringdisk_testkit::process::until;
use socket::{CLIENTS_MAX, Export};

const CLIENTS: u64 = 4;
const BLOCK: usize = 8192;
/// Blocks of each client.
const BLOCKS: u64 = 64;
const SIZE: u64 = CLIENTS * BLOCKS * BLOCK as u64;

/// An image and a socket for it.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { directory: tempfile::tempdir().expect("a directory") };
        qcow2(&place.image(), &SIZE.to_string(), "cluster_size=64k");
        place
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("disk.qcow2")
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn serve(&self) -> Export {
        let listener = UnixListener::bind(self.socket()).expect("a socket").into();
        let (mut runtime, source) = (runtime(), Source::Path(self.image()));
        let ring = runtime.ring().clone();
        let disk = runtime.block_on(Disk::open(&ring, source, &options())).expect("the image");
        Export::start(disk, (listener, Vec::new()), &two_threads()).expect("an export")
    }
}

fn runtime() -> Runtime {
    Runtime::new(Config::default()).expect("a ring")
}

fn options() -> ImageOptions {
    ImageOptions { format: Some(Format::Qcow2), ..ImageOptions::default() }
}

fn two_threads() -> ThreadOptions {
    ThreadOptions { threads: Threads::Count(2), ..ThreadOptions::default() }
}

/// Another thread goes on with an export, as another process would.
fn succeed(export: Export) -> Export {
    let (disk, sockets) = export.hand_over().expect("handed over");
    let successor = spawn(move || {
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        let disk = runtime.block_on(Disk::open_handed(&ring, disk, &options())).expect("the disk");
        disk.take_charge();
        Export::start(disk, sockets, &two_threads()).expect("an export")
    });
    successor.join().expect("no panic")
}

/// Asks for something. Gives the errno and the data of the reply.
fn ask(
    stream: &mut UnixStream,
    what: u8,
    offset: u64,
    len: usize,
    data: &[u8],
) -> io::Result<(i32, Vec<u8>)> {
    let mut request = vec![what, 0, 0, 0];
    request.extend(u32::try_from(len).expect("a length").to_le_bytes());
    request.extend(offset.to_le_bytes());
    request.extend(data);
    stream.write_all(&request)?;
    let mut head = [0; 8];
    stream.read_exact(&mut head)?;
    let [errno, len] = [0, 4].map(|at| u32::from_le_bytes(head[at..at + 4].try_into().expect("4")));
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((errno.cast_signed(), data))
}

/// A client that writes and reads until its connection ends.
struct Client {
    requests: Arc<AtomicU64>,
    /// Gives the seed of the pattern that each block holds: of writes that were answered. A write
    /// that was not may have been done all the same, so its block is left out.
    thread: JoinHandle<BTreeMap<u64, u64>>,
}

fn client(number: u64, socket: &Path) -> Client {
    let mut stream = UnixStream::connect(socket).expect("connected");
    let requests = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&requests);
    let thread = spawn(move || {
        let mut written = BTreeMap::new();
        for seed in 1.. {
            let offset = (number * BLOCKS + seed * 7 % BLOCKS) * BLOCK as u64;
            written.remove(&offset);
            let data = pattern(seed, offset, BLOCK);
            match ask(&mut stream, b'W', offset, BLOCK, &data) {
                Ok((errno, _)) => assert_eq!(errno, 0, "write {seed} of client {number}"),
                Err(_) => break,
            }
            written.insert(offset, seed);
            match ask(&mut stream, b'R', offset, BLOCK, &[]) {
                Ok(read) => assert!(read == (0, data), "read {seed} of client {number}"),
                Err(_) => break,
            }
            count.fetch_add(2, Ordering::Relaxed);
        }
        written
    });
    Client { requests, thread }
}

fn progress(clients: &[Client], requests: u64) {
    let before: Vec<u64> =
        clients.iter().map(|client| client.requests.load(Ordering::Relaxed)).collect();
    let goes_on = |(client, before): (&Client, &u64)| {
        client.requests.load(Ordering::Relaxed) >= before + requests
    };
    let all = || clients.iter().zip(&before).all(goes_on).then_some(());
    assert!(until(Duration::from_secs(60), all).is_some(), "a client does not go on");
}

#[test]
fn a_client_reads_writes_flushes_and_learns_the_size() {
    let place = Place::new();
    let export = place.serve();
    let mut stream = UnixStream::connect(place.socket()).expect("connected");
    let size = ask(&mut stream, b'S', 0, 8, &[]).expect("a reply");
    assert_eq!(size, (0, SIZE.to_le_bytes().to_vec()));
    let data = pattern(1, 0, 5000);
    assert_eq!(ask(&mut stream, b'W', 777, 5000, &data).expect("a reply"), (0, Vec::new()));
    assert_eq!(ask(&mut stream, b'F', 0, 0, &[]).expect("a reply"), (0, Vec::new()));
    assert_eq!(ask(&mut stream, b'R', 777, 5000, &[]).expect("a reply"), (0, data));
    let past = ask(&mut stream, b'W', SIZE - 1, 2, &[1, 2]).expect("a reply");
    assert_eq!(past, (rustix::io::Errno::NOSPC.raw_os_error(), Vec::new()));
    assert_eq!(ask(&mut stream, b'X', 0, 0, &[]).expect("a reply").0, 22, "EINVAL");
    ask(&mut stream, b'R', 0, usize::MAX >> 33, &[]).expect_err("too long: the end of it");
    let total = export.stop().expect("a clean end").total();
    assert_eq!((total.requests, total.errors), (7, 2));
}

#[test]
fn clients_past_the_limit_wait_until_others_have_left() {
    let place = Place::new();
    let export = place.serve();
    let connect = |_| UnixStream::connect(place.socket()).expect("connected");
    let mut served: Vec<_> = (0..2 * CLIENTS_MAX).map(connect).collect();
    for stream in &mut served {
        assert_eq!(ask(stream, b'F', 0, 0, &[]).expect("a reply"), (0, Vec::new()));
    }
    let mut waits = connect(0);
    waits.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
    ask(&mut waits, b'F', 0, 0, &[]).expect_err("no thread takes it");
    served.truncate(CLIENTS_MAX);
    waits.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    // The request is there; its reply has 8 bytes.
    waits.read_exact(&mut [0; 8]).expect("it is served");
    export.stop().expect("a clean end");
}

#[test]
fn clients_see_nothing_of_a_successor_and_what_was_answered_survives_the_stop() {
    let place = Place::new();
    let mut export = place.serve();
    let clients: Vec<Client> = (0..CLIENTS).map(|n| client(n, &place.socket())).collect();
    progress(&clients, 50);
    for _ in 0..3 {
        export = succeed(export);
        progress(&clients, 50);
    }
    let begun = Instant::now();
    export.stop().expect("a clean end");
    assert!(begun.elapsed() < Duration::from_secs(20));
    let written: Vec<_> =
        clients.into_iter().map(|client| client.thread.join().expect("no error")).collect();
    assert_clean(&place.image());
    let raw = reference(&place.image(), "qcow2");
    for (offset, seed) in written.into_iter().flatten() {
        let is = piece(&raw, offset, BLOCK);
        assert!(is == pattern(seed, offset, BLOCK), "block {offset} does not hold write {seed}");
    }
}
