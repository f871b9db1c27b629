//! What is read of machines that are not at hand: sparse, half offline, without NUMA, restricted.

use ringdisk_ring::Topology;
use ringdisk_testkit::machine::Machine;

/// (number, CPUs) of each node.
fn nodes(topology: &Topology) -> Vec<(usize, String)> {
    topology.nodes.iter().map(|node| (node.id, node.cpus.to_string())).collect()
}

#[test]
fn this_machine_has_a_node_and_a_cpu_that_may_be_used() {
    let topology = Topology::read();
    let cpu = topology.allowed.first().expect("a CPU");
    assert!(topology.online.contains(cpu) && topology.possible.contains(cpu), "{topology:?}");
    assert!(topology.node_of(cpu).is_some(), "{topology:?}");
    assert!(topology.nodes.iter().any(|node| node.memory_bytes > 0), "{topology:?}");
}

#[test]
fn sparse_numbers_of_cpus_and_nodes_are_kept() {
    let topology = Machine::new("0-1,4-5", "0-1,4-5", &[(0, "0-1"), (3, "4-5")]).topology();
    assert_eq!(topology.possible.len(), 4);
    assert_eq!(nodes(&topology), [(0, String::from("0-1")), (3, String::from("4-5"))]);
    assert_eq!((topology.node_of(5), topology.node_of(2)), (Some(3), None));
    assert_eq!(topology.nodes[1].memory_bytes, 1 << 30);
}

#[test]
fn the_node_of_a_cpu_that_is_offline_is_known_by_its_link() {
    let topology = Machine::new("0-7", "0-2,4", &[(0, "0-3"), (1, "4-5")]).topology();
    assert_eq!((topology.node_of(3), topology.node_of(5)), (Some(0), Some(1)));
    // Never there: nobody knows yet.
    assert_eq!(topology.node_of(7), None);
    assert_eq!(topology.allowed.to_string(), "0-2,4");
}

#[test]
fn a_cpuset_restricts_cpus_and_memory() {
    let machine = Machine::even(8, 2).allow("1-2,6", "1");
    let topology = machine.topology();
    assert_eq!(topology.allowed.to_string(), "1-2,6");
    let usable: Vec<bool> = topology.nodes.iter().map(|node| node.is_memory_usable).collect();
    assert_eq!(usable, [false, true]);
}

#[test]
fn a_node_without_memory_is_no_place_for_buffers() {
    let machine = Machine::even(4, 2);
    machine.write("sys/devices/system/node/has_memory", "0");
    let usable = machine.topology().nodes.iter().map(|n| n.is_memory_usable).collect::<Vec<_>>();
    assert_eq!(usable, [true, false]);
}

#[test]
fn a_kernel_without_numa_has_one_node_with_all_cpus() {
    let machine = Machine::even(4, 1);
    machine.remove("sys/devices/system/node");
    let topology = machine.topology();
    assert_eq!(nodes(&topology), [(0, String::from("0-3"))]);
    assert!(topology.nodes[0].is_memory_usable);
}

#[test]
fn with_nothing_to_read_there_is_still_a_cpu() {
    let empty = tempfile::tempdir().expect("a directory");
    let topology = Topology::read_under(empty.path());
    let cpus = [&topology.possible, &topology.online, &topology.allowed];
    assert!(cpus.iter().all(|cpus| cpus.to_string() == "0"), "{topology:?}");
    assert_eq!(topology.node_of(0), Some(0));
}

#[test]
fn the_first_cpus_of_a_spread_lie_on_all_nodes() {
    let topology = Machine::new("0-9", "0-9", &[(0, "0-2"), (3, "8-9")]).topology();
    let cpus = "0-2,8-9".parse().expect("a list");
    assert_eq!(topology.spread(&cpus), [0, 8, 1, 9, 2]);
    // Those of unknown nodes are not lost.
    assert_eq!(topology.spread(&"0,5,8".parse().expect("a list")), [0, 8, 5]);
}

#[test]
fn distances_are_told_by_node_number() {
    let topology =
        Machine::new("0-7", "0-7", &[(0, "0-1"), (1, "2-3"), (4, "4-5"), (5, "6-7")]).topology();
    assert_eq!((topology.distance(0, 0), topology.distance(0, 1)), (10, 12));
    assert_eq!((topology.distance(4, 0), topology.distance(4, 5)), (21, 12));
    assert_eq!(topology.distance(0, 9), u32::MAX);
}
