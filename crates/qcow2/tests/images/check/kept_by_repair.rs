//! What a repair keeps although QEMU's would not, and what a check finds that lies outside of the
//! tables.

use std::sync::Arc;

use ringdisk_qcow2::{
    CheckHooks, CheckOptions, CheckReport, CheckVerdict, OpenOptions, Qcow2, Repair, check,
    check_bytes,
};
use ringdisk_ring::{Errno, Runtime};
use ringdisk_storage::Storage;
use ringdisk_testkit::layout::Layout;
use ringdisk_testkit::sim::SimStorage;

use crate::check::{Theirs, repair_on};
use crate::common::{Images, MIB, open, read, runtime, storage};

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const CLUSTER: u64 = 4096;

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

/// An image of 4 MiB with 40 KiB of ones, and 4 KiB of twos that were discarded again: free
/// clusters inside the file.
fn image(images: &Images, options: &str) -> Vec<u8> {
    let path = images.create("image", &format!("cluster_size=4k{options}"), 4 * MIB);
    let commands = ["write -q -P 2 1M 4k", "write -q -P 1 0 40k", "discard -q 1M 4k"];
    images.qemu_io("image", &commands.map(str::to_owned));
    std::fs::read(path).expect("the image")
}

fn refcount(bytes: &[u8], offset: u64) -> u64 {
    Layout::of(bytes).refcounts.get(&(offset / CLUSTER)).copied().unwrap_or(0)
}

fn says(report: &CheckReport, text: &str) -> bool {
    report.messages.iter().any(|message| message.contains(text))
}

/// What a repair makes of an image.
fn repaired(runtime: &mut Runtime, bytes: &[u8], repair: Repair) -> (CheckReport, Vec<u8>) {
    let sim = SimStorage::from_image(bytes, 1);
    let report = repair_on(runtime, &sim, repair).expect("a report");
    (report, sim.image())
}

#[test]
fn the_cluster_of_an_entry_that_names_another_one_is_kept_until_somebody_looked() {
    let images = Images::new();
    let mut runtime = runtime();
    let good = image(&images, "");
    let table = l2_table(&good);
    let (first, second) = (word(&good, table), word(&good, table + 8));
    let free =
        (0..good.len() as u64).step_by(CLUSTER as usize).find(|at| refcount(&good, *at) == 0);
    let free = free.expect("a free cluster inside the file");
    for (what, entry) in [("a free cluster", COPIED | free), ("that of its neighbour", first)] {
        let mut bytes = good.clone();
        put(&mut bytes, table + 8, &entry.to_be_bytes());
        let lost = second & OFFSET_MASK;
        let (report, after) = repaired(&mut runtime, &bytes, Repair::Leaks);
        assert_eq!(report.verdict(), CheckVerdict::Corrupt, "{what}: {report:?}");
        assert!(says(&report, "kept while there are errors"), "{what}: {report:?}");
        assert!(refcount(&after, lost) > 0, "{what}: given back by a repair of leaks");
        let (report, after) = repaired(&mut runtime, &bytes, Repair::All);
        assert_eq!(report.verdict(), CheckVerdict::Leaks, "{what}: {report:?}");
        assert!(says(&report, "`--repair leaks` gives them back"), "{what}: {report:?}");
        assert!(refcount(&after, lost) > 0, "{what}: given back");
        assert_eq!(after[lost as usize..][..CLUSTER as usize], [1; CLUSTER as usize], "{what}");
        std::fs::write(images.path("image"), &after).expect("a copy");
        assert_eq!(Theirs::of(&images.path("image")).code, 3, "{what}: leaks alone");
        let (report, after) = repaired(&mut runtime, &after, Repair::Leaks);
        assert!(report.is_clean() && refcount(&after, lost) == 0, "{what}: {report:?}");
    }
}

#[test]
fn leaks_beside_refcounts_of_an_image_that_was_not_closed_are_given_back() {
    let images = Images::new();
    let mut runtime = runtime();
    let mut bytes = image(&images, ",lazy_refcounts=on");
    let table = l2_table(&bytes);
    let block = word(&bytes, word(&bytes, 48));
    let counted = word(&bytes, table) & OFFSET_MASK;
    put(&mut bytes, block + counted / CLUSTER * 2, &[0, 0]);
    put(&mut bytes, table + 8, &[0; 8]);
    bytes[79] |= 1;
    let (report, _) = repaired(&mut runtime, &bytes, Repair::All);
    assert!(report.is_clean() && report.leaks_fixed > 0, "{report:?}");
}

#[test]
fn the_clusters_of_a_snapshot_that_cannot_be_read_are_kept_until_somebody_looked() {
    let images = Images::new();
    let mut runtime = runtime();
    image(&images, "");
    images.qemu_img(&["snapshot", "-c", "one", "image"]);
    images.qemu_io("image", &["write -q -P 3 0 40k".to_owned()]);
    let good = std::fs::read(images.path("image")).expect("the image");
    let entry = word(&good, 64);
    let l1 = word(&good, entry);
    let data = word(&good, word(&good, l1) & OFFSET_MASK) & OFFSET_MASK;
    let mut bytes = good.clone();
    put(&mut bytes, entry, &(l1 + 512).to_be_bytes());
    for repair in [Repair::Leaks, Repair::All] {
        let (report, after) = repaired(&mut runtime, &bytes, repair);
        assert!(!report.is_clean(), "{repair:?}: {report:?}");
        assert!(refcount(&after, l1) > 0 && refcount(&after, data) > 0, "{repair:?}: {report:?}");
    }
}

#[test]
fn a_snapshot_table_that_the_file_cuts_is_named_whatever_its_entries_say() {
    let images = Images::new();
    let mut runtime = runtime();
    image(&images, "");
    images.qemu_img(&["snapshot", "-c", "one", "image"]);
    images.qemu_img(&["snapshot", "-c", "two", "image"]);
    images.qemu_io("image", &["write -q -P 3 0 40k".to_owned()]);
    let good = std::fs::read(images.path("image")).expect("the image");
    let table = word(&good, 64);
    // The second snapshot's numbers are behind the first one's extra data, which go past the end of
    // the file.
    let mut bytes = good.clone();
    let extra = u32::try_from(good.len() as u64 - table).expect("small");
    put(&mut bytes, table + 36, &extra.to_be_bytes());
    let report = check_bytes(&bytes[..]).expect("a report");
    assert_eq!(report.verdict(), CheckVerdict::Corrupt, "{report:?}");
    assert!(says(&report, "snapshot table"), "{report:?}");
    let known = word(&good, table + 32) & 0xffff_ffff;
    let second = (table + 40 + known + 1 + 3).next_multiple_of(8);
    let l1 = word(&good, second);
    assert!(refcount(&good, l1) > 0, "it is the second one's");
    for repair in [Repair::Leaks, Repair::All] {
        let (report, after) = repaired(&mut runtime, &bytes, repair);
        assert!(refcount(&after, l1) > 0, "{repair:?}: {report:?}");
    }
}

#[test]
fn compressed_data_that_the_file_cuts_is_damage_where_it_cannot_be_read() {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("image", "cluster_size=4k", 4 * MIB);
    let random: Vec<u8> = (0..CLUSTER * 2 / 3).map(|at| ((at * at * 7919) >> 5) as u8).collect();
    std::fs::write(images.path("random"), &random).expect("a pattern");
    images.qemu_io("image", &["write -q -c -s random 0 4k".to_owned()]);
    let good = std::fs::read(&path).expect("the image");
    let entry = word(&good, l2_table(&good));
    let offset = entry & ((1 << 58) - 1);
    let mut seen = [0, 0];
    let whole = good.len() as u64;
    for len in (offset + 1..whole).step_by(97).chain([whole]) {
        let bytes = &good[..len as usize];
        std::fs::write(&path, bytes).expect("a copy");
        let opened = open(&mut runtime, &path);
        let ring = runtime.ring().clone();
        let got = runtime.block_on(read(&ring, &opened, &[], 0, CLUSTER as usize));
        let report = check_bytes(bytes).expect("a report");
        assert_eq!(got.is_ok(), report.corruptions == 0, "{len:#x}: {report:?}");
        seen[usize::from(got.is_ok())] += 1;
    }
    assert!(seen[0] > 5 && seen[1] > 0, "{seen:?}");
}

/// Checks an image with its data file.
fn check_with(runtime: &mut Runtime, images: &Images, data: &Arc<Storage>) -> CheckReport {
    let ring = runtime.ring().clone();
    let (file, options) = (storage(&images.path("image")), CheckOptions::default());
    let checked = check(&ring, &file, Some(data), &options, CheckHooks::none());
    runtime.block_on(checked).expect("a report")
}

#[test]
fn clusters_past_the_end_of_a_data_file_are_damage_where_they_cannot_be_read() {
    let images = Images::new();
    let mut runtime = runtime();
    image(&images, ",data_file=data.raw");
    let data = images.path("data.raw");
    let len = std::fs::metadata(&data).expect("the data file").len();
    let file = std::fs::File::options().write(true).open(&data).expect("the data file");
    let report = check_with(&mut runtime, &images, &storage(&data));
    assert!(report.is_clean(), "{len}: {report:?}");
    // All, a cluster in part, whole clusters, everything.
    for (len, missing) in [(40 << 10, 0), ((36 << 10) + 1, 0), (36 << 10, 1), (0, 10)] {
        file.set_len(len).expect("cut");
        let report = check_with(&mut runtime, &images, &storage(&data));
        assert_eq!(
            (report.corruptions, report.own_findings),
            (missing, missing),
            "{len}: {report:?}"
        );
        let opened = open(&mut runtime, &images.path("image"));
        let ring = runtime.ring().clone();
        let last = runtime.block_on(read(&ring, &opened, &[], 36 << 10, 10));
        assert_eq!(last == Err(Errno::IO), missing > 0, "{len}: {last:?}");
    }
    let options = CheckOptions { repair: Repair::All };
    let before = std::fs::read(images.path("image")).expect("the image");
    let sim = SimStorage::from_image(&before, 1);
    let ring = runtime.ring().clone();
    let (image, data) = (sim.storage(), storage(&data));
    let repair = check(&ring, &image, Some(&data), &options, CheckHooks::none());
    let report = runtime.block_on(repair).expect("a report");
    assert!(report.corruptions == 10 && sim.image() == before, "{report:?}");
}

#[test]
fn bitmaps_that_record_are_inconsistent_when_a_repair_changes_the_disk() {
    let images = Images::new();
    let mut runtime = runtime();
    let path = images.create("image", "cluster_size=16k,extended_l2=on", 4 * MIB);
    images.qemu_io("image", &["write -q -P 1 0 64k".to_owned()]);
    images.qemu_img(&["bitmap", "--add", "image", "records"]);
    images.qemu_img(&["bitmap", "--add", "--disable", "image", "rests"]);
    let mut bytes = std::fs::read(&path).expect("the image");
    // A subcluster that is both allocated and zero.
    let bitmap = l2_table(&bytes) + 8;
    bytes[bitmap as usize + 3] |= 1;
    let (report, after) = repaired(&mut runtime, &bytes, Repair::All);
    assert!(report.is_clean() && says(&report, "read as zeroes now"), "{report:?}");
    assert!(says(&report, "bitmap 'records' is inconsistent now"), "{report:?}");
    let sim = SimStorage::from_image(&after, 1);
    let ring = runtime.ring().clone();
    let opened = runtime.block_on(Qcow2::open(&ring, sim.storage(), &OpenOptions::default()));
    let opened = opened.expect("a good image");
    let bitmaps = &opened.info().bitmaps;
    let states: Vec<_> = bitmaps.iter().map(|each| (each.name.as_str(), each.in_use)).collect();
    assert_eq!(states, [("records", true), ("rests", false)]);
    std::fs::write(&path, &after).expect("a copy");
    assert_eq!(Theirs::of(&path).code, 0);
    assert!(images.qemu_img(&["info", "image"]).contains("in-use"));
}

#[test]
fn an_entry_of_rubbish_does_not_become_zeroes_because_one_of_its_bits_says_so() {
    let images = Images::new();
    let mut runtime = runtime();
    let good = image(&images, "");
    let table = l2_table(&good);
    let lost = word(&good, table + 8) & OFFSET_MASK;
    // Not aligned and with the zero flag: with reserved bits, and without, as QEMU repairs it.
    for (entry, is_rubbish) in [(0xffff_ffff, true), (COPIED | lost | 513, false)] {
        let mut bytes = good.clone();
        put(&mut bytes, table + 8, &u64::to_be_bytes(entry));
        let (report, after) = repaired(&mut runtime, &bytes, Repair::All);
        assert_eq!(report.corruptions > 0, is_rubbish, "{entry:#x}: {report:?}");
        let emptied = says(&report, "read as zeroes now");
        assert_eq!(emptied, !is_rubbish, "{entry:#x}: {report:?}");
        assert!(refcount(&after, lost) > 0, "{entry:#x}: given back: {report:?}");
        if is_rubbish {
            assert_eq!(word(&after, l2_table(&after) + 8), entry, "{report:?}");
        }
    }
}
