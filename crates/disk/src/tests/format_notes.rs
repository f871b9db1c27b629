//! The note at a file that it is raw: a guest that may write anything makes no other image of its
//! disk, and who guesses later is asked.

use std::path::Path;

use ringdisk_ring::{Errno, Ring};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, Loop};

use super::{buffer, directory, open, run};
use crate::{Disk, Error, ErrorKind, Format, ImageOptions, format_note};

/// A qcow2 header that names the file beside it as backing file would begin like this.
const HEADER: &[u8; 8] = b"QFI\xfb\0\0\0\x03";

fn raw(read_only: bool) -> ImageOptions {
    ImageOptions { format: Some(Format::Raw), read_only, ..ImageOptions::default() }
}

fn guessed(ask_for_raw: bool, read_only: bool) -> ImageOptions {
    ImageOptions { ask_for_raw, read_only, ..ImageOptions::default() }
}

async fn write(ring: &Ring, disk: &Disk, bytes: &[u8]) {
    let mut block = bytes.to_vec();
    block.resize(512, 0);
    assert_eq!(disk.write(ring, 0, &buffer(&block)).await, Ok(512));
    assert_eq!(disk.close(ring).await, Ok(()));
}

async fn refused(ring: &Ring, path: &Path, options: &ImageOptions, text: &str) -> Error {
    let error = open(ring, path, options).await.expect_err("it is not clear what it is");
    assert_eq!(error.kind(), ErrorKind::UnknownFormat);
    for part in [text, "--format raw"] {
        assert!(error.message().contains(part), "{error}");
    }
    error
}

async fn format_of(ring: &Ring, path: &Path, options: &ImageOptions) -> Option<Format> {
    let disk = open(ring, path, options).await.expect("open");
    let format = disk.layers().first().and_then(|top| top.format());
    assert_eq!(disk.close(ring).await, Ok(()));
    format
}

#[test]
fn a_guest_of_a_raw_disk_makes_no_other_image_of_it() {
    let directory = directory();
    let path = directory.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).expect("an image");
    run(async |ring| {
        let disk = open(&ring, &path, &raw(false)).await.expect("open");
        assert!(!disk.protects_raw(), "the user said raw");
        write(&ring, &disk, HEADER).await;
        drop(disk);
        for read_only in [false, true] {
            for ask in [false, true] {
                refused(&ring, &path, &guessed(ask, read_only), "was used as raw").await;
            }
        }
        assert_eq!(format_of(&ring, &path, &raw(false)).await, Some(Format::Raw));
        // Bytes that look like nothing: the note says what they are.
        let disk = open(&ring, &path, &raw(false)).await.expect("open");
        write(&ring, &disk, b"anything").await;
        drop(disk);
        for ask in [false, true] {
            assert_eq!(format_of(&ring, &path, &guessed(ask, false)).await, Some(Format::Raw));
        }
    });
}

#[test]
fn a_raw_image_that_a_guest_writes_is_called_raw() {
    let directory = directory();
    let path = directory.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).expect("an image");
    run(async |ring| {
        refused(&ring, &path, &guessed(true, false), "nobody said that it is raw").await;
        // The format of a disk that is only read may be probed, and the file gets no note
        // by that.
        assert_eq!(format_of(&ring, &path, &guessed(true, true)).await, Some(Format::Raw));
        assert_eq!(format_of(&ring, &path, &guessed(false, false)).await, Some(Format::Raw));
        assert_eq!(format_of(&ring, &path, &raw(true)).await, Some(Format::Raw));
        refused(&ring, &path, &guessed(true, false), "nobody said that it is raw").await;
        assert_eq!(format_of(&ring, &path, &raw(false)).await, Some(Format::Raw));
        assert_eq!(format_of(&ring, &path, &guessed(true, false)).await, Some(Format::Raw));
    });
}

#[test]
fn the_user_may_say_that_it_has_become_another_image() {
    let directory = directory();
    let path = directory.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).expect("an image");
    run(async |ring| {
        assert_eq!(format_of(&ring, &path, &raw(false)).await, Some(Format::Raw));
        let qcow2 = ImageOptions { format: Some(Format::Qcow2), ..ImageOptions::default() };
        open(&ring, &path, &qcow2).await.expect_err("it is none");
        assert!(format_note::is_raw(std::fs::File::open(&path).expect("open")));
        ringdisk_testkit::images::qcow2(&path, "1M", "cluster_size=4k");
        let file = std::fs::File::open(&path).expect("open");
        // Whether qemu-img keeps the file or makes another one is its matter.
        format_note::set_raw(&file).expect("a note");
        refused(&ring, &path, &guessed(true, false), "--format qcow2").await;
        assert_eq!(format_of(&ring, &path, &qcow2).await, Some(Format::Qcow2));
        assert!(!format_note::is_raw(&file));
        assert_eq!(format_of(&ring, &path, &guessed(true, false)).await, Some(Format::Qcow2));
    });
}

#[test]
fn a_commit_into_a_base_that_the_user_calls_raw_leaves_a_note() {
    let directory = directory();
    let base = directory.path().join("base");
    let overlay = directory.path().join("overlay.qcow2");
    std::fs::write(&base, vec![0; 1 << 20]).expect("an image");
    let words = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    let names = [&base, &overlay].map(|path| path.to_str().expect("utf-8"));
    ringdisk_testkit::images::qemu_img(&[&words[..], &names[..]].concat());
    run(async |ring| {
        let disk = open(&ring, &overlay, &ImageOptions::default()).await.expect("open");
        write(&ring, &disk, HEADER).await;
        drop(disk);
        let trusting = ImageOptions { trust_base_format: true, ..ImageOptions::default() };
        let disk = open(&ring, &overlay, &trusting).await.expect("open");
        let progress = std::sync::Arc::new(crate::Progress::new());
        disk.commit(&ring, crate::CommitOptions::TOP, &progress).await.expect("the user said raw");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        assert!(std::fs::read(&base).expect("read").starts_with(HEADER));
        refused(&ring, &base, &guessed(false, true), "was used as raw").await;
    });
}

#[test]
fn where_no_note_can_be_kept_the_first_sector_is_protected() {
    if !needs_root() {
        return;
    }
    let directory = directory();
    let memory = FileSystem::ramfs(&directory.path().join("memory"));
    let path = memory.path().join("disk");
    std::fs::write(&path, vec![7; 1 << 20]).expect("an image");
    run(async |ring| {
        let disk = open(&ring, &path, &raw(false)).await.expect("open");
        let reason = disk.protection_reason().expect("it is protected");
        assert!(reason.contains("keeps no note"), "{reason}");
        let mut header = HEADER.to_vec();
        header.resize(512, 0);
        assert_eq!(disk.write(&ring, 0, &buffer(&header)).await, Err(Errno::PERM));
        write(&ring, &disk, b"anything").await;
        drop(disk);
        assert_eq!(format_of(&ring, &path, &guessed(false, false)).await, Some(Format::Raw));
        refused(&ring, &path, &guessed(true, false), "nobody said that it is raw").await;
    });
}

#[test]
fn nobody_guesses_that_a_device_is_more_than_its_bytes() {
    if !needs_root() {
        return;
    }
    let directory = directory();
    let file = directory.path().join("file");
    std::fs::write(&file, vec![0; 1 << 20]).expect("a file");
    let Some(device) = Loop::attach(&file, &[]) else { return };
    let path = device.device();
    run(async |ring| {
        assert_eq!(format_of(&ring, path, &guessed(false, false)).await, Some(Format::Raw));
        refused(&ring, path, &guessed(true, false), "nobody said that it is raw").await;
        let disk = open(&ring, path, &raw(false)).await.expect("open");
        assert!(!disk.protects_raw(), "a guest may write what it likes");
        write(&ring, &disk, HEADER).await;
        drop(disk);
        for (ask, read_only) in [(false, false), (false, true), (true, false), (true, true)] {
            let text = "a device or an export keeps no note";
            refused(&ring, path, &guessed(ask, read_only), text).await;
        }
        assert_eq!(format_of(&ring, path, &raw(false)).await, Some(Format::Raw));
    });
}

#[test]
fn a_guest_makes_no_image_of_a_data_file_either() {
    let directory = directory();
    let (image, data) = (directory.path().join("disk.qcow2"), directory.path().join("data"));
    let options = format!("data_file={},data_file_raw=on", data.display());
    ringdisk_testkit::images::qcow2(&image, "1M", &options);
    run(async |ring| {
        let disk = open(&ring, &image, &ImageOptions::default()).await.expect("open");
        write(&ring, &disk, HEADER).await;
        drop(disk);
        assert!(std::fs::read(&data).expect("read").starts_with(HEADER));
        refused(&ring, &data, &guessed(false, true), "was used as raw").await;
        refused(&ring, &data, &guessed(true, false), "was used as raw").await;
    });
}

#[test]
fn a_disk_that_is_handed_over_has_its_note() {
    let directory = directory();
    let path = directory.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).expect("an image");
    run(async |ring| {
        let old = open(&ring, &path, &raw(false)).await.expect("open");
        // A process of before, which kept no notes.
        format_note::remove(std::fs::File::open(&path).expect("open"));
        let handed = old.hand_over(&ring).await.expect("handed over");
        let new = Disk::open_handed(&ring, handed, &raw(false)).await.expect("taken");
        new.take_charge();
        drop(old);
        assert!(!new.protects_raw());
        write(&ring, &new, HEADER).await;
        drop(new);
        refused(&ring, &path, &guessed(false, true), "was used as raw").await;
    });
}

#[test]
fn a_file_that_was_handed_over_wrongly_gets_no_note() {
    let directory = directory();
    let [path, other] = ["disk", "other"].map(|name| directory.path().join(name));
    for path in [&path, &other] {
        std::fs::write(path, vec![0; 1 << 20]).expect("an image");
    }
    run(async |ring| {
        let old = open(&ring, &path, &raw(false)).await.expect("open");
        let mut handed = old.hand_over(&ring).await.expect("handed over");
        // A process that was taken over can only read this one.
        let file = std::fs::File::open(&other).expect("open");
        let id = |path: &Path| {
            let meta = std::fs::metadata(path).expect("there");
            std::os::unix::fs::MetadataExt::ino(&meta).to_string()
        };
        handed.description = handed.description.replace(&id(&path), &id(&other));
        handed.fds = vec![file.into()];
        let error = Disk::open_handed(&ring, handed, &raw(false)).await.expect_err("for reading");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(!format_note::is_raw_at(&other));
    });
}
