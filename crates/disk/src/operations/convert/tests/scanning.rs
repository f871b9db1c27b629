use ringdisk_ring::IoBuf;

use crate::operations::convert::scan::{Part, scan};

/// What is found in a buffer of blocks of 512 bytes: a letter stands for data, a dot for zeroes.
fn parts(blocks: &str, sparse: usize) -> Vec<(usize, bool)> {
    let buf = IoBuf::new(blocks.len() * 512, 4096);
    for (number, block) in blocks.bytes().enumerate() {
        let value = if block == b'.' { 0 } else { block };
        // One byte is enough.
        buf.copy_from_slice(number * 512 + 300, &[value]);
    }
    let mut parts = vec![Part { range: 0..1, is_zero: true }];
    scan(&buf, sparse, &mut parts);
    let mut at = 0;
    for part in &parts {
        assert_eq!(part.range.start, at);
        at = part.range.end;
    }
    assert_eq!(at, buf.len());
    parts.into_iter().map(|part| (part.range.len() / 512, part.is_zero)).collect()
}

#[test]
fn runs_are_found_in_steps_of_the_sparse_size() {
    assert_eq!(parts("aa..aa", 512), [(2, false), (2, true), (2, false)]);
    assert_eq!(parts("...a", 512), [(3, true), (1, false)]);
    assert_eq!(parts("....", 512), [(4, true)]);
    assert_eq!(parts("aaaa", 512), [(4, false)]);
    // In steps of two blocks.
    assert_eq!(parts("a...", 1024), [(2, false), (2, true)]);
    assert_eq!(parts("a..a", 1024), [(4, false)]);
}

#[test]
fn runs_that_are_too_short_are_data() {
    let eight = "a.......";
    let zero = "........";
    // A step is 4 KiB, eight blocks.
    let blocks = [eight, zero, eight, zero, zero, eight].concat();
    assert_eq!(parts(&blocks, 4096).len(), 5);
    assert_eq!(parts(&blocks, 8192), [(24, false), (16, true), (8, false)]);
    assert_eq!(parts(&blocks, 1 << 20), [(48, false)]);
}

#[test]
fn a_short_run_at_the_end_may_go_on_in_the_next_buffer() {
    let blocks = ["aaaaaaaa", "........"].concat();
    assert_eq!(parts(&blocks, 1 << 20), [(8, false), (8, true)]);
}

#[test]
fn nothing_is_left_out_where_that_is_not_wanted() {
    assert_eq!(parts("....", 0), [(4, false)]);
}
