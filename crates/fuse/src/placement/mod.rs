//! Where queue threads run, which queue of the kernel each of them serves, and on which node their
//! memory shall be.
//!
//! Promises: pure: a topology and the options of the user in, a placement out, so that machines
//! that are not at hand can be tested. Control path, before a mount.
//!
//! The rules. Threads are spread over the nodes, each with a CPU of its own as long as there are
//! enough (over io_uring it may leave it); a single one is left to the scheduler unless the user
//! names CPUs. The kernel has a queue for every possible CPU over io_uring: the thread on that CPU
//! serves it, else one of its node, else one of the nearest node that has a thread; among equals
//! the one with the fewest queues. Over `/dev/fuse` all threads share one input queue, so a request
//! cannot be sent to a node: threads are bound, and their buffers are on their node. What cannot be
//! had is a warning, with the one exception of a list of CPUs of which none can be used.

mod queues;

use ringdisk_export::{
    Error, Numa, OwnCpu, PlacementRule, THREADS_MAX, ThreadOptions, ThreadPlaces, Threads,
    place_threads,
};
use ringdisk_ring::{CpuList, Errno, Topology};

pub(crate) use queues::QueuePlace;

/// Threads that `auto` makes at most over `/dev/fuse`: more readers of one shared input queue only
/// get in each other's way.
pub const THREADS_AUTO_MAX_DEV: usize = 4;

/// Where one queue thread runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ThreadPlace {
    /// CPUs that it is bound to; empty: it runs where the scheduler wants.
    pub(crate) cpus: CpuList,
    /// CPUs that it may run on while it serves better so: those of its node; empty: it is not bound
    /// anyway.
    pub(crate) roam: CpuList,
    /// Those but its own.
    pub(crate) away: CpuList,
    /// The node of all CPUs that it may run on.
    pub(crate) node: Option<usize>,
    /// The node that its buffers are bound to; `None`: pages come from where it runs when it
    /// touches them.
    pub(crate) memory_node: Option<usize>,
}

/// A placement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) threads: Vec<ThreadPlace>,
    /// Queues of the kernel in the order of their numbers; none over `/dev/fuse`.
    pub(crate) queues: Vec<QueuePlace>,
    /// CPUs whose numbers are past the number of queues: the kernel puts their requests into
    /// queue 0.
    pub(crate) folded: CpuList,
    /// For each thread those that its entries may move to; itself where there is no other.
    pub(crate) beside: Vec<[usize; 2]>,
    /// What was asked for and could not be had.
    pub(crate) warnings: Vec<String>,
    /// What is worth knowing.
    pub(crate) remarks: Vec<String>,
}

impl Placement {
    /// Leaves memory unbound where the system refuses to bind it. That is a warning where it
    /// matters: with several nodes.
    ///
    /// * `nodes`: how many the machine has.
    /// * `bind`: binds something to a node.
    pub(crate) fn try_nodes(&mut self, nodes: usize, bind: impl Fn(usize) -> Result<(), Errno>) {
        let wanted: CpuList = self.threads.iter().filter_map(|thread| thread.memory_node).collect();
        for node in wanted.iter() {
            let Err(errno) = bind(node) else { continue };
            let line = format!("buffers could not be bound to node {node}: {errno}");
            let told = if nodes > 1 { &mut self.warnings } else { &mut self.remarks };
            told.push(line);
            for thread in &mut self.threads {
                thread.memory_node = thread.memory_node.filter(|bound| *bound != node);
            }
        }
    }
}

/// Places the threads and queues of a mount.
///
/// * `over_rings`: over io_uring; else over `/dev/fuse`.
///
/// Errors: [`ringdisk_export::ErrorKind::Usage`] for a list of CPUs of which none can be used.
pub(crate) fn place(
    topology: &Topology,
    options: &ThreadOptions,
    over_rings: bool,
) -> Result<Placement, Error> {
    let mut placement = Placement::default();
    let rule = PlacementRule {
        own: OwnCpu::Always,
        auto_max: if over_rings { THREADS_MAX } else { THREADS_AUTO_MAX_DEV },
        ..PlacementRule::default()
    };
    let ThreadPlaces { threads, usable } =
        place_threads(topology, options, &rule, &mut placement.warnings)?;
    let count = threads.len();
    let thread = |cpus: CpuList| {
        let node = topology.node_of_all(if cpus.is_empty() { &usable } else { &cpus });
        let may_bind = options.numa == Numa::Auto && !topology.has_memory_policy;
        let memory_node = node.filter(|node| may_bind && has_memory(topology, *node));
        let is_near = |cpu| options.numa == Numa::Off || topology.node_of(cpu) == node;
        let roam = if count == 1 { CpuList::default() } else { usable.filter(is_near) };
        let away = roam.filter(|cpu| !cpus.contains(cpu));
        ThreadPlace { cpus, roam, away, node, memory_node }
    };
    placement.threads = threads.into_iter().map(thread).collect();
    if options.numa == Numa::Auto {
        placement.remarks.extend(about_memory(topology, &placement.threads));
    }
    placement.beside = queues::beside(&placement.threads, options.numa);
    if over_rings {
        queues::place(topology, options, &usable, &mut placement);
    }
    Ok(placement)
}

/// Places the threads of a mount that another process was serving over `/dev/fuse`: as many as it
/// had, whatever has become of the machine meanwhile. Clients are waiting, so CPUs that cannot be
/// used any more are a warning.
///
/// * `count`: queues of the mount.
pub(crate) fn place_again(topology: &Topology, options: &ThreadOptions, count: usize) -> Placement {
    let options = ThreadOptions { threads: Threads::Count(count), ..options.clone() };
    place(topology, &options, false).unwrap_or_else(|error| {
        let anywhere = ThreadOptions { cpus: None, ..options };
        let mut placement = place(topology, &anywhere, false).unwrap_or_default();
        placement.threads.resize_with(count, ThreadPlace::default);
        placement.warnings.push(format!("{}; threads are on other CPUs", error.with_hint()));
        placement
    })
}

fn has_memory(topology: &Topology, node: usize) -> bool {
    topology.nodes.iter().any(|each| each.id == node && each.is_memory_usable)
}

/// Why buffers are not bound to the nodes of their threads.
fn about_memory(topology: &Topology, threads: &[ThreadPlace]) -> Option<String> {
    if topology.has_memory_policy {
        return Some(String::from(
            "buffers are where the memory policy says that was given to this process (numactl)",
        ));
    }
    let without: CpuList = threads
        .iter()
        .filter_map(|thread| thread.node)
        .filter(|node| !has_memory(topology, *node))
        .collect();
    (!without.is_empty()).then(|| {
        format!("no memory of node {without} for this process: its buffers are on other nodes")
    })
}

#[cfg(test)]
mod tests;
