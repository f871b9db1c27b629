//! Reference counts and free space: cases by hand. The random ones are in `model.rs`.

use super::marks::{BITS_MAX, BITS_MIN, Marks};
use super::named_clusters::{CHUNK_CLUSTERS, CHUNKS_MAX, Named};
use super::width::Width;
use super::{Blocked, DirtyTable, RefcountParts, Refcounts, Run};
use crate::units::{Bytes, HostCluster, HostOffset};

/// An image with clusters of 64 KiB and counts of 16 bits: header, table, one block, and `used`
/// clusters behind them.
pub(super) fn image(used: u64) -> Refcounts {
    small(16, 4, used, true)
}

/// As [`image`], for any size of clusters and counts.
pub(super) fn small(cluster_bits: u32, order: u32, used: u64, can_grow: bool) -> Refcounts {
    let file_len = if can_grow { (3 + used) << cluster_bits } else { 4096 << cluster_bits };
    let mut refcounts = Refcounts::new(RefcountParts {
        cluster_bits,
        refcount_order: order,
        table: vec![HostOffset(2 << cluster_bits)],
        table_offset: HostOffset(1 << cluster_bits),
        table_clusters: 1,
        file_len: Bytes(file_len),
        can_grow,
        reads_zero_past_end: can_grow,
        disk_clusters: 0,
    });
    let mut bytes = vec![0; 1 << cluster_bits];
    for index in 0..3 + usize::try_from(used).expect("small") {
        Width::new(order).set(&mut bytes, index, 1);
    }
    refcounts.put_block(0, &bytes);
    refcounts
}

fn run(start: u64, count: u64, zeroed: bool) -> Run {
    Run { start: HostCluster(start), count, zeroed }
}

#[test]
fn counts_of_every_width_lie_where_the_specification_says() {
    for order in 0..=6 {
        let width = Width::new(order);
        let mut bytes = [0; 64];
        width.set(&mut bytes, 3, width.max());
        width.set(&mut bytes, 4, 1);
        let expected: [u8; 5] = match order {
            0 => [0b1_1000, 0, 0, 0, 0],
            1 => [0b1100_0000, 1, 0, 0, 0],
            2 => [0, 0xf0, 1, 0, 0],
            3 => [0, 0, 0, 0xff, 1],
            _ => [0; 5],
        };
        let (start, end) = width.bytes_of(3, 5);
        assert_eq!(bytes[..5], expected[..5], "order {order}");
        assert!(bytes[..start].iter().chain(&bytes[end..]).all(|byte| *byte == 0));
        assert_eq!((width.get(&bytes, 2), width.get(&bytes, 3)), (0, width.max()));
        assert_eq!((width.get(&bytes, 4), width.get(&bytes, 5)), (1, 0));
        assert_eq!((width.next_zero(&bytes, 3, 8), width.next_used(&bytes, 0, 8)), (5, 3));
    }
}

#[test]
fn searches_go_over_whole_chunks_and_find_the_single_exception() {
    for order in 0..=6 {
        let width = Width::new(order);
        let counts = (8 * 512) >> order;
        let mut bytes = [0; 512];
        (0..counts).for_each(|index| width.set(&mut bytes, index, 1));
        assert_eq!(width.next_zero(&bytes, 0, counts), counts);
        width.set(&mut bytes, counts - 3, 0);
        assert_eq!(width.next_zero(&bytes, 1, counts), counts - 3);
        let mut bytes = [0; 512];
        assert_eq!(width.next_used(&bytes, 1, counts), counts);
        width.set(&mut bytes, counts - 2, 1);
        assert_eq!(width.next_used(&bytes, 0, counts), counts - 2);
    }
}

#[test]
fn new_clusters_come_from_the_end_and_read_as_zeroes() {
    let mut refcounts = image(5);
    assert_eq!(refcounts.allocate(1, None, false), Ok(run(8, 1, true)));
    assert_eq!(refcounts.allocate(16, None, false), Ok(run(9, 16, true)));
    assert_eq!(refcounts.get(HostCluster(24)), Ok(1));
    assert_eq!(refcounts.get(HostCluster(25)), Ok(0));
    assert_eq!(refcounts.allocate(2, Some(HostCluster(25)), true), Ok(run(25, 2, true)));
}

#[test]
fn freed_clusters_are_not_allocatable_before_they_are_released() {
    let mut refcounts = image(5);
    let mut freed = Vec::new();
    assert_eq!(refcounts.decrement(HostCluster(4), 2, &mut freed), Ok(()));
    assert_eq!(freed, [run(4, 2, false)]);
    assert_eq!(refcounts.allocate(1, None, false), Ok(run(8, 1, true)));
    refcounts.release(run(4, 2, true));
    assert_eq!(refcounts.allocate(1, None, false), Ok(run(4, 1, true)));
    assert_eq!(refcounts.allocate(1, Some(HostCluster(9)), false), Ok(run(9, 1, true)));
    assert_eq!(refcounts.allocate(1, Some(HostCluster(5)), false), Ok(run(5, 1, true)));
}

#[test]
fn adjacent_free_runs_merge_and_are_zeroed_only_when_both_are() {
    let mut refcounts = image(9);
    let mut freed = Vec::new();
    refcounts.decrement(HostCluster(4), 4, &mut freed).expect("counted");
    refcounts.release(run(4, 1, true));
    refcounts.release(run(6, 2, true));
    refcounts.release(run(5, 1, false));
    assert_eq!(refcounts.allocate(4, None, true), Ok(run(4, 4, false)));
}

#[test]
fn holes_of_an_opened_image_are_found_and_not_known_to_be_zero() {
    let mut refcounts = image(5);
    refcounts.decrement(HostCluster(6), 1, &mut Vec::new()).expect("counted");
    let dirty = refcounts.take_dirty();
    let mut again = small(16, 4, 5, true);
    again.blocks[0] = None;
    again.cached = 0;
    let mut bytes = vec![0; 1 << 16];
    bytes[..4096].copy_from_slice(&dirty.blocks[0].bytes);
    assert_eq!(again.allocate(1, None, false), Err(Blocked::Load(0)));
    again.put_block(0, &bytes);
    assert_eq!(again.allocate(1, None, false), Ok(run(6, 1, false)));
}

#[test]
fn counts_stay_inside_their_width_and_above_zero() {
    let mut refcounts = small(9, 1, 20, true);
    refcounts.increment(HostCluster(4), 3).expect("1 to 2");
    refcounts.increment(HostCluster(5), 1).expect("2 to 3");
    assert_eq!(refcounts.increment(HostCluster(4), 3), Err(Blocked::Overflow));
    assert_eq!(refcounts.get(HostCluster(4)), Ok(2));
    let mut freed = Vec::new();
    assert!(matches!(
        refcounts.decrement(HostCluster(22), 2, &mut freed),
        Err(Blocked::Corrupt(_))
    ));
    assert_eq!((freed.len(), refcounts.get(HostCluster(22))), (0, Ok(1)));
    assert!(matches!(
        refcounts.decrement(HostCluster(1 << 40), 1, &mut freed),
        Err(Blocked::Corrupt(_))
    ));
}

#[test]
fn metadata_is_never_handed_out() {
    let mut refcounts = image(2);
    refcounts.decrement(HostCluster(4), 1, &mut Vec::new()).expect("counted");
    refcounts.mark_metadata(HostCluster(4), 1);
    refcounts.release(run(4, 1, false));
    assert!(matches!(refcounts.allocate(1, None, false), Err(Blocked::Corrupt(_))));
    refcounts.unmark_metadata(HostCluster(4), 1);
    assert_eq!(refcounts.allocate(1, None, false), Ok(run(4, 1, false)));
    assert!(refcounts.is_metadata(HostCluster(2)) && !refcounts.is_metadata(HostCluster(3)));
    assert_eq!(refcounts.first_metadata(HostCluster(1), 9), Some(HostCluster(1)));
    assert_eq!(refcounts.first_metadata(HostCluster(3), 9), None);
}

#[test]
fn a_block_at_the_end_covers_itself() {
    // 64 clusters for each block.
    let mut refcounts = small(9, 6, 61, true);
    assert_eq!(refcounts.allocate(1, None, false), Err(Blocked::Create(1)));
    let cluster = refcounts.begin_block(1).expect("room");
    assert_eq!(cluster, HostCluster(64));
    refcounts.finish_block(1, cluster);
    assert_eq!(refcounts.get(HostCluster(64)), Ok(1));
    assert!(refcounts.is_metadata(HostCluster(64)));
    assert_eq!(refcounts.allocate(1, None, false), Ok(run(65, 1, true)));
    let dirty = refcounts.take_dirty();
    assert_eq!(dirty.blocks.len(), 1);
    assert_eq!((dirty.blocks[0].offset, dirty.blocks[0].bytes.len()), (HostOffset(64 << 9), 512));
    assert!(matches!(
        &dirty.table,
        DirtyTable::Entries(entries) if *entries == [(1, HostOffset(64 << 9))]
    ));
}

#[test]
fn a_block_that_could_not_be_written_leaves_its_cluster_free() {
    let mut refcounts = small(9, 6, 61, true);
    let cluster = refcounts.begin_block(1).expect("room");
    refcounts.abort_block(1, cluster);
    assert_eq!(refcounts.allocate(1, None, false), Err(Blocked::Create(1)));
    let cluster = refcounts.begin_block(1).expect("room");
    refcounts.finish_block(1, cluster);
    assert_eq!(refcounts.get(cluster), Ok(1));
}

#[test]
fn long_runs_reach_over_blocks_that_cover_less() {
    let mut refcounts = small(9, 6, 10, true);
    let short = with_blocks(&mut refcounts, |refcounts| refcounts.allocate(300, None, true));
    assert_eq!(short.map(|run| run.count), Ok(300));
    // A table of 512 bytes has 64 entries; 20 000 clusters need 313 blocks.
    let long = with_blocks(&mut refcounts, |refcounts| refcounts.allocate(20_000, None, true));
    assert_eq!(long.map(|run| run.count), Ok(20_000));
    let wants = refcounts.table_wants().expect("313 entries are more than 64");
    let table = with_blocks(&mut refcounts, |refcounts| refcounts.allocate(wants, None, true))
        .expect("room");
    assert_eq!(refcounts.move_table(table.start, wants), None);
    assert_eq!(refcounts.table_wants(), None);
    let dirty = refcounts.take_dirty();
    let DirtyTable::Whole { offset, bytes, clusters, old } = &dirty.table else {
        panic!("the table moved")
    };
    assert_eq!((*offset, *clusters), (table.start << 9, wants));
    assert_eq!(bytes.len() as u64, wants << 9);
    assert_eq!(*old, run(1, 1, false));
    refcounts.written(&dirty, true);
    assert!(!refcounts.is_metadata(HostCluster(1)) && !refcounts.is_dirty());
}

#[test]
fn what_was_not_written_is_dirty_again() {
    let mut refcounts = image(5);
    refcounts.allocate(1, None, false).expect("room");
    let dirty = refcounts.take_dirty();
    assert_eq!(dirty.blocks[0].bytes.len(), 4096);
    assert!(!refcounts.is_dirty());
    refcounts.written(&dirty, false);
    let again = refcounts.take_dirty();
    assert_eq!(again.blocks[0].bytes, dirty.blocks[0].bytes);
    refcounts.written(&again, true);
    assert!(!refcounts.is_dirty());
}

#[test]
fn a_device_hands_out_shorter_runs_and_is_full_in_the_end() {
    let mut refcounts = small(9, 6, 10, false);
    let mut total = 0;
    let full = loop {
        match with_blocks(&mut refcounts, |refcounts| refcounts.allocate(100, None, false)) {
            Ok(run) => total += run.count,
            Err(blocked) => break blocked,
        }
    };
    assert_eq!(full, Blocked::Full);
    // 4096 clusters: 13 in use, 63 more blocks.
    assert_eq!(total, 4096 - 13 - 63);
}

#[test]
fn a_block_that_counts_nothing_but_itself_can_be_dropped() {
    let mut refcounts = small(9, 6, 61, true);
    let run = with_blocks(&mut refcounts, |refcounts| refcounts.allocate(2, None, true));
    let run = run.expect("room");
    assert_eq!(run.start, HostCluster(65));
    assert_eq!(refcounts.drop_block(1), Ok(None));
    refcounts.decrement(HostCluster(65), 2, &mut Vec::new()).expect("counted");
    assert_eq!(refcounts.drop_block(1), Ok(Some((HostCluster(64), false))));
    assert_eq!((refcounts.block_offset(1), refcounts.get(HostCluster(64))), (None, Ok(0)));
    // The state on disk still has a block there.
    assert_eq!(refcounts.allocate(1, Some(HostCluster(64)), true), Err(Blocked::Create(1)));
    let cluster = refcounts.begin_block(1).expect("room");
    assert!(cluster > HostCluster(66));
}

#[test]
fn a_moved_block_is_written_whole_at_its_new_place() {
    let mut refcounts = image(5);
    let cluster = refcounts.allocate(1, None, false).expect("room").start;
    assert_eq!(refcounts.move_block(0, cluster), Some(HostCluster(2)));
    let dirty = refcounts.take_dirty();
    assert_eq!((dirty.blocks[0].offset, dirty.blocks[0].bytes.len()), (cluster << 16, 1 << 16));
    assert!(refcounts.is_metadata(cluster));
}

#[test]
fn a_search_brings_low_holes_before_the_end() {
    let mut refcounts = image(20);
    refcounts.change(HostCluster(4), 1, |_| 0);
    refcounts.change(HostCluster(9), 3, |_| 0);
    refcounts.search_below(HostCluster(23)).expect("loaded");
    assert_eq!(refcounts.allocate(2, None, true), Ok(run(9, 2, false)));
    assert_eq!(refcounts.allocate(1, None, true), Ok(run(4, 1, false)));
    assert_eq!(refcounts.allocate(1, None, true), Ok(run(11, 1, false)));
}

#[test]
fn counts_past_the_end_are_gone_round() {
    let mut refcounts = image(5);
    refcounts.increment(HostCluster(10), 1).expect("covered");
    assert_eq!(refcounts.allocate(4, None, true), Ok(run(11, 4, true)));
    // The clusters in between are found by the search.
    assert_eq!(refcounts.allocate(1, None, false), Ok(run(8, 1, false)));
}

/// Makes the blocks that a call asks for, as the engine does.
pub(super) fn with_blocks<T>(
    refcounts: &mut Refcounts,
    mut call: impl FnMut(&mut Refcounts) -> Result<T, Blocked>,
) -> Result<T, Blocked> {
    let mut calls = 0;
    loop {
        calls += 1;
        assert!(calls < 100_000, "no end in sight");
        match call(refcounts) {
            Err(Blocked::Create(mut index)) => {
                let cluster = loop {
                    match refcounts.begin_block(index) {
                        Ok(cluster) => break cluster,
                        Err(Blocked::Create(first)) => index = first,
                        Err(blocked) => return Err(blocked),
                    }
                };
                refcounts.finish_block(index, cluster);
            }
            other => return other,
        }
    }
}

#[test]
fn a_cluster_for_metadata_is_marked_when_it_is_taken() {
    let mut refcounts = image(5);
    let run = refcounts.allocate_metadata(1, None, false).expect("room");
    assert!(refcounts.is_metadata(run.start) && refcounts.marks().may_be(run.start));
    assert_eq!(refcounts.get(run.start), Ok(1));
    // One that an entry names is not taken, and not marked: neither past the end of the file,
    // where another one is taken,
    let mut refcounts = image(5);
    refcounts.note_named(run.start, 1);
    let other = refcounts.allocate_metadata(1, None, false).expect("room");
    assert_eq!(other.start, run.start + 1);
    assert!(!refcounts.is_metadata(run.start) && !refcounts.marks().may_be(run.start));
    // nor inside it, where data is.
    let mut refcounts = image(5);
    let taken = refcounts.allocate(1, None, false).expect("room");
    refcounts.give_back(taken.start, 1, false);
    refcounts.note_named(taken.start, 1);
    let refused = refcounts.allocate_metadata(1, None, false);
    assert!(matches!(refused, Err(Blocked::Corrupt(_))), "{refused:?}");
    assert!(!refcounts.is_metadata(taken.start) && !refcounts.marks().may_be(taken.start));
}

#[test]
fn a_mark_is_seen_until_it_is_cleared() {
    let marks = Marks::new(100);
    marks.set(HostCluster(63), 3);
    assert_eq!(
        (62..67).map(|at| marks.may_be(HostCluster(at))).collect::<Vec<_>>(),
        [false, true, true, true, false]
    );
    marks.clear(HostCluster(64), 1);
    assert!(
        marks.may_be(HostCluster(63))
            && !marks.may_be(HostCluster(64))
            && marks.may_be(HostCluster(65))
    );
    assert!(marks.may_have(HostCluster(60), 4) && !marks.may_have(HostCluster(66), 100));
}

#[test]
fn clusters_that_share_a_bit_are_never_missed() {
    let marks = Marks::new(1);
    marks.set(HostCluster(5), 1);
    marks.set(HostCluster(5 + BITS_MIN), 1);
    marks.clear(HostCluster(5 + BITS_MIN), 1);
    assert!(marks.may_be(HostCluster(5)) && marks.may_be(HostCluster(5 + BITS_MIN)));
    marks.clear(HostCluster(5), 1);
    assert!(marks.may_be(HostCluster(5 + BITS_MIN)), "the other one is still marked");
}

#[test]
fn any_number_of_clusters_takes_bounded_memory() {
    let marks = Marks::new(u64::MAX);
    assert_eq!(marks.bits(), BITS_MAX);
    marks.set(HostCluster(0), u64::MAX);
    assert!(marks.may_be(HostCluster(0)) && marks.may_be(HostCluster(u64::MAX)));
}

#[test]
fn what_is_named_is_found_until_it_is_removed() {
    let mut named = Named::default();
    named.insert(HostCluster(CHUNK_CLUSTERS - 2), 5);
    assert_eq!(named.first_in(HostCluster(0), CHUNK_CLUSTERS - 2), None);
    assert_eq!(named.first_in(HostCluster(0), u64::MAX), Some(HostCluster(CHUNK_CLUSTERS - 2)));
    named.remove(HostCluster(0), CHUNK_CLUSTERS + 1);
    assert_eq!(named.first_in(HostCluster(0), u64::MAX), Some(HostCluster(CHUNK_CLUSTERS + 1)));
    named.remove(HostCluster(CHUNK_CLUSTERS + 1), 2);
    assert_eq!(named.first_in(HostCluster(0), u64::MAX), None);
}

#[test]
fn what_is_named_takes_bounded_memory() {
    let mut named = Named::default();
    (0..CHUNKS_MAX as u64 + 10)
        .for_each(|chunk| named.insert(HostCluster(chunk * CHUNK_CLUSTERS), 1));
    assert_eq!(named.chunks(), CHUNKS_MAX);
    // Inside what is there already more clusters fit.
    named.insert(HostCluster(1), 1);
    assert_eq!(named.first_in(HostCluster(1), 1), Some(HostCluster(1)));
}
