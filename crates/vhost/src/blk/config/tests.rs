use super::{Config, RANGE_SECTORS_MAX, RANGES_MAX};

fn config() -> Config {
    Config {
        seg_max: 126,
        logical_block: 512,
        physical_block: 4096,
        min_transfer: 4096,
        optimal_transfer: 65536,
        discard_align: 4096,
        discard_max: u64::MAX,
        zeroes_max: 64 << 20,
        queues: 3,
        may_unmap: true,
    }
}

fn u32_at(space: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(space[at..at + 4].try_into().unwrap())
}

#[test]
fn fields_stand_where_the_specification_has_them() {
    let space = config().space(10 << 20, true);
    assert_eq!(u64::from_le_bytes(space[0..8].try_into().unwrap()), (10 << 20) / 512);
    assert_eq!(u32_at(&space, 12), 126);
    assert_eq!(u32_at(&space, 20), 512);
    assert_eq!((space[24], space[25]), (3, 0));
    assert_eq!(u16::from_le_bytes([space[26], space[27]]), 8);
    assert_eq!(u32_at(&space, 28), 128);
    assert_eq!((space[32], space[33]), (1, 0));
    assert_eq!(u16::from_le_bytes([space[34], space[35]]), 3);
    assert_eq!((u32_at(&space, 36), u32_at(&space, 40)), (RANGE_SECTORS_MAX, RANGES_MAX));
    assert_eq!(u32_at(&space, 44), 8);
    assert_eq!((u32_at(&space, 48), u32_at(&space, 52)), (131_072, RANGES_MAX));
    assert_eq!(space[56], 1);
    assert!(space[57..].iter().all(|byte| *byte == 0), "no secure erase, no zones");
}

#[test]
fn a_part_of_a_block_at_the_end_is_not_shown() {
    let large = Config { logical_block: 4096, ..config() };
    let space = large.space(8191, false);
    assert_eq!(u64::from_le_bytes(space[0..8].try_into().unwrap()), 8);
    assert_eq!((space[24], space[32]), (0, 0));
}
