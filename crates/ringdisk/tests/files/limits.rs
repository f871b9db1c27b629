//! `--limit` and `ctl limit` of a mount: requests wait, and a live change, a stop and a snapshot
//! wait for nobody.

use std::path::Path;

use ringdisk_testkit::fio::Verify;
use ringdisk_testkit::images::{self, assert_clean};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, until};
use serde_json::Value;

use crate::common::tools::{Ran, ringdisk};
use crate::common::{refused, sample, serve, serve_raw};

fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat())
}

fn limits(disk: &Mounted) -> Value {
    let shown = ctl(disk, &["limit", "--json"]).ok();
    serde_json::from_str(&shown.out).expect("JSON")
}

/// A client that reads 1 MiB in requests of 4 KiB, past the page cache.
fn reader(disk: &Mounted) -> Process {
    let from = format!("if={}", disk.text());
    Process::spawn(&mut command(&["dd", &from, "of=/dev/null", "bs=4k", "iflag=direct"]))
}

/// Waits until a request waits for the limit.
fn until_limited(disk: &Mounted) {
    let waits = || (limits(disk)["waiting"].as_u64() > Some(0)).then_some(());
    until(LIMIT, waits).expect("a request waits for the limit");
}

#[test]
fn a_client_that_waits_goes_on_when_the_limit_changes() {
    if !needs_root() {
        return;
    }
    // The second read waits for 17 minutes.
    let disk = serve_raw(1 << 20, &["--limit", "bps=4", "--limit", "iops-write=1000"]);
    let client = reader(&disk.mounted);
    until_limited(&disk.mounted);
    assert_eq!(limits(&disk.mounted)["limits"], "iops-write=1000,bps=4");
    let shown = ctl(&disk.mounted, &["stats"]).ok();
    assert!(shown.out.contains("limits: iops-write=1000,bps=4"), "{}", shown.out);
    let changed = ctl(&disk.mounted, &["limit", "bps=0,iops=100000"]);
    changed.ends(2).says("cannot be limited at the same time");
    let changed = ctl(&disk.mounted, &["limit", "iops-size=4k,bps=0"]).ok();
    // The request that waits has not gone on yet, or it has.
    assert!(changed.out.starts_with("iops-write=1000,iops-size=4096"), "{}", changed.out);
    let finished = client.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    let waited = limits(&disk.mounted);
    assert!(waited["waited"].as_u64() > Some(0) && waited["waited-seconds"].as_f64() > Some(0.0));
    assert_eq!(ctl(&disk.mounted, &["limit", "none"]).ok().out, "none\n");
    assert_eq!(disk.mounted.stop().code(), Some(0));
}

#[test]
fn changes_and_a_stop_do_not_wait_for_the_limit() {
    if !needs_root() {
        return;
    }
    let (directory, image) = sample();
    let disk = serve(&image, &["--limit", "bps=4"]);
    let client = reader(&disk);
    until_limited(&disk);
    let overlay = directory.path().join("overlay.qcow2");
    ctl(&disk, &["snapshot", text(&overlay)]).ok();
    ctl(&disk, &["resize", "+1M"]).ok();
    ctl(&disk, &["commit", "--quiet"]).ok();
    assert_eq!(limits(&disk)["limits"], "bps=4");
    until_limited(&disk);
    // The client is in the middle of a read: it gets its bytes or an error, and nobody hangs.
    let finished = disk.force_stop();
    assert!(finished.signal().is_none(), "{}", finished.output());
    client.finish(LIMIT);
    assert_clean(&image);
}

#[test]
fn bytes_are_right_under_a_limit_that_changes_all_the_time() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    let (directory, image) = (scratch(), "disk.qcow2");
    let image = directory.path().join(image);
    images::qcow2(&image, "16M", "cluster_size=64k");
    let disk = serve(&image, &["--limit", "iops=3000,iops-max=6000,iops-max-length=2"]);
    let verify = Verify { jobs: 2, size_kib: 4096, depth: 8, ..Verify::default() };
    std::thread::scope(|scope| {
        let client = scope.spawn(|| verify.run(disk.path()));
        let mut rates =
            ["iops=500,iops-max=0", "none", "bps-write=8M,iops-read=2000"].iter().cycle();
        while !client.is_finished() {
            ctl(&disk, &["limit", rates.next().expect("a cycle")]);
        }
        let (written, _) = client.join().expect("fio's words");
        assert!(written > 0);
    });
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&image);
}

#[test]
fn limits_that_mean_nothing_are_refused_before_anything_is_served() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = sample();
    let image = text(&image);
    for (words, reason) in [
        ("iops=x", "a limit is a number"),
        ("ipos=5", "unknown limit 'ipos'"),
        ("iops=5,iops-read=5", "cannot be limited at the same time"),
        ("iops-max=5", "needs iops:"),
        ("group=", "a group has a name"),
        ("iops", "is no limit"),
    ] {
        refused(&[image, "--limit", words], &[reason]);
    }
    refused(&[image, "--limit", "iops=1", "--passthrough", "-f", "raw"], &["--passthrough"]);
}

/// Words that mean nothing are told before the image is looked at, and make nothing.
#[test]
fn limits_that_mean_nothing_are_told_before_an_image_is_looked_for_or_made() {
    let directory = scratch();
    let d = directory.path();
    for (words, said) in [
        (&["--limit", "iops=-1", "nosuch.qcow2"][..], "iops=-1: a limit is a number"),
        (&["--create", "1M", "--limit", "iops-max=9", "new.qcow2"], "a burst is above a limit"),
    ] {
        ringdisk(d, &[&["mount"], words, &["file"]].concat()).ends(2).says(said);
    }
    assert_eq!(std::fs::read_dir(d).expect("read").count(), 0, "something was made");
}
