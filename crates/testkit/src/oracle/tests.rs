use super::{Below, Content, Oracle, fill};

const SIZE: u64 = 16 << 10;

fn oracle() -> Oracle {
    Oracle::new(7, SIZE, Below { disk: 1, len: 4096 })
}

fn stamped(offset: u64, len: usize, disk: u16, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, offset, disk, number);
    bytes
}

#[test]
fn what_was_there_first_is_expected_until_it_is_overwritten() {
    let mut oracle = oracle();
    assert_eq!(oracle.after_crash(0, &stamped(0, 4096, 1, 0)), Ok(()));
    assert_eq!(oracle.after_crash(4096, &[0; 512]), Ok(()));
    assert!(oracle.after_crash(4096, &stamped(4096, 512, 1, 0)).is_err());
    let write = oracle.begin(0..1024, Content::Stamped);
    let bytes = oracle.bytes(&write);
    // Torn between its sectors.
    assert_eq!(oracle.after_crash(0, &stamped(0, 512, 1, 0)), Ok(()));
    assert_eq!(oracle.after_crash(512, &bytes[512..]), Ok(()));
    assert!(oracle.after_crash(0, &bytes[512..]).is_err(), "data of another place");
    let half = [&bytes[..256], &stamped(0, 512, 1, 0)[256..]].concat();
    assert!(oracle.after_crash(0, &half).is_err(), "torn inside a sector");
}

#[test]
fn acknowledged_is_seen_by_reads_and_flushed_by_crashes() {
    let mut oracle = oracle();
    let first = oracle.begin(512..1024, Content::Stamped);
    oracle.end(&first, true);
    let (old, new) = (stamped(512, 512, 1, 0), oracle.bytes(&first));
    let read = oracle.begin_read(512..1024);
    assert!(oracle.end_read(&read, &old).is_err());
    let read = oracle.begin_read(512..1024);
    assert_eq!(oracle.end_read(&read, &new), Ok(()));
    assert_eq!(oracle.after_crash(512, &old), Ok(()));
    let flush = oracle.begin_flush();
    let late = oracle.begin(512..1024, Content::Zero);
    oracle.end(&late, true);
    oracle.end_flush(&flush);
    assert!(oracle.after_crash(512, &old).is_err());
    assert_eq!(oracle.after_crash(512, &new), Ok(()));
    assert_eq!(oracle.after_crash(512, &[0; 512]), Ok(()));
    oracle.settle();
    assert!(oracle.after_crash(512, &new).is_err());
}

#[test]
fn overlapping_writes_may_come_in_either_order_and_failed_ones_not_at_all() {
    let mut oracle = oracle();
    let one = oracle.begin(0..512, Content::Stamped);
    let two = oracle.begin(0..512, Content::Stamped);
    let (one_bytes, two_bytes) = (oracle.bytes(&one), oracle.bytes(&two));
    oracle.end(&two, true);
    oracle.end(&one, true);
    oracle.settle();
    assert_eq!(oracle.after_crash(0, &one_bytes), Ok(()));
    assert_eq!(oracle.after_crash(0, &two_bytes), Ok(()));
    assert!(oracle.after_crash(0, &stamped(0, 512, 1, 0)).is_err());
    let failed = oracle.begin(0..512, Content::Stamped);
    oracle.end(&failed, false);
    oracle.settle();
    assert_eq!(oracle.after_crash(0, &one_bytes), Ok(()));
    assert_eq!(oracle.after_crash(0, &oracle.bytes(&failed)), Ok(()));
}

#[test]
fn parts_of_a_sector_are_judged_byte_by_byte() {
    let mut oracle = oracle();
    let part = oracle.begin(100..300, Content::Stamped);
    let bytes = oracle.bytes(&part);
    oracle.end(&part, true);
    let mut expected = stamped(0, 512, 1, 0);
    assert_eq!(oracle.after_crash(0, &expected), Ok(()));
    expected[100..300].copy_from_slice(&bytes);
    assert_eq!(oracle.after_crash(0, &expected), Ok(()));
    oracle.settle();
    assert_eq!(oracle.after_crash(0, &expected), Ok(()));
    assert!(oracle.after_crash(0, &stamped(0, 512, 1, 0)).is_err());
    let read = oracle.begin_read(90..310);
    assert_eq!(oracle.end_read(&read, &expected[90..310]), Ok(()));
    expected[40] ^= 1;
    assert!(oracle.after_crash(0, &expected).is_err());
}

#[test]
fn a_running_read_keeps_what_it_may_see() {
    let mut oracle = oracle();
    let read = oracle.begin_read(0..512);
    let write = oracle.begin(0..512, Content::Stamped);
    oracle.end(&write, true);
    oracle.settle();
    assert_eq!(oracle.end_read(&read, &stamped(0, 512, 1, 0)), Ok(()));
    assert!(oracle.after_crash(0, &stamped(0, 512, 1, 0)).is_err());
}

#[test]
fn cut_and_grown_again_is_zero() {
    let mut oracle = oracle();
    let write = oracle.begin(0..SIZE, Content::Stamped);
    oracle.end(&write, true);
    oracle.settle();
    oracle.resize(700);
    assert_eq!(oracle.touched().first(), Some(&(0..700)));
    oracle.resize(8192);
    let mut expected = vec![0; 8192];
    expected[..700].copy_from_slice(&stamped(0, 700, 7, 1));
    assert_eq!(oracle.after_crash(0, &expected), Ok(()));
    let count = std::cell::Cell::new(0);
    oracle
        .judge_crash(|at, bytes| {
            count.set(count.get() + bytes.len());
            bytes.copy_from_slice(&expected[usize::try_from(at).expect("small")..][..bytes.len()]);
            Ok(())
        })
        .expect("the same");
    assert_eq!(count.get(), 1024);
}

#[test]
fn what_a_power_cut_lost_is_not_made_durable_by_the_next_flush() {
    let mut oracle = oracle();
    let lost = oracle.begin(0..512, Content::Stamped);
    oracle.end(&lost, true);
    oracle.restart();
    oracle.settle();
    assert_eq!(oracle.after_crash(0, &stamped(0, 512, 1, 0)), Ok(()));
    let next = oracle.begin(0..512, Content::Zero);
    oracle.end(&next, true);
    oracle.settle();
    assert!(oracle.after_crash(0, &oracle.bytes(&lost)).is_err());
}

#[test]
fn what_runs_beside_a_restore_may_be_there_or_not() {
    let mut oracle = oracle();
    let kept = oracle.begin(0..512, Content::Stamped);
    oracle.end(&kept, true);
    oracle.settle();
    let then = oracle.clone();
    let lost = oracle.begin(0..512, Content::Stamped);
    oracle.end(&lost, true);
    oracle.settle();
    let beside = oracle.begin(0..512, Content::Zero);
    let mut oracle = oracle.restored_beside(&then);
    for expected in [oracle.bytes(&kept), vec![0; 512]] {
        assert_eq!(oracle.after_crash(0, &expected), Ok(()));
    }
    assert!(oracle.after_crash(0, &oracle.bytes(&lost)).is_err());
    oracle.end(&beside, false);
    oracle.settle();
    for expected in [oracle.bytes(&kept), vec![0; 512]] {
        let read = oracle.begin_read(0..512);
        assert_eq!(oracle.end_read(&read, &expected), Ok(()));
        assert_eq!(oracle.after_crash(0, &expected), Ok(()));
    }
    let next = oracle.begin(0..512, Content::Stamped);
    oracle.end(&next, true);
    oracle.settle();
    assert_eq!(oracle.after_crash(0, &oracle.bytes(&next)), Ok(()));
    assert!(oracle.after_crash(0, &[0; 512]).is_err());
}
