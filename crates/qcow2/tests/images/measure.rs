//! `measure` gives the numbers of `qemu-img measure`.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::fs::File;
use std::path::Path;

use ringdisk_qcow2::{
    Bytes, CreateOptions, ErrorKind, ExtentKind, GuestOffset, Measure, Measurement, Preallocation,
    Qcow2, measure_raw,
};
use ringdisk_ring::Runtime;
use ringdisk_storage::Allocation;
use rustix::fs::{Advice, fadvise};

use crate::common::{Images, KIB, MIB, runtime};

/// The numbers of `qemu-img measure`.
fn theirs(images: &Images, words: &[&str]) -> Measurement {
    let text = images.qemu_img(&[&["measure", "--output", "json"], words].concat());
    let number = |key: &str| {
        let line = text.lines().find(|line| line.contains(&format!("\"{key}\"")))?;
        let digits: String = line.chars().filter(char::is_ascii_digit).collect();
        digits.parse().ok().map(Bytes)
    };
    Measurement {
        required: number("required").expect("a number"),
        fully_allocated: number("fully-allocated").expect("a number"),
        bitmaps: number("bitmaps"),
    }
}

/// Where a file has holes does not depend on the page cache any more: of space that is reserved and
/// not written, what is in there counts as data.
fn settle(path: &Path) {
    let file = File::open(path).expect("open");
    file.sync_all().expect("sync");
    fadvise(&file, 0, None, Advice::DontNeed).expect("advice");
}

/// Options that sizes depend on.
fn matrix() -> Vec<(CreateOptions, String)> {
    let mut all = Vec::new();
    for bits in 9..=21u32 {
        for (version, refcount_bits) in [(2, 16), (3, 1), (3, 16), (3, 64)] {
            for extended_l2 in [false, true] {
                if extended_l2 && (bits < 14 || version < 3) {
                    continue;
                }
                let cluster_size = 1 << bits;
                let compat = if version == 2 { "0.10" } else { "1.1" };
                let extended = if extended_l2 { "on" } else { "off" };
                let words = format!(
                    "cluster_size={cluster_size},refcount_bits={refcount_bits},compat={compat},\
                     extended_l2={extended}"
                );
                let options = CreateOptions {
                    cluster_size: Bytes(cluster_size),
                    refcount_bits,
                    version,
                    extended_l2,
                    ..Default::default()
                };
                all.push((options, words));
            }
        }
    }
    all
}

#[test]
fn sizes_without_a_source() {
    let images = Images::new();
    for (options, words) in matrix() {
        for size in [0, 1000, 64 * MIB, 3 * (1 << 30) + 512, 1 << 36] {
            let options = CreateOptions { size: Bytes(size), ..options.clone() };
            let ours = Measure::new("x", &options, false).expect("a good size").finish();
            let size = size.to_string();
            let theirs = theirs(&images, &["--size", &size, "-O", "qcow2", "-o", &words]);
            assert_eq!(ours, theirs, "{words} {size}");
        }
    }
}

#[test]
fn preallocation_and_backing_files() {
    let images = Images::new();
    images.create("base", "", 8 * MIB);
    std::fs::write(images.path("raw"), vec![7; 3 << 20]).expect("a raw image");
    let modes = [
        (Preallocation::Off, "off"),
        (Preallocation::Metadata, "metadata"),
        (Preallocation::Falloc, "falloc"),
        (Preallocation::Full, "full"),
    ];
    for (preallocation, mode) in modes {
        for backing in [false, true] {
            let mut words = format!("preallocation={mode}");
            if backing {
                words.push_str(",backing_file=base,backing_fmt=qcow2");
            }
            let options = CreateOptions {
                size: Bytes(8 * MIB),
                preallocation,
                backing_file: backing.then(|| b"base".to_vec()),
                ..Default::default()
            };
            let ours = Measure::new("x", &options, false).expect("good options").finish();
            let size = ["--size", "8M", "-O", "qcow2", "-o", &words];
            assert_eq!(ours, theirs(&images, &size), "{words}");
            let options = CreateOptions { size: Bytes(3 * MIB), ..options };
            let mut ours = Measure::new("x", &options, true).expect("good options");
            ours.data(GuestOffset(0), Bytes(3 * MIB));
            let source = ["-f", "raw", "-O", "qcow2", "-o", &words, "raw"];
            assert_eq!(ours.finish(), theirs(&images, &source), "{words}");
        }
    }
}

#[test]
fn raw_targets() {
    let images = Images::new();
    for size in [0, 1, 512, 1000, 1 << 40] {
        let ours = measure_raw("x", Bytes(size)).expect("a good size");
        let size = size.to_string();
        assert_eq!(ours, theirs(&images, &["--size", &size, "-O", "raw"]), "{size}");
    }
    for size in [u64::MAX, 1 << 63, (1 << 63) - 1] {
        assert_eq!(measure_raw("x", Bytes(size)).unwrap_err().kind(), ErrorKind::InvalidRequest);
    }
}

#[test]
fn raw_sources_count_what_is_no_hole() {
    use std::os::unix::fs::FileExt;
    let images = Images::new();
    let mut runtime = runtime();
    let file = std::fs::File::create(images.path("raw")).expect("a raw image");
    file.set_len(64 * MIB + 512).expect("sparse");
    for at in [0, 700 * KIB + 13, 8 * MIB - 4096, 9 * MIB, 64 * MIB] {
        file.write_all_at(&[7; 300], at).expect("room");
    }
    let storage = crate::common::storage(&images.path("raw"));
    let mut runs = Vec::new();
    let mut at = 0;
    while at < storage.len() {
        let ring = runtime.ring().clone();
        let (kind, len) =
            runtime.block_on(storage.allocation(&ring, at, storage.len() - at)).expect("a file");
        runs.extend((kind == Allocation::Data).then_some((at, len)));
        at += len;
    }
    for (options, words) in matrix() {
        let options = CreateOptions { size: Bytes(storage.len()), ..options };
        let mut ours = Measure::new("x", &options, true).expect("a good size");
        runs.iter().for_each(|(offset, len)| ours.data(GuestOffset(*offset), Bytes(*len)));
        let theirs = theirs(&images, &["-f", "raw", "-O", "qcow2", "-o", &words, "raw"]);
        assert_eq!(ours.finish(), theirs, "{words}");
    }
}

/// The ranges of the disk that hold data; without the holes of the file, if `holes`.
fn data_of(runtime: &mut Runtime, image: &Qcow2, holes: bool) -> Vec<(u64, u64)> {
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut runs = Vec::new();
        let mut at = GuestOffset(0);
        let end = GuestOffset::after(image.virtual_size());
        while at < end {
            let mut extent = image.map(&ring, at, end - at).await.expect("a good image");
            let mut data =
                matches!(extent.kind, ExtentKind::Data { .. } | ExtentKind::Compressed(_));
            if let ExtentKind::Data { offset } = extent.kind
                && holes
            {
                let file = image.data_storage();
                let run = file.allocation(&ring, offset.0, extent.len.0).await.expect("a file");
                (data, extent.len) = (run.0 == Allocation::Data, Bytes(run.1));
            }
            runs.extend(data.then_some((at.0, extent.len.0)));
            at += extent.len;
        }
        runs
    })
}

#[test]
fn qcow2_sources_and_their_bitmaps() {
    let images = Images::new();
    let mut runtime = runtime();
    for (compat, cluster) in [("1.1", 512), ("1.1", 65536), ("0.10", 65536), ("1.1", 2 << 20)] {
        let options = format!("compat={compat},cluster_size={cluster}");
        images.create("source", &options, 64 * MIB + 512);
        images.qemu_io(
            "source",
            &[
                "write -q 100k 700k".into(),
                "write -q -z 5M 3M".into(),
                "write -q 6M 1k".into(),
                "write -q 40M 5M".into(),
            ],
        );
        if compat == "1.1" {
            images.qemu_img(&["bitmap", "--add", "source", "one"]);
            images.qemu_img(&["bitmap", "--add", "-g", "512", "source", "a longer name"]);
        }
        settle(&images.path("source"));
        let image = crate::common::open(&mut runtime, &images.path("source"));
        // Where most of what is allocated is holes in the file, QEMU looks at those too. Whether it
        // is depends on what the file system has allocated by then, so for large clusters either is
        // right.
        let looks: &[bool] = if cluster == 2 << 20 { &[true, false] } else { &[false] };
        let runs: Vec<_> =
            looks.iter().map(|holes| data_of(&mut runtime, &image, *holes)).collect();
        for (options, words) in matrix() {
            let options = CreateOptions { size: image.virtual_size(), ..options };
            let ours = runs.iter().map(|runs| {
                let mut ours = Measure::new("x", &options, true).expect("a good size");
                runs.iter().for_each(|(offset, len)| ours.data(GuestOffset(*offset), Bytes(*len)));
                ours.bitmaps(image.info());
                ours.finish()
            });
            let ours: Vec<_> = ours.collect();
            settle(&images.path("source"));
            let theirs = theirs(&images, &["-f", "qcow2", "-O", "qcow2", "-o", &words, "source"]);
            assert!(ours.contains(&theirs), "{compat} {cluster} to {words}: {ours:?}, {theirs:?}");
        }
    }
}

#[test]
fn what_no_image_can_be_is_refused() {
    let kind = |options: CreateOptions| Measure::new("x", &options, false).unwrap_err().kind();
    let plain = CreateOptions { size: Bytes(1 << 30), ..Default::default() };
    assert_eq!(kind(CreateOptions { size: Bytes(3 << 50), ..plain.clone() }), ErrorKind::TooLarge);
    let small = CreateOptions { size: Bytes(129 << 30), cluster_size: Bytes(512), ..plain.clone() };
    assert_eq!(kind(small), ErrorKind::TooLarge);
    let odd = CreateOptions { cluster_size: Bytes(3000), ..plain.clone() };
    assert_eq!(kind(odd), ErrorKind::InvalidRequest);
    let odd = CreateOptions { refcount_bits: 3, ..plain.clone() };
    assert_eq!(kind(odd), ErrorKind::InvalidRequest);
    let old = CreateOptions { refcount_bits: 8, version: 2, ..plain.clone() };
    assert_eq!(kind(old), ErrorKind::InvalidRequest);
    let extended = CreateOptions { extended_l2: true, cluster_size: Bytes(4096), ..plain };
    assert_eq!(kind(extended), ErrorKind::InvalidRequest);
}
