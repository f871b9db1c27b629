//! Upgrades in the middle of jobs: they go on in the next process.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images::{self, assert_clean};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, until};
use serde_json::Value;
use tempfile::TempDir;

use super::upgraded_mount::Taken;
use crate::common::tools::{Ran, ringdisk};
use crate::common::{MIB, program};
use crate::keep::client::{get_on, judge, load};

/// Bytes that clients write to.
const SPAN: u64 = 48 * MIB;
const DEPTH: u64 = 8;

fn here(words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), words)
}

fn job(disk: &Taken, work: &str, words: &[&str]) -> Ran {
    here(&[&["job", work, text(disk.path())], words].concat())
}

fn seen(disk: &Taken, id: &str) -> Value {
    let list = job(disk, "list", &["--json"]).ok().json();
    let jobs = list.as_array().expect("a list").iter();
    jobs.into_iter().find(|job| job["id"] == id).cloned().unwrap_or(Value::Null)
}

fn until_state(disk: &Taken, id: &str, state: &str) -> Value {
    let found = until(LIMIT, || Some(seen(disk, id)).filter(|job| job["state"] == state));
    found.unwrap_or_else(|| panic!("not {state}: {}", seen(disk, id)))
}

fn layers(disk: &Taken) -> Vec<String> {
    let told = here(&["ctl", text(disk.path()), "stats", "--json"]).ok().json();
    let layers = told["layers"].as_array().expect("layers").clone();
    let name = |layer: &Value| layer["filename"].as_str().expect("a name").to_owned();
    layers.iter().map(|layer| name(layer).rsplit('/').next().expect("a name").to_owned()).collect()
}

/// A disk of two images with data in both, and its directory.
fn overlaid() -> (Taken, TempDir, [PathBuf; 2]) {
    let directory = scratch();
    let [base, over] = ["base.qcow2", "over.qcow2"].map(|name| directory.path().join(name));
    images::qcow2(&base, "96M", "cluster_size=64k");
    let disk = Taken::start(&["--format", "qcow2", text(&base)]);
    let fill = |seed: u64, offset: u64| {
        let file = crate::common::open(disk.path());
        let bytes = images::pattern(seed, offset, 8 << 20);
        file.write_all_at(&bytes, offset).expect("write");
        file.sync_all().expect("flush");
    };
    fill(1, SPAN);
    // Each process copies some MiB before a limit counts: there is more than three of them take.
    (2..5).for_each(|piece| fill(3, SPAN + piece * 8 * MIB));
    disk.ctl(&["snapshot", text(&over)]);
    fill(2, SPAN + 8 * MIB);
    (disk, directory, [base, over])
}

/// Begins a job with these words while clients write, upgrades twice in the middle of it, and ends
/// it.
///
/// * `is_paused`: it is paused meanwhile.
/// * `then`: what ends it.
fn upgraded(words: &[&str], is_paused: bool, top: &str, then: impl FnOnce(&Taken)) {
    if !needs_root() {
        return;
    }
    let (mut disk, directory, _) = overlaid();
    let path = disk.path().to_owned();
    let target = directory.path().join("other");
    std::fs::create_dir(&target).expect("a directory");
    let target = target.join("copy.qcow2");
    let words: Vec<&str> =
        words.iter().map(|&word| if word == "COPY" { text(&target) } else { word }).collect();
    let written = load(&path, SPAN, DEPTH, |done| {
        get_on(done, DEPTH * 8, || disk.process.output());
        let background = ["--background", "--name", "j", "--speed", "512k"];
        here(&[&["ctl", text(&path)], &words[..], &background].concat()).ok();
        let runs = || (seen(&disk, "j")["done"].as_u64() > Some(0)).then_some(());
        until(LIMIT, runs).expect("it copies");
        if is_paused {
            job(&disk, "pause", &["j"]).ok();
        }
        let mut wait = Command::new(program());
        let waits = Process::spawn(wait.args(["job", "wait", text(&path), "j"]));
        for _ in 0..2 {
            get_on(done, DEPTH * 8, || disk.process.output());
            disk.upgrade(&["--allow-path", text(directory.path())]);
            let state = if is_paused { "paused" } else { "running" };
            let job = until_state(&disk, "j", state);
            assert_eq!(job["speed"], 512 << 10);
        }
        if is_paused {
            job(&disk, "resume", &["j"]).ok();
        }
        job(&disk, "limit", &["j", "0"]).ok();
        then(&disk);
        let waited = waits.finish(LIMIT);
        assert_eq!(waited.code(), Some(0), "{}", waited.output());
        get_on(done, DEPTH * 8, || disk.process.output());
    });
    assert_eq!(layers(&disk), [top]);
    judge(&path, &written);
    let bottom = if top == "copy.qcow2" { target.clone() } else { directory.path().join(top) };
    disk.stop();
    assert_clean(&bottom);
    let again = crate::common::serve(&bottom, &["--read-only", "--format", "qcow2"]);
    judge(again.path(), &written);
    let piece = images::piece(again.path(), SPAN, 16 << 20);
    assert!(piece[..8 << 20] == images::pattern(1, SPAN, 8 << 20), "what was below");
    assert!(piece[8 << 20..] == images::pattern(2, SPAN + 8 * MIB, 8 << 20), "what was on top");
}

fn waited_for(disk: &Taken) {
    job(disk, "wait", &["j"]).ok();
}

#[test]
fn a_commit_goes_on_in_the_next_process() {
    upgraded(&["commit"], false, "base.qcow2", waited_for);
}

#[test]
fn a_paused_commit_stays_paused_in_the_next_process() {
    upgraded(&["commit"], true, "base.qcow2", waited_for);
}

#[test]
fn a_stream_goes_on_in_the_next_process() {
    upgraded(&["stream"], false, "over.qcow2", waited_for);
}

#[test]
fn a_paused_stream_stays_paused_in_the_next_process() {
    upgraded(&["stream"], true, "over.qcow2", waited_for);
}

#[test]
fn a_mirror_goes_on_in_the_next_process() {
    upgraded(&["mirror", "COPY"], false, "copy.qcow2", |disk| {
        until_state(disk, "j", "ready");
        job(disk, "complete", &["j"]).ok();
        waited_for(disk);
    });
}

#[test]
fn a_mirror_that_is_to_switch_over_does_so_in_the_next_process() {
    upgraded(&["mirror", "COPY", "--complete", "--write-blocking"], true, "copy.qcow2", |disk| {
        waited_for(disk);
    });
}

/// What is left of it: what nobody has marked is not copied in any process.
#[test]
fn a_mirror_from_a_bitmap_goes_on_in_the_next_process() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let [image, copy] = ["disk.qcow2", "copy.raw"].map(|name| directory.path().join(name));
    images::qcow2(&image, "96M", "cluster_size=64k");
    images::qemu_img(&["bitmap", "--add", text(&image), "since"]);
    images::sparse(&copy, 96 * MIB);
    // Nobody writes there, so this stays where only what is marked is copied.
    let unlike = vec![7; 1 << 20];
    let file = crate::common::open(&copy);
    file.write_all_at(&unlike, 95 * MIB).expect("write");
    let mut disk = Taken::start(&["--format", "qcow2", text(&image)]);
    let path = disk.path().to_owned();
    let file = crate::common::open(&path);
    file.write_all_at(&images::pattern(1, SPAN, 40 << 20), SPAN).expect("write");
    file.sync_all().expect("flush");
    drop(file);
    let written = load(&path, SPAN, DEPTH, |done| {
        get_on(done, DEPTH * 8, || disk.process.output());
        let words = ["--existing", "-f", "raw", "--bitmap", "since"];
        let background = ["--background", "--name", "j", "--speed", "512k"];
        let begun = [&["ctl", text(&path), "mirror", text(&copy)], &words[..], &background];
        here(&begun.concat()).ok();
        for _ in 0..2 {
            until_state(&disk, "j", "running");
            get_on(done, DEPTH * 8, || disk.process.output());
            disk.upgrade(&[]);
        }
        job(&disk, "limit", &["j", "0"]).ok();
        until_state(&disk, "j", "ready");
        get_on(done, DEPTH * 8, || disk.process.output());
    });
    job(&disk, "cancel", &["j"]).ok();
    waited_for(&disk);
    judge(&path, &written);
    judge(&copy, &written);
    assert!(images::piece(&copy, SPAN, 40 << 20) == images::pattern(1, SPAN, 40 << 20));
    assert!(images::piece(&copy, 95 * MIB, 1 << 20) == unlike, "all of it was copied");
    disk.stop();
    assert_clean(&image);
}

/// The instant is lost with the process that kept it: the job does not begin again at another one.
#[test]
fn a_backup_has_failed_in_the_next_process_which_says_why() {
    if !needs_root() {
        return;
    }
    let (mut disk, directory, [base, _]) = overlaid();
    let path = disk.path().to_owned();
    let copy = directory.path().join("copy.qcow2");
    let background = ["--background", "--name", "j", "--speed", "64k"];
    here(&[&["ctl", text(&path), "backup", text(&copy)], &background[..]].concat()).ok();
    // One that has ended before is known in the next process, too.
    here(&["ctl", text(&path), "commit", "--name", "before", "--quiet"]).ok();
    assert_eq!(layers(&disk), ["base.qcow2"]);
    let mut wait = Command::new(program());
    let waits = Process::spawn(wait.args(["job", "wait", text(&path), "j"]));
    disk.upgrade_and_warn(&[]);
    let lost = until_state(&disk, "j", "concluded");
    let why = lost["why"].to_string();
    assert!(why.contains("the point in time of the backup was lost"), "{why}");
    assert_eq!((&lost["kind"], &lost["exit"]), (&"backup".into(), &1.into()));
    let told = disk.process.output();
    assert!(told.contains("job j") && told.contains("the point in time"), "{told}");
    let waited = waits.finish(LIMIT);
    assert_eq!(waited.code(), Some(1), "{}", waited.output());
    assert!(waited.stderr.contains("point in time"), "{}", waited.output());
    job(&disk, "wait", &["before"]).ok().says("What was written is in");
    let ended = seen(&disk, "before");
    assert_eq!((&ended["kind"], &ended["exit"]), (&"commit".into(), &0.into()));
    // The next backup is possible.
    let again = directory.path().join("again.qcow2");
    here(&["ctl", text(&path), "backup", text(&again)]).ok();
    disk.stop();
    assert_clean(&again);
    assert_clean(&base);
}

#[test]
fn a_client_in_the_foreground_waits_on_and_a_signal_cancels_the_job_there() {
    if !needs_root() {
        return;
    }
    for is_given_up in [false, true] {
        let (mut disk, _directory, _) = overlaid();
        let path = disk.path().to_owned();
        let words = ["ctl", text(&path), "commit", "--name", "j", "--speed", "64k"];
        let mut client = Command::new(program());
        let client = Process::spawn(client.args(words));
        until_state(&disk, "j", "running");
        disk.upgrade(&[]);
        until_state(&disk, "j", "running");
        if is_given_up {
            // It follows a moment later.
            ringdisk_testkit::process::pause(Duration::from_secs(1));
            client.signal(rustix::process::Signal::INT);
            assert_eq!(client.finish(LIMIT).signal(), Some(2));
            until_state(&disk, "j", "concluded");
            assert_eq!(layers(&disk).len(), 2);
        } else {
            job(&disk, "limit", &["j", "0"]).ok();
            let told = client.finish(LIMIT);
            assert_eq!(told.code(), Some(0), "{}", told.output());
            assert!(told.stdout.contains("Image committed."), "{}", told.output());
            assert_eq!(layers(&disk), ["base.qcow2"]);
        }
        disk.stop();
    }
}

#[test]
fn a_job_goes_on_where_it_was_when_the_next_process_cannot_have_the_mount() {
    if !needs_root() {
        return;
    }
    let (disk, directory, _) = overlaid();
    let path = disk.path().to_owned();
    let copy = directory.path().join("copy.qcow2");
    for words in [&["commit"][..], &["stream"], &["mirror", text(&copy)]] {
        let background = ["--background", "--name", words[0], "--speed", "64k"];
        here(&[&["ctl", text(&path)], words, &background].concat()).ok();
        until_state(&disk, words[0], "running");
        // One that leaves when it has everything.
        let shown = b"{\"takes_jobs\":true}";
        let len = u32::try_from(shown.len()).expect("short").to_le_bytes();
        let mut successor = UnixStream::connect(disk.socket()).expect("it waits");
        successor.write_all(&[b"A", &len[..], shown].concat()).expect("asked");
        let mut head = [0; 8];
        successor.read_exact(&mut head).expect("a state");
        assert!(head[6..] == [0; 2], "it is handed over: {head:?}");
        drop(successor);
        until_state(&disk, words[0], "running");
        job(&disk, "cancel", &[words[0]]).ok();
        job(&disk, "wait", &[words[0]]).ends(1).says("cancelled");
    }
    assert_eq!(layers(&disk).len(), 2);
    here(&["ctl", text(&path), "commit", "--quiet"]).ok();
    disk.stop();
}
