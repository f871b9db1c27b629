//! The fetching moves between queues under load: no request is lost or forgotten.

use std::path::Path;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_fuse::testing::{self, Forced};
use ringdisk_fuse::{CommonOptions, ExportOptions, Transport};
use ringdisk_testkit::process::{command, run};

/// Runs fio for a while on an export whose place changes every 50 µs. A request that nobody fetches
/// leaves fio waiting, and then the limit of the process helper ends the test.
fn restless(threads: usize, arguments: &[&str]) {
    restless_at_depth(threads, None, arguments);
}

fn restless_at_depth(threads: usize, queue_depth: Option<u32>, arguments: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, b"").unwrap();
    let disk = Disk::null(&NullOptions {
        size: Bytes(1 << 30),
        read_zeroes: false,
        latency: Duration::ZERO,
    });
    let options = ExportOptions {
        transport: Transport::Dev,
        common: CommonOptions::with_threads(threads),
        queue_depth,
        ..ExportOptions::new(path.clone())
    };
    let forced = Forced { restless: true, ..Forced::default() };
    let export = testing::start(disk, options, forced).unwrap();
    fio(&path, arguments);
    let stats = export.stats();
    export.stop_handle().stop();
    export.wait().unwrap();
    for queue in stats.queues.iter().filter(|_| queue_depth.is_none()) {
        assert!(queue.requests > 0, "queue {} never fetched", queue.thread);
    }
}

fn fio(path: &Path, arguments: &[&str]) {
    let file = format!("--filename={}", path.display());
    let mut words = vec![
        "fio",
        "--name=t",
        &file,
        "--direct=1",
        "--thread",
        "--norandommap",
        "--size=1g",
        "--bs=4k",
        "--time_based",
        "--runtime=2",
    ];
    words.extend(arguments);
    let finished = run(command(&words));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn one_request_at_a_time() {
    restless(2, &["--rw=randread", "--ioengine=psync"]);
}

#[test]
fn one_request_at_a_time_among_four_queues() {
    restless(4, &["--rw=randrw", "--ioengine=psync"]);
}

#[test]
fn many_requests_at_once() {
    restless(2, &["--rw=randrw", "--ioengine=libaio", "--iodepth=16"]);
}

#[test]
fn a_few_clients() {
    restless(3, &["--rw=randrw", "--ioengine=psync", "--numjobs=3"]);
}

/// With so few entries all of them are armed now and then: looking again must not depend on an idle
/// one.
#[test]
fn one_request_at_a_time_among_queues_of_two_entries() {
    restless_at_depth(8, Some(2), &["--rw=randrw", "--ioengine=psync", "--numjobs=2"]);
    restless_at_depth(8, Some(2), &["--rw=randrw", "--ioengine=psync"]);
    restless_at_depth(2, Some(1), &["--rw=randrw", "--ioengine=psync"]);
}
