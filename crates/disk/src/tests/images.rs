//! What can be wrong with an image before its chain matters.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use ringdisk_storage::Cause::NotOpened;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{directory, open, qemu_img, reading, refusal, run};
use crate::{Cause, Disk, ErrorKind, Format, ImageOptions, Source};

#[test]
fn an_image_that_is_not_there_is_named() {
    let directory = directory();
    let error = refusal(directory.path().join("a.img"), &reading());
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("a.img"), "{error}");
    assert!(error.message().contains("No such file"), "{error}");
    let cause = error.cause();
    assert!(matches!(cause, Some(Cause::Storage(NotOpened { is_missing: true, .. }))), "{cause:?}");
    fs::write(directory.path().join("file"), b"").expect("write");
    let error = refusal(directory.path().join("file/a.img"), &reading());
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn only_files_and_block_devices_are_images() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("dir")).expect("mkdir");
    mknodat(CWD, path("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("fifo");
    let _listener = UnixListener::bind(path("socket")).expect("socket");
    symlink("fifo", path("link")).expect("link");
    let cases = [
        ("dir", "a directory"),
        ("fifo", "a FIFO"),
        ("link", "a FIFO"),
        ("socket", "a socket"),
        ("/dev/null", "a character device"),
    ];
    for (name, words) in cases {
        for read_only in [false, true] {
            let options = ImageOptions { read_only, ..ImageOptions::default() };
            let error = refusal(path(name), &options);
            assert_eq!(error.kind(), ErrorKind::NotAnImage, "{error}");
            assert!(error.message().contains(words), "{error}");
        }
    }
}

#[test]
fn an_unknown_format_is_refused_unless_raw_is_asked_for() {
    let directory = directory();
    for (format, size) in
        [("vmdk", "1M"), ("vdi", "1M"), ("vhdx", "1M"), ("vpc", "1M"), ("qed", "1M")]
    {
        let path = directory.path().join(format);
        qemu_img(&directory, &["create", "-q", "-f", format, format, size]);
        let error = refusal(&path, &reading());
        assert_eq!(error.kind(), ErrorKind::UnknownFormat, "{error}");
        assert!(error.message().contains(format), "{error}");
        let raw = ImageOptions { format: Some(Format::Raw), ..reading() };
        run(async |ring| {
            let disk = open(&ring, &path, &raw).await.expect("raw");
            assert_eq!(disk.size(), Bytes(fs::metadata(&path).expect("stat").len()));
        });
    }
}

#[test]
fn qcow2_is_found_by_its_magic_and_opened_for_writing() {
    let directory = directory();
    let path = directory.path().join("a.img");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.img", "10M"]);
    run(async |ring| {
        let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
        assert_eq!(disk.layers()[0].format(), Some(Format::Qcow2));
        assert_eq!(disk.size(), Bytes(10 << 20));
        assert!(!disk.is_read_only());
        assert_eq!(disk.read_only_reason(), None);
        assert_eq!(disk.protection_reason(), None);
        assert!(disk.can_resize());
    });
}

#[test]
fn an_image_that_is_marked_corrupt_is_read_only_where_that_is_allowed() {
    let directory = directory();
    let path = directory.path().join("a.img");
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.img", "10M"]);
    let mut bytes = fs::read(&path).expect("read");
    // The corrupt bit of the incompatible features.
    bytes[79] |= 2;
    fs::write(&path, bytes).expect("write");
    let error = refusal(&path, &ImageOptions::default());
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    run(async |ring| {
        let options = ImageOptions { auto_read_only: true, ..ImageOptions::default() };
        let disk = open(&ring, &path, &options).await.expect("open");
        assert!(disk.is_read_only());
        assert!(disk.read_only_reason().expect("reason").contains("a.img"));
    });
}

#[test]
fn a_wrong_format_is_refused() {
    let directory = directory();
    fs::write(directory.path().join("a.img"), vec![1; 100_000]).expect("write");
    let options = ImageOptions { format: Some(Format::Qcow2), ..reading() };
    let error = refusal(directory.path().join("a.img"), &options);
    assert_eq!(error.kind(), ErrorKind::UnknownFormat, "{error}");
    assert!(error.message().contains("a.img"), "{error}");
}

#[test]
fn options_that_contradict_are_refused() {
    let directory = directory();
    fs::write(directory.path().join("a.img"), vec![1; 4096]).expect("write");
    let cases = [
        ImageOptions { force_share: true, ..ImageOptions::default() },
        ImageOptions { partition: Some(1), window_offset: 512, ..reading() },
        ImageOptions { partition: Some(1), window_size: Some(Bytes(512)), ..reading() },
        ImageOptions { partition: Some(1), inactive: true, ..ImageOptions::default() },
    ];
    for options in cases {
        let error = refusal(directory.path().join("a.img"), &options);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[test]
fn a_writer_keeps_another_writer_out() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, vec![1; 4096]).expect("write");
    run(async |ring| {
        let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
        let disk = open(&ring, &path, &options).await.expect("open");
        let source = Source::Path(path.clone());
        let error = Disk::open(&ring, source, &options).await.expect_err("locked");
        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
        assert!(error.message().contains("a.img"), "{error}");
        let share = ImageOptions { force_share: true, ..reading() };
        open(&ring, &path, &share).await.expect("shared reader");
        drop(disk);
        open(&ring, &path, &options).await.expect("free again");
    });
}

#[test]
fn without_permission_the_message_says_so() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, vec![1; 4096]).expect("write");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let file_mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode));
    let dropped = std::thread::spawn({
        let path = path.clone();
        file_mode(0o444).expect("chmod");
        move || {
            drop_capabilities();
            let error = refusal(&path, &ImageOptions::default());
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            assert!(error.message().contains("read-only"), "{error}");
            let options = ImageOptions { auto_read_only: true, ..ImageOptions::default() };
            run(async |ring| {
                let disk = open(&ring, &path, &options).await.expect("open");
                assert!(disk.is_read_only());
                assert!(disk.read_only_reason().expect("reason").contains("denied"));
            });
        }
    });
    dropped.join().expect("thread");
    file_mode(0o000).expect("chmod");
    let refused = std::thread::spawn(move || {
        drop_capabilities();
        let error = refusal(&path, &reading());
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(error.message().contains("a.img"), "{error}");
    });
    refused.join().expect("thread");
}

/// Takes this thread's privileges, so permissions count for root too.
fn drop_capabilities() {
    let none = rustix::thread::CapabilitySet::empty();
    let sets =
        rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).expect("capabilities");
}
