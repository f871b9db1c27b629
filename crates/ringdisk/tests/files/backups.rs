//! Backups of a mount as a job of its server: `ctl backup`, while a client works.

use std::fs;
use std::path::Path;

use ringdisk_testkit::images::{self, assert_clean};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, until};

use super::jobs::{
    WRITTEN, assert_pattern, assert_written, beside_a_writer, ctl, job, layers, sample, seen,
    until_state, write,
};
use super::mirror_targets::Server;
use super::mirrors::{has_room_now, on_a_small_file_system};
use crate::common::tools::qemu_img;
use crate::common::{MIB, serve};

/// Bytes of the disk of [`sample`].
const SIZE: u64 = 64 * MIB;

#[test]
fn a_disk_is_backed_up_as_it_was_when_the_command_began() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let other = directory.path().join("other");
    fs::create_dir(&other).expect("a directory");
    let [copy, second] = ["copy.qcow2", "second.qcow2"].map(|name| other.join(name));
    let words = ["backup", text(&copy), "--background", "--name", "b", "--speed", "1M"];
    let written = beside_a_writer(&disk, || {
        let begun = ctl(&disk, &words).ok();
        assert_eq!(begun.out, "b\n");
        // The client has the prompt again: what is written from here on is not in the backup.
        write(&disk, 9, 0, 2 * MIB);
        let running = until_state(&disk, "b", "running");
        assert_eq!((&running["kind"], &running["speed"]), (&"backup".into(), &MIB.into()));
        assert_eq!(running["total"], SIZE);
        // A disk has one at a time; the message names the job.
        let told = ctl(&disk, &["backup", text(&second)]).ends(5);
        told.says("the job 'b' (backup").says("keeps a point in time");
        ctl(&disk, &["checkpoint", "c"]).ends(5).says("the job 'b'");
        assert!(!second.exists(), "it was made for nothing");
        // The chain may change meanwhile.
        let over = directory.path().join("more.qcow2");
        ctl(&disk, &["snapshot", text(&over)]).ok();
        write(&disk, 8, 2 * MIB, MIB);
        ctl(&disk, &["commit", "--quiet"]).ok();
        assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
        job(&disk, "pause", &["b"]).ok();
        until_state(&disk, "b", "paused");
        job(&disk, "limit", &["b", "0"]).ok();
        job(&disk, "resume", &["b"]).ok();
        job(&disk, "wait", &["b"]).ok().says("holds what the disk held when the backup began");
    });
    let ended = seen(&disk, "b");
    assert_eq!((&ended["state"], &ended["exit"]), (&"concluded".into(), &0.into()));
    assert!(ended["done"].as_u64() == Some(SIZE), "{ended}");
    assert_pattern(disk.path(), 9, 0, 2 * MIB);
    assert_pattern(disk.path(), 8, 2 * MIB, MIB);
    assert_written(disk.path(), written);
    assert_clean(&copy);
    let reference = images::reference(&copy, "qcow2");
    assert_pattern(&reference, 2, 0, WRITTEN);
    // The next one has everything, and the user waits for it.
    let told = ctl(&disk, &["backup", text(&second), "-f", "raw"]).ok();
    assert_eq!(told.out, "Disk backed up.\n");
    assert_written(&second, written);
    assert_pattern(&second, 8, 2 * MIB, MIB);
    assert!(fs::read(disk.path()).expect("read") == fs::read(&second).expect("read"));
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_backup_goes_to_an_export_of_another_server() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let server = Server::qemu(directory.path());
    ctl(&disk, &["backup", "-f", "raw", server.uri()]).ok();
    write(&disk, 5, 0, MIB);
    assert_pattern(server.image(), 2, 0, WRITTEN);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_backup_that_is_given_up_leaves_the_disk_and_says_that_its_target_is_incomplete() {
    if !needs_root() {
        return;
    }
    let (disk, directory, _, over) = sample();
    let slow = |name: &str, more: &[&str]| {
        let copy = directory.path().join(format!("{name}.qcow2"));
        let words = ["backup", "--background", "--name", name, "--speed", "64k", text(&copy)];
        ctl(&disk, &[&words[..], more].concat()).ok();
    };
    for way in ["running", "paused"] {
        slow(way, &[]);
        until(LIMIT, || (seen(&disk, way)["done"].as_u64() > Some(0)).then_some(()))
            .expect("it copies");
        if way == "paused" {
            job(&disk, "pause", &[way]).ok();
        }
        job(&disk, "complete", &[way]).ends(2).says("completes by itself");
        job(&disk, "cancel", &[way]).ok();
        job(&disk, "wait", &[way]).ends(1).says("cancelled").says("is incomplete");
    }
    // Old data finds no room: the backup fails, and the client does not.
    slow("full", &["--fleece-max", "64k"]);
    until_state(&disk, "full", "running");
    write(&disk, 7, 0, 4 * MIB);
    let failed = until_state(&disk, "full", "concluded");
    let why = failed["why"].to_string();
    assert!(why.contains("the fleecing file is full") && why.contains("is incomplete"), "{why}");
    assert_pattern(disk.path(), 7, 0, 4 * MIB);
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    ctl(&disk, &["commit", "--quiet"]).ok();
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&over);
}

#[test]
fn a_full_target_has_a_backup_rest_until_there_is_room() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let (file_system, copy) = on_a_small_file_system(&directory);
    ctl(&disk, &["backup", text(&copy)]).ends(12).says("No space left").says("is incomplete");
    assert!(!copy.exists(), "one that the command made goes with it");
    ctl(&disk, &["backup", "--background", "--name", "full", text(&copy)]).ok();
    let why = until_state(&disk, "full", "paused")["why"].to_string();
    assert!(why.contains("No space left"), "{why}");
    write(&disk, 5, 0, MIB);
    has_room_now(&copy);
    job(&disk, "resume", &["full"]).ok();
    job(&disk, "wait", &["full"]).ok();
    assert_clean(&copy);
    assert_pattern(&images::reference(&copy, "qcow2"), 2, 0, WRITTEN);
    assert_eq!(disk.stop().code(), Some(0));
    file_system.unmount();
}

/// A full backup, and what has changed since in an overlay over it.
#[test]
fn what_a_bitmap_has_marked_goes_into_an_overlay_over_the_last_backup() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let at = directory.path();
    let [image, full, inc] = ["disk.qcow2", "full.qcow2", "inc.qcow2"].map(|name| at.join(name));
    images::qcow2(&image, "64M", "cluster_size=64k");
    qemu_img(at, &["bitmap", "--add", "disk.qcow2", "since"]).ok();
    let disk = serve(&image, &["--allow-path", text(at)]);
    write(&disk, 1, 0, 8 * MIB);
    ctl(&disk, &["backup", text(&full)]).ok();
    write(&disk, 2, 4 * MIB, MIB);
    let told = ctl(&disk, &["backup", text(&inc), "--bitmap", "since"]).ends(2);
    told.says("has the rest of the disk already").says("there is no such file");
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-b", "full.qcow2", "-F", "qcow2", "inc.qcow2"])
        .ok();
    let words = ["backup", text(&inc), "--existing", "--bitmap"];
    ctl(&disk, &[&words[..], &["none"]].concat()).ends(3).says("none");
    ctl(&disk, &[&words[..], &["since"]].concat()).ok();
    write(&disk, 3, 0, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    let reference = images::reference(&inc, "qcow2");
    assert_pattern(&reference, 1, 0, 4 * MIB);
    assert_pattern(&reference, 2, 4 * MIB, MIB);
    assert_pattern(&reference, 1, 5 * MIB, 3 * MIB);
    // The bitmap goes on.
    let listed = qemu_img(at, &["info", "disk.qcow2"]).ok();
    assert!(listed.out.contains("since"), "{}", listed.out);
}

#[test]
fn targets_that_are_none_are_refused() {
    if !needs_root() {
        return;
    }
    let (disk, directory, base, over) = sample();
    let backup = |words: &[&str]| ctl(&disk, &[&["backup"], words].concat());
    backup(&[text(&over), "--existing"]).ends(2).says("the disk itself");
    backup(&[text(&base), "--existing"]).ends(2).says("of the chain of the disk");
    let small = directory.path().join("small.raw");
    images::sparse(&small, SIZE / 2);
    backup(&[text(&small), "-f", "raw"]).ends(2).says("is there already").says("--existing");
    backup(&[text(&small), "-f", "raw", "--existing"]).ends(3).says("as large");
    let none = directory.path().join("none");
    let copy = directory.path().join("copy.qcow2");
    let told = backup(&[text(&copy), "--fleece-dir", text(&none)]);
    assert_ne!(told.code, 0);
    told.says("--fleece-dir");
    assert!(!copy.exists());
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    assert_eq!(disk.stop().code(), Some(0));
}

/// No target is made, and no job begun.
#[test]
fn values_that_make_no_sense_are_refused() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let copy = directory.path().join("copy.qcow2");
    for (words, says) in [
        (&["--speed", "18446744073709551616"][..], "--speed"),
        (&["--speed=-1"], "--speed"),
        (&["--speed", "fast"], "--speed"),
        (&["--format", "vmdk"], "--format"),
        (&["--on-error", "retry"], "--on-error"),
        (&["--sync", "none"], "--sync"),
        (&["--sync", "top", "--bitmap", "b"], "--bitmap"),
        (&["--name", "a b"], "--name"),
        (&["--fleece-max=-1"], "--fleece-max"),
        (&["--bitmap", "b"], "there is no such file"),
    ] {
        let told = ctl(&disk, &[&["backup", text(&copy)], words].concat()).ends(2);
        told.says(says);
        assert!(!copy.exists(), "{words:?}");
    }
    let jobs = job(&disk, "list", &["--json"]).ok().json();
    assert_eq!(jobs.as_array().map(Vec::len), Some(0), "{jobs}");
    // A bitmap that the image on top has not, and one of an image that cannot have any.
    images::qcow2(&copy, "64M", "cluster_size=64k");
    let before = fs::read(&copy).expect("read");
    let words = ["backup", text(&copy), "--existing", "--bitmap"];
    ctl(&disk, &[&words[..], &["none"]].concat()).ends(3).says("none");
    ctl(&disk, &[&words[..], &[""]].concat()).ends(3).says("bitmap ''");
    assert!(before == fs::read(&copy).expect("read"), "the target was changed");
    let raw = directory.path().join("disk.raw");
    images::sparse(&raw, SIZE);
    let other = serve(&raw, &["--format", "raw"]);
    let told = ctl(&other, &[&words[..], &["b"]].concat());
    assert_ne!(told.code, 0);
    told.says("bitmap");
    // No limit, and the largest one.
    for (at, speed) in ["0", "9223372036854775807"].into_iter().enumerate() {
        let copy = directory.path().join(format!("{at}.qcow2"));
        ctl(&other, &["backup", text(&copy), "--format", "qcow2", "--speed", speed]).ok();
        assert_clean(&copy);
    }
    assert_eq!(other.stop().code(), Some(0));
    assert_eq!(disk.stop().code(), Some(0));
}

/// Jobs whose images do not overlap run at once.
#[test]
fn a_commit_below_the_top_a_mirror_and_a_backup_run_at_once() {
    if !needs_root() {
        return;
    }
    let (disk, directory, base, over) = sample();
    let name = |name: &str| directory.path().join(name);
    ctl(&disk, &["snapshot", text(&name("top.qcow2"))]).ok();
    write(&disk, 3, 20 * MIB, MIB);
    let background = |id| ["--background", "--speed", "64k", "--name", id];
    let commit = ["commit", "--top", text(&over), "--base", text(&base)];
    ctl(&disk, &[&commit[..], &background("c")].concat()).ok();
    let [copy, saved] = ["copy.qcow2", "saved.qcow2"].map(name);
    ctl(&disk, &[&["mirror", text(&copy)][..], &background("m")].concat()).ok();
    ctl(&disk, &[&["backup", text(&saved)][..], &background("b")].concat()).ok();
    for id in ["c", "m", "b"] {
        until_state(&disk, id, "running");
    }
    // Those that overlap are refused, and say what may run.
    let told = ctl(&disk, &["stream"]).ends(5);
    told.says("the job 'c'").says("holds the image");
    let z = name("z.qcow2");
    let told = ctl(&disk, &["mirror", text(&z)]).ends(5);
    told.says("the job 'm'").says("beside it only a backup, or commits of images below");
    ctl(&disk, &["snapshot", text(&z)]).ends(5).says("the job 'c'");
    let sync = ["backup", "--sync", "top", text(&z)];
    ctl(&disk, &sync).ends(5);
    assert!(!z.exists());
    write(&disk, 4, 40 * MIB, MIB);
    job(&disk, "limit", &["m", "0"]).ok();
    until_state(&disk, "m", "ready");
    job(&disk, "complete", &["m"]).ok();
    // The switch-over waits for both.
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(layers(&disk), ["top.qcow2", "over.qcow2", "base.qcow2"]);
    job(&disk, "limit", &["c", "0"]).ok();
    job(&disk, "wait", &["c"]).ok();
    assert_eq!(layers(&disk), ["top.qcow2", "base.qcow2"]);
    job(&disk, "limit", &["b", "0"]).ok();
    job(&disk, "wait", &["b"]).ok();
    job(&disk, "wait", &["m"]).ok();
    assert_eq!(layers(&disk), ["copy.qcow2"]);
    let check = |path: &Path| {
        assert_pattern(path, 2, 0, WRITTEN);
        assert_pattern(path, 3, 20 * MIB, MIB);
    };
    check(disk.path());
    assert_pattern(disk.path(), 4, 40 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    [&copy, &saved, &base].into_iter().for_each(|path| assert_clean(path));
    check(&images::reference(&saved, "qcow2"));
    check(&images::reference(&copy, "qcow2"));
}
