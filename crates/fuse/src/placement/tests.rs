//! Placements on machines that are not at hand.

use ringdisk_ring::{CpuList, Errno};
use ringdisk_testkit::machine::Machine;

use super::{Placement, place};
use crate::topology::{MountTopology, Sizes, describe};
use crate::uring::Plan;
use ringdisk_export::{ErrorKind, Numa, ThreadOptions, Threads};

const MIB: usize = 1 << 20;

fn options(threads: Threads, cpus: &str, numa: Numa) -> ThreadOptions {
    let cpus = (!cpus.is_empty()).then(|| cpus.parse().expect("a list"));
    ThreadOptions { threads, cpus, numa }
}

fn over_rings(machine: &Machine, options: &ThreadOptions) -> Placement {
    place(&machine.topology(), options, true).expect("a placement")
}

fn auto(machine: &Machine) -> Placement {
    over_rings(machine, &ThreadOptions::default())
}

/// The CPU of each thread.
fn cpus(placement: &Placement) -> Vec<usize> {
    placement.threads.iter().filter_map(|thread| thread.cpus.only()).collect()
}

/// The CPU of the thread that serves each queue.
fn served_on(placement: &Placement) -> Vec<usize> {
    let cpus = cpus(placement);
    placement.queues.iter().map(|queue| cpus[queue.thread]).collect()
}

fn entries(placement: &Placement, depth: Option<usize>) -> Vec<usize> {
    Plan::new(placement, depth, MIB).0.iter().map(|queue| queue.entries).collect()
}

fn described(placement: &Placement, depth: Option<usize>) -> MountTopology {
    let plan = Plan::new(placement, depth, MIB);
    let sizes = Sizes { entries: 128, plan: Some(&plan), payload_bytes: MIB };
    describe(placement, Numa::Auto, sizes)
}

#[test]
fn on_one_node_each_queue_is_served_at_home() {
    let placement = auto(&Machine::even(2, 1));
    assert_eq!((cpus(&placement), served_on(&placement)), (vec![0, 1], vec![0, 1]));
    assert_eq!(placement.beside, [[1, 1], [0, 0]]);
    assert!(placement.threads.iter().all(|thread| thread.memory_node == Some(0)));
    assert!(placement.remarks.is_empty() && placement.warnings.is_empty(), "{placement:?}");
}

#[test]
fn a_single_thread_is_not_bound_and_serves_all() {
    let machine = Machine::even(8, 2);
    let placement = over_rings(&machine, &options(Threads::Count(1), "", Numa::Auto));
    assert!(placement.threads[0].cpus.is_empty());
    // It may run on both nodes, so its memory is left to where it runs.
    assert_eq!((placement.threads[0].node, placement.threads[0].memory_node), (None, None));
    assert_eq!((placement.queues.len(), placement.beside), (8, vec![[0, 0]]));
}

#[test]
fn fewer_threads_than_cpus_are_spread_over_the_nodes_and_serve_their_own() {
    let machine = Machine::even(8, 2);
    let placement = over_rings(&machine, &options(Threads::Count(4), "", Numa::Auto));
    assert_eq!(cpus(&placement), [0, 4, 1, 5]);
    // Evenly: two of the other queues of a node for each of its threads.
    assert_eq!(served_on(&placement), [0, 1, 0, 1, 4, 5, 4, 5]);
    assert_eq!(placement.beside, [[2, 2], [3, 3], [0, 0], [1, 1]]);
}

#[test]
fn sixty_four_cpus_on_four_nodes_each_have_their_thread() {
    let placement = auto(&Machine::even(64, 4));
    assert_eq!(served_on(&placement), (0..64).collect::<Vec<_>>());
    for thread in &placement.threads {
        let cpu = thread.cpus.only().expect("bound");
        assert_eq!((thread.node, thread.memory_node), (Some(cpu / 16), Some(cpu / 16)));
    }
    assert_eq!(entries(&placement, None), [16; 64]);
    // The neighbour that entries may move to is on the same node.
    let nodes: Vec<_> = placement.threads.iter().map(|thread| thread.node).collect();
    let beside = placement.beside.iter().map(|near| nodes[near[0]]);
    assert!(beside.eq(nodes.iter().copied()));
}

#[test]
fn of_two_hundred_and_fifty_six_cpus_no_queue_leaves_its_node() {
    let placement = auto(&Machine::even(256, 8));
    assert_eq!((placement.threads.len(), placement.queues.len()), (64, 256));
    for (cpu, thread_cpu) in served_on(&placement).into_iter().enumerate() {
        assert_eq!(cpu / 32, thread_cpu / 32, "queue {cpu} is served on CPU {thread_cpu}");
    }
    let mount = described(&placement, None);
    assert!(mount.threads.iter().all(|thread| thread.queues.len() == 4 && thread.entries == 32));
}

#[test]
fn sparse_cpus_have_as_many_queues_as_there_are_and_the_rest_share_queue_0() {
    let machine = Machine::new("0-1,4-5", "0-1,4-5", &[(0, "0-1"), (2, "4-5")]);
    let placement = auto(&machine);
    assert_eq!(cpus(&placement), [0, 4, 1, 5]);
    let queue_cpus: Vec<_> = placement.queues.iter().map(|queue| queue.cpu).collect();
    assert_eq!(queue_cpus, [Some(0), Some(1), None, None]);
    assert_eq!(placement.folded.to_string(), "4-5");
    assert_eq!(entries(&placement, Some(9)), [9, 9, 2, 2]);
    assert_eq!(
        placement.remarks,
        ["CPUs 4-5 past the 4 queues of the kernel: queue 0 takes their requests"]
    );
}

#[test]
fn queue_0_is_as_deep_as_others_when_only_its_guests_are_online() {
    let machine = Machine::new("0-1,4-5", "1,4", &[(0, "0-1,4-5")]);
    assert_eq!(entries(&auto(&machine), Some(9)), [9, 9, 2, 2]);
}

#[test]
fn cpus_that_are_offline_wait_with_two_entries_on_their_node() {
    let machine = Machine::new("0-7", "0-1,4-5", &[(0, "0-3"), (1, "4-7")]);
    let placement = auto(&machine);
    assert_eq!(served_on(&placement), [0, 1, 0, 1, 4, 5, 4, 5]);
    assert_eq!(entries(&placement, Some(5)), [5, 5, 2, 2, 5, 5, 2, 2]);
    assert_eq!(entries(&placement, Some(1)), [1; 8]);
    assert_eq!(
        placement.remarks,
        ["CPUs 2-3,6-7 are offline (8 possible, 4 online): queues are ready for their callers"]
    );
    assert_eq!(placement.warnings, [] as [&str; 0]);
}

#[test]
fn cpus_that_were_never_there_are_spread_over_all_threads() {
    let machine = Machine::new("0-5", "0-1", &[(0, "0"), (1, "1")]);
    assert_eq!(served_on(&auto(&machine)), [0, 1, 0, 1, 0, 1]);
}

#[test]
fn a_cpuset_without_cpu_0_serves_it_from_elsewhere_and_says_so() {
    let placement = auto(&Machine::even(4, 1).allow("1,3", "0"));
    assert_eq!((cpus(&placement), served_on(&placement)), (vec![1, 3], vec![1, 1, 3, 3]));
    assert_eq!(
        placement.remarks,
        ["CPUs 0,2 are outside the CPU mask of this process: their callers are served by \
             threads on 1,3"]
    );
    let one = auto(&Machine::even(2, 1).allow("1", "0"));
    assert_eq!((one.threads.len(), one.threads[0].node), (1, Some(0)));
    assert_eq!(
        one.remarks,
        ["CPU 0 is outside the CPU mask of this process: its callers are served by threads on 1"]
    );
}

#[test]
fn a_list_of_cpus_is_obeyed() {
    let machine = Machine::even(8, 2);
    let placement = over_rings(&machine, &options(Threads::Auto, "2-3,6", Numa::Auto));
    assert_eq!(cpus(&placement), [2, 6, 3]);
    assert_eq!(served_on(&placement), [2, 3, 2, 3, 6, 6, 6, 6]);
    assert!(placement.remarks[0].starts_with("CPUs 0-1,4-5,7 are left out by --cpus"));
    let one = over_rings(&machine, &options(Threads::Count(1), "2-3", Numa::Auto));
    assert_eq!((one.threads[0].cpus.to_string(), one.threads[0].node), ("2-3".into(), Some(0)));
    assert_eq!(one.threads[0].memory_node, Some(0));
    let more = over_rings(&machine, &options(Threads::Count(3), "5", Numa::Auto));
    assert_eq!(cpus(&more), [5, 5, 5]);
}

#[test]
fn cpus_of_a_list_that_cannot_be_used_are_warned_of_or_refused() {
    let machine = Machine::new("0-7", "0-3", &[(0, "0-7")]).allow("1-7", "0");
    let placement = over_rings(&machine, &options(Threads::Auto, "0-4,9", Numa::Auto));
    assert_eq!((cpus(&placement), placement.warnings.len()), (vec![1, 2, 3], 3));
    for rings in [true, false] {
        let options = options(Threads::Auto, "0,9", Numa::Auto);
        let error = place(&machine.topology(), &options, rings).expect_err("none");
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}

#[test]
fn with_numa_off_nodes_are_not_looked_at() {
    let machine = Machine::even(8, 2);
    let placement = over_rings(&machine, &options(Threads::Count(3), "", Numa::Off));
    assert_eq!(cpus(&placement), [0, 1, 2]);
    assert!(placement.threads.iter().all(|thread| thread.memory_node.is_none()));
    assert_eq!(served_on(&placement), [0, 1, 2, 0, 1, 2, 0, 1]);
    assert_eq!(placement.beside, [[1, 2], [2, 0], [0, 1]]);
}

#[test]
fn a_queue_without_a_thread_on_its_node_goes_to_the_nearest_one() {
    // Nodes 0 and 1 are near each other, 2 and 3 too.
    let machine = Machine::even(8, 4);
    let placement = over_rings(&machine, &options(Threads::Auto, "2,6", Numa::Auto));
    assert_eq!(served_on(&placement), [2, 2, 2, 2, 6, 6, 6, 6]);
}

#[test]
fn memory_is_bound_only_to_nodes_that_have_some_for_us() {
    let machine = Machine::even(4, 2).allow("0-3", "1");
    let placement = auto(&machine);
    let nodes = |placement: &Placement| {
        placement.threads.iter().map(|thread| thread.memory_node).collect::<Vec<_>>()
    };
    assert_eq!(nodes(&placement), [None, Some(1), None, Some(1)]);
    assert_eq!(
        placement.remarks,
        ["no memory of node 0 for this process: its buffers are on other nodes"]
    );
    let plan = Plan::new(&placement, Some(1), MIB);
    assert_eq!(plan.0.iter().map(|q| q.node).collect::<Vec<_>>(), [None, None, Some(1), Some(1)]);
    let mut topology = machine.topology();
    topology.has_memory_policy = true;
    let placement = place(&topology, &ThreadOptions::default(), true).expect("a placement");
    assert_eq!(nodes(&placement), [None; 4]);
    assert!(placement.remarks[0].contains("numactl"), "{placement:?}");
}

#[test]
fn more_threads_than_queues_are_told() {
    let placement = over_rings(&Machine::even(2, 1), &options(Threads::Count(5), "", Numa::Auto));
    assert_eq!(placement.threads.len(), 5);
    assert_eq!(placement.queues.iter().map(|queue| queue.thread).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(placement.warnings, ["5 threads for 2 queues of the kernel: 3 of them serve none"]);
    let over = over_rings(&Machine::even(2, 1), &options(Threads::Count(65), "", Numa::Auto));
    assert_eq!(over.threads.len(), 64);
    assert!(over.warnings[0].contains("64 queue threads instead of 65"), "{over:?}");
}

#[test]
fn over_dev_there_are_four_threads_spread_over_the_nodes_and_no_queues() {
    let topology = Machine::even(64, 4).topology();
    let placement = place(&topology, &ThreadOptions::default(), false).expect("a placement");
    assert_eq!(cpus(&placement), [0, 16, 32, 48]);
    assert!(placement.queues.is_empty() && placement.remarks.is_empty());
    let all = place(&topology, &options(Threads::Count(64), "", Numa::Auto), false).expect("all");
    assert_eq!(all.threads.len(), 64);
    assert_eq!(all.warnings, [] as [&str; 0]);
}

#[test]
fn each_queue_has_a_thread_whatever_the_machine_is() {
    for (possible, online, allowed) in [
        ("0", "0", "0"),
        ("0-255", "0-3", "2"),
        ("0-3,8-11,100", "1,9,100", "100"),
        ("5-8", "5-8", "5-8"),
        ("1023", "1023", "1023"),
        ("0-7", "0-7", "64"),
    ] {
        for threads in [Threads::Auto, Threads::Count(1), Threads::Count(3), Threads::Count(64)] {
            for numa in [Numa::Auto, Numa::Off] {
                let machine = Machine::new(possible, online, &[(1, online)]).allow(allowed, "1");
                let options = ThreadOptions { threads, cpus: None, numa };
                let placement = over_rings(&machine, &options);
                let count = CpuList::of_kernel(possible).len();
                assert_eq!(placement.queues.len(), count);
                assert_eq!(placement.beside.len(), placement.threads.len());
                let last = placement.threads.len();
                assert!(placement.queues.iter().all(|queue| queue.thread < last));
                assert!(placement.beside.iter().flatten().all(|thread| *thread < last));
                assert!(entries(&placement, None).iter().all(|entries| *entries >= 1));
            }
        }
    }
}

#[test]
fn the_depth_follows_from_the_memory() {
    let depth = |cpus: usize| entries(&auto(&Machine::even(cpus, 1)), None)[0];
    assert_eq!([2, 16, 64, 128, 256].map(depth), [64, 64, 16, 8, 8]);
}

/// Lines between two marks of docs/transports.md.
fn documented(mark: &str) -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/transports.md");
    let text = std::fs::read_to_string(path).expect("the documentation");
    let (begin, end) = (format!("<!-- {mark}:begin -->\n"), format!("<!-- {mark}:end -->"));
    let lines = text.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end));
    lines.expect("the marks").0.lines().skip(2).map(str::to_owned).collect()
}

fn size(bytes: usize) -> String {
    let mib = (bytes + MIB / 2) / MIB;
    // Tenths of a GiB.
    match ((mib * 10 + 512) / 1024, mib) {
        (tenths, 1024..) if tenths % 10 == 0 => format!("{} GiB", tenths / 10),
        (tenths, 1024..) => format!("{}.{} GiB", tenths / 10, tenths % 10),
        (_, mib) => format!("{mib} MiB"),
    }
}

/// Memory of a mount that has served nothing, as measured: see docs/transports.md.
fn idle_bytes(threads: usize, entries: usize) -> usize {
    ((1200 + 150 * threads + 9 * entries) << 10) + 48 * threads * entries
}

#[test]
fn the_table_of_memory_in_the_documentation_is_the_arithmetic() {
    let row = |cpus: usize| {
        let placement = auto(&Machine::even(cpus, 1));
        let plan = Plan::new(&placement, None, MIB);
        let threads = placement.threads.len();
        format!(
            "| {cpus} | {threads} | {} | {} | {} | {} |",
            plan.0[0].entries,
            size(idle_bytes(threads, plan.entries())),
            size(plan.memory_bytes_max(MIB)),
            size(crate::uring::pool_bytes(&plan, false, MIB)),
        )
    };
    let rows: Vec<String> = [2, 4, 8, 16, 32, 64, 128, 256].into_iter().map(row).collect();
    assert_eq!(documented("memory"), rows, "\n{}", rows.join("\n"));
}

#[test]
fn the_table_of_depths_in_the_documentation_is_the_arithmetic() {
    let row = |cpus: usize| {
        let placement = auto(&Machine::even(cpus, 1));
        let most = |depth| {
            let plan = Plan::new(&placement, Some(depth), MIB);
            assert_eq!(crate::uring::pool_bytes(&plan, true, MIB), plan.entries() * MIB);
            size(plan.memory_bytes_max(MIB))
        };
        format!("| {cpus} | {} |", [1, 8, 64, 128].map(most).join(" | "))
    };
    let rows: Vec<String> = [2, 16, 64, 256].into_iter().map(row).collect();
    assert_eq!(documented("depth"), rows, "\n{}", rows.join("\n"));
}

#[test]
fn the_summary_names_threads_cpus_nodes_queues_and_memory() {
    let mount = described(&auto(&Machine::even(4, 2)), Some(8));
    assert_eq!(
        mount.summary(),
        "4 queue threads on CPUs 0-3 (node 0-1), 4 queues of the kernel, 32 entries: at most 32 MiB"
    );
}

#[test]
fn a_refused_binding_is_a_warning_only_where_there_are_other_nodes() {
    let refuse = |node: usize| if node == 1 { Err(Errno::PERM) } else { Ok(()) };
    let mut placement = auto(&Machine::even(4, 2));
    placement.try_nodes(2, refuse);
    assert!(placement.warnings[0].contains("could not be bound to node 1"), "{placement:?}");
    let nodes: Vec<_> = placement.threads.iter().map(|thread| thread.memory_node).collect();
    assert_eq!(nodes, [Some(0), None, Some(0), None]);
    assert_eq!((placement.warnings.len(), placement.remarks.len()), (1, 0));
    let mut placement = auto(&Machine::new("0-1", "0-1", &[(1, "0-1")]));
    placement.try_nodes(1, refuse);
    assert!(placement.warnings.is_empty() && placement.remarks.len() == 1, "{placement:?}");
}
