//! Copy-on-read: what clients read of the layers below is kept in the top image.

use std::sync::Arc;

use ringdisk_qcow2::{Bytes, check_bytes};
use ringdisk_ring::{Errno, IoBuf};
use ringdisk_testkit::sim::{Fault, OpKind, When};

use super::{SIZE, SOME, finish, image, opened, overlay};
use crate::tests::commit_faults::{chain, images, storages};
use crate::tests::load::Load;
use crate::tests::{assert_same, directory, open, qemu_img, read_steps, reading, run};
use crate::{CommitOptions, ErrorKind, ImageOptions, OverlayOptions, Progress, StreamOptions};

/// Options of the image on top.
const SHAPES: [&str; 4] = [
    "compat=1.1",
    "compat=0.10,cluster_size=4096",
    "extended_l2=on,cluster_size=128k",
    "data_file=top.data",
];

fn kept() -> ImageOptions {
    ImageOptions { copy_on_read: true, ..ImageOptions::default() }
}

#[test]
fn what_clients_have_read_needs_no_layer_below() {
    for (seed, shape) in (51..).zip(SHAPES) {
        let directory = directory();
        let mut bytes = image(&directory, "base.raw", "raw", 1);
        overlay(&directory, "mid.qcow2", ("base.raw", "raw"), &mut bytes, 2);
        let create = ["create", "-q", "-f", "qcow2", "-o", shape, "-b", "mid.qcow2", "-F", "qcow2"];
        qemu_img(&directory, &[&create[..], &["top.qcow2"]].concat());
        run(async |ring| {
            let disk =
                open(&ring, directory.path().join("top.qcow2"), &kept()).await.expect("open");
            let load = Load::start(&disk, &bytes, seed);
            load.progress(&ring, 4 * SOME).await;
            // It ends with a read of everything.
            assert!(disk.kept_on_read() > Bytes(1 << 20), "{shape}: {}", disk.kept_on_read());
            finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
        });
        qemu_img(&directory, &["rebase", "-q", "-u", "-f", "qcow2", "-b", "", "top.qcow2"]);
        super::same_for_qemu(&directory, "top.qcow2", "qcow2", &bytes);
    }
}

#[test]
fn a_part_of_a_cluster_that_is_read_is_kept_with_the_whole_cluster() {
    let directory = directory();
    let bytes = image(&directory, "base.raw", "raw", 1);
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"];
    qemu_img(&directory, &create);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let buf = IoBuf::new(512, 512);
        let at = 20_480;
        assert_eq!(disk.read(&ring, at, &buf).await, Ok(512));
        assert_eq!(disk.kept_on_read(), Bytes::ZERO, "it is off");
        disk.set_copy_on_read(true).expect("an overlay");
        assert!(disk.copies_on_read());
        let read = async |at| {
            disk.read(&ring, at, &buf).await.expect("read");
            disk.kept_on_read()
        };
        let one = read(at).await;
        assert!(one > Bytes::ZERO);
        assert_same(&buf.to_vec(), &bytes[20_480..20_992]);
        // The same cluster, what is nowhere, and what is past the end.
        for at in [at, 60_000, 1 << 20, SIZE as u64 - 512, SIZE as u64] {
            assert_eq!(read(at).await, one, "{at}");
        }
        // By a look-up, as transports that read the storage themselves do it.
        let view = disk.view().await;
        drop(view.map(&ring, 10 << 20, Bytes(512)).await.expect("mapped"));
        drop(view);
        let two = disk.kept_on_read();
        assert!(two > one);
        assert_eq!(read(10 << 20).await, two);
        disk.set_copy_on_read(false).expect("off");
        assert_eq!(read(14 << 20).await, two);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn chains_change_while_what_is_read_is_kept() {
    let directory = directory();
    let mut bytes = image(&directory, "base.qcow2", "qcow2", 1);
    overlay(&directory, "top.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
    run(async |ring| {
        let disk = open(&ring, directory.path().join("top.qcow2"), &kept()).await.expect("open");
        let load = Load::start(&disk, &bytes, 61);
        for round in 0..3 {
            load.progress(&ring, SOME).await;
            let file = directory.path().join(format!("over{round}.qcow2"));
            disk.add_overlay(&ring, &file, OverlayOptions::default()).await.expect("overlay");
            load.progress(&ring, SOME).await;
            disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await.expect("commit");
        }
        let file = directory.path().join("last.qcow2");
        disk.add_overlay(&ring, &file, OverlayOptions::default()).await.expect("overlay");
        load.progress(&ring, SOME).await;
        let options = StreamOptions { base: Some(2) };
        disk.stream(&ring, options, &Arc::new(Progress::new())).await.expect("stream");
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "last.qcow2", &mut bytes).await;
    });
}

/// The client's read is served from below, and the top is sound.
#[test]
fn a_top_that_takes_nothing_costs_the_client_nothing() {
    let (files, bytes) = images();
    run(async |ring| {
        let sims = storages(&files, 1);
        let disk = chain(&ring, &sims, "top.qcow2", true).await;
        disk.set_copy_on_read(true).expect("an overlay");
        sims["top.qcow2"].on(When::kind(OpKind::Write), Fault::Fail(Errno::NOSPC));
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        assert_eq!(disk.kept_on_read(), Bytes::ZERO);
        sims["top.qcow2"].clear_rules();
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        assert!(disk.kept_on_read() > Bytes::ZERO, "there is room again");
        assert_eq!(disk.close(&ring).await, Ok(()));
        let top = check_bytes(sims["top.qcow2"].image().as_slice()).expect("it can be checked");
        assert_eq!(top.corruptions, 0, "{:?}", top.messages);
    });
}

#[test]
fn a_disk_without_a_place_for_it_refuses() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    run(async |ring| {
        let disk = opened(&ring, &directory, "base.raw").await;
        let error = disk.set_copy_on_read(true).expect_err("raw");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        let disk = open(&ring, directory.path().join("top.qcow2"), &reading()).await.expect("open");
        let error = disk.set_copy_on_read(true).expect_err("read-only");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        disk.set_copy_on_read(false).expect("it is off");
    });
}
