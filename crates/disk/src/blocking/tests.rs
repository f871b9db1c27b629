//! The blocking facade on real images.

use ringdisk_qcow2::Bytes;
use std::path::PathBuf;

use tempfile::TempDir;

use super::{CreateOptions, Image, create};
use crate::tests::{qemu_img, qemu_io};
use crate::{ErrorKind, Format, ImageOptions};

const MIB: u64 = 1 << 20;

/// A directory with an empty qcow2 image of 8 MiB.
fn image() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("a.qcow2");
    create(&path, &CreateOptions { size: Bytes(8 * MIB), ..CreateOptions::default() })
        .expect("created");
    (directory, path)
}

fn read(image: &Image, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xa5; len];
    let done = image.read_at(&mut bytes, offset).expect("read");
    bytes.truncate(done);
    bytes
}

#[test]
fn written_bytes_are_read_back_and_are_there_for_others_after_the_close() {
    let (directory, path) = image();
    let image = Image::open(&path).expect("open");
    assert_eq!(image.size(), Bytes(8 * MIB));
    assert!(!image.is_read_only());
    // Over several requests, and at no alignment.
    let bytes: Vec<u8> = (0..3 * MIB + 777).map(|at| (at % 251) as u8).collect();
    image.write_at(&bytes, 12_345).expect("write");
    assert!(read(&image, 12_345, bytes.len()) == bytes);
    image.close().expect("close");
    qemu_io(&directory, "qcow2", "a.qcow2", &["read -P 0 0 12345"]);
    let raw = directory.path().join("a.raw");
    qemu_img(&directory, &["convert", "-O", "raw", "a.qcow2", "a.raw"]);
    let raw = std::fs::read(raw).expect("raw");
    assert!(raw[12_345..12_345 + bytes.len()] == bytes);
}

#[test]
fn a_read_is_short_at_the_end_of_the_disk_only() {
    let (_directory, path) = image();
    let image = Image::open(&path).expect("open");
    assert_eq!(read(&image, 8 * MIB - 3, 10), [0; 3]);
    assert!(read(&image, 8 * MIB, 10).is_empty());
    assert!(read(&image, u64::MAX, 10).is_empty());
    assert!(read(&image, 0, 0).is_empty());
}

#[test]
fn a_write_past_the_end_changes_nothing() {
    let (_directory, path) = image();
    let image = Image::open(&path).expect("open");
    for offset in [8 * MIB - 3, 8 * MIB, u64::MAX] {
        let error = image.write_at(b"four", offset).expect_err("past the end");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(read(&image, 8 * MIB - 3, 3), [0; 3]);
}

#[test]
fn an_overlay_shows_its_base_and_keeps_it_as_it_is() {
    let (directory, path) = image();
    let base = Image::open(&path).expect("open");
    base.write_at(&[1; 1 << 17], 0).expect("write");
    base.close().expect("close");
    let top = directory.path().join("top.qcow2");
    let options = CreateOptions {
        size: Bytes(8 * MIB),
        backing_file: Some(b"a.qcow2".to_vec()),
        backing_format: Some("qcow2".to_owned()),
        ..CreateOptions::default()
    };
    create(&top, &options).expect("created");

    let image = Image::open(&top).expect("open");
    image.write_at(&[2; 10], 1 << 16).expect("write");
    let expected = [vec![1; 10], vec![2; 10], vec![1; 10]].concat();
    assert_eq!(read(&image, (1 << 16) - 10, 30), expected);
    let map = image.map(0, Bytes::MAX).expect("map");
    let depths: Vec<_> =
        map.iter().map(|run| (run.start, run.status.len.0, run.status.depth)).collect();
    assert_eq!(depths[..2], [(0, 1 << 16, 1), (1 << 16, 1 << 16, 0)]);
    assert!(!map[2].status.present && map[2].start + map[2].status.len.0 == 8 * MIB);
    assert_eq!(image.disk().layers().len(), 2);
    image.close().expect("close");
    let base = Image::open(&path).expect("open");
    assert!(read(&base, 0, 1 << 17) == vec![1; 1 << 17]);
}

#[test]
fn a_read_only_image_is_read_and_not_written() {
    let (_directory, path) = image();
    let options = ImageOptions { read_only: true, ..ImageOptions::default() };
    let image = Image::open_with(&path, &options).expect("open");
    assert!(image.is_read_only());
    assert_eq!(read(&image, 0, 5), [0; 5]);
    let error = image.write_at(b"no", 0).expect_err("read-only");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("write 2 bytes at 0 of '/"), "{error}");
    image.flush().expect("nothing to do");
    image.close().expect("close");
}

#[test]
fn errors_name_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = Image::open(directory.path().join("none")).expect_err("no such file");
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("none"), "{missing}");
    let (_directory, path) = image();
    let again = create(&path, &CreateOptions { size: Bytes(MIB), ..CreateOptions::default() });
    assert!(again.expect_err("it is there").to_string().contains("a.qcow2"));
    assert_eq!(Image::open(&path).expect("the image is as it was").size(), Bytes(8 * MIB));
    let bad = directory.path().join("bad");
    let options =
        CreateOptions { size: Bytes(MIB), cluster_size: Bytes(3), ..CreateOptions::default() };
    let error = create(&bad, &options).expect_err("no power of two");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(!bad.exists(), "no file is left");
    let options = CreateOptions { data_file: Some(b"d".to_vec()), ..CreateOptions::default() };
    assert_eq!(create(&bad, &options).expect_err("a data file").kind(), ErrorKind::Invalid);
}

#[test]
fn two_threads_work_on_one_image() {
    let (_directory, path) = image();
    let image = Image::open(&path).expect("open");
    std::thread::scope(|scope| {
        for number in 0..2_u8 {
            let image = &image;
            scope.spawn(move || {
                // Into the same clusters.
                for index in 0..64 {
                    let offset = index * 4096 + u64::from(number) * 2048;
                    image.write_at(&[number + 1; 2048], offset).expect("write");
                    assert_eq!(read(image, offset, 2048), [number + 1; 2048]);
                }
            });
        }
    });
    let expected = [[1; 2048], [2; 2048]].concat();
    assert_eq!(read(&image, 63 * 4096, 4096), expected);
    image.close().expect("close");
}

#[test]
fn a_drop_keeps_what_was_flushed_and_leaves_a_sound_image() {
    let (directory, path) = image();
    let image = Image::open(&path).expect("open");
    image.write_at(&[7; 100], 0).expect("write");
    image.flush().expect("flush");
    image.write_at(&[8; 100], 4 * MIB).expect("write");
    drop(image);
    qemu_img(&directory, &["check", "a.qcow2"]);
    let image = Image::open(&path).expect("it is locked no more");
    assert_eq!(read(&image, 0, 100), [7; 100]);
}

#[test]
fn a_raw_file_is_an_image_too() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("raw");
    std::fs::write(&path, vec![0; 10_000]).expect("a file");
    let options = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let image = Image::open_with(&path, &options).expect("open");
    image.write_at(b"abc", 9_997).expect("write");
    image.close().expect("close");
    assert_eq!(&std::fs::read(&path).expect("read")[9_997..], b"abc");
}
