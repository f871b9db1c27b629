//! Changes of a disk while clients work on it: every byte is what the clients know, `qemu-img
//! check` finds nothing, and QEMU reads the same.

mod backups;
mod bitmap_mirrors;
mod commits;
mod concurrent;
mod copy_on_read;
mod mirror_targets;
mod mirroring;
mod mirrors;
mod streams;
mod switch_over;

use ringdisk_qcow2::Bytes;
use std::fs;
use std::sync::Arc;

use ringdisk_ring::Ring;
use tempfile::TempDir;

use super::load::Load;
use super::{assert_same, directory, open, qemu_img, qemu_io, read_steps, run};
use crate::{
    Backing, Disk, ErrorKind, Format, ImageOptions, OverlayOptions, Progress, ResizeOptions,
    SnapshotChange,
};

/// Size of the disks, bytes.
const SIZE: usize = 24 << 20;
/// Requests that clients make before, between and after changes.
const SOME: u64 = 150;

/// An image of [`SIZE`] bytes with some data; what it holds.
fn image(directory: &TempDir, name: &str, format: &str, byte: u8) -> Vec<u8> {
    qemu_img(directory, &["create", "-q", "-f", format, name, &SIZE.to_string()]);
    let mut bytes = vec![0; SIZE];
    for number in 0..12 {
        let (at, len) = (number * (2 << 20) + 12_345, 777_777);
        let command = format!("write -P {byte} {at} {len}");
        qemu_io(directory, format, name, &[&command]);
        bytes[at..at + len].fill(byte);
    }
    bytes
}

/// An overlay with some data of its own; `bytes` becomes what it shows.
fn overlay(directory: &TempDir, name: &str, backing: (&str, &str), bytes: &mut [u8], byte: u8) {
    let (file, format) = backing;
    qemu_img(directory, &["create", "-q", "-f", "qcow2", "-b", file, "-F", format, name]);
    for number in 0..6 {
        let (at, len) = (number * (4 << 20) + usize::from(byte) * 4096, 300_000);
        let command = format!("write -P {byte} {at} {len}");
        qemu_io(directory, "qcow2", name, &[&command]);
        bytes[at..at + len].fill(byte);
    }
    qemu_io(directory, "qcow2", name, &["write -z 9M 1M"]);
    bytes[9 << 20..10 << 20].fill(0);
}

async fn opened(ring: &Ring, directory: &TempDir, name: &str) -> Arc<Disk> {
    open(ring, directory.path().join(name), &ImageOptions::default()).await.expect("open")
}

/// Ends the load and the disk; the image `name` has what the clients know, and the rest of `bytes`.
async fn finish(
    ring: &Ring,
    directory: &TempDir,
    disk: Arc<Disk>,
    load: Load,
    name: &str,
    bytes: &mut [u8],
) {
    let known = load.halt(ring).await;
    bytes[..known.len()].copy_from_slice(&known);
    assert_same(&read_steps(ring, &disk, 1 << 20).await, bytes);
    assert_eq!(disk.close(ring).await, Ok(()));
    // A task that was about to write metadata back lets go of the disk.
    for _ in 0..10 {
        ring.yield_now().await;
    }
    drop(disk);
    let format = if name.ends_with(".raw") { "raw" } else { "qcow2" };
    same_for_qemu(directory, name, format, bytes);
}

/// QEMU finds nothing wrong with an image, and reads these bytes.
fn same_for_qemu(directory: &TempDir, name: &str, format: &str, bytes: &[u8]) {
    let checks: &[&[&str]] = &[&["check", "-q", "-f", format, name]];
    for check in checks.iter().filter(|_| format == "qcow2") {
        qemu_img(directory, check);
    }
    qemu_img(directory, &["convert", "-f", format, "-O", "raw", name, "compare.raw"]);
    assert_same(bytes, &fs::read(directory.path().join("compare.raw")).expect("read"));
}

#[test]
fn clients_write_an_overlay_and_qemu_reads_the_same() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 1);
        load.progress(&ring, 4 * SOME).await;
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
}

#[test]
fn a_qcow2_disk_grows_and_shrinks_under_clients() {
    let directory = directory();
    let mut bytes = image(&directory, "a.qcow2", "qcow2", 1);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.qcow2").await;
        let load = Load::start(&disk, &bytes, 2);
        for size in [30 << 20, 50 << 20, 100 << 20, 40 << 20] {
            load.progress(&ring, SOME).await;
            let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
            disk.resize_with(&ring, Bytes(size), options).await.expect("resize");
            assert_eq!(disk.size(), Bytes(size));
        }
        let error = disk.resize_with(&ring, Bytes(30 << 20), ResizeOptions::default()).await;
        assert_eq!(error.expect_err("shrinks").kind(), ErrorKind::Invalid);
        assert_eq!(disk.grow(&ring, Bytes(35 << 20)).await, Ok(()));
        assert_eq!(disk.grow(&ring, Bytes((60 << 20) + 1)).await, Ok(()));
        assert_eq!(disk.size(), Bytes((60 << 20) + 512));
        load.progress(&ring, SOME).await;
        bytes.resize((60 << 20) + 512, 0);
        finish(&ring, &directory, disk, load, "a.qcow2", &mut bytes).await;
    });
}

#[test]
fn a_grown_overlay_does_not_show_what_a_longer_backing_file_has_there() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 7);
    let backing =
        ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2", "10M"];
    qemu_img(&directory, &backing);
    bytes.truncate(10 << 20);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 3);
        load.progress(&ring, SOME).await;
        assert_eq!(disk.resize(&ring, Bytes(20 << 20)).await, Ok(()));
        load.progress(&ring, SOME).await;
        bytes.resize(20 << 20, 0);
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
}

#[test]
fn a_raw_disk_shrinks_and_grows_under_clients() {
    let directory = directory();
    let mut bytes = image(&directory, "a.raw", "raw", 1);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.raw").await;
        let load = Load::start(&disk, &bytes[..10 << 20], 5);
        for size in [20 << 20, 12 << 20, 24 << 20] {
            load.progress(&ring, SOME).await;
            assert_eq!(disk.resize(&ring, Bytes(size)).await, Ok(()));
        }
        load.progress(&ring, SOME).await;
        bytes[12 << 20..].fill(0);
        finish(&ring, &directory, disk, load, "a.raw", &mut bytes).await;
    });
}

#[test]
fn overlays_are_added_under_clients_and_old_layers_are_kept_as_they_were() {
    let directory = directory();
    let mut bytes = image(&directory, "a.qcow2", "qcow2", 1);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.qcow2").await;
        let load = Load::start(&disk, &bytes, 6);
        for name in ["b.qcow2", "c.qcow2", "d.qcow2"] {
            load.progress(&ring, SOME).await;
            let path = directory.path().join(name);
            disk.add_overlay(&ring, &path, OverlayOptions::default()).await.expect("overlay");
            assert_eq!(disk.layers()[0].name(), path);
            assert!(!disk.layers()[1].is_writable());
        }
        assert_eq!(disk.layers().len(), 4);
        // Names that are taken are refused, and nothing changes.
        let error =
            disk.add_overlay(&ring, directory.path().join("c.qcow2"), OverlayOptions::default());
        error.await.expect_err("it is there already");
        assert!(directory.path().join("c.qcow2").exists());
        load.progress(&ring, SOME).await;
        let frozen = fs::read(directory.path().join("b.qcow2")).expect("read");
        load.progress(&ring, SOME).await;
        assert_same(&frozen, &fs::read(directory.path().join("b.qcow2")).expect("read"));
        finish(&ring, &directory, disk, load, "d.qcow2", &mut bytes).await;
    });
    for name in ["a.qcow2", "b.qcow2", "c.qcow2"] {
        qemu_img(&directory, &["check", "-q", "-f", "qcow2", name]);
    }
}

#[test]
fn an_overlay_over_a_raw_disk_takes_the_writes() {
    let directory = directory();
    let mut bytes = image(&directory, "a.raw", "raw", 1);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.raw").await;
        let load = Load::start(&disk, &bytes, 7);
        load.progress(&ring, SOME).await;
        let path = directory.path().join("b.qcow2");
        disk.add_overlay(&ring, &path, OverlayOptions::default()).await.expect("overlay");
        assert_eq!(disk.protection_reason(), None);
        let frozen = fs::read(directory.path().join("a.raw")).expect("read");
        load.progress(&ring, SOME).await;
        assert_same(&frozen, &fs::read(directory.path().join("a.raw")).expect("read"));
        finish(&ring, &directory, disk, load, "b.qcow2", &mut bytes).await;
    });
}

#[test]
fn the_backing_file_is_exchanged_for_one_of_the_same_content_only() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    qemu_img(&directory, &["convert", "-O", "qcow2", "base.raw", "same.qcow2"]);
    image(&directory, "other.raw", "raw", 9);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 16);
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        let backing = |file: &[u8], format| Some(Backing { file: file.to_vec(), format });
        let other = backing(b"other.raw", Format::Raw);
        let error = disk.change_backing(&ring, other, &progress).await.expect_err("differs");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let error = disk.change_backing(&ring, None, &progress).await.expect_err("differs");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        load.progress(&ring, SOME).await;
        let same = backing(b"same.qcow2", Format::Qcow2);
        disk.change_backing(&ring, same, &progress).await.expect("change");
        assert_eq!(disk.layers()[1].format(), Some(Format::Qcow2));
        load.progress(&ring, SOME).await;
        fs::remove_file(directory.path().join("base.raw")).expect("nobody needs it");
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
}

#[test]
fn internal_snapshots_are_made_applied_and_deleted_under_clients() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 17);
        load.progress(&ring, SOME).await;
        let create = |name: &str| SnapshotChange::Create(name.to_owned());
        disk.snapshot(&ring, create("busy")).await.expect("create");
        load.progress(&ring, SOME).await;
        let then = load.halt(&ring).await;
        disk.snapshot(&ring, create("quiet")).await.expect("create");
        let load = Load::start(&disk, &then, 18);
        load.progress(&ring, SOME).await;
        disk.snapshot(&ring, SnapshotChange::Delete("busy".to_owned())).await.expect("delete");
        load.progress(&ring, SOME).await;
        drop(load.halt(&ring).await);
        let error = disk.snapshot(&ring, SnapshotChange::Apply("busy".to_owned())).await;
        assert_eq!(error.expect_err("gone").kind(), ErrorKind::Invalid);
        disk.snapshot(&ring, SnapshotChange::Apply("quiet".to_owned())).await.expect("apply");
        assert_same(&read_steps(&ring, &disk, 1 << 20).await[..then.len()], &then);
        let load = Load::start(&disk, &then, 19);
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
    let list = qemu_img(&directory, &["snapshot", "-l", "top.qcow2"]);
    assert!(list.contains("quiet") && !list.contains("busy"), "{list}");
}

#[test]
fn a_change_whose_caller_is_gone_is_made_all_the_same() {
    let directory = directory();
    image(&directory, "a.qcow2", "qcow2", 1);
    run(async |ring| {
        let disk = opened(&ring, &directory, "a.qcow2").await;
        {
            let mut change = std::pin::pin!(disk.resize(&ring, Bytes(50 << 20)));
            std::future::poll_fn(|context| {
                assert!(change.as_mut().poll(context).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
        }
        // Its turn is after the first one.
        let options = ResizeOptions::default();
        disk.resize_with(&ring, Bytes(60 << 20), options).await.expect("resize");
        assert_eq!(disk.size(), Bytes(60 << 20));
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    qemu_img(&directory, &["check", "-q", "-f", "qcow2", "a.qcow2"]);
}
