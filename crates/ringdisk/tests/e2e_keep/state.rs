//! What a client or a user changed of a mount is the same after a restart.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use ringdisk_testkit::images::{self, pattern, piece, qemu_io};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Cleared, STOP, scratch, text};
use ringdisk_testkit::process::{command, has, ok_words, run, until};
use rustix::process::Signal;

use crate::common::{MIB, open, program, raw_image};
use crate::kept::{Kept, child_of, kill, lives};

#[test]
fn open_files_mode_and_owner_stay() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let disk = Kept::raw(&image, &["--allow-other"]);
    let path = disk.path();
    let file = open(&path);
    file.set_permissions(Permissions::from_mode(0o640)).expect("chmod");
    std::os::unix::fs::chown(&path, Some(12), Some(34)).expect("chown");
    disk.kill_server();
    file.write_all_at(b"through the old descriptor", 100).expect("write");
    let meta = file.metadata().expect("stat");
    assert_eq!((meta.mode() & 0o777, meta.uid(), meta.gid()), (0o640, 12, 34));
    assert_eq!(piece(&path, 100, 7), b"through");
    drop(file);
    disk.stop();
}

#[test]
fn an_image_that_grew_and_one_that_was_made_are_found_again() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("made.img");
    let disk = Kept::start(&["--growable", "--create", "1M", text(&image)]);
    // As another format it would be read differently: what a client writes must not decide that.
    let header = [b"QFI\xfb".as_slice(), &[0, 0, 0, 3]].concat();
    let file = open(&disk.path());
    file.write_all_at(&header, 0).expect("write");
    file.write_all_at(b"end", 2 * MIB).expect("grow");
    disk.kill_server();
    assert_eq!(piece(&disk.path(), 0, 8), header);
    assert_eq!(
        (piece(&disk.path(), 2 * MIB, 3), file.metadata().expect("stat").len()),
        (b"end".to_vec(), 2 * MIB + 3)
    );
    drop(file);
    disk.stop();
}

#[test]
fn an_overlay_that_a_command_put_on_top_stays_on_top() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let (directory, elsewhere) = (scratch(), scratch());
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let overlay = elsewhere.path().join("overlay.qcow2");
    let disk = Kept::start(&["--format", "qcow2", text(&image)]);
    let path = disk.path();
    let write = |byte: u8, at: u64| open(&path).write_all_at(&[byte; 4096], at).expect("write");
    write(1, 0);
    ok_words(&[&program(), "ctl", text(&path), "snapshot", text(&overlay)]);
    write(2, 4096);
    disk.kill_server();
    assert_eq!((piece(&path, 0, 1), piece(&path, 4096, 1)), (vec![1], vec![2]));
    write(3, 8192);
    ok_words(&[&program(), "ctl", text(&path), "commit"]);
    disk.kill_server();
    write(4, 12288);
    disk.stop();
    let steps = ["read -P 1 0 4k", "read -P 2 4k 4k", "read -P 3 8k 4k", "read -P 4 12k 4k"];
    qemu_io(&image, "qcow2", &steps);
}

/// The pid of a process that is not a child of the test.
fn pid_of(pidfile: &Path) -> u32 {
    std::fs::read_to_string(pidfile).expect("a pid file").trim().parse().expect("a number")
}

#[test]
fn in_the_background_the_pid_file_names_the_process_that_keeps_the_mount() {
    if !needs_root() {
        return;
    }
    let (directory, _) = raw_image(MIB, 1);
    let (path, pidfile) = (directory.path().join("disk"), directory.path().join("pid"));
    let _cleared = Cleared(path.clone());
    let words = ["mount", "--keep-mount", "--transport", "dev", "--daemonize", "--format", "raw"];
    // Names that mean something in this directory only.
    let finished = run(command(&[&program()]).current_dir(directory.path()).args(words).args([
        "--pidfile",
        "pid",
        "disk.img",
        "disk",
    ]));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    let holder = pid_of(&pidfile);
    let server = child_of(holder).expect("somebody serves");
    kill(server, Signal::KILL);
    let next = until(STOP, || child_of(holder).filter(|pid| *pid != server));
    assert!(next.is_some(), "nobody serves");
    assert_eq!(piece(&path, 5, 100), pattern(1, 5, 100));
    assert_eq!(pid_of(&pidfile), holder);
    // The control socket comes a moment after the first answers.
    let asks = || {
        let asked = run(command(&[&program(), "ctl", text(&path), "stats"]));
        (asked.code() == Some(0)).then_some(())
    };
    assert_eq!(until(STOP, asks), Some(()));
    ok_words(&[&program(), "umount", text(&path)]);
    let gone = until(STOP, || (!lives(holder) && !pidfile.exists()).then_some(()));
    // The mountpoint was made by the first server, and removed by the last.
    assert_eq!((gone, mount_at(&path), path.exists()), (Some(()), None, false));
}
