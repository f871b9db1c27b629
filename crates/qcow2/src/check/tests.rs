//! The parts of a check that need no image file.

// Images of a few clusters.
#![allow(clippy::cast_possible_truncation)]

use crate::check::check_bytes;
use crate::check::counts::{Counts, OutOfMemory, REGION_CLUSTERS, TOTAL_MAX, Uses};
use crate::check::refcount;
use crate::check::report::{CheckHooks, CheckReport, CheckVerdict, MESSAGES_MAX};
use crate::check::source::Memory;
use crate::check::stop::Stop;
use crate::check::{examine, plan, read_header, tables};
use crate::header::Header;

use crate::check::scan::Scan;
use crate::units::{Bytes, HostCluster};

/// Runs something that never waits.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("memory never waits"),
    }
}

const CLUSTER: usize = 512;

/// Clusters of 512 bytes: header, refcount table, refcount block, L1 table, L2 table, then `data`
/// clusters, all in use; counts of 16 bits.
fn image(data: u64) -> Vec<u8> {
    let mut bytes = vec![0; CLUSTER * (5 + data as usize)];
    let put = |bytes: &mut Vec<u8>, at: usize, value: &[u8]| {
        bytes[at..at + value.len()].copy_from_slice(value);
    };
    put(&mut bytes, 0, b"QFI\xfb");
    put(&mut bytes, 4, &3u32.to_be_bytes());
    put(&mut bytes, 20, &9u32.to_be_bytes());
    put(&mut bytes, 24, &(64 * CLUSTER as u64).to_be_bytes());
    put(&mut bytes, 36, &1u32.to_be_bytes());
    put(&mut bytes, 40, &(3 * CLUSTER as u64).to_be_bytes());
    put(&mut bytes, 48, &(CLUSTER as u64).to_be_bytes());
    put(&mut bytes, 56, &1u32.to_be_bytes());
    put(&mut bytes, 96, &4u32.to_be_bytes());
    put(&mut bytes, 100, &104u32.to_be_bytes());
    put(&mut bytes, CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    for cluster in 0..5 + data as usize {
        put(&mut bytes, 2 * CLUSTER + 2 * cluster, &1u16.to_be_bytes());
    }
    put(&mut bytes, 3 * CLUSTER, &((1 << 63) | (4 * CLUSTER as u64)).to_be_bytes());
    for cluster in 0..data as usize {
        let entry = 1 << 63 | ((5 + cluster) * CLUSTER) as u64;
        put(&mut bytes, 4 * CLUSTER + 8 * cluster, &entry.to_be_bytes());
    }
    bytes
}

fn scan(bytes: &[u8]) -> (Header, CheckReport, Scan) {
    at_once(async {
        let source = Memory(bytes);
        let header = read_header(&source, "test").await.expect("a good header");
        let found = examine(&source, &header, CheckHooks::none()).await;
        let (report, scan, _) = found.expect("an image that can be checked");
        (header, report, scan)
    })
}

#[test]
fn a_small_image_made_by_hand_is_clean() {
    let report = check_bytes(&image(3)[..]).expect("a good image");
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.allocated_clusters, report.total_clusters), (3, 64));
    assert_eq!(report.image_end_offset, 8 * CLUSTER as u64);
}

#[test]
fn counts_stay_right_when_they_outgrow_their_narrow_form() {
    let mut counts = Counts::new(HostCluster(10 * REGION_CLUSTERS), Bytes(1 << 30)).expect("room");
    let one = Uses { total: 1, copied: 1, plain: 0 };
    let other = Uses { total: 1, copied: 0, plain: 1 };
    for round in 1..40 {
        counts.add_narrow(HostCluster(7), 0x11, one).expect("room");
        counts.add(HostCluster(8), other).expect("room");
        counts.add(HostCluster(9), Uses::unflagged(1)).expect("room");
        let flags = round.min(15);
        let uses = counts.get(HostCluster(7));
        assert_eq!((uses.total, uses.copied.min(15), uses.plain), (round, flags, 0));
        let uses = counts.get(HostCluster(8));
        assert_eq!((uses.total, uses.copied, uses.plain.min(15)), (round, 0, flags));
        assert_eq!(counts.get(HostCluster(9)), Uses::unflagged(round));
    }
    assert_eq!(counts.get(HostCluster(6)), Uses::default());
    counts.take_back(HostCluster(9), 38);
    assert_eq!(counts.get(HostCluster(9)), Uses::unflagged(1));
    counts.add(HostCluster(3 * REGION_CLUSTERS), Uses::unflagged(u32::MAX)).expect("room");
    assert_eq!(counts.get(HostCluster(3 * REGION_CLUSTERS)).total, TOTAL_MAX);
}

#[test]
fn counts_past_the_end_are_nothing() {
    let mut counts = Counts::new(HostCluster(10), Bytes(1 << 20)).expect("room");
    counts.add(HostCluster(10), Uses::unflagged(1)).expect("ignored");
    counts.add_narrow(HostCluster(u64::MAX), 1, Uses::unflagged(1)).expect("ignored");
    counts.take_back(HostCluster(u64::MAX), 1);
    assert_eq!(counts.get(HostCluster(10)), Uses::default());
    assert_eq!(counts.get(HostCluster(u64::MAX)), Uses::default());
}

#[test]
fn counts_end_with_an_error_at_their_limit() {
    assert_eq!(Counts::new(HostCluster(u64::MAX), Bytes(1 << 30)).err(), Some(OutOfMemory));
    let limit = 1 << 20;
    // The directory alone would take all of it.
    assert_eq!(Counts::new(HostCluster(1 << 30), Bytes(limit)).err(), Some(OutOfMemory));
    let mut counts =
        Counts::new(HostCluster(1 << 24), Bytes(limit)).expect("room for the directory");
    let full = (0..1 << 12).find(|region| {
        counts.add(HostCluster(region * REGION_CLUSTERS), Uses::unflagged(1)).is_err()
    });
    assert!(full.is_some_and(|region| region > 64), "{full:?}");
    assert!(counts.bytes() <= Bytes(4 * limit), "{} bytes", counts.bytes());
}

#[test]
fn refcounts_of_every_width_come_back() {
    for order in 0..=6u32 {
        let mut block = vec![0; 64];
        let max = u64::MAX >> (64 - (1u32 << order));
        let count = 512 >> order;
        let value = |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & max;
        for index in 0..count {
            refcount::set(&mut block, order, index, value(index));
        }
        for index in 0..count {
            assert_eq!(refcount::get(&block, order, index), value(index), "{order}, {index}");
        }
        refcount::set(&mut block, order, count, max);
        assert_eq!(refcount::get(&block, order, count), 0);
    }
    // The first count of less than a byte is in the low bits.
    let mut block = vec![0; 2];
    refcount::set(&mut block, 1, 0, 3);
    refcount::set(&mut block, 1, 5, 1);
    assert_eq!(block, [3, 4]);
}

#[test]
fn a_snapshot_entry_gets_the_sizes_that_it_lacks() {
    let mut entry = vec![0; 40];
    entry[12..16].copy_from_slice(&[0, 1, 0, 3]);
    entry[32..36].copy_from_slice(&77u32.to_be_bytes());
    entry.extend_from_slice(b"1one");
    let done = tables::completed(&entry, 1, &[], Bytes(4096));
    assert_eq!(done.len(), 40 + 16 + 4);
    assert_eq!(done[36..40], 16u32.to_be_bytes());
    assert_eq!(done[40..56], [77u64.to_be_bytes(), 4096u64.to_be_bytes()].concat());
    assert_eq!(&done[56..], b"1one");
    assert_eq!(tables::completed(&done, 1, &[], Bytes(1)), done);
}

#[test]
fn a_storage_that_cannot_grow_and_is_full_has_no_place_for_new_structures() {
    let bytes = image(4);
    let (_, _, mut scan) = scan(&bytes);
    let mut plan = plan::Plan::new(&mut scan, Some(HostCluster(9)));
    assert!(matches!(plan.allocate(1, 1), Err(Stop::Full)));
    let (_, _, mut scan) = self::scan(&bytes);
    let mut plan = plan::Plan::new(&mut scan, Some(HostCluster(12)));
    assert_eq!(plan.allocate(2, 1).expect("two are left"), HostCluster(9));
    assert!(matches!(plan.allocate(2, 1), Err(Stop::Full)));
    assert_eq!(plan.allocate(1, 1).expect("one is left"), HostCluster(11));
}

#[test]
fn new_structures_keep_away_from_what_points_past_the_end() {
    let mut bytes = image(4);
    // The guest's clusters 1 and 2 are gone; one entry is for the first cluster past the end.
    bytes[4 * CLUSTER + 8..4 * CLUSTER + 24].fill(0);
    let stray = (1u64 << 63) | (9 * CLUSTER as u64);
    bytes[4 * CLUSTER + 24..4 * CLUSTER + 32].copy_from_slice(&stray.to_be_bytes());
    let (_, report, mut scan) = scan(&bytes);
    assert!(report.corruptions > 0);
    let mut plan = plan::Plan::new(&mut scan, None);
    let places: Vec<HostCluster> = (0..4).map(|_| plan.allocate(1, 1).expect("it grows")).collect();
    assert_eq!(places, [6, 7, 8, 10].map(HostCluster));
}

#[test]
fn messages_have_a_limit_and_the_rest_is_counted() {
    let mut report = CheckReport::default();
    for _ in 0..MESSAGES_MAX + 5 {
        report.leak(1, || "one more".to_owned());
    }
    assert_eq!((report.messages.len(), report.messages_left_out), (MESSAGES_MAX, 5));
    assert_eq!(report.verdict(), CheckVerdict::Leaks);
}

#[test]
fn the_verdict_is_that_of_the_worst_finding() {
    let mut report = CheckReport::default();
    assert_eq!(report.verdict().exit_code(), 0);
    report.leaks = 1;
    assert_eq!(report.verdict().exit_code(), 3);
    report.corruptions = 1;
    assert_eq!(report.verdict().exit_code(), 2);
    report.check_errors = 1;
    assert_eq!(report.verdict().exit_code(), 1);
}
