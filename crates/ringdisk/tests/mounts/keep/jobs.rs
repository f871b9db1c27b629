//! SIGKILL of the serving process in the middle of jobs: the next one begins them again.

use std::path::Path;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, run, until};
use serde_json::Value;

use super::client::{get_on, judge, load};
use super::kept::{Kept, PAUSE};
use crate::common::MIB;
use crate::common::tools::{Ran, ringdisk};

/// Bytes that clients write to.
const SPAN: u64 = 48 * MIB;
const DEPTH: u64 = 8;

fn here(words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), words)
}

/// What the list says of a job, once the process answers.
fn seen(path: &Path, id: &str) -> Value {
    let told = here(&["job", "list", "--json", text(path)]);
    let list: Value = serde_json::from_str(&told.out).unwrap_or_default();
    let jobs = list.as_array().cloned().unwrap_or_default();
    jobs.into_iter().find(|job| job["id"] == id).unwrap_or(Value::Null)
}

fn until_state(path: &Path, id: &str, state: &str) -> Value {
    let found = until(LIMIT, || Some(seen(path, id)).filter(|job| job["state"] == state));
    found.unwrap_or_else(|| panic!("not {state}: {}", seen(path, id)))
}

fn layers(path: &Path) -> Vec<String> {
    let told = here(&["ctl", text(path), "stats", "--json"]).ok().json();
    let layers = told["layers"].as_array().expect("layers").clone();
    let name = |layer: &Value| layer["filename"].as_str().expect("a name").to_owned();
    layers.iter().map(|layer| name(layer).rsplit('/').next().expect("a name").to_owned()).collect()
}

/// Begins a job with these words while clients write, kills the server twice in the middle of it,
/// and ends it.
///
/// * `is_paused`: it is paused meanwhile.
/// * `then`: what ends it.
fn killed(words: &[&str], is_paused: bool, top: &str, then: impl FnOnce(&Path)) {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let [base, over] = ["base.qcow2", "over.qcow2"].map(|name| directory.path().join(name));
    images::qcow2(&base, "64M", "cluster_size=64k");
    let disk = Kept::start(&["--format", "qcow2", text(&base)]);
    let path = disk.path();
    let fill = |seed: u64, offset: u64| {
        let file = crate::common::open(&path);
        let bytes = images::pattern(seed, offset, 8 << 20);
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, offset).expect("write");
        file.sync_all().expect("flush");
    };
    fill(1, SPAN);
    here(&["ctl", text(&path), "snapshot", text(&over)]).ok();
    fill(2, SPAN + 8 * MIB);
    let copy = directory.path().join("copy.qcow2");
    let words: Vec<&str> =
        words.iter().map(|&word| if word == "COPY" { text(&copy) } else { word }).collect();
    let job = |work: &str| here(&["job", work, text(&path), "j"]);
    let written = load(&path, SPAN, DEPTH, |done| {
        get_on(done, DEPTH * 8, || disk.0.output());
        let background = ["--background", "--name", "j", "--speed", "512k"];
        here(&[&["ctl", text(&path)], &words[..], &background].concat()).ok();
        let runs = || (seen(&path, "j")["done"].as_u64() > Some(0)).then_some(());
        until(LIMIT, runs).expect("it copies");
        if is_paused {
            job("pause").ok();
        }
        for _ in 0..2 {
            std::thread::sleep(PAUSE);
            disk.kill_server();
            get_on(done, DEPTH * 8, || disk.0.output());
            let state = if is_paused { "paused" } else { "running" };
            let job = until_state(&path, "j", state);
            assert_eq!(job["speed"], 512 << 10);
        }
        if is_paused {
            job("resume").ok();
        }
        here(&["job", "limit", text(&path), "j", "0"]).ok();
        then(&path);
        get_on(done, DEPTH * 8, || disk.0.output());
    });
    until_state(&path, "j", "concluded");
    assert_eq!(layers(&path), [top]);
    // A job that has ended does not come again.
    std::thread::sleep(PAUSE);
    disk.kill_server();
    until(LIMIT, || disk.is_ready().then_some(())).expect("it answers");
    assert!(seen(&path, "j").is_null());
    assert_eq!(layers(&path), [top]);
    judge(&path, &written);
    disk.stop();
    let bottom = directory.path().join(top);
    // A kill may leak clusters, which is harmless.
    let check = run(command(&["qemu-img", "check", "-f", "qcow2", text(&bottom)]));
    assert!(matches!(check.code(), Some(0 | 3)), "{}", check.output());
    let again = crate::common::serve(&bottom, &["--read-only", "--format", "qcow2"]);
    judge(again.path(), &written);
    let piece = images::piece(again.path(), SPAN, 16 << 20);
    assert!(piece[..8 << 20] == images::pattern(1, SPAN, 8 << 20), "what was below");
    assert!(piece[8 << 20..] == images::pattern(2, SPAN + 8 * MIB, 8 << 20), "what was on top");
}

fn waited_for(path: &Path) {
    here(&["job", "wait", text(path), "j"]).ok();
}

#[test]
fn a_commit_begins_again_when_its_server_was_killed() {
    killed(&["commit"], false, "base.qcow2", waited_for);
}

#[test]
fn a_paused_stream_stays_paused_when_its_server_was_killed() {
    killed(&["stream"], true, "over.qcow2", waited_for);
}

/// The instant is lost with the process; a client that waits for the job hears so from the next
/// one.
#[test]
fn a_backup_has_failed_when_its_server_was_killed_and_who_waits_hears_it_of_the_next_one() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "64M", "cluster_size=64k");
    let disk = Kept::start(&["--format", "qcow2", text(&image)]);
    let path = disk.path();
    let file = crate::common::open(&path);
    let bytes = images::pattern(1, 0, 32 << 20);
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).expect("write");
    drop(file);
    let copy = directory.path().join("copy.qcow2");
    let background = ["--background", "--name", "j", "--speed", "64k"];
    here(&[&["ctl", text(&path), "backup", text(&copy)], &background[..]].concat()).ok();
    let mut wait = std::process::Command::new(crate::common::program());
    let waits = Process::spawn(wait.args(["job", "wait", text(&path), "j"]));
    until_state(&path, "j", "running");
    std::thread::sleep(PAUSE);
    disk.kill_server();
    let lost = until_state(&path, "j", "concluded");
    assert!(lost["why"].to_string().contains("the point in time of the backup was lost"), "{lost}");
    let told = waits.finish(LIMIT);
    assert_eq!(told.code(), Some(1), "{}", told.output());
    assert!(told.stderr.contains("the point in time of the backup was lost"), "{}", told.output());
    let again = directory.path().join("again.qcow2");
    here(&["ctl", text(&path), "backup", text(&again)]).ok();
    disk.stop();
}

#[test]
fn a_mirror_begins_again_when_its_server_was_killed() {
    killed(&["mirror", "COPY"], false, "copy.qcow2", |path| {
        until_state(path, "j", "ready");
        here(&["job", "complete", text(path), "j"]).ok();
        waited_for(path);
    });
}

/// What the bitmap had marked is not known any more: the process that recorded it was killed.
#[test]
fn a_mirror_from_a_bitmap_copies_everything_when_its_server_was_killed() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let at = directory.path();
    let [image, full, inc] = ["disk.qcow2", "full.qcow2", "inc.qcow2"].map(|name| at.join(name));
    images::qcow2(&image, "64M", "cluster_size=64k");
    images::qemu_img(&["bitmap", "--add", text(&image), "since"]);
    let disk = Kept::start(&["--format", "qcow2", "--allow-path", text(at), text(&image)]);
    let path = disk.path();
    let fill = |seed: u64, offset: u64, len: usize| {
        let file = crate::common::open(&path);
        let bytes = images::pattern(seed, offset, len);
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, offset).expect("write");
        file.sync_all().expect("flush");
    };
    fill(1, 0, 16 << 20);
    here(&["ctl", text(&path), "backup", text(&full)]).ok();
    fill(2, 4 * MIB, 4 << 20);
    let words = ["create", "-q", "-f", "qcow2", "-b", text(&full), "-F", "qcow2", text(&inc)];
    images::qemu_img(&words);
    let background = ["--background", "--name", "j", "--speed", "256k", text(&inc)];
    let mirror = ["mirror", "--existing", "--bitmap", "since"];
    here(&[&["ctl", text(&path)], &mirror[..], &background].concat()).ok();
    let runs = || Some(seen(&path, "j")).filter(|job| job["done"].as_u64() > Some(0));
    let before = until(LIMIT, runs).expect("it copies");
    assert!(before["total"].as_u64() < Some(64 * MIB), "{before}");
    std::thread::sleep(PAUSE);
    disk.kill_server();
    let after = until_state(&path, "j", "running");
    assert_eq!(after["total"], 64 * MIB, "{after}");
    fill(3, 2 * MIB, 1 << 20);
    here(&["job", "limit", text(&path), "j", "0"]).ok();
    until_state(&path, "j", "ready");
    here(&["job", "complete", text(&path), "j"]).ok();
    waited_for(&path);
    assert_eq!(layers(&path), ["inc.qcow2", "full.qcow2"]);
    disk.stop();
    let reference = images::reference(&inc, "qcow2");
    for (seed, offset, mebibytes) in [(1, 0, 2), (3, 2, 1), (1, 3, 1), (2, 4, 4), (1, 8, 8)] {
        let (offset, len) = (offset * MIB, mebibytes << 20);
        let wanted = images::pattern(seed, offset, len);
        assert!(images::piece(&reference, offset, len) == wanted, "{len} bytes at {offset}");
    }
    // The target has all of it itself, not only what was marked.
    let map = images::qemu_img(&["map", "--output=json", text(&inc)]);
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let own = map.as_array().expect("a map").iter().filter(|piece| piece["depth"] == 0);
    let own: u64 = own.filter_map(|piece| piece["length"].as_u64()).sum();
    assert!(own >= 16 * MIB, "{own} bytes");
}
