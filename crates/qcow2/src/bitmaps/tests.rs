use super::bits::Bits;
use super::directory::{AUTO, Entry, IN_USE, positions, to_bytes};
use super::tables::{is_too_large, table_entries};
use crate::units::{Bytes, GuestOffset, HostOffset};

fn bits(size: u64, granularity_bits: u32, marks: &[(u64, u64)]) -> Bits {
    let bits = Bits::new(Bytes(size), granularity_bits).expect("a small bitmap");
    marks.iter().for_each(|(offset, len)| bits.set(GuestOffset(*offset), Bytes(*len)));
    bits
}

fn ranges(bits: &Bits) -> Vec<(u64, u64)> {
    bits.ranges().map(|range| (range.start.0, range.end.0)).collect()
}

#[test]
fn a_mark_covers_every_unit_that_it_touches() {
    let bits = bits(1 << 20, 12, &[(4095, 2), (0x8000, 4096), (0x1_0001, 1)]);
    assert_eq!(ranges(&bits), [(0, 0x2000), (0x8000, 0x9000), (0x1_0000, 0x1_1000)]);
}

#[test]
fn marks_end_with_the_disk() {
    let bits = bits(10_000, 12, &[(9_999, 1), (10_000, 5), (u64::MAX, 5), (5, 0)]);
    assert_eq!((bits.count(), bits.bytes(), ranges(&bits)), (3, Bytes(1), vec![(8192, 10_000)]));
    bits.set(GuestOffset(0), Bytes::MAX);
    assert_eq!((bits.word(0), ranges(&bits)), (7, vec![(0, 10_000)]));
}

#[test]
fn long_marks_cross_words() {
    for (first, last) in [(0, 63), (1, 64), (63, 64), (5, 300), (64, 127), (0, 319)] {
        let bits = bits(320 << 9, 9, &[(first << 9, (last - first + 1) << 9)]);
        assert_eq!(ranges(&bits), [(first << 9, (last + 1) << 9)]);
    }
}

#[test]
fn words_from_a_file_are_cut_at_the_end() {
    let bits = bits(70 << 9, 9, &[]);
    bits.or_word(0, 1);
    bits.or_word(1, u64::MAX);
    bits.or_word(2, u64::MAX);
    assert_eq!((bits.words(), bits.word(1)), (2, 0x3f));
}

#[test]
fn merging_keeps_what_each_covers() {
    let coarse = bits(1 << 20, 16, &[(0x1_0000, 1)]);
    let fine = bits(1 << 20, 9, &[(0x2_0200, 512)]);
    fine.merge(&coarse);
    assert_eq!(ranges(&fine), [(0x1_0000, 0x2_0000), (0x2_0200, 0x2_0400)]);
    coarse.merge(&fine);
    assert_eq!(ranges(&coarse), [(0x1_0000, 0x3_0000)]);
}

#[test]
fn a_disk_without_bytes_has_no_bits() {
    let bits = bits(0, 16, &[(0, 10)]);
    assert_eq!((bits.count(), bits.words(), ranges(&bits)), (0, 0, vec![]));
}

#[test]
fn entries_are_padded_and_keep_extra_data() {
    let entry = |name: &str, extra: &[u8]| Entry {
        table_offset: HostOffset(0x1_0000),
        table_entries: 2,
        flags: IN_USE | AUTO,
        kind: 1,
        granularity_bits: 16,
        extra: extra.to_vec(),
        name: name.into(),
    };
    let entries = [entry("a", &[]), entry("name", &[7; 9])];
    let bytes = to_bytes(&entries);
    assert_eq!(positions(&entries).collect::<Vec<_>>(), [0, 32]);
    assert_eq!(bytes.len(), 32 + 40);
    assert_eq!(&bytes[..25], b"\0\0\0\0\0\x01\0\0\0\0\0\x02\0\0\0\x03\x01\x10\0\x01\0\0\0\0a");
    assert_eq!(&bytes[52..69], b"\0\0\0\x09\x07\x07\x07\x07\x07\x07\x07\x07\x07name");
}

#[test]
fn sizes_of_tables_and_the_limit() {
    assert_eq!(table_entries(Bytes(1 << 40), 16, 16), 32);
    assert_eq!(table_entries(Bytes(1), 16, 9), 1);
    // 512 MiB of bits.
    assert!(!is_too_large(Bytes(1 << 41), 9));
    assert!(is_too_large(Bytes((1 << 41) + 1), 9));
}
