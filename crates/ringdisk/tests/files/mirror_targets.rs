//! Targets of `ctl mirror` at their worst: block devices, servers that are slow, hang or die,
//! targets that vanish; and the end of the disk while they do.

use std::fs;
use std::path::{Path, PathBuf};

use ringdisk_testkit::images::{self, assert_clean};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Loop, Mounted, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, until};
use rustix::process::Signal;

use super::jobs::{
    WRITTEN, assert_pattern, assert_written, beside_a_writer, ctl, here, job, layers, sample, seen,
    until_state, write,
};
use crate::common::MIB;

/// Bytes of the disk of [`sample`].
const SIZE: u64 = 64 * MIB;
const CHAIN: [&str; 2] = ["over.qcow2", "base.qcow2"];

#[track_caller]
fn assert_stays(disk: &Mounted) {
    assert_eq!(layers(disk), CHAIN);
    assert_pattern(disk.path(), 2, 0, WRITTEN);
}

/// A server that others wrote, of a new export, at a Unix socket.
pub(super) struct Server {
    process: Process,
    uri: String,
    image: PathBuf,
}

impl Server {
    fn at(directory: &Path, words: &[&str]) -> Server {
        let [image, socket] = ["export.raw", "export.sock"].map(|name| directory.join(name));
        if !image.exists() {
            images::sparse(&image, SIZE);
        }
        let _ = fs::remove_file(&socket);
        let process = if words[0] == "qemu-nbd" {
            let own = ["-f", "raw", "--persistent", "--shared=9", "-k", text(&socket)];
            Process::spawn(command(words).args(own).arg(&image))
        } else {
            let own = ["--foreground", "--unix", text(&socket)];
            let file = format!("file={}", text(&image));
            let (filter, settings) = words.split_at(1);
            let mut nbdkit = command(&["nbdkit"]);
            nbdkit.args(own).args(filter).arg("file").arg(file).args(settings);
            Process::spawn(&mut nbdkit)
        };
        until(LIMIT, || socket.exists().then_some(())).expect("it listens");
        Server { process, uri: format!("nbd+unix:///?socket={}", text(&socket)), image }
    }

    pub(super) fn qemu(directory: &Path) -> Server {
        Server::at(directory, &["qemu-nbd"])
    }

    pub(super) fn uri(&self) -> &str {
        &self.uri
    }

    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }
}

fn is_there(program: &str) -> bool {
    needs_root() && needs(program, has(program))
}

#[test]
fn a_disk_moves_to_a_block_device_and_goes_on_there() {
    if !needs_root() {
        return;
    }
    let (disk, directory, _, over) = sample();
    let file = directory.path().join("device.raw");
    images::raw(&file, SIZE, 9);
    let Some(device) = Loop::attach(&file, &["--direct-io=on"]) else { return };
    // What is there is overwritten only where the user says so, and that it is raw.
    ctl(&disk, &["mirror", text(device.device())]).ends(2).says("--existing");
    assert_stays(&disk);
    let words = ["mirror", "--complete", "--existing", "-f", "raw", text(device.device())];
    let written = beside_a_writer(&disk, || {
        ctl(&disk, &words).ok();
    });
    let top = ctl(&disk, &["stats", "--json"]).ok().json()["layers"][0]["filename"].clone();
    assert_eq!(top, text(device.device()));
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_written(disk.path(), written);
    write(&disk, 5, 62 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    drop(device);
    assert_pattern(&file, 2, 0, WRITTEN);
    assert_pattern(&file, 5, 62 * MIB, MIB);
    assert_written(&file, written);
    assert_clean(&over);
}

#[test]
fn a_device_that_cannot_be_written_or_is_too_small_is_refused() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    for (name, len, options, why) in [
        ("ro.raw", SIZE, &["--read-only"][..], "is a read-only device"),
        ("small.raw", SIZE - 4096, &[], "make the target as large"),
    ] {
        let file = directory.path().join(name);
        images::sparse(&file, len);
        let Some(device) = Loop::attach(&file, options) else { return };
        let words = ["mirror", "--complete", "--existing", "-f", "raw", text(device.device())];
        let refused = ctl(&disk, &words);
        assert_ne!(refused.code, 0, "{name}");
        assert!(refused.err.contains(why), "{name}: {}", refused.err);
        assert_stays(&disk);
    }
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn other_names_of_the_image_are_no_target() {
    if !needs_root() {
        return;
    }
    let (disk, directory, base, over) = sample();
    let before = fs::read(&base).expect("read");
    let path = |name: &str| directory.path().join(name);
    std::os::unix::fs::symlink(&over, path("link")).expect("a link");
    fs::hard_link(&over, path("hard")).expect("a name");
    fs::hard_link(&base, path("below")).expect("a name");
    for (name, why) in [
        ("link", "the image of the disk itself"),
        ("hard", "the image of the disk itself"),
        ("below", "an image of the chain"),
    ] {
        let other = path(name);
        let words = ["mirror", "--existing", "--complete", "-f", "qcow2", text(&other)];
        ctl(&disk, &words).ends(2).says(why);
    }
    // One above the disk would be written while the disk is below it.
    let above = path("above.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-u", "-F", "qcow2", "-b", text(&over)];
    let create = [&create[..], &[text(&above), "64M"]].concat();
    crate::common::tools::qemu_img(Path::new("/"), &create).ok();
    let refused = ctl(&disk, &["mirror", "--existing", "--complete", text(&above)]);
    assert_ne!(refused.code, 0, "{}", refused.err);
    assert_stays(&disk);
    assert_eq!(disk.stop().code(), Some(0));
    assert!(fs::read(&base).expect("read") == before);
}

#[test]
fn a_slow_server_takes_the_disk_in_the_end() {
    if !is_there("nbdkit") {
        return;
    }
    let (disk, directory, ..) = sample();
    let slow = ["--filter=delay", "delay-write=20ms", "delay-zero=20ms"];
    let server = Server::at(directory.path(), &slow);
    let written = beside_a_writer(&disk, || {
        ctl(&disk, &["mirror", "--complete", "-f", "raw", &server.uri]).ok();
    });
    assert_pattern(disk.path(), 2, 0, WRITTEN);
    assert_written(disk.path(), written);
    assert_eq!(disk.stop().code(), Some(0));
    assert_pattern(&server.image, 2, 0, WRITTEN);
    assert_written(&server.image, written);
}

#[test]
fn a_server_that_allows_no_writes_is_refused() {
    if !is_there("qemu-nbd") {
        return;
    }
    let (disk, directory, ..) = sample();
    let server = Server::at(directory.path(), &["qemu-nbd", "--read-only"]);
    let refused = ctl(&disk, &["mirror", "--complete", "-f", "raw", &server.uri]);
    assert_ne!(refused.code, 0, "{}", refused.out);
    assert!(refused.err.contains("read"), "{}", refused.err);
    assert_stays(&disk);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_server_that_dies_while_it_is_copied_to_ends_nothing_but_the_mirror() {
    if !is_there("qemu-nbd") {
        return;
    }
    let (disk, directory, _, over) = sample();
    let server = Server::qemu(directory.path());
    let words = ["mirror", "--background", "--name", "m", "--speed", "4M", "-f", "raw"];
    ctl(&disk, &[&words[..], &[&server.uri]].concat()).ok();
    until(LIMIT, || (seen(&disk, "m")["done"].as_u64() >= Some(MIB)).then_some(()))
        .expect("it copies");
    server.signal(Signal::KILL);
    job(&disk, "limit", &["m", "0"]).ok();
    write(&disk, 5, 40 * MIB, MIB);
    job(&disk, "cancel", &["m"]).ok();
    job(&disk, "wait", &["m"]).ends(1).says("cancelled");
    assert_stays(&disk);
    assert_pattern(disk.path(), 5, 40 * MIB, MIB);
    // Nothing of it is in the way of the next one.
    let copy = directory.path().join("copy.qcow2");
    ctl(&disk, &["mirror", "--complete", text(&copy)]).ok();
    assert_pattern(disk.path(), 5, 40 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&copy);
    assert_clean(&over);
}

/// In the last step the server stands still: clients go on with the disk as it was. It comes back,
/// and the step is made; or it dies, and nothing is lost.
#[test]
fn a_server_that_hangs_in_the_last_step_loses_nothing() {
    if !is_there("qemu-nbd") {
        return;
    }
    for comes_back in [true, false] {
        let (disk, directory, _, over) = sample();
        let server = Server::qemu(directory.path());
        ctl(&disk, &["mirror", "--name", "m", "-f", "raw", &server.uri]).ok();
        until_state(&disk, "m", "ready");
        server.signal(Signal::STOP);
        job(&disk, "complete", &["m"]).ok();
        // Writes are answered, and the disk is where it was.
        write(&disk, 5, 40 * MIB, MIB);
        write(&disk, 6, 41 * MIB, MIB);
        assert_stays(&disk);
        if comes_back {
            server.signal(Signal::CONT);
            job(&disk, "wait", &["m"]).ok();
            assert_ne!(layers(&disk), CHAIN);
        } else {
            server.signal(Signal::KILL);
            job(&disk, "cancel", &["m"]).ok();
            job(&disk, "wait", &["m"]).ends(1);
            assert_stays(&disk);
        }
        assert_pattern(disk.path(), 5, 40 * MIB, MIB);
        assert_pattern(disk.path(), 6, 41 * MIB, MIB);
        assert_eq!(disk.stop().code(), Some(0));
        if comes_back {
            assert_pattern(&server.image, 2, 0, WRITTEN);
            assert_pattern(&server.image, 6, 41 * MIB, MIB);
        } else {
            let left = images::reference(&over, "qcow2");
            assert_pattern(&left, 6, 41 * MIB, MIB);
        }
    }
}

/// The disk ends while its target does not answer.
#[test]
fn the_end_of_the_disk_does_not_wait_for_a_server_that_hangs() {
    if !is_there("qemu-nbd") {
        return;
    }
    for way in ["copying", "ready", "umount"] {
        let (disk, directory, _, over) = sample();
        let server = Server::qemu(directory.path());
        let speed: &[&str] = if way == "copying" { &["--speed", "4M"] } else { &[] };
        let words = [&["mirror", "--background", "--name", "m", "-f", "raw"], speed].concat();
        ctl(&disk, &[&words[..], &[&server.uri]].concat()).ok();
        if way == "copying" {
            let begun = || (seen(&disk, "m")["done"].as_u64() >= Some(MIB)).then_some(());
            until(LIMIT, begun).expect("it copies");
        } else {
            until_state(&disk, "m", "ready");
        }
        server.signal(Signal::STOP);
        write(&disk, 5, 40 * MIB, MIB);
        // Something is on its way to the server by then.
        job(&disk, "limit", &["m", "0"]).ok();
        ringdisk_testkit::process::pause(std::time::Duration::from_millis(300));
        if way == "umount" {
            here(&["umount", disk.text()]).ok();
            assert!(mount_at(disk.path()).is_none());
        } else {
            assert_eq!(disk.stop().code(), Some(0), "{way}");
        }
        server.signal(Signal::KILL);
        assert_clean(&over);
        let left = images::reference(&over, "qcow2");
        assert_pattern(&left, 2, 0, WRITTEN);
        assert_pattern(&left, 5, 40 * MIB, MIB);
    }
}

/// A file that has lost its name would not be found again.
#[test]
fn a_target_whose_name_has_gone_is_not_switched_over_to() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let copy = directory.path().join("copy.qcow2");
    ctl(&disk, &["mirror", "--name", "m", text(&copy)]).ok();
    fs::remove_file(&copy).expect("remove");
    job(&disk, "complete", &["m"]).ok();
    job(&disk, "wait", &["m"]).ends(3);
    assert_stays(&disk);
    write(&disk, 5, 40 * MIB, MIB);
    ctl(&disk, &["mirror", "--complete", text(&copy)]).ok();
    assert_pattern(disk.path(), 5, 40 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&copy);
}

/// A copy that is left is an image that nothing is wrong with.
#[test]
fn a_qcow2_copy_that_is_left_is_sound() {
    if !needs_root() {
        return;
    }
    let (disk, directory, ..) = sample();
    let copy = directory.path().join("copy.qcow2");
    ctl(&disk, &["mirror", "--name", "m", text(&copy)]).ok();
    write(&disk, 5, 40 * MIB, MIB);
    job(&disk, "cancel", &["m"]).ok();
    job(&disk, "wait", &["m"]).ok();
    assert_clean(&copy);
    let left = images::reference(&copy, "qcow2");
    assert_pattern(&left, 2, 0, WRITTEN);
    assert_pattern(&left, 5, 40 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
}
