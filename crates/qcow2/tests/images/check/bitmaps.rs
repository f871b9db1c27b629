//! Bitmap directories and tables that QEMU does not open an image with: a check names them, a
//! repair takes the bitmaps away and nothing else.

use ringdisk_qcow2::{CheckVerdict, OpenOptions, Qcow2, Repair, check_bytes};
use ringdisk_testkit::sim::SimStorage;

use crate::check::{Theirs, repair_on};
use crate::common::{Images, MIB, runtime};

/// Type of the bitmaps extension.
const BITMAPS: u32 = 0x2385_2875;
/// Bytes of the directory entry of `first`, and where its name is.
const FIRST_BYTES: u64 = 32;
const NAME_AT: u64 = 24;

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"))
}

/// An image with the bitmaps `first` and `second`, which record.
fn image(images: &Images) -> Vec<u8> {
    let path = images.create("image", "cluster_size=64k", 8 * MIB);
    images.qemu_io("image", &["write -q -P 1 0 256k".to_owned()]);
    images.qemu_img(&["bitmap", "--add", "image", "first"]);
    images.qemu_img(&["bitmap", "--add", "-g", "64k", "image", "second"]);
    std::fs::read(path).expect("the image")
}

/// A change: its name, where, the new bytes, and whether all bitmaps are lost by it.
type Case = (&'static str, u64, Vec<u8>, bool);

fn cases(good: &[u8]) -> Vec<Case> {
    let found = good[..1024].windows(4).position(|w| w == BITMAPS.to_be_bytes());
    let extension = found.expect("bitmaps") as u64 + 8;
    let (len, directory) = (word(good, extension + 8), word(good, extension + 16));
    let (table, second) = (word(good, directory), directory + FIRST_BYTES);
    let number = |value: u32| value.to_be_bytes().to_vec();
    let long = |value: u64| value.to_be_bytes().to_vec();
    let double = [&[1, 16, 0, 5, 0, 0, 0, 0][..], b"first\0"].concat();
    vec![
        ("a longer directory", extension + 8, long(len + 8), true),
        ("a shorter directory", extension + 8, long(len - 8), true),
        ("a bitmap less than there are", extension, number(1), true),
        ("a bitmap more than there are", extension, number(3), true),
        ("a table that is too long", directory + 8, number(2), false),
        (
            "a table that is too long, of one that does not record",
            directory + 8,
            { [number(2), number(0)].concat() },
            false,
        ),
        ("no table", directory + 8, number(0), false),
        ("two of the same name", second + 16, double, true),
        ("a name with a NUL byte", directory + NAME_AT, vec![0], false),
        ("a type that nobody knows", directory + 16, vec![2], false),
        ("a granularity that is too small", directory + 17, vec![8], false),
        ("one that is too large", directory + 17, vec![32], false),
        ("a flag that nobody knows", directory + 12, number(2 | 8), false),
        ("a table entry with reserved bits", table, long(1 << 62), false),
        ("one with a place and a flag", table, long(word(good, table) | 1 | table), false),
    ]
}

#[test]
fn bitmaps_that_qemu_does_not_open_an_image_with_are_damage_that_a_repair_removes() {
    let images = Images::new();
    let mut runtime = runtime();
    let good = image(&images);
    assert!(check_bytes(&good[..]).expect("a good image").is_clean());
    let path = images.path("changed");
    for (case, at, value, loses_all) in cases(&good) {
        let mut bytes = good.clone();
        bytes[at as usize..at as usize + value.len()].copy_from_slice(&value);
        std::fs::write(&path, &bytes).expect("a copy");
        // It only sees the NUL byte when it writes.
        assert!(Theirs::of(&path).code == 1 || case.contains("NUL"), "{case}: QEMU opens it");
        let report = check_bytes(&bytes[..]).expect("a check");
        assert_eq!(report.verdict(), CheckVerdict::Corrupt, "{case}: {report:?}");
        let sim = SimStorage::from_image(&bytes, 1);
        let report = repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
        assert!(report.is_clean(), "{case}: {report:?}");
        std::fs::write(&path, sim.image()).expect("a copy");
        assert_eq!(Theirs::of(&path).code, 0, "{case}");
        let ring = runtime.ring().clone();
        let opened = runtime.block_on(Qcow2::open(&ring, sim.storage(), &OpenOptions::default()));
        let left = opened.expect("a good image").info().bitmaps.len();
        assert_eq!(left, if loses_all { 0 } else { 1 }, "{case}");
    }
}

#[test]
fn a_bitmap_that_was_not_saved_may_be_of_another_size() {
    let images = Images::new();
    let mut bytes = image(&images);
    let (_, at, value, _) = cases(&bytes).swap_remove(4);
    bytes[at as usize..at as usize + 4].copy_from_slice(&value);
    // In use, and it records.
    bytes[at as usize + 7] = 3;
    let path = images.path("changed");
    std::fs::write(&path, &bytes).expect("a copy");
    assert_eq!(Theirs::of(&path).code, 0);
    assert!(check_bytes(&bytes[..]).expect("a check").is_clean());
}

#[test]
fn an_image_is_not_opened_with_a_directory_that_has_more_than_its_entries() {
    let images = Images::new();
    let mut runtime = runtime();
    let good = image(&images);
    for (case, at, value, _) in cases(&good).drain(..4) {
        let mut bytes = good.clone();
        bytes[at as usize..at as usize + value.len()].copy_from_slice(&value);
        let sim = SimStorage::from_image(&bytes, 1);
        let ring = runtime.ring().clone();
        let opened = runtime.block_on(Qcow2::open(&ring, sim.storage(), &OpenOptions::default()));
        let error = opened.map(drop).expect_err(case);
        assert!(error.advice().contains("check"), "{case}: {error}");
    }
}
