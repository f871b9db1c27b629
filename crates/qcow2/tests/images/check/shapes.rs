//! Images of all shapes, made by QEMU, with a bit of everything in them.

use crate::common::{Images, KIB, MIB, mixed};

/// Name, options, size and what it gets besides data.
pub(crate) const SHAPES: [(&str, &str, u64, Extras); 17] = [
    ("plain", "compat=1.1", 4 * MIB, Extras::NONE),
    ("old", "compat=0.10,cluster_size=4k", 4 * MIB, Extras::SNAPSHOTS),
    ("tiny", "cluster_size=512", 256 * KIB, Extras::SNAPSHOTS),
    ("large", "cluster_size=2M", 256 * MIB, Extras::NONE),
    ("one_bit", "cluster_size=4k,refcount_bits=1", 2 * MIB, Extras::NONE),
    ("two_bits", "cluster_size=4k,refcount_bits=2", 2 * MIB, Extras::NONE),
    ("four_bits", "cluster_size=4k,refcount_bits=4", 2 * MIB, Extras::SNAPSHOTS),
    ("eight_bits", "cluster_size=512,refcount_bits=8", 2 * MIB, Extras::SNAPSHOTS),
    ("wide", "cluster_size=4k,refcount_bits=32", 2 * MIB, Extras::SNAPSHOTS),
    ("widest", "cluster_size=512,refcount_bits=64", MIB, Extras::SNAPSHOTS),
    ("extended", "cluster_size=16k,extended_l2=on", 8 * MIB, Extras::SNAPSHOTS),
    (
        "extended_reserved",
        "cluster_size=16k,extended_l2=on,preallocation=metadata",
        8 * MIB,
        Extras::NONE,
    ),
    ("all", "cluster_size=4k", 4 * MIB, Extras { snapshots: true, bitmaps: true }),
    ("bitmaps", "compat=1.1", 8 * MIB, Extras { snapshots: false, bitmaps: true }),
    ("zstd", "compression_type=zstd", 4 * MIB, Extras::SNAPSHOTS),
    ("external", "cluster_size=4k,data_file=external.raw", 4 * MIB, Extras::NONE),
    ("reserved", "cluster_size=4k,preallocation=metadata", 4 * MIB, Extras::NONE),
];

#[derive(Clone, Copy, Debug)]
pub(crate) struct Extras {
    snapshots: bool,
    bitmaps: bool,
}

impl Extras {
    const NONE: Extras = Extras { snapshots: false, bitmaps: false };
    const SNAPSHOTS: Extras = Extras { snapshots: true, bitmaps: false };
}

/// The images, in a directory of their own: name and bytes.
pub(crate) fn make(images: &Images) -> Vec<(&'static str, Vec<u8>)> {
    SHAPES
        .iter()
        .map(|(name, options, size, extras)| {
            let path = images.create(name, options, *size);
            let cluster = cluster_size(&std::fs::read(&path).expect("the new image"));
            let mut commands = mixed(cluster, *size);
            if options.contains("data_file") || options.contains("preallocation") {
                commands.retain(|command| !command.contains(" -c "));
            }
            images.qemu_io(name, &commands);
            if extras.snapshots {
                images.qemu_img(&["snapshot", "-c", "one", name]);
                images.qemu_io(name, &[format!("write -q -P 33 0 {}", 2 * cluster)]);
                images.qemu_img(&["snapshot", "-c", "two", name]);
                images.qemu_io(name, &[format!("write -q -P 35 {} {cluster}", 6 * cluster)]);
            }
            if extras.bitmaps {
                images.qemu_img(&["bitmap", "--add", name, "first"]);
                images.qemu_img(&["bitmap", "--add", "-g", "64k", name, "second"]);
                images.qemu_io(name, &[format!("write -q -P 66 {} {cluster}", 7 * cluster)]);
            }
            (*name, std::fs::read(&path).expect("the image"))
        })
        .collect()
}

pub(crate) fn cluster_size(image: &[u8]) -> u64 {
    1 << image[23]
}
