//! Headers that an open refuses as QEMU does, what a repair makes of them, and where we differ from
//! QEMU on purpose.

use std::path::Path;
use std::process::Command;

use ringdisk_qcow2::{Error, OpenOptions, Qcow2, Repair, check_bytes};
use ringdisk_ring::{Errno, Runtime};
use ringdisk_testkit::sim::SimStorage;

use crate::check::{Theirs, repair_on};
use crate::common::{Images, KIB, MIB, open, read, runtime};

const CLUSTER: u64 = 64 * KIB;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
/// Header fields.
const BACKING_FILE_OFFSET: u64 = 8;
const REFCOUNT_TABLE_CLUSTERS: u64 = 56;
const AUTOCLEAR: u64 = 88;
/// The last byte of the incompatible features.
const INCOMPATIBLE_LOW: usize = 79;

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"))
}

fn put(bytes: &mut [u8], at: u64, value: &[u8]) {
    bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
}

/// The first L2 table.
fn l2_table(bytes: &[u8]) -> u64 {
    word(bytes, word(bytes, 40)) & OFFSET_MASK
}

/// Where the header extensions end.
fn extensions_end(bytes: &[u8]) -> u64 {
    let mut at = u64::from(u32::from_be_bytes(bytes[100..104].try_into().expect("4 bytes")));
    while word(bytes, at) >> 32 != 0 {
        at += 8 + (word(bytes, at) & 0xffff_ffff).next_multiple_of(8);
    }
    at
}

fn extension(kind: u32, len: u32, data: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &len.to_be_bytes(), data].concat()
}

fn image(images: &Images, options: &str) -> Vec<u8> {
    let path = images.create("image", options, 8 * MIB);
    images.qemu_io("image", &["write -q -P 1 0 256k".into(), "write -q -P 2 1M 64k".into()]);
    std::fs::read(path).expect("the image")
}

fn try_open(runtime: &mut Runtime, bytes: &[u8], writable: bool) -> Result<(), Error> {
    let ring = runtime.ring().clone();
    let sim = SimStorage::from_image(bytes, 1);
    let options = OpenOptions { writable, ..OpenOptions::default() };
    runtime.block_on(async {
        let image = Qcow2::open(&ring, sim.storage(), &options).await?;
        image.close(&ring).await.expect("nothing was written");
        Ok(())
    })
}

/// Whether QEMU reads the disk in an image, to its end.
fn qemu_reads(path: &Path) -> bool {
    let words = ["convert", "-f", "qcow2", "-O", "raw"];
    let output = Command::new("qemu-img")
        .args(words)
        .arg(path)
        .arg("converted.raw")
        .current_dir(path.parent().expect("a directory"))
        .output();
    output.expect("qemu-img is needed for this test").status.success()
}

#[test]
fn headers_that_qemu_refuses_are_refused() {
    let images = Images::new();
    let good = image(&images, "");
    let mut runtime = runtime();
    let end = extensions_end(&good);
    let room = u32::try_from(CLUSTER - end - 8).expect("small");
    let format = 0xe279_2aca;
    // Name, position, new bytes, whether QEMU refuses it, and we.
    let cases: Vec<(&str, u64, Vec<u8>, bool, bool)> = vec![
        ("nothing changed", AUTOCLEAR, vec![0; 8], false, false),
        (
            "a backing file name far away",
            BACKING_FILE_OFFSET,
            (1u64 << 40).to_be_bytes().into(),
            true,
            true,
        ),
        (
            "one behind the cluster",
            BACKING_FILE_OFFSET,
            (CLUSTER + 1).to_be_bytes().into(),
            true,
            true,
        ),
        (
            "one at the end of the cluster",
            BACKING_FILE_OFFSET,
            CLUSTER.to_be_bytes().into(),
            false,
            false,
        ),
        (
            "one that cuts an extension",
            BACKING_FILE_OFFSET,
            (end - 8).to_be_bytes().into(),
            true,
            true,
        ),
        // QEMU then sees no extension at all, not even that of a data file.
        ("one inside the header", BACKING_FILE_OFFSET, 8u64.to_be_bytes().into(), false, true),
        ("a raw data file, but none", AUTOCLEAR, 2u64.to_be_bytes().into(), true, true),
        ("unknown autoclear bits", AUTOCLEAR, (!3u64).to_be_bytes().into(), false, false),
        ("no refcount table", REFCOUNT_TABLE_CLUSTERS, vec![0; 4], true, true),
        ("an extension that just fits", end, extension(0x1234_5678, room, &[]), false, false),
        ("an extension that is too long", end, extension(0x1234_5678, room + 1, &[]), true, true),
        ("one that is much too long", end, extension(0x1234_5678, u32::MAX, &[]), true, true),
        ("a format that just fits", end, extension(format, 15, b"abcdefghijklmno"), false, false),
        ("a format that is too long", end, extension(format, 16, b"abcdefghijklmnop"), true, true),
        ("a format without letters", end, extension(format, 0, &[]), false, false),
        ("an encryption header", end, extension(0x0537_be77, 16, &[0; 16]), true, true),
    ];
    for (case, at, value, theirs, ours) in cases {
        let mut bytes = good.clone();
        put(&mut bytes, at, &value);
        let path = images.path("changed");
        std::fs::write(&path, &bytes).expect("a copy");
        assert_eq!(!qemu_reads(&path), theirs, "{case}: QEMU");
        for writable in [false, true] {
            let result = try_open(&mut runtime, &bytes, writable);
            assert_eq!(result.is_err(), ours, "{case}: {result:?}");
        }
    }
}

#[test]
fn an_image_without_refcounts_gets_new_ones() {
    let images = Images::new();
    let mut runtime = runtime();
    for options in ["", "cluster_size=512", "compat=0.10"] {
        let good = image(&images, options);
        let expected = images.converted("image");
        let mut bytes = good.clone();
        put(&mut bytes, REFCOUNT_TABLE_CLUSTERS, &[0; 4]);
        let error = try_open(&mut runtime, &bytes, true).expect_err("there are none");
        assert!(error.advice().contains("--repair all"), "{error}");
        let path = images.path("image");
        std::fs::write(&path, &bytes).expect("a copy");
        let theirs = Theirs::of(&path);
        let report = check_bytes(&bytes[..]).expect("everything else is there");
        assert_eq!(i32::from(report.verdict().exit_code()), theirs.code, "{options}: {theirs:?}");
        let sim = SimStorage::from_image(&bytes, 1);
        let report = repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
        assert!(report.is_clean() && report.corruptions_fixed > 0, "{options}: {report:?}");
        std::fs::write(&path, sim.image()).expect("a copy");
        assert_eq!(Theirs::of(&path).code, 0, "{options}");
        assert!(images.converted("image") == expected, "{options}: the contents changed");
        try_open(&mut runtime, &sim.image(), true).expect("a good image");
    }
}

#[test]
fn a_repair_that_writes_clears_autoclear_bits_that_nobody_knows_and_a_check_does_not() {
    let images = Images::new();
    let good = image(&images, "");
    let mut runtime = runtime();
    let block = word(&good, word(&good, 48));
    let used = block + 2 * (l2_table(&good) / CLUSTER);
    // The entry of the cluster at 1 MiB.
    let last = l2_table(&good) + 16 * 8;
    let cases: [(&str, u64, Vec<u8>); 2] =
        [("a leak", last, vec![0; 8]), ("a low refcount", used, vec![0, 0])];
    for (case, at, value) in cases {
        let mut bytes = good.clone();
        put(&mut bytes, AUTOCLEAR, &(1u64 << 5).to_be_bytes());
        put(&mut bytes, at, &value);
        let sim = SimStorage::from_image(&bytes, 1);
        repair_on(&mut runtime, &sim, Repair::Nothing).expect("a check");
        assert_eq!(word(&sim.image(), AUTOCLEAR), 1 << 5, "{case}");
        let report = repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
        assert!(report.is_clean(), "{case}: {report:?}");
        assert_eq!(word(&sim.image(), AUTOCLEAR), 0, "{case}");
    }
    // Nothing is written to a sound image, so the bits still say the truth.
    let mut bytes = good;
    put(&mut bytes, AUTOCLEAR, &(1u64 << 5).to_be_bytes());
    let sim = SimStorage::from_image(&bytes, 1);
    repair_on(&mut runtime, &sim, Repair::All).expect("nothing to repair");
    assert!(sim.image() == bytes);
}

#[test]
fn the_mark_of_a_raw_data_file_that_is_not_there_is_removed_by_a_repair() {
    let images = Images::new();
    let mut bytes = image(&images, "");
    let mut runtime = runtime();
    put(&mut bytes, AUTOCLEAR, &2u64.to_be_bytes());
    assert_eq!(check_bytes(&bytes[..]).expect("a check").corruptions, 1);
    let sim = SimStorage::from_image(&bytes, 1);
    let report = repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
    assert!(report.is_clean() && report.corruptions_fixed == 1, "{report:?}");
    try_open(&mut runtime, &sim.image(), true).expect("a good image");
    // Beside other damage it may be the missing data file that is wrong.
    let entry = l2_table(&bytes);
    put(&mut bytes, entry, &(COPIED | 1 << 50).to_be_bytes());
    let sim = SimStorage::from_image(&bytes, 1);
    let report = repair_on(&mut runtime, &sim, Repair::All).expect("a report");
    assert!(!report.is_clean() && word(&sim.image(), AUTOCLEAR) == 2, "{report:?}");
}

#[test]
fn entries_for_another_place_of_the_data_file_are_errors_as_in_qemu_and_are_repaired() {
    let images = Images::new();
    let mut runtime = runtime();
    for raw in ["off", "on"] {
        let options = format!("data_file=data.raw,data_file_raw={raw}");
        let good = image(&images, &options);
        let expected = images.converted("image");
        let table = l2_table(&good);
        // Data, and reserved space that reads as zeroes.
        for entry in [3 * CLUSTER, 1 << 40, (3 * CLUSTER) | 512, (3 * CLUSTER) | 1] {
            let case = format!("raw {raw}, {entry:#x}");
            let mut bytes = good.clone();
            put(&mut bytes, table + 8, &(COPIED | entry).to_be_bytes());
            let path = images.path("image");
            std::fs::write(&path, &bytes).expect("a copy");
            assert!(!qemu_reads(&path), "{case}");
            let opened = open(&mut runtime, &path);
            let ring = runtime.ring().clone();
            let mut at = |offset| runtime.block_on(read(&ring, &opened, &[], offset, 10));
            assert_eq!((at(0), at(CLUSTER)), (Ok(vec![1; 10]), Err(Errno::IO)), "{case}");
            assert_eq!(at(2 * CLUSTER), Ok(vec![1; 10]), "{case}");
            // QEMU's check says nothing.
            let report = check_bytes(&bytes[..]).expect("a check");
            assert_eq!((report.corruptions, report.own_findings), (1, 1), "{case}: {report:?}");
            let sim = SimStorage::from_image(&bytes, 1);
            let report = repair_on(&mut runtime, &sim, Repair::All).expect("a repair");
            assert!(report.is_clean(), "{case}: {report:?}");
            std::fs::write(&path, sim.image()).expect("a copy");
            let contents = images.converted("image");
            let zero = CLUSTER as usize..2 * CLUSTER as usize;
            let mut wanted = expected.clone();
            if entry & 1 != 0 {
                wanted[zero].fill(0);
            }
            assert!(contents == wanted, "{case}: the contents are others");
            assert_eq!(Theirs::of(&path).code, 0, "{case}");
        }
        std::fs::write(images.path("image"), &good).expect("a copy");
    }
}

#[test]
fn a_cluster_past_the_end_of_the_file_is_an_error_that_both_checks_name() {
    let images = Images::new();
    let good = image(&images, "");
    let mut runtime = runtime();
    let first = word(&good, l2_table(&good)) & OFFSET_MASK;
    // The second cluster is cut, the others are gone.
    let bytes = &good[..(first + CLUSTER + 1000) as usize];
    let path = images.path("image");
    std::fs::write(&path, bytes).expect("a copy");
    let opened = open(&mut runtime, &path);
    let ring = runtime.ring().clone();
    let mut at = |offset| runtime.block_on(read(&ring, &opened, &[], offset, 10));
    assert_eq!((at(0), at(CLUSTER)), (Ok(vec![1; 10]), Ok(vec![1; 10])));
    // The rest of a cut cluster is zeroes, as in QEMU; what is missing as a whole is not.
    assert_eq!((at(CLUSTER + 4096), at(2 * CLUSTER)), (Ok(vec![0; 10]), Err(Errno::IO)));
    assert!(qemu_reads(&path), "QEMU takes zeroes for it");
    let report = check_bytes(bytes).expect("a check");
    let theirs = Theirs::of(&path);
    assert_eq!((2, report.corruptions), (theirs.code, theirs.number("corruptions")), "{report:?}");
    assert_eq!(report.own_findings, 0);
    let sim = SimStorage::from_image(bytes, 1);
    let report = repair_on(&mut runtime, &sim, Repair::All).expect("a report");
    assert!(!report.is_clean() && sim.image() == bytes, "{report:?}");
    let said = report.messages.iter().any(|text| text.starts_with("Not repaired"));
    assert!(said, "{report:?}");
}

#[test]
fn one_bit_that_says_that_the_data_is_elsewhere_costs_no_byte() {
    let images = Images::new();
    let mut runtime = runtime();
    for options in ["", "cluster_size=512", "extended_l2=on"] {
        let good = image(&images, options);
        for dirty in [0, 1] {
            let mut bytes = good.clone();
            bytes[INCOMPATIBLE_LOW] |= 4 | dirty;
            for repair in [Repair::Leaks, Repair::All] {
                let case = format!("{options}, dirty {dirty}, {repair:?}");
                let sim = SimStorage::from_image(&bytes, 1);
                let report = repair_on(&mut runtime, &sim, repair).expect("a report");
                let said = report.messages.iter().any(|text| text.contains("clear the bit"));
                assert!(!report.is_clean() && said, "{case}: {report:?}");
                assert!(sim.image() == bytes, "{case}: the image changed");
            }
            // An open for writing makes the refcounts of one that was not closed.
            let sim = SimStorage::from_image(&bytes, 1);
            let ring = runtime.ring().clone();
            let options = OpenOptions { writable: true, ..OpenOptions::default() };
            let opened = runtime.block_on(Qcow2::open(&ring, sim.storage(), &options));
            assert_eq!(opened.is_err(), dirty == 1, "{options:?}: {:?}", opened.map(drop));
            assert!(sim.image() == bytes, "{options:?}: an open changed the image");
        }
    }
}
