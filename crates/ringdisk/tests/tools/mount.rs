//! Options of `mount` for qcow2: overlays that vanish and overlays that stay, discard, zeroes,
//! caches.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::images::{self, allocated, assert_clean, pattern, piece, qemu_io};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, ok_words, until};
use rustix::fs::{FallocateFlags, fallocate};

use crate::common::tools::{names, qemu_img, ringdisk};
use crate::common::{MIB, serve};

/// A qcow2 full of data.
fn image(directory: &Path) -> std::path::PathBuf {
    let image = directory.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    qemu_io(&image, "qcow2", &["write -P 0x11 0 16M"]);
    image
}

fn write(disk: &Mounted, bytes: &[u8], offset: u64) {
    let file = crate::common::open(disk.path());
    file.write_all_at(bytes, offset).and_then(|()| file.sync_all()).expect("write");
}

#[test]
fn what_goes_to_a_temporary_overlay_is_gone_at_the_end() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = image(d);
    let before = fs::read(&image).expect("read");
    let disk = serve(&image, &["--snapshot"]);
    write(&disk, &pattern(5, 0, 1 << 20), MIB);
    assert!(piece(disk.path(), MIB, 1 << 20) == pattern(5, 0, 1 << 20));
    assert!(piece(disk.path(), 0, 4096) == [0x11; 4096]);
    // Others may read the image meanwhile, since nobody writes to it.
    qemu_img(d, &["check", "disk.qcow2"]).ok();
    assert_eq!(disk.stop().code(), Some(0));
    assert!(fs::read(&image).expect("read") == before);
    assert_eq!(names(d), ["disk.qcow2"]);
}

#[test]
fn an_overlay_that_is_named_stays_and_is_used_again() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = image(d);
    let before = fs::read(&image).expect("read");
    let overlay = d.join("work.qcow2");
    let disk = serve(&image, &["--overlay", text(&overlay)]);
    write(&disk, &pattern(5, 0, 1 << 20), MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert!(fs::read(&image).expect("read") == before);
    assert_clean(&overlay);
    let info = qemu_img(d, &["info", "--output=json", "work.qcow2"]).ok().json();
    assert_eq!(info["backing-filename"], "disk.qcow2");
    assert_eq!(info["backing-filename-format"], "qcow2");
    let disk = serve(&image, &["--overlay", text(&overlay)]);
    assert!(piece(disk.path(), MIB, 1 << 20) == pattern(5, 0, 1 << 20));
    assert_eq!(disk.stop().code(), Some(0));
    // It is an overlay of this image and of no other.
    let other = d.join("other.qcow2");
    images::qcow2(&other, "16M", "");
    let finished =
        crate::common::try_mount(&["--overlay", text(&overlay), text(&other)], &d.join("disk"));
    crate::common::assert_refused(&finished, &["no overlay of"]);
    fs::write(d.join("notes"), "my notes").expect("write");
    let finished = crate::common::try_mount(
        &["--overlay", text(&d.join("notes")), text(&image)],
        &d.join("disk"),
    );
    assert_ne!(finished.code(), Some(0));
    assert_eq!(fs::read(d.join("notes")).expect("read"), b"my notes");
}

#[test]
fn a_raw_image_can_have_an_overlay_too() {
    if !needs_root() {
        return;
    }
    let (directory, image) = crate::common::raw_image(4 * MIB, 1);
    let overlay = directory.path().join("work.qcow2");
    for args in
        [&["--format", "raw", "--snapshot"][..], &["--format", "raw", "--overlay", text(&overlay)]]
    {
        let disk = serve(&image, args);
        write(&disk, &[7; 4096], MIB);
        assert!(piece(disk.path(), MIB, 4096) == [7; 4096]);
        assert!(piece(disk.path(), 2 * MIB, 4096) == pattern(1, 2 * MIB, 4096));
        assert_eq!(disk.stop().code(), Some(0));
    }
    assert!(piece(&image, MIB, 4096) == pattern(1, MIB, 4096));
    assert_clean(&overlay);
}

#[test]
fn a_discard_gives_space_back_or_does_nothing() {
    if !needs_root() {
        return;
    }
    for (args, gives_back) in [
        (&["--discard", "unmap"][..], true),
        (&[], true),
        (&["--discard", "ignore"], false),
        (&["--discard-no-unref"], true),
    ] {
        let directory = scratch();
        let image = image(directory.path());
        let disk = serve(&image, args);
        let file = crate::common::open(disk.path());
        let before = allocated(&image);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A hole that a process punches reads as zeroes in any mode.
        fallocate(&file, flags, 0, 8 * MIB).expect("punch");
        assert!(piece(disk.path(), 4 * MIB, 4096) == [0; 4096], "{args:?}");
        drop(file);
        assert_eq!(disk.stop().code(), Some(0));
        assert_clean(&image);
        let after = allocated(&image);
        assert!(!gives_back || after + 7 * MIB < before, "{args:?}: {before} {after}");
        let reference = images::reference(&image, "qcow2");
        assert!(piece(&reference, 9 * MIB, 4096) == [0x11; 4096], "{args:?}");
    }
}

#[test]
fn zeroes_are_found_when_that_is_asked_for() {
    if !needs_root() {
        return;
    }
    for (args, takes_space) in [
        (&[][..], true),
        (&["--detect-zeroes", "off"], true),
        (&["--detect-zeroes", "on"], false),
        (&["--detect-zeroes", "unmap"], false),
    ] {
        let directory = scratch();
        let image = directory.path().join("disk.qcow2");
        images::qcow2(&image, "16M", "");
        let disk = serve(&image, args);
        write(&disk, &vec![0; 8 << 20], 0);
        assert_eq!(disk.stop().code(), Some(0));
        assert_clean(&image);
        assert_eq!(allocated(&image) > 7 * MIB, takes_space, "{args:?}: {}", allocated(&image));
    }
}

#[test]
fn reference_counts_may_be_written_late() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    for args in [&["--lazy-refcounts"][..], &["--lazy-refcounts=off"], &["--metadata-cache", "64K"]]
    {
        let image = d.join("disk.qcow2");
        images::qcow2(&image, "64M", "");
        let disk = serve(&image, args);
        for step in 0..16 {
            write(&disk, &pattern(3, step * 4 * MIB, 1 << 20), step * 4 * MIB);
        }
        let dirty = qemu_img(d, &["info", "-U", "--output=json", "disk.qcow2"]).ok().json();
        assert_eq!(dirty["dirty-flag"], args[0] == "--lazy-refcounts", "{args:?}");
        assert_eq!(disk.stop().code(), Some(0));
        assert_clean(&image);
        let reference = images::reference(&image, "qcow2");
        for step in 0..16 {
            let at = step * 4 * MIB;
            assert!(piece(&reference, at, 1 << 20) == pattern(3, at, 1 << 20), "{args:?}");
        }
    }
}

#[test]
fn a_qcow2_grows_when_written_past_its_end() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = image(d);
    let disk = serve(&image, &["--growable"]);
    write(&disk, &pattern(8, 0, 1 << 20), 20 * MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&image);
    let info = qemu_img(d, &["info", "--output=json", "disk.qcow2"]).ok().json();
    assert_eq!(info["virtual-size"], 21 * MIB);
}

#[test]
fn a_first_use_works_from_beginning_to_end() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    ringdisk(d, &["mount", "--daemonize", "--create", "64M", "disk.qcow2", "disk"]).ok();
    let bytes = pattern(1, 0, 3 << 20);
    let file = crate::common::open(&d.join("disk"));
    file.write_all_at(&bytes, 5 * MIB).and_then(|()| file.sync_all()).expect("write");
    drop(file);
    ringdisk(d, &["umount", "disk"]).ok();
    ringdisk(d, &["check", "disk.qcow2"]).ok();
    ringdisk(d, &["snapshot", "-c", "first", "disk.qcow2"]).ok();
    ringdisk(d, &["resize", "disk.qcow2", "+64M"]).ok();
    ringdisk(d, &["convert", "-c", "disk.qcow2", "small.qcow2"]).ok();
    ringdisk(d, &["compare", "disk.qcow2", "small.qcow2"]).ok();
    ringdisk(d, &["check", "small.qcow2"]).ok();
    assert!(allocated(&d.join("small.qcow2")) > 0);
    for image in ["disk.qcow2", "small.qcow2"] {
        assert_clean(&d.join(image));
    }
}

/// As it was when it was taken: bytes and size.
#[test]
fn an_internal_snapshot_is_served_as_a_file_and_over_nbd() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = image(d);
    let then = vec![0x11; 16 << 20];
    qemu_img(d, &["snapshot", "-c", "then", "disk.qcow2"]).ok();
    qemu_io(&image, "qcow2", &["write -P 0x22 1M 2M", "write -z 8M 64k"]);
    qemu_img(d, &["resize", "-q", "disk.qcow2", "32M"]).ok();
    let before = fs::read(&image).expect("read");
    for snapshot in ["then", "1", "snapshot.id=1,snapshot.name=then"] {
        let disk = serve(&image, &["--read-only", "--load-snapshot", snapshot]);
        assert!(fs::read(disk.path()).expect("read") == then, "{snapshot}");
        assert_eq!(disk.stop().code(), Some(0), "{snapshot}");
    }
    let socket = d.join("nbd.sock");
    let words = ["nbd", "--fork", "-k", text(&socket), "-l", "then", "disk.qcow2"];
    ringdisk(d, &words).ok();
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    ok_words(&["nbdcopy", &uri, text(&d.join("copy"))]);
    assert!(fs::read(d.join("copy")).expect("read") == then);
    // Without --persistent it ends with its client.
    let is_gone = || (!socket.exists()).then_some(());
    until(LIMIT, is_gone).expect("the server ends");
    assert!(fs::read(&image).expect("read") == before, "an image that was only read has changed");

    for (words, code, said) in [
        (&["--read-only", "--load-snapshot", "nosuch"][..], 3, "Can't find snapshot"),
        (&["--load-snapshot", "then"], 2, "--read-only"),
    ] {
        let words = [&["mount"], words, &["disk.qcow2", "file"]].concat();
        ringdisk(d, &words).ends(code).says(said);
    }
    assert!(!d.join("file").exists());
}
