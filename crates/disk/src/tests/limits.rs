//! Block sizes and limits.

use super::{directory, open, qemu_img, reading, run};
use crate::{Discard, Disk, ImageOptions, NullOptions};
use ringdisk_qcow2::Bytes;

#[test]
fn the_unit_of_a_discard_is_that_of_the_image() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "raw", "a.raw", "4M"]);
    for (name, options, unit) in [
        ("a.qcow2", "cluster_size=64k", 65536),
        ("b.qcow2", "cluster_size=2M", 2 << 20),
        ("c.qcow2", "extended_l2=on,cluster_size=128k", 4096),
        ("d.qcow2", "cluster_size=512", 512),
    ] {
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-o", options, name, "4M"]);
        let path = directory.path().join(name);
        run(async |ring| {
            let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
            let limits = disk.block_limits();
            assert_eq!(limits.discard_align, unit, "{name}");
            assert!(limits.can_discard && limits.can_write_zeroes && limits.zeroes_may_unmap);
            assert_eq!(limits.discard_max % Bytes(u64::from(unit)), Bytes::ZERO);
        });
    }
    let path = directory.path().join("a.raw");
    run(async |ring| {
        let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
        let limits = disk.block_limits();
        assert_eq!((limits.logical_block, limits.physical_block), (512, 4096));
        assert!(limits.can_discard && limits.min_io >= limits.physical_block);
    });
}

#[test]
fn a_disk_that_must_not_discard_says_so() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    let path = directory.path().join("a.qcow2");
    run(async |ring| {
        let options = ImageOptions { discard: Discard::Ignore, ..ImageOptions::default() };
        let limits = open(&ring, &path, &options).await.expect("open").block_limits();
        assert!(!limits.can_discard && !limits.zeroes_may_unmap && limits.can_write_zeroes);
        let limits = open(&ring, &path, &reading()).await.expect("open").block_limits();
        assert!(!limits.can_discard && !limits.can_write_zeroes);
    });
    let limits = Disk::null(&NullOptions::default()).block_limits();
    assert!(!limits.can_discard && limits.can_write_zeroes);
}
