//! Exports that lose their transport or their storage: clients get errors soon, the process and its
//! other exports go on.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::{Bytes, Disk, ImageOptions, NullOptions};
use ringdisk_fuse::mount::{Abort, Unmount, table, unmount};
use ringdisk_fuse::testing;
use ringdisk_fuse::{CommonOptions, Export, ExportOptions, HaltReason, Transport};
use ringdisk_ring::{Config, Errno, Runtime};
use ringdisk_testkit::process::{Process, command, patient, run, until};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Everything must be over by then.
const SOON: Duration = Duration::from_secs(20);

fn null() -> Arc<Disk> {
    Disk::null(&NullOptions { size: Bytes(1 << 20), read_zeroes: true, ..NullOptions::default() })
}

struct Place {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

fn place() -> Place {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, b"").unwrap();
    Place { path: path.canonicalize().unwrap(), _directory: directory }
}

fn options(place: &Place) -> ExportOptions {
    ExportOptions { common: CommonOptions::with_threads(2), ..ExportOptions::new(&place.path) }
}

fn is_mounted(place: &Place) -> bool {
    table::at(&place.path).unwrap().is_some()
}

/// Reads the first 4 KiB with a process of its own, which a test can lose.
fn reader(place: &Place) -> Process {
    let file = format!("if={}", place.path.display());
    Process::spawn(&mut command(&["dd", &file, "of=/dev/null", "bs=4k", "count=1", "iflag=direct"]))
}

fn assert_serves(place: &Place) {
    let file = format!("if={}", place.path.display());
    let finished = run(command(&["dd", &file, "of=/dev/null", "bs=4k", "count=1", "iflag=direct"]));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

/// A descriptor from which `frame` is read as if it came from the kernel, and the other end, which
/// keeps it open.
fn injected(frame: &[u8]) -> (OwnedFd, OwnedFd) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
            .unwrap();
    // An empty message would be a frame too.
    if !frame.is_empty() {
        rustix::io::write(&ours, frame).unwrap();
    }
    (ours, theirs)
}

/// Starts one export with a broken device beside a healthy one; returns why the first halted.
fn halt_beside_a_healthy_export(device: OwnedFd) -> HaltReason {
    let (broken_place, healthy_place) = (place(), place());
    let healthy = Export::start(null(), options(&healthy_place)).unwrap();
    let start = Instant::now();
    let broken = testing::start_with_devices(null(), options(&broken_place), vec![device]).unwrap();
    let reason = broken.wait().unwrap_err();
    assert!(start.elapsed() < patient(SOON));
    assert!(!is_mounted(&broken_place), "the mount of the halted export is gone");
    assert_serves(&healthy_place);
    healthy.stop_handle().stop();
    assert!(healthy.wait().is_ok());
    assert!(!is_mounted(&healthy_place));
    reason
}

#[test]
fn a_frame_shorter_than_a_header_halts_the_export_and_no_other() {
    let (_ours, theirs) = injected(&[1, 2, 3]);
    assert!(matches!(halt_beside_a_healthy_export(theirs), HaltReason::Protocol(..)));
}

#[test]
fn a_frame_whose_length_is_not_that_of_its_header_halts_the_export() {
    let mut frame = [0u8; 56];
    frame[0] = 200;
    let (_ours, theirs) = injected(&frame);
    assert!(matches!(halt_beside_a_healthy_export(theirs), HaltReason::Protocol(..)));
}

#[test]
fn a_device_that_cannot_be_read_halts_the_export() {
    let directory = std::fs::File::open("/").unwrap();
    let reason = halt_beside_a_healthy_export(directory.into());
    assert_eq!(reason, HaltReason::Device("the FUSE device", Errno::ISDIR));
}

#[test]
fn a_halt_ends_requests_in_flight_with_an_error() {
    let sim = SimStorage::new(1 << 20, 1);
    sim.on(When::kind(OpKind::Read), Fault::Hang);
    let place = place();
    let (ours, theirs) = injected(&[]);
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let export = testing::start_with_devices(disk, options(&place), vec![theirs]).unwrap();
    let mut client = reader(&place);
    until(SOON, || (sim.hanging() > 0).then_some(())).expect("the read arrives");
    rustix::io::write(&ours, b"rubbish").unwrap();
    assert!(export.wait().is_err());
    let status = client.wait(SOON).expect("the client is not left hanging");
    assert!(!status.success());
}

/// An export whose storage never answers the read that a client has sent.
fn stuck(io_timeout: Option<Duration>) -> (Place, Export, Process) {
    let sim = SimStorage::new(1 << 20, 1);
    sim.on(When::kind(OpKind::Read), Fault::Hang);
    let place = place();
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let export = Export::start(disk, ExportOptions { io_timeout, ..options(&place) }).unwrap();
    let client = reader(&place);
    until(SOON, || (sim.hanging() > 0).then_some(())).expect("the read arrives");
    (place, export, client)
}

fn assert_over(place: &Place, mut client: Process, start: Instant) {
    let status = client.wait(SOON).expect("the client is not left hanging");
    assert!(!status.success());
    assert!(start.elapsed() < patient(SOON), "{:?}", start.elapsed());
    assert!(!is_mounted(place));
}

#[test]
fn a_forced_stop_ends_a_storage_operation_that_never_completes() {
    let (place, export, mut client) = stuck(None);
    let (say, said) = std::sync::mpsc::channel();
    export.watch_users(move |open_files| say.send(open_files).unwrap());
    export.stop_handle().stop();
    assert_eq!(said.recv_timeout(SOON), Ok(1), "a client waits: it is told of");
    assert_eq!(until(SOON, || (!is_mounted(&place)).then_some(())), Some(()));
    assert_eq!(client.ended(), None, "and it is not cut off");
    let start = Instant::now();
    export.stop_handle().force();
    assert_eq!(export.wait().unwrap_err(), HaltReason::StillInFlight(1));
    assert_over(&place, client, start);
}

#[test]
fn a_forced_unmount_ends_a_storage_operation_that_never_completes() {
    let (place, export, client) = stuck(None);
    let start = Instant::now();
    unmount(&place.path, Unmount::Force).unwrap();
    let _ = export.wait();
    assert_over(&place, client, start);
}

#[test]
fn the_io_timeout_ends_a_storage_operation_that_never_completes() {
    // Long enough to see the read hang.
    let limit = Duration::from_secs(1);
    let (place, export, client) = stuck(Some(limit));
    let start = Instant::now();
    assert_eq!(export.wait().unwrap_err(), HaltReason::Timeout(limit));
    assert_over(&place, client, start);
}

#[test]
fn the_io_timeout_does_not_count_while_requests_wait_for_a_change_of_the_disk() {
    use std::os::unix::fs::FileExt;
    let limit = Duration::from_millis(500);
    let sim = SimStorage::new(1 << 20, 1);
    let slow = 4 * limit;
    sim.on(When::kind(OpKind::Flush).once(), Fault::DelayBetween(slow, slow));
    let place = place();
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let wanted = ExportOptions { io_timeout: Some(limit), ..options(&place) };
    let export = Export::start(Arc::clone(&disk), wanted).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&place.path).unwrap();
    file.write_at(&[7; 4096], 0).unwrap();
    let changing = std::thread::spawn(move || {
        let mut runtime = Runtime::new(Config::default()).unwrap();
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            disk.deactivate(&ring).await.unwrap();
            disk.activate(&ring, Duration::ZERO).await.unwrap();
        });
    });
    let mut longest = Duration::ZERO;
    while !changing.is_finished() {
        let begun = Instant::now();
        // Between the two the disk is nobody's.
        let read = file.read_at(&mut [0; 4096], 0).map_err(|error| error.raw_os_error());
        assert!(matches!(read, Ok(4096) | Err(Some(libc::EBUSY))), "{read:?}");
        longest = longest.max(begun.elapsed());
    }
    changing.join().unwrap();
    assert!(longest > 2 * limit, "nobody waited for the change: {longest:?}");
    assert_eq!(file.read_at(&mut [0; 4096], 0).unwrap(), 4096);
    drop(file);
    drop(export);
}

#[test]
fn errors_and_short_transfers_of_the_storage_reach_the_client() {
    let sim = SimStorage::new(1 << 20, 1);
    sim.on(When::kind(OpKind::Read).at(0..4096), Fault::Fail(Errno::IO));
    sim.on(When::kind(OpKind::Write).at(8192..12288), Fault::Fail(Errno::NOSPC));
    sim.on(When::kind(OpKind::Flush), Fault::Fail(Errno::IO));
    let place = place();
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let export = Export::start(disk, options(&place)).unwrap();
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&place.path).unwrap();
    let mut block = vec![7; 4096];
    let errno = |result: std::io::Result<usize>| result.map_err(|e| e.raw_os_error());
    assert_eq!(errno(file.read_at(&mut block, 0)), Err(Some(libc::EIO)));
    assert_eq!(errno(file.read_at(&mut block, 4096)), Ok(4096));
    assert_eq!(errno(file.write_at(&block, 8192)), Err(Some(libc::ENOSPC)));
    assert_eq!(errno(file.write_at(&block, 12288)), Ok(4096));
    assert_eq!(file.sync_all().map_err(|e| e.raw_os_error()), Err(Some(libc::EIO)));
    drop(file);
    sim.clear_rules();
    drop(export);
}

#[test]
fn a_stop_under_a_client_that_never_stops_is_clean() {
    let place = place();
    let latency = Duration::from_millis(5);
    let disk = Disk::null(&NullOptions { size: Bytes(1 << 30), latency, ..NullOptions::default() });
    let export = Export::start(disk, options(&place)).unwrap();
    let file = format!("--filename={}", place.path.display());
    let mut client = Process::spawn(&mut command(&[
        "fio",
        "--name=t",
        &file,
        "--direct=1",
        "--size=1g",
        "--rw=randread",
        "--bs=4k",
        "--iodepth=64",
        "--ioengine=libaio",
        "--time_based",
        "--runtime=60",
    ]));
    until(SOON, || (export.stats().total().requests > 500).then_some(())).expect("fio runs");
    export.stop_handle().stop();
    assert_eq!(until(SOON, || (!is_mounted(&place)).then_some(())), Some(()));
    let requests = export.stats().total().requests;
    let more = until(SOON, || (export.stats().total().requests > requests + 500).then_some(()));
    assert_eq!((more, client.ended()), (Some(()), None), "it is served on");
    let start = Instant::now();
    export.stop_handle().force();
    let reason = export.wait().expect_err("a client was cut off");
    assert!(matches!(reason, HaltReason::Forced(1..)), "{reason:?}");
    assert!(start.elapsed() < patient(SOON));
    assert!(client.wait(SOON).is_some_and(|status| !status.success()), "fio sees the end");
}

#[test]
fn a_shared_mapping_that_finds_the_storage_full_fails_its_msync() {
    let sim = SimStorage::new(1 << 20, 1);
    // A part fits, the rest does not.
    sim.on(When::kind(OpKind::Write).once(), Fault::Short(4096));
    sim.on(When::kind(OpKind::Write), Fault::Fail(Errno::NOSPC));
    let place = place();
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let export = Export::start(disk, options(&place)).unwrap();
    let script = "import mmap, os, sys\n\
        fd = os.open(sys.argv[1], os.O_RDWR)\n\
        m = mmap.mmap(fd, 65536)\n\
        m[:] = b'x' * 65536\n\
        try:\n    m.flush(); os.fsync(fd)\n\
        except OSError as e:\n    sys.exit(42)\n";
    let finished = run(command(&["python3", "-c", script, place.path.to_str().unwrap()]));
    assert_eq!(finished.code(), Some(42), "{}", finished.output());
    sim.clear_rules();
    drop(export);
}

#[test]
fn a_queue_thread_that_panics_halts_its_export() {
    let place = place();
    let export = Export::start(
        null(),
        ExportOptions { common: CommonOptions::with_threads(1), ..options(&place) },
    )
    .unwrap();
    testing::panic(&export);
    assert_eq!(export.wait().unwrap_err(), HaltReason::Panicked);
    assert!(!is_mounted(&place));
}

#[test]
fn a_stop_waits_no_longer_for_clients_than_it_was_told_to() {
    let place = place();
    let limit = Duration::from_millis(200);
    let options = ExportOptions { stop_timeout: Some(limit), ..options(&place) };
    let export = Export::start(null(), options).unwrap();
    let file = std::fs::File::open(&place.path).unwrap();
    export.stop_handle().stop();
    assert_eq!(export.wait().unwrap_err(), HaltReason::StillInUse(limit, 1));
    drop(file);
    assert!(!is_mounted(&place));
}

/// The kernel loses the RELEASE of the last file of a mount that has no name any more, if it comes
/// at the wrong moment.
#[test]
fn the_last_user_of_a_detached_mount_who_closes_it_is_no_abort() {
    let place = place();
    for round in 0..400 {
        let export = Export::start(null(), options(&place)).unwrap();
        let file = std::fs::File::open(&place.path).unwrap();
        unmount(&place.path, Unmount::Lazy).unwrap();
        drop(file);
        assert_eq!(export.wait().err(), None, "round {round}");
    }
}

#[test]
fn a_copy_of_the_mount_that_nobody_has_open_does_not_hold_up_a_stop() {
    let place = place();
    let export = Export::start(null(), options(&place)).unwrap();
    let copy = place.path.with_extension("copy");
    std::fs::write(&copy, "").unwrap();
    let mount = |words: &[&str]| std::process::Command::new(words[0]).args(&words[1..]).status();
    let [from, to] = [&place.path, &copy].map(|path| path.to_str().unwrap());
    assert!(mount(&["mount", "--bind", from, to]).unwrap().success());
    export.stop_handle().stop();
    assert!(export.wait().is_ok());
    assert!(mount(&["umount", to]).unwrap().success());
}

#[test]
fn an_abort_from_outside_is_no_success_while_a_client_has_the_file_open() {
    let place = place();
    for is_open in [true, false] {
        let export = Export::start(null(), options(&place)).unwrap();
        let file = is_open.then(|| std::fs::File::open(&place.path).unwrap());
        assert!(Abort::of(export.connection().unwrap()).expect("fusectl").abort());
        let ended = export.wait();
        assert_eq!(ended.is_err(), is_open, "{ended:?}");
        drop(file);
    }
}

#[test]
fn the_end_at_once_is_heard_while_a_hand_over_waits_for_the_storage() {
    let sim = SimStorage::new(1 << 20, 1);
    let place = place();
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let options = ExportOptions { transport: Transport::Dev, ..options(&place) };
    let export = Export::start(disk, options).unwrap();
    let file = format!("of={}", place.path.display());
    let words = ["dd", "if=/dev/zero", &file, "bs=4k", "count=1", "conv=notrunc", "oflag=direct"];
    assert_eq!(run(command(&words)).code(), Some(0));
    sim.on(When::kind(OpKind::Flush), Fault::Hang);
    let (handle, stop) = (export.hand_over_handle(), export.stop_handle());
    let asks = std::thread::spawn(move || handle.hand_over());
    until(SOON, || (sim.hanging() > 0).then_some(())).expect("the flush arrives");
    let start = Instant::now();
    stop.force();
    let error = asks.join().unwrap().expect_err("it is given up");
    assert!(error.to_string().contains("at once"), "{error}");
    assert!(start.elapsed() < patient(Duration::from_secs(5)), "{:?}", start.elapsed());
    // The last flush, which hangs too, is not waited for either.
    until(SOON, || (!is_mounted(&place)).then_some(())).expect("the mount goes");
    stop.force();
    assert!(matches!(export.wait(), Err(HaltReason::Flush(_))));
    assert!(start.elapsed() < patient(SOON), "{:?}", start.elapsed());
}
