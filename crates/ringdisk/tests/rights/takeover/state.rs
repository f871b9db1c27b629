//! The memory that a kept mount's process leaves to the next one, and the line to the process that
//! keeps the mount.

use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Loop, text};
use ringdisk_testkit::process::{Finished, has, until};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde_json::{Value, json};

use crate::common::{MIB, open, raw_image};
use crate::takeover::agent::{Agent, give};
use crate::takeover::kept::Kept;
use crate::takeover::memory::{HEAD, IMAGES, with_top};
use crate::takeover::out_of_reach::{
    Others, SECRET, identity, number, overlay_of, qcow2, with_data_file,
};

/// Bytes of the record of the file.
const RECORD: u64 = IMAGES.first;
/// Bytes of each of the two places for a state behind it.
const PLACE: u64 = IMAGES.bytes;
/// How long a mount may take to end.
const END: std::time::Duration = std::time::Duration::from_secs(60);

/// The process's last word of its mount, as an attacker wants it.
fn forge(memory: &File, change: impl FnOnce(&mut Value)) {
    IMAGES.forge(memory, change);
}

/// Numbers and names of another disk's mount.
fn of_another(state: &mut Value, others: &Others) {
    state["mountpoint"] = json!(text(&others.mountpoint()));
    state["connection"] = json!(others.connection());
    state["made"] = json!(identity(&others.path("empty")));
}

/// The mount ends with an error that says why; nothing of a secret was to be seen.
#[track_caller]
fn ends(disk: Kept, words: &[&str]) -> Finished {
    let path = disk.path();
    let gone = || {
        let mut bytes = vec![0; SECRET.len()];
        let seen = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, 0));
        assert!(seen.is_err() || bytes != SECRET, "the secret is served");
        mount_at(&path).is_none().then_some(())
    };
    until(END, gone).unwrap_or_else(|| panic!("it is still there: {}", disk.0.output()));
    let finished = disk.0.finish();
    assert!(finished.code().is_some_and(|code| code != 0), "{}", finished.output());
    assert!(!finished.output().contains("panicked"), "{}", finished.output());
    for word in words {
        assert!(finished.stderr.contains(word), "no '{word}': {}", finished.output());
    }
    finished
}

/// A raw image that is kept at a mountpoint that was there before.
fn kept() -> (tempfile::TempDir, PathBuf, Kept) {
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("mountpoint");
    fs::write(&path, "").expect("a mountpoint");
    let disk = Kept::start_at(&["--format", "raw", text(&image)], &path);
    (directory, path, disk)
}

/// The process that serves now, taken over.
fn agent(disk: &Kept) -> Agent {
    Agent::over(disk.server().expect("somebody serves"))
}

#[test]
fn a_secret_that_is_named_as_the_image_on_top_is_not_served() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    for name in ["secret", "empty", "memory/file", "bound/disk.img"] {
        let (_directory, path, disk) = kept();
        let agent = agent(&disk);
        // And the process that keeps the mount, which has to end it, is told of another one.
        forge(&agent.memory(), |state| {
            with_top(state, &others.path(name), "raw");
            of_another(state, &others);
        });
        agent.dies();
        ends(disk, &["names", "as the image on top"]);
        assert!(path.exists(), "the mountpoint was there before");
        others.assert_same();
    }
}

#[test]
fn what_the_mount_was_made_with_is_not_what_its_process_says_later() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (_directory, path, disk) = kept();
    let file = open(&path);
    let taken = agent(&disk);
    let memory = taken.memory();
    forge(&memory, |state| {
        of_another(state, &others);
        for (name, value) in [
            ("queues", json!(1_u64 << 40)),
            ("devices", json!(7)),
            ("page_bytes", json!(0)),
            ("max_pages", json!(0)),
            ("max_write", json!(u32::MAX)),
            ("minor", json!(1)),
            ("flags", json!(u64::MAX)),
            ("offered", json!(0)),
            ("format", json!("qcow2")),
            ("window", json!([u64::MAX - 1, u64::MAX])),
        ] {
            state[name] = value;
        }
    });
    // The record of the file: it is there, and all its numbers are as large as can be.
    memory.write_all_at(&[0xff; 640], 0).expect("written");
    memory.write_all_at(&[1, 0, 0, 0], 0).expect("written");
    taken.dies();
    assert_eq!(piece(&path, 4096, 4096), pattern(1, 4096, 4096), "{}", disk.0.output());
    file.write_all_at(b"through the old descriptor", 0).expect("it is served");
    drop(file);
    others.assert_same();
    assert!(!disk.0.output().contains("panicked"), "{}", disk.0.output());
    disk.stop();
    assert!(path.exists() && mount_at(&path).is_none());
    others.assert_same();
}

#[test]
fn a_mountpoint_that_was_there_before_stays_whoever_says_that_it_was_made() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("mountpoint");
    fs::write(&path, "").expect("a mountpoint");
    let below = identity(&path);
    for killed in [false, true] {
        let disk = Kept::start_at(&["--format", "raw", text(&image)], &path);
        let agent = agent(&disk);
        forge(&agent.memory(), |state| state["made"] = json!(below));
        agent.dies();
        assert_eq!(piece(&path, 0, 4096), pattern(1, 0, 4096));
        if killed {
            // The process that keeps the mount has to end it.
            fs::rename(&image, directory.path().join("away")).expect("rename");
            crate::takeover::kept::kill(
                disk.server().expect("somebody serves"),
                rustix::process::Signal::KILL,
            );
            ends(disk, &[]);
        } else {
            disk.stop();
        }
        assert!(path.exists() && identity(&path) == below, "it was removed");
    }
}

/// What the next process says, and what was done to its memory.
type Wreck<'a> = (&'a str, &'a dyn Fn(&File));

#[test]
fn memory_that_was_cut_or_holds_rubbish_ends_the_mount_with_words() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let deep = [vec![b'['; 30_000], vec![b']'; 30_000]].concat();
    let wrecks: [Wreck; 5] = [
        ("its state is not there", &|memory| memory.set_len(0).expect("cut")),
        ("its state is not there", &|memory| memory.set_len(RECORD + HEAD as u64).expect("cut")),
        ("its state is not there", &|memory| {
            (0..2).for_each(|place| IMAGES.write(memory, place, u64::MAX, b"{}"));
        }),
        ("cannot be taken over", &|memory| {
            (0..2).for_each(|place| IMAGES.write(memory, place, 1000 + place, &deep));
        }),
        ("its state is not there", &|memory| {
            // Lengths that are not to be believed.
            let head = [9, 9, u64::MAX].map(u64::to_ne_bytes).concat();
            for place in 0..2 {
                memory.write_all_at(&head, RECORD + place * PLACE).expect("written");
            }
        }),
    ];
    for (words, wreck) in wrecks {
        let (_directory, path, disk) = kept();
        let agent = agent(&disk);
        wreck(&agent.memory());
        agent.dies();
        ends(disk, &[words]);
        assert!(path.exists());
        others.assert_same();
    }
}

#[test]
fn what_the_mount_was_made_with_cannot_be_written_any_more() {
    if !needs_root() {
        return;
    }
    let (_directory, _path, disk) = kept();
    let is_origin = |name: &str| name.starts_with("/memfd:ringdisk-origin");
    let helper = Agent::over(disk.0.pid());
    let sealed = helper.all(is_origin);
    assert_eq!(sealed.len(), 1);
    for memory in sealed.into_iter().map(File::from) {
        assert!(memory.write_all_at(b"x", 0).is_err() && memory.set_len(0).is_err());
    }
    helper.goes_on();
    let taken = agent(&disk);
    assert!(taken.all(is_origin).is_empty(), "it has no business there");
    // And nobody can make the rest of it stay as it is.
    assert!(fcntl_add_seals(taken.memory(), SealFlags::WRITE).is_err());
    taken.goes_on();
    disk.stop();
}

#[test]
fn descriptors_that_come_after_the_start_are_not_kept() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (_directory, path, disk) = kept();
    let agent = agent(&disk);
    let line = agent.helper_that_keeps(disk.0.pid());
    let forged = File::from(memfd_create(c"forged", MemfdFlags::CLOEXEC).expect("memory"));
    let (number, mut state) = IMAGES.newest(&agent.memory());
    with_top(&mut state, &others.path("secret"), "raw");
    IMAGES.write(&forged, 0, number + 7, state.to_string().as_bytes());
    let (pipe, _other_end) = rustix::pipe::pipe().expect("a pipe");
    let store = |name: &str, fds: &[BorrowedFd<'_>]| {
        give(&line, format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0").as_bytes(), fds);
    };
    store("ringdisk-state", &[forged.as_fd()]);
    store("ringdisk-origin", &[forged.as_fd()]);
    store("ringdisk-fuse-0", &[pipe.as_fd()]);
    store("ringdisk-fuse-7", &[pipe.as_fd()]);
    for number in 0..300 {
        store(&format!("ringdisk-more-{number}"), &[pipe.as_fd()]);
    }
    // Rubbish, and words that are not the process's to say.
    for text in [&b""[..], b"\n\n=\n=1", b"FDSTOREREMOVE=1\nFDNAME=ringdisk-state", &[0xff; 9000]] {
        if !text.is_empty() {
            give(&line, text, &[]);
        }
    }
    drop(line);
    agent.dies();
    assert_eq!(piece(&path, 0, 4096), pattern(1, 0, 4096), "{}", disk.0.output());
    disk.stop();
    others.assert_same();
}

/// What an image names lies beside it, by the rules of names; of a device that would be every disk
/// of the system.
#[test]
fn an_image_on_a_device_that_comes_to_name_another_disk_is_not_served() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let others = Others::new();
    let directory = ringdisk_testkit::mount::scratch();
    let disk_file = directory.path().join("disk");
    let Some(secret) = Loop::attach(&others.path("secret"), &[]) else { return };
    for name_of_secret in [overlay_of, with_data_file] {
        qcow2(&disk_file);
        File::options().write(true).open(&disk_file).expect("it").set_len(4 * MIB).expect("longer");
        let device = Loop::attach(&disk_file, &[]).expect("a loop device");
        let disk = Kept::start(&["--format", "qcow2", text(device.device())]);
        let bytes = name_of_secret(secret.device(), &directory.path().join("made"));
        let agent = agent(&disk);
        let image = agent.all(|name| name == text(device.device()));
        let image = File::from(image.into_iter().next().expect("the image"));
        image.write_all_at(&bytes, 0).and_then(|()| image.sync_all()).expect("written");
        drop(image);
        forge(&agent.memory(), |state| state["files"] = json!([]));
        agent.dies();
        ends(disk, &["--allow-path"]);
    }
    drop(secret);
    others.assert_same();
}

/// A chain that was there at the start, and lies elsewhere, is the mount's own.
#[test]
fn a_chain_in_several_directories_is_opened_again() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let (below, base) = raw_image(MIB, 1);
    let directory = ringdisk_testkit::mount::scratch();
    let top = directory.path().join("top.qcow2");
    let bytes = overlay_of(&base, &top);
    fs::write(&top, bytes).expect("an image");
    let words = ["--format", "qcow2", "--allow-path", text(below.path()), text(&top)];
    let disk = Kept::start(&words);
    assert!(number(&disk.path()) > 0);
    disk.kill_server();
    assert_eq!(piece(&disk.path(), 0, 4096), pattern(1, 0, 4096));
    disk.stop();
}

/// A mark of another mount.
const MARK: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn an_image_of_somebody_else_beside_ours_is_not_written() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    for format in ["raw", "qcow2"] {
        let (directory, path, disk) = kept();
        let neighbour = directory.path().join("neighbour");
        match format {
            "raw" => fs::write(&neighbour, [SECRET, &[0; 4096]].concat()).expect("an image"),
            _ => {
                let bytes = overlay_of(&directory.path().join("image"), &neighbour);
                fs::write(&neighbour, bytes).expect("an image");
            }
        }
        let name = "user.ringdisk.mount";
        let flags = rustix::fs::XattrFlags::empty();
        let (device, inode) = identity(&neighbour);
        let mark = format!("{MARK}:{device}:{inode}");
        rustix::fs::setxattr(&neighbour, name, mark.as_bytes(), flags).expect("a mark");
        let before = fs::read(&neighbour).expect("an image");
        let agent = agent(&disk);
        forge(&agent.memory(), |state| {
            with_top(state, &neighbour, format);
            state["mark"] = json!(MARK);
        });
        agent.dies();
        ends(disk, &["was not made for this mount"]);
        assert!(path.exists(), "the mountpoint was there before");
        assert_eq!(fs::read(&neighbour).expect("an image"), before);
    }
}

#[test]
fn an_image_of_somebody_else_beside_ours_is_no_data_file() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = ringdisk_testkit::mount::scratch();
    let image = directory.path().join("disk.qcow2");
    let neighbour = directory.path().join("neighbour");
    fs::write(&neighbour, [SECRET, &vec![0; 1 << 20]].concat()).expect("an image");
    let forged = with_data_file(&neighbour, &directory.path().join("made"));
    qcow2(&image);
    let path = directory.path().join("mountpoint");
    fs::write(&path, "").expect("a mountpoint");
    let disk = Kept::start_at(&["--format", "qcow2", text(&image)], &path);
    let agent = agent(&disk);
    let own = agent.all(|name| name == text(&image));
    let own = File::from(own.into_iter().next().expect("the image"));
    own.write_all_at(&forged, 0).and_then(|()| own.sync_all()).expect("written");
    drop(own);
    forge(&agent.memory(), |state| state["files"] = json!([]));
    agent.dies();
    ends(disk, &["did not name this file when it was served last"]);
}

/// It lies below the disks of others, too.
#[test]
fn a_base_is_not_served_as_the_image_on_top() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let (directory, base) = raw_image(MIB, 1);
    let before = fs::read(&base).expect("an image");
    let top = directory.path().join("top.qcow2");
    let bytes = overlay_of(&base, &top);
    fs::write(&top, bytes).expect("an image");
    let path = directory.path().join("mountpoint");
    fs::write(&path, "").expect("a mountpoint");
    let disk = Kept::start_at(&["--format", "qcow2", text(&top)], &path);
    let taken = agent(&disk);
    forge(&taken.memory(), |state| with_top(state, &base, "raw"));
    taken.dies();
    ends(disk, &["was not made for this mount"]);
    assert_eq!(fs::read(&base).expect("an image"), before);
}

/// A command of a user has put it there.
#[test]
fn a_base_that_was_committed_into_is_served_on() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let (directory, base) = raw_image(MIB, 1);
    let top = directory.path().join("top.qcow2");
    let bytes = overlay_of(&base, &top);
    fs::write(&top, bytes).expect("an image");
    let disk = Kept::start(&["--format", "qcow2", text(&top)]);
    let path = disk.path();
    open(&path).write_all_at(&pattern(2, 0, 4096), 0).expect("write");
    crate::common::tools::ringdisk(Path::new("/"), &["ctl", text(&path), "commit", "--quiet"]).ok();
    disk.kill_server();
    open(&path).write_all_at(&pattern(3, 8192, 4096), 8192).expect("write");
    assert_eq!(piece(&path, 0, 4096), pattern(2, 0, 4096));
    disk.stop();
    assert_eq!(piece(&base, 8192, 4096), pattern(3, 8192, 4096));
}
