//! Mirrors of a mount while a client works: `ctl mirror`, `job complete` and `job cancel`.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words, until};
use serde_json::Value;
use tempfile::TempDir;

use super::jobs::{
    WRITTEN, assert_pattern, assert_written, beside_a_writer, ctl, here, job, layers, sample, seen,
    until_state, write,
};
use crate::common::serving::{Daemon, serve_command};
use crate::common::tools::qemu_img;
use crate::common::{MIB, program, serve};

/// Bytes of the disk of [`sample`].
const SIZE: u64 = 64 * MIB;

/// A file in a directory of its own beside the images, where the sandbox reaches nothing.
fn elsewhere(directory: &Path, name: &str) -> PathBuf {
    let other = directory.join("other");
    fs::create_dir_all(&other).expect("a directory");
    other.join(name)
}

fn backing(directory: &Path, image: &str) -> Value {
    let info = qemu_img(directory, &["info", "-U", "--output=json", image]).ok().json();
    info["full-backing-filename"].clone()
}

#[test]
fn a_disk_switches_over_to_a_copy_under_a_client_and_goes_on_there() {
    if !needs_root() {
        return;
    }
    for mode in [&[][..], &["--write-blocking"]] {
        let (disk, directory, base, over) = sample();
        let copy = elsewhere(directory.path(), "copy.qcow2");
        let written = beside_a_writer(&disk, || {
            let begun = ctl(&disk, &[&["mirror", text(&copy), "--name", "m"], mode].concat()).ok();
            assert_eq!(begun.out, "m\n");
            begun.says("ready").says("ringdisk job complete").says("ringdisk job cancel");
            let ready = seen(&disk, "m");
            assert_eq!((&ready["state"], &ready["kind"]), (&"ready".into(), &"mirror".into()));
            // It stays in step, and nothing else changes the chain meanwhile.
            let z = directory.path().join("z.qcow2");
            ctl(&disk, &["snapshot", text(&z)]).ends(5).says("the job 'm' (mirror, ready)");
            ctl(&disk, &["resize", "+1M"]).ends(5).says("the job 'm'");
            ctl(&disk, &["commit"]).ends(5).says("the job 'm'");
            ctl(&disk, &["mirror", text(&z)]).ends(5).says("the job 'm'");
            assert!(!z.exists());
            // A wait for one that nobody has told to end ends.
            job(&disk, "wait", &["m"]).ok().says("is ready");
            assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
            let told = job(&disk, "complete", &["m"]).ok();
            assert!(told.out.starts_with("m  "), "{}", told.out);
            job(&disk, "wait", &["m"]).ok();
        });
        job(&disk, "complete", &["m"]).ends(2).says("has ended already");
        assert_eq!(layers(&disk), ["copy.qcow2"]);
        assert!(here(&["ps"]).ok().out.contains(text(&copy)), "the image of now is shown");
        assert_pattern(disk.path(), 2, 0, WRITTEN);
        assert_written(disk.path(), written);
        // The former images are as they were then, and locked no longer.
        qemu_img(directory.path(), &["check", "-q", "over.qcow2"]).ok();
        assert_pattern(&images::reference(&over, "qcow2"), 2, 0, WRITTEN);
        // The directory of the copy is one of the disk's now.
        let next = elsewhere(directory.path(), "next.qcow2");
        ctl(&disk, &["snapshot", text(&next)]).ok();
        write(&disk, 5, 60 * MIB, MIB);
        ctl(&disk, &["commit"]).ok();
        assert_eq!(layers(&disk), ["copy.qcow2"]);
        ctl(&disk, &["resize", "+1M"]).ok();
        assert_eq!(disk.stop().code(), Some(0));
        for path in [&base, &over] {
            fs::remove_file(path).expect("remove");
        }
        assert_clean(&copy);
        let reference = images::reference(&copy, "qcow2");
        assert_pattern(&reference, 2, 0, WRITTEN);
        assert_written(&reference, written);
        assert_pattern(&reference, 5, 60 * MIB, MIB);
    }
}

#[test]
fn a_ready_mirror_that_is_cancelled_leaves_a_copy_of_that_moment() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let copy = elsewhere(directory.path(), "copy.raw");
    let id = ctl(&disk, &["mirror", text(&copy), "-f", "raw"]).ok().out;
    assert_eq!(id, "mirror-1\n");
    write(&disk, 6, 50 * MIB, MIB);
    job(&disk, "cancel", &["mirror-1"]).ok().says("left as a copy");
    job(&disk, "wait", &["mirror-1"]).ok();
    write(&disk, 7, 50 * MIB, MIB);
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    assert_eq!(fs::metadata(&copy).expect("the copy").len(), SIZE);
    assert_pattern(&copy, 2, 0, WRITTEN);
    assert_pattern(&copy, 6, 50 * MIB, MIB);
    assert_pattern(disk.path(), 7, 50 * MIB, MIB);
    // A raw file that was named so needs no word again: it has a note.
    let told = ctl(&disk, &["mirror", text(&copy)]).ends(2);
    told.says("is there already").says("--existing");
    ctl(&disk, &["mirror", text(&copy), "--existing", "--background", "--name", "two"]).ok();
    until_state(&disk, "two", "ready");
    assert_eq!(disk.stop().code(), Some(0));
    assert_pattern(&copy, 2, 0, WRITTEN);
}

#[test]
fn a_mirror_of_the_top_image_has_the_images_below_it_below_it() {
    if !needs_root() {
        return;
    }
    let (disk, directory, base, _) = sample();
    let copy = elsewhere(directory.path(), "top.qcow2");
    let told = ctl(&disk, &["mirror", "--sync", "top", "--complete", text(&copy)]).ok();
    assert_eq!(told.out, "The disk has switched over.\n");
    told.says("name that one when it is served again");
    assert_eq!(layers(&disk), ["top.qcow2", "base.qcow2"]);
    assert_eq!(backing(directory.path(), "other/top.qcow2"), text(&base));
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    ctl(&disk, &["commit"]).ok();
    assert_eq!(layers(&disk), ["base.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&base);
}

/// To an overlay over the last copy, which gets what has changed since and nothing else.
#[test]
fn a_disk_switches_over_to_its_last_copy_with_what_a_bitmap_has_marked_since() {
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
    let mirror = |words: &[&str]| ctl(&disk, &[&["mirror", text(&inc)], words].concat());
    let told = mirror(&["--bitmap", "since"]).ends(2);
    told.says("has the rest of the disk already").says("there is no such file");
    mirror(&["--bitmap", "since", "--sync", "top"]).ends(2).says("--sync");
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-b", "full.qcow2", "-F", "qcow2", "inc.qcow2"])
        .ok();
    mirror(&["--existing", "--bitmap", "none"]).ends(3).says("none");
    let written = beside_a_writer(&disk, || {
        mirror(&["--existing", "--bitmap", "since", "--name", "m"]).ok();
        write(&disk, 3, 0, MIB);
        job(&disk, "complete", &["m"]).ok();
        job(&disk, "wait", &["m"]).ok();
    });
    assert_eq!(layers(&disk), ["inc.qcow2", "full.qcow2"]);
    write(&disk, 5, 20 * MIB, MIB);
    assert_pattern(disk.path(), 3, 0, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&inc);
    let map = qemu_img(at, &["map", "--output=json", "inc.qcow2"]).ok().json();
    let own = map.as_array().expect("a map").iter().filter(|piece| piece["depth"] == 0);
    let own: u64 = own.filter_map(|piece| piece["length"].as_u64()).sum();
    assert!(own < SIZE / 2, "all of it was copied: {own} bytes");
    let reference = images::reference(&inc, "qcow2");
    assert_pattern(&reference, 3, 0, MIB);
    assert_pattern(&reference, 1, MIB, 3 * MIB);
    assert_pattern(&reference, 2, 4 * MIB, MIB);
    assert_pattern(&reference, 1, 5 * MIB, 3 * MIB);
    assert_pattern(&reference, 5, 20 * MIB, MIB);
    assert_written(&reference, written);
    // The bitmap is where it was.
    let listed = qemu_img(at, &["info", "disk.qcow2"]).ok();
    assert!(listed.out.contains("since"), "{}", listed.out);
}

#[test]
fn targets_that_are_none_are_refused_and_leave_nothing() {
    if !needs_root() {
        return;
    }
    let (disk, directory, base, over) = sample();
    let path = |name: &str| directory.path().join(name);
    let mirror = |words: &[&str]| ctl(&disk, &[&["mirror"], words].concat());
    mirror(&[text(&over), "--existing"]).ends(2).says("the image of the disk itself");
    mirror(&[text(&base), "--existing"]).ends(2).says("an image of the chain");
    mirror(&[text(directory.path()), "--existing"]).ends(2).says("is a directory");
    mirror(&[text(&path("no/such/copy"))]).ends(3);
    mirror(&[text(&path("copy")), "--sync", "none"]).ends(2).says("--sync none");
    mirror(&[text(&path("copy")), "--sync", "top", "-f", "raw"]).ends(2).says("--format qcow2");
    mirror(&[text(&path("copy")), "--sync", "half"]).ends(2);
    mirror(&["nbd://"]).ends(3);
    images::sparse(&path("small"), MIB);
    mirror(&[text(&path("small")), "--existing"]).says("raw");
    let small = mirror(&[text(&path("small")), "--existing", "-f", "raw", "--complete"]);
    small.ends(3).says("has 1048576 bytes").says("make the target as large");
    images::sparse(&path("large"), 2 * SIZE);
    let large = mirror(&[text(&path("large")), "--existing", "-f", "raw", "--complete"]);
    large.ends(11).says("clients would see another size");
    let nobody = format!("nbd+unix:///?socket={}", text(&path("nobody")));
    mirror(&[&nobody]).says("cannot be opened");
    for name in ["copy", "no"] {
        assert!(!path(name).exists(), "{name}");
    }
    // The two that were larger and left can be copies.
    mirror(&[text(&path("large")), "--existing", "-f", "raw", "--name", "large"]).ok();
    job(&disk, "complete", &["large"]).ends(11).says("another size");
    job(&disk, "cancel", &["large"]).ok();
    job(&disk, "wait", &["large"]).ok();
    assert_pattern(&path("large"), 2, 0, WRITTEN);
    ctl(&disk, &["commit", "--name", "c"]).ok();
    job(&disk, "complete", &["c"]).ends(2);
    assert_eq!(disk.stop().code(), Some(0));
    let read_only = serve(&base, &["--read-only"]);
    let refused = ctl(&read_only, &["mirror", "--complete", text(&path("copy"))]);
    refused.ends(11).says("reading only");
    assert!(!path("copy").exists());
    ctl(&read_only, &["mirror", "--name", "m", text(&path("copy"))]).ok();
    job(&read_only, "cancel", &["m"]).ok();
    job(&read_only, "wait", &["m"]).ok();
    assert_eq!(read_only.stop().code(), Some(0));
    assert_pattern(&images::reference(&path("copy"), "qcow2"), 2, 0, WRITTEN);
}

/// A file system that is too small for a copy, and a target on it.
pub(super) fn on_a_small_file_system(directory: &TempDir) -> (FileSystem, PathBuf) {
    let small = directory.path().join("small");
    fs::create_dir(&small).expect("a directory");
    (FileSystem::tmpfs(&small, 8 * MIB), small.join("copy.qcow2"))
}

/// Makes the file system of such a target larger.
pub(super) fn has_room_now(copy: &Path) {
    let place = copy.parent().expect("a directory");
    ok_words(&["mount", "-o", "remount,size=64M", text(place)]);
}

#[test]
fn a_full_target_lets_the_job_rest_and_no_client() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let (file_system, copy) = on_a_small_file_system(&directory);
    // A script that waits for the end hears of it.
    ctl(&disk, &["mirror", "--complete", text(&copy)]).ends(12).says("No space left");
    assert!(!copy.exists());
    ctl(&disk, &["mirror", "--background", "--name", "full", text(&copy)]).ok();
    let why = until_state(&disk, "full", "paused")["why"].to_string();
    assert!(why.contains("No space left"), "{why}");
    write(&disk, 5, 48 * MIB, MIB);
    has_room_now(&copy);
    job(&disk, "resume", &["full"]).ok();
    job(&disk, "complete", &["full"]).ok();
    job(&disk, "wait", &["full"]).ok();
    assert_eq!(layers(&disk), ["copy.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_pattern(disk.path(), 5, 48 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&copy);
    file_system.unmount();
}

#[test]
fn a_mirror_that_is_cancelled_while_it_copies_leaves_the_disk() {
    if !needs_root() {
        return;
    }
    let (disk, directory, _, over) = sample();
    for (number, way) in ["running", "paused"].into_iter().enumerate() {
        let copy = directory.path().join(format!("copy{number}.qcow2"));
        let words = ["mirror", "--background", "--name", way, "--speed", "2M", text(&copy)];
        ctl(&disk, &words).ok();
        until(LIMIT, || (seen(&disk, way)["done"].as_u64() >= Some(MIB)).then_some(()))
            .expect("it copies");
        if way == "paused" {
            job(&disk, "pause", &[way]).ok();
        }
        // Told to switch over, it is not ready for that, and can be given up.
        job(&disk, "complete", &[way]).ok();
        job(&disk, "cancel", &[way]).ok();
        job(&disk, "wait", &[way]).ends(1).says("cancelled");
    }
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&over);
}

/// A server of an empty raw image over NBD, at a Unix socket.
fn server(directory: &Path) -> (Daemon, PathBuf, String) {
    let [image, socket] = ["export.raw", "export.sock"].map(|name| directory.join(name));
    if !image.exists() {
        images::sparse(&image, SIZE);
    }
    let words = [text(&image), "-f", "raw", "--nbd", text(&socket)];
    let daemon = Daemon::of(&mut serve_command(&words));
    (daemon, image, format!("nbd+unix:///?socket={}", text(&socket)))
}

#[test]
fn a_disk_switches_over_to_an_export_and_finds_its_server_again() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let other = directory.path().join("other");
    fs::create_dir(&other).expect("a directory");
    let (daemon, image, uri) = server(&other);
    let mut written = 0;
    written += beside_a_writer(&disk, || {
        ctl(&disk, &["mirror", "--complete", "-f", "raw", &uri]).ok();
    });
    let value = ctl(&disk, &["stats", "--json"]).ok().json();
    assert_eq!(value["layers"][0]["filename"], uri.as_str());
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    // The helper process connects again to the server that the user named.
    daemon.kill();
    fs::remove_file(other.join("export.sock")).expect("remove");
    let (daemon, ..) = server(&other);
    write(&disk, 8, 62 * MIB, MIB);
    assert_pattern(disk.path(), 8, 62 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    daemon.stop(&[]);
    let expected = pattern(2, 0, 1 << 20);
    assert!(piece(&image, 0, expected.len()) == expected);
    assert_pattern(&image, 8, 62 * MIB, MIB);
    assert_written(&image, written);
}

#[test]
fn a_target_that_dies_leaves_the_disk_where_it_is() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let other = directory.path().join("other");
    fs::create_dir(&other).expect("a directory");
    let (daemon, _, uri) = server(&other);
    ctl(&disk, &["mirror", "-f", "raw", "--name", "m", "--on-error", "report", &uri]).ok();
    daemon.kill();
    write(&disk, 9, 52 * MIB, MIB);
    job(&disk, "complete", &["m"]).ok();
    write(&disk, 9, 53 * MIB, MIB);
    job(&disk, "cancel", &["m"]).ok();
    job(&disk, "wait", &["m"]).ends(1);
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_pattern(disk.path(), 9, 52 * MIB, 2 * MIB);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_server_that_says_nothing_holds_up_no_other_command() {
    if !needs_root() {
        return;
    }
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (disk, _directory, ..) = sample();
    let to = format!("nbd://{}/", silent.local_addr().expect("an address"));
    let mut client = Command::new(program());
    let words = ["ctl", disk.text(), "mirror", &to, "--format", "raw"];
    let mut client = Process::spawn(client.args(words));
    let connected = silent.accept().expect("it connects");
    // Answered within 5 s, or not at all; the connection is given up after 10 s.
    ctl(&disk, &["stats"]).ok();
    assert!(client.ended().is_none(), "{}", client.output());
    drop(connected);
    let finished = client.finish(LIMIT);
    assert_ne!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(layers(&disk), ["over.qcow2", "base.qcow2"]);
    assert_eq!(disk.stop().code(), Some(0));
}
