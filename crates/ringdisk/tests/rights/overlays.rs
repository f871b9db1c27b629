//! What a process in its sandbox reaches of the directory of its image: nothing but its own images.
//! New overlays there are made by the helper process, and every command goes on to work with them.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{FileSystem, Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, command, until};

use crate::common::serving::{self, Daemon, Place, load, meanwhile, serve_command};
use crate::common::tools::{Ran, names, ringdisk};
use crate::common::{MIB, open, program};

fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat())
}

/// `ringdisk mount ARGS… IMAGE` of an image that is there, on a file that is not beside it.
fn served(image: &Path, args: &[&str]) -> Mounted {
    Mounted::start(&program(), &[args, &[text(image)]].concat())
}

/// A qcow2 of 16 MiB in a directory.
fn image_in(directory: &Path) -> std::path::PathBuf {
    let image = directory.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    image
}

fn has_landlock(disk: &Mounted) -> bool {
    let stats = ctl(disk, &["stats", "--json"]).ok().json();
    let has = stats["sandbox"].as_str().is_some_and(|text| text.starts_with("landlock"));
    needs("a kernel with landlock", has)
}

fn write(disk: &Mounted, seed: u64) {
    let file = open(disk.path());
    let at = (seed % 16) * MIB;
    file.write_all_at(&pattern(seed, at, 1 << 20), at)
        .and_then(|()| file.sync_all())
        .expect("write");
}

fn assert_written(disk: &Mounted, seeds: std::ops::RangeInclusive<u64>) {
    for seed in seeds {
        let at = (seed % 16) * MIB;
        assert!(piece(disk.path(), at, 1 << 20) == pattern(seed, at, 1 << 20), "{seed}");
    }
}

/// Every command that changes a chain, on overlays of its own; the image is on top before, and
/// below one overlay afterwards.
///
/// * `write`: called between the commands, with 1 to 9.
fn change_the_chain(
    image: &Path,
    prefix: &str,
    ctl: &dyn Fn(&[&str]) -> Ran,
    write: &mut dyn FnMut(u64),
) {
    let [a, b, c, d, e] =
        ["a", "b", "c", "d", "e"].map(|name| image.with_file_name(format!("{prefix}{name}.qcow2")));
    let [a, b, c, d, e] = [&a, &b, &c, &d, &e].map(|path| text(path));
    write(1);
    ctl(&["snapshot", a]).ok();
    write(2);
    ctl(&["snapshot", b]).ok();
    write(3);
    ctl(&["commit", "--quiet"]).ok();
    write(4);
    ctl(&["snapshot", c]).ok();
    write(5);
    ctl(&["snapshot", d]).ok();
    write(6);
    // A layer between is merged: the one above gets another name for what is below it.
    ctl(&["commit", "--quiet", "--top", c, "--base", a]).ok();
    ctl(&["backing", "-F", "qcow2", a]).ok();
    ctl(&["snapshot", "--internal", "inside"]).ok();
    write(7);
    ctl(&["commit", "--quiet", "--top", a, "--base", text(image)]).ok();
    ctl(&["resize", "+1M"]).ok();
    write(8);
    let stats = ctl(&["stats", "--json"]).ok().json();
    assert_eq!(stats["layers"].as_array().map(Vec::len), Some(2), "{stats}");
    // An internal snapshot of it shows what is below, so it is not merged; a new overlay over it
    // is.
    ctl(&["snapshot", e]).ok();
    write(9);
    ctl(&["commit", "--quiet"]).ok();
}

#[test]
fn a_neighbour_is_not_read_without_a_word() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = image_in(directory.path());
    let neighbour = directory.path().join("neighbour.img");
    images::sparse(&neighbour, 16 * MIB);
    let disk = served(&image, &[]);
    if !has_landlock(&disk) {
        return;
    }
    ctl(&disk, &["backing", "-F", "raw", text(&neighbour)]).ends(6).says("--allow-path");
    assert_eq!(disk.stop().code(), Some(0));
    for (number, allowed) in [directory.path(), &neighbour].into_iter().enumerate() {
        let image = directory.path().join(format!("{number}.qcow2"));
        images::qcow2(&image, "16M", "");
        let disk = served(&image, &["--allow-path", text(allowed)]);
        write(&disk, 1);
        ctl(&disk, &["backing", "-F", "raw", text(&neighbour)]).ok();
        assert_written(&disk, 1..=1);
        assert_eq!(disk.stop().code(), Some(0));
    }
}

#[test]
fn a_mount_does_everything_with_overlays_of_the_helper() {
    if !needs_root() {
        return;
    }
    for cache in ["writeback", "none"] {
        let directory = scratch();
        let image = image_in(directory.path());
        let disk = served(&image, &["-vv", "--cache", cache]);
        change_the_chain(&image, "", &|words| ctl(&disk, words), &mut |seed| write(&disk, seed));
        assert_written(&disk, 1..=9);
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{cache}: {finished:?}");
        // Everything that it opens again is open as it shall be.
        for complaint in ["stays locked", "no buffered descriptor", "the helper process does not"] {
            assert!(!finished.stderr.contains(complaint), "{cache}: {finished:?}");
        }
        let all = ["a", "b", "c", "d", "disk", "e"].map(|name| format!("{name}.qcow2"));
        assert_eq!(names(directory.path()), all, "{cache}");
        for name in all {
            assert_clean(&directory.path().join(name));
        }
    }
}

#[test]
fn a_disk_for_a_machine_does_too_and_after_an_upgrade() {
    if !needs_root() {
        return;
    }
    let place = Place::new("qcow2");
    let words = [&place.words()[..], &["--vhost-user-blk", text(&place.socket)]].concat();
    let old = Daemon::of(&mut serve_command(&words));
    let (mut vm, mut load) = (place.vm(true), load(1));
    let control = |words: &[&str]| serving::ctl(&place.socket, words);
    change_the_chain(&place.image, "old-", &control, &mut |_| load.run(&mut vm, 50));
    // What a process before this one has made is below its own overlays.
    let kept = place.path("kept.qcow2");
    meanwhile(&mut vm, &mut load, || control(&["snapshot", text(&kept)]).ok());
    let new = meanwhile(&mut vm, &mut load, || {
        let new = Daemon::of(&mut serve_command(&[&words[..], &["--upgrade"]].concat()));
        old.ends(0);
        new
    });
    change_the_chain_above(&kept, &control, &mut |_| load.run(&mut vm, 50));
    load.drain(&mut vm);
    load.read_all(&mut vm);
    drop(vm);
    new.stop(&[&place.socket]);
    for name in ["disk", "kept.qcow2", "old-d.qcow2", "x.qcow2", "y.qcow2"] {
        assert_clean(&place.path(name));
    }
}

/// Two overlays over an image on top, and both back into it.
fn change_the_chain_above(top: &Path, ctl: &dyn Fn(&[&str]) -> Ran, write: &mut dyn FnMut(u64)) {
    for name in ["x.qcow2", "y.qcow2"] {
        ctl(&["snapshot", text(&top.with_file_name(name))]).ok();
        write(1);
    }
    ctl(&["commit", "--quiet", "--base", text(top)]).ok();
    write(2);
    ctl(&["commit", "--quiet"]).ok();
    write(3);
}

#[test]
fn an_overlay_belongs_to_whom_it_would_without_a_sandbox() {
    if !needs_root() {
        return;
    }
    let made = |sandbox: &str| {
        let directory = scratch();
        chown(directory.path(), None, Some(12)).expect("chown");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o2775)).expect("chmod");
        let image = image_in(directory.path());
        let path = directory.path().join("disk");
        let program = program();
        let words = ["mount", "--sandbox", sandbox, text(&image), text(&path)];
        let mut all = command(&["sh", "-c", "umask 027; exec \"$@\"", "sh", program.as_str()]);
        let disk = Mounted::from_command(all.args(words), &path);
        let new = directory.path().join("new.qcow2");
        ctl(&disk, &["snapshot", text(&new)]).ok();
        let meta = fs::symlink_metadata(&new).expect("it is there");
        // Another process that would write it is kept out.
        ringdisk(Path::new("/"), &["resize", text(&new), "+1M"]).ends(5);
        assert_eq!(disk.stop().code(), Some(0));
        ringdisk(Path::new("/"), &["resize", text(&new), "+1M"]).ok();
        (meta.mode(), meta.uid(), meta.gid(), meta.nlink())
    };
    let (inside, outside) = (made("on"), made("off"));
    assert_eq!(inside, outside);
    assert_eq!((inside.0 & 0o7777, inside.1, inside.2), (0o640, 0, 12));
}

#[test]
fn a_snapshot_that_fails_leaves_nothing_and_harms_nothing() {
    if !needs_root() {
        return;
    }
    let (outer, other) = (scratch(), scratch());
    let inner = outer.path().join("images");
    fs::create_dir_all(inner.join("below")).expect("mkdir");
    let path = |name: &str| inner.join(name);
    let image = image_in(&inner);
    fs::write(path("there"), "a neighbour").expect("write");
    symlink(path("there"), path("link")).expect("a link");
    symlink(other.path().join("target"), path("dangling")).expect("a link");
    symlink(other.path(), path("elsewhere")).expect("a link");
    let before = names(&inner);
    let disk = served(&image, &[]);
    write(&disk, 1);
    for name in ["there", "link", "dangling", "below"] {
        let refused = ctl(&disk, &["snapshot", text(&path(name))]);
        assert_ne!(refused.code, 0, "{name}: {}", refused.err);
    }
    if has_landlock(&disk) {
        for name in ["../new", "below/new", "below/../../new", "elsewhere/new", "below/.."] {
            let refused = ctl(&disk, &["snapshot", text(&path(name))]);
            assert_ne!(refused.code, 0, "{name}: {}", refused.err);
        }
        ctl(&disk, &["snapshot", text(&path("../new"))]).ends(6).says("--allow-path");
    }
    assert_eq!(names(&inner), before);
    assert_eq!(fs::read(path("there")).expect("read"), b"a neighbour");
    assert_eq!((names(outer.path()), names(other.path())), (vec!["images".to_owned()], vec![]));
    assert_eq!(names(&path("below")), [""; 0]);
    // The same directory by another way to it.
    ctl(&disk, &["snapshot", text(&path("below/../new"))]).ok();
    write(&disk, 2);
    assert_written(&disk, 1..=2);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&path("new"));
}

#[test]
fn without_space_no_overlay_is_left() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let small = FileSystem::tmpfs(&directory.path().join("small"), 4 * MIB);
    let image = image_in(small.path());
    let new = small.path().join("new.qcow2");
    let disk = served(&image, &[]);
    let filler = small.path().join("filler");
    let _ = fs::write(&filler, vec![1; 4 << 20]);
    let refused = ctl(&disk, &["snapshot", text(&new)]);
    assert!(refused.code != 0 && refused.err.contains("No space left"), "{}", refused.err);
    assert!(!new.exists());
    fs::remove_file(&filler).expect("remove");
    ctl(&disk, &["snapshot", text(&new)]).ok();
    write(&disk, 1);
    assert_written(&disk, 1..=1);
    assert_eq!(disk.stop().code(), Some(0));
    small.unmount();
}

#[test]
fn what_was_of_a_disk_that_has_ended_is_held_by_nobody() {
    if !needs_root() {
        return;
    }
    let (one, two) = (Place::new("raw"), scratch());
    let memory = FileSystem::tmpfs(&two.path().join("memory"), 16 * MIB);
    let image = memory.path().join("disk.qcow2");
    images::qcow2(&image, "1M", "");
    let socket = two.path().join("socket");
    let spec = |image: &Path, format: &str, socket: &Path| {
        format!("image={},format={format},socket={}", text(image), text(socket))
    };
    let (first, second) = (spec(&one.image, "raw", &one.socket), spec(&image, "qcow2", &socket));
    let daemon = Daemon::of(&mut serve_command(&["--disk", &first, "--disk", &second]));
    let overlays = ["a", "b"].map(|name| memory.path().join(name));
    for overlay in &overlays {
        serving::ctl(&socket, &["snapshot", text(overlay)]).ok();
    }
    serving::ctl(&socket, &["commit", "--quiet"]).ok();
    // The file is gone with its name: who is not of the chain any more is not held.
    let taken = || {
        let stat = rustix::fs::statvfs(memory.path()).expect("statvfs");
        stat.f_files - stat.f_ffree
    };
    let before = taken();
    fs::remove_file(&overlays[1]).expect("remove");
    let is_free = || (taken() == before - 1).then_some(());
    assert!(until(LIMIT, is_free).is_some(), "somebody holds it");
    serving::ctl(&socket, &["stop"]).ok();
    memory.unmount();
    daemon.stop(&[&one.socket]);
}
