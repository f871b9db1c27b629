//! A placement for people: what a mount would get, and what a mount that serves has got.
//!
//! Promises: looks, and changes nothing: neither where a thread runs nor where a page is. What the
//! system does not tell is unknown, not an error. Control path.

use std::sync::Arc;

use ringdisk_export::stats::QueueCells;
use ringdisk_export::{Error, Numa, ThreadOptions, cpus_named};
use ringdisk_ring::{CpuList, Errno, NodePages, Topology, pages_by_node};

use crate::dev::entry_bytes;
use crate::negotiate::Profile;
use crate::placement::{Placement, ThreadPlace, place};
use crate::queue::{Buffers, QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX};
use crate::transport::{Transport, choose_transport};
use crate::uring::{Plan, RingMode};

/// Threads and queues of a mount.
#[derive(Clone, Debug)]
pub struct MountTopology {
    /// How requests travel: never [`Transport::Auto`].
    pub transport: Transport,
    /// What the rings do; `None` without rings. Before a mount, the least that they do.
    pub ring_mode: Option<RingMode>,
    /// Why not over io_uring, and what would change that.
    pub reason: Option<String>,
    /// Whether nodes matter.
    pub numa: Numa,
    /// Queue threads.
    pub threads: Vec<ThreadTopology>,
    /// Queues of the kernel; none over `/dev/fuse`, where all threads share one.
    pub queues: Vec<QueueTopology>,
    /// CPUs whose requests go to queue 0, since their numbers are past those of the queues.
    pub folded: CpuList,
    /// Largest READ and WRITE, bytes.
    pub payload_bytes: u64,
    /// What all buffers take once every byte of them was used, bytes. Before a mount, the most:
    /// with pools it is less.
    pub memory_bytes_max: u64,
    /// What was asked for and could not be had.
    pub warnings: Vec<String>,
    /// What is worth knowing.
    pub remarks: Vec<String>,
}

/// One queue thread.
#[derive(Clone, Debug)]
pub struct ThreadTopology {
    /// Its number.
    pub number: usize,
    /// CPUs that it shall be bound to; empty: it runs where the scheduler wants.
    pub asked: CpuList,
    /// The node of those CPUs, if they are on one.
    pub node: Option<usize>,
    /// The node that its buffers shall be on.
    pub memory_node: Option<usize>,
    /// Queues that it serves when entries are at home.
    pub queues: CpuList,
    /// Requests that it may serve at once when entries are at home.
    pub entries: usize,
    /// What is seen of it; `None` before it runs.
    pub seen: Option<Seen>,
}

/// What is seen of a thread that runs.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its id for the system.
    pub id: u64,
    /// CPUs that the kernel lets it run on; `None` once it has ended.
    pub allowed: Option<CpuList>,
    /// Where its buffers are. Errors: why the kernel does not tell.
    pub memory: Result<NodePages, Errno>,
}

/// One queue of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueTopology {
    /// Its number.
    pub number: usize,
    /// The CPU whose callers use it, if the machine has it.
    pub cpu: Option<usize>,
    /// That CPU ran when the mount was made.
    pub is_online: bool,
    /// Number of the thread that serves it.
    pub thread: usize,
    /// Requests that may be in it at once.
    pub entries: usize,
}

/// How much of everything a mount has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes<'a> {
    /// Entries of each thread over `/dev/fuse`.
    pub(crate) entries: usize,
    /// Those over io_uring.
    pub(crate) plan: Option<&'a Plan>,
    /// Largest READ and WRITE, bytes.
    pub(crate) payload_bytes: usize,
}

/// What a mount with these options would get on a machine.
///
/// * `transport`, `queue_depth`: as of a mount.
///
/// Errors: those of a mount with such options.
pub fn preview(
    topology: &Topology,
    options: &ThreadOptions,
    transport: Transport,
    queue_depth: Option<u32>,
) -> Result<MountTopology, Error> {
    let (over_rings, reason) = choose_transport(transport)?;
    let placement = place(topology, options, over_rings)?;
    let payload_bytes = Profile::detect(false).transfer_bytes() as usize;
    let depth = queue_depth.map(|depth| depth.clamp(1, QUEUE_DEPTH_MAX) as usize);
    let plan = over_rings.then(|| Plan::new(&placement, depth, payload_bytes));
    let entries = depth.unwrap_or(QUEUE_DEPTH_DEFAULT as usize);
    let sizes = Sizes { entries, plan: plan.as_ref(), payload_bytes };
    Ok(MountTopology { reason, ..describe(&placement, options.numa, sizes) })
}

/// A placement with sizes, before anything runs.
pub(crate) fn describe(placement: &Placement, numa: Numa, sizes: Sizes<'_>) -> MountTopology {
    let plans = sizes.plan.map_or(&[][..], |plan| &plan.0);
    let queue = |number: usize| QueueTopology {
        number,
        cpu: placement.queues[number].cpu,
        is_online: placement.queues[number].is_online,
        thread: plans[number].thread,
        entries: plans[number].entries,
    };
    let queues: Vec<QueueTopology> = (0..plans.len()).map(queue).collect();
    let thread = |(number, thread): (usize, &ThreadPlace)| {
        let own = || queues.iter().filter(|queue| queue.thread == number);
        ThreadTopology {
            number,
            asked: thread.cpus.clone(),
            node: thread.node,
            memory_node: thread.memory_node,
            queues: own().map(|queue| queue.number).collect(),
            entries: sizes.plan.map_or(sizes.entries, |_| own().map(|queue| queue.entries).sum()),
            seen: None,
        }
    };
    let threads: Vec<ThreadTopology> = placement.threads.iter().enumerate().map(thread).collect();
    let memory = match sizes.plan {
        Some(plan) => plan.memory_bytes_max(sizes.payload_bytes),
        None => threads.len() * sizes.entries * entry_bytes(sizes.payload_bytes),
    };
    MountTopology {
        transport: if sizes.plan.is_some() { Transport::Uring } else { Transport::Dev },
        ring_mode: sizes.plan.map(|_| RingMode::Entries),
        reason: None,
        numa,
        threads,
        queues,
        folded: placement.folded.clone(),
        payload_bytes: sizes.payload_bytes as u64,
        memory_bytes_max: memory as u64,
        warnings: placement.warnings.clone(),
        remarks: placement.remarks.clone(),
    }
}

impl MountTopology {
    /// The whole in one line.
    #[must_use]
    pub fn summary(&self) -> String {
        let count = self.threads.len();
        let threads = if count == 1 { "1 queue thread" } else { &format!("{count} queue threads") };
        let cpus: CpuList = self.threads.iter().flat_map(|thread| thread.asked.iter()).collect();
        let place = match cpus.is_empty() {
            true => String::from("not bound to a CPU"),
            false => format!("on {}", cpus_named(&cpus)),
        };
        let nodes: CpuList = self.threads.iter().filter_map(|thread| thread.node).collect();
        let queues = match self.queues.len() {
            0 => String::from("one input queue for all"),
            count => format!("{count} queues of the kernel"),
        };
        let entries: usize = self.threads.iter().map(|thread| thread.entries).sum();
        // The headers are next to nothing beside the payloads.
        let mib = (self.memory_bytes_max + (1 << 19)) >> 20;
        format!("{threads} {place} (node {nodes}), {queues}, {entries} entries: at most {mib} MiB")
    }
}

/// A thread that runs, as this module sees it.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) cells: Arc<QueueCells>,
    pub(crate) buffers: Arc<Buffers>,
}

/// Looks at the threads of a mount whenever it is called.
///
/// * `threads`: in the order of their numbers.
pub(crate) fn watch(
    mount: MountTopology,
    threads: Vec<Live>,
) -> impl Fn() -> MountTopology + Send + Sync + 'static {
    move || {
        let mut now = mount.clone();
        for (thread, live) in now.threads.iter_mut().zip(&threads) {
            let id = live.cells.thread_id.get();
            let status = std::fs::read_to_string(format!("/proc/self/task/{id}/status"));
            let allowed = status.ok().and_then(|status| {
                let line = |line: &str| line.strip_prefix("Cpus_allowed_list:").map(str::to_owned);
                status.lines().find_map(line).map(|list| CpuList::of_kernel(&list))
            });
            let memory = pages_by_node(&live.buffers.all());
            thread.seen = Some(Seen { id, allowed, memory });
        }
        now
    }
}
