//! Checks and repairs bytes as a qcow2 image: both end, nothing gets worse, and a check of the
//! result says what the repair said.
//!
//! Some inputs are taken as they are. The others become an image with a sound header and tables
//! made from the input, so that the deeper code is reached without a corpus.

use std::cell::RefCell;

use ringdisk_qcow2::{CheckHooks, CheckOptions, Repair, check, check_bytes};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::sim::SimStorage;

/// Clusters of the image that [`sound_header`] makes: header, refcount table, refcount block, L1
/// table, snapshot table, L1 table of the snapshot, L2 tables, data.
const REFCOUNT_TABLE: u64 = 1;
const REFCOUNT_BLOCK: u64 = 2;
const L1: u64 = 3;
const SNAPSHOTS: u64 = 4;
const SNAPSHOT_L1: u64 = 5;
const TABLES: u64 = 6;
const DATA: u64 = 9;
const CLUSTERS: u64 = 30;

thread_local! {
    static RUNTIME: RefCell<Runtime> =
        RefCell::new(Runtime::new(Config::default()).expect("io_uring is needed"));
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((choice, rest)) = data.split_first() else { return };
    let bytes = if choice & 7 == 0 { rest.to_vec() } else { sound_header(*choice, rest) };
    let repair = if choice & 0x80 == 0 { Repair::All } else { Repair::Leaks };
    let Ok(before) = check_bytes(&bytes[..]) else { return };
    let sim = SimStorage::from_image(&bytes, 1);
    let result = RUNTIME.with_borrow_mut(|runtime| {
        let ring = runtime.ring().clone();
        let storage = sim.storage();
        let options = CheckOptions { repair };
        runtime.block_on(check(&ring, &storage, None, &options, CheckHooks::none()))
    });
    let Ok(report) = result else {
        assert!(sim.image() == bytes, "an error, and the image changed");
        return;
    };
    assert!(report.corruptions <= before.corruptions);
    assert!(before.corruptions > 0 || report.leaks <= before.leaks);
    let after = check_bytes(&sim.image()[..]).expect("it was just repaired");
    assert_eq!(after.verdict(), report.verdict());
    assert_eq!((after.corruptions, after.leaks), (report.corruptions, report.leaks));
}

/// An image whose header is right. Its tables are right too, but for the words that `rest` changes.
fn sound_header(choice: u8, rest: &[u8]) -> Vec<u8> {
    let extended = choice & 8 != 0;
    let cluster_bits: u32 = if extended { 14 } else { 9 };
    let cluster = 1u64 << cluster_bits;
    let order = rest.first().map_or(4, |byte| u32::from(byte % 7));
    let entry_words = if extended { 2 } else { 1 };
    let mut image = vec![0; (CLUSTERS * cluster) as usize];
    let mut put = |at: u64, bytes: &[u8]| {
        if let Some(target) = image.get_mut(at as usize..at as usize + bytes.len()) {
            target.copy_from_slice(bytes);
        }
    };
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &cluster_bits.to_be_bytes());
    let covered = cluster / 8 / entry_words * cluster;
    put(24, &(3 * covered).to_be_bytes());
    put(36, &3u32.to_be_bytes());
    put(40, &(L1 * cluster).to_be_bytes());
    put(48, &(REFCOUNT_TABLE * cluster).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    let snapshots = u32::from(choice & 16 != 0);
    put(60, &snapshots.to_be_bytes());
    put(64, &(SNAPSHOTS * cluster * u64::from(snapshots)).to_be_bytes());
    put(72, &(u64::from(extended) << 4).to_be_bytes());
    put(96, &order.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    put(REFCOUNT_TABLE * cluster, &(REFCOUNT_BLOCK * cluster).to_be_bytes());
    // All counts are one, as long as nothing is changed below: a byte of ones for each width.
    let ones = [0xff, 0x55, 0x11][order.min(2) as usize];
    for at in 0..CLUSTERS << order >> 3 {
        let last_of_its_count = order < 3 || (at + 1) % (1 << (order - 3)) == 0;
        let value = if order < 3 { ones } else { u8::from(last_of_its_count) };
        put(REFCOUNT_BLOCK * cluster + at, &[value]);
    }
    for table in 0..3 {
        put(L1 * cluster + 8 * table, &(1 << 63 | (TABLES + table) * cluster).to_be_bytes());
    }
    put(SNAPSHOTS * cluster, &(SNAPSHOT_L1 * cluster).to_be_bytes());
    put(SNAPSHOTS * cluster + 8, &1u32.to_be_bytes());
    put(SNAPSHOTS * cluster + 36, &(u32::from(choice & 32) / 2).to_be_bytes());
    for place in DATA..CLUSTERS {
        let at = TABLES * cluster + (place - DATA) * 8 * entry_words;
        put(at, &(1 << 63 | place * cluster).to_be_bytes());
        if extended {
            put(at + 8, &0xffff_u64.to_be_bytes());
        }
    }
    for change in rest.get(1..).unwrap_or_default().chunks_exact(8) {
        let raw = change[3..8].iter().fold(0, |raw, byte| raw << 8 | u64::from(*byte));
        // Any word of the metadata, most often at the start of a cluster.
        let inside = u64::from(change[1] % if change[2] & 64 == 0 { 24 } else { 64 }) * 8;
        let at = (1 + u64::from(change[0]) % (DATA - 1)) * cluster + inside;
        let place = raw % (CLUSTERS + 3) * cluster;
        let word = match change[2] % 8 {
            0 => place | 1 << 63,
            1 => place,
            2 => place | 1,
            3 => 1 << 62 | raw,
            4 => raw << 24,
            5 => (raw % 7) * 0x0001_0001_0001_0001,
            6 => 0,
            _ => (raw & 0xffff) << 32 | raw >> 16 & 0xffff,
        };
        put(at, &word.to_be_bytes());
    }
    if choice & 64 != 0 {
        let cut = rest.first().map_or(0, |byte| usize::from(*byte) * 3);
        image.truncate(image.len() - cut);
    }
    image
}
