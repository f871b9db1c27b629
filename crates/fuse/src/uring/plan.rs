//! How many entries each queue has, and which thread serves it.
//!
//! The arithmetic: the memory that entries may take is CPUs × depth × payload (1 MiB), taken when it is touched. The depth is what
//! the user says, else as many as keep that under [`MEMORY_BYTES_MAX`], from [`DEPTH_MIN`] to [`DEPTH_DEFAULT`]. A CPU that is
//! possible but offline gets [`DEPTH_OFFLINE`]: the kernel wants an entry in each queue, and the CPU may come later.

use std::fs;

use ringdisk_ring::Topology;

/// Entries of a queue where memory allows: as many as a deep client of one CPU keeps in flight.
const DEPTH_DEFAULT: usize = 64;
/// Entries of a queue at least: with fewer, requests wait in the kernel while the thread copies.
const DEPTH_MIN: usize = 8;
/// Entries of a CPU that is offline.
const DEPTH_OFFLINE: usize = 2;
/// What all payloads may take together unless the user asks for more.
const MEMORY_BYTES_MAX: usize = 1 << 30;

/// One queue of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePlan {
    /// Number of the thread whose ring it registers with.
    pub(crate) thread: usize,
    pub(crate) entries: usize,
}

/// All queues, in the order of their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan(pub(crate) Vec<QueuePlan>);

impl Plan {
    /// * `possible`: CPUs that the kernel counts.
    /// * `online`: those that run now, also where we may not.
    /// * `threads`: the CPU of each queue thread; at least one.
    /// * `depth`: entries for each queue; `None`: by the arithmetic above.
    /// * `payload_bytes`: of one entry.
    pub(crate) fn new(
        possible: usize,
        online: &[usize],
        threads: &[usize],
        depth: Option<usize>,
        payload_bytes: usize,
    ) -> Plan {
        let by_memory = MEMORY_BYTES_MAX / (possible.max(1) * payload_bytes.max(1));
        let depth = depth.unwrap_or(by_memory.clamp(DEPTH_MIN, DEPTH_DEFAULT)).max(1);
        let queue = |cpu: usize| {
            let at_home = threads.iter().position(|thread| *thread == cpu);
            QueuePlan {
                thread: at_home.unwrap_or(cpu % threads.len().max(1)),
                entries: if online.contains(&cpu) { depth } else { depth.min(DEPTH_OFFLINE) },
            }
        };
        Plan((0..possible).map(queue).collect())
    }

    /// Entries of all queues.
    pub(crate) fn entries(&self) -> usize {
        self.0.iter().map(|queue| queue.entries).sum()
    }
}

/// Number of CPUs that the kernel counts as possible: it wants a queue for each.
pub(crate) fn possible_cpus() -> usize {
    let list = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    ringdisk_ring::cpus_of_list(&list).len().max(1)
}

/// CPUs that run now.
pub(crate) fn online_cpus() -> Vec<usize> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    ringdisk_ring::cpus_of_list(&list)
}

/// For each queue thread the one beside it: the next on its own node, else the next.
///
/// * `threads`: the CPU of each.
pub(crate) fn beside(topology: &Topology, threads: &[usize]) -> Vec<usize> {
    let node = |cpu: usize| topology.nodes.iter().position(|(_, cpus)| cpus.contains(&cpu));
    let count = threads.len();
    let next = |index: usize| {
        let mut others = (1..count).map(|step| (index + step) % count);
        let first = others.clone().next().unwrap_or(index);
        others.find(|other| node(threads[*other]) == node(threads[index])).unwrap_or(first)
    };
    (0..count).map(next).collect()
}

/// Whether the kernel's module parameter allows FUSE over io_uring; `None`: this kernel does not have it.
pub(crate) fn is_enabled() -> Option<bool> {
    let text = fs::read_to_string("/sys/module/fuse/parameters/enable_uring").ok()?;
    Some(matches!(text.trim(), "Y" | "y" | "1"))
}

#[cfg(test)]
mod tests {
    use super::{Plan, QueuePlan, beside};
    use ringdisk_ring::Topology;

    const MIB: usize = 1 << 20;

    #[test]
    fn each_queue_is_served_at_home_where_there_is_a_thread() {
        let plan = Plan::new(4, &[0, 1, 2, 3], &[2, 0], Some(3), MIB);
        let threads: Vec<usize> = plan.0.iter().map(|queue| queue.thread).collect();
        assert_eq!(threads, [1, 1, 0, 1]);
        assert_eq!(plan.entries(), 12);
    }

    #[test]
    fn cpus_that_are_offline_get_two_entries() {
        let plan = Plan::new(3, &[0], &[0], Some(5), MIB);
        assert_eq!(plan.0[2], QueuePlan { thread: 0, entries: 2 });
        assert_eq!(plan.entries(), 9);
        assert_eq!(Plan::new(3, &[0], &[0], Some(1), MIB).entries(), 3);
    }

    #[test]
    fn the_thread_beside_is_on_the_same_node_if_there_is_one() {
        let topology = Topology { nodes: vec![(0, vec![0, 1]), (1, vec![2, 3]), (2, vec![4])] };
        assert_eq!(beside(&topology, &[0, 2, 4, 1, 3]), [3, 4, 3, 0, 1]);
        assert_eq!(beside(&topology, &[0]), [0]);
    }

    #[test]
    fn the_depth_follows_from_the_memory() {
        let depth = |cpus: usize| {
            let online: Vec<usize> = (0..cpus).collect();
            Plan::new(cpus, &online, &online, None, MIB).0[0].entries
        };
        assert_eq!([2, 16, 64, 128, 256].map(depth), [64, 64, 16, 8, 8]);
    }
}
