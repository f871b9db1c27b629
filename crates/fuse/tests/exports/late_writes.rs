//! The lock of a process that was killed: it is free only when the kernel has done the last write
//! of that process, since lock and I/O share one open file description. The device is a file of
//! this test, which keeps a write back for as long as it likes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringdisk_disk::{Disk, ImageOptions};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions, Transport};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_storage::{ErrorKind, Lock, OpenOptions, Storage};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::until;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

/// Says that this program is the process that is to be killed, and whether it uses O_DIRECT.
const MODE: &str = "RINGDISK_LATE_MODE";
const DEVICE: &str = "RINGDISK_LATE_DEVICE";
const LIMIT: Duration = Duration::from_secs(10);
const AT: u64 = 64 << 10;
const BLOCK: usize = 4096;
/// Length of the device in whole blocks, and what is behind.
const LEN: u64 = 1 << 20;
const TAIL: usize = 100;

fn block_on<F: Future>(test: impl FnOnce(Ring) -> F) -> F::Output {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring))
}

/// The process that is killed in the middle of a write.
#[test]
#[ignore = "run by the others: becomes a process of theirs"]
fn role() {
    let mode = std::env::var(MODE).expect("a mode, from the test that starts it");
    let path = PathBuf::from(std::env::var_os(DEVICE).expect("a device"));
    let options = OpenOptions { direct: mode != "buffered", ..OpenOptions::default() };
    let storage = Storage::open(&path, &options).expect("open");
    block_on(async |ring| {
        // The bytes behind the last whole block go another way with O_DIRECT.
        let (at, len) = if mode == "tail" { (LEN, TAIL) } else { (AT, BLOCK) };
        let buf = IoBuf::new(len, BLOCK);
        buf.fill(1);
        storage.write(&ring, at, &buf).await.expect("write");
        // Data in the page cache lands when a process or the kernel writes it back: such a
        // disk needs its flush.
        storage.flush(&ring).await.expect("flush");
    });
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn may_lock(path: &Path) -> bool {
    let unlocked = OpenOptions { lock: Lock::None, ..OpenOptions::default() };
    Storage::open(path, &unlocked).expect("open").may_lock(Lock::Auto)
}

fn late_write(mode: &str) {
    let (at, len) = if mode == "tail" { (LEN, TAIL) } else { (AT, BLOCK) };
    let sim = SimStorage::new(LEN + TAIL as u64, 1);
    let directory = scratch();
    let path = directory.path().join("device");
    std::fs::write(&path, "").expect("a mountpoint");
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let options = ExportOptions {
        common: CommonOptions::with_threads(1),
        transport: Transport::Dev,
        ..ExportOptions::new(path.clone())
    };
    let export = Export::start(disk, options).expect("an export");
    let held = || sim.held().first().map(|op| op.number);

    sim.on(When::kind(OpKind::Write).at(at..at + 1).once(), Fault::Hold);
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "late_writes::role", "--ignored"]).env(MODE, mode).env(DEVICE, &path);
    let mut child = Killed(command.stdout(Stdio::null()).spawn().expect("a child"));
    until(LIMIT, held).expect("the write is with the device");
    assert!(!may_lock(&path), "{mode}");

    child.0.kill().expect("kill");
    // However long the device takes.
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(10));
        assert!(!may_lock(&path), "{mode}: the lock is free while the write may still land");
        assert!(held().is_some(), "{mode}: the write is still with the device");
    }
    let refused = Storage::open(&path, &OpenOptions::default()).expect_err("it is locked");
    assert_eq!(refused.kind(), ErrorKind::Locked, "{refused}");

    let write = held().expect("the write");
    assert!(sim.release(write));
    until(LIMIT, || may_lock(&path).then_some(())).expect("the lock is free now");
    // And nothing comes after that.
    let mut bytes = vec![0; len];
    sim.peek(at, &mut bytes);
    assert_eq!(bytes, vec![1; len], "{mode}");
    let count = sim.count(OpKind::Write);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(sim.count(OpKind::Write), count);

    drop(child);
    sim.release_all();
    export.stop_handle().stop();
    export.wait().expect("the export ends");
}

#[test]
fn the_lock_of_a_killed_process_outlives_its_direct_write() {
    late_write("direct");
}

#[test]
fn the_lock_of_a_killed_process_outlives_its_buffered_write() {
    late_write("buffered");
}

#[test]
fn the_lock_of_a_killed_process_outlives_its_write_behind_the_last_block() {
    late_write("tail");
}

/// The same with a whole disk: the open of the new process waits, and sees what the dead one wrote.
#[test]
fn an_open_that_waits_comes_after_the_last_write_of_the_dead() {
    let sim = SimStorage::new(1 << 20, 1);
    let directory = scratch();
    let path = directory.path().join("device");
    std::fs::write(&path, "").expect("a mountpoint");
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let options = ExportOptions {
        common: CommonOptions::with_threads(1),
        transport: Transport::Dev,
        ..ExportOptions::new(path.clone())
    };
    let export = Export::start(disk, options).expect("an export");
    sim.on(When::kind(OpKind::Write).at(AT..AT + 1).once(), Fault::Hold);
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", "late_writes::role", "--ignored"])
        .env(MODE, "direct")
        .env(DEVICE, &path);
    let mut child = Killed(command.stdout(Stdio::null()).spawn().expect("a child"));
    until(LIMIT, || (!sim.held().is_empty()).then_some(())).expect("the write is with the device");
    child.0.kill().expect("kill");
    block_on(async |ring| {
        let options = |wait| ImageOptions {
            format: Some(ringdisk_disk::Format::Raw),
            cache: ringdisk_disk::Cache::None,
            wait_for_locks: Some(wait),
            ..ImageOptions::default()
        };
        let source = || ringdisk_disk::Source::Path(path.clone());
        let short = Disk::open(&ring, source(), &options(Duration::from_millis(100))).await;
        assert_eq!(short.expect_err("locked").kind(), ringdisk_disk::ErrorKind::Locked);
        let (handle, late) = (ring.clone(), sim.clone());
        ring.spawn(async move {
            handle.sleep(Duration::from_millis(200)).await;
            late.release_all();
        });
        let disk = Disk::open(&ring, source(), &options(LIMIT)).await.expect("open");
        let buf = IoBuf::new(BLOCK, BLOCK);
        assert_eq!(disk.read(&ring, AT, &buf).await, Ok(BLOCK));
        assert_eq!(buf.to_vec(), [1; BLOCK]);
    });
    drop(child);
    export.stop_handle().stop();
    export.wait().expect("the export ends");
}
