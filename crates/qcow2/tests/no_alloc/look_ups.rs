//! A cached look-up allocates nothing: counted.

use ringdisk_testkit::allocations::of_this_thread;

use crate::common::{Images, KIB, MIB, mixed, open, read_all, runtime};
use ringdisk_qcow2::{Bytes, GuestOffset};

fn allocations_of_cached_look_ups(options: &str, cluster: u64) -> u64 {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("image", options, 40 * MIB);
    images.qemu_io("image", &mixed(cluster, 40 * MIB));
    let image = open(&mut runtime, &path);
    // Loads every slice.
    read_all(&mut runtime, &image, &[], 70_000);
    let before = of_this_thread();
    let mut found = 0;
    for len in [1, 4 * KIB, MIB, 40 * MIB] {
        for at in (0..40 * MIB).step_by(100_001) {
            let extent = image.map_cached(GuestOffset(at), Bytes(len)).expect("a good image");
            found += u64::from(extent.is_some());
        }
    }
    let allocations = of_this_thread() - before;
    assert_eq!(found, 4 * (40 * MIB).div_ceil(100_001));
    allocations
}

#[test]
fn a_cached_look_up_allocates_nothing() {
    assert_eq!(allocations_of_cached_look_ups("", 64 * KIB), 0);
}

#[test]
fn a_cached_look_up_with_extended_l2_allocates_nothing() {
    assert_eq!(allocations_of_cached_look_ups("extended_l2=on,cluster_size=16k", 16 * KIB), 0);
}

#[test]
fn a_cached_look_up_with_small_clusters_allocates_nothing() {
    assert_eq!(allocations_of_cached_look_ups("cluster_size=512", 512), 0);
}
