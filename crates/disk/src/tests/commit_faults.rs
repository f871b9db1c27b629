//! Commits on storage that loses power or fails: the chain reads the same at every moment.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_qcow2::{Qcow2, check_bytes};
use ringdisk_ring::Ring;
use ringdisk_testkit::sim::{Fault, Prng, SimStorage, When};

use super::{assert_same, directory, qemu_img, qemu_io, read_steps, run};
use crate::disk::Parts;
use crate::layer::Layer;
use crate::open::qcow2_layer;
use crate::{CommitOptions, Disk, Errno, ImageOptions, Progress};

/// Size of the disks, bytes.
const SIZE: usize = 4 << 20;
/// Crash states of each commit.
const CRASHES: usize = 60;

/// Images by the names that others give them.
pub(super) type Images = BTreeMap<String, SimStorage>;

/// `top.qcow2` over `mid.qcow2` over `base.qcow2`, and what it shows.
pub(super) fn images() -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
    let directory = directory();
    let mut bytes = vec![0; SIZE];
    let mut images = BTreeMap::new();
    let mut below = "";
    for (number, name) in ["base.qcow2", "mid.qcow2", "top.qcow2"].into_iter().enumerate() {
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", "cluster_size=16k"];
        if number > 0 {
            create.extend(["-b", below, "-F", "qcow2"]);
        }
        create.extend([name, "4M"]);
        qemu_img(&directory, &create);
        let byte = u8::try_from(number + 1).expect("small");
        for piece in 0..4 {
            let (at, len) = (piece * (1 << 20) + number * 200_000, 250_000);
            qemu_io(&directory, "qcow2", name, &[&format!("write -P {byte} {at} {len}")]);
            bytes[at..at + len].fill(byte);
        }
        let zero = number * 500_000;
        qemu_io(&directory, "qcow2", name, &[&format!("write -z {zero} 100000")]);
        bytes[zero..zero + 100_000].fill(0);
        below = name;
    }
    for name in ["base.qcow2", "mid.qcow2", "top.qcow2"] {
        images.insert(name.to_owned(), fs::read(directory.path().join(name)).expect("read"));
    }
    (images, bytes)
}

pub(super) fn storages(images: &BTreeMap<String, Vec<u8>>, seed: u64) -> Images {
    images.iter().map(|(name, bytes)| (name.clone(), SimStorage::from_image(bytes, seed))).collect()
}

/// Opens a chain as its headers say.
pub(super) async fn chain(ring: &Ring, images: &Images, top: &str, writable: bool) -> Arc<Disk> {
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
        layer.directory = Some(PathBuf::from("/simulated"));
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

/// Runs a commit and takes crash states while it runs and afterwards.
fn power_fails(options: CommitOptions, new_top: &str) {
    let (images, bytes) = images();
    run(async |ring| {
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
        }
        judge(&ring, states.last().expect("the last one"), new_top, &bytes).await;
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_commit_of_the_top_survives_a_power_cut_at_any_moment() {
    power_fails(CommitOptions { top: 0, base: 1, keep_top: false }, "mid.qcow2");
}

#[test]
fn a_commit_through_the_chain_survives_a_power_cut_at_any_moment() {
    power_fails(CommitOptions { top: 0, base: 2, keep_top: false }, "base.qcow2");
}

#[test]
fn a_commit_in_the_middle_survives_a_power_cut_at_any_moment() {
    power_fails(CommitOptions { top: 1, base: 2, keep_top: false }, "top.qcow2");
}

/// Lets every operation of a commit fail, one run after the other.
fn operations_fail(options: CommitOptions, victim: &str) {
    let (images, bytes) = images();
    run(async |ring| {
        let mut number = 0;
        let mut failures = 0;
        loop {
            let storages = storages(&images, 7);
            let disk = chain(&ring, &storages, "top.qcow2", true).await;
            let sim = &storages[victim];
            let before = sim.log().len() as u64;
            sim.on(When::number(before + number), Fault::Fail(Errno::IO));
            let progress = Arc::new(Progress::new());
            let result = disk.commit(&ring, options, &progress).await;
            let reached = sim.log().len() as u64 > before + number;
            failures += u64::from(result.is_err());
            sim.clear_rules();
            // Those who use the disk go on, whatever failed.
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
            let _ = disk.close(&ring).await;
            drop(disk);
            let now = storages.iter().map(|(name, sim)| (name.clone(), sim.image())).collect();
            judge(&ring, &now, "top.qcow2", &bytes).await;
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
    operations_fail(CommitOptions { top: 0, base: 1, keep_top: false }, "mid.qcow2");
    operations_fail(CommitOptions { top: 1, base: 2, keep_top: false }, "base.qcow2");
}

#[test]
fn a_commit_whose_top_fails_leaves_the_chain() {
    operations_fail(CommitOptions { top: 0, base: 1, keep_top: false }, "top.qcow2");
    operations_fail(CommitOptions { top: 1, base: 2, keep_top: false }, "top.qcow2");
}
