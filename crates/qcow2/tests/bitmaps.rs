//! Persistent bitmaps: recorded, changed and merged, by us and by QEMU in turn.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]
// A list of one range is meant where it stands.
#![allow(clippy::single_range_in_vec_init)]

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use common::{Images, KIB, MIB, runtime};
use ringdisk_qcow2::{CreateOptions, Error, ErrorKind, Nothing, OpenOptions, Qcow2, ResizeOptions};
use ringdisk_ring::{IoBuf, Ring, Runtime};
use ringdisk_storage::{Lock, Storage};
use ringdisk_testkit::sim::{Fault, SimStorage, When};

const GIB: u64 = 1 << 30;

/// One open image and the ring that works on it.
struct Session<'a> {
    runtime: &'a mut Runtime,
    ring: Ring,
    image: Qcow2,
}

impl<'a> Session<'a> {
    fn new(runtime: &'a mut Runtime, storage: Arc<Storage>, writable: bool) -> Session<'a> {
        let options = OpenOptions { writable, ..Default::default() };
        let ring = runtime.ring().clone();
        let image = runtime
            .block_on(Qcow2::open(&ring, storage, &options))
            .unwrap_or_else(|error| panic!("{error}"));
        Session { runtime, ring, image }
    }

    fn open(runtime: &'a mut Runtime, path: &Path) -> Session<'a> {
        let options = ringdisk_storage::OpenOptions { lock: Lock::None, ..Default::default() };
        let storage = Arc::new(Storage::open(path, &options).expect("the image file"));
        Session::new(runtime, storage, true)
    }

    fn write(&mut self, offset: u64, len: usize) {
        let buf = IoBuf::new(len, 4096);
        buf.fill(0x5a);
        let done = self.runtime.block_on(self.image.write(&self.ring, offset, &buf, &Nothing));
        assert_eq!(done, Ok(len));
    }

    fn close(self) {
        self.runtime.block_on(self.image.close(&self.ring)).expect("a clean close");
    }

    fn add(&mut self, name: &str, granularity: Option<u64>) -> Result<(), Error> {
        self.runtime.block_on(self.image.bitmap_add(&self.ring, name, granularity))
    }

    fn remove(&mut self, name: &str) -> Result<(), Error> {
        self.runtime.block_on(self.image.bitmap_remove(&self.ring, name))
    }

    fn clear(&mut self, name: &str) -> Result<(), Error> {
        self.runtime.block_on(self.image.bitmap_clear(&self.ring, name))
    }

    fn enable(&mut self, name: &str, on: bool) -> Result<(), Error> {
        let (image, ring) = (&mut self.image, &self.ring);
        match on {
            true => self.runtime.block_on(image.bitmap_enable(ring, name)),
            false => self.runtime.block_on(image.bitmap_disable(ring, name)),
        }
    }

    fn merge(&mut self, from: &str, to: &str) -> Result<(), Error> {
        let (image, ring) = (&mut self.image, &self.ring);
        self.runtime.block_on(async {
            let source = image.bitmap_contents(ring, from).await?;
            image.bitmap_merge(ring, to, &source).await
        })
    }

    fn ranges(&mut self, name: &str) -> Result<Vec<Range<u64>>, Error> {
        let contents = self.runtime.block_on(self.image.bitmap_contents(&self.ring, name))?;
        Ok(contents.ranges().collect())
    }

    /// Name, in use, records.
    fn list(&self) -> Vec<(String, bool, bool)> {
        let bitmaps = &self.image.info().bitmaps;
        bitmaps.iter().map(|one| (one.name.clone(), one.in_use, one.auto)).collect()
    }
}

fn ranges(runtime: &mut Runtime, path: &Path, name: &str) -> Vec<Range<u64>> {
    let mut session = Session::new(runtime, common::storage(path), false);
    session.ranges(name).unwrap_or_else(|error| panic!("{error}"))
}

fn check(images: &Images, name: &str) {
    images.qemu_img(&["check", "-q", name]);
}

/// What `qemu-img info` says about bitmaps.
fn info(images: &Images, name: &str) -> String {
    let text = images.qemu_img(&["info", name]);
    let from = text.find("bitmaps:").unwrap_or(text.len());
    let to = text[from..].find("refcount bits").unwrap_or(text.len() - from);
    text[from..from + to].to_owned()
}

/// What QEMU reads in a bitmap: it merges it into one of its own, which we read.
fn according_to_qemu(
    runtime: &mut Runtime,
    images: &Images,
    name: &str,
    bitmap: &str,
    granularity: &str,
) -> Vec<Range<u64>> {
    std::fs::copy(images.path(name), images.path("copy")).expect("a copy");
    images.qemu_img(&["bitmap", "--add", "--disable", "-g", granularity, "copy", "theirs"]);
    images.qemu_img(&["bitmap", "--merge", bitmap, "copy", "theirs"]);
    ranges(runtime, &images.path("copy"), "theirs")
}

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
            image.write_zeroes(ring, 0, 65536, true, &Nothing).await?;
            image.discard(ring, MIB, 65536, &Nothing).await
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
        let session = Session::new(&mut runtime, common::storage(&images.path("source")), false);
        session.runtime.block_on(session.image.bitmap_contents(&session.ring, "bitmap"))
    }
    .expect("a good bitmap");
    assert_eq!((source.disk_bytes(), source.granularity_bytes()), (8 * MIB, 4096));
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
    let late = session.runtime.block_on(session.image.write(&session.ring, 0, &buf, &Nothing));
    assert!(late.is_err());
    session.close();
    assert_eq!(ranges(&mut runtime, &path, "bitmap"), [MIB..MIB + 65536]);
    assert_eq!(ranges(&mut runtime, &path, "other"), []);
    check(&images, "image");
}

/// Writes to an image that has bitmaps `small` and `lost`; looks at it while it is open and afterwards.
fn only_one_is_lost(runtime: &mut Runtime, path: &Path) {
    let expected =
        |small: bool| vec![("lost".to_owned(), true, true), ("small".to_owned(), small, true)];
    let mut session = Session::open(runtime, path);
    session.write(0, 4096);
    let seen = Session::new(session.runtime, common::storage(path), false);
    assert_eq!(seen.list(), expected(true), "{} while it is open", path.display());
    drop(seen);
    session.runtime.block_on(session.image.close(&session.ring)).expect("a clean close");
    let mut seen = Session::new(runtime, common::storage(path), false);
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
            bytes[usize::try_from(table).expect("small")] = 0xff;
        }
        if name == "strange" {
            // The entry begins with the offset of the table.
            let start = table.to_be_bytes();
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
    let added = session.image.bitmap_add_disabled(&ring, "large", Some(512));
    session.runtime.block_on(added).expect("it does not record");
    refused(session.enable("large", true));
    session.remove("large").expect("it is there");
    session.add("half", Some(4096)).expect("64 MiB");
    session.close();
    let mut session = Session::open(&mut runtime, &path);
    let options = ResizeOptions::default();
    let grown = session.image.resize(&ring, 4096 * GIB, &options, &Nothing);
    let error = session.runtime.block_on(grown).expect_err("more than 128 MiB");
    assert!(error.reason().contains("128 MiB"), "{error}");
    assert_eq!(session.list().len(), 2, "{error}");
    session.close();
    check(&images, "image");
}

/// An image in memory with two bitmaps: `one` records, `two` does not.
fn simulated(runtime: &mut Runtime, cluster_size: u64) -> Vec<u8> {
    let ring = runtime.ring().clone();
    let sim = SimStorage::new(0, 1);
    let options = CreateOptions { size: 4 * MIB, cluster_size, ..Default::default() };
    runtime
        .block_on(ringdisk_qcow2::create(&ring, &sim.storage(), None, &options))
        .expect("an image");
    let mut session = Session::new(runtime, sim.storage(), true);
    session.add("one", Some(512)).expect("added");
    session.add("two", Some(512)).expect("added");
    session.enable("two", false).expect("disabled");
    session.close();
    sim.durable_image()
}

/// What an image that somebody else left says about its bitmaps: name, in use, ranges.
type State = Vec<(String, bool, Vec<Range<u64>>)>;

fn state_of(runtime: &mut Runtime, image: &[u8]) -> State {
    let mut session = Session::new(runtime, SimStorage::from_image(image, 1).storage(), false);
    let list = session.list();
    let one = |(name, in_use, _): (String, bool, bool)| {
        let ranges = if in_use { Vec::new() } else { session.ranges(&name).expect("valid") };
        (name, in_use, ranges)
    };
    list.into_iter().map(one).collect()
}

/// Something to do with an open image.
type Work = dyn Fn(&mut Session<'_>) -> Result<(), Error>;

/// Runs `work` on the image with a fault at every single storage operation, and looks at what a
/// power cut leaves then.
fn every_crash(runtime: &mut Runtime, image: &[u8], work: &Work, allowed: &dyn Fn(&State) -> bool) {
    let images = Images::new();
    let mut stop = 0;
    loop {
        let sim = SimStorage::from_image(image, 1);
        let mut session = Session::new(runtime, sim.storage(), true);
        sim.on(When::any().skip(stop), Fault::Fail(ringdisk_ring::Errno::IO));
        let done = work(&mut session).is_ok();
        drop(session);
        for seed in 0..6 {
            let left = sim.crash_image(seed);
            let state = state_of(runtime, &left);
            assert!(allowed(&state), "stopped after {stop}, seed {seed}: {state:?}");
            if seed == stop % 6 {
                // Leaks are allowed (exit code 3), and are gone after a repair.
                std::fs::write(images.path("left"), &left).expect("a copy");
                images.qemu_img(&["check", "-q", "-r", "leaks", "left"]);
            }
        }
        if done {
            break;
        }
        stop += 1;
    }
    assert!(stop > 5, "{stop}");
}

#[test]
fn a_crash_in_an_operation_leaves_the_old_or_the_new_bitmaps() {
    let mut runtime = runtime();
    let steps: [&Work; 6] = [
        &|session| session.add("three", None),
        &|session| session.remove("one"),
        &|session| session.clear("one"),
        &|session| session.enable("two", true),
        &|session| session.merge("one", "two"),
        &|session| {
            let (image, ring) = (&mut session.image, &session.ring);
            session.runtime.block_on(image.bitmap_remove_all(ring))
        },
    ];
    for cluster_size in [512, 4096, 65536] {
        let mut image = simulated(&mut runtime, cluster_size);
        let sim = SimStorage::from_image(&image, 1);
        let mut session = Session::new(&mut runtime, sim.storage(), true);
        session.write(MIB, 70_000);
        session.close();
        image = sim.durable_image();
        let before = state_of(&mut runtime, &image);
        assert_eq!(before[0].2.len(), 1);
        for step in steps {
            let sim = SimStorage::from_image(&image, 1);
            let mut session = Session::new(&mut runtime, sim.storage(), true);
            step(&mut session).expect("it works");
            drop(session);
            let after = state_of(&mut runtime, &sim.durable_image());
            every_crash(&mut runtime, &image, step, &|state| *state == before || *state == after);
        }
    }
}

#[test]
fn a_crash_while_recording_never_leaves_a_stale_bitmap() {
    let mut runtime = runtime();
    for cluster_size in [512, 4096, 65536] {
        let image = simulated(&mut runtime, cluster_size);
        let work = |session: &mut Session<'_>| {
            let buf = IoBuf::new(4096, 4096);
            buf.fill(1);
            let (image, ring) = (&session.image, &session.ring);
            let all = session.runtime.block_on(async {
                image.write(ring, 64 * KIB, &buf, &Nothing).await?;
                image.flush(ring).await?;
                image.write(ring, MIB, &buf, &Nothing).await?;
                image.close(ring).await
            });
            match all {
                Ok(()) => Ok(()),
                Err(_) => session.remove("no such bitmap"),
            }
        };
        let two = ("two".to_owned(), false, Vec::new());
        let first = 64 * KIB..64 * KIB + 4096;
        let both = vec![first, MIB..MIB + 4096];
        every_crash(&mut runtime, &image, &work, &|state| {
            let one = &state[0];
            // Nothing was written yet, or it is in use, or it is complete.
            state[1] == two && (one.1 || one.2.is_empty() || one.2 == both)
        });
    }
}

#[test]
fn a_stale_bitmap_is_never_called_empty_after_a_flush() {
    let mut runtime = runtime();
    let image = simulated(&mut runtime, 65536);
    let sim = SimStorage::from_image(&image, 1);
    let mut session = Session::new(&mut runtime, sim.storage(), true);
    session.write(0, 4096);
    session.runtime.block_on(session.image.flush(&session.ring)).expect("a flush");
    drop(session);
    for seed in 0..20 {
        let state = state_of(&mut runtime, &sim.crash_image(seed));
        assert!(state[0].1 && !state[1].1, "{state:?}");
    }
}

#[test]
fn without_room_the_bitmap_is_lost_and_the_data_is_not() {
    let mut runtime = runtime();
    let image = simulated(&mut runtime, 65536);
    let sim = SimStorage::from_image(&image, 1);
    let mut session = Session::new(&mut runtime, sim.storage(), true);
    session.write(0, 4096);
    session.runtime.block_on(session.image.flush(&session.ring)).expect("a flush");
    let end = sim.image().len() as u64;
    sim.on(When::any().at(end..u64::MAX), Fault::Fail(ringdisk_ring::Errno::NOSPC));
    session.close();
    let state = state_of(&mut runtime, &sim.durable_image());
    assert!(state[0].1 && !state[1].1, "{state:?}");
}

#[test]
fn bitmaps_that_are_given_up_are_believed_by_nobody() {
    let images = Images::new();
    images.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "64M"]);
    images.qemu_img(&["bitmap", "--add", "a.qcow2", "records"]);
    images.qemu_img(&["bitmap", "--add", "--disable", "a.qcow2", "still"]);
    let path = images.path("a.qcow2");
    let mut runtime = runtime();
    let mut session = Session::open(&mut runtime, &path);
    session.write(0, 4096);
    session.close();
    let mut session = Session::open(&mut runtime, &path);
    let done = session.runtime.block_on(session.image.bitmaps_give_up(&session.ring));
    done.expect("they are given up");
    let expected = [("records".to_owned(), true, true), ("still".to_owned(), false, false)];
    assert_eq!(session.list(), expected);
    session.close();
    let session = Session::open(&mut runtime, &path);
    assert_eq!(session.list(), expected);
    session.close();
    assert!(info(&images, "a.qcow2").contains("in-use"), "{}", info(&images, "a.qcow2"));
    check(&images, "a.qcow2");
}

#[test]
fn bitmaps_that_cannot_be_given_up_are_as_they_were() {
    let images = Images::new();
    images.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "64M"]);
    for name in ["one", "two"] {
        images.qemu_img(&["bitmap", "--add", "a.qcow2", name]);
    }
    let content = std::fs::read(images.path("a.qcow2")).expect("read");
    let mut runtime = runtime();
    let mut failures = 0;
    for number in 0.. {
        let sim = SimStorage::from_image(&content, 1);
        let mut session = Session::new(&mut runtime, sim.storage(), true);
        let begin = sim.log().len() as u64;
        sim.on(When::number(begin + number), Fault::Fail(ringdisk_storage::Errno::IO));
        let done = session.runtime.block_on(session.image.bitmaps_give_up(&session.ring));
        failures += u32::from(done.is_err());
        drop(session);
        sim.clear_rules();
        let session = Session::new(&mut runtime, sim.storage(), true);
        let in_use: Vec<bool> = session.list().into_iter().map(|(_, in_use, _)| in_use).collect();
        assert_eq!(in_use, [done.is_ok(); 2]);
        if done.is_ok() {
            break;
        }
    }
    // Two flags and a flush.
    assert_eq!(failures, 3);
}
