use ringdisk_ring::{Errno, pages_by_node};
use ringdisk_testkit::machine::Machine;

use super::Rings;
use crate::placement::place;
use crate::uring::plan::Plan;
use crate::uring::{PoolUses, ZeroCopy};

const PAYLOAD: usize = 1 << 20;

/// Rings for a machine, with three entries for each queue.
fn rings(machine: &Machine) -> Rings {
    let placement = place(&machine.topology(), &ringdisk_export::ThreadOptions::default(), true)
        .expect("a placement");
    let plan = Plan::new(&placement, Some(3), PAYLOAD);
    Rings::new(plan, &placement, PAYLOAD, None, ZeroCopy::Off)
}

/// The policy of the mapping at an address, as the kernel shows it.
fn policy(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/numa_maps").ok()?;
    let start = |line: &&str| {
        let address = line.split(' ').next().unwrap_or_default();
        usize::from_str_radix(address, 16).unwrap_or(usize::MAX)
    };
    let line = maps.lines().take_while(|line| start(line) <= address).last()?;
    line.split(' ').nth(1).map(str::to_owned)
}

#[test]
fn all_memory_of_a_queue_is_bound_to_the_node_of_its_thread_before_it_is_touched() {
    for pool in [false, true] {
        let rings = rings(&Machine::even(2, 1));
        assert!(!pool || rings.make_pool(true, PAYLOAD, PoolUses::default()));
        match rings.bind_memory() {
            Err(Errno::PERM | Errno::NOSYS) => return,
            bound => bound.expect("this machine has node 0"),
        }
        for thread in 0..2 {
            let ranges = rings.memory_of(thread);
            // The headers, and three payloads or buffers.
            assert_eq!(ranges.len(), 4);
            let policies: Vec<_> = ranges.iter().map(|(start, _)| policy(*start)).collect();
            assert!(policies.iter().flatten().all(|policy| policy == "prefer:0"), "{policies:?}");
            let pages = pages_by_node(&ranges).expect("asked before");
            assert_eq!((pages.touched(), pages.untouched), (0, 3 * 256 + 1));
        }
        assert_eq!(rings.memory_bytes_max(PAYLOAD), 2 * (3 * PAYLOAD + 4096));
    }
}

#[test]
fn a_node_that_this_machine_does_not_have_is_refused() {
    let machine = Machine::new("0-1", "0-1", &[(512, "0-1")]);
    rings(&machine).bind_memory().expect_err("there is no node 512");
}

#[test]
fn with_pools_the_most_memory_is_that_of_the_buffers() {
    let rings = rings(&Machine::new("0-3", "0-1", &[(0, "0-3")]));
    assert!(rings.make_pool(true, PAYLOAD, PoolUses::default()));
    // Three buffers for each CPU that runs, one for the others.
    assert_eq!(rings.memory_bytes_max(PAYLOAD), (3 + 3 + 1 + 1) * PAYLOAD + 4 * 4096);
    let all: usize = (0..2).map(|thread| rings.memory_of(thread).len()).sum();
    assert_eq!(all, 8 + 4);
}
