//! One file seen in several ways at once: mappings, buffered and direct descriptors agree, also
//! after a resize, with the kernel's page cache (`--kernel-cache`) and without.

use std::os::unix::fs::FileExt;

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::process::ok_words;

use crate::common::mapping::Mapping;
use crate::common::{Aligned, BLOCK, MIB, Served, open, open_direct, read_direct, serve_raw};

const LEN: u64 = 4 * MIB;
const WHOLE: usize = 4 << 20;
/// One mebibyte, as an index.
const STEP: usize = 1 << 20;
const WAYS: [&[&str]; 4] =
    [&[], &["--kernel-cache"], &["--direct"], &["--direct", "--kernel-cache"]];

fn each(check: impl Fn(&Served)) {
    each_with(&[], check);
}

fn each_with(options: &[&str], check: impl Fn(&Served)) {
    if !needs_root() {
        return;
    }
    for way in WAYS {
        eprintln!("served with {way:?} {options:?}");
        check(&serve_raw(LEN, &[way, options].concat()));
    }
}

#[test]
fn a_direct_write_is_seen_by_a_buffered_reader_that_has_read_before() {
    each(|disk| {
        let reader = open(disk.mounted.path());
        let mut bytes = vec![0; BLOCK];
        reader.read_exact_at(&mut bytes, 8192).expect("read");
        let new = pattern(5, 0, BLOCK);
        let direct = open_direct(disk.mounted.path());
        direct.write_all_at(Aligned::of(&new).bytes(), 8192).expect("direct write");
        reader.read_exact_at(&mut bytes, 8192).expect("read");
        assert!(bytes == new);
    });
}

#[test]
fn a_direct_write_is_seen_through_a_mapping() {
    each(|disk| {
        let map = Mapping::new(&open(disk.mounted.path()), WHOLE);
        assert!(map.read(8192, BLOCK) == pattern(1, 8192, BLOCK));
        let new = pattern(6, 0, BLOCK);
        let direct = open_direct(disk.mounted.path());
        direct.write_all_at(Aligned::of(&new).bytes(), 8192).expect("direct write");
        assert!(map.read(8192, BLOCK) == new);
    });
}

#[test]
fn a_buffered_write_is_seen_by_direct_readers_and_mappings() {
    each(|disk| {
        let map = Mapping::new(&open(disk.mounted.path()), WHOLE);
        assert!(map.read(100, 10) == pattern(1, 100, 10));
        open(disk.mounted.path()).write_all_at(b"buffered", 100).expect("write");
        assert_eq!(map.read(100, 8), b"buffered");
        assert_eq!(&read_direct(disk.mounted.path(), 0, BLOCK)[100..108], b"buffered");
    });
}

#[test]
fn a_synced_mapping_is_in_the_image_and_seen_by_all() {
    each(|disk| {
        let map = Mapping::new(&open(disk.mounted.path()), WHOLE);
        map.write(STEP + 5, b"mapped");
        map.sync();
        assert_eq!(piece(disk.mounted.path(), MIB + 5, 6), b"mapped");
        assert_eq!(&read_direct(disk.mounted.path(), MIB, BLOCK)[5..11], b"mapped");
        assert_eq!(piece(&disk.image, MIB + 5, 6), b"mapped");
    });
}

#[test]
fn an_unsynced_mapping_is_seen_by_buffered_and_direct_reads() {
    each(|disk| {
        let map = Mapping::new(&open(disk.mounted.path()), WHOLE);
        map.write(STEP + 5, b"mapped");
        assert_eq!(piece(disk.mounted.path(), MIB + 5, 6), b"mapped");
        assert_eq!(&read_direct(disk.mounted.path(), MIB, BLOCK)[5..11], b"mapped");
    });
}

#[test]
fn a_shrunk_and_regrown_disk_shows_zeroes_everywhere() {
    each_with(&["--resizable"], |disk| {
        let reader = open(disk.mounted.path());
        let mut bytes = vec![0; BLOCK];
        reader.read_exact_at(&mut bytes, 3 * MIB).expect("read");
        let other = open(disk.mounted.path());
        other.set_len(2 * MIB).expect("shrink");
        assert_eq!(reader.metadata().expect("stat").len(), 2 * MIB);
        assert_eq!(reader.read_at(&mut bytes, 3 * MIB).expect("read"), 0);
        other.set_len(LEN).expect("grow");
        reader.read_exact_at(&mut bytes, 3 * MIB).expect("read");
        assert!(bytes == [0; BLOCK]);
        assert!(read_direct(disk.mounted.path(), 3 * MIB, BLOCK) == [0; BLOCK]);
        assert!(Mapping::new(&reader, WHOLE).read(3 << 20, BLOCK) == [0; BLOCK]);
    });
}

#[test]
fn a_grown_disk_is_readable_at_once_in_every_way() {
    each_with(&["--growable"], |disk| {
        let (reader, other) = (open(disk.mounted.path()), open(disk.mounted.path()));
        let mut bytes = vec![1; BLOCK];
        assert_eq!(reader.read_at(&mut bytes, LEN).expect("read"), 0);
        other.set_len(LEN + MIB).expect("grow");
        other.write_all_at(b"new", LEN).expect("write");
        assert_eq!(reader.read_at(&mut bytes, LEN).expect("read"), BLOCK);
        assert_eq!(&bytes[..4], b"new\0");
        assert_eq!(&read_direct(disk.mounted.path(), LEN, BLOCK)[..4], b"new\0");
    });
}

#[test]
fn a_punched_hole_leaves_no_old_page_behind() {
    each(|disk| {
        let map = Mapping::new(&open(disk.mounted.path()), WHOLE);
        assert!(map.read(STEP, BLOCK) == pattern(1, MIB, BLOCK));
        let (offset, len) = (MIB.to_string(), "65536");
        ok_words(&["fallocate", "-p", "-o", &offset, "-l", len, disk.mounted.text()]);
        assert!(map.read(STEP, BLOCK) == [0; BLOCK]);
        assert!(piece(disk.mounted.path(), MIB, BLOCK) == [0; BLOCK]);
    });
}

#[test]
fn four_writers_of_one_mapping_do_not_disturb_one_another() {
    each(|disk| {
        let map = Mapping::new(&open(disk.mounted.path()), WHOLE);
        let part = WHOLE / 4;
        std::thread::scope(|scope| {
            for writer in 0..4_usize {
                let map = &map;
                scope.spawn(move || {
                    for step in (0..part).step_by(3001).filter(|s| s + 3001 <= part) {
                        let bytes = pattern(writer as u64 + 10, step as u64, 3001);
                        map.write(writer * part + step, &bytes);
                    }
                });
            }
        });
        map.sync();
        let whole = std::fs::read(&disk.image).expect("read");
        for writer in 0..4_usize {
            let len = part / 3001 * 3001;
            let got = &whole[writer * part..writer * part + len];
            assert!(got == pattern(writer as u64 + 10, 0, len), "writer {writer}");
        }
    });
}

#[test]
fn parallel_direct_writers_inside_one_block_row_lose_nothing() {
    each(|disk| {
        std::thread::scope(|scope| {
            for writer in 0..8_u64 {
                let path = disk.mounted.path();
                scope.spawn(move || {
                    let file = open_direct(path);
                    for at in (0..64).filter(|at| at % 8 == writer) {
                        let bytes = Aligned::of(&pattern(at, 0, BLOCK));
                        file.write_all_at(bytes.bytes(), at * BLOCK as u64).expect("write");
                    }
                });
            }
        });
        for at in 0..64 {
            assert!(piece(disk.mounted.path(), at * BLOCK as u64, BLOCK) == pattern(at, 0, BLOCK));
        }
    });
}
