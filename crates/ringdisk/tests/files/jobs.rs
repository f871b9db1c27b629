//! Jobs of a mount while a client works: `ctl commit`, `ctl stream` and `ringdisk job`.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words, until};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::tools::{Ran, qemu_img, ringdisk};
use crate::common::{MIB, open, program, serve};

/// Bytes of the disk; the overlay has the first quarter of them.
const SIZE: u64 = 64 * MIB;
pub(super) const WRITTEN: u64 = 16 * MIB;

pub(super) fn here(words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), words)
}

pub(super) fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    here(&[&["ctl", disk.text()], words].concat())
}

/// `ringdisk job WORK TARGET WORDS…`.
pub(super) fn job(disk: &Mounted, work: &str, words: &[&str]) -> Ran {
    here(&[&["job", work, disk.text()], words].concat())
}

/// What the list says of a job.
pub(super) fn seen(disk: &Mounted, id: &str) -> Value {
    let list = job(disk, "list", &["--json"]).ok().json();
    let jobs = list.as_array().expect("a list").iter();
    jobs.into_iter().find(|job| job["id"] == id).cloned().unwrap_or(Value::Null)
}

pub(super) fn until_state(disk: &Mounted, id: &str, state: &str) -> Value {
    let found = until(LIMIT, || Some(seen(disk, id)).filter(|job| job["state"] == state));
    found.unwrap_or_else(|| panic!("not {state}: {}", seen(disk, id)))
}

pub(super) fn layers(disk: &Mounted) -> Vec<String> {
    let value = ctl(disk, &["stats", "--json"]).ok().json();
    let layers = value["layers"].as_array().expect("layers").clone();
    let name = |layer: &Value| layer["filename"].as_str().expect("a name").to_owned();
    layers.iter().map(|layer| name(layer).rsplit('/').next().expect("a name").to_owned()).collect()
}

/// A disk of two images; the upper one has [`WRITTEN`] bytes of pattern 2, the lower one of 1.
pub(super) fn overlaid(base: &Path, over: &Path, words: &[&str]) -> Mounted {
    images::qcow2(base, "64M", "cluster_size=64k");
    let disk = serve(base, words);
    write(&disk, 1, 0, MIB);
    ctl(&disk, &["snapshot", text(over)]).ok();
    write(&disk, 2, 0, WRITTEN);
    disk
}

pub(super) fn write(disk: &Mounted, seed: u64, offset: u64, len: u64) {
    let file = open(disk.path());
    file.write_all_at(&pattern(seed, offset, usize::try_from(len).expect("small")), offset)
        .expect("write");
    file.sync_all().expect("flush");
}

#[track_caller]
pub(super) fn assert_pattern(path: &Path, seed: u64, offset: u64, len: u64) {
    let len = usize::try_from(len).expect("small");
    assert!(piece(path, offset, len) == pattern(seed, offset, len), "{len} bytes at {offset}");
}

/// The lines that `ringdisk ctl TARGET events` prints from now on.
pub(super) fn following(disk: &Mounted) -> Process {
    let mut events = std::process::Command::new(program());
    let events = Process::spawn(events.args(["ctl", disk.text(), "events"]));
    // It follows when it tells of something.
    let follows = || {
        ctl(disk, &["limit", "none"]).ok();
        events.output().contains("\"event\":\"limited\"").then_some(())
    };
    until(LIMIT, follows).expect("it follows");
    events
}

/// Such a disk, in a sandbox: the images in one directory.
pub(super) fn sample() -> (Mounted, TempDir, PathBuf, PathBuf) {
    let directory = scratch();
    let [base, over] = ["base.qcow2", "over.qcow2"].map(|name| directory.path().join(name));
    (overlaid(&base, &over, &[]), directory, base, over)
}

#[test]
fn a_job_goes_on_without_its_client_and_is_paused_limited_and_waited_for() {
    if !needs_root() {
        return;
    }
    let (disk, directory, base, _) = sample();
    let events = following(&disk);
    let begun = ctl(&disk, &["commit", "--background", "--name", "slow", "--speed", "1M"]).ok();
    assert_eq!(begun.out, "slow\n");
    begun.says("ringdisk job wait slow");
    let running = until_state(&disk, "slow", "running");
    assert_eq!((&running["kind"], &running["speed"]), (&"commit".into(), &MIB.into()));
    assert_eq!(running["target"], disk.text());
    // One change of the chain at a time; the message names the job.
    ctl(&disk, &["commit"]).ends(5).says("the job 'slow'").says("holds the image");
    let other = directory.path().join("other.qcow2");
    ctl(&disk, &["snapshot", text(&other)]).ends(5).says("the job 'slow'");
    ctl(&disk, &["resize", "+1M"]).ends(5).says("ringdisk job wait slow");
    assert!(!other.exists());

    let paused = here(&["job", "pause", "slow"]).ok();
    assert!(paused.out.starts_with("slow  paused"), "{}", paused.out);
    // The pieces in flight.
    std::thread::sleep(Duration::from_millis(300));
    let before = seen(&disk, "slow");
    write(&disk, 3, 32 * MIB, MIB);
    std::thread::sleep(Duration::from_secs(1));
    let after = seen(&disk, "slow");
    assert_eq!(before["done"], after["done"], "a paused job rests");
    assert_eq!((&after["state"], &after["rate"]), (&"paused".into(), &0.into()));
    let shown = ctl(&disk, &["stats"]).ok().out;
    assert!(shown.contains("job        slow  paused"), "{shown}");
    assert!(here(&["ps"]).ok().out.contains("job slow  paused"));
    let metrics = here(&["metrics"]).ok().out;
    assert!(metrics.contains("ringdisk_job_done_bytes") && metrics.contains("state=\"paused\""));

    // Limited to nothing worth the name, it can be sped up at any time.
    job(&disk, "limit", &["slow", "1k"]).ok();
    job(&disk, "resume", &["slow"]).ok();
    job(&disk, "resume", &["slow"]).ends(2).says("is not paused");
    job(&disk, "limit", &["slow", "0"]).ok();
    here(&["job", "wait", "slow"]).ok();
    let ended = seen(&disk, "slow");
    assert_eq!((&ended["state"], &ended["exit"]), (&"concluded".into(), &0.into()));
    job(&disk, "pause", &["slow"]).ends(2).says("has ended already");
    job(&disk, "wait", &["slow"]).ok();
    assert_eq!(layers(&disk), ["base.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_pattern(disk.path(), 3, 32 * MIB, MIB);
    let told = until(LIMIT, || {
        let output = events.output();
        output.contains("\"state\":\"concluded\"").then_some(output)
    });
    let told = told.unwrap_or_else(|| panic!("{}", events.output()));
    for state in ["created", "running", "paused"] {
        let line = told.lines().find(|line| line.contains(&format!("\"state\":\"{state}\"")));
        let line = line.unwrap_or_else(|| panic!("nothing of {state}: {told}"));
        assert!(line.contains("\"event\":\"job\"") && line.contains("\"id\":\"slow\""), "{line}");
    }
    assert_eq!(disk.stop().code(), Some(0));
    events.finish(LIMIT);
    assert_clean(&base);
}

#[test]
fn a_cancelled_job_leaves_the_disk_as_it_was() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, base, top) = sample();
    // Paused, running, and in the foreground.
    for way in ["paused", "running"] {
        let words = ["commit", "--background", "--name", way, "--speed", "2M"];
        ctl(&disk, &words).ok();
        until(LIMIT, || (seen(&disk, way)["done"].as_u64() >= Some(MIB)).then_some(()))
            .expect("it copies");
        if way == "paused" {
            job(&disk, "pause", &[way]).ok();
        }
        write(&disk, 4, 40 * MIB, MIB);
        job(&disk, "cancel", &[way]).ok();
        job(&disk, "wait", &[way]).ends(1).says("cancelled");
        let ended = seen(&disk, way);
        assert_eq!((&ended["state"], &ended["exit"]), (&"concluded".into(), &1.into()));
    }
    let mut command = std::process::Command::new(program());
    let client = Process::spawn(command.args(["ctl", disk.text(), "commit", "--speed", "1M"]));
    until_state(&disk, "commit-1", "running");
    client.signal(Signal::INT);
    let finished = client.finish(LIMIT);
    assert_eq!(finished.signal(), Some(Signal::INT.as_raw()), "{}", finished.output());
    until_state(&disk, "commit-1", "concluded");
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_pattern(disk.path(), 4, 40 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&top);
    assert_clean(&base);
    let reference = images::reference(&top, "qcow2");
    assert_pattern(&reference, 2, 0, WRITTEN);
    assert_pattern(&reference, 4, 40 * MIB, MIB);
}

#[test]
fn the_end_of_the_disk_ends_its_jobs_at_once() {
    if !needs_root() {
        return;
    }
    for way in ["running", "paused", "unmounted"] {
        let (disk, directory, base, top) = sample();
        ctl(&disk, &["commit", "--background", "--name", way, "--speed", "64k"]).ok();
        until_state(&disk, way, "running");
        if way == "paused" {
            job(&disk, "pause", &[way]).ok();
        }
        let begun = Instant::now();
        match way {
            "unmounted" => {
                here(&["umount", disk.text()]).ok();
            }
            _ => assert_eq!(disk.stop().code(), Some(0), "{way}"),
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{way}: {:?}", begun.elapsed());
        assert_clean(&top);
        assert_clean(&base);
        assert_pattern(&images::reference(&top, "qcow2"), 2, 0, WRITTEN);
        let info = qemu_img(directory.path(), &["info", "--output=json", "over.qcow2"]).ok().json();
        assert_eq!(info["backing-filename"], "base.qcow2", "{way}");
    }
}

#[test]
fn a_full_image_pauses_a_job_which_goes_on_when_there_is_room() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let small = directory.path().join("small");
    std::fs::create_dir(&small).expect("a directory");
    ok_words(&["mount", "-t", "tmpfs", "-o", "size=8M", "none", text(&small)]);
    let base = small.join("base.qcow2");
    let disk = overlaid(&base, &directory.path().join("over.qcow2"), &["--sandbox", "off"]);
    // In the foreground it fails, as a script expects.
    ctl(&disk, &["commit"]).ends(12).says("No space left");
    ctl(&disk, &["commit", "--background", "--name", "full"]).ok();
    let paused = until_state(&disk, "full", "paused");
    let why = paused["why"].as_str().expect("why");
    assert!(why.contains("No space left"), "{why}");
    write(&disk, 5, 48 * MIB, MIB);
    // Tried again without room, it rests again.
    job(&disk, "resume", &["full"]).ok();
    until_state(&disk, "full", "paused");
    ok_words(&["mount", "-o", "remount,size=64M", text(&small)]);
    job(&disk, "resume", &["full"]).ok();
    job(&disk, "wait", &["full"]).ok();
    assert_eq!(layers(&disk), ["base.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_pattern(disk.path(), 5, 48 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&base);
    ok_words(&["umount", text(&small)]);
}

#[test]
fn jobs_and_names_that_are_not_there_are_refused() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, ..) = sample();
    assert_eq!(SIZE, ctl(&disk, &["stats", "--json"]).ok().json()["size"]);
    assert_eq!(job(&disk, "list", &[]).ok().out, "No jobs.\n");
    here(&["job", "pause", "no-such-job-here"]).ends(2).says("no disk that is served here");
    job(&disk, "cancel", &["nothing"]).ends(2).says("has had no job");
    here(&["job", "list", "/nowhere/at/all"]).ends(4);
    here(&["job", "pause"]).ends(2);
    here(&["job", "limit", "x", "fast"]).ends(2);
    for bad in ["-x", "a b", "a/b"] {
        let name = format!("--name={bad}");
        ctl(&disk, &["commit", "--background", &name]).ends(2).says("name of a job");
    }
    ctl(&disk, &["commit", "--on-error", "ignore"]).ends(2);
    ctl(&disk, &["commit", "--speed", "-1"]).ends(2);
    let words = ["commit", "--quiet", "--name", "one", "--on-error", "stop"];
    ctl(&disk, &words).ok();
    job(&disk, "pause", &["one"]).ends(2).says("has ended already");
    job(&disk, "cancel", &["two"]).ends(2).says("its jobs are one");
    ctl(&disk, &["commit", "--name", "one"]).ends(2);
    let list = job(&disk, "list", &[]).ok().out;
    assert!(list.contains("one  done"), "{list}");
    assert_eq!(disk.stop().code(), Some(0));
}

/// A disk of three images in one directory, in a sandbox: the base has pattern 1 in the first 16
/// MiB, the middle one 2 from 8 to 24 MiB, the top 3 from 20 to 21 MiB.
fn tower() -> (Mounted, TempDir, [PathBuf; 3]) {
    let directory = scratch();
    let names = ["base.qcow2", "middle.qcow2", "top.qcow2"];
    let [base, middle, top] = names.map(|name| directory.path().join(name));
    images::qcow2(&base, "64M", "cluster_size=64k");
    let disk = serve(&base, &[]);
    write(&disk, 1, 0, 16 * MIB);
    ctl(&disk, &["snapshot", text(&middle)]).ok();
    write(&disk, 2, 8 * MIB, 16 * MIB);
    ctl(&disk, &["snapshot", text(&top)]).ok();
    write(&disk, 3, 20 * MIB, MIB);
    (disk, directory, [base, middle, top])
}

#[track_caller]
fn assert_tower(path: &Path) {
    assert_pattern(path, 1, 0, 8 * MIB);
    assert_pattern(path, 2, 8 * MIB, 12 * MIB);
    assert_pattern(path, 3, 20 * MIB, MIB);
    assert_pattern(path, 2, 21 * MIB, 3 * MIB);
}

/// Writes pieces of pattern 4 from 32 MiB on until `work` is done. Returns how many.
pub(super) fn beside_a_writer(disk: &Mounted, work: impl FnOnce()) -> u64 {
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0;
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) && written < 256 {
                let offset = 32 * MIB + written * (MIB / 8);
                // Half a cluster: the rest of it is copied from below.
                write(disk, 4, offset, MIB / 32);
                written += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            written
        });
        work();
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        writer.join().expect("the writer")
    })
}

#[track_caller]
pub(super) fn assert_written(path: &Path, written: u64) {
    assert!(written > 0, "the client has written nothing");
    for piece in 0..written {
        assert_pattern(path, 4, 32 * MIB + piece * (MIB / 8), MIB / 32);
    }
}

#[test]
fn a_stream_to_a_base_and_a_whole_one_run_under_a_client_that_writes() {
    if !needs_root() {
        return;
    }
    let (disk, directory, [base, middle, top]) = tower();
    let below = [&base, &middle].map(|path| std::fs::read(path).expect("an image"));
    let written = beside_a_writer(&disk, || {
        let words = ["stream", "--base", text(&base), "--speed", "16M", "--background"];
        let id = ctl(&disk, &words).ok().out;
        assert_eq!(id, "stream-1\n");
        let held = seen(&disk, "stream-1")["holds"].as_array().map(Vec::len);
        assert_eq!(held, Some(3), "the base is held, too");
        ctl(&disk, &["commit"]).ends(5).says("the job 'stream-1'");
        job(&disk, "wait", &["stream-1"]).ok();
    });
    assert_eq!(layers(&disk), ["top.qcow2", "base.qcow2"]);
    let info = |words: &[&str]| qemu_img(directory.path(), words).ok().json();
    let now = info(&["info", "-U", "--output=json", "top.qcow2"]);
    assert_eq!(now["backing-filename"], "base.qcow2");
    assert_eq!(now["backing-filename-format"], "qcow2");
    assert_tower(disk.path());
    assert_written(disk.path(), written);
    // What was dropped is locked no longer.
    qemu_img(directory.path(), &["check", "-q", "middle.qcow2"]).ok();

    let more = beside_a_writer(&disk, || {
        let told = ctl(&disk, &["stream", "--speed", "64M"]).ok();
        assert_eq!(told.out, "Image streamed.\n");
        told.says("needs no backing file any more").says("base.qcow2");
    });
    assert_eq!(layers(&disk), ["top.qcow2"]);
    assert_tower(disk.path());
    assert_written(disk.path(), written.max(more));
    write(&disk, 5, 60 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&top);
    let now = info(&["info", "--output=json", "top.qcow2"]);
    assert_eq!(now["backing-filename"], Value::Null);
    for (path, before) in [&base, &middle].into_iter().zip(below) {
        assert!(std::fs::read(path).expect("an image") == before, "{} changed", path.display());
        std::fs::remove_file(path).expect("remove");
    }
    let reference = images::reference(&top, "qcow2");
    assert_tower(&reference);
    assert_written(&reference, written.max(more));
    assert_pattern(&reference, 5, 60 * MIB, MIB);
}

#[test]
fn a_stream_into_a_full_image_rests_until_there_is_room() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let small = directory.path().join("small");
    std::fs::create_dir(&small).expect("a directory");
    ok_words(&["mount", "-t", "tmpfs", "-o", "size=8M", "none", text(&small)]);
    let base = directory.path().join("base.qcow2");
    images::qcow2(&base, "64M", "cluster_size=64k");
    let disk = serve(&base, &["--sandbox", "off"]);
    write(&disk, 2, 0, WRITTEN);
    let top = small.join("top.qcow2");
    ctl(&disk, &["snapshot", text(&top)]).ok();
    write(&disk, 4, 40 * MIB, MIB);
    ctl(&disk, &["stream", "--on-error", "ignore"]).ends(2);
    ctl(&disk, &["stream"]).ends(12).says("No space left");
    ctl(&disk, &["stream", "--background", "--name", "full"]).ok();
    let why = until_state(&disk, "full", "paused")["why"].to_string();
    assert!(why.contains("No space left"), "{why}");
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    ok_words(&["mount", "-o", "remount,size=64M", text(&small)]);
    job(&disk, "resume", &["full"]).ok();
    job(&disk, "wait", &["full"]).ok();
    assert_eq!(layers(&disk), ["top.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_pattern(disk.path(), 4, 40 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&top);
    ok_words(&["umount", text(&small)]);
}

#[test]
fn a_stream_that_is_cancelled_or_refused_leaves_the_chain() {
    if !needs_root() {
        return;
    }
    let (disk, directory, [base, middle, top]) = tower();
    let elsewhere = directory.path().join("elsewhere.qcow2");
    images::qcow2(&elsewhere, "64M", "cluster_size=64k");
    ctl(&disk, &["stream", "--base", text(&elsewhere)]).ends(2).says("is not in the chain");
    ctl(&disk, &["stream", "--base", "/nowhere/at/all"]).ends(2).says("is not in the chain");
    ctl(&disk, &["stream", "--base", text(&top)]).ends(2).says("below the top");
    ctl(&disk, &["stream", "--base", text(&middle)]).ends(2).says("nothing is to be streamed");
    assert_eq!(job(&disk, "list", &[]).ok().out, "No jobs.\n", "refused before they began");

    ctl(&disk, &["stream", "--background", "--name", "halted", "--speed", "2M"]).ok();
    until(LIMIT, || (seen(&disk, "halted")["done"].as_u64() >= Some(MIB)).then_some(()))
        .expect("it copies");
    job(&disk, "pause", &["halted"]).ok();
    write(&disk, 4, 40 * MIB, MIB);
    job(&disk, "cancel", &["halted"]).ok();
    job(&disk, "wait", &["halted"]).ends(1).says("cancelled");
    assert_eq!(layers(&disk), ["top.qcow2", "middle.qcow2", "base.qcow2"]);
    assert_tower(disk.path());
    assert_pattern(disk.path(), 4, 40 * MIB, MIB);

    // The client in the foreground has gone.
    let mut command = std::process::Command::new(program());
    let client = Process::spawn(command.args(["ctl", disk.text(), "stream", "--speed", "1M"]));
    until_state(&disk, "stream-1", "running");
    client.signal(Signal::INT);
    assert_eq!(client.finish(LIMIT).signal(), Some(Signal::INT.as_raw()));
    until_state(&disk, "stream-1", "concluded");
    assert_eq!(layers(&disk).len(), 3);
    assert_eq!(disk.stop().code(), Some(0));
    for image in [&base, &middle, &top] {
        assert_clean(image);
    }
    let reference = images::reference(&top, "qcow2");
    assert_tower(&reference);
    assert_pattern(&reference, 4, 40 * MIB, MIB);
    let single = serve(&base, &[]);
    ctl(&single, &["stream"]).ends(2).says("has no backing file");
    assert_eq!(single.stop().code(), Some(0));
}
