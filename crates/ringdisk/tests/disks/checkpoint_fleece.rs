//! Directories in which the old data of a checkpoint cannot be kept: missing, not writable, full,
//! and on a file system of FUSE. The checkpoint is refused or fails, and never the client.

use std::fs;
use std::path::Path;

use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, text};
use ringdisk_testkit::process::{command, ok_words, run};
use serde_json::Value;

use crate::common::serve_raw;
use crate::common::serving::{Daemon, Place, ctl, serve_command};
use crate::common::tools::{Ran, names, ringdisk};

/// A disk of NBD clients that is full of data.
struct Disk {
    place: Place,
    daemon: Daemon,
}

impl Disk {
    fn start() -> Disk {
        let place = Place::new("qcow2");
        let words = [text(&place.image), "-f", "qcow2", "--nbd", text(&place.socket)];
        let daemon = Daemon::of(&mut serve_command(&[&words[..], &["--sandbox", "on"]].concat()));
        let disk = Disk { place, daemon };
        disk.write(1, "8M");
        disk
    }

    /// The client writes from the beginning of the disk, and reads it back.
    fn write(&self, byte: u8, len: &str) {
        let uri = format!("nbd+unix:///?socket={}", text(&self.place.socket));
        let (write, read) = (format!("write -P {byte} 0 {len}"), format!("read -P {byte} 0 {len}"));
        let out = ok_words(&["qemu-io", "-f", "raw", "-c", &write, "-c", &read, &uri]);
        assert!(!out.contains("failed"), "{out}");
    }

    fn begin(&self, directory: &Path, words: &[&str]) -> Ran {
        let own = ["checkpoint", "c1", "--bitmap", "b1", "--fleece-dir", text(directory), "--json"];
        ctl(&self.place.socket, &[&own[..], words].concat())
    }

    fn listed(&self) -> Value {
        ctl(&self.place.socket, &["checkpoint", "--list", "--json"]).ok().json()
    }

    /// Nothing of a checkpoint is there, and one can be begun elsewhere.
    fn goes_on(&self, byte: u8) {
        let list = self.listed();
        let none = Value::Array(Vec::new());
        assert_eq!((&list["checkpoints"], &list["image"]["bitmaps"]), (&none, &none));
        self.write(byte, "1M");
    }

    /// Gives the place of its files, which go when that is dropped.
    fn stop(self) -> Place {
        self.daemon.stop(&[&self.place.socket]);
        ringdisk_testkit::images::assert_clean(&self.place.image);
        self.place
    }
}

/// Who has no room: the file system, or the file, which may have so much and no more.
const OF_ALL: &str = "the file system of the fleecing file is full";
const OWN: &str = "the fleecing file is full";

/// A checkpoint whose old data finds no room: the client goes on, readers hear of it, and its end
/// leaves the bitmaps as they were.
fn fails(disk: &Disk, directory: &Path, words: &[&str], why: &str) {
    let begun = disk.begin(directory, words).ok().json();
    let uri = begun["disks"][0]["uri"].as_str().expect("a URI");
    disk.write(7, "4M");
    let list = disk.listed();
    let failed = list["checkpoints"][0]["failed"].as_str().unwrap_or_default().to_owned();
    assert!(failed.contains(why), "{list}");
    let copy = run(command(&["nbdcopy", uri, "null:"]));
    assert_ne!(copy.code(), Some(0), "readers get errors");
    assert!(disk.daemon.process.output().contains("checkpoint 'c1'"), "the log says so");
    let end = ctl(&disk.place.socket, &["checkpoint", "--end", "c1"]);
    end.ok().says("could not be read").says("its bitmaps were merged");
    disk.goes_on(8);
}

#[test]
fn a_missing_directory_and_one_that_is_a_file_are_refused() {
    let disk = Disk::start();
    let file = disk.place.path("file");
    fs::write(&file, "").expect("a file");
    for directory in [&disk.place.path("missing"), &file] {
        // With a size, and without one: half of what is free there.
        for words in [&[][..], &["--fleece-max", "1M"]] {
            let refused = disk.begin(directory, words);
            assert!(!refused.out.contains("nbd+unix"), "{}", refused.out);
            assert_ne!(refused.code, 0);
            refused.says(text(directory)).says("--fleece-dir names another directory");
        }
        let full = disk.place.path("full.qcow2");
        let words = ["backup", text(&disk.place.socket), text(&full), "--fleece-dir"];
        let refused = ringdisk(Path::new("/"), &[&words[..], &[text(directory)]].concat());
        assert_ne!(refused.code, 0);
        refused.says("--fleece-dir names another directory");
        assert!(!full.exists());
    }
    disk.goes_on(3);
    disk.stop();
}

#[test]
fn a_directory_that_cannot_be_written_is_refused() {
    if !needs_root() {
        return;
    }
    let disk = Disk::start();
    let directory = disk.place.path("read-only");
    let file_system = FileSystem::tmpfs(&directory, 1 << 20);
    ok_words(&["mount", "-o", "remount,ro", text(&directory)]);
    for words in [&[][..], &["--fleece-max", "1M"]] {
        let refused = disk.begin(&directory, words);
        assert_ne!(refused.code, 0);
        refused.says("Read-only file system").says("--fleece-dir names another directory");
    }
    disk.goes_on(3);
    file_system.unmount();
    // A file system of FUSE could be the one that the disk is on.
    let fuse = serve_raw(1 << 20, &[]);
    let refused = disk.begin(fuse.mounted.path(), &["--fleece-max", "1M"]);
    assert_ne!(refused.code, 0);
    refused.says("--fleece-dir");
    disk.goes_on(4);
    disk.stop();
}

#[test]
fn a_directory_that_is_full_or_gets_full_fails_the_checkpoint_alone() {
    if !needs_root() {
        return;
    }
    let disk = Disk::start();
    let directory = disk.place.path("small");
    let file_system = FileSystem::tmpfs(&directory, 1 << 20);
    // Less than what was promised: another program takes the room.
    fails(&disk, &directory, &["--fleece-max", "64M"], OF_ALL);
    // Half of what is free, which is not enough.
    fails(&disk, &directory, &[], OWN);
    let rest = vec![1; 2 << 20];
    let filled = fs::write(directory.join("rest"), &rest);
    assert!(filled.is_err(), "the file system is full");
    // Nothing is free: a checkpoint that may keep nothing.
    fails(&disk, &directory, &[], OWN);
    fails(&disk, &directory, &["--fleece-max", "64M"], OF_ALL);
    fs::remove_file(directory.join("rest")).expect("it is there");
    assert!(names(&directory).is_empty(), "fleecing files have no name");
    // With room it is as ever.
    disk.begin(&directory, &[]).ok();
    disk.write(9, "64k");
    let list = disk.listed();
    assert_eq!(list["checkpoints"][0]["failed"], Value::Null, "{list}");
    ctl(&disk.place.socket, &["checkpoint", "--end", "c1"]).ok();
    let place = disk.stop();
    file_system.unmount();
    drop(place);
}
