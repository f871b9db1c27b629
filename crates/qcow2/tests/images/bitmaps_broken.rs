//! Bitmaps that cannot be right: refused or given up with a message, never a panic, never a worse
//! image.

use ringdisk_qcow2::{Error, ErrorKind, GuestOffset, Nothing, OpenOptions, Qcow2};
use ringdisk_ring::{IoBuf, Ring, Runtime};
use ringdisk_testkit::sim::SimStorage;

use crate::common::{Images, MIB, runtime};

const CLUSTER: u64 = 65536;

/// An image with two bitmaps, `one` (records) and `two` (does not), both with bits.
fn image() -> Vec<u8> {
    let images = Images::new();
    images.create("image", "", 64 * MIB);
    images.qemu_img(&["bitmap", "--add", "-g", "512", "image", "one"]);
    images.qemu_img(&["bitmap", "--add", "-g", "512", "image", "two"]);
    images.qemu_io("image", &["write -q 1M 64k".into()]);
    images.qemu_img(&["bitmap", "--disable", "image", "two"]);
    std::fs::read(images.path("image")).expect("the image")
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).expect("small");
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn put(bytes: &mut [u8], at: u64, value: &[u8]) {
    let at = usize::try_from(at).expect("small");
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Offset of the bitmaps extension's content.
fn extension(bytes: &[u8]) -> u64 {
    let mut at = 112;
    loop {
        let head = word(bytes, at);
        if head >> 32 == 0x2385_2875 {
            return at + 8;
        }
        at += 8 + (head & 0xffff_ffff).next_multiple_of(8);
    }
}

/// Places in the image: directory, table of `one`, first cluster of its bits.
fn places(bytes: &[u8]) -> (u64, u64, u64) {
    let directory = word(bytes, extension(bytes) + 16);
    let table = word(bytes, directory);
    (directory, table, word(bytes, table) & !1)
}

fn try_open(runtime: &mut Runtime, sim: &SimStorage) -> Result<Qcow2, Error> {
    let ring = runtime.ring().clone();
    let options = OpenOptions { writable: true, ..Default::default() };
    runtime.block_on(Qcow2::open(&ring, sim.storage(), &options))
}

/// Everything that can be done, in turn; errors are fine. What the disk holds stays.
async fn everything(ring: &Ring, image: &mut Qcow2) {
    let buf = IoBuf::new(4096, 4096);
    buf.fill(7);
    let _ = image.write(ring, GuestOffset(2 * MIB), &buf, &Nothing).await;
    let _ = image.flush(ring).await;
    if let Ok(contents) = image.bitmap_contents(ring, "one").await {
        let _ = image.bitmap_merge(ring, "two", &contents).await;
    }
    let _ = image.bitmap_add(ring, "three", None).await;
    let _ = image.bitmap_clear(ring, "one").await;
    let _ = image.bitmap_disable(ring, "one").await;
    let _ = image.bitmap_enable(ring, "two").await;
    let _ = image.bitmap_remove(ring, "one").await;
    let _ = image.bitmap_remove_all(ring).await;
    let _ = image.close(ring).await;
}

/// Works on an image that says something impossible, and looks that it can be opened as before, and
/// that the first MiB of data is still there.
fn survive(runtime: &mut Runtime, case: &str, bytes: &[u8]) {
    let ring = runtime.ring().clone();
    let reader = OpenOptions::default();
    let first = SimStorage::from_image(bytes, 1);
    let opened = runtime.block_on(Qcow2::open(&ring, first.storage(), &reader)).is_ok();
    let sim = SimStorage::from_image(bytes, 1);
    if let Ok(mut image) = try_open(runtime, &sim) {
        runtime.block_on(everything(&ring, &mut image));
    }
    let image = match runtime.block_on(Qcow2::open(&ring, sim.storage(), &reader)) {
        Ok(image) => image,
        Err(error) => {
            assert!(!opened, "{case}: it could be opened before: {error}");
            return;
        }
    };
    let data = runtime.block_on(crate::common::read(&ring, &image, &[], MIB, 65536));
    let data = data.unwrap_or_else(|errno| panic!("{case}: {errno}"));
    assert!(data.iter().all(|byte| *byte == 0xcd), "{case}: data is gone");
}

#[test]
fn the_directory_lies_or_says_something_impossible() {
    let mut runtime = runtime();
    let good = image();
    let at = extension(&good);
    let (l1, len) = (word(&good, 40), word(&good, at + 8));
    let mut cases: Vec<(String, u64, Vec<u8>)> = Vec::new();
    for offset in [0, 512, CLUSTER, l1, 1 << 40, 1 << 62, u64::MAX, u64::MAX - 511] {
        cases.push((format!("offset {offset:#x}"), at + 16, offset.to_be_bytes().to_vec()));
    }
    for len in [0, 1, len - 1, len + 8, 1 << 30, 1 << 62, u64::MAX] {
        cases.push((format!("length {len}"), at + 8, len.to_be_bytes().to_vec()));
    }
    for count in [0, 1, 3, 65535, 65536, u32::MAX] {
        cases.push((format!("count {count}"), at, count.to_be_bytes().to_vec()));
    }
    for (case, at, value) in cases {
        let mut bytes = good.clone();
        put(&mut bytes, at, &value);
        survive(&mut runtime, &case, &bytes);
    }
}

#[test]
fn every_byte_of_an_entry_can_be_anything() {
    let mut runtime = runtime();
    let good = image();
    let (directory, ..) = places(&good);
    for at in 0..27 {
        for value in [0x00, 0x01, 0x02, 0x07, 0x7f, 0x80, 0xff] {
            let mut bytes = good.clone();
            put(&mut bytes, directory + at, &[value]);
            survive(&mut runtime, &format!("byte {at} is {value:#x}"), &bytes);
        }
    }
}

#[test]
fn tables_that_lie_on_something_else_are_not_followed_into_damage() {
    let mut runtime = runtime();
    let good = image();
    let (directory, table, bits) = places(&good);
    let l1 = word(&good, 40);
    let l2 = word(&good, l1) & 0x00ff_ffff_ffff_fe00;
    let refcounts = word(&good, 48);
    let block = word(&good, refcounts);
    let targets = [0, 512, CLUSTER, l1, l2, refcounts, block, directory, table, bits, 1 << 40];
    for target in targets.into_iter().chain([u64::MAX, 1 << 63]) {
        for at in [directory, table] {
            let mut bytes = good.clone();
            put(&mut bytes, at, &target.to_be_bytes());
            survive(&mut runtime, &format!("{target:#x} at {at:#x}"), &bytes);
        }
    }
    // Both bitmaps share a table: the second use is freed once only.
    let mut bytes = good.clone();
    put(&mut bytes, directory + 32, &table.to_be_bytes());
    survive(&mut runtime, "a shared table", &bytes);
}

#[test]
fn two_bitmaps_of_one_name_are_survived() {
    let mut runtime = runtime();
    let mut bytes = image();
    let (directory, ..) = places(&bytes);
    put(&mut bytes, directory + 32 + 24, b"one");
    put(&mut bytes, directory + 32 + 15, &[2]);
    survive(&mut runtime, "one name", &bytes);
}

#[test]
fn a_directory_on_the_l1_table_is_refused() {
    let mut runtime = runtime();
    let mut bytes = image();
    let at = extension(&bytes) + 16;
    let (directory, ..) = places(&bytes);
    let l1 = word(&bytes, 40);
    let from = usize::try_from(directory).expect("small");
    let copy = bytes[from + 32..from + 64].to_vec();
    // Behind the one entry of the L1 table there is room for a directory with one entry … which
    // begins with that entry. So the entry of the L1 table is the offset of a bitmap table.
    put(&mut bytes, l1 + 8, &copy[8..]);
    put(&mut bytes, at - 16, &1u32.to_be_bytes());
    put(&mut bytes, at - 8, &32u64.to_be_bytes());
    put(&mut bytes, at, &l1.to_be_bytes());
    let sim = SimStorage::from_image(&bytes, 1);
    let ring = runtime.ring().clone();
    let mut image = try_open(&mut runtime, &sim).expect("it can be opened");
    let error = runtime.block_on(image.bitmap_remove(&ring, "two")).expect_err("overlap");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    survive(&mut runtime, "on the L1 table", &bytes);
}
