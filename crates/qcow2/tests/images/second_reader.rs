//! The crate `imago` as a second reader, beside `qemu-img`: whatever it can open it must read as we
//! do. It never gets encrypted images (it does not look at the encryption method), and it knows
//! neither zstd nor extended L2.

use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};

use crate::common::{Images, KIB, MIB, assert_same, mixed, open, read_all, runtime};

/// The contents of an image, according to `imago`. Relative names are looked up beside the image.
fn read_by_imago(images: &Images, name: &str) -> Vec<u8> {
    let gate = PermissiveImplicitOpenGate::default();
    let image = Qcow2::<File>::builder_path(images.path(name)).open(gate).expect("imago opens it");
    let image = FormatAccess::new(image);
    let mut bytes = vec![0; usize::try_from(image.size()).expect("a small image")];
    image.read(&mut bytes, 0).expect("imago reads it");
    bytes
}

fn compare(images: &Images, name: &str, backing: &[u8]) {
    let mut runtime = runtime();
    let image = open(&mut runtime, &images.path(name));
    let ours = read_all(&mut runtime, &image, backing, 100_000);
    assert_same(name, &ours, &read_by_imago(images, name));
}

#[test]
fn both_versions_and_all_cluster_sizes() {
    let images = Images::new();
    for compat in ["0.10", "1.1"] {
        for cluster in (9..=21).map(|bits| 1u64 << bits) {
            let name = format!("{compat}-{cluster}");
            let size = (25 * cluster).max(MIB);
            images.create(&name, &format!("compat={compat},cluster_size={cluster}"), size);
            images.qemu_io(&name, &mixed(cluster, size));
            compare(&images, &name, &[]);
        }
    }
}

#[test]
fn compressed_clusters() {
    let images = Images::new();
    let source: Vec<u8> = (0..3 * MIB).map(|i| (i / 300).to_le_bytes()[0]).collect();
    std::fs::write(images.path("source"), source).expect("the source");
    for cluster in [512, 4 * KIB, 64 * KIB, 2 * MIB] {
        let name = format!("compressed-{cluster}");
        let options = format!("cluster_size={cluster}");
        images.qemu_img(&[
            "convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "source", &name,
        ]);
        compare(&images, &name, &[]);
    }
}

#[test]
fn external_data_files() {
    let images = Images::new();
    for raw in ["off", "on"] {
        let name = format!("data-{raw}");
        images.create(&name, &format!("data_file={name}.data,data_file_raw={raw}"), 4 * MIB);
        let commands = mixed(64 * KIB, 4 * MIB).into_iter();
        images.qemu_io(&name, &commands.filter(|c| !c.contains("-c")).collect::<Vec<_>>());
        compare(&images, &name, &[]);
    }
}

#[test]
fn snapshots_and_backing_files() {
    let images = Images::new();
    let base: Vec<u8> = (0..MIB).map(|i| (i / 77).to_le_bytes()[0]).collect();
    std::fs::write(images.path("base"), &base).expect("the base");
    images.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "overlay", "4M"]);
    images.qemu_io("overlay", &mixed(64 * KIB, 4 * MIB));
    images.qemu_img(&["snapshot", "-c", "before", "overlay"]);
    images.qemu_io("overlay", &["write -q -P 77 100k 300k".into()]);
    compare(&images, "overlay", &base);
}
