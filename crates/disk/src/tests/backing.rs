//! Another backing file for a disk in use: what discards uncover, what snapshots show; and disks
//! whose images have lost their names.

use std::cell::RefCell;
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use tempfile::TempDir;

use super::{assert_same, directory, open, qemu_img, qemu_io, read_steps, run};
use crate::disk::Parts;
use crate::open::qcow2_layer;
use crate::operations::{Rebase, rebase};
use crate::{
    Backing, CommitOptions, Disk, Error, ErrorKind, Format, ImageOptions, OverlayOptions, Progress,
    SnapshotChange,
};
use ringdisk_qcow2::{Bytes, GuestOffset};

const MIB: usize = 1 << 20;

fn backing(name: &str) -> Backing {
    Backing { file: name.as_bytes().to_vec(), format: Format::Qcow2 }
}

async fn change_to(ring: &Ring, disk: &Disk, name: &str) -> Result<(), Error> {
    disk.change_backing(ring, Some(backing(name)), &Arc::new(Progress::new())).await
}

/// A chain of simulated images in a directory where new backing files are.
async fn simulated(ring: &Ring, place: &TempDir, images: &[(&str, &SimStorage)]) -> Arc<Disk> {
    let mut layers = Vec::new();
    for (depth, (name, sim)) in images.iter().enumerate() {
        let open = ringdisk_qcow2::OpenOptions { writable: depth == 0, ..Default::default() };
        let image = ringdisk_qcow2::Qcow2::open(ring, sim.storage(), &open).await.expect("open");
        let mut layer = qcow2_layer(image, depth == 0);
        layer.name = place.path().join(name);
        layer.directory = Some(place.path().to_owned());
        layers.push(layer);
    }
    Disk::build(layers, Parts::new(&ImageOptions::default()))
}

#[test]
fn what_a_discard_uncovers_while_backing_files_are_compared_is_compared_again() {
    for compat in ["0.10", "1.1"] {
        let place = directory();
        // Both have 7s at 2 MiB; the new one has 9s at 0, which the top hides.
        for name in ["base.qcow2", "other.qcow2"] {
            qemu_img(&place, &["create", "-q", "-f", "qcow2", name, "4M"]);
            qemu_io(&place, "qcow2", name, &["write -P 7 2M 64k"]);
        }
        qemu_io(&place, "qcow2", "other.qcow2", &["write -P 9 0 64k"]);
        let (option, over) = (format!("compat={compat}"), ["-b", "base.qcow2", "-F", "qcow2"]);
        let create = ["create", "-q", "-f", "qcow2", "-o", &option, "top.qcow2"];
        qemu_img(&place, &[&create[..], &over].concat());
        qemu_io(&place, "qcow2", "top.qcow2", &["write -P 1 0 64k"]);
        let image = |name: &str| std::fs::read(place.path().join(name)).expect("read");
        let (top, base) = (image("top.qcow2"), image("base.qcow2"));
        let sevens = base.iter().position(|&byte| byte == 7).expect("the data") as u64;
        run(async |ring| {
            let (top, base) = (SimStorage::from_image(&top, 1), SimStorage::from_image(&base, 1));
            let images = [("top.qcow2", &top), ("base.qcow2", &base)];
            let disk = simulated(&ring, &place, &images).await;
            // The tables are in memory, so a discard knows that nothing is below.
            read_steps(&ring, &disk, MIB).await;
            base.on(When::kind(OpKind::Read).at(sevens..sevens + 512), Fault::Hold);
            let progress = Arc::new(Progress::new());
            let result = Rc::new(RefCell::new(None));
            let (other, handle) = (Arc::clone(&disk), ring.clone());
            let (shared, slot) = (Arc::clone(&progress), Rc::clone(&result));
            ring.spawn(async move {
                let changed = other.change_backing(&handle, Some(backing("other.qcow2")), &shared);
                let changed = changed.await;
                *slot.borrow_mut() = Some(changed);
            });
            // All is compared but the piece that is held.
            while base.held().is_empty() || progress.done() < Bytes(3 * MIB as u64) {
                ring.sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(disk.discard(&ring, 0, Bytes(64 << 10)).await, Ok(()));
            let mut bytes = vec![0; 4 * MIB];
            bytes[2 * MIB..2 * MIB + (64 << 10)].fill(7);
            base.clear_rules();
            while result.borrow().is_none() {
                base.release_all();
                ring.sleep(std::time::Duration::from_millis(1)).await;
            }
            let result = result.take().expect("it has ended");
            // An image of version 3 says itself that the place is zero.
            assert_eq!(
                result.map_err(|error| error.kind()).err(),
                (compat == "0.10").then_some(ErrorKind::Invalid)
            );
            assert_same(&read_steps(&ring, &disk, MIB).await, &bytes);
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

#[test]
fn clients_append_while_backing_files_are_compared() {
    // Whether the new file has something where the old one has ended.
    for has_more in [false, true] {
        let place = directory();
        for name in ["base.qcow2", "other.qcow2"] {
            qemu_img(&place, &["create", "-q", "-f", "qcow2", name, "16M"]);
            qemu_io(&place, "qcow2", name, &["write -P 7 0 16M"]);
        }
        let create =
            ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
        qemu_img(&place, &create);
        if has_more {
            qemu_img(&place, &["resize", "-q", "-f", "qcow2", "other.qcow2", "20M"]);
            qemu_io(&place, "qcow2", "other.qcow2", &["write -P 9 17M 64k"]);
        }
        let image = |name: &str| std::fs::read(place.path().join(name)).expect("read");
        let (top, base) = (image("top.qcow2"), image("base.qcow2"));
        run(async |ring| {
            let (top, base) = (SimStorage::from_image(&top, 1), SimStorage::from_image(&base, 1));
            let images = [("top.qcow2", &top), ("base.qcow2", &base)];
            let disk = simulated(&ring, &place, &images).await;
            base.on(When::kind(OpKind::Read), Fault::Hold);
            let progress = Arc::new(Progress::new());
            let (other, handle, shared) = (Arc::clone(&disk), ring.clone(), Arc::clone(&progress));
            let result = start(&ring, async move {
                other.change_backing(&handle, Some(backing("other.qcow2")), &shared).await
            });
            while base.held().is_empty() {
                ring.sleep(std::time::Duration::from_millis(1)).await;
            }
            let grown = Rc::new(std::cell::Cell::new(None));
            let (other, handle, slot) = (Arc::clone(&disk), ring.clone(), Rc::clone(&grown));
            ring.spawn(async move {
                slot.set(Some(other.grow(&handle, Bytes(20 * MIB as u64)).await));
            });
            while grown.get().is_none() {
                base.release_all();
                ring.sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(grown.get(), Some(Ok(())));
            assert!(
                progress.done() < Bytes(16 * MIB as u64),
                "it has waited until all was compared"
            );
            // Other changes wait for the next time.
            let snapshot = disk.snapshot(&ring, SnapshotChange::Create("s".to_owned())).await;
            assert_eq!(snapshot.expect_err("busy").kind(), ErrorKind::Busy);
            base.clear_rules();
            base.release_all();
            let at = 19 * MIB;
            assert_eq!(disk.write(&ring, at as u64, &super::buffer(&[6; 4096])).await, Ok(4096));
            while result.borrow().is_none() {
                base.release_all();
                ring.sleep(std::time::Duration::from_millis(1)).await;
            }
            let result = result.take().expect("it has ended").map_err(|error| error.kind());
            assert_eq!(result.err(), has_more.then_some(ErrorKind::Invalid));
            let mut bytes = vec![7; 16 * MIB];
            bytes.resize(20 * MIB, 0);
            bytes[at..at + 4096].fill(6);
            assert_same(&read_steps(&ring, &disk, MIB).await, &bytes);
            let layers = disk.layers();
            let named = layers[0].qcow2().and_then(|image| image.info().backing_file.clone());
            let expected = if has_more { "base.qcow2" } else { "other.qcow2" };
            assert_eq!(named.as_deref(), Some(expected.as_bytes()));
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

/// `top.qcow2` over `base.qcow2` with the snapshot `old`, which shows 1s of the base where the top
/// has 2s now; `same.qcow2` and `other.qcow2`, which has 3s there. All are of 1 MiB.
fn with_snapshot() -> TempDir {
    let place = directory();
    for (name, byte) in [("base.qcow2", 1), ("same.qcow2", 1), ("other.qcow2", 3)] {
        qemu_img(&place, &["create", "-q", "-f", "qcow2", name, "1M"]);
        qemu_io(&place, "qcow2", name, &[&format!("write -P {byte} 0 1M")]);
    }
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu_img(&place, &create);
    qemu_img(&place, &["snapshot", "-c", "old", "top.qcow2"]);
    qemu_io(&place, "qcow2", "top.qcow2", &["write -P 2 0 1M"]);
    place
}

#[test]
fn a_snapshot_that_would_show_other_bytes_keeps_its_backing_file() {
    let place = with_snapshot();
    let top = place.path().join("top.qcow2");
    run(async |ring| {
        let disk = open(&ring, &top, &ImageOptions::default()).await.expect("open");
        let error = change_to(&ring, &disk, "other.qcow2").await.expect_err("the snapshot");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("'old'"), "{error}");
        assert_same(&read_steps(&ring, &disk, MIB).await, &vec![2; MIB]);
        // None at all would show zeroes.
        let progress = Arc::new(Progress::new());
        let error = disk.change_backing(&ring, None, &progress).await.expect_err("the snapshot");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        change_to(&ring, &disk, "same.qcow2").await.expect("the same content");
        let apply = SnapshotChange::Apply("old".to_owned());
        disk.snapshot(&ring, apply).await.expect("apply");
        assert_same(&read_steps(&ring, &disk, MIB).await, &vec![1; MIB]);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    qemu_img(&place, &["check", "-q", "top.qcow2"]);
}

#[test]
fn a_rebase_that_would_change_a_snapshot_is_refused() {
    let place = with_snapshot();
    let top = place.path().join("top.qcow2");
    let before = std::fs::read(&top).expect("read");
    run(async |ring| {
        let options = ImageOptions::default();
        let to = |name: Option<&str>| Rebase {
            backing: name.map(backing),
            header_only: false,
            ..Rebase::default()
        };
        for name in [Some("other.qcow2"), None] {
            let progress = Arc::new(Progress::new());
            let result = rebase(&ring, top.clone(), &options, &to(name), &progress).await;
            let error = result.expect_err("the snapshot");
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
        assert!(std::fs::read(&top).expect("read") == before, "the image is as it was");
        let progress = Arc::new(Progress::new());
        let same = to(Some("same.qcow2"));
        rebase(&ring, top.clone(), &options, &same, &progress).await.expect("the same content");
    });
    qemu_img(&place, &["snapshot", "-a", "old", "top.qcow2"]);
    qemu_img(&place, &["compare", "-q", "top.qcow2", "same.qcow2"]);
}

/// `top.qcow2` over `base.qcow2`.
fn two() -> TempDir {
    let place = directory();
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "base.qcow2", "1M"]);
    qemu_io(&place, "qcow2", "base.qcow2", &["write -P 1 0 1M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu_img(&place, &create);
    std::fs::copy(place.path().join("base.qcow2"), place.path().join("same.qcow2")).expect("copy");
    place
}

/// Nothing that relies on the name is made, and the disk works on.
async fn refused(ring: &Ring, place: &Path, disk: &Disk) {
    let new = place.join("new.qcow2");
    let overlay = disk.add_overlay(ring, &new, OverlayOptions::default()).await;
    assert_eq!(overlay.expect_err("an overlay").kind(), ErrorKind::NotFound);
    assert!(!new.exists());
    assert_eq!(disk.lost_names().len(), 1);
    assert_same(&read_steps(ring, disk, MIB).await, &vec![1; MIB]);
    assert_eq!(disk.write(ring, 0, &super::buffer(&[1; 512])).await, Ok(512));
    assert_eq!(disk.flush(ring).await, Ok(()));
}

#[test]
fn nothing_is_put_above_an_image_that_lost_its_name() {
    let rename =
        |place: &Path| std::fs::rename(place.join("top.qcow2"), place.join("x")).expect("rename");
    let delete = |place: &Path| std::fs::remove_file(place.join("top.qcow2")).expect("delete");
    let replace = |place: &Path| {
        std::fs::copy(place.join("same.qcow2"), place.join("y")).expect("copy");
        std::fs::rename(place.join("y"), place.join("top.qcow2")).expect("rename");
    };
    let ways: [&dyn Fn(&Path); 3] = [&rename, &delete, &replace];
    for lose in ways {
        let place = two();
        run(async |ring| {
            let top = place.path().join("top.qcow2");
            let disk = open(&ring, &top, &ImageOptions::default()).await.expect("open");
            assert_eq!(disk.lost_names(), Vec::<String>::new());
            lose(place.path());
            refused(&ring, place.path(), &disk).await;
            let create = SnapshotChange::Create("a".to_owned());
            let snapshot = disk.snapshot(&ring, create).await.expect_err("a snapshot");
            assert_eq!(snapshot.kind(), ErrorKind::NotFound);
            let changed = change_to(&ring, &disk, "same.qcow2").await.expect_err("backing");
            assert_eq!(changed.kind(), ErrorKind::NotFound);
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

#[test]
fn an_image_that_has_its_name_again_is_as_before() {
    let place = two();
    run(async |ring| {
        let (top, away) = (place.path().join("top.qcow2"), place.path().join("away"));
        let disk = open(&ring, &top, &ImageOptions::default()).await.expect("open");
        std::fs::rename(&top, &away).expect("rename");
        refused(&ring, place.path(), &disk).await;
        std::fs::rename(&away, &top).expect("rename");
        let new = place.path().join("new.qcow2");
        disk.add_overlay(&ring, &new, OverlayOptions::default()).await.expect("overlay");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_deleted_backing_file_takes_nothing_in_and_can_be_replaced_by_its_like() {
    let place = two();
    run(async |ring| {
        let top = place.path().join("top.qcow2");
        let disk = open(&ring, &top, &ImageOptions::default()).await.expect("open");
        std::fs::remove_file(place.path().join("base.qcow2")).expect("delete");
        refused(&ring, place.path(), &disk).await;
        let progress = Arc::new(Progress::new());
        let commit = disk.commit(&ring, CommitOptions::TOP, &progress).await;
        assert_eq!(commit.expect_err("into what is gone").kind(), ErrorKind::NotFound);
        change_to(&ring, &disk, "same.qcow2").await.expect("another one");
        assert_eq!(disk.lost_names(), Vec::<String>::new());
        assert_same(&read_steps(&ring, &disk, MIB).await, &vec![1; MIB]);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    qemu_img(&place, &["compare", "-q", "top.qcow2", "same.qcow2"]);
}

/// A change that runs as a task, and its result once it has ended.
fn start<F: Future<Output = Result<(), Error>> + 'static>(
    ring: &Ring,
    change: F,
) -> Rc<RefCell<Option<Result<(), Error>>>> {
    let result = Rc::new(RefCell::new(None));
    let slot = Rc::clone(&result);
    ring.spawn(async move {
        let changed = change.await;
        *slot.borrow_mut() = Some(changed);
    });
    result
}

/// Continues the held operations until the change has ended, with `NotFound`.
async fn ends_for_want_of_a_name(
    ring: &Ring,
    held: &SimStorage,
    result: &RefCell<Option<Result<(), Error>>>,
) {
    held.clear_rules();
    while result.borrow().is_none() {
        held.release_all();
        ring.sleep(std::time::Duration::from_millis(1)).await;
    }
    let result = result.take().expect("it has ended");
    assert_eq!(result.expect_err("the name is lost").kind(), ErrorKind::NotFound);
}

/// `top.qcow2`, simulated, with 5s in its first cluster, over the file `base.qcow2`.
async fn over_a_file(ring: &Ring, place: &TempDir) -> (Arc<Disk>, SimStorage) {
    let read = |name: &str| std::fs::read(place.path().join(name)).expect("read");
    let top = SimStorage::from_image(&read("top.qcow2"), 1);
    let reading = ringdisk_storage::OpenOptions { read_only: true, ..Default::default() };
    let path = place.path().join("base.qcow2");
    let base = ringdisk_storage::Storage::open(&path, &reading).expect("open");
    let mut layers = Vec::new();
    for (storage, name, writable) in
        [(top.storage(), "top.qcow2", true), (Arc::new(base), "base.qcow2", false)]
    {
        let open = ringdisk_qcow2::OpenOptions { writable, ..Default::default() };
        let image = ringdisk_qcow2::Qcow2::open(ring, storage, &open).await.expect("open");
        let mut layer = qcow2_layer(image, writable);
        layer.name = place.path().join(name);
        layer.directory = Some(place.path().to_owned());
        layers.push(layer);
    }
    let disk = Disk::build(layers, Parts::new(&ImageOptions::default()));
    assert_eq!(disk.write(ring, 0, &super::buffer(&[5; 65536])).await, Ok(65536));
    assert_eq!(disk.flush(ring).await, Ok(()));
    (disk, top)
}

#[test]
fn a_base_that_is_deleted_while_a_commit_copies_gets_no_data_that_is_taken_from_the_top() {
    let place = two();
    let mut bytes = vec![1; MIB];
    bytes[..65536].fill(5);
    run(async |ring| {
        let (disk, top) = over_a_file(&ring, &place).await;
        top.on(When::kind(OpKind::Read), Fault::Hold);
        let (other, handle) = (Arc::clone(&disk), ring.clone());
        let result = start(&ring, async move {
            let progress = Arc::new(Progress::new());
            other.commit(&handle, CommitOptions::TOP, &progress).await
        });
        while top.held().is_empty() {
            ring.sleep(std::time::Duration::from_millis(1)).await;
        }
        let (base, away) = (place.path().join("base.qcow2"), place.path().join("away"));
        std::fs::rename(&base, &away).expect("rename");
        ends_for_want_of_a_name(&ring, &top, &result).await;
        assert_eq!(disk.layers().len(), 2);
        assert!(!disk.layers()[1].is_writable());
        assert_same(&read_steps(&ring, &disk, MIB).await, &bytes);
        let open = ringdisk_qcow2::OpenOptions::default();
        let emptied = ringdisk_qcow2::Qcow2::open(&ring, top.fork(1).storage(), &open).await;
        let kept =
            emptied.expect("open").map(&ring, GuestOffset(0), Bytes(65536)).await.expect("map");
        assert!(matches!(kept.kind, ringdisk_qcow2::ExtentKind::Data { .. }), "{kept:?}");
        // With its name again it takes the data.
        std::fs::rename(&away, &base).expect("rename");
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        assert_same(&read_steps(&ring, &disk, MIB).await, &bytes);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_new_backing_file_that_is_deleted_while_it_is_compared_is_not_taken() {
    let place = two();
    let image = |name: &str| std::fs::read(place.path().join(name)).expect("read");
    let (top, base) = (image("top.qcow2"), image("base.qcow2"));
    run(async |ring| {
        let (top, base) = (SimStorage::from_image(&top, 1), SimStorage::from_image(&base, 1));
        let images = [("top.qcow2", &top), ("base.qcow2", &base)];
        let disk = simulated(&ring, &place, &images).await;
        base.on(When::kind(OpKind::Read), Fault::Hold);
        let (other, handle) = (Arc::clone(&disk), ring.clone());
        let result = start(&ring, async move { change_to(&handle, &other, "same.qcow2").await });
        while base.held().is_empty() {
            ring.sleep(std::time::Duration::from_millis(1)).await;
        }
        std::fs::remove_file(place.path().join("same.qcow2")).expect("delete");
        ends_for_want_of_a_name(&ring, &base, &result).await;
        let layers = disk.layers();
        let named = layers[0].qcow2().and_then(|image| image.info().backing_file.as_deref());
        assert_eq!(named, Some(&b"base.qcow2"[..]));
        assert_same(&read_steps(&ring, &disk, MIB).await, &vec![1; MIB]);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn an_overlay_that_loses_its_name_while_requests_are_waited_for_is_not_used() {
    let place = two();
    let new = place.path().join("new.qcow2");
    run(async |ring| {
        let (disk, top) = over_a_file(&ring, &place).await;
        top.on(When::kind(OpKind::Read), Fault::Hold);
        let (other, handle) = (Arc::clone(&disk), ring.clone());
        ring.spawn(async move {
            let _ = other.read(&handle, 0, &ringdisk_ring::IoBuf::new(512, 512)).await;
        });
        while top.held().is_empty() {
            ring.yield_now().await;
        }
        let (other, handle, path) = (Arc::clone(&disk), ring.clone(), new.clone());
        let result = start(&ring, async move {
            other.add_overlay(&handle, path, OverlayOptions::default()).await
        });
        // It is written when it is that long.
        while std::fs::metadata(&new).map_or(0, |stat| stat.len()) < 65536 {
            ring.sleep(std::time::Duration::from_millis(1)).await;
        }
        ring.sleep(std::time::Duration::from_millis(50)).await;
        std::fs::remove_file(&new).expect("delete");
        std::fs::write(&new, "of somebody else").expect("write");
        ends_for_want_of_a_name(&ring, &top, &result).await;
        assert_eq!(std::fs::read(&new).expect("read"), b"of somebody else");
        assert_eq!(disk.layers().len(), 2);
        assert_eq!(disk.write(&ring, 0, &super::buffer(&[6; 512])).await, Ok(512));
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn what_is_in_a_deleted_overlay_can_be_brought_into_its_backing_file() {
    let place = two();
    run(async |ring| {
        let top = place.path().join("top.qcow2");
        let disk = open(&ring, &top, &ImageOptions::default()).await.expect("open");
        assert_eq!(disk.write(&ring, 0, &super::buffer(&[5; 4096])).await, Ok(4096));
        std::fs::remove_file(&top).expect("delete");
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        assert_eq!(disk.lost_names(), Vec::<String>::new());
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    let read = qemu_io_read(&place);
    assert!(read.contains("0x05") || read.contains("05 05"), "{read}");
}

fn qemu_io_read(place: &TempDir) -> String {
    let arguments = ["-f", "qcow2", "-c", "read -v -P 5 0 16", "base.qcow2"];
    super::program(place.path(), "qemu-io", &arguments)
}
