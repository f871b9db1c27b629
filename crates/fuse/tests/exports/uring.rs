//! Starts and ends of exports over io_uring that do not go as they should.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, ImageOptions, NullOptions, Source};
use ringdisk_fuse::mount::{self, Unmount, table};
use ringdisk_fuse::testing::{self, Forced};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions, HaltReason, Refuse, Transport};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::images;
use ringdisk_testkit::limits::{UringParameter, needs_root};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{Process, command, ok, until};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

/// A qcow2 image on a mountpoint of its own, and the kernel's switch.
struct Place {
    image: PathBuf,
    path: PathBuf,
    _directory: tempfile::TempDir,
    _switch: UringParameter,
}

fn place() -> Option<Place> {
    if !needs_root() {
        return None;
    }
    let switch = UringParameter::set(true)?;
    let directory = tempfile::tempdir().expect("a directory");
    let (image, path) = (directory.path().join("a.qcow2"), directory.path().join("disk"));
    images::qcow2(&image, "16M", "");
    File::create(&path).expect("a mountpoint");
    Some(Place { image, path, _directory: directory, _switch: switch })
}

fn open(place: &Place) -> Arc<Disk> {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let source = Source::Path(place.image.clone());
    runtime.block_on(Disk::open(&ring, source, &ImageOptions::default())).expect("a good image")
}

fn options(place: &Place, transport: Transport) -> ExportOptions {
    ExportOptions { transport, ..ExportOptions::new(&place.path) }
}

fn serves(place: &Place) {
    let file = File::options().read(true).write(true).open(&place.path).expect("the file");
    file.write_all_at(&[7; 100_000], 12_345).expect("write");
    file.sync_all().expect("flush");
    let mut bytes = vec![0; 100_000];
    file.read_exact_at(&mut bytes, 12_345).expect("read");
    assert!(bytes.iter().all(|byte| *byte == 7));
}

#[test]
fn a_refusal_of_the_last_ring_leads_to_dev_and_the_image_is_written() {
    let Some(place) = place() else { return };
    let forced = Forced { refuse: Some(Refuse::LastRing), ..Forced::default() };
    let export = testing::start(open(&place), options(&place, Transport::Auto), forced)
        .expect("it is served all the same");
    assert_eq!(export.transport(), Transport::Dev);
    assert!(export.notes().iter().any(|note| note.contains("/dev/fuse")), "{:?}", export.notes());
    serves(&place);
    export.stop_handle().stop();
    assert!(export.wait().is_ok());
    images::assert_clean(&place.image);
}

#[test]
fn a_refusal_is_an_error_when_rings_were_asked_for() {
    let Some(place) = place() else { return };
    let forced = Forced { refuse: Some(Refuse::LastRing), ..Forced::default() };
    let error = testing::start(open(&place), options(&place, Transport::Uring), forced)
        .expect_err("refused");
    assert!(error.to_string().contains("refused a ring"), "{error}");
    assert_eq!(table::at(&place.path).expect("readable"), None);
}

#[test]
fn a_stop_after_somebody_else_took_the_mount_away_waits_for_open_clients() {
    let Some(place) = place() else { return };
    let export = Export::start(open(&place), options(&place, Transport::Uring)).expect("rings");
    assert_eq!(export.transport(), Transport::Uring);
    serves(&place);
    let file = File::options().read(true).write(true).open(&place.path).expect("the file");
    mount::unmount(&place.path, Unmount::Lazy).expect("a lazy unmount");
    let mut bytes = [0; 512];
    file.read_exact_at(&mut bytes, 12_345).expect("it is still served");
    let (say, said) = std::sync::mpsc::channel();
    export.watch_users(move |open_files| say.send(open_files).expect("heard"));
    export.stop_handle().stop();
    assert_eq!(said.recv_timeout(SOON), Ok(1));
    file.write_all_at(&[7; 512], 12_345).expect("it is still served");
    drop(file);
    assert!(export.wait().is_ok());
    images::assert_clean(&place.image);
}

#[test]
fn clients_of_every_depth_and_size_meet_while_entries_move() {
    let Some(place) = place() else { return };
    let export = Export::start(open(&place), options(&place, Transport::Uring)).expect("rings");
    let threads: Vec<_> = (0..8u8)
        .map(|number| {
            let path = place.path.clone();
            std::thread::spawn(move || {
                let file = File::options().read(true).write(true).open(path).expect("the file");
                let start = u64::from(number) * (2 << 20);
                for round in 0..300u32 {
                    let len = 1 + (round as usize * 7919 + usize::from(number) * 104_729) % 300_000;
                    let bytes = vec![number ^ round.to_le_bytes()[0]; len];
                    file.write_all_at(&bytes, start + u64::from(round)).expect("write");
                    let mut back = vec![0; len];
                    file.read_exact_at(&mut back, start + u64::from(round)).expect("read");
                    assert!(back == bytes, "client {number}, round {round}");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("a client");
    }
    export.stop_handle().stop();
    assert!(export.wait().is_ok());
    images::assert_clean(&place.image);
}

/// By that the rule knows requests that wait for storage. The time of a request that is served in
/// one go is that of a CPU, which may be slow, or with another process meanwhile: a disk in memory
/// would look like storage there.
#[test]
fn only_requests_that_wait_for_something_count_as_waiting() {
    const READS: u32 = 200;
    let Some(place) = place() else { return };
    for latency in [Duration::ZERO, Duration::from_millis(1)] {
        let disk = Disk::null(&NullOptions { size: Bytes(1 << 20), latency, read_zeroes: true });
        let export = Export::start(disk, options(&place, Transport::Uring)).expect("rings");
        let waited = || Duration::from_nanos(export.stats().total().waited_ns);
        let path = text(&place.path);
        let before = waited();
        let words = ["dd", &format!("if={path}"), "of=/dev/null", "bs=4k", "iflag=direct"];
        ok(command(&words).arg(format!("count={READS}")));
        let waits = waited() - before;
        if latency.is_zero() {
            assert_eq!(waits, Duration::ZERO);
        } else {
            assert!(waits >= latency * READS, "{waits:?}");
        }
        export.stop_handle().stop();
        assert!(export.wait().is_ok());
    }
}

/// How long a client may be left waiting by an export that ends badly.
const SOON: Duration = Duration::from_secs(10);

/// Reads with many requests in flight from a process of its own, which a test can lose.
fn readers(place: &Place) -> Process {
    // Below the mount is an empty file: a reader that opens it has seen the mount end.
    let each =
        "while [ $(dd if=\"$0\" bs=64k count=16 iflag=direct | wc -c) -gt 0 ]; do :; done & ";
    let script = format!("{}wait", each.repeat(8));
    Process::spawn(command(&["sh", "-c", &script]).arg(&place.path))
}

#[test]
fn a_queue_thread_that_panics_under_load_ends_its_clients_with_errors() {
    let Some(place) = place() else { return };
    let disk = Disk::null(&NullOptions {
        size: Bytes(1 << 20),
        read_zeroes: true,
        ..NullOptions::default()
    });
    let common = CommonOptions::with_threads(2);
    let options = ExportOptions { common, ..options(&place, Transport::Uring) };
    let export = Export::start(disk, options).expect("rings");
    let mut clients = readers(&place);
    until(SOON, || (export.stats().total().requests > 500).then_some(())).expect("they read");
    testing::panic(&export);
    assert_eq!(export.wait().expect_err("a panic"), HaltReason::Panicked);
    assert!(clients.wait(SOON).is_some(), "clients are left hanging: {}", clients.output());
    assert_eq!(table::at(&place.path).expect("readable"), None);
}

/// The request whose reply was refused stays with the kernel, which only the end of the connection
/// takes from it.
#[test]
fn a_reply_that_is_refused_under_load_ends_clients_with_errors_and_keeps_what_was_flushed() {
    let Some(place) = place() else { return };
    let refuse = Some(Refuse::ReplyAfter(200));
    let common = CommonOptions::with_threads(2);
    let forced = Forced { refuse, ..Forced::default() };
    let options = ExportOptions { common, ..options(&place, Transport::Uring) };
    let export = testing::start(open(&place), options, forced).expect("rings");
    assert_eq!(export.transport(), Transport::Uring);
    serves(&place);
    let before = export.stats().total().requests;
    let mut clients = readers(&place);
    // Nobody stops it: the first reply that the kernel does not take does.
    let reason = export.wait().expect_err("a refused reply");
    assert_eq!(reason, HaltReason::Reply("the kernel", rustix::io::Errno::INVAL));
    assert!(before < 200, "it was under load: {before} requests before");
    assert!(clients.wait(SOON).is_some(), "clients are left hanging: {}", clients.output());
    assert_eq!(table::at(&place.path).expect("readable"), None);
    images::assert_clean(&place.image);
    let whole = images::reference(&place.image, "qcow2");
    assert!(images::piece(&whole, 12_345, 100_000).iter().all(|byte| *byte == 7));
}

#[test]
fn a_forced_stop_does_not_wait_for_storage_that_never_answers() {
    let Some(place) = place() else { return };
    let sim = SimStorage::new(1 << 20, 1);
    sim.on(When::kind(OpKind::Read), Fault::Hang);
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let export = Export::start(disk, options(&place, Transport::Uring)).expect("rings");
    let mut clients = readers(&place);
    until(SOON, || (sim.hanging() >= 8).then_some(())).expect("the reads arrive");
    export.stop_handle().stop();
    export.stop_handle().force();
    let reason = export.wait().expect_err("requests were cut off");
    assert!(matches!(reason, HaltReason::StillInFlight(count) if count >= 8), "{reason:?}");
    assert!(clients.wait(SOON).is_some(), "clients are left hanging: {}", clients.output());
    assert_eq!(table::at(&place.path).expect("readable"), None);
}
