//! Successors that are refused: the process that serves goes on.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{UringParameter, is_root, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{copy_program, scratch, text};
use ringdisk_testkit::process::{command, has, run};

use super::upgraded_mount::{ASK, Taken};
use crate::common::{MIB, has_passthrough, open, program};
use crate::keep::client::{judge, load};

/// A mount of a raw image.
fn raw() -> (tempfile::TempDir, Taken) {
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::raw(&image, 8 * MIB, 1);
    let disk = Taken::start(&["--format", "raw", text(&image)]);
    (directory, disk)
}

#[test]
fn words_that_would_show_users_another_disk() {
    let (directory, mut disk) = raw();
    let file = open(disk.path());
    for (more, wanted) in [
        (&["--read-only"][..], "--read-only is 'off' there, 'on' here"),
        (&["--growable"], "--growable is 'off' there, 'on' here"),
        (&["--resizable"], "--resizable is 'off' there, 'on' here"),
        (&["--allow-other"], "--allow-other is 'off' there, 'on' here"),
        (&["--kernel-cache"], "--kernel-cache is 'off' there, 'on' here"),
        (&["--snapshot"], "--snapshot is 'off' there, 'on' here"),
        (&["--size", "1M"], "--size is not given there, '1048576' here"),
        (&["--discard=ignore"], "--discard is 'unmap' there, 'ignore' here"),
    ] {
        disk.refuses(disk.successor(more), 2, &[wanted, "goes on as before", "its users"]);
    }
    let other = directory.path().join("other.img");
    images::raw(&other, 8 * MIB, 2);
    let mut words = command(&[&program(), "mount", "--upgrade", "-f", "raw", text(&other)]);
    words.arg(disk.path());
    disk.refuses(words, 2, &["the image is", "not"]);
    file.write_all_at(b"it goes on", 0).expect("a write");
    // By a link to the image it is the same.
    disk.upgrade(&[]);
    file.write_all_at(b"it goes on", 0).expect("a write");
    drop(file);
    drop(disk.stop());
}

#[test]
fn a_place_that_nobody_serves() {
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::raw(&image, MIB, 1);
    for name in ["nothing", "disk.img"] {
        let path = directory.path().join(name);
        let words = [&program(), "mount", "--upgrade", "-f", "raw", text(&image), text(&path)];
        let finished = run(command(&words));
        assert_eq!(finished.code(), Some(4), "{}", finished.output());
        assert!(finished.stderr.contains("start without --upgrade"), "{}", finished.output());
        assert!(mount_at(&path).is_none());
    }
    assert!(!directory.path().join("nothing").exists());
}

#[test]
fn another_user() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    let (directory, disk) = raw();
    let own = directory.path().join("ringdisk");
    copy_program(&program(), &own);
    let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    for path in [directory.path(), disk.directory.path()] {
        std::fs::set_permissions(path, std::fs::Permissions::clone(&open_to_all)).expect("chmod");
    }
    let mut other = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    other.arg(&own).args(["mount", "--upgrade", "--transport", "dev", "-f", "raw"]);
    other.arg(directory.path().join("disk.img")).arg(disk.path());
    disk.refuses(other, 4, &["waits for a successor", "another user's"]);
    drop(disk.stop());
}

#[test]
fn a_mount_over_io_uring() {
    let Some(_switch) = is_root().then(|| UringParameter::set(true)).flatten() else { return };
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::raw(&image, 8 * MIB, 1);
    let disk = Taken::start_over(&["--transport", "auto", "--format", "raw", text(&image)]);
    let file = open(disk.path());
    let never = ["its requests travel over io_uring", "goes on as before", "ringdisk umount"];
    disk.refuses(disk.successor(&[]), 11, &never);
    // Nothing is asked of it when the command line says so.
    let words =
        [&program(), "mount", "--upgrade", "--transport", "uring", "-f", "raw", text(&image)];
    let mut words = command(&words);
    words.arg(disk.path());
    disk.refuses(words, 11, &["cannot be taken over", "io_uring"]);
    file.write_all_at(b"it goes on", 0).expect("a write");
    drop(file);
    drop(disk.stop());
}

#[test]
fn a_mount_with_passthrough() {
    if !(needs_root() && needs("passthrough", has_passthrough())) {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::raw(&image, 8 * MIB, 1);
    let disk = Taken::start(&["--passthrough", "--format", "raw", text(&image)]);
    disk.refuses(disk.successor(&[]), 11, &["passthrough cannot be taken over"]);
    open(disk.path()).write_all_at(b"it goes on", 0).expect("a write");
    drop(disk.stop());
}

#[test]
fn a_successor_that_dies_or_hangs_on_the_way_changes_nothing() {
    let (_directory, mut disk) = raw();
    let (path, socket) = (disk.path().to_owned(), disk.socket());
    let longest = AtomicU64::new(0);
    let written = load(&path, 4 * MIB, 4, |done| {
        // The end of a process is the end of its socket: before it has asked, with half of the
        // answer, with all of it.
        for read in [0, 8, 4096] {
            let mut stream = UnixStream::connect(&socket).expect("it listens");
            if read > 0 {
                stream.write_all(ASK).expect("it listens");
                let _ = stream.read(&mut vec![0; read]);
            }
        }
        // One that says nothing more: it is waited for (8 s), and then the mount goes on.
        let begun = Instant::now();
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        stream.write_all(ASK).expect("it listens");
        let mut state = Vec::new();
        stream.read_to_end(&mut state).expect("a state, and the end");
        assert!(state.len() > 100, "{} bytes", state.len());
        longest.store(u64::try_from(begun.elapsed().as_millis()).unwrap_or(0), Ordering::Relaxed);
        crate::keep::client::get_on(done, 100, || disk.process.output());
    });
    assert!(Duration::from_millis(longest.into_inner()) < Duration::from_secs(20));
    judge(&path, &written);
    disk.upgrade(&[]);
    judge(&path, &written);
    drop(disk.stop());
}
