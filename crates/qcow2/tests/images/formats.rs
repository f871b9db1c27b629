//! Every combination of qcow2 options that `qemu-img` makes, read through the library and compared
//! with `qemu-img convert` byte for byte.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::process::Command;

use ringdisk_qcow2::{Bytes, CompressionType, ExtentKind, GuestOffset, OpenOptions, Qcow2};

use crate::common::{Images, KIB, MIB, check, mixed, open, read_all, runtime, try_open_with};

const CLUSTER_SIZES: [u64; 13] = [
    512,
    KIB,
    2 * KIB,
    4 * KIB,
    8 * KIB,
    16 * KIB,
    32 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
];

/// A disk with some dozen clusters, several L2 tables where clusters are small, and an end inside
/// a cluster.
fn size_for(cluster: u64) -> u64 {
    (25 * cluster).max(MIB) + 1536
}

/// Contents that compress to some extent and differ everywhere.
fn source(images: &Images, name: &str, size: u64) {
    let bytes: Vec<u8> = (0..size)
        .map(|i| {
            let block = i / 3000;
            let noise = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
            let byte = if block % 7 == 3 { 0 } else { block ^ (noise * u64::from(i % 5 == 0)) };
            (byte & 0xff) as u8
        })
        .collect();
    std::fs::write(images.path(name), bytes).expect("the source image");
}

#[test]
fn every_cluster_size_of_both_versions() {
    let images = Images::new();
    let mut runtime = runtime();
    for compat in ["0.10", "1.1"] {
        for cluster in CLUSTER_SIZES {
            let name = format!("{compat}-{cluster}");
            let size = size_for(cluster);
            images.create(&name, &format!("compat={compat},cluster_size={cluster}"), size);
            images.qemu_io(&name, &mixed(cluster, size));
            check(&mut runtime, &images, &name, &[]);
        }
    }
}

#[test]
fn every_refcount_width() {
    let images = Images::new();
    let mut runtime = runtime();
    for bits in [1, 2, 4, 8, 16, 32, 64] {
        for cluster in [512, 64 * KIB] {
            let name = format!("refcount-{bits}-{cluster}");
            let size = size_for(cluster);
            let options = format!("refcount_bits={bits},cluster_size={cluster}");
            images.create(&name, &options, size);
            // Compressed clusters share a host cluster, which a count of one bit cannot say.
            let commands = mixed(cluster, size).into_iter();
            let commands: Vec<_> = commands.filter(|c| bits > 1 || !c.contains("-c")).collect();
            images.qemu_io(&name, &commands);
            check(&mut runtime, &images, &name, &[]);
            assert_eq!(open(&mut runtime, &images.path(&name)).info().refcount_bits, bits);
        }
    }
}

#[test]
fn compressed_images_of_both_kinds_and_every_cluster_size() {
    let images = Images::new();
    let mut runtime = runtime();
    for (kind, type_) in [("zlib", CompressionType::Zlib), ("zstd", CompressionType::Zstd)] {
        for cluster in CLUSTER_SIZES {
            let name = format!("{kind}-{cluster}");
            source(&images, "source", size_for(cluster));
            let options = format!("compression_type={kind},cluster_size={cluster}");
            images.qemu_img(&[
                "convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "source", &name,
            ]);
            check(&mut runtime, &images, &name, &[]);
            assert_eq!(open(&mut runtime, &images.path(&name)).info().compression, type_);
        }
    }
}

#[test]
fn compressed_images_of_version_2() {
    let images = Images::new();
    source(&images, "source", 3 * MIB);
    images.qemu_img(&[
        "convert",
        "-q",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "-o",
        "compat=0.10",
        "source",
        "v2",
    ]);
    check(&mut runtime(), &images, "v2", &[]);
}

#[test]
fn extended_l2_of_every_cluster_size() {
    let images = Images::new();
    let mut runtime = runtime();
    for cluster in CLUSTER_SIZES.into_iter().filter(|cluster| *cluster >= 16 * KIB) {
        let name = format!("extended-{cluster}");
        let size = size_for(cluster);
        images.create(&name, &format!("extended_l2=on,cluster_size={cluster}"), size);
        let sub = cluster / 32;
        let mut commands = mixed(cluster, size);
        // Single subclusters of each kind, and runs across clusters.
        for index in [0, 1, 5, 31, 32, 40, 63] {
            commands.push(format!(
                "write -q -P {} {} {sub}",
                index + 20,
                10 * cluster + index * sub
            ));
        }
        commands.push(format!("write -q -z {} {}", 10 * cluster + 5 * sub, 3 * sub));
        commands.push(format!("write -q -z {} {}", 14 * cluster, 40 * sub));
        commands.push(format!("discard -q {} {}", 6 * cluster + sub, 2 * sub));
        images.qemu_io(&name, &commands);
        check(&mut runtime, &images, &name, &[]);
        assert!(open(&mut runtime, &images.path(&name)).info().extended_l2);
    }
}

#[test]
fn extended_l2_with_compressed_clusters() {
    let images = Images::new();
    let mut runtime = runtime();
    source(&images, "source", 3 * MIB);
    for kind in ["zlib", "zstd"] {
        let options = format!("extended_l2=on,compression_type={kind}");
        images.qemu_img(&[
            "convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "source", kind,
        ]);
        images.qemu_io(kind, &["write -q -P 9 70000 3000".into(), "write -q -z 200k 2k".into()]);
        check(&mut runtime, &images, kind, &[]);
    }
}

#[test]
fn overlays_with_backing_files_shorter_and_longer() {
    let images = Images::new();
    let mut runtime = runtime();
    for (options, base_size) in [
        ("extended_l2=on,compression_type=zstd", 2 * MIB),
        ("extended_l2=on", MIB + 512),
        ("cluster_size=512", 512 * KIB + 512),
        ("compat=0.10", 3 * MIB),
    ] {
        let name = format!("overlay-{base_size}-{}", options.len());
        source(&images, "base", base_size);
        images.qemu_img(&[
            "create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", "raw", &name, "2M",
        ]);
        let mut commands = vec![
            "write -q -P 1 0 4k".to_string(),
            "write -q -P 2 66k 1k".to_string(),
            "write -q -z 128k 64k".to_string(),
            "write -q -z 300k 2k".to_string(),
            "write -q -P 3 1M 64k".to_string(),
        ];
        commands.push("write -q -c -P 4 1280k 64k".to_string());
        images.qemu_io(&name, &commands);
        let base = std::fs::read(images.path("base")).expect("the base");
        check(&mut runtime, &images, &name, &base);
        let image = open(&mut runtime, &images.path(&name));
        assert_eq!(image.info().backing_file.as_deref(), Some(&b"base"[..]));
        assert_eq!(image.info().backing_format.as_deref(), Some("raw"));
    }
}

#[test]
fn external_data_files_plain_and_raw() {
    let images = Images::new();
    let mut runtime = runtime();
    for raw in ["off", "on"] {
        for (extra, cluster) in [("", 64 * KIB), ("", 512), (",extended_l2=on", 16 * KIB)] {
            let name = format!("data-{raw}-{cluster}");
            let size = size_for(cluster);
            let options =
                format!("data_file={name}.data,data_file_raw={raw},cluster_size={cluster}{extra}");
            images.create(&name, &options, size);
            let commands = mixed(cluster, size).into_iter();
            let commands: Vec<_> = commands.filter(|c| !c.contains("-c")).collect();
            images.qemu_io(&name, &commands);
            check(&mut runtime, &images, &name, &[]);
            let image = open(&mut runtime, &images.path(&name));
            assert!(image.info().external_data_file);
            assert_eq!(image.info().data_file_raw, raw == "on");
        }
    }
}

#[test]
fn nothing_is_read_from_the_image_file_while_the_data_file_is_not_set() {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("image", "data_file=image.data", MIB);
    images.qemu_io("image", &["write -q -P 1 64k 64k".into()]);
    let image = crate::common::try_open(&mut runtime, &path).expect("a good image");
    let ring = runtime.ring().clone();
    let mapped = runtime.block_on(image.map(&ring, GuestOffset(64 * KIB), Bytes(512)));
    assert_eq!(mapped, Err(ringdisk_ring::Errno::IO));
}

#[test]
fn every_preallocation() {
    let images = Images::new();
    let mut runtime = runtime();
    for mode in ["off", "metadata", "falloc", "full"] {
        for extra in ["", ",extended_l2=on", ",cluster_size=4k"] {
            let name = format!("{mode}{extra}");
            let options = format!("preallocation={mode}{extra}");
            images.create(&name, &options, 3 * MIB + 1024);
            images.qemu_io(&name, &["write -q -P 7 1M 100k".into()]);
            check(&mut runtime, &images, &name, &[]);
        }
    }
}

#[test]
fn internal_snapshots_are_listed_and_the_active_disk_is_read() {
    let images = Images::new();
    let mut runtime = runtime();
    for (name, options) in [("v2", "compat=0.10"), ("v3", ""), ("ext", "extended_l2=on")] {
        let path = images.create(name, options, 4 * MIB);
        images.qemu_io(name, &mixed(64 * KIB, 4 * MIB));
        images.qemu_img(&["snapshot", "-c", "before", name]);
        images.qemu_io(name, &["write -q -P 99 0 200k".into(), "discard -q 384k 64k".into()]);
        images.qemu_img(&["snapshot", "-c", "später, mit Umlaut", name]);
        images.qemu_io(name, &["write -q -P 98 100k 70k".into()]);
        check(&mut runtime, &images, name, &[]);
        let image = open(&mut runtime, &path);
        let names: Vec<_> = image.info().snapshots.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["before", "später, mit Umlaut"]);
        assert_eq!(image.info().snapshots[0].id, "1");
        assert_eq!(image.info().snapshots[0].disk_bytes, Some(Bytes(4 * MIB)));
        assert_eq!(image.info().snapshots[0].vm_state_bytes, Bytes::ZERO);
        assert!(image.info().snapshots[0].date_seconds > 0);
    }
}

#[test]
fn several_hundred_snapshots_are_listed() {
    let images = Images::new();
    let path = images.create("many", "cluster_size=512", 64 * KIB);
    for number in 0..300 {
        images.qemu_img(&["snapshot", "-c", &format!("number {number}"), "many"]);
    }
    let image = open(&mut runtime(), &path);
    assert_eq!(image.info().snapshots.len(), 300);
    assert_eq!(image.info().snapshots[299].name, "number 299");
}

#[test]
fn disks_that_were_resized() {
    let images = Images::new();
    let mut runtime = runtime();
    for cluster in [512, 64 * KIB] {
        let name = format!("resized-{cluster}");
        images.create(&name, &format!("cluster_size={cluster}"), MIB);
        images.qemu_io(&name, &mixed(cluster, MIB));
        images.qemu_img(&["resize", "-q", &name, "5M"]);
        images.qemu_io(&name, &["write -q -P 55 4M 10k".into()]);
        check(&mut runtime, &images, &name, &[]);
        images.qemu_img(&["resize", "-q", "--shrink", &name, "600k"]);
        check(&mut runtime, &images, &name, &[]);
    }
}

#[test]
fn a_dirty_image_is_read() {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("dirty", "lazy_refcounts=on", 4 * MIB);
    // `abort` ends qemu-io without closing the image.
    let status = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write -q -P 1 0 300k", "-c", "flush", "-c", "abort"])
        .arg(&path)
        .status();
    assert!(!status.expect("qemu-io").success());
    let image = open(&mut runtime, &path);
    assert!(image.info().dirty && image.info().lazy_refcounts && !image.info().corrupt);
    let bytes = read_all(&mut runtime, &image, &[], MIB as usize);
    let written = 300 * KIB as usize;
    assert!(bytes[..written].iter().all(|b| *b == 1) && bytes[written..].iter().all(|b| *b == 0));
}

#[test]
fn bitmaps_are_listed() {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("bitmaps", "", 4 * MIB);
    images.qemu_img(&["bitmap", "--add", "-g", "128k", "bitmaps", "first"]);
    images.qemu_img(&["bitmap", "--add", "--disable", "bitmaps", "second"]);
    images.qemu_io("bitmaps", &["write -q -P 1 0 1M".into()]);
    check(&mut runtime, &images, "bitmaps", &[]);
    let bitmaps = open(&mut runtime, &path).info().bitmaps.clone();
    assert_eq!(bitmaps.len(), 2);
    assert_eq!(
        (bitmaps[0].name.as_str(), bitmaps[0].granularity_bytes),
        ("first", Bytes(128 * KIB))
    );
    assert_eq!((bitmaps[0].auto, bitmaps[1].auto), (true, false));
    assert!(bitmaps.iter().all(|bitmap| !bitmap.in_use));
}

#[test]
fn sparse_disks_of_several_l2_tables() {
    let images = Images::new();
    let mut runtime = runtime();
    // Slices map 32 MiB, with extended L2 16 MiB; tables 512 and 256 MiB.
    for (name, options) in [("plain", ""), ("extended", "extended_l2=on")] {
        images.create(name, options, 160 * MIB);
        let mut commands = Vec::new();
        for edge in [16, 32, 64, 96, 128] {
            let at = edge * MIB - 128 * KIB;
            commands.push(format!("write -q -P {edge} {at} 256k"));
        }
        images.qemu_io(name, &commands);
        check(&mut runtime, &images, name, &[]);
    }
}

#[test]
fn a_huge_disk_with_a_small_cache_is_read_right() {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("huge", "cluster_size=512", 256 * MIB);
    let places: Vec<u64> = (0..60).map(|i| i * 4 * MIB + i * 512).collect();
    let commands = places.iter().enumerate();
    let commands: Vec<_> =
        commands.map(|(i, at)| format!("write -q -P {} {at} 512", i + 1)).collect();
    images.qemu_io("huge", &commands);
    let options = OpenOptions { metadata_cache_bytes: Some(Bytes::ZERO), ..Default::default() };
    let image = try_open_with(&mut runtime, &path, &options).expect("a good image");
    let ring = runtime.ring().clone();
    for _ in 0..3 {
        for (i, at) in places.iter().enumerate() {
            let bytes = runtime.block_on(crate::common::read(&ring, &image, &[], *at, 512));
            assert_eq!(bytes, Ok(vec![i as u8 + 1; 512]));
        }
    }
    assert!(image.cache_counters().evictions > 0);
    assert!(image.cache_counters().capacity_bytes <= Bytes(8 * 4096));
}

#[test]
fn contiguous_clusters_are_one_extent_across_slices_and_tables() {
    let images = Images::new();
    let mut runtime = runtime();
    // Tables of 64 entries: 32 KiB of disk each.
    let path = images.create("flat", "cluster_size=512,preallocation=metadata", MIB);
    let image = open(&mut runtime, &path);
    let ring = runtime.ring().clone();
    let extent =
        runtime.block_on(image.map(&ring, GuestOffset(0), Bytes(MIB))).expect("a good image");
    assert_eq!(extent.len, Bytes(32 * KIB), "only the first slice is loaded");
    // Load the rest.
    read_all(&mut runtime, &image, &[], MIB as usize);
    let mut at = GuestOffset(0);
    let mut extents = 0;
    while at < GuestOffset(MIB) {
        let extent = image.map_cached(at, GuestOffset(MIB) - at).expect("good").expect("cached");
        assert!(matches!(extent.kind, ExtentKind::Data { .. }));
        at += extent.len;
        extents += 1;
    }
    // Interrupted by L2 tables and refcount blocks only.
    assert!(extents <= 40, "{extents} extents");
    let unallocated = images.create("empty", "cluster_size=512", 64 * MIB);
    let image = open(&mut runtime, &unallocated);
    let extent =
        image.map_cached(GuestOffset(0), Bytes::MAX).expect("good").expect("no table at all");
    assert_eq!((extent.len, extent.kind), (Bytes(64 * MIB), ExtentKind::Unallocated));
}

#[test]
fn images_of_the_newest_qemu_features_have_their_names() {
    let images = Images::new();
    let path = images.create("named", "", MIB);
    let image = open(&mut runtime(), &path);
    let names: Vec<_> = image.info().feature_names.iter().map(|n| n.name.as_str()).collect();
    assert!(names.contains(&"dirty bit") && names.contains(&"lazy refcounts"), "{names:?}");
    assert_eq!((image.info().version, image.info().compat()), (3, "1.1"));
}

#[test]
fn ranges_outside_the_disk_are_refused() {
    let images = Images::new();
    let path = images.create("small", "", MIB);
    let image = open(&mut runtime(), &path);
    let invalid = Err(ringdisk_ring::Errno::INVAL);
    assert_eq!(image.map_cached(GuestOffset(0), Bytes::ZERO), invalid);
    assert_eq!(image.map_cached(GuestOffset(MIB), Bytes(1)), invalid);
    assert_eq!(image.map_cached(GuestOffset(u64::MAX), Bytes::MAX), invalid);
    let last = image.map_cached(GuestOffset(MIB - 1), Bytes::MAX).expect("good").expect("no table");
    assert_eq!(last.len, Bytes(1));
}

#[test]
fn a_disk_of_size_zero_opens() {
    let images = Images::new();
    let path = images.create("zero", "", 0);
    let image = open(&mut runtime(), &path);
    assert_eq!(image.virtual_size(), Bytes::ZERO);
    assert_eq!(image.map_cached(GuestOffset(0), Bytes(1)), Err(ringdisk_ring::Errno::INVAL));
}

#[test]
fn the_image_is_shared_by_threads_that_load_the_same_slices() {
    let images = Images::new();
    let mut main_runtime = runtime();
    let path = images.create("shared", "cluster_size=4k", 64 * MIB);
    images.qemu_io("shared", &mixed(4 * KIB, 64 * MIB));
    source(&images, "source", 4 * MIB);
    let expected = images.converted("shared");
    let options = OpenOptions { metadata_cache_bytes: Some(Bytes(40 << 10)), ..Default::default() };
    let image = try_open_with(&mut main_runtime, &path, &options).expect("a good image");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut runtime = runtime();
                let ours = read_all(&mut runtime, &image, &[], 70_000);
                crate::common::assert_same("shared", &ours, &expected);
            });
        }
    });
}

#[test]
fn images_are_read_with_o_direct() {
    // The build directory lies on a disk; a temporary directory may not take O_DIRECT.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let images = Images(directory);
    let mut runtime = runtime();
    source(&images, "source", 2 * MIB + 512);
    for (name, compressed) in [("plain", "-q"), ("compressed", "-c")] {
        images.qemu_img(&["convert", compressed, "-O", "qcow2", "source", name]);
        let direct =
            ringdisk_storage::OpenOptions { read_only: true, direct: true, ..Default::default() };
        let file = ringdisk_storage::Storage::open(&images.path(name), &direct);
        let file = std::sync::Arc::new(file.expect("a file system with O_DIRECT"));
        let ring = runtime.ring().clone();
        let opened = runtime.block_on(Qcow2::open(&ring, file, &OpenOptions::default()));
        let image = opened.expect("a good image");
        let ours = read_all(&mut runtime, &image, &[], 70_001);
        crate::common::assert_same(name, &ours, &images.converted(name));
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_open_gives_errors() {
    let images = Images::new();
    let mut runtime = runtime();
    source(&images, "source", MIB);
    images.qemu_img(&["convert", "-c", "-O", "qcow2", "source", "image"]);
    let image = open(&mut runtime, &images.path("image"));
    let file = std::fs::OpenOptions::new().write(true).open(images.path("image"));
    file.expect("the image").set_len(64 * KIB).expect("shorter");
    let ring = runtime.ring().clone();
    let bytes = runtime.block_on(crate::common::read(&ring, &image, &[], 0, 512));
    assert_eq!(bytes, Err(ringdisk_ring::Errno::IO));
}
