//! Another size of the disk: what is added is zero, what is cut off is gone, QEMU agrees.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

mod shrink;

use ringdisk_qcow2::{
    Below, Bytes, Error, ErrorKind, ExtentKind, GuestOffset, Nothing, OpenOptions, Preallocation,
    Qcow2, ResizeOptions,
};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use rustix::fs::{FallocateFlags, fallocate};

use crate::common::{Images, KIB, MIB, assert_same, runtime};
use crate::ops::{NAME, Subject, storage};

const SHAPES: [&str; 9] = [
    "",
    "compat=0.10",
    "cluster_size=512",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4096,refcount_bits=1",
    "cluster_size=16384,extended_l2=on",
    "cluster_size=2097152",
    "lazy_refcounts=on",
    "data_file=image.data",
];

const MODES: [Preallocation; 4] =
    [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full];

const SIZE: u64 = 3 * MIB + 5 * 512;

#[test]
fn a_disk_grows_and_shrinks_with_every_preallocation() {
    for options in SHAPES {
        for mode in MODES {
            let what = format!("{options} {mode:?}");
            let mut subject = Subject::new(options, SIZE);
            subject.write(1, 0, 700 * KIB);
            subject.write(2, SIZE - 512, 512);
            subject.resize(2 * SIZE, mode).expect("a larger disk");
            subject.check(&format!("{what}: grow"));
            subject.write(3, SIZE - 512, 100 * KIB);
            subject.write(4, 2 * SIZE - 1024, 1024);
            subject.check(&format!("{what}: writes into the new part"));
            subject.resize(SIZE / 1024 * 512, Preallocation::Off).expect("a smaller disk");
            subject.check(&format!("{what}: shrink"));
            subject.resize(SIZE, mode).expect("a larger disk");
            subject.check(&format!("{what}: what was cut off does not come back"));
            subject.write(5, 0, SIZE);
            subject.check(&format!("{what}: all of it"));
        }
    }
}

#[test]
fn what_is_reserved_behind_the_data_is_kept_by_a_shrink() {
    for mode in ["metadata", "falloc"] {
        // More than the engine looks back at from the end of the file.
        let mut subject = Subject::new(&format!("preallocation={mode}"), 160 * MIB);
        subject.write(1, 0, 4 * MIB);
        subject.resize(200 * MIB, Preallocation::Off).expect("a larger disk");
        subject.check(mode);
        for size in [180, 170, 161] {
            subject.resize(size * MIB, Preallocation::Off).expect("a smaller disk");
            subject.check(mode);
        }
    }
}

#[test]
fn the_first_level_grows_with_the_disk() {
    let mut subject = Subject::new("cluster_size=512", 512);
    subject.write(1, 0, 512);
    subject.resize(60 * MIB, Preallocation::Off).expect("a larger disk");
    subject.check("60 MiB");
    subject.write(2, 59 * MIB, MIB);
    subject.check("a write at the end");
    subject.resize(512, Preallocation::Off).expect("a smaller disk");
    subject.check("one sector");
    assert!(std::fs::metadata(subject.path()).expect("the image").len() < 32 * KIB);
    subject.resize(0, Preallocation::Off).expect("nothing");
    subject.check_clean("nothing");
    subject.resize(MIB, Preallocation::Metadata).expect("a larger disk");
    subject.check("from nothing");
}

#[test]
fn garbage_past_the_end_does_not_show() {
    for options in ["", "compat=0.10", "cluster_size=16384,extended_l2=on", "data_file=image.data"]
    {
        // QEMU leaves the rest of the last cluster when it shrinks.
        let mut subject = Subject::new(options, MIB);
        subject.write(7, 0, MIB);
        let size = 512 * KIB + 512;
        subject.images.qemu_img(&["resize", "-q", "--shrink", NAME, &size.to_string()]);
        subject.disk.truncate(size as usize);
        subject.check("shrunk by QEMU");
        subject.resize(2 * MIB, Preallocation::Off).expect("a larger disk");
        subject.check(&format!("{options}: garbage"));
    }
}

#[test]
fn garbage_that_a_snapshot_needs_stays_there() {
    let mut subject = Subject::new("", MIB);
    subject.write(7, 0, MIB);
    subject.compress(8, 3);
    subject.create("one").expect("a snapshot");
    for size in [200 * KIB + 512, 100 * KIB] {
        subject.resize(size, Preallocation::Off).expect("a smaller disk");
        subject.check("shrink");
        subject.resize(MIB, Preallocation::Off).expect("a larger disk");
        subject.check("grow");
        subject.apply("one").expect("a snapshot");
        subject.check("apply");
    }
}

/// A backing file of sevens that is longer than the disk.
struct Sevens(u64);

impl Below for Sevens {
    async fn read(&self, _: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        let inside = self.0.saturating_sub(offset.0).min(buf.len() as u64) as usize;
        buf.slice(0..inside).fill(7);
        buf.slice(inside..buf.len()).fill(0);
        Ok(())
    }

    fn has_data(&self, offset: GuestOffset, _: Bytes) -> bool {
        offset < GuestOffset(self.0)
    }
}

/// An image that names a backing file but is opened without it.
#[test]
fn a_disk_does_not_grow_without_the_backing_file_that_it_names() {
    let images = Images::new();
    std::fs::write(images.path("base"), vec![7; 3 * MIB as usize]).expect("a file");
    let words = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", NAME];
    images.qemu_img(&[&words[..], &[&MIB.to_string()]].concat());
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let file = storage(&images.path(NAME));
        let mut image = Qcow2::open(&ring, file, &options).await.expect("an image");
        let resize = ResizeOptions { shrink: true, preallocation: Preallocation::Off };
        let refused =
            image.resize(&ring, Bytes(4 * MIB), &resize, &Nothing).await.expect_err("larger");
        assert!(refused.to_string().contains("open without it"), "{refused}");
        // What becomes smaller shows nothing new.
        image.resize(&ring, Bytes(MIB / 2), &resize, &Nothing).await.expect("a smaller disk");
        image.close(&ring).await.expect("a clean close");
    });
    assert_same("smaller", &images.converted(NAME), &vec![7; MIB as usize / 2]);
    images.qemu_img(&["check", "-q", NAME]);
}

#[test]
fn a_longer_backing_file_does_not_show_in_the_new_part() {
    let shapes = ["", "compat=0.10", "cluster_size=512", "cluster_size=16384,extended_l2=on"];
    for options in shapes {
        for mode in MODES {
            let images = Images::new();
            std::fs::write(images.path("base"), vec![7; 3 * MIB as usize]).expect("a file");
            let size = MIB + 3 * 512;
            let options = format!("compat=1.1,{options}").replace("compat=1.1,compat", "compat");
            let size_text = size.to_string();
            images.qemu_img(&[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-b",
                "base",
                "-F",
                "raw",
                "-o",
                options.trim_end_matches(','),
                NAME,
                &size_text,
            ]);
            let mut runtime = runtime();
            let ring = runtime.ring().clone();
            runtime.block_on(async {
                let options = OpenOptions { writable: true, ..OpenOptions::default() };
                let file = storage(&images.path(NAME));
                let mut image = Qcow2::open(&ring, file, &options).await.expect("an image");
                let resize = ResizeOptions { shrink: false, preallocation: mode };
                let below = Sevens(3 * MIB);
                image.resize(&ring, Bytes(4 * MIB), &resize, &below).await.expect("a larger disk");
                image.close(&ring).await.expect("a clean close");
            });
            let mut expected = vec![7; size as usize];
            expected.resize(4 * MIB as usize, 0);
            let case = format!("{options} {mode:?}");
            assert_same(&case, &images.converted(NAME), &expected);
            images.qemu_img(&["check", "-q", NAME]);
        }
    }
}

/// Version 2 says "zeroes" over a longer backing file with clusters of data. Those may be the last
/// ones of the file, where the tables find room further in front.
#[test]
fn zeroes_of_version_2_over_a_longer_backing_file_lie_inside_the_file() {
    const CLUSTER: u64 = KIB;
    let images = Images::new();
    std::fs::write(images.path("base"), vec![7; 3 * MIB as usize]).expect("a file");
    let full = images.path("full");
    let (size, options) = ((2 * MIB).to_string(), "compat=0.10,cluster_size=1k");
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "-o", options];
    images.qemu_img(&[&create[..], &["full", &size]].concat());
    images.qemu_io("full", &["write -P 1 0 2M".to_owned()]);
    // Refcount blocks count 512 clusters each: room that is found at once, late, or not at all.
    for room in (0..2 * MIB).step_by(300 << 10) {
        std::fs::copy(&full, images.path(NAME)).expect("a copy");
        images.qemu_img(&["snapshot", "-c", "gone", NAME]);
        images.qemu_io(NAME, &[format!("write -P 2 {room} 64k")]);
        images.qemu_img(&["snapshot", "-d", "gone", NAME]);
        for clusters in 1..4 {
            let case = format!("{clusters} clusters, room at {room}");
            let copy = images.path("copy");
            std::fs::copy(images.path(NAME), &copy).expect("a copy");
            let mut runtime = runtime();
            let ring = runtime.ring().clone();
            runtime.block_on(async {
                let options = OpenOptions { writable: true, ..OpenOptions::default() };
                let mut image = Qcow2::open(&ring, storage(&copy), &options).await.expect("opens");
                let new = 2 * MIB + clusters * CLUSTER;
                let below = Sevens(3 * MIB);
                image
                    .resize(&ring, Bytes(new), &ResizeOptions::default(), &below)
                    .await
                    .expect("grows");
                image.close(&ring).await.expect("a clean close");
                let image = Qcow2::open(&ring, storage(&copy), &OpenOptions::default()).await;
                let image = image.expect("opens");
                for at in (2 * MIB..new).step_by(CLUSTER as usize) {
                    let extent = image.map(&ring, GuestOffset(at), Bytes(CLUSTER)).await;
                    let extent = extent.unwrap_or_else(|errno| panic!("{case}, at {at}: {errno}"));
                    assert!(matches!(extent.kind, ExtentKind::Data { .. }), "{case}");
                }
            });
            let mut expected = images.converted(NAME);
            expected.resize((2 * MIB + clusters * CLUSTER) as usize, 0);
            assert_same(&case, &images.converted("copy"), &expected);
            images.qemu_img(&["check", "-q", "copy"]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let kind = |result: Result<(), Error>| result.expect_err("refused").kind();
    let resize =
        |subject: &mut Subject, size: u64, shrink: bool, preallocation| {
            let options = ResizeOptions { shrink, preallocation };
            kind(subject.with(async |image, ring| {
                image.resize(ring, Bytes(size), &options, &Nothing).await
            }))
        };
    let mut subject = Subject::new("", SIZE);
    let off = Preallocation::Off;
    assert_eq!(resize(&mut subject, SIZE - 512, false, off), ErrorKind::InvalidRequest);
    assert_eq!(resize(&mut subject, SIZE + 1, false, off), ErrorKind::InvalidRequest);
    assert_eq!(resize(&mut subject, u64::MAX - 511, false, off), ErrorKind::InvalidRequest);
    assert_eq!(resize(&mut subject, 1 << 62, false, off), ErrorKind::TooLarge);
    assert_eq!(
        resize(&mut subject, SIZE - 512, true, Preallocation::Full),
        ErrorKind::InvalidRequest
    );
    subject.check("refused sizes");

    let mut old = Subject::new("compat=0.10", SIZE);
    old.create("one").expect("a snapshot");
    assert_eq!(resize(&mut old, 2 * SIZE, false, off), ErrorKind::InvalidRequest);
    old.check("a refused size of an old image");
}

#[test]
fn bitmaps_follow_the_size_of_the_disk() {
    for cluster in ["65536", "512"] {
        let mut subject = Subject::new(&format!("cluster_size={cluster}"), SIZE);
        subject.images.qemu_img(&["bitmap", "--add", "-g", "512", NAME, "fine"]);
        subject.images.qemu_img(&["bitmap", "--add", NAME, "coarse"]);
        subject.images.qemu_io(NAME, &["write -P 1 0 3M".to_owned()]);
        subject.disk[..3 * MIB as usize].fill(1);
        let before = dirty(&subject, "fine");
        subject.resize(50 * MIB, Preallocation::Off).expect("a larger disk");
        subject.check("grow with bitmaps");
        assert_eq!(dirty(&subject, "fine"), before + 50 * MIB - SIZE);
        subject.resize(MIB + 512, Preallocation::Off).expect("a smaller disk");
        subject.check("shrink with bitmaps");
        subject.resize(SIZE, Preallocation::Off).expect("a larger disk");
        subject.check("grow again");
        assert_eq!(dirty(&subject, "fine"), SIZE);
        assert_eq!(dirty(&subject, "coarse"), SIZE);
    }
}

/// Makes a copy what the disk is, by what a bitmap says was changed since the copy was made.
fn incremental(subject: &Subject, bitmap: &str, copy: &[u8]) -> Vec<u8> {
    let mut copy = copy.to_vec();
    copy.resize(subject.disk.len(), 0);
    for range in changed(subject, bitmap) {
        let range = range.start as usize..range.end as usize;
        copy[range.clone()].copy_from_slice(&subject.disk[range]);
    }
    copy
}

#[test]
fn what_was_cut_off_is_in_the_next_incremental_backup() {
    // The smaller size ends a granule, lies inside one, and inside a cluster of bits.
    for cluster in ["65536", "512"] {
        for small in [MIB, MIB + 512, MIB + 64 * KIB - 512, 512] {
            let mut subject = Subject::new(&format!("cluster_size={cluster}"), 4 * MIB);
            subject.images.qemu_io(NAME, &["write -P 1 0 4M".to_owned()]);
            subject.disk.fill(1);
            let bitmaps = [("fine", "512"), ("coarse", "65536"), ("huge", "1048576")];
            for (name, granularity) in bitmaps {
                subject.images.qemu_img(&["bitmap", "--add", "-g", granularity, NAME, name]);
            }
            subject.images.qemu_img(&["bitmap", "--add", "--disable", NAME, "still"]);
            let copy = subject.disk.clone();
            for large in [3 * MIB, 4 * MIB + 512] {
                subject.resize(small, Preallocation::Off).expect("a smaller disk");
                subject.resize(large, Preallocation::Off).expect("a larger disk");
                subject.check("smaller and larger again");
                for name in ["fine", "coarse", "huge", "still"] {
                    let restored = incremental(&subject, name, &copy);
                    assert_same(name, &restored, &subject.disk);
                }
                // Nothing that stayed as it was.
                assert_eq!(changed(&subject, "fine").first().map(|range| range.start), Some(small));
            }
        }
    }
}

/// Bytes that a bitmap marks, as QEMU sees them.
fn dirty(subject: &Subject, bitmap: &str) -> u64 {
    let target = format!("driver=qcow2,file.filename={NAME}");
    let json = subject.images.qemu_img(&["info", "--output=json", "--image-opts", &target]);
    assert!(json.contains(bitmap) && !json.contains("in-use"), "{json}");
    marked(subject, bitmap)
}

fn marked(subject: &Subject, bitmap: &str) -> u64 {
    changed(subject, bitmap).iter().map(|range| range.end - range.start).sum()
}

/// What a bitmap marks.
fn changed(subject: &Subject, bitmap: &str) -> Vec<std::ops::Range<u64>> {
    let path = subject.path();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let image = Qcow2::open(&ring, storage(&path), &OpenOptions::default()).await;
        let image = image.expect("an image");
        let contents = image.bitmap_contents(&ring, bitmap).await.expect("a bitmap");
        contents.ranges().map(|range| range.start.0..range.end.0).collect()
    })
}

#[test]
fn a_raw_data_file_has_the_size_of_the_disk() {
    let options = "data_file=image.data,data_file_raw=on";
    let mut subject = Subject::new(options, SIZE);
    subject.write(1, 0, SIZE);
    for (size, mode) in [
        (2 * SIZE, Preallocation::Off),
        (SIZE / 1024 * 512, Preallocation::Off),
        (3 * SIZE, Preallocation::Falloc),
    ] {
        subject.resize(size, mode).expect("another size");
        subject.check("a raw data file");
        let data = std::fs::read(subject.images.path("image.data")).expect("the data file");
        assert_same("the data file", &data, &subject.disk);
    }
}

/// Space that the files of an image take, bytes.
fn allocated(subject: &Subject) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let of = |name| std::fs::metadata(subject.images.path(name)).map_or(0, |stat| stat.blocks());
    (of(NAME) + of("image.data")) * 512
}

/// Every byte of `range` has a place of its own in the image.
fn has_places(subject: &mut Subject, range: std::ops::Range<u64>) -> bool {
    subject.with(async |image, ring| {
        let mut at = range.start;
        while at < range.end {
            let extent = image
                .map(ring, GuestOffset(at), Bytes(range.end - at))
                .await
                .expect("a good image");
            let place = match extent.kind {
                ExtentKind::Data { offset } => Some(offset),
                ExtentKind::Zero { offset } => offset,
                ExtentKind::Compressed(_) | ExtentKind::Unallocated => None,
            };
            if place.is_none() {
                return false;
            }
            at += extent.len.0;
        }
        true
    })
}

#[test]
fn space_for_all_that_is_added_is_prepared_also_in_the_last_cluster_of_the_old_disk() {
    // Sizes whose end is inside a cluster, by a sector and by all but one.
    for options in [
        "",
        "preallocation=metadata",
        "compat=0.10",
        "cluster_size=16384,extended_l2=on",
        "cluster_size=2097152",
        "data_file=image.data",
    ] {
        for mode in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
            let ends: &[u64] =
                if options.is_empty() { &[MIB + 512, MIB - 512] } else { &[MIB + 512] };
            for &old in ends {
                let what = format!("{options} {mode:?} from {old}");
                let mut subject = Subject::new(options, old);
                subject.write(1, 0, 4096);
                if options == "preallocation=metadata" {
                    // QEMU has written the last cluster, to set the length.
                    let len = std::fs::metadata(subject.path()).expect("the image").len();
                    let path = subject.path();
                    let image = std::fs::File::options().write(true).open(path).expect("open");
                    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    fallocate(image, punch, len - 65536, 65536).expect("a hole");
                }
                let before = allocated(&subject);
                // The second one ends in the same cluster as the first.
                for size in [old + 1024, 3 * MIB] {
                    subject.resize(size, mode).expect("a larger disk");
                    assert!(has_places(&mut subject, old..size), "{what}");
                    let taken = allocated(&subject) - before;
                    let wanted = if mode == Preallocation::Metadata { 0 } else { size - old };
                    assert!(taken >= wanted, "{what}: {taken} of {wanted}");
                    subject.check_clean(&format!("{what} to {size}"));
                }
                subject.write(2, old, MIB);
                subject.check(&format!("{what}: a write behind the old end"));
            }
        }
    }
}

#[test]
fn the_last_cluster_keeps_what_a_snapshot_or_a_backing_file_has_there() {
    for mode in [Preallocation::Falloc, Preallocation::Full] {
        let mut subject = Subject::new("", MIB);
        subject.write(7, 0, MIB);
        subject.create("one").expect("a snapshot");
        subject.resize(MIB - 512, Preallocation::Off).expect("a smaller disk");
        subject.resize(2 * MIB, mode).expect("a larger disk");
        assert!(has_places(&mut subject, MIB - 512..2 * MIB));
        subject.check("grown above a snapshot");
        subject.apply("one").expect("a snapshot");
        subject.check("apply");
    }
}

#[test]
fn a_disk_that_was_shrunk_says_so_although_its_data_file_stays_long() {
    let mut subject = Subject::new("data_file=image.data,data_file_raw=on", MIB);
    subject.write(1, 0, MIB);
    let ring = subject.runtime.ring().clone();
    let file = storage(&subject.path());
    let data = SimStorage::from_image(&subject.disk, 1);
    data.on(When::kind(OpKind::SetLen), Fault::Fail(Errno::IO));
    subject.runtime.block_on(async {
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let mut image = Qcow2::open(&ring, file, &options).await.expect("a good image");
        image.set_data_file(data.storage()).expect("a data file is wanted");
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        image.resize(&ring, Bytes(MIB / 2), &options, &Nothing).await.expect("it is smaller");
        assert_eq!(image.virtual_size(), Bytes(MIB / 2));
        image.close(&ring).await.expect("a clean close");
    });
    subject.with(async |image, _| assert_eq!(image.virtual_size(), Bytes(MIB / 2)));
}

#[test]
fn an_emptied_disk_is_what_its_backing_file_is() {
    for options in SHAPES {
        let mut subject = Subject::new(options, SIZE);
        subject.write(1, 0, MIB);
        subject.make_empty();
        subject.check("emptied");
        subject.write(2, 0, MIB);
        subject.check("written again");
    }
    let mut subject = Subject::new("", SIZE);
    subject.write(1, 0, MIB);
    subject.create("one").expect("a snapshot");
    subject.make_empty();
    subject.check("emptied beside a snapshot");
    assert!(std::fs::metadata(subject.path()).expect("the image").len() < 2 * MIB);
}

#[test]
fn the_name_of_the_backing_file_changes() {
    for options in ["", "compat=0.10", "cluster_size=512"] {
        let mut subject = Subject::new(options, SIZE);
        std::fs::write(subject.images.path("base"), vec![9; MIB as usize]).expect("a file");
        subject.write(1, 512 * KIB, 512 * KIB);
        subject
            .with(async |image, ring| image.set_backing(ring, Some(b"base"), Some("raw")).await)
            .expect("a name");
        subject.disk[..512 * KIB as usize].fill(9);
        subject.check("a backing file");
        subject
            .with(async |image, ring| image.set_backing(ring, None, None).await)
            .expect("no name");
        subject.disk[..512 * KIB as usize].fill(0);
        subject.check("no backing file");
        let long = vec![b'x'; 1024];
        for (name, format) in [(&long[..], "raw"), (b"", "raw"), (b"a\0b", "raw"), (b"base", "")] {
            let result = subject
                .with(async |image, ring| image.set_backing(ring, Some(name), Some(format)).await);
            assert_eq!(result.expect_err("refused").kind(), ErrorKind::InvalidRequest);
        }
        subject.check("refused names");
    }
}

/// A guest would see a larger disk, of which the new part answers with errors.
#[test]
fn a_disk_whose_data_file_does_not_grow_keeps_its_size() {
    let images = Images::new();
    for (name, options) in [("plain", ""), ("raw", ",data_file_raw=on")] {
        let options = format!("data_file={name}.data{options}");
        let path = images.create(name, &options, 4 * MIB);
        images.qemu_io(name, &["write -q -P 5 0 4M".into()]);
        let bytes = std::fs::read(path).expect("the image");
        for preallocation in [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc] {
            for errno in [Errno::FBIG, Errno::IO, Errno::NOSPC, Errno::OPNOTSUPP] {
                let what = format!("{name}, {preallocation:?}, {errno}");
                let is_device = errno == Errno::OPNOTSUPP;
                let data = match is_device {
                    true => SimStorage::device(4 * MIB, 1),
                    false => SimStorage::new(4 * MIB, 1),
                };
                if !is_device {
                    data.on(When::kind(OpKind::SetLen), Fault::Fail(errno));
                    data.on(When::kind(OpKind::Preallocate), Fault::Fail(errno));
                    data.on(When::kind(OpKind::WriteZeroes), Fault::Fail(errno));
                }
                let file = SimStorage::from_image(&bytes, 1);
                let mut runtime = runtime();
                let ring = runtime.ring().clone();
                runtime.block_on(async {
                    let open = OpenOptions { writable: true, ..OpenOptions::default() };
                    let opened = Qcow2::open(&ring, file.storage(), &open).await;
                    let mut image = opened.expect("a good image");
                    image.set_data_file(data.storage()).expect("a data file is wanted");
                    let options = ResizeOptions { shrink: false, preallocation };
                    let result = image.resize(&ring, Bytes(16 * MIB), &options, &Nothing).await;
                    assert!(result.is_err(), "{what}");
                    assert_eq!(image.virtual_size(), Bytes(4 * MIB), "{what}");
                    let off = ResizeOptions { shrink: true, ..ResizeOptions::default() };
                    let smaller = image.resize(&ring, Bytes(4 * MIB - 512), &off, &Nothing).await;
                    assert!(smaller.is_ok(), "{what}: {smaller:?}");
                    // Where it has room there is nothing to say.
                    let back = image.resize(&ring, Bytes(4 * MIB), &off, &Nothing).await;
                    assert!(back.is_ok() || !is_device, "{what}: {back:?}");
                    assert_eq!(image.close(&ring).await, Ok(()), "{what}");
                });
            }
        }
    }
}
