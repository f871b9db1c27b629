//! Internal snapshots: created, applied and deleted by us and by QEMU in turn.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use ringdisk_qcow2::{Bytes, ErrorKind, Preallocation};
use ringdisk_testkit::sim::Prng;

use crate::common::{KIB, MIB};
use crate::ops::{NAME, Saved, Subject};

/// Options of images, one of everything that matters to snapshots.
const SHAPES: [&str; 9] = [
    "",
    "compat=0.10",
    "cluster_size=512",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4096,refcount_bits=8",
    "cluster_size=4096,refcount_bits=4",
    "cluster_size=16384,extended_l2=on",
    "cluster_size=2097152",
    "lazy_refcounts=on",
];

const SIZE: u64 = 5 * MIB + 3 * 512;

#[test]
fn a_snapshot_keeps_what_the_disk_was() {
    for options in SHAPES {
        let mut subject = Subject::new(options, SIZE);
        subject.check("nothing");
        subject.create("empty").expect("a snapshot");
        subject.check("a snapshot of the empty disk");
        subject.write(1, 0, 300 * KIB);
        subject.compress(9, 12);
        subject.create("one").expect("a snapshot");
        subject.check("create");
        subject.write(2, 100 * KIB, 700 * KIB);
        subject.zero(64 * KIB, 100 * KIB, true);
        subject.check("writes after create");
        subject.create("two").expect("a snapshot");
        subject.create("three").expect("a snapshot");
        subject.check("two more");
        subject.apply("one").expect("there is one");
        subject.check("apply");
        subject.write(3, 200 * KIB, 513);
        subject.check("a write after apply");
        subject.delete("one").expect("there is one");
        subject.check("delete");
        subject.apply("2").is_err().then_some(()).expect("id 2 was one");
        subject.apply("3").expect("an id");
        subject.delete("empty").expect("there is one");
        subject.check("apply by id, delete");
        subject.delete("three").expect("there is one");
        subject.delete("two").expect("there is one");
        subject.check("all deleted");
        subject.write(4, 0, 2 * MIB);
        subject.check("a write after all");
    }
}

#[test]
fn qemu_goes_on_with_our_snapshots_and_we_with_its() {
    for options in SHAPES {
        let mut subject = Subject::new(options, SIZE);
        subject.write(1, 0, MIB);
        subject.create("ours").expect("a snapshot");
        subject.write(2, 512 * KIB, MIB);
        subject.images.qemu_img(&["snapshot", "-c", "theirs", NAME]);
        let content = subject.disk.clone();
        subject.saved.push(Saved { id: "2".into(), name: "theirs".into(), content });
        subject.check("one of each");
        subject.write(3, 0, 100 * KIB);
        subject.images.qemu_img(&["snapshot", "-a", "ours", NAME]);
        subject.disk = subject.saved[0].content.clone();
        subject.check("theirs applied ours");
        subject.write(4, 0, 10);
        subject.apply("theirs").expect("a snapshot");
        subject.check("we applied theirs");
        subject.images.qemu_img(&["snapshot", "-d", "ours", NAME]);
        subject.saved.remove(0);
        subject.check("they deleted ours");
        subject.write(5, MIB, 10 * KIB);
        subject.check("a write");
        subject.delete("theirs").expect("a snapshot");
        subject.check("we deleted theirs");
        subject.create("again").expect("a snapshot");
        assert_eq!(subject.saved[0].id, "1");
        subject.check("the first number again");
    }
}

#[test]
fn the_disk_gets_the_size_that_it_had() {
    let mut subject = Subject::new("", SIZE);
    subject.write(1, 4 * MIB, MIB);
    subject.create("small").expect("a snapshot");
    subject.resize(40 * MIB, Preallocation::Off).expect("a larger disk");
    subject.write(2, 39 * MIB, MIB);
    subject.create("large").expect("a snapshot");
    subject.check("two sizes");
    subject.apply("small").expect("a snapshot");
    assert_eq!(subject.disk.len() as u64, SIZE);
    subject.check("small again");
    subject.apply("large").expect("a snapshot");
    assert_eq!(subject.disk.len() as u64, 40 * MIB);
    subject.check("large again");
}

#[test]
fn ids_go_before_names_when_applied_and_behind_them_when_deleted() {
    let mut subject = Subject::new("", SIZE);
    for (byte, name) in [(1, "same"), (2, "1"), (3, "same")] {
        subject.write(byte, 0, 512);
        subject.create(name).expect("a snapshot");
    }
    subject.apply("1").expect("the first");
    assert_eq!(subject.disk[0], 1);
    subject.delete("1").expect("the second");
    assert_eq!(subject.saved.len(), 2);
    assert!(subject.saved.iter().all(|saved| saved.name == "same"));
    subject.check("deleted by name");
    subject.delete("same").expect("the first of that name");
    subject.delete("3").expect("by id");
    subject.check("deleted by id");
    assert!(subject.saved.is_empty());
}

#[test]
fn what_cannot_have_snapshots_is_refused_and_stays_as_it_is() {
    let mut external = Subject::new("data_file=image.data", SIZE);
    let error = external.create("one").expect_err("a data file");
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    let mut narrow = Subject::new("refcount_bits=1", SIZE);
    narrow.write(1, 0, MIB);
    let error = narrow.create("one").expect_err("counts of one bit");
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    narrow.check("a refused snapshot");

    let mut plain = Subject::new("", SIZE);
    for name in ["", "a\0b", &"x".repeat(256)] {
        assert_eq!(plain.create(name).expect_err(name).kind(), ErrorKind::InvalidRequest);
    }
    for wanted in ["", "1", "none"] {
        assert_eq!(plain.apply(wanted).expect_err(wanted).kind(), ErrorKind::InvalidRequest);
        assert_eq!(plain.delete(wanted).expect_err(wanted).kind(), ErrorKind::InvalidRequest);
    }
    plain.check("refused names");
}

#[test]
fn bitmaps_stand_in_the_way_of_apply_only() {
    let mut subject = Subject::new("", SIZE);
    subject.images.qemu_img(&["bitmap", "--add", NAME, "bits"]);
    subject.write(1, 0, MIB);
    subject.create("one").expect("a snapshot");
    subject.check("create beside a bitmap");
    assert_eq!(subject.apply("one").expect_err("a bitmap").kind(), ErrorKind::InvalidRequest);
    subject.delete("one").expect("a snapshot");
    subject.check("delete beside a bitmap");
    let info = subject.images.qemu_img(&["info", NAME]);
    assert!(info.contains("bits") && !info.contains("in-use"), "{info}");
}

/// Everything in random order. `RINGDISK_OPS_SEEDS`: how many seeds for each shape.
#[test]
fn any_order_of_changes_agrees_with_the_model() {
    let seeds = std::env::var("RINGDISK_OPS_SEEDS").map_or(1, |n| n.parse().expect("a number"));
    for options in SHAPES {
        for seed in 0..seeds {
            println!("options {options:?}, seed {seed}");
            random(options, seed);
        }
    }
}

fn random(options: &str, seed: u64) {
    let mut prng = Prng::new(seed + 1);
    let mut subject = Subject::new(options, SIZE);
    for step in 0..20u8 {
        let what = format!("step {step} of seed {seed}");
        let size = subject.disk.len() as u64;
        let offset = prng.below(size.max(2) - 1);
        let len = (1 + prng.below(600 * KIB)).min(size - offset);
        let which = prng.below(1 + subject.saved.len() as u64) as usize;
        let saved = subject.saved.get(which).map(|saved| saved.id.clone());
        match prng.below(12) {
            0..4 => subject.write(step + 1, offset, len),
            4 => subject.zero(offset, len, prng.below(2) == 0),
            5 => subject.discard(offset, len),
            6 => subject.compress(step + 1, prng.below(size >> 9) / 128),
            7 | 8 => subject.create(&format!("name {}", step % 7)).unwrap_or_else(|error| {
                assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{error}");
            }),
            9 if saved.is_some() => {
                let id = saved.expect("some");
                subject.apply(&id).expect("there is one");
            }
            10 if saved.is_some() => {
                let name = subject.saved[which].name.clone();
                subject.delete(&name).expect("there is one");
            }
            _ if options != "compat=0.10" => {
                let modes = [
                    Preallocation::Off,
                    Preallocation::Metadata,
                    Preallocation::Falloc,
                    Preallocation::Full,
                ];
                let wanted = (1 + prng.below(20_000)) * 512;
                let mode = modes[prng.below(4) as usize];
                let mode = if wanted > size { mode } else { Preallocation::Off };
                subject.resize(wanted, mode).expect("another size");
            }
            _ => {}
        }
        subject.check(&what);
    }
}

/// The first range that a snapshot leaves to the backing file, with a chain of `below` bytes.
fn need(subject: &mut Subject, below: u64) -> Option<(String, std::ops::Range<u64>)> {
    let need = subject
        .with(async |image, ring| image.snapshots_need_backing(ring, Bytes(below)).await)
        .expect("sound tables");
    need.map(|need| (need.name, need.range.start.0..need.range.end.0))
}

#[test]
fn what_a_snapshot_leaves_to_the_backing_file_is_found() {
    for options in SHAPES {
        let mut subject = Subject::new(options, SIZE);
        subject.create("nothing").expect("a snapshot");
        let (name, range) = need(&mut subject, u64::MAX).expect("all of it");
        assert_eq!((name.as_str(), range.start), ("nothing", 0), "{options}");
        // What lies past the end of the chain is zeroes.
        assert_eq!(need(&mut subject, 0), None, "{options}");
        subject.delete("nothing").expect("there is one");
        subject.write(1, 0, SIZE);
        subject.create("full").expect("a snapshot");
        assert_eq!(need(&mut subject, u64::MAX), None, "{options}");
        // The disk itself does not count, and what was overwritten does not either.
        subject.discard(0, 4 * MIB);
        subject.write(2, MIB, 64 * KIB);
        assert_eq!(need(&mut subject, u64::MAX), None, "{options}");
        subject.make_empty();
        subject.write(3, 0, 4 * MIB);
        subject.create("part").expect("a snapshot");
        let (name, range) = need(&mut subject, u64::MAX).expect("the end");
        assert_eq!((name.as_str(), range.start), ("part", 4 * MIB), "{options}");
        assert_eq!(need(&mut subject, 4 * MIB), None, "{options}");
        subject.check(options);
    }
}

#[test]
fn the_part_of_a_cluster_that_a_snapshot_leaves_to_the_backing_file_is_found() {
    let mut subject = Subject::new("cluster_size=16384,extended_l2=on", 16 * KIB);
    subject.write(1, 0, 4 * KIB);
    subject.zero(4 * KIB, 4 * KIB, true);
    subject.create("part").expect("a snapshot");
    let part = Some(("part".to_owned(), 8 * KIB..16 * KIB));
    assert_eq!(need(&mut subject, u64::MAX), part);
    assert_eq!(need(&mut subject, 8 * KIB), None);
}

#[test]
fn a_disk_that_is_uncovered_shows_more_of_its_backing_file() {
    for options in ["", "compat=0.10", "cluster_size=512", "cluster_size=16384,extended_l2=on"] {
        let mut subject = Subject::new(options, MIB);
        std::fs::write(subject.images.path("base"), vec![9; SIZE as usize]).expect("a file");
        subject
            .with(async |image, ring| image.set_backing(ring, Some(b"base"), Some("raw")).await)
            .expect("a name");
        subject.disk.fill(9);
        subject.write(1, 0, 64 * KIB);
        subject
            .with(async |image, ring| {
                image.uncover(ring, Bytes(SIZE)).await?;
                // Never smaller.
                image.uncover(ring, Bytes(MIB)).await
            })
            .expect("a larger disk");
        subject.disk.resize(SIZE as usize, 9);
        subject.check(options);
    }
}
