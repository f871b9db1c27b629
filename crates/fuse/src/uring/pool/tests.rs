use super::{Pool, PoolUses};
use crate::uring::Plan;

const MIB: usize = 1 << 20;
const ZERO_COPY: PoolUses = PoolUses { zero_copy: true, pinned: false };

fn plan(cpus: usize, online: usize, depth: Option<usize>) -> Plan {
    Plan::of_cpus(cpus, online, depth, MIB)
}

fn buffers(plan: &Plan, asked: bool) -> Vec<usize> {
    super::buffers(plan, asked, MIB).collect()
}

#[test]
fn few_buffers_for_many_entries_under_a_cap() {
    let of_first = |cpus| {
        let plan = plan(cpus, cpus, None);
        (plan.0[0].entries, buffers(&plan, false)[0])
    };
    assert_eq!([2, 4, 16, 64, 256].map(of_first), [(64, 32), (64, 32), (64, 8), (16, 4), (8, 4)]);
}

#[test]
fn what_the_user_asks_for_is_what_there_is() {
    assert_eq!(buffers(&plan(2, 2, Some(100)), true), [100, 100]);
    assert_eq!(buffers(&plan(2, 2, Some(1)), true), [1, 1]);
}

#[test]
fn a_cpu_that_is_offline_has_one_buffer() {
    assert_eq!(buffers(&plan(3, 2, None), false), [32, 32, 1]);
}

#[test]
fn regions_are_apart_and_a_buffer_outside_is_none() {
    let plan = plan(3, 2, Some(2));
    let pool = Pool::new(&plan, true, MIB, ZERO_COPY).expect("few entries");
    let regions: Vec<(u64, u32)> = (0..3).map(|queue| pool.region(queue)).collect();
    let start = regions[0].0;
    let mib = MIB as u64;
    assert_eq!(
        regions.iter().map(|region| region.0 - start).collect::<Vec<_>>(),
        [0, 2 * mib, 4 * mib]
    );
    assert_eq!(pool.buffer(0, 0), Some(0..MIB));
    assert_eq!(pool.buffer(1, 1 << 20), Some(3 * MIB..4 * MIB));
    assert_eq!(pool.buffer(0, 2 << 20), None);
    assert_eq!(pool.buffer(0, 1), Some(1..MIB + 1));
    assert_eq!(pool.buffer(0, u32::MAX), None);
    assert_eq!(pool.buffer(3, 0), None);
}

#[test]
fn more_entries_than_slots_have_no_zero_copy() {
    let plan = plan(64, 64, Some(256));
    assert!(Pool::new(&plan, true, 4096, ZERO_COPY).is_none());
    assert!(Pool::new(&plan, true, 4096, PoolUses::default()).is_some());
    assert_eq!(Pool::slot(0), 1);
}
