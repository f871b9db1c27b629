//! What the host kernel cannot serve: with `--accel require` a refusal with one clear line, with
//! `auto` the queue threads and the same reason.

use std::fs::File;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{alone, needs};
use ringdisk_testkit::model::{Discards, Request, bits};
use ringdisk_testkit::mount::{for_user, text};
use ringdisk_testkit::process::{command, ok_words};

use crate::common::accel::{
    PLAIN, REQUIRED, accelerated_at, assert_by_kernel, assert_by_threads, assert_by_threads_where,
    assert_refused, becomes, counted, has_module, required,
};
use crate::common::disks::disk;
use crate::common::program;
use crate::common::serving::{Daemon, Place, SIZE, ctl, load, serve_command, stats};

/// The user and group `nobody`.
const NOBODY: u32 = 65534;
/// It is not there, or not as it should be.
const UNSUPPORTED: i32 = 11;
const USAGE: i32 = 2;

/// Another module in place of the one that was loaded, which comes back when this is dropped.
struct OtherModule {
    usual: PathBuf,
    _alone: ringdisk_testkit::limits::Alone,
}

impl OtherModule {
    /// Loads the module of this name from the directory `RINGDISK_TEST_MODULES`
    /// (tests/vm/suites/vhost-blk.sh makes it).
    fn load(name: &str) -> Option<OtherModule> {
        if !has_module() {
            return None;
        }
        let directory = std::env::var_os("RINGDISK_TEST_MODULES").map(PathBuf::from);
        if !needs("other modules (tests/vm/run vhost-blk)", directory.is_some()) {
            return None;
        }
        let directory = directory?;
        let _alone = alone();
        ok_words(&["rmmod", "vhost_blk"]);
        let module = OtherModule { usual: directory.join("usual.ko"), _alone };
        ok_words(&["insmod", text(&directory.join(name))]);
        Some(module)
    }
}

impl Drop for OtherModule {
    fn drop(&mut self) {
        let run = |words: &[&str]| drop(command(words).status());
        run(&["rmmod", "vhost_blk"]);
        run(&["insmod", text(&self.usual)]);
    }
}

/// A module that does not fit is refused with `why`, or the queue threads serve, and the module is
/// not in use afterwards.
fn other_module(name: &str, why: &str) {
    let Some(_module) = OtherModule::load(name) else { return };
    let place = Place::new("raw");
    let finished = assert_refused(&place, required(&place, &PLAIN), UNSUPPORTED, why);
    assert!(finished.stderr.contains("vhost_blk"), "{}", finished.output());
    let daemon = place.start(&PLAIN);
    ctl(&place.socket, &["accel", "on"]).ends(USAGE).says(why);
    assert_by_threads(&place, daemon, why);
    // The disk of a process that was told so is not kept.
    assert_eq!(
        std::fs::read_to_string("/sys/module/vhost_blk/refcnt").expect("it is loaded").trim(),
        "0"
    );
}

#[test]
fn a_module_of_another_version_is_not_used() {
    other_module("version.ko", "build both from the same sources");
}

#[test]
fn a_module_for_another_vhost_is_not_used() {
    other_module("layout.ko", "was built for another vhost");
}

#[test]
fn a_module_that_is_gone_is_named() {
    let Some(module) = OtherModule::load("usual.ko") else { return };
    ok_words(&["rmmod", "vhost_blk"]);
    let place = Place::new("raw");
    assert_refused(
        &place,
        required(&place, &PLAIN),
        UNSUPPORTED,
        "the module vhost_blk is not loaded",
    );
    let daemon = place.start(&PLAIN);
    let vm = place.vm(true);
    ok_words(&["insmod", text(&module.usual)]);
    // It has looked, and is in a sandbox by now.
    ctl(&place.socket, &["accel", "on"]).ends(USAGE).says("--upgrade");
    drop(vm);
    assert_by_threads(&place, daemon, "modprobe vhost_blk");
    ok_words(&["rmmod", "vhost_blk"]);
    let old = place.start(&PLAIN);
    let mut vm = place.vm(false);
    ok_words(&["insmod", text(&module.usual)]);
    let new = place.start(&[&PLAIN[..], &["--upgrade"]].concat());
    old.ends(0);
    becomes(&place, true);
    assert_eq!(vm.status(0, Request::write(0, vec![1; 4096])), 0);
    assert_by_kernel(&place, 1);
    drop(vm);
    new.stop(&[&place.socket]);
}

/// `ringdisk serve WORDS…` by a user who may not open the device.
fn as_nobody(program: &Path, place: &Place, words: &[&str]) -> Command {
    let mut out = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    out.arg(program).arg("serve").args(place.words()).args(PLAIN).args(words);
    out.args(["--vhost-user-blk", text(&place.socket)]).env_remove("NOTIFY_SOCKET");
    out
}

#[test]
fn a_device_that_may_not_be_opened_is_named() {
    if !has_module() {
        return;
    }
    let (directory, program) = for_user(&program(), NOBODY);
    let image = directory.path().join("disk");
    images::sparse(&image, SIZE);
    chown(&image, Some(NOBODY), Some(NOBODY)).expect("chown");
    let mut place = Place::on(&image);
    place.socket = directory.path().join("socket");
    let require = as_nobody(&program, &place, &["--accel", "require"]);
    assert_refused(&place, require, UNSUPPORTED, "/dev/vhost-blk: not allowed");
    let daemon = Daemon::of(&mut as_nobody(&program, &place, &[]));
    assert_by_threads(&place, daemon, "GROUP=\"ringdisk\", MODE=\"0660\"");
    // Whom the device belongs to.
    let mode = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions("/dev/vhost-blk", permissions).expect("chmod");
    };
    mode(0o666);
    let daemon = Daemon::of(&mut as_nobody(&program, &place, &["--accel", "require"]));
    let mut vm = place.vm(true);
    mode(0o600);
    assert_eq!(vm.status(0, Request::write(0, vec![1; 4096])), 0);
    assert_by_kernel(&place, 1);
    drop(vm);
    daemon.stop(&[&place.socket]);
}

/// A file system without direct I/O.
struct Ramfs(tempfile::TempDir);

impl Ramfs {
    fn new() -> Ramfs {
        let directory = ringdisk_testkit::mount::scratch();
        ok_words(&["mount", "-t", "ramfs", "none", text(directory.path())]);
        Ramfs(directory)
    }
}

impl Drop for Ramfs {
    fn drop(&mut self) {
        drop(command(&["umount", text(self.0.path())]).status());
    }
}

#[test]
fn an_image_without_direct_io_is_served_through_the_page_cache_or_refused() {
    if !has_module() {
        return;
    }
    let ramfs = Ramfs::new();
    let image = ramfs.0.path().join("disk");
    images::sparse(&image, SIZE);
    let place = Place::on(&image);
    let through = "the image is used through the page cache";
    assert_refused(&place, required(&place, &["--cache", "writeback"]), USAGE, through);
    let finished = assert_refused(&place, required(&place, &PLAIN), USAGE, through);
    assert!(
        finished.stderr.contains("is on a file system without O_DIRECT"),
        "{}",
        finished.output()
    );
    let daemon = place.start(&PLAIN);
    assert!(daemon.process.output().contains("is on a file system without O_DIRECT"));
    // The file system cannot punch holes: a discard does nothing.
    assert_by_threads_where(&place, daemon, through, Discards::Hint);
}

#[test]
fn an_image_of_no_whole_blocks_is_served_by_threads_or_refused() {
    if !has_module() {
        return;
    }
    for (bytes, words) in [(100, vec![]), (512, vec!["--logical-block-size", "4096"])] {
        let place = Place::new("raw");
        let file = File::options().write(true).open(&place.image).expect("the image");
        file.set_len(SIZE + bytes).expect("another size");
        let words = [&PLAIN[..], &words].concat();
        let why = "which is no multiple of its blocks";
        assert_refused(&place, required(&place, &words), USAGE, why);
        let daemon = place.start(&words);
        assert_by_threads(&place, daemon, why);
    }
}

#[test]
fn a_device_is_the_kernels_alone_or_not_at_all() {
    let Some(disk) = disk("memory") else { return };
    let place = &disk.place;
    let claim = || {
        let mut options = File::options();
        let flags = rustix::fs::OFlags::EXCL.bits().cast_signed();
        options.read(true).write(true).custom_flags(flags).open(&place.image)
    };
    // As a mounted file system has it.
    let held = claim().expect("the device");
    assert_by_threads(place, place.start(&PLAIN), "another process has it exclusively");
    drop(held);
    let (daemon, mut vm) = accelerated_at(place, &[]);
    assert_eq!(claim().expect_err("it is taken").raw_os_error(), Some(16));
    assert_eq!(vm.status(0, Request::write(0, vec![1; 4096])), 0);
    drop(vm);
    daemon.stop(&[&place.socket]);
    drop(claim().expect("the device"));
}

/// A disk that may only be read is read by the kernel, and no write passes.
fn read_only(place: &Place) {
    let (daemon, mut vm) = accelerated_at(place, &["--read-only"]);
    assert!(vm.has(bits::READ_ONLY));
    let bytes = images::piece(&place.image, 64 << 10, 64 << 10);
    for queue in 0..2 {
        assert_eq!(vm.status(queue, Request::write(128, vec![0xff; 4096])), 1);
        let done = vm.run(queue, Request::read(128, 64 << 10));
        assert!(done.status == 0 && done.data == bytes);
    }
    let shown = assert_by_kernel(place, 2);
    assert_eq!(shown["on"], true);
    assert!(counted(&shown, "writes") == 0 || counted(&shown, "errors") >= 2, "{shown}");
    drop(vm);
    daemon.stop(&[&place.socket]);
    assert!(images::piece(&place.image, 64 << 10, 64 << 10) == bytes);
}

#[test]
fn an_image_that_may_only_be_read_is_read_by_the_kernel() {
    if !has_module() {
        return;
    }
    let place = Place::new("raw");
    images::raw(&place.image, SIZE, 5);
    read_only(&place);
    // Nobody asked for that: the disk is not what was said.
    let readable = std::fs::Permissions::from_mode(0o444);
    std::fs::set_permissions(&place.image, readable).expect("chmod");
    read_only(&place);
}

/// A block device that may not be written until this is dropped.
struct SetReadOnly<'a>(&'a str);

impl SetReadOnly<'_> {
    fn new(path: &str) -> SetReadOnly<'_> {
        ok_words(&["blockdev", "--setro", path]);
        SetReadOnly(path)
    }
}

impl Drop for SetReadOnly<'_> {
    fn drop(&mut self) {
        drop(command(&["blockdev", "--setrw", self.0]).status());
    }
}

#[test]
fn a_block_device_that_may_only_be_read_is_read_by_the_kernel() {
    let Some(disk) = disk("memory") else { return };
    let place = &disk.place;
    let _read_only = SetReadOnly::new(text(&place.image));
    let why = "is a read-only device: use --read-only";
    assert_refused(place, required(place, &PLAIN), 6, why);
    read_only(place);
}

/// A second process on a disk that the kernel serves for the first is refused, with any words; the
/// first does not notice.
fn second_one(place: &Place) {
    let (daemon, mut vm) = accelerated_at(place, &[]);
    let mut load = load(21);
    load.run(&mut vm, 100);
    let other = Place::on(&place.image);
    for words in [&REQUIRED[..], &PLAIN[..]] {
        let socket = ["--vhost-user-blk", text(&other.socket)];
        let words = [&other.words()[..], words, &socket].concat();
        assert_refused(&other, serve_command(&words), 5, "is in use for writing by process");
        load.run(&mut vm, 100);
    }
    load.drain(&mut vm);
    assert_by_kernel(place, 200);
    // Also when the first one was killed with the disk in the kernel, the second may have it at
    // once.
    drop(vm);
    daemon.kill();
    let daemon = Daemon::start(&other.socket, &[&other.words()[..], &REQUIRED].concat());
    let mut vm = other.vm(true);
    load.read_all(&mut vm);
    assert_eq!(stats(&other.socket)["accel"]["on"], true);
    drop(vm);
    daemon.stop(&[&other.socket]);
    other.judge(&mut load);
}

#[test]
fn two_processes_do_not_share_a_file() {
    if has_module() {
        second_one(&Place::new("raw"));
    }
}

#[test]
fn two_processes_do_not_share_a_block_device() {
    let Some(disk) = disk("memory") else { return };
    second_one(&disk.place);
}
