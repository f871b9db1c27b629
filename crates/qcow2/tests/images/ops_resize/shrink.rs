//! A smaller disk needs no larger file.

use super::*;

/// Refcount blocks of an image, and how many of them count nothing.
fn blocks(bytes: &[u8]) -> (usize, usize) {
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let cluster = 1usize << bytes[23];
    let table = word(48) as usize;
    let len = u32::from_be_bytes(bytes[56..60].try_into().expect("4 bytes")) as usize * cluster;
    let blocks: Vec<usize> = (0..len / 8).map(|n| word(table + 8 * n) as usize).collect();
    let named = blocks.iter().filter(|block| **block != 0);
    let empty = |block: &&usize| {
        bytes.get(**block..**block + cluster).is_none_or(|bytes| bytes.iter().all(|b| *b == 0))
    };
    (named.clone().count(), named.filter(empty).count())
}

#[test]
fn a_shrink_drops_refcount_blocks_that_count_nothing_and_lengthens_no_file() {
    for options in ["cluster_size=512", "cluster_size=512,refcount_bits=64", "cluster_size=4k", ""]
    {
        // Data all over, at the end only, and none.
        for (case, writes) in [
            ("all over", vec![(0, 16 * MIB)]),
            ("at the end", vec![(15 * MIB, MIB)]),
            ("in front", vec![(0, MIB)]),
            ("none", vec![]),
        ] {
            let mut subject = Subject::new(options, 16 * MIB);
            writes.iter().for_each(|(offset, len)| subject.write(1, *offset, *len));
            let len = |subject: &Subject| std::fs::metadata(subject.path()).expect("it").len();
            // The last cluster of a new image is cut.
            let cluster = 1 << std::fs::read(subject.path()).expect("it")[23];
            let before = len(&subject).next_multiple_of(cluster);
            let case = format!("{options}, {case}");
            subject.resize(MIB, Preallocation::Off).expect("a smaller disk");
            subject.check(&case);
            assert!(len(&subject) <= before, "{case}: {before} bytes became {}", len(&subject));
            let (all, empty) = blocks(&std::fs::read(subject.path()).expect("the image"));
            assert_eq!(empty, 0, "{case}: of {all} refcount blocks");
        }
    }
}

#[test]
fn a_shrink_with_bitmaps_lengthens_no_file_and_keeps_their_bits() {
    for options in ["cluster_size=512", "cluster_size=4k", "", "cluster_size=16k,extended_l2=on"] {
        // Space that is free in front of the bitmaps, or behind them.
        for late in [false, true] {
            let mut subject = Subject::new(options, 16 * MIB);
            let first = if late { 0 } else { 12 * MIB };
            subject.write(1, first, 2 * MIB);
            subject.images.qemu_img(&["bitmap", "--add", "-g", "512", NAME, "fine"]);
            subject.images.qemu_img(&["bitmap", "--add", NAME, "coarse"]);
            subject.images.qemu_img(&["bitmap", "--add", "--disable", NAME, "still"]);
            subject.write(2, 64 * KIB, 128 * KIB);
            subject.write(3, 8 * MIB, 64 * KIB);
            let cluster = 1u64 << std::fs::read(subject.path()).expect("it")[23];
            for size in [9 * MIB, 4 * MIB + 512, MIB] {
                let case = format!("{options}, late {late}, {size}");
                let names = ["fine", "coarse", "still"];
                let cut = |subject: &Subject, name| -> Vec<std::ops::Range<u64>> {
                    let ranges = changed(subject, name).into_iter();
                    let inside = ranges.filter(|range| range.start < size);
                    inside.map(|range| range.start..range.end.min(size)).collect()
                };
                let bits = names.map(|name| cut(&subject, name));
                let len = |subject: &Subject| std::fs::metadata(subject.path()).expect("it").len();
                let before = len(&subject).next_multiple_of(cluster);
                subject.resize(size, Preallocation::Off).expect("a smaller disk");
                subject.check(&case);
                assert!(len(&subject) <= before, "{case}: {before} became {}", len(&subject));
                assert_eq!(names.map(|name| cut(&subject, name)), bits, "{case}");
            }
        }
    }
}
