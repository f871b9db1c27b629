//! Commits on storage that loses power or fails: the chain reads the same at every moment.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, Qcow2, check_bytes};
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, Prng, SimStorage, When};

use super::{assert_same, directory, qemu_img, qemu_io, read_steps, run};
use crate::disk::Parts;
use crate::layer::{Layer, Node, Raw};
use crate::open::qcow2_layer;
use crate::{CommitOptions, Disk, Errno, ImageOptions, Progress, ResizeOptions};

/// Crash states of each commit.
const CRASHES: usize = 60;

/// Images by the names that others give them.
pub(super) type Images = BTreeMap<String, SimStorage>;

/// Sizes of the base, the middle, the upper layer if there is one, and the top, MiB.
type Sizes = &'static [usize];
const EQUAL: Sizes = &[4, 4, 4];
/// The base has more than the disk, which was made smaller.
const LONG_BASE: Sizes = &[6, 4, 4];
/// A layer between hides the end of the base.
const SHORT_MIDDLE: Sizes = &[4, 2, 4];
/// The same with another layer between, above it: as long as the base, or not.
const SHORT_BELOW: Sizes = &[4, 2, 4, 4];
const SHORTER_BELOW: Sizes = &[5, 2, 3, 4];

/// Names of the images, from the base up.
fn names(sizes: Sizes) -> &'static [&'static str] {
    match sizes.len() {
        3 => &["base.qcow2", "mid.qcow2", "top.qcow2"],
        _ => &["base.qcow2", "mid.qcow2", "upper.qcow2", "top.qcow2"],
    }
}

/// `top.qcow2` over `mid.qcow2` over `base.qcow2`, and what it shows.
pub(super) fn images() -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
    images_of(EQUAL)
}

fn images_of(sizes: Sizes) -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
    let directory = directory();
    let mut bytes = Vec::new();
    let mut images = BTreeMap::new();
    let mut below = "";
    for (number, name) in names(sizes).iter().copied().enumerate() {
        let size = format!("{}M", sizes[number]);
        bytes.resize(sizes[number] << 20, 0);
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", "cluster_size=16k"];
        if number > 0 {
            create.extend(["-b", below, "-F", "qcow2"]);
        }
        create.extend([name, &size]);
        qemu_img(&directory, &create);
        let byte = u8::try_from(number + 1).expect("small");
        for piece in 0..sizes[number] {
            let (at, len) = (piece * (1 << 20) + number * 200_000, 250_000);
            qemu_io(&directory, "qcow2", name, &[&format!("write -P {byte} {at} {len}")]);
            bytes[at..at + len].fill(byte);
        }
        let zero = number * 500_000;
        qemu_io(&directory, "qcow2", name, &[&format!("write -z {zero} 100000")]);
        bytes[zero..zero + 100_000].fill(0);
        below = name;
    }
    for name in names(sizes) {
        images.insert((*name).to_owned(), fs::read(directory.path().join(name)).expect("read"));
    }
    (images, bytes)
}

/// What clients write after a commit, whatever came of it: at the beginning and at the end.
///
/// Errors: what the clients got.
async fn write_on(ring: &Ring, disk: &Disk, bytes: &mut [u8]) -> Result<(), Errno> {
    let data = IoBuf::new(300_000, 512);
    data.fill(0x77);
    for at in [100_000, bytes.len() - data.len()] {
        assert_eq!(disk.write(ring, at as u64, &data).await?, data.len());
        bytes[at..at + data.len()].fill(0x77);
    }
    disk.flush(ring).await
}

pub(super) fn storages(images: &BTreeMap<String, Vec<u8>>, seed: u64) -> Images {
    images.iter().map(|(name, bytes)| (name.clone(), SimStorage::from_image(bytes, seed))).collect()
}

/// Opens a chain as its headers say.
pub(super) async fn chain(ring: &Ring, images: &Images, top: &str, writable: bool) -> Arc<Disk> {
    chain_in(ring, images, top, writable, Path::new("/simulated")).await
}

/// As [`chain`], with images in this directory.
pub(super) async fn chain_in(
    ring: &Ring,
    images: &Images,
    top: &str,
    writable: bool,
    directory: &Path,
) -> Arc<Disk> {
    let options = ImageOptions { read_only: !writable, ..ImageOptions::default() };
    let mut layers: Vec<Layer> = Vec::new();
    let mut next = Some(top.to_owned());
    while let Some(name) = next {
        let writable = writable && layers.is_empty();
        let open = ringdisk_qcow2::OpenOptions { writable, ..Default::default() };
        let storage = images[&name].storage();
        let image = Qcow2::open(ring, storage, &open).await.expect("the image opens");
        next = image.info().backing_file.clone().map(|name| String::from_utf8(name).expect("text"));
        let mut layer = qcow2_layer(image, writable);
        layer.name = PathBuf::from(name);
        layer.directory = Some(directory.to_owned());
        layers.push(layer);
    }
    Disk::build(layers, Parts::new(&options))
}

/// What is on the media if the power fails now.
fn crash(images: &Images, seed: u64) -> BTreeMap<String, Vec<u8>> {
    images.iter().map(|(name, sim)| (name.clone(), sim.crash_image(seed))).collect()
}

/// All images are sound, and the chain from `top` shows `bytes`.
async fn judge(ring: &Ring, images: &BTreeMap<String, Vec<u8>>, top: &str, bytes: &[u8]) {
    for (name, image) in images {
        let report = check_bytes(image.as_slice()).expect("the image can be checked");
        assert_eq!(report.corruptions, 0, "{name}: {:?}", report.messages);
    }
    let disk = chain(ring, &storages(images, 1), top, false).await;
    assert_same(&read_steps(ring, &disk, 1 << 20).await, bytes);
}

/// What the uppermost merged image shows by itself, with its name, where it is not the top: the
/// same for ever, since no client writes to it.
async fn merged(ring: &Ring, images: &Images, options: CommitOptions) -> (String, Vec<u8>) {
    let mut name = String::from("top.qcow2");
    for _ in 0..options.top {
        let disk = chain(ring, images, &name, false).await;
        let layers = disk.layers();
        let below = &layers[0].qcow2().expect("qcow2").info().backing_file;
        name = String::from_utf8(below.clone().expect("a backing file")).expect("text");
    }
    let disk = chain(ring, images, &name, false).await;
    (name, read_steps(ring, &disk, 1 << 20).await)
}

/// Runs a commit and takes crash states while it runs and afterwards.
fn power_fails(options: CommitOptions, new_top: &str, sizes: Sizes) {
    let (images, mut bytes) = images_of(sizes);
    run(async |ring| {
        let (merged, shown) = merged(&ring, &self::storages(&images, 1), options).await;
        let storages = storages(&images, 7);
        for sim in storages.values() {
            // Operations overtake each other.
            let (least, most) = (std::time::Duration::ZERO, std::time::Duration::from_micros(300));
            sim.on(When::any().chance(500), Fault::DelayBetween(least, most));
        }
        let disk = chain(&ring, &storages, "top.qcow2", true).await;
        let done = std::rc::Rc::new(std::cell::Cell::new(false));
        let (other, handle, flag) = (Arc::clone(&disk), ring.clone(), done.clone());
        ring.spawn(async move {
            let progress = Arc::new(Progress::new());
            other.commit(&handle, options, &progress).await.expect("commit");
            flag.set(true);
        });
        let mut states = Vec::new();
        let mut prng = Prng::new(3);
        while !done.get() {
            // Several things that may be left of one moment.
            for _ in 0..4 {
                states.push(crash(&storages, prng.next_u64()));
            }
            ring.sleep(std::time::Duration::from_micros(100 + prng.below(300))).await;
        }
        states.push(crash(&storages, prng.next_u64()));
        let step = states.len().div_ceil(CRASHES).max(1);
        let judged: Vec<_> = states.iter().rev().step_by(step).collect();
        assert!(judged.len() > 10, "{} states", judged.len());
        for state in judged {
            judge(&ring, state, "top.qcow2", &bytes).await;
            judge(&ring, state, &merged, &shown).await;
        }
        judge(&ring, states.last().expect("the last one"), new_top, &bytes).await;
        // Clients write on; the names of before show that too, whenever the power fails now.
        assert_eq!(write_on(&ring, &disk, &mut bytes).await, Ok(()));
        for _ in 0..4 {
            let state = crash(&storages, prng.next_u64());
            judge(&ring, &state, "top.qcow2", &bytes).await;
            judge(&ring, &state, new_top, &bytes).await;
            if options.top > 0 {
                judge(&ring, &state, &merged, &shown).await;
            }
        }
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

const TOP_TO_BASE: CommitOptions = CommitOptions { top: 0, base: 2, keep_top: false };
const MIDDLE: CommitOptions = CommitOptions { top: 1, base: 2, keep_top: false };
/// Of four: two are merged.
const BETWEEN: CommitOptions = CommitOptions { top: 1, base: 3, keep_top: false };

#[test]
fn a_commit_of_the_top_survives_a_power_cut_at_any_moment() {
    power_fails(CommitOptions::TOP, "mid.qcow2", EQUAL);
}

#[test]
fn a_commit_through_the_chain_survives_a_power_cut_at_any_moment() {
    power_fails(TOP_TO_BASE, "base.qcow2", EQUAL);
}

#[test]
fn a_commit_to_a_longer_base_survives_a_power_cut_at_any_moment() {
    power_fails(TOP_TO_BASE, "base.qcow2", LONG_BASE);
}

#[test]
fn a_commit_through_a_shorter_layer_survives_a_power_cut_at_any_moment() {
    power_fails(TOP_TO_BASE, "base.qcow2", SHORT_MIDDLE);
}

#[test]
fn a_commit_in_the_middle_survives_a_power_cut_at_any_moment() {
    power_fails(MIDDLE, "top.qcow2", EQUAL);
}

#[test]
fn a_commit_of_two_images_in_the_middle_survives_a_power_cut_at_any_moment() {
    power_fails(BETWEEN, "top.qcow2", SHORT_BELOW);
    power_fails(BETWEEN, "top.qcow2", SHORTER_BELOW);
}

/// What fails of one image.
#[derive(Clone, Copy, Debug)]
enum Failing {
    /// One operation.
    Once,
    /// All writes from one on: the file system is full, or broken.
    Writes(Errno),
}

/// Lets every operation of a commit fail, one run after the other. Whatever came of it, clients
/// write on, and the old name shows what they have written.
fn operations_fail(options: CommitOptions, victim: &str, sizes: Sizes, failing: Failing) {
    let (images, start) = images_of(sizes);
    run(async |ring| {
        let (merged, shown) = merged(&ring, &self::storages(&images, 1), options).await;
        let mut number = 0;
        let mut failures = 0;
        loop {
            let mut bytes = start.clone();
            let storages = storages(&images, 7);
            let disk = chain(&ring, &storages, "top.qcow2", true).await;
            let sim = &storages[victim];
            let before = sim.log().len() as u64;
            let (rule, fault) = match failing {
                Failing::Once => (When::number(before + number), Fault::Fail(Errno::IO)),
                Failing::Writes(errno) => {
                    (When::kind(OpKind::Write).skip(number), Fault::Fail(errno))
                }
            };
            sim.on(rule, fault);
            let progress = Arc::new(Progress::new());
            let writes = sim.count(OpKind::Write) as u64;
            let result = disk.commit(&ring, options, &progress).await;
            let reached = match failing {
                Failing::Once => sim.log().len() as u64 > before + number,
                Failing::Writes(_) => sim.count(OpKind::Write) as u64 > writes + number,
            };
            failures += u64::from(result.is_err());
            sim.clear_rules();
            // Those who use the disk go on, whatever failed.
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            let written = write_on(&ring, &disk, &mut bytes).await;
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            let _ = disk.close(&ring).await;
            drop(disk);
            let now = storages.iter().map(|(name, sim)| (name.clone(), sim.image())).collect();
            if options.top > 0 {
                judge(&ring, &now, &merged, &shown).await;
            }
            // An image whose flush has failed goes on telling that it cannot flush.
            match written {
                Ok(()) => judge(&ring, &now, "top.qcow2", &bytes).await,
                Err(errno) => assert_eq!((errno, result.is_err()), (Errno::IO, true)),
            }
            if !reached {
                assert!(result.is_ok(), "{result:?}");
                break;
            }
            number += 1 + number / 12;
        }
        assert!(failures > 0);
    });
}

#[test]
fn a_commit_whose_base_fails_leaves_the_chain() {
    operations_fail(CommitOptions::TOP, "mid.qcow2", EQUAL, Failing::Once);
    operations_fail(MIDDLE, "base.qcow2", EQUAL, Failing::Once);
    operations_fail(TOP_TO_BASE, "base.qcow2", LONG_BASE, Failing::Once);
}

#[test]
fn a_commit_whose_top_fails_leaves_the_chain() {
    operations_fail(CommitOptions::TOP, "top.qcow2", EQUAL, Failing::Once);
    operations_fail(MIDDLE, "top.qcow2", EQUAL, Failing::Once);
    operations_fail(BETWEEN, "top.qcow2", SHORT_BELOW, Failing::Once);
    operations_fail(TOP_TO_BASE, "top.qcow2", LONG_BASE, Failing::Once);
}

#[test]
fn a_commit_whose_middle_fails_leaves_the_chain() {
    operations_fail(TOP_TO_BASE, "mid.qcow2", SHORT_MIDDLE, Failing::Once);
    operations_fail(MIDDLE, "mid.qcow2", EQUAL, Failing::Once);
    operations_fail(BETWEEN, "mid.qcow2", SHORTER_BELOW, Failing::Once);
    operations_fail(BETWEEN, "upper.qcow2", SHORT_BELOW, Failing::Once);
}

#[test]
fn a_layer_that_can_be_written_no_more_is_not_left_above_a_base_that_goes_on() {
    for errno in [Errno::NOSPC, Errno::IO] {
        operations_fail(CommitOptions::TOP, "top.qcow2", EQUAL, Failing::Writes(errno));
        operations_fail(TOP_TO_BASE, "top.qcow2", EQUAL, Failing::Writes(errno));
        operations_fail(TOP_TO_BASE, "mid.qcow2", EQUAL, Failing::Writes(errno));
    }
}

#[test]
fn layers_on_a_full_file_system_are_emptied() {
    let (images, mut bytes) = images();
    run(async |ring| {
        let storages = storages(&images, 7);
        for name in ["mid.qcow2", "top.qcow2"] {
            // What is there can be overwritten, and nothing else; the first metadata that would go
            // to a free place does not.
            let sim = &storages[name];
            sim.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
            sim.on(When::any().at(sim.len()..u64::MAX), Fault::Fail(Errno::NOSPC));
        }
        let disk = chain(&ring, &storages, "top.qcow2", true).await;
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, TOP_TO_BASE, &progress).await.expect("it needs no space there");
        assert_eq!(write_on(&ring, &disk, &mut bytes).await, Ok(()));
        assert_eq!(disk.close(&ring).await, Ok(()));
        let now = storages.iter().map(|(name, sim)| (name.clone(), sim.image())).collect();
        for name in ["base.qcow2", "mid.qcow2", "top.qcow2"] {
            judge(&ring, &now, name, &bytes).await;
        }
    });
}

/// Saving its bitmaps needs space, and no one needs them after a commit.
#[test]
fn a_top_with_bitmaps_on_a_full_file_system_is_emptied() {
    let (mut images, mut bytes) = images();
    let place = directory();
    std::fs::write(place.path().join("top"), &images["top.qcow2"]).expect("write");
    qemu_img(&place, &["bitmap", "--add", "-g", "4k", "-f", "qcow2", "top", "changes"]);
    images.insert("top.qcow2".to_owned(), fs::read(place.path().join("top")).expect("read"));
    run(async |ring| {
        let storages = storages(&images, 7);
        let disk = chain(&ring, &storages, "top.qcow2", true).await;
        assert_eq!(write_on(&ring, &disk, &mut bytes).await, Ok(()));
        let sim = &storages["top.qcow2"];
        sim.on(When::any().at(sim.len()..u64::MAX), Fault::Fail(Errno::NOSPC));
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, TOP_TO_BASE, &progress).await.expect("it needs no space there");
        assert_eq!(write_on(&ring, &disk, &mut bytes).await, Ok(()));
        assert_eq!(disk.close(&ring).await, Ok(()));
        let now = storages.iter().map(|(name, sim)| (name.clone(), sim.image())).collect();
        for name in ["base.qcow2", "mid.qcow2", "top.qcow2"] {
            judge(&ring, &now, name, &bytes).await;
        }
        let top = chain(&ring, &self::storages(&now, 1), "top.qcow2", false).await;
        let layers = top.layers();
        let bitmaps = &layers[0].qcow2().expect("qcow2").info().bitmaps;
        assert!(bitmaps.len() == 1 && bitmaps[0].in_use, "nobody believes it: {bitmaps:?}");
    });
}

#[test]
fn a_base_that_cannot_grow_with_the_disk_ends_the_commit_and_no_client() {
    let (images, mut bytes) = images();
    run(async |ring| {
        let storages = storages(&images, 7);
        let disk = chain(&ring, &storages, "top.qcow2", true).await;
        let base = &storages["mid.qcow2"];
        // Only another size changes its header.
        base.on(When::kind(OpKind::Write).at(0..512), Fault::Fail(Errno::NOSPC));
        base.on(When::kind(OpKind::Write).at(512..u64::MAX).once(), Fault::Hold);
        let committed = std::rc::Rc::new(std::cell::RefCell::new(None));
        let (other, handle, slot) = (Arc::clone(&disk), ring.clone(), committed.clone());
        ring.spawn(async move {
            let progress = Arc::new(Progress::new());
            let result = other.commit(&handle, CommitOptions::TOP, &progress).await;
            *slot.borrow_mut() = Some(result.map_err(|error| error.errno()));
        });
        while base.held().is_empty() {
            ring.yield_now().await;
        }
        let grown = std::rc::Rc::new(std::cell::Cell::new(None));
        let (other, handle, slot) = (Arc::clone(&disk), ring.clone(), grown.clone());
        ring.spawn(async move { slot.set(Some(other.grow(&handle, Bytes(6 << 20)).await)) });
        while grown.get().is_none() || committed.borrow().is_none() {
            base.release_all();
            ring.yield_now().await;
        }
        assert_eq!(grown.get(), Some(Ok(())));
        assert_eq!(committed.take(), Some(Err(Some(Errno::NOSPC))));
        assert_eq!((disk.size(), disk.layers().len()), (Bytes(6 << 20), 3));
        bytes.resize(6 << 20, 0);
        base.clear_rules();
        assert_eq!(write_on(&ring, &disk, &mut bytes).await, Ok(()));
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        assert_eq!(disk.close(&ring).await, Ok(()));
        let now = storages.iter().map(|(name, sim)| (name.clone(), sim.image())).collect();
        judge(&ring, &now, "top.qcow2", &bytes).await;
    });
}

/// `top.qcow2` of 4 MiB, of which the second is full of fives, over a block device full of threes.
async fn over_device(ring: &Ring, top: &SimStorage, device: &SimStorage) -> Arc<Disk> {
    let open = ringdisk_qcow2::OpenOptions { writable: true, ..Default::default() };
    let image = Qcow2::open(ring, top.storage(), &open).await.expect("the image opens");
    let raw = Raw::new(device.storage());
    let mut base = Layer::new(Node::Raw(raw), Bytes(device.len()));
    base.name = PathBuf::from("/dev/simulated");
    Disk::build(vec![qcow2_layer(image, true), base], Parts::new(&ImageOptions::default()))
}

#[test]
fn a_base_on_a_block_device_takes_a_commit_of_a_disk_of_its_size_only() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "raw", "base.img", "4M"]);
    let over = ["-b", "base.img", "-F", "raw", "top.qcow2", "4M"];
    qemu_img(&directory, &[&["create", "-q", "-f", "qcow2"], &over[..]].concat());
    qemu_io(&directory, "qcow2", "top.qcow2", &["write -P 5 1M 1M"]);
    let image = fs::read(directory.path().join("top.qcow2")).expect("read");
    run(async |ring| {
        for (base_mib, reason) in [(2, "cannot grow"), (8, "cannot become smaller")] {
            let (top, device) =
                (SimStorage::from_image(&image, 1), SimStorage::device(base_mib << 20, 1));
            device.put(0, &vec![3; usize::try_from(device.len()).expect("small")]);
            let before = device.image();
            let disk = over_device(&ring, &top, &device).await;
            let shown = read_steps(&ring, &disk, 1 << 20).await;
            let progress = Arc::new(Progress::new());
            let error = disk.commit(&ring, CommitOptions::TOP, &progress).await;
            let error = error.expect_err("it does not fit");
            assert!(error.to_string().contains(reason), "{error}");
            assert_same(&device.image(), &before);
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &shown);

            // What the message advises, and what a smaller device allows.
            let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
            disk.resize_with(&ring, Bytes(device.len()), options).await.expect("resized");
            disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
            let mut expected = shown;
            expected.resize(before.len(), 0);
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &expected);
            assert_same(&device.image(), &expected);
        }
    });
}
