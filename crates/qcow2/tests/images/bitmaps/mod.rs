//! Persistent bitmaps: recorded, changed and merged, by us and by QEMU in turn.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]
// A list of one range is meant where it stands.
#![allow(clippy::single_range_in_vec_init)]

mod added_in_use;
mod faults;
mod session;

use std::path::Path;

use ringdisk_qcow2::{Bytes, Error, ErrorKind, GuestOffset, Nothing, ResizeOptions};
use ringdisk_ring::{IoBuf, Runtime};
use session::{Session, Work, according_to_qemu, check, info, ranges};

use crate::common::{Images, KIB, MIB, runtime};

const GIB: u64 = 1 << 30;

#[test]
fn bitmaps_of_qemu_are_read() {
    let images = Images::new();
    let mut runtime = runtime();
    for cluster in [512, 4 * KIB, 64 * KIB] {
        images.create("image", &format!("cluster_size={cluster}"), 64 * MIB + 512);
        images.qemu_img(&["bitmap", "--add", "-g", "512", "image", "fine"]);
        images.qemu_img(&["bitmap", "--add", "-g", "64k", "image", "coarse"]);
        images.qemu_io(
            "image",
            &[
                "write -q 1k 512".into(),
                "write -q 8M 33M".into(),
                format!("write -q {} 512", 64 * MIB),
            ],
        );
        let path = images.path("image");
        let end = 64 * MIB..64 * MIB + 512;
        let fine = [1024..1536, 8 * MIB..41 * MIB, end.clone()];
        assert_eq!(ranges(&mut runtime, &path, "fine"), fine);
        let coarse = [0..65536, 8 * MIB..41 * MIB, end];
        assert_eq!(ranges(&mut runtime, &path, "coarse"), coarse);
    }
}

#[test]
fn writes_are_recorded_and_qemu_reads_them() {
    let images = Images::new();
    let mut runtime = runtime();
    for (cluster, granularity) in [(512, "512"), (4096, "512"), (65536, "512"), (65536, "64k")] {
        images.create("image", &format!("cluster_size={cluster}"), 64 * MIB + 512);
        images.qemu_img(&["bitmap", "--add", "-g", granularity, "image", "bitmap"]);
        images.qemu_io("image", &["write -q 5M 64k".into()]);
        let path = images.path("image");
        let mut session = Session::open(&mut runtime, &path);
        session.write(192 * KIB, 65536);
        session.write(64 * MIB, 512);
        session.close();
        check(&images, "image");
        let mut expected =
            vec![192 * KIB..256 * KIB, 5 * MIB..5 * MIB + 65536, 64 * MIB..64 * MIB + 512];
        assert_eq!(ranges(&mut runtime, &path, "bitmap"), expected);
        let theirs = according_to_qemu(&mut runtime, &images, "image", "bitmap", granularity);
        assert_eq!(theirs, expected);
        // And on with QEMU, and with us again: a run that fills whole clusters of bits.
        images.qemu_io("image", &["write -q 6M 64k".into()]);
        let mut session = Session::open(&mut runtime, &path);
        session.write(16 * MIB, 20 << 20);
        session.close();
        check(&images, "image");
        expected.insert(2, 6 * MIB..6 * MIB + 65536);
        expected.insert(3, 16 * MIB..36 * MIB);
        assert_eq!(ranges(&mut runtime, &path, "bitmap"), expected);
        let theirs = according_to_qemu(&mut runtime, &images, "image", "bitmap", granularity);
        assert_eq!(theirs, expected);
    }
}

#[test]
fn discards_and_zeroes_are_recorded() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 4 * MIB);
    images.qemu_io("image", &["write -q 0 4M".into()]);
    images.qemu_img(&["bitmap", "--add", "image", "bitmap"]);
    let session = Session::open(&mut runtime, &images.path("image"));
    let (image, ring) = (&session.image, &session.ring);
    session
        .runtime
        .block_on(async {
            image.write_zeroes(ring, GuestOffset(0), Bytes(65536), true, &Nothing).await?;
            image.discard(ring, GuestOffset(MIB), Bytes(65536), &Nothing).await
        })
        .expect("both work");
    session.close();
    let expected = [0..65536, MIB..MIB + 65536];
    assert_eq!(ranges(&mut runtime, &images.path("image"), "bitmap"), expected);
    check(&images, "image");
}

#[test]
fn an_open_without_a_write_changes_nothing() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 4 * MIB);
    images.qemu_img(&["bitmap", "--add", "image", "bitmap"]);
    let before = std::fs::read(images.path("image")).expect("the image");
    Session::open(&mut runtime, &images.path("image")).close();
    assert!(before == std::fs::read(images.path("image")).expect("the image"));
}

#[test]
fn a_crash_leaves_the_bitmap_in_use_and_nobody_trusts_it() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 4 * MIB);
    images.qemu_img(&["bitmap", "--add", "image", "lost"]);
    images.qemu_img(&["bitmap", "--add", "image", "kept"]);
    images.qemu_img(&["bitmap", "--disable", "image", "kept"]);
    let path = images.path("image");
    let mut session = Session::open(&mut runtime, &path);
    session.write(0, 4096);
    // No close: as if the process was killed.
    drop(session);
    assert!(info(&images, "image").contains("in-use"));
    let mut session = Session::open(&mut runtime, &path);
    let states = [("lost".to_owned(), true, true), ("kept".to_owned(), false, false)];
    assert_eq!(session.list(), states);
    for result in [
        session.clear("lost"),
        session.enable("lost", true),
        session.enable("lost", false),
        session.merge("lost", "kept"),
        session.merge("kept", "lost"),
    ] {
        let error = result.expect_err("inconsistent");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert!(error.reason().contains("inconsistent"));
    }
    session.close();
    // It stays in use, and is not recorded, while the other one stays valid.
    let mut session = Session::open(&mut runtime, &path);
    session.write(MIB, 4096);
    session.close();
    let mut session = Session::open(&mut runtime, &path);
    assert_eq!(session.list(), states);
    assert_eq!(session.ranges("kept").expect("valid"), []);
    session.remove("lost").expect("an inconsistent bitmap can be removed");
    session.close();
    images.qemu_img(&["check", "-q", "-r", "leaks", "image"]);
    check(&images, "image");
    assert!(!info(&images, "image").contains("lost"));
}

#[test]
fn disabled_bitmaps_do_not_record() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 4 * MIB);
    images.qemu_img(&["bitmap", "--add", "image", "bitmap"]);
    images.qemu_io("image", &["write -q 1M 64k".into()]);
    images.qemu_img(&["bitmap", "--disable", "image", "bitmap"]);
    let path = images.path("image");
    let mut session = Session::open(&mut runtime, &path);
    session.write(0, 4096);
    session.close();
    assert_eq!(ranges(&mut runtime, &path, "bitmap"), [MIB..MIB + 65536]);
    check(&images, "image");
}

#[test]
fn every_operation_leaves_what_qemu_leaves() {
    let images = Images::new();
    let mut runtime = runtime();
    for options in ["cluster_size=512", "cluster_size=4096", "", "refcount_bits=1"] {
        for name in ["ours", "theirs"] {
            images.create(name, options, 8 * MIB);
        }
        let path = images.path("ours");
        let mut same = |step: &str, ours: &Work| {
            let mut session = Session::open(&mut runtime, &path);
            ours(&mut session).unwrap_or_else(|error| panic!("{options} {step}: {error}"));
            session.close();
            let words: Vec<&str> = step.split(' ').collect();
            images.qemu_img(&[&["bitmap"], &words[..]].concat());
            assert_eq!(info(&images, "ours"), info(&images, "theirs"), "{options} {step}");
            check(&images, "ours");
        };
        same("--add theirs one", &|s| s.add("one", None));
        same("--add -g 512 theirs two", &|s| s.add("two", Some(512)));
        same("--add --disable -g 2G theirs three", &|s| {
            s.add("three", Some(2 * GIB))?;
            s.enable("three", false)
        });
        same("--enable theirs three", &|s| s.enable("three", true));
        same("--enable theirs three", &|s| s.enable("three", true));
        same("--disable theirs two", &|s| s.enable("two", false));
        same("--merge one theirs two", &|s| s.merge("one", "two"));
        same("--clear theirs two", &|s| s.clear("two"));
        same("--remove theirs one", &|s| s.remove("one"));
        same("--add theirs one", &|s| s.add("one", None));
        same("--remove theirs three", &|s| s.remove("three"));
        same("--remove theirs one", &|s| s.remove("one"));
        same("--remove theirs two", &|s| s.remove("two"));
    }
}

#[test]
fn all_bitmaps_are_removed_at_once() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 8 * MIB);
    for name in ["one", "two", "three"] {
        images.qemu_img(&["bitmap", "--add", "-g", "512", "image", name]);
        images.qemu_io("image", &["write -q 1M 64k".into()]);
    }
    let mut session = Session::open(&mut runtime, &images.path("image"));
    let (image, ring) = (&mut session.image, &session.ring);
    session.runtime.block_on(image.bitmap_remove_all(ring)).expect("removed");
    assert_eq!(session.list(), []);
    session.close();
    assert_eq!(info(&images, "image"), "");
    check(&images, "image");
}

#[test]
fn merges_of_any_granularity_are_those_of_qemu() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 32 * MIB + 512);
    for granularity in ["512", "4k", "64k", "2M"] {
        images.qemu_img(&["bitmap", "--add", "-g", granularity, "image", granularity]);
    }
    images.qemu_io("image", &["write -q 5632 512".into(), "write -q 3M 6M".into()]);
    images.qemu_img(&["bitmap", "--disable", "image", "512"]);
    images.qemu_img(&["bitmap", "--disable", "image", "64k"]);
    images.qemu_io("image", &["write -q 20M 1k".into(), format!("write -q {} 512", 32 * MIB)]);
    for from in ["512", "4k", "64k", "2M"] {
        for to in ["512", "4k", "64k", "2M"] {
            for copy in ["ours", "theirs"] {
                std::fs::copy(images.path("image"), images.path(copy)).expect("a copy");
            }
            images.qemu_img(&["bitmap", "--merge", from, "theirs", to]);
            let mut session = Session::open(&mut runtime, &images.path("ours"));
            session.merge(from, to).expect("a merge");
            session.close();
            check(&images, "ours");
            let ours = ranges(&mut runtime, &images.path("ours"), to);
            let theirs = ranges(&mut runtime, &images.path("theirs"), to);
            assert_eq!(ours, theirs, "{from} into {to}");
        }
    }
}

#[test]
fn a_bitmap_of_another_image_is_merged() {
    let images = Images::new();
    let mut runtime = runtime();
    for (name, size) in [("source", 8 * MIB), ("image", 8 * MIB), ("larger", 9 * MIB)] {
        images.create(name, "cluster_size=4096", size);
        images.qemu_img(&["bitmap", "--add", "-g", "4k", name, "bitmap"]);
    }
    images.qemu_io("source", &["write -q 1M 64k".into()]);
    let source = {
        let session =
            Session::new(&mut runtime, crate::common::storage(&images.path("source")), false);
        session.runtime.block_on(session.image.bitmap_contents(&session.ring, "bitmap"))
    }
    .expect("a good bitmap");
    assert_eq!((source.disk_bytes(), source.granularity_bytes()), (Bytes(8 * MIB), Bytes(4096)));
    let mut session = Session::open(&mut runtime, &images.path("image"));
    let (image, ring) = (&mut session.image, &session.ring);
    session.runtime.block_on(image.bitmap_merge(ring, "bitmap", &source)).expect("merged");
    session.close();
    let merged = ranges(&mut runtime, &images.path("image"), "bitmap");
    assert_eq!(merged, [MIB..MIB + 65536]);
    check(&images, "image");
    let mut session = Session::open(&mut runtime, &images.path("larger"));
    let (image, ring) = (&mut session.image, &session.ring);
    let merge = session.runtime.block_on(image.bitmap_merge(ring, "bitmap", &source));
    let error = merge.expect_err("another size");
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    session.close();
}

#[test]
fn what_qemu_refuses_is_refused() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 8 * MIB);
    let mut session = Session::open(&mut runtime, &images.path("image"));
    session.add("one", None).expect("a good name");
    for (name, granularity) in [
        ("one", None),
        ("", None),
        (&*"n".repeat(1024), None),
        ("two", Some(0)),
        ("two", Some(100)),
        ("two", Some(256)),
        ("two", Some(4 * GIB)),
    ] {
        let error = session.add(name, granularity).expect_err("not allowed");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{name} {granularity:?}");
    }
    for result in [
        session.remove("none"),
        session.clear("none"),
        session.enable("none", true),
        session.merge("none", "one"),
        session.merge("one", "none"),
    ] {
        let error = result.expect_err("no such bitmap");
        assert!(error.reason().contains("is not there"), "{error}");
    }
    session.add(&"n".repeat(1023), None).expect("the longest name");
    session.add("Ω ../\n\"json:\"", None).expect("any name");
    session.close();
    check(&images, "image");
    images.create("old", "compat=0.10", 8 * MIB);
    let error = Session::open(&mut runtime, &images.path("old")).add("one", None);
    assert!(error.expect_err("version 2").reason().contains("version 2"));
    images.create("empty", "", 0);
    let error = Session::open(&mut runtime, &images.path("empty")).add("one", None);
    assert_eq!(error.expect_err("no bytes").kind(), ErrorKind::InvalidRequest);
    images.create("large", "", 4096 * GIB);
    let error = Session::open(&mut runtime, &images.path("large")).add("one", Some(512));
    assert!(error.expect_err("4 TiB").reason().contains("granularity"));
}

#[test]
fn operations_save_what_was_recorded_before_and_end_the_use() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "", 8 * MIB);
    images.qemu_img(&["bitmap", "--add", "image", "bitmap"]);
    let path = images.path("image");
    let mut session = Session::open(&mut runtime, &path);
    session.write(MIB, 4096);
    session.add("other", None).expect("added");
    let buf = IoBuf::new(512, 512);
    let late = session.runtime.block_on(session.image.write(
        &session.ring,
        GuestOffset(0),
        &buf,
        &Nothing,
    ));
    assert!(late.is_err());
    session.close();
    assert_eq!(ranges(&mut runtime, &path, "bitmap"), [MIB..MIB + 65536]);
    assert_eq!(ranges(&mut runtime, &path, "other"), []);
    check(&images, "image");
}

/// Writes to an image that has bitmaps `small` and `lost`; looks at it while it is open and
/// afterwards.
fn only_one_is_lost(runtime: &mut Runtime, path: &Path) {
    let expected =
        |small: bool| vec![("lost".to_owned(), true, true), ("small".to_owned(), small, true)];
    let mut session = Session::open(runtime, path);
    session.write(0, 4096);
    let seen = Session::new(session.runtime, crate::common::storage(path), false);
    assert_eq!(seen.list(), expected(true), "{} while it is open", path.display());
    drop(seen);
    session.runtime.block_on(session.image.close(&session.ring)).expect("a clean close");
    let mut seen = Session::new(runtime, crate::common::storage(path), false);
    assert_eq!(seen.list(), expected(false), "{} afterwards", path.display());
    assert_eq!(seen.ranges("small").expect("it is valid"), [0..MIB * 2], "{}", path.display());
    seen.ranges("lost").expect_err("it is not");
}

#[test]
fn a_bitmap_that_cannot_record_is_lost_by_itself_and_the_others_go_on() {
    let images = Images::new();
    let mut runtime = runtime();
    // 2 TiB with a granularity of 512 bytes: 512 MiB of bits.
    images.create("large", "cluster_size=2M", 2048 * GIB);
    images.qemu_img(&["bitmap", "--add", "-g", "512", "large", "lost"]);
    // A table entry with reserved bits, and flags that nobody knows.
    for name in ["broken", "strange"] {
        images.create(name, "", 8 * MIB);
        images.qemu_img(&["bitmap", "--add", name, "lost"]);
    }
    for name in ["large", "broken", "strange"] {
        images.qemu_img(&["bitmap", "--add", "-g", "2M", name, "small"]);
        let path = images.path(name);
        let table = Session::open(&mut runtime, &path).image.info().bitmaps[0].table_offset;
        let mut bytes = std::fs::read(&path).expect("the image");
        if name == "broken" {
            bytes[usize::try_from(table.0).expect("small")] = 0xff;
        }
        if name == "strange" {
            // The entry begins with the offset of the table.
            let start = table.0.to_be_bytes();
            let entry = bytes.chunks(8).position(|word| word == start).expect("the directory") * 8;
            bytes[entry + 15] |= 0x10;
        }
        if name != "large" {
            std::fs::write(&path, bytes).expect("the image");
        }
        only_one_is_lost(&mut runtime, &path);
    }
    check(&images, "large");
}

#[test]
fn a_bitmap_that_could_not_record_is_refused_when_it_is_made_enabled_or_grown() {
    let images = Images::new();
    let mut runtime = runtime();
    images.create("image", "cluster_size=2M", 2048 * GIB);
    let path = images.path("image");
    let mut session = Session::open(&mut runtime, &path);
    let refused = |result: Result<(), Error>| {
        let error = result.expect_err("512 MiB");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{error}");
        assert!(error.reason().contains("at most 128 MiB"), "{error}");
    };
    session.add("small", Some(2 * MIB)).expect("128 KiB");
    refused(session.add("large", Some(512)));
    // 128 MiB by itself, and there is another one.
    refused(session.add("together", Some(2048)));
    let ring = session.ring.clone();
    let added = session.image.bitmap_add_disabled(&ring, "large", Some(Bytes(512)));
    session.runtime.block_on(added).expect("it does not record");
    refused(session.enable("large", true));
    session.remove("large").expect("it is there");
    session.add("half", Some(4096)).expect("64 MiB");
    session.close();
    let mut session = Session::open(&mut runtime, &path);
    let options = ResizeOptions::default();
    let grown = session.image.resize(&ring, Bytes(4096 * GIB), &options, &Nothing);
    let error = session.runtime.block_on(grown).expect_err("more than 128 MiB");
    assert!(error.reason().contains("128 MiB"), "{error}");
    assert_eq!(session.list().len(), 2, "{error}");
    session.close();
    check(&images, "image");
}
