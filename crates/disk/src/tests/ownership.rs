//! Disks that go from one user to the next and back: two disks on the same images, whose locks
//! refuse each other.

use ringdisk_qcow2::Bytes;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use tempfile::TempDir;

use super::{buffer, directory, open, output, qemu_img, qemu_io, run};
use crate::{Cache, Disk, Errno, ErrorKind, Format, ImageOptions, NullOptions, ResizeOptions};

/// Time for a lock that a child of another test has a copy of, between its fork and its exec.
/// Also for the flushes of the other side.
const WAIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

fn incoming(options: &ImageOptions) -> ImageOptions {
    ImageOptions { inactive: true, ..options.clone() }
}

async fn write(ring: &Ring, disk: &Disk, offset: u64, len: usize, value: u8) {
    assert_eq!(disk.write(ring, offset, &buffer(&vec![value; len])).await, Ok(len));
}

async fn holds(ring: &Ring, disk: &Disk, offset: u64, len: usize, value: u8) {
    let buf = IoBuf::new(len, 4096);
    assert_eq!(disk.read(ring, offset, &buf).await, Ok(len));
    let bytes = buf.to_vec();
    let wrong = bytes.iter().position(|byte| *byte != value);
    assert_eq!(wrong.map(|at| (at, bytes[at])), None, "not {value}");
}

/// Whether QEMU may write to the image.
fn qemu_may_write(directory: &TempDir, format: &str, name: &str) -> bool {
    let out = output(directory.path(), "qemu-io", &["-f", format, "-c", "write 0 512", name]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() || said.contains("lock"), "{said}");
    out.status.success()
}

struct Case {
    name: &'static str,
    options: ImageOptions,
}

/// Images of all kinds in one directory, by the name of the top one.
fn cases(directory: &TempDir) -> Vec<Case> {
    let raw = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    qemu_img(directory, &["create", "-q", "-f", "raw", "a.raw", "4M"]);
    qemu_img(directory, &["create", "-q", "-f", "raw", "guarded.raw", "4M"]);
    qemu_img(directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    let lazy = "compat=1.1,lazy_refcounts=on,cluster_size=4k";
    qemu_img(directory, &["create", "-q", "-f", "qcow2", "-o", lazy, "lazy.qcow2", "4M"]);
    let data = "data_file=data.bin,data_file_raw=on";
    qemu_img(directory, &["create", "-q", "-f", "qcow2", "-o", data, "outside.qcow2", "4M"]);
    qemu_img(directory, &["create", "-q", "-f", "qcow2", "base.qcow2", "4M"]);
    qemu_io(directory, "qcow2", "base.qcow2", &["write -P 77 3M 64k"]);
    let over = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "over.qcow2"];
    qemu_img(directory, &over);
    let direct = ImageOptions { cache: Cache::None, ..ImageOptions::default() };
    vec![
        Case { name: "a.raw", options: raw },
        Case { name: "guarded.raw", options: ImageOptions::default() },
        Case { name: "a.qcow2", options: ImageOptions::default() },
        Case { name: "lazy.qcow2", options: direct },
        Case { name: "outside.qcow2", options: ImageOptions::default() },
        Case { name: "over.qcow2", options: ImageOptions::default() },
    ]
}

/// Not in /tmp, which may be without O_DIRECT.
fn disk_directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory")
}

#[test]
fn a_disk_moves_and_comes_back_with_all_that_was_written() {
    let directory = disk_directory();
    for Case { name, options } in cases(&directory) {
        eprintln!("{name}");
        let path = directory.path().join(name);
        run(async |ring| {
            let source = open(&ring, &path, &options).await.expect("source");
            write(&ring, &source, 0, 4096, 1).await;
            // The source writes on while the destination is there already.
            let target = open(&ring, &path, &incoming(&options)).await.expect("target");
            assert!(source.is_active() && !target.is_active());
            assert_eq!(target.size(), Bytes(4 << 20));
            write(&ring, &source, 1 << 20, 100_000, 2).await;

            source.deactivate(&ring).await.expect("deactivate");
            assert!(!source.is_active());
            target.activate(&ring, WAIT).await.expect("activate");
            assert!(target.is_active());
            holds(&ring, &target, 0, 4096, 1).await;
            holds(&ring, &target, 1 << 20, 100_000, 2).await;
            if name == "over.qcow2" {
                holds(&ring, &target, 3 << 20, 65536, 77).await;
            }
            write(&ring, &target, 0, 4096, 3).await;
            write(&ring, &target, 2 << 20, 70_000, 4).await;

            // It comes back, twice.
            for _ in 0..2 {
                target.deactivate(&ring).await.expect("deactivate");
                target.deactivate(&ring).await.expect("nothing to do");
                source.activate(&ring, WAIT).await.expect("activate");
                source.activate(&ring, WAIT).await.expect("nothing to do");
                holds(&ring, &source, 0, 4096, 3).await;
                holds(&ring, &source, 1 << 20, 100_000, 2).await;
                holds(&ring, &source, 2 << 20, 70_000, 4).await;
                source.deactivate(&ring).await.expect("deactivate");
                target.activate(&ring, WAIT).await.expect("activate");
            }
            assert_eq!(source.close(&ring).await, Ok(()));
            assert_eq!(target.close(&ring).await, Ok(()));
            drop((source, target));
        });
        if name.ends_with("qcow2") {
            qemu_img(&directory, &["check", "-q", name]);
        }
    }
}

#[test]
fn while_the_source_is_active_the_target_waits_and_says_for_whom() {
    let directory = disk_directory();
    for Case { name, options } in cases(&directory) {
        let path = directory.path().join(name);
        run(async |ring| {
            let source = open(&ring, &path, &options).await.expect("source");
            let target = open(&ring, &path, &incoming(&options)).await.expect("target");
            let start = Instant::now();
            let error = target.activate(&ring, SHORT).await.expect_err("the source has it");
            assert!(start.elapsed() >= SHORT);
            assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
            assert!(error.message().contains("waited 50ms for the lock"), "{error}");
            let own = format!("process ({}) itself", std::process::id());
            assert!(error.message().contains(&own), "{error}");
            assert!(error.message().contains(name), "{error}");
            // Nothing was taken: the source is not disturbed, nor one that comes after it.
            write(&ring, &source, 0, 4096, 1).await;
            drop(source);
            let other = open(&ring, &path, &options).await.expect("other");
            write(&ring, &other, 0, 4096, 2).await;
            other.deactivate(&ring).await.expect("deactivate");
            drop(other);
            target.activate(&ring, WAIT).await.expect("activate");
            holds(&ring, &target, 0, 4096, 2).await;
        });
    }
}

#[test]
fn a_target_that_waits_gets_the_disk_when_the_source_lets_go() {
    let directory = directory();
    let path = directory.path().join("a.qcow2");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    run(async |ring| {
        let options = ImageOptions::default();
        let source = open(&ring, &path, &options).await.expect("source");
        let target = open(&ring, &path, &incoming(&options)).await.expect("target");
        let (disk, handle) = (Arc::clone(&source), ring.clone());
        ring.spawn(async move {
            handle.sleep(SHORT).await;
            write(&handle, &disk, 12_345, 100_000, 9).await;
            disk.deactivate(&handle).await.expect("deactivate");
        });
        let start = Instant::now();
        target.activate(&ring, WAIT).await.expect("activate");
        assert!(start.elapsed() >= SHORT);
        holds(&ring, &target, 12_345, 100_000, 9).await;
    });
}

#[test]
fn of_several_locks_none_is_kept_when_one_cannot_be_had() {
    let directory = directory();
    let data = "data_file=data.bin,data_file_raw=on";
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-o", data, "outside.qcow2", "4M"]);
    let path = directory.path().join("outside.qcow2");
    run(async |ring| {
        let target = open(&ring, &path, &incoming(&ImageOptions::default())).await.expect("target");
        let raw = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let holder = open(&ring, directory.path().join("data.bin"), &raw).await.expect("holder");
        let error = target.activate(&ring, SHORT).await.expect_err("the data file is in use");
        assert_eq!(error.kind(), ErrorKind::Locked);
        drop(holder);
        assert!(qemu_may_write(&directory, "qcow2", "outside.qcow2"));
    });
}

#[test]
fn a_wait_ends_with_its_caller() {
    let directory = directory();
    let path = directory.path().join("a.raw");
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", "4M"]);
    run(async |ring| {
        let options = ImageOptions::default();
        let source = open(&ring, &path, &options).await.expect("source");
        let target = open(&ring, &path, &incoming(&options)).await.expect("target");
        assert!(ring.within(SHORT, target.activate(&ring, WAIT)).await.is_err());
        source.deactivate(&ring).await.expect("deactivate");
        ring.sleep(SHORT).await;
        assert!(!target.is_active());
        source.activate(&ring, Duration::ZERO).await.expect("nobody has it");
    });
}

#[test]
fn a_disk_that_is_not_active_serves_and_changes_nothing() {
    let directory = directory();
    let path = directory.path().join("a.qcow2");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    run(async |ring| {
        let disk = open(&ring, &path, &incoming(&ImageOptions::default())).await.expect("open");
        let buf = IoBuf::new(4096, 4096);
        assert_eq!(disk.read(&ring, 0, &buf).await, Err(Errno::BUSY));
        assert_eq!(disk.write(&ring, 0, &buf).await, Err(Errno::BUSY));
        assert_eq!(disk.flush(&ring).await, Err(Errno::BUSY));
        assert_eq!(disk.discard(&ring, 0, Bytes(4096)).await, Err(Errno::BUSY));
        assert_eq!(disk.write_zeroes(&ring, 0, Bytes(4096), true).await, Err(Errno::BUSY));
        assert_eq!(disk.block_status(&ring, 0, Bytes(4096)).await.map(|_| ()), Err(Errno::BUSY));
        assert_eq!(disk.resize(&ring, Bytes(8 << 20)).await, Err(Errno::BUSY));
        let error = disk.resize_with(&ring, Bytes(8 << 20), ResizeOptions::default()).await;
        assert_eq!(error.expect_err("not active").kind(), ErrorKind::Busy);
        assert_eq!(disk.size(), Bytes(4 << 20));
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn the_size_of_the_source_is_the_size_of_the_target() {
    let directory = directory();
    for (format, name) in [(Format::Raw, "a.raw"), (Format::Qcow2, "a.qcow2")] {
        let path = directory.path().join(name);
        qemu_img(&directory, &["create", "-q", "-f", format.name(), name, "4M"]);
        run(async |ring| {
            let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
            let source = open(&ring, &path, &options).await.expect("source");
            let target = open(&ring, &path, &incoming(&options)).await.expect("target");
            let heard = Arc::new(Mutex::new(Vec::new()));
            let list = Arc::clone(&heard);
            let _watch = target.watch_size(move |size| list.lock().expect("list").push(size));
            source.resize(&ring, Bytes(6 << 20)).await.expect("resize");
            write(&ring, &source, 5 << 20, 4096, 5).await;
            source.deactivate(&ring).await.expect("deactivate");
            target.activate(&ring, WAIT).await.expect("activate");
            assert_eq!(target.size(), Bytes(6 << 20));
            assert_eq!(*heard.lock().expect("list"), [Bytes(6 << 20)]);
            holds(&ring, &target, 5 << 20, 4096, 5).await;
            // Also when it shrinks.
            target.resize(&ring, Bytes(1 << 20)).await.expect("resize");
            target.deactivate(&ring).await.expect("deactivate");
            source.activate(&ring, WAIT).await.expect("activate");
            assert_eq!(source.size(), Bytes(1 << 20));
        });
    }
}

#[test]
fn qemu_sees_the_locks_of_whoever_has_the_disk() {
    let directory = disk_directory();
    for Case { name, options } in cases(&directory) {
        let format = if name.ends_with("qcow2") { "qcow2" } else { "raw" };
        let path = directory.path().join(name);
        run(async |ring| {
            let target = open(&ring, &path, &incoming(&options)).await.expect("target");
            // A waiting disk excludes no process: QEMU is the source.
            assert!(qemu_may_write(&directory, format, name), "{name}");
            target.activate(&ring, WAIT).await.expect("activate");
            assert!(!qemu_may_write(&directory, format, name), "{name}");
            if name == "over.qcow2" {
                assert!(!qemu_may_write(&directory, "qcow2", "base.qcow2"));
            }
            if name == "outside.qcow2" {
                assert!(!qemu_may_write(&directory, "raw", "data.bin"));
            }
            qemu_img(&directory, &["info", "-U", name]);
            target.deactivate(&ring).await.expect("deactivate");
            assert!(qemu_may_write(&directory, format, name), "{name}");
            if name == "over.qcow2" {
                // No process may write below an overlay that it may not know.
                assert!(!qemu_may_write(&directory, "qcow2", "base.qcow2"));
                drop(target);
                assert!(qemu_may_write(&directory, "qcow2", "base.qcow2"));
            }
        });
    }
}

/// A QEMU that has the image open until it is dropped.
struct Holder(std::process::Child);

impl Holder {
    fn new(directory: &Path, format: &str, name: &str) -> Holder {
        let mut command = Command::new("qemu-io");
        command.args(["-f", format, name]).current_dir(directory);
        command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
        Holder(command.spawn().expect("qemu-io"))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_source_may_be_qemu_itself() {
    let directory = directory();
    let path = directory.path().join("a.qcow2");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    qemu_io(&directory, "qcow2", "a.qcow2", &["write -P 8 1M 64k"]);
    run(async |ring| {
        let target = open(&ring, &path, &incoming(&ImageOptions::default())).await.expect("target");
        let holder = Holder::new(directory.path(), "qcow2", "a.qcow2");
        let storage = target.layers()[0].file().cloned().expect("file");
        while storage.may_lock(ringdisk_storage::Lock::Auto) {
            ring.sleep(SHORT).await;
        }
        let error = target.activate(&ring, SHORT).await.expect_err("QEMU has it");
        let pid = format!("process {} (qemu-io)", holder.0.id());
        assert!(error.message().contains(&pid), "{error}");
        drop(holder);
        target.activate(&ring, WAIT).await.expect("activate");
        holds(&ring, &target, 1 << 20, 65536, 8).await;
    });
}

#[test]
fn the_source_sees_that_a_target_waits() {
    let directory = disk_directory();
    for Case { name, options } in cases(&directory) {
        let path = directory.path().join(name);
        run(async |ring| {
            let source = open(&ring, &path, &options).await.expect("source");
            let target = open(&ring, &path, &incoming(&options)).await.expect("target");
            assert!(!source.is_wanted(), "{name}: it is there and does not wait");
            let gives = async {
                while !source.is_wanted() {
                    ring.sleep(SHORT / 10).await;
                }
                assert!(!target.is_wanted(), "{name}: its own wait");
                source.deactivate(&ring).await.expect("deactivate");
            };
            let (activated, ()) = join(target.activate(&ring, WAIT), gives).await;
            activated.expect("activate");
            assert!(target.is_active() && !target.is_wanted() && !source.is_wanted(), "{name}");
            target.deactivate(&ring).await.expect("deactivate");
            source.activate(&ring, WAIT).await.expect("activate");
            target.activate(&ring, SHORT).await.expect_err("the source has it");
            assert!(!source.is_wanted(), "{name}: it has given up");
        });
    }
}

#[test]
fn a_chain_that_has_changed_is_not_believed() {
    let directory = directory();
    for name in ["base.qcow2", "other.qcow2"] {
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", name, "4M"]);
    }
    qemu_img(
        &directory,
        &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "a.qcow2"],
    );
    let path = directory.path().join("a.qcow2");
    run(async |ring| {
        let target = open(&ring, &path, &incoming(&ImageOptions::default())).await.expect("target");
        let rebase = |name| {
            qemu_img(&directory, &["rebase", "-u", "-b", name, "-F", "qcow2", "a.qcow2"]);
        };
        rebase("other.qcow2");
        let error = target.activate(&ring, WAIT).await.expect_err("another chain");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.message().contains("names 'other.qcow2' now"), "{error}");
        assert!(!target.is_active());
        // Nothing is kept from others after that, and it may be tried again.
        rebase("base.qcow2");
        target.activate(&ring, WAIT).await.expect("activate");
    });
}

#[test]
fn a_disk_that_cannot_be_flushed_stays_where_it_is() {
    run(async |ring| {
        let sim = SimStorage::new(1 << 20, 1);
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        write(&ring, &disk, 0, 4096, 1).await;
        sim.on(When::kind(OpKind::Flush).once(), Fault::Fail(Errno::IO));
        let error = disk.deactivate(&ring).await.expect_err("the flush fails");
        assert_eq!(error.errno(), Some(Errno::IO));
        assert!(disk.is_active());
        holds(&ring, &disk, 0, 4096, 1).await;
        disk.deactivate(&ring).await.expect("deactivate");
        disk.activate(&ring, Duration::ZERO).await.expect("activate");
        holds(&ring, &disk, 0, 4096, 1).await;
    });
}

#[test]
fn the_source_waits_for_requests_in_flight() {
    run(async |ring| {
        let sim = SimStorage::new(1 << 20, 1);
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        sim.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let (other, handle) = (Arc::clone(&disk), ring.clone());
        ring.spawn(async move { write(&handle, &other, 0, 512, 1).await });
        while sim.held().is_empty() {
            ring.yield_now().await;
        }
        let mut deactivate = Box::pin(disk.deactivate(&ring));
        assert!(ring.within(SHORT, &mut deactivate).await.is_err());
        assert!(disk.is_active());
        sim.release_all();
        deactivate.await.expect("deactivate");
        assert!(!disk.is_active());
    });
}

/// It comes back while the hand-over that failed is still waiting: no request finds it gone.
#[test]
fn requests_wait_for_a_disk_that_comes_back_after_a_slow_hand_over() {
    let directory = directory();
    let Case { name, options } = cases(&directory).remove(0);
    run(async |ring| {
        let disk = open(&ring, directory.path().join(name), &options).await.expect("open");
        let slow = disk.enter().await;
        let mut handed = Box::pin(disk.hand_over(&ring));
        assert!(ring.within(SHORT, &mut handed).await.is_err());
        let mut resumed = Box::pin(disk.resume(&ring));
        assert!(ring.within(SHORT, &mut resumed).await.is_err());
        let requests = (0..4).map(|at| {
            let (disk, ring) = (&disk, &ring);
            async move { write(ring, disk, at * 4096, 4096, 7).await }
        });
        let mut requests = Box::pin(join_all(requests.collect::<Vec<_>>()));
        assert!(ring.within(SHORT, &mut requests).await.is_err());
        drop(slow);
        requests.await;
        drop(handed.await.expect("it was handed over"));
        resumed.await.expect("it is back");
        holds(&ring, &disk, 0, 16384, 7).await;
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_null_disk_and_a_reader_move_too() {
    run(async |ring| {
        let disk = Disk::null(&NullOptions { size: Bytes(4096), ..NullOptions::default() });
        disk.deactivate(&ring).await.expect("deactivate");
        assert!(!disk.is_active());
        disk.activate(&ring, Duration::ZERO).await.expect("activate");
        write(&ring, &disk, 0, 4096, 1).await;
    });
    let directory = directory();
    let path: PathBuf = directory.path().join("a.qcow2");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    run(async |ring| {
        let options = ImageOptions { read_only: true, ..ImageOptions::default() };
        let one = open(&ring, &path, &options).await.expect("one");
        let two = open(&ring, &path, &incoming(&options)).await.expect("two");
        // Readers share.
        two.activate(&ring, WAIT).await.expect("activate");
        assert!(!qemu_may_write(&directory, "qcow2", "a.qcow2"));
        one.deactivate(&ring).await.expect("deactivate");
        two.deactivate(&ring).await.expect("deactivate");
        assert!(qemu_may_write(&directory, "qcow2", "a.qcow2"));
    });
}

#[test]
fn a_temporary_overlay_does_not_move() {
    let directory = directory();
    let path = directory.path().join("a.raw");
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", "4M"]);
    run(async |ring| {
        let options = ImageOptions { temporary: true, ..ImageOptions::default() };
        let error = open(&ring, &path, &incoming(&options)).await.expect_err("incoming");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let disk = open(&ring, &path, &options).await.expect("open");
        let error = disk.deactivate(&ring).await.expect_err("deactivate");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        write(&ring, &disk, 0, 512, 1).await;
    });
}

#[test]
fn an_open_waits_for_the_locks_of_one_that_ends() {
    let directory = disk_directory();
    for Case { name, options } in cases(&directory) {
        let path = directory.path().join(name);
        run(async |ring| {
            let old = open(&ring, &path, &options).await.expect("old");
            let source = || crate::Source::Path(path.clone());
            let short = ImageOptions { wait_for_locks: Some(SHORT), ..options.clone() };
            let error = Disk::open(&ring, source(), &short).await.expect_err("locked");
            assert_eq!(error.kind(), ErrorKind::Locked);
            assert!(error.message().contains("waited 50ms"), "{error}");
            assert!(error.message().contains("itself"), "{error}");
            let handle = ring.clone();
            ring.spawn(async move {
                handle.sleep(SHORT).await;
                write(&handle, &old, 1 << 20, 70_000, 6).await;
                old.close(&handle).await.expect("close");
            });
            let long = ImageOptions { wait_for_locks: Some(WAIT), ..options.clone() };
            let new = Disk::open(&ring, source(), &long).await.expect("open");
            holds(&ring, &new, 1 << 20, 70_000, 6).await;
            let none = Disk::open(&ring, source(), &options).await;
            assert_eq!(none.expect_err("it is locked").kind(), ErrorKind::Locked);
        });
    }
}
