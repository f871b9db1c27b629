//! How many entries each queue has, and the memory of them.
//!
//! The arithmetic: the memory that entries may take is CPUs × depth × payload (1 MiB), taken when
//! it is touched. The depth is what the user says, else that of the rule [`DEPTH`]. A CPU that is
//! possible but offline gets [`DEPTH_OFFLINE`]: the kernel wants an entry in each queue, and the
//! CPU may come later.
//!
//! Promises: pure; every queue of the kernel has an entry. Which thread serves which queue is
//! decided in [`crate::placement`].

use ringdisk_export::DepthRule;

use crate::placement::{Placement, QueuePlace};

/// Bytes from one header to the next: the header, and the vector that REGISTER reads, in whole
/// cache lines.
pub(super) const HEADER_STRIDE: usize = 384;
pub(super) const PAGE_BYTES: usize = 4096;

/// What the headers of one queue take, bytes: whole pages.
pub(super) fn header_bytes(entries: usize) -> usize {
    (entries * HEADER_STRIDE).next_multiple_of(PAGE_BYTES)
}

/// Entries of a queue unless the user asks for more.
const DEPTH: DepthRule = DepthRule {
    // With fewer, requests wait in the kernel while the thread copies.
    min: 8,
    // As many as a deep client of one CPU keeps in flight.
    max: 64,
    memory_bytes: 1 << 30,
};
/// Entries of a CPU that is offline.
const DEPTH_OFFLINE: usize = 2;

/// One queue of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePlan {
    /// Number of the thread whose ring it registers with.
    pub(crate) thread: usize,
    pub(crate) entries: usize,
    /// The node that the memory of its entries shall be on.
    pub(crate) node: Option<usize>,
}

/// All queues, in the order of their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan(pub(crate) Vec<QueuePlan>);

impl Plan {
    /// * `depth`: entries for each queue; `None`: by the arithmetic above.
    /// * `payload_bytes`: of one entry.
    pub(crate) fn new(placement: &Placement, depth: Option<usize>, payload_bytes: usize) -> Plan {
        let by_memory = || DEPTH.depth(placement.queues.len(), payload_bytes);
        let depth = depth.unwrap_or_else(by_memory).max(1);
        let queue = |(number, queue): (usize, &QueuePlace)| {
            // Queue 0 may have callers on other CPUs too.
            let is_used = queue.is_online || number == 0 && !placement.folded.is_empty();
            QueuePlan {
                thread: queue.thread,
                entries: if is_used { depth } else { depth.min(DEPTH_OFFLINE) },
                node: placement.threads[queue.thread].memory_node,
            }
        };
        Plan(placement.queues.iter().enumerate().map(queue).collect())
    }

    /// What all entries take once every byte of them was used, without pools, bytes.
    pub(crate) fn memory_bytes_max(&self, payload_bytes: usize) -> usize {
        let queue = |entries| header_bytes(entries) + entries * payload_bytes;
        self.0.iter().map(|plan| queue(plan.entries)).sum()
    }

    /// Entries of all queues.
    pub(crate) fn entries(&self) -> usize {
        self.0.iter().map(|queue| queue.entries).sum()
    }
}

#[cfg(test)]
impl Plan {
    /// For a machine of one node with a thread on each CPU that runs: the first `online` of `cpus`.
    pub(super) fn of_cpus(cpus: usize, online: usize, depth: Option<usize>, bytes: usize) -> Plan {
        let all = format!("0-{}", cpus - 1);
        let running = format!("0-{}", online - 1);
        let machine = ringdisk_testkit::machine::Machine::new(&all, &running, &[(0, &all)]);
        let options = ringdisk_export::ThreadOptions::default();
        let placement = crate::placement::place(&machine.topology(), &options, true);
        Plan::new(&placement.expect("a placement"), depth, bytes)
    }
}
