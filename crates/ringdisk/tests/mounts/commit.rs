//! `ringdisk ctl commit` and `ringdisk commit`, and what the old command line shows afterwards: the
//! disk as it is, never old data over newer.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images::{self, allocated, assert_clean, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, Loop, Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words};
use rustix::io::Errno;

use crate::common::tools::{Ran, described, qemu_img, ringdisk};
use crate::common::{MIB, program, serve};

fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat())
}

fn write(disk: &Mounted, seed: u64, offset: u64, len: u64) {
    let bytes = pattern(seed, offset, usize::try_from(len).expect("small"));
    let file = crate::common::open(disk.path());
    file.write_all_at(&bytes, offset).and_then(|()| file.sync_all()).expect("write");
}

fn assert_pattern(path: &Path, seed: u64, offset: u64, len: u64) {
    let len = usize::try_from(len).expect("small");
    assert!(piece(path, offset, len) == pattern(seed, offset, len), "{offset}+{len}");
}

fn overlay(image: &Path, base: &Path, size: &str) {
    let words = ["create", "-q", "-f", "qcow2", "-b", text(base), "-F", "qcow2", text(image), size];
    qemu_img(Path::new("/"), &words).ok();
}

/// Base, middle and top of 16 MiB, each with its own byte at its own place and in one that all
/// have.
fn chain(directory: &Path) -> [PathBuf; 3] {
    let names = ["base.qcow2", "middle.qcow2", "top.qcow2"].map(|name| directory.join(name));
    images::qcow2(&names[0], "16M", "");
    overlay(&names[1], &names[0], "16M");
    overlay(&names[2], &names[1], "16M");
    for (number, name) in names.iter().enumerate() {
        let (byte, own) = (number + 1, number + 1);
        let writes = [format!("write -P {byte} 0 1M"), format!("write -P {byte} {own}M 1M")];
        images::qemu_io(name, "qcow2", &writes.each_ref().map(String::as_str));
    }
    names
}

#[test]
fn a_commit_of_an_image_on_a_full_file_system_is_what_the_same_command_line_shows() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let base = directory.path().join("base.qcow2");
    images::qcow2(&base, "64M", "");
    images::qemu_io(&base, "qcow2", &["write -P 1 0 20M"]);
    let host = directory.path().join("host.img");
    images::sparse(&host, 24 * MIB);
    ok_words(&["mkfs.ext4", "-q", "-F", "-m", "0", text(&host)]);
    let small = FileSystem::of(&host, &directory.path().join("small"), "loop");
    let top = small.path().join("top.qcow2");
    overlay(&top, &base, "64M");

    // The base is in another directory.
    let allowed = ["--allow-path", text(directory.path())];
    let disk = serve(&top, &allowed);
    write(&disk, 2, 0, 10 * MIB);
    let mut filler = File::create(small.path().join("filler")).expect("a file");
    let chunk = vec![1; 64 << 10];
    let error = std::iter::repeat_with(|| filler.write_all(&chunk)).find_map(Result::err);
    assert_eq!(error.and_then(|error| error.raw_os_error()), Some(Errno::NOSPC.raw_os_error()));
    drop(filler);
    ctl(&disk, &["commit"]).ok();
    // Clients go on, over what the top had and beside it.
    write(&disk, 3, MIB, 2 * MIB);
    write(&disk, 3, 30 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert!(allocated(&top) < MIB, "its space was not given back");
    assert_clean(&base);
    assert_clean(&top);

    let disk = serve(&top, &allowed);
    assert_pattern(disk.path(), 2, 0, MIB);
    assert_pattern(disk.path(), 3, MIB, 2 * MIB);
    assert_pattern(disk.path(), 2, 3 * MIB, 7 * MIB);
    assert_pattern(disk.path(), 3, 30 * MIB, MIB);
    assert_eq!(piece(disk.path(), 19 * MIB, 4096), [1; 4096]);
    assert_eq!(disk.stop().code(), Some(0));
    small.unmount();
}

#[test]
fn a_commit_two_layers_down_is_what_the_same_command_line_shows() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let [base, middle, top] = chain(directory.path());
    let disk = serve(&top, &[]);
    ctl(&disk, &["commit", "--base", text(&base)]).ok();
    write(&disk, 9, 0, MIB / 2);
    assert_eq!(disk.stop().code(), Some(0));
    for image in [&base, &middle, &top] {
        assert_clean(image);
        let disk = serve(image, &[]);
        assert_pattern(disk.path(), 9, 0, MIB / 2);
        assert_eq!(piece(disk.path(), MIB / 2, 4096), [3; 4096]);
        for own in 1..=3u8 {
            assert_eq!(piece(disk.path(), u64::from(own) * MIB, 4096), [own; 4096], "{image:?}");
        }
        assert_eq!(disk.stop().code(), Some(0));
    }
}

#[test]
fn an_offline_commit_empties_all_that_was_committed() {
    let directory = scratch();
    let d = directory.path();
    let [_, middle, top] = chain(d);
    ringdisk(d, &["commit", "-b", "base.qcow2", "top.qcow2"]).ok();
    // Another process writes to the base: readers of the others see it.
    images::qemu_io(&d.join("base.qcow2"), "qcow2", &["write -P 7 0 1M"]);
    for image in [&middle, &top] {
        assert_clean(image);
        images::qemu_io(image, "qcow2", &["read -P 7 0 1M", "read -P 2 2M 1M", "read -P 3 3M 1M"]);
    }
    // With --drop nothing is touched.
    let other = scratch();
    let d = other.path();
    let [_, middle, top] = chain(d);
    let before = [&middle, &top].map(|image| std::fs::read(image).expect("read"));
    ringdisk(d, &["commit", "-d", "-b", "base.qcow2", "top.qcow2"]).ok();
    assert!(before == [&middle, &top].map(|image| std::fs::read(image).expect("read")));
}

#[test]
fn a_commit_that_would_make_a_raw_base_look_like_qcow2_needs_leave() {
    let directory = scratch();
    let d = directory.path();
    images::raw(&d.join("base.raw"), MIB, 1);
    qemu_img(d, &["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"]).ok();
    std::fs::write(d.join("header"), b"QFI\xfb\0\0\0\x03").expect("write");
    let write = format!("write -s {} 0 512", d.join("header").display());
    images::qemu_io(&d.join("top.qcow2"), "qcow2", &[&write]);
    let base = || std::fs::read(d.join("base.raw")).expect("read");
    let before = base();
    ringdisk(d, &["commit", "top.qcow2"]).ends(6).says("base.raw").says("--base-format raw");
    let wrong = ringdisk(d, &["commit", "--base-format", "qcow2", "top.qcow2"]);
    wrong.ends(2).says("'base.raw' is raw");
    ringdisk(d, &["commit", "-b", "nosuch", "top.qcow2"]).ends(2).says("not in the backing chain");
    ringdisk(d, &["commit", "base.raw", "--format", "raw"]).ends(2).says("no backing file");
    assert!(base() == before);
    ringdisk(d, &["commit", "--base-format", "raw", "top.qcow2"]).ok();
    assert!(base().starts_with(b"QFI\xfb"));
}

#[test]
fn a_commit_into_a_longer_base_does_not_grow_the_disk() {
    let directory = scratch();
    let d = directory.path();
    let [base, middle, top] = chain(d);
    qemu_img(d, &["resize", "-q", "--shrink", "-f", "qcow2", text(&top), "2M"]).ok();
    ringdisk(d, &["commit", "-b", "base.qcow2", "top.qcow2"]).ok();
    for image in ["base.qcow2", "top.qcow2"] {
        assert_eq!(described(d, image)["virtual-size"], 2 * MIB, "{image}");
    }
    assert_clean(&base);
    assert_clean(&middle);
    // What was cut off does not come back.
    ringdisk(d, &["resize", "base.qcow2", "16M"]).ok();
    images::qemu_io(&base, "qcow2", &["read -P 3 0 1M", "read -P 1 1M 1M", "read -P 0 2M 14M"]);
}

#[test]
fn clients_append_while_a_commit_runs() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let base = directory.path().join("base.qcow2");
    images::qcow2(&base, "64M", "");
    let top = directory.path().join("top.qcow2");
    overlay(&top, &base, "64M");
    let disk = serve(&top, &["--growable"]);
    write(&disk, 5, 0, 64 * MIB);
    let mut command = Command::new(program());
    let mut client = Process::spawn(command.args(["ctl", disk.text(), "commit"]));
    let file = crate::common::open(disk.path());
    let mut end = 64 * MIB;
    // While it runs, and once behind it.
    loop {
        let is_over = client.ended().is_some();
        file.write_all_at(&pattern(6, end, 100_000), end).expect("append");
        end += 100_000;
        if is_over {
            break;
        }
    }
    let finished = client.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    file.sync_all().expect("fsync");
    drop(file);
    assert_pattern(disk.path(), 6, 64 * MIB, end - 64 * MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&base);
    let disk = serve(&base, &[]);
    assert_pattern(disk.path(), 5, 0, 64 * MIB);
    assert_pattern(disk.path(), 6, 64 * MIB, end - 64 * MIB);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_snapshot_that_shows_the_image_below_keeps_it_from_being_committed_to() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let [_, middle, top] = chain(directory.path());
    let disk = serve(&top, &[]);
    ctl(&disk, &["snapshot", "--internal", "before"]).ok();
    write(&disk, 9, 0, MIB);
    ctl(&disk, &["commit"]).ends(11).says("'before'").says("top.qcow2");
    assert_eq!(disk.stop().code(), Some(0));
    ringdisk(directory.path(), &["commit", "top.qcow2"]).ends(11).says("'before'");
    let shown = ringdisk(directory.path(), &["snapshot", "-d", "before", "top.qcow2"]);
    shown.ok();
    ringdisk(directory.path(), &["commit", "top.qcow2"]).ok();
    assert_clean(&middle);
}

#[test]
fn an_image_on_a_block_device_is_known_by_any_name_of_the_device() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let file = directory.path().join("file");
    images::raw(&file, MIB, 1);
    let Some(device) = Loop::attach(&file, &[]) else { return };
    // The chain has this name.
    let link = directory.path().join("base");
    std::os::unix::fs::symlink(device.device(), &link).expect("a link");
    let top = directory.path().join("top.qcow2");
    let words = ["create", "-q", "-f", "qcow2", "-b", text(&link), "-F", "raw", text(&top), "1M"];
    qemu_img(Path::new("/"), &words).ok();
    let disk = serve(&top, &["--allow-path", text(device.device())]);
    write(&disk, 2, 0, 4096);
    ctl(&disk, &["commit", "--base", text(device.device())]).ok();
    assert_pattern(disk.path(), 2, 0, 4096);
    assert_eq!(disk.stop().code(), Some(0));
    assert_pattern(&file, 2, 0, 4096);
}
