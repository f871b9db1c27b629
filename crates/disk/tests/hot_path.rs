//! A request whose mapping is cached allocates nothing: counted by the allocator of this program.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{
    Bytes, Cache, CheckpointEnd, CheckpointOptions, Disk, Format, ImageOptions, NullOptions, Source,
};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime, Scatter};
use ringdisk_storage::{OpenOptions, Storage};
use ringdisk_testkit::allocations::{Counting, of_this_thread};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests that are counted, after as many that warm up.
const REQUESTS: u64 = 200;

/// Allocations of `REQUESTS` reads, and writes where the disk can be written.
async fn allocations(ring: &Ring, disk: &Disk, len: usize) -> u64 {
    let buf = IoBuf::new(len, 4096);
    let mut before = 0;
    for request in 0..2 * REQUESTS {
        if request == REQUESTS {
            before = of_this_thread();
        }
        let offset = request * 7919 * 512 % (disk.size() - Bytes::of(len)).0;
        assert_eq!(disk.read(ring, offset, &buf).await, Ok(len));
        if !disk.is_read_only() {
            assert_eq!(disk.write(ring, offset, &buf).await, Ok(len));
        }
    }
    of_this_thread() - before
}

/// As [`allocations`], of requests whose data lies in pieces, which are others each time.
async fn allocations_in_pieces(ring: &Ring, disk: &Disk, pieces: usize, bytes: usize) -> u64 {
    let regions = [IoBuf::new(2 * pieces * bytes, 4096), IoBuf::new(2 * pieces * bytes, 4096)];
    let len = pieces * bytes;
    let mut scatter = Scatter::new();
    let mut before = 0;
    for request in 0..2 * REQUESTS {
        if request == REQUESTS {
            before = of_this_thread();
        }
        let offset = request * 7919 * 4096 % (disk.size() - Bytes::of(len)).0;
        let first = usize::from(request % 3 == 0);
        // Backwards, so that none goes on where the one before ends.
        let buf = scatter.fill((0..pieces).rev().map(|piece| {
            let start = (2 * piece + first) * bytes;
            regions[piece % 2].slice(start..start + bytes)
        }));
        assert!(buf.is_scattered() && buf.len() == len);
        assert_eq!(disk.read(ring, offset, &buf).await, Ok(len));
        if !disk.is_read_only() {
            assert_eq!(disk.write(ring, offset, &buf).await, Ok(len));
        }
        drop(buf);
        scatter.clear();
    }
    of_this_thread() - before
}

fn qemu(directory: &std::path::Path, program: &str, arguments: &[&str]) {
    let status = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .stdout(std::process::Stdio::null())
        .status()
        .expect("qemu-utils is needed by this test");
    assert!(status.success());
}

#[test]
fn cached_requests_allocate_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    std::fs::write(path.join("a.raw"), vec![1; 8 << 20]).expect("write");
    let create = ["create", "-q", "-f", "qcow2", "-b", "a.raw", "-F", "raw", "a.qcow2"];
    qemu(path, "qemu-img", &create);
    // Data in the overlay, then a hole of it, again and again: requests have several runs.
    for at in 0..16 {
        let command = format!("write {}k 128k", at * 384);
        qemu(path, "qemu-io", &["-f", "qcow2", "-c", &command, "a.qcow2"]);
    }
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let null = Disk::null(&NullOptions {
            size: Bytes(1 << 30),
            read_zeroes: true,
            latency: Duration::ZERO,
        });
        assert_eq!(allocations(&ring, &null, 4096).await, 0, "null");
        let source = Source::Path(path.join("a.qcow2"));
        let options = ImageOptions { read_only: true, ..ImageOptions::default() };
        let qcow2 = Disk::open(&ring, source, &options).await.expect("open");
        assert_eq!(allocations(&ring, &qcow2, 4096).await, 0, "qcow2");
        assert_eq!(allocations(&ring, &qcow2, 1 << 20).await, 0, "qcow2, several runs");
        drop(qcow2);
        let source = Source::Path(path.join("a.raw"));
        let options =
            ImageOptions { format: Some(ringdisk_disk::Format::Raw), ..ImageOptions::default() };
        let raw = Disk::open(&ring, source, &options).await.expect("open");
        assert_eq!(allocations(&ring, &raw, 4096).await, 0, "raw");
    });
}

#[test]
fn requests_of_a_writable_image_allocate_nothing_once_its_clusters_are_there() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    qemu(path, "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]);
    qemu(path, "qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 8M", "a.qcow2"]);
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let source = Source::Path(path.join("a.qcow2"));
        let disk = Disk::open(&ring, source, &ImageOptions::default()).await.expect("open");
        assert_eq!(allocations(&ring, &disk, 4096).await, 0, "one run");
        assert_eq!(allocations(&ring, &disk, 1 << 20).await, 0, "a large request");
        // After a change of the disk as before it.
        disk.resize(&ring, Bytes(16 << 20)).await.expect("resize");
        disk.write(&ring, 0, &IoBuf::new(16 << 20, 4096)).await.expect("write");
        disk.flush(&ring).await.expect("flush");
        assert_eq!(allocations(&ring, &disk, 4096).await, 0, "after a change");
        disk.close(&ring).await.expect("close");
    });
    qemu(path, "qemu-img", &["check", "-q", "-f", "qcow2", "a.qcow2"]);
}

#[test]
fn requests_in_pieces_allocate_nothing() {
    // Not in /tmp, which may be without O_DIRECT.
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
    let path = directory.path();
    std::fs::write(path.join("a.raw"), vec![1; 8 << 20]).expect("write");
    qemu(path, "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]);
    qemu(path, "qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 8M", "a.qcow2"]);
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let null = Disk::null(&NullOptions {
            size: Bytes(1 << 30),
            read_zeroes: true,
            latency: Duration::ZERO,
        });
        assert_eq!(allocations_in_pieces(&ring, &null, 8, 4096).await, 0, "null");
        for (name, format) in [("a.raw", Format::Raw), ("a.qcow2", Format::Qcow2)] {
            for cache in [Cache::Writeback, Cache::None] {
                let source = Source::Path(path.join(name));
                let options =
                    ImageOptions { format: Some(format), cache, ..ImageOptions::default() };
                let disk = Disk::open(&ring, source, &options).await.expect("open");
                for (pieces, bytes) in [(2, 4096), (32, 4096), (126, 8192), (7, 12288)] {
                    let count = allocations_in_pieces(&ring, &disk, pieces, bytes).await;
                    assert_eq!(count, 0, "{name}, {cache:?}, {pieces} pieces of {bytes} bytes");
                }
                disk.close(&ring).await.expect("close");
            }
        }
    });
}

#[test]
fn a_request_is_small_in_memory() {
    // Every entry of an export holds one request; 1024 of them must stay within 8 MiB.
    const REQUEST_MAX: usize = 8 << 10;
    let runtime = Runtime::new(Config::default()).expect("io_uring");
    let disk = Disk::null(&NullOptions::default());
    let buf = IoBuf::new(512, 512);
    let zeroes = size_of_val(&disk.write_zeroes(runtime.ring(), 0, Bytes(512), true));
    let read = size_of_val(&disk.read(runtime.ring(), 0, &buf));
    let write = size_of_val(&disk.write(runtime.ring(), 0, &buf));
    let sizes = format!("read: {read} bytes, write: {write} bytes, zeroes: {zeroes} bytes");
    println!("{sizes}");
    assert!(read.max(write).max(zeroes) <= REQUEST_MAX, "{sizes}");
}

#[test]
fn requests_beside_a_checkpoint_allocate_only_to_copy() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    qemu(path, "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]);
    qemu(path, "qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 8M", "a.qcow2"]);
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let source = Source::Path(path.join("a.qcow2"));
        let disk = Disk::open(&ring, source, &ImageOptions::default()).await.expect("open");
        let file = tempfile::tempfile().expect("a file");
        let file = Storage::from_fd(file.into(), "fleecing file", &OpenOptions::default());
        let options = CheckpointOptions::new(Arc::new(file.expect("a storage")), Bytes(1 << 30));
        let prepared = disk.prepare_checkpoint(&ring, options).await.expect("prepared");
        let mut held = disk.hold(&ring, Duration::from_secs(10)).await.expect("held");
        let checkpoint = held.freeze(&prepared).expect("frozen");
        drop(held);
        let buf = IoBuf::new(64 << 10, 4096);
        let before = of_this_thread();
        for at in (0..8u64 << 20).step_by(64 << 10) {
            assert_eq!(disk.write(&ring, at, &buf).await, Ok(64 << 10));
        }
        let copies = of_this_thread() - before;
        assert!(copies <= 128 * 32, "{copies} allocations for 128 copies");
        assert_eq!(checkpoint.fleeced_bytes(), Bytes(8 << 20));
        // Everything is kept, and soon all of it in the file.
        ring.sleep(Duration::from_millis(100)).await;
        assert_eq!(allocations(&ring, &disk, 4096).await, 0, "one run");
        assert_eq!(allocations(&ring, &disk, 1 << 20).await, 0, "a large request");
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        assert_eq!(allocations(&ring, &disk, 4096).await, 0, "afterwards");
        disk.close(&ring).await.expect("close");
    });
}
