//! New images: what `qemu-img` says about them is what it says about its own, and it goes on with
//! them.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, CompressionType, CreateOptions, ErrorKind, Preallocation};
use ringdisk_ring::{Errno, Runtime};
use ringdisk_storage::Storage;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use crate::common::{Images, KIB, MIB, open, read_all, runtime};

fn writable(path: &Path) -> Arc<Storage> {
    let options = ringdisk_storage::OpenOptions { create: true, ..Default::default() };
    Arc::new(Storage::open(path, &options).expect("a new file"))
}

/// Makes `name`, and its data file where the options name one.
fn create(runtime: &mut Runtime, images: &Images, name: &str, options: &CreateOptions) {
    let ring = runtime.ring().clone();
    let file = writable(&images.path(name));
    let data = options.data_file.as_ref().map(|name| {
        writable(&images.path(std::str::from_utf8(name).expect("a name of this test")))
    });
    runtime
        .block_on(ringdisk_qcow2::create(&ring, &file, data.as_ref(), options))
        .unwrap_or_else(|error| panic!("{options:?}: {error}"));
}

/// The options as `qemu-img create -o` takes them; without preallocation.
fn words(options: &CreateOptions) -> String {
    let mut words = vec![
        format!("compat={}", if options.version == 2 { "0.10" } else { "1.1" }),
        format!("cluster_size={}", options.cluster_size),
        format!("refcount_bits={}", options.refcount_bits),
    ];
    let mut add = |set: bool, word: &str| words.extend(set.then(|| word.to_owned()));
    add(options.extended_l2, "extended_l2=on");
    add(options.lazy_refcounts, "lazy_refcounts=on");
    add(options.compression == CompressionType::Zstd, "compression_type=zstd");
    add(options.data_file_raw, "data_file_raw=on");
    let text = |name: &[u8]| String::from_utf8(name.to_vec()).expect("a name of this test");
    words.extend(options.data_file.as_deref().map(|name| format!("data_file={}", text(name))));
    words.extend(options.backing_file.as_deref().map(|n| format!("backing_file={}", text(n))));
    words.extend(options.backing_format.as_ref().map(|name| format!("backing_fmt={name}")));
    words.join(",")
}

/// What `qemu-img info` says about the disk and the format, without names and sizes of files.
fn info(images: &Images, name: &str) -> String {
    let text = images.qemu_img(&["info", "-U", name]);
    text.split("Child node")
        .next()
        .unwrap_or_default()
        .lines()
        .filter(|line| !line.starts_with("image:") && !line.starts_with("disk size:"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Makes an image with our program and one with `qemu-img`; `info` says the same, `check` is clean,
/// and `qemu-io` writes and reads.
fn compare(runtime: &mut Runtime, images: &Images, options: &CreateOptions) {
    let size = options.size.to_string();
    images.qemu_img(&["create", "-q", "-f", "qcow2", "-o", &words(options), "theirs", &size]);
    create(runtime, images, "ours", options);
    assert_eq!(info(images, "ours"), info(images, "theirs"), "{options:?}");
    images.qemu_img(&["check", "-q", "ours"]);
    images.qemu_img(&["check", "-q", "theirs"]);
    let image = open(runtime, &images.path("ours"));
    let theirs = open(runtime, &images.path("theirs"));
    assert_eq!(image.info().feature_names, theirs.info().feature_names);
    assert_eq!(image.info().incompatible_features, theirs.info().incompatible_features);
    if options.size >= Bytes(MIB) {
        let write = format!("write -q -P 7 {} 70k", options.size / 2 / 512 * 512);
        let read = write.replace("write", "read");
        images.qemu_io("ours", &[write, read]);
        images.qemu_img(&["check", "-q", "ours"]);
    }
}

#[test]
fn every_cluster_size_and_refcount_width() {
    let images = Images::new();
    let mut runtime = runtime();
    for bits in 9..=21 {
        for (version, refcount_bits) in [(2, 16), (3, 1 << (bits % 7))] {
            let size = (300 << bits) + 512;
            let cluster_size = 1 << bits;
            let options = CreateOptions {
                size: Bytes(size),
                cluster_size: Bytes(cluster_size),
                refcount_bits,
                version,
                ..Default::default()
            };
            compare(&mut runtime, &images, &options);
        }
    }
}

#[test]
fn sizes_from_nothing_to_petabytes() {
    let images = Images::new();
    let mut runtime = runtime();
    for size in [0, 1, 511, 1000, 65536, 5000 * KIB, 1 << 40, 1 << 50, 2 << 50] {
        compare(&mut runtime, &images, &CreateOptions { size: Bytes(size), ..Default::default() });
    }
}

#[test]
fn features_alone_and_together() {
    let images = Images::new();
    let mut runtime = runtime();
    for which in 0..8 {
        let options = CreateOptions {
            size: Bytes(3 * MIB + 512),
            extended_l2: which & 1 != 0,
            lazy_refcounts: which & 2 != 0,
            compression: [CompressionType::Zlib, CompressionType::Zstd][which >> 2],
            ..Default::default()
        };
        compare(&mut runtime, &images, &options);
    }
}

#[test]
fn backing_files_of_all_lengths() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("base", "", MIB);
    let long = format!("{}base", "./".repeat(500));
    for (name, format) in [("base", Some("qcow2")), (&*long, Some("qcow2"))] {
        for version in [2, 3] {
            let options = CreateOptions {
                size: Bytes(2 * MIB),
                version,
                backing_file: Some(name.into()),
                backing_format: format.map(Into::into),
                ..Default::default()
            };
            compare(&mut runtime, &images, &options);
        }
    }
}

#[test]
fn external_data_files_plain_and_raw() {
    let images = Images::new();
    let mut runtime = runtime();
    for (data_file_raw, extended_l2) in [(false, false), (false, true), (true, false), (true, true)]
    {
        let options = CreateOptions {
            size: Bytes(3 * MIB + 512),
            data_file: Some(b"data".to_vec()),
            data_file_raw,
            extended_l2,
            ..Default::default()
        };
        compare(&mut runtime, &images, &options);
        let length = images.path("data").metadata().expect("the data file").len();
        assert!(length >= options.size.0);
    }
}

fn allocated(path: PathBuf) -> u64 {
    use std::os::unix::fs::MetadataExt;
    path.metadata().expect("a file").blocks() * 512
}

#[test]
fn preallocated_images_need_no_allocation_and_read_as_zeroes() {
    let images = Images::new();
    let mut runtime = runtime();
    let size = 9 * MIB + 512;
    for preallocation in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        for which in 0..5 {
            let external = which == 1 || which == 2;
            let options = CreateOptions {
                size: Bytes(size),
                cluster_size: Bytes([65536, 65536, 65536, 512, 65536][which]),
                refcount_bits: [16, 16, 16, 1, 64][which],
                data_file: external.then(|| b"data".to_vec()),
                data_file_raw: which == 2,
                extended_l2: which == 4,
                preallocation,
                ..Default::default()
            };
            create(&mut runtime, &images, "ours", &options);
            images.qemu_img(&["check", "-q", "ours"]);
            let image = open(&mut runtime, &images.path("ours"));
            let bytes = read_all(&mut runtime, &image, &[], MIB as usize);
            assert!(bytes.iter().all(|byte| *byte == 0));
            let length = images.path("ours").metadata().expect("the image").len();
            let data = images.path(if external { "data" } else { "ours" });
            let reserved = allocated(data) >= size;
            assert_eq!(reserved, preallocation != Preallocation::Metadata, "{options:?}");
            images.qemu_io("ours", &[format!("write -q -P 9 0 {size}")]);
            images.qemu_img(&["check", "-q", "ours"]);
            let after = images.path("ours").metadata().expect("the image").len();
            assert_eq!(after, length, "{options:?}");
        }
    }
}

#[test]
fn preallocation_over_a_backing_file_needs_subclusters_and_shows_the_backing_file() {
    let images = Images::new();
    let mut runtime = runtime();
    std::fs::write(images.path("base"), vec![7; 2 << 20]).expect("a base");
    let options = CreateOptions {
        size: Bytes(3 * MIB),
        backing_file: Some(b"base".to_vec()),
        backing_format: Some("raw".into()),
        extended_l2: true,
        preallocation: Preallocation::Metadata,
        ..Default::default()
    };
    create(&mut runtime, &images, "ours", &options);
    images.qemu_img(&["check", "-q", "ours"]);
    images.qemu_io("ours", &["read -q -P 7 0 2M".into(), "read -q -P 0 2M 1M".into()]);
}

#[test]
fn the_data_file_and_its_name_come_together() {
    let images = Images::new();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let file = writable(&images.path("ours"));
    let options = CreateOptions { data_file: Some(b"data".to_vec()), ..Default::default() };
    let error = runtime.block_on(ringdisk_qcow2::create(&ring, &file, None, &options));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidRequest);
    let plain = CreateOptions::default();
    let error = runtime.block_on(ringdisk_qcow2::create(&ring, &file, Some(&file), &plain));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidRequest);
}

#[test]
fn old_content_is_gone() {
    let images = Images::new();
    let mut runtime = runtime();
    std::fs::write(images.path("ours"), vec![0xee; 9 << 20]).expect("rubbish");
    create(
        &mut runtime,
        &images,
        "ours",
        &CreateOptions { size: Bytes(MIB), ..Default::default() },
    );
    images.qemu_img(&["check", "-q", "ours"]);
    let image = open(&mut runtime, &images.path("ours"));
    assert!(read_all(&mut runtime, &image, &[], MIB as usize).iter().all(|byte| *byte == 0));
}

/// Storage of a fixed length, full of an old image and rubbish.
fn device(len: usize) -> SimStorage {
    let mut content = vec![0xee; len];
    content[..4].copy_from_slice(b"QFI\xfb");
    let sim = SimStorage::from_image(&content, 1);
    sim.on(When::kind(OpKind::SetLen), Fault::Fail(Errno::OPNOTSUPP));
    sim
}

#[test]
fn on_a_device_nothing_of_the_old_content_shows() {
    let images = Images::new();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    for preallocation in [Preallocation::Off, Preallocation::Metadata, Preallocation::Full] {
        let sim = device(16 << 20);
        let options = CreateOptions { size: Bytes(3 * MIB), preallocation, ..Default::default() };
        runtime
            .block_on(ringdisk_qcow2::create(&ring, &sim.storage(), None, &options))
            .expect("room for the image");
        std::fs::write(images.path("ours"), sim.durable_image()).expect("a copy");
        images.qemu_img(&["check", "-q", "ours"]);
        images.qemu_io("ours", &["read -q -P 0 0 3M".into()]);
    }
}

#[test]
fn a_device_that_is_too_small_is_refused() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let sim = device(1 << 20);
    sim.on(When::kind(OpKind::WriteZeroes).at(1 << 20..u64::MAX), Fault::Fail(Errno::NOSPC));
    let preallocation = Preallocation::Metadata;
    let options = CreateOptions { size: Bytes(3 * MIB), preallocation, ..Default::default() };
    let made = runtime.block_on(ringdisk_qcow2::create(&ring, &sim.storage(), None, &options));
    assert_eq!(made.unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn a_power_cut_leaves_no_image_or_a_sound_one() {
    let images = Images::new();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let options = CreateOptions {
        size: Bytes(2 * MIB),
        cluster_size: Bytes(4096),
        preallocation: Preallocation::Metadata,
        ..Default::default()
    };
    let count = {
        let sim = SimStorage::new(0, 1);
        let storage = sim.storage();
        let made = ringdisk_qcow2::create(&ring, &storage, None, &options);
        runtime.block_on(made).expect("an image");
        sim.log().len() as u64
    };
    let mut sound = 0;
    for stop in 0..=count {
        let sim = SimStorage::from_image(&[0xee; 65536], 1);
        sim.on(When::any().skip(stop), Fault::Fail(Errno::IO));
        let storage = sim.storage();
        let made = ringdisk_qcow2::create(&ring, &storage, None, &options);
        assert_eq!(runtime.block_on(made).is_ok(), stop == count);
        for seed in 0..8 {
            let left = sim.crash_image(seed);
            if left.starts_with(b"QFI\xfb") {
                std::fs::write(images.path("left"), left).expect("a copy");
                images.qemu_img(&["check", "-q", "left"]);
                sound += 1;
            }
        }
    }
    assert!(sound >= 8, "{sound}");
}
