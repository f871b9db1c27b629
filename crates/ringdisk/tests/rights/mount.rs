//! A mount in its sandbox: what it still does, what it shows of itself, and what it leaves behind.
//! What the walls keep out is tried in the tests of `ringdisk-sandbox` and `ringdisk-ring`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, STOP, scratch, text, unmount};
use ringdisk_testkit::process::{command, ok_words, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::confined::{assert_confined, children, is_gone};
use crate::common::tools::{Ran, names, ringdisk};
use crate::common::{MIB, open, program, refused, serve_raw};

fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat())
}

/// A qcow2 that is served on a mountpoint that the program makes.
fn served(directory: &Path, args: &[&str]) -> Mounted {
    let image = directory.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let path = directory.join("disk");
    let program = program();
    let words = [&[program.as_str(), "mount"], args, &[text(&image), text(&path)]].concat();
    // `Mounted` makes the mountpoint, and here the program shall.
    let mut all = command(&["sh", "-c", "rm -f -- \"$0\"; exec \"$@\"", text(&path)]);
    all.args(words);
    Mounted::from_command(&mut all, &path)
}

fn write(disk: &Mounted, seed: u64, offset: u64) {
    let file = open(disk.path());
    let bytes = pattern(seed, offset, 1 << 20);
    file.write_all_at(&bytes, offset).and_then(|()| file.sync_all()).expect("write");
}

#[test]
fn a_mount_in_its_sandbox_does_everything_and_leaves_nothing() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let pidfile = directory.path().join("pid");
    let disk = served(directory.path(), &["--pidfile", text(&pidfile)]);
    assert_confined(disk.pid(), true);
    write(&disk, 1, 0);
    let new = directory.path().join("new.qcow2");
    ctl(&disk, &["snapshot", text(&new)]).ok();
    write(&disk, 2, MIB);
    ctl(&disk, &["resize", "+16M"]).ok();
    write(&disk, 3, 20 * MIB);
    ctl(&disk, &["snapshot", "--internal", "inside"]).ok();
    ctl(&disk, &["snapshot", "--internal", "again"]).ok();
    let stats = ctl(&disk, &["stats", "--json"]).ok().json();
    let sandbox = stats["sandbox"].as_str().expect("in force").to_owned();
    assert!(sandbox.contains("seccomp with") && sandbox.contains("rings restricted"), "{sandbox}");
    assert!(ctl(&disk, &["stats"]).ok().out.contains("sandbox: "));
    let topology = ringdisk(Path::new("/"), &["topology", "--json", disk.text()]).ok().json();
    assert!(topology.is_object());
    for (seed, offset) in [(1, 0), (2, MIB), (3, 20 * MIB)] {
        assert!(piece(disk.path(), offset, 1 << 20) == pattern(seed, offset, 1 << 20));
    }
    let inside: Vec<u32> = children(disk.pid());
    assert_eq!(inside.len(), 1, "the helper process");
    let finished = disk.stop();
    // A disk that is slow to flush is no complaint.
    let mut said = finished.stderr.lines().filter(|line| !line.contains("page cache still holds"));
    assert_eq!((finished.code(), said.next()), (Some(0), None), "{finished:?}");
    assert!(is_gone(inside[0]));
    assert_eq!(names(directory.path()), ["disk.qcow2", "new.qcow2"]);
    assert_clean(&new);
    assert_clean(&directory.path().join("disk.qcow2"));
}

#[test]
fn a_chain_is_committed_and_gets_another_backing_file() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let disk = served(directory.path(), &["--allow-path", text(directory.path())]);
    write(&disk, 1, 0);
    let [new, copy] = ["new.qcow2", "copy.qcow2"].map(|name| directory.path().join(name));
    ctl(&disk, &["snapshot", text(&new)]).ok();
    fs::copy(directory.path().join("disk.qcow2"), &copy).expect("copy");
    ctl(&disk, &["backing", "-F", "qcow2", text(&copy)]).ok();
    write(&disk, 2, MIB);
    ctl(&disk, &["commit"]).ok();
    for (seed, offset) in [(1, 0), (2, MIB)] {
        assert!(piece(disk.path(), offset, 1 << 20) == pattern(seed, offset, 1 << 20));
    }
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&copy);
}

#[test]
fn an_overlay_elsewhere_needs_a_word() {
    if !needs_root() {
        return;
    }
    let (directory, other) = (scratch(), scratch());
    let new = other.path().join("new.qcow2");
    let disk = served(directory.path(), &[]);
    if disk_has_landlock(&disk) {
        ctl(&disk, &["snapshot", text(&new)]).ends(6).says("--allow-path");
    }
    write(&disk, 1, 0);
    assert_eq!(disk.stop().code(), Some(0));
    fs::remove_file(directory.path().join("disk.qcow2")).expect("anew");
    let disk = served(directory.path(), &["--allow-path", text(other.path())]);
    ctl(&disk, &["snapshot", text(&new)]).ok();
    write(&disk, 1, 0);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&new);
}

fn disk_has_landlock(disk: &Mounted) -> bool {
    let stats = ctl(disk, &["stats", "--json"]).ok().json();
    let has = stats["sandbox"].as_str().is_some_and(|text| text.starts_with("landlock"));
    needs("a kernel with landlock", has)
}

#[test]
fn strict_takes_new_files_away() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let probe = serve_raw(MIB, &[]);
    if !disk_has_landlock(&probe.mounted) {
        return;
    }
    let disk = served(directory.path(), &["--sandbox", "strict"]);
    let new = directory.path().join("new.qcow2");
    ctl(&disk, &["snapshot", text(&new)]).ends(6).says("--sandbox");
    write(&disk, 1, 0);
    ctl(&disk, &["snapshot", "--internal", "inside"]).ok();
    ctl(&disk, &["resize", "+1M"]).ok();
    assert_eq!(disk.stop().code(), Some(0));
    assert_eq!(names(directory.path()), ["disk.qcow2"]);
}

#[test]
fn off_is_off() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &["--sandbox", "off"]);
    assert_confined(disk.mounted.pid(), false);
    assert_eq!(children(disk.mounted.pid()), [0; 0]);
    assert_eq!(ctl(&disk.mounted, &["stats", "--json"]).ok().json()["sandbox"], Value::Null);
    assert_eq!(disk.mounted.stop().code(), Some(0));
    refused(&["--null", "1M", "--sandbox", "perhaps"], &["perhaps"]);
}

#[test]
fn the_helper_ends_with_a_process_that_is_killed_and_the_next_mount_takes_its_place() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::raw(&image, MIB, 1);
    let path = directory.path().join("disk");
    let words = ["--format", "raw", text(&image)];
    let mut disk = Mounted::start_at(&program(), &words, &path);
    let helper = children(disk.pid());
    // As a service manager does.
    let each = helper.iter().map(u32::to_string).collect::<Vec<_>>();
    for signal in ["-TERM", "-INT", "-HUP"] {
        ok_words(&["kill", signal, &each[0]]);
    }
    assert_eq!(children(disk.pid()), helper);
    disk.process().signal(Signal::KILL);
    assert!(helper.iter().all(|pid| is_gone(*pid)));
    assert!(mount_at(&path).is_some(), "left, for the next one");
    let next = Mounted::start_at(&program(), &words, &path);
    assert!(piece(next.path(), 0, 4096) == pattern(1, 0, 4096));
    assert_eq!(next.stop().code(), Some(0));
    unmount(&path);
}

#[test]
fn an_unmount_from_outside_leaves_nothing_either() {
    if !needs_root() {
        return;
    }
    for words in [&["umount"][..], &["umount", "-l"]] {
        let directory = scratch();
        let disk = served(directory.path(), &[]);
        ok_words(&[words, &[disk.text()]].concat());
        assert_eq!(disk.finish().code(), Some(0));
        assert_eq!(names(directory.path()), ["disk.qcow2"]);
    }
}

#[test]
fn a_mount_in_use_goes_lazily_through_the_helper() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &[]);
    let file = open(disk.mounted.path());
    disk.mounted.process().signal(Signal::TERM);
    // It looks at other processes, which the one in the sandbox cannot.
    let us = format!("process {}", std::process::id());
    let path = disk.mounted.path().to_owned();
    let is_so = || (disk.mounted.output().contains(&us) && mount_at(&path).is_none()).then_some(());
    assert_eq!(until(STOP, is_so), Some(()), "{}", disk.mounted.output());
    file.read_at(&mut [0; 10], 0).expect("it is served still");
    drop(file);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}
