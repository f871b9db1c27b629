//! Bad input at the start: refused with a message that names the thing, an exit code of its own, no
//! mount and no changed image.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ringdisk_testkit::images::{self, pattern, piece, qemu_img, qemu_io};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Loop, scratch, text};
use ringdisk_testkit::process::{Process, command, has, run, until};

use crate::common::{
    MIB, assert_refused, patch, program, raw_image, refused, sample, serve, try_mount,
};

#[test]
fn no_such_image() {
    refused(&["/nonexistent/disk.img"], &["/nonexistent/disk.img", "no such file"]);
    refused(&["--format", "qcow2", "/nonexistent/x.qcow2"], &["/nonexistent/x.qcow2"]);
}

#[test]
fn a_directory_is_no_image() {
    refused(&["/etc"], &["/etc", "directory"]);
}

#[test]
fn other_kinds_of_files_are_no_images() {
    refused(&["/dev/null"], &["/dev/null"]);
    refused(&["/dev/zero"], &["/dev/zero"]);
    let directory = scratch();
    let fifo = directory.path().join("fifo");
    ringdisk_testkit::process::ok_words(&["mkfifo", text(&fifo)]);
    refused(&[text(&fifo)], &["fifo"]);
}

#[test]
fn mountpoints_that_cannot_be_used() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let args = ["--format", "raw", text(&image)];
    let at = |path: &Path, words: &[&str]| {
        assert_refused(&try_mount(&args, path), words);
        assert_eq!(mount_at(path), None);
    };
    at(directory.path(), &["directory"]);
    at(Path::new("/nonexistent/disk"), &["/nonexistent"]);
    at(Path::new("/dev/null"), &["/dev/null"]);
    assert!(std::fs::read(&image).expect("read") == pattern(1, 0, 1 << 20));
}

#[test]
fn an_image_may_be_served_over_itself() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = sample();
    let before = std::fs::read(&image).expect("read");
    let mut command = Command::new(program());
    command.args(["mount", "--read-only"]).args([&image, &image]);
    let disk = ringdisk_testkit::mount::Mounted::from_command(&mut command, &image);
    assert_eq!(std::fs::metadata(&image).expect("stat").len(), 8 * MIB);
    assert_eq!(piece(&image, 5 * MIB, 4), [0x22; 4]);
    assert_eq!(disk.stop().code(), Some(0));
    assert!(std::fs::read(&image).expect("read") == before);
}

#[test]
fn a_mountpoint_that_is_one_of_ours_already() {
    if !needs_root() {
        return;
    }
    let (_one, image) = raw_image(MIB, 1);
    let (_two, other) = raw_image(MIB, 2);
    let disk = serve(&image, &["--format", "raw"]);
    let finished = try_mount(&["--format", "raw", text(&other)], disk.path());
    assert_refused(&finished, &[disk.text()]);
    assert_eq!(piece(disk.path(), 0, 100), pattern(1, 0, 100));
}

#[test]
fn an_image_that_qemu_writes_to() {
    if !(needs_root() && needs("qemu-io", has("qemu-io"))) {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let script = "(echo 'read 0 512'; sleep 60) | qemu-io -f raw \"$0\"";
    let holder = Process::spawn(command(&["sh", "-c", script]).arg(&image));
    until(std::time::Duration::from_secs(10), || {
        holder.output().contains("read 512").then_some(())
    });
    refused(&["--format", "raw", text(&image)], &[text(&image), "in use"]);
    refused(&["--format", "raw", "--read-only", text(&image)], &["in use"]);
}

#[test]
fn qemu_refuses_what_we_write_to() {
    if !(needs_root() && needs("qemu-io", has("qemu-io"))) {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let disk = serve(&image, &["--format", "raw"]);
    let finished = run(command(&["qemu-io", "-f", "raw", "-c", "write -P 9 0 512"]).arg(&image));
    assert!(
        finished.code() != Some(0) && finished.output().contains("lock"),
        "{}",
        finished.output()
    );
    assert_eq!(disk.stop().code(), Some(0));
    // And afterwards it is free.
    qemu_io(&image, "raw", &["write -P 9 0 512"]);
}

#[test]
fn two_writers_are_refused_but_readers_share() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let writer = serve(&image, &["--format", "raw"]);
    refused(&["--format", "raw", text(&image)], &[text(&image), "in use"]);
    assert_eq!(writer.stop().code(), Some(0));
    let one = serve(&image, &["--format", "raw", "--read-only"]);
    let two = serve(&image, &["--format", "raw", "--read-only"]);
    assert_eq!(piece(one.path(), 9, 9), piece(two.path(), 9, 9));
    refused(&["--format", "raw", text(&image)], &["in use"]);
}

#[test]
fn formats_and_features_that_we_do_not_know() {
    let (_directory, image) = sample();
    refused(&["--format", "vmdk", text(&image)], &["vmdk"]);
    // Incompatible bit 63.
    patch(&image, 72, &[0x80, 0, 0, 0, 0, 0, 0, 0]);
    refused(&["--read-only", text(&image)], &[text(&image), "feature"]);
}

#[test]
fn other_image_formats_are_named_not_served_as_raw_by_surprise() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.vmdk");
    qemu_img(&["create", "-q", "-f", "vmdk", text(&image), "1M"]);
    let mountpoint = directory.path().join("disk");
    let mut command = Command::new(program());
    command.args(["mount", "--read-only"]).args([&image, &mountpoint]);
    // Either it is refused by name, or it is served as the raw bytes that it is: never a crash.
    match ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint) {
        Ok(disk) => images::assert_same(disk.path(), &image, "raw"),
        Err(finished) => assert_refused(&finished, &["vmdk"]),
    }
}

#[test]
fn a_qcow2_that_is_marked_corrupt_is_never_written() {
    if !needs_root() {
        return;
    }
    let (directory, image) = sample();
    // Incompatible features, bit 1.
    crate::common::patch(&image, 79, &[2]);
    let before = std::fs::read(&image).expect("read");
    let mountpoint = directory.path().join("disk");
    let mut command = Command::new(program());
    command.arg("mount").args([&image, &mountpoint]);
    // Refused with a way out, or served read-only; the image stays as it is.
    match ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint) {
        Ok(disk) => assert!(std::fs::File::options().write(true).open(disk.path()).is_err()),
        Err(finished) => assert_refused(&finished, &["corrupt"]),
    }
    assert!(std::fs::read(&image).expect("read") == before);
}

#[test]
fn an_empty_image_is_an_empty_file() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("empty.img");
    images::sparse(&image, 0);
    let mountpoint = directory.path().join("disk");
    let mut command = Command::new(program());
    command.args(["mount", "--format", "raw"]).args([&image, &mountpoint]);
    match ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint) {
        Ok(disk) => assert_eq!(std::fs::read(disk.path()).expect("read"), b""),
        Err(finished) => assert_refused(&finished, &["empty"]),
    }
}

#[test]
fn a_probed_raw_image_may_not_become_another_format() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let disk = serve(&image, &[]);
    let file = crate::common::open(disk.path());
    let mut sector = pattern(1, 0, 512);
    sector[..4].copy_from_slice(b"QFI\xfb");
    assert!(file.write_all_at(&sector, 0).is_err());
    assert!(file.write_all_at(&sector, 512).is_ok());
    assert_eq!(piece(&image, 0, 512), pattern(1, 0, 512));
}

#[test]
fn existing_images_are_not_made_anew() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let mountpoint = directory.path().join("disk");
    let mut command = Command::new(program());
    command.args(["mount", "--create", "8M"]).args([&image, &mountpoint]);
    let outcome = ringdisk_testkit::mount::Mounted::try_from_command(&mut command, &mountpoint);
    drop(outcome);
    assert!(std::fs::read(&image).expect("read") == pattern(1, 0, 1 << 20));
}

#[test]
fn words_that_make_no_sense() {
    for words in [
        &[][..],
        &["nonsense"],
        &["mount"],
        &["mount", "--threads", "x", "a", "b"],
        &["mount", "--null", "1Q", "a"],
    ] {
        let finished = Process::spawn(Command::new(program()).args(words).stdout(Stdio::null()))
            .finish(std::time::Duration::from_secs(10));
        assert_eq!(finished.code(), Some(2), "{words:?}: {}", finished.output());
    }
}

#[test]
fn a_read_only_device_is_refused_for_writing() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let Some(device) = Loop::attach(&image, &["--read-only"]) else { return };
    let device = text(device.device());
    refused(&["--format", "raw", device], &[device]);
    let disk = crate::common::mount(&["--format", "raw", "--read-only", device]);
    assert_eq!(piece(disk.path(), 77, 77), pattern(1, 77, 77));
}
