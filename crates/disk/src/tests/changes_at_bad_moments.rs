//! Changes of the graph that fail half way, or meet a client at the worst moment.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;

use ringdisk_ring::IoBuf;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::commit_faults::{Images, chain, images, storages};
use super::{assert_same, directory, open, qemu_img, qemu_io, read_steps, run};
use crate::disk::Parts;
use crate::open::qcow2_layer;
use crate::{CommitOptions, Disk, Errno, ImageOptions, OverlayOptions, Progress};

/// Bytes that nothing in the test images has.
const BYTE: u8 = 0x5e;

#[test]
fn an_overlay_over_an_image_that_cannot_be_closed_loses_nothing() {
    let (images, mut bytes) = images();
    for (errno, flushes) in [(Errno::NOSPC, Ok(())), (Errno::IO, Err(Errno::IO))] {
        run(async |ring| {
            let storages = storages(&images, 7);
            let disk = chain(&ring, &storages, "top.qcow2", true).await;
            let data = IoBuf::new(100_000, 512);
            data.fill(BYTE);
            assert_eq!(disk.write(&ring, 3_333_333, &data).await, Ok(data.len()));
            bytes[3_333_333..][..data.len()].fill(BYTE);
            // Nothing of it is in the image yet, and cannot get there.
            let sim = &storages["top.qcow2"];
            sim.on(When::kind(OpKind::Write), Fault::Fail(errno));
            let place = directory();
            let path = place.path().join("new.qcow2");
            let result = disk.add_overlay(&ring, &path, OverlayOptions::default()).await;
            assert_eq!(result.expect_err("it cannot be closed").errno(), Some(errno));
            assert!(!path.exists());
            sim.clear_rules();
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            assert_eq!(disk.flush(&ring).await, flushes);
            assert_eq!(disk.flush(&ring).await, flushes);
            if flushes.is_ok() {
                // It goes on, and the change works now.
                disk.add_overlay(&ring, &path, OverlayOptions::default()).await.expect("overlay");
                assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            }
            assert_eq!(disk.close(&ring).await, flushes);
        });
    }
}

/// Whether a file can be opened for writing beside those who use it.
fn may_be_written(path: &std::path::Path) -> bool {
    let options = ringdisk_storage::OpenOptions::default();
    ringdisk_storage::Storage::open(path, &options).is_ok()
}

#[test]
fn a_layer_that_cannot_be_opened_again_keeps_the_locks_of_both_of_its_files() {
    let place = directory();
    let path = |name: &str| place.path().join(name);
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "base.qcow2", "1M"]);
    let data = ["-o", "data_file=mid.data", "-b", "base.qcow2", "-F", "qcow2", "mid.qcow2"];
    qemu_img(&place, &[&["create", "-q", "-f", "qcow2"], &data[..]].concat());
    let over = ["create", "-q", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu_img(&place, &over);
    qemu_io(&place, "qcow2", "mid.qcow2", &["write -P 3 0 1M"]);
    run(async |ring| {
        let disk = open(&ring, path("top.qcow2"), &ImageOptions::default()).await.expect("open");
        let mid = std::fs::File::options().write(true).open(path("mid.qcow2")).expect("open");
        // An open finds no image now.
        std::os::unix::fs::FileExt::write_all_at(&mid, b"XFI", 0).expect("write");
        let through = CommitOptions { top: 0, base: 2, keep_top: false };
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, through, &progress).await.expect_err("it cannot be opened again");
        for name in ["mid.qcow2", "mid.data", "base.qcow2", "top.qcow2"] {
            assert!(!may_be_written(&path(name)), "{name} is not locked any more");
        }
        std::os::unix::fs::FileExt::write_all_at(&mid, b"QFI", 0).expect("write");
        disk.commit(&ring, through, &progress).await.expect("commit");
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &vec![3; 1 << 20]);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

/// As a layer that could not be opened for reading only after a change: its file is open for
/// writing still.
#[test]
fn a_file_that_is_in_the_wanted_mode_keeps_its_lock_when_its_image_cannot_be_opened_again() {
    let place = directory();
    let path = place.path().join("base.qcow2");
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "base.qcow2", "1M"]);
    let over = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu_img(&place, &over);
    let top =
        SimStorage::from_image(&std::fs::read(place.path().join("top.qcow2")).expect("read"), 1);
    run(async |ring| {
        let options = ringdisk_storage::OpenOptions::default();
        let base = ringdisk_storage::Storage::open(&path, &options).expect("open");
        let mut layers = Vec::new();
        for (storage, name, writable) in
            [(top.storage(), "top.qcow2", true), (Arc::new(base), "base.qcow2", false)]
        {
            let open = ringdisk_qcow2::OpenOptions { writable, ..Default::default() };
            let image = ringdisk_qcow2::Qcow2::open(&ring, storage, &open).await.expect("open");
            let mut layer = qcow2_layer(image, writable);
            layer.name = place.path().join(name);
            layer.directory = Some(place.path().to_owned());
            layers.push(layer);
        }
        let disk = Disk::build(layers, Parts::new(&ImageOptions::default()));
        let file = std::fs::File::options().write(true).open(&path).expect("open");
        std::os::unix::fs::FileExt::write_all_at(&file, b"XFI", 0).expect("write");
        let progress = Arc::new(Progress::new());
        let result = disk.commit(&ring, CommitOptions::TOP, &progress).await;
        result.expect_err("it cannot be opened again");
        assert!(!may_be_written(&path), "it is not locked any more");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn what_is_discarded_while_a_commit_copies_it_stays_discarded() {
    for compat in ["0.10", "1.1"] {
        let place = directory();
        let option = format!("compat={compat}");
        qemu_img(&place, &["create", "-q", "-f", "qcow2", "base.qcow2", "1M"]);
        let create = ["create", "-q", "-f", "qcow2", "-o", &option];
        let backing = ["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
        qemu_img(&place, &[&create[..], &backing].concat());
        qemu_io(&place, "qcow2", "top.qcow2", &["write -P 1 0 1M"]);
        let mut images = Images::new();
        for name in ["base.qcow2", "top.qcow2"] {
            let content = std::fs::read(place.path().join(name)).expect("read");
            images.insert(name.to_owned(), SimStorage::from_image(&content, 1));
        }
        run(async |ring| {
            let disk = chain(&ring, &images, "top.qcow2", true).await;
            let base = &images["base.qcow2"];
            base.on(When::kind(OpKind::Write), Fault::Hold);
            let (other, handle) = (Arc::clone(&disk), ring.clone());
            let done = std::rc::Rc::new(std::cell::Cell::new(false));
            let flag = done.clone();
            ring.spawn(async move {
                let progress = Arc::new(Progress::new());
                other.commit(&handle, CommitOptions::TOP, &progress).await.expect("commit");
                flag.set(true);
            });
            while base.held().is_empty() {
                ring.yield_now().await;
            }
            // What was read of it is on its way into the base.
            assert_eq!(disk.punch(&ring, 0, Bytes(512 << 10)).await, Ok(()));
            base.clear_rules();
            while !done.get() {
                base.release_all();
                ring.yield_now().await;
            }
            let mut bytes = vec![1; 1 << 20];
            bytes[..512 << 10].fill(0);
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            assert_eq!(disk.layers().len(), 1);
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

/// Each live change opens the image again. What reads had shown to be in use, whatever its count
/// says, is known afterwards, too.
#[test]
fn a_cluster_that_was_read_is_not_given_away_after_a_change() {
    const CLUSTER: usize = 4096;
    let place = directory();
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096", "image", "8M"];
    qemu_img(&place, &create);
    qemu_io(&place, "qcow2", "image", &["write -P 1 0 64k", "write -P 0x22 2M 4k"]);
    let path = place.path().join("image");
    let mut bytes = std::fs::read(&path).expect("read");
    let word = |bytes: &[u8], at: usize| {
        let raw = bytes[at..at + 8].try_into().expect("8 bytes");
        usize::try_from(u64::from_be_bytes(raw) & 0x00ff_ffff_ffff_fe00).expect("small")
    };
    let table = word(&bytes, word(&bytes, 40) + 8);
    let host = word(&bytes, table);
    assert_eq!(bytes[host], 0x22);
    let counts = word(&bytes, word(&bytes, 48));
    // It is the only one that looks free.
    for cluster in 0..bytes.len() / CLUSTER {
        let at = counts + 2 * cluster;
        if bytes[at..at + 2] == [0, 0] || cluster == host / CLUSTER {
            bytes[at + 1] = u8::from(cluster != host / CLUSTER);
        }
    }
    std::fs::write(&path, &bytes).expect("write");
    for change in ["resize", "snapshot", "an overlay that is merged again"] {
        std::fs::write(&path, &bytes).expect("write");
        let overlay = place.path().join("overlay");
        let _ = std::fs::remove_file(&overlay);
        run(async |ring| {
            let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
            let buf = IoBuf::new(CLUSTER, 4096);
            assert_eq!(disk.read(&ring, 2 << 20, &buf).await, Ok(CLUSTER));
            // They may be refused.
            let is_made = match change {
                "resize" => disk.resize(&ring, Bytes(16 << 20)).await.is_ok(),
                "snapshot" => {
                    let create = crate::SnapshotChange::Create("s".to_owned());
                    disk.snapshot(&ring, create).await.is_ok()
                }
                _ => {
                    let made = disk.add_overlay(&ring, &overlay, OverlayOptions::default()).await;
                    made.expect("an overlay");
                    let progress = Arc::new(Progress::default());
                    let commit = disk.commit(&ring, CommitOptions::TOP, &progress);
                    commit.await.expect("nothing to copy");
                    true
                }
            };
            buf.fill(0x77);
            let written = disk.write(&ring, 1 << 20, &buf).await;
            assert!(!is_made || written.is_err(), "{change}: one needs a cluster");
            buf.fill(0);
            assert_eq!(disk.read(&ring, 2 << 20, &buf).await, Ok(CLUSTER));
            assert!(buf.to_vec().iter().all(|byte| *byte == 0x22), "{change}");
            let _ = disk.close(&ring).await;
        });
    }
}
