//! Where queue threads run, which queue of the kernel each of them serves, and on which node their
//! memory shall be.
//!
//! Pure: a topology and the user's wishes in, a placement out, so that machines that are not at
//! hand can be tested. Control path, before a mount.
//!
//! The rules. Threads are spread over the nodes, each with a CPU of its own as long as there are
//! enough (over io_uring it may leave it); a single one is left to the scheduler unless the user
//! names CPUs. The kernel has a queue for every possible CPU over io_uring: the thread on that CPU
//! serves it, else one of its node, else one of the nearest node that has a thread; among equals
//! the one with the fewest queues. Over `/dev/fuse` all threads share one input queue, so a request
//! cannot be sent to a node: threads are bound, and their buffers are on their node. What cannot be
//! had is a warning, with the one exception of a list of CPUs of which none can be used.

mod describe;
mod queues;

use ringdisk_ring::{CpuList, Errno, Topology};

use crate::{Error, ErrorKind};

pub(crate) use describe::{Buffers, Live, Sizes, describe, watch};
pub use describe::{MountTopology, QueueTopology, Seen, ThreadTopology, preview};
pub(crate) use queues::QueuePlace;

/// Queues at most.
pub const THREADS_MAX: usize = 64;
/// Threads that `auto` makes at most over `/dev/fuse`: more readers of one shared input queue only
/// get in each other's way.
pub const THREADS_AUTO_MAX_DEV: usize = 4;

/// How many queue threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// One for each CPU that may be used, up to 4 over `/dev/fuse` and 64 over io_uring.
    #[default]
    Auto,
    /// This many, 1..=64.
    Count(usize),
}

/// Whether nodes matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// Queues are served on their node, and buffers are bound to it.
    #[default]
    Auto,
    /// Nodes are not looked at; memory comes from where the system takes it.
    Off,
}

/// What the user asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Queue threads.
    pub threads: Threads,
    /// CPUs for them; `None`: all that this process may use.
    pub cpus: Option<CpuList>,
    /// Whether nodes matter.
    pub numa: Numa,
}

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
/// Errors: [`ErrorKind::Usage`] for a list of CPUs with one that the machine does not have, or with
/// none that can be used.
pub(crate) fn place(
    topology: &Topology,
    wishes: &Wishes,
    over_rings: bool,
) -> Result<Placement, Error> {
    let mut placement = Placement::default();
    let usable = usable(topology, wishes.cpus.as_ref(), &mut placement.warnings)?;
    let order = match wishes.numa {
        Numa::Auto => topology.spread(&usable),
        Numa::Off => usable.iter().collect(),
    };
    let most = if over_rings { THREADS_MAX } else { THREADS_AUTO_MAX_DEV };
    let count = thread_count(wishes.threads, order.len(), most, &mut placement.warnings);
    let thread = |index: usize| {
        let cpus = match (count, &wishes.cpus) {
            (1, None) => CpuList::default(),
            (1, Some(_)) => usable.clone(),
            _ => [order[index % order.len()]].into_iter().collect(),
        };
        let node = topology.node_of_all(if cpus.is_empty() { &usable } else { &cpus });
        let may_bind = wishes.numa == Numa::Auto && !topology.has_memory_policy;
        let memory_node = node.filter(|node| may_bind && has_memory(topology, *node));
        let is_near = |cpu| wishes.numa == Numa::Off || topology.node_of(cpu) == node;
        let roam = if count == 1 { CpuList::default() } else { usable.filter(is_near) };
        let away = roam.filter(|cpu| !cpus.contains(cpu));
        ThreadPlace { cpus, roam, away, node, memory_node }
    };
    placement.threads = (0..count).map(thread).collect();
    if wishes.numa == Numa::Auto {
        placement.remarks.extend(about_memory(topology, &placement.threads));
    }
    placement.beside = queues::beside(&placement.threads, wishes.numa);
    if over_rings {
        queues::place(topology, wishes, &usable, &mut placement);
    }
    Ok(placement)
}

/// Places the threads of a mount that another process was serving over `/dev/fuse`: as many as it
/// had, whatever has become of the machine meanwhile. Clients are waiting, so CPUs that cannot be
/// used any more are a warning.
///
/// * `count`: queues of the mount.
pub(crate) fn place_again(topology: &Topology, wishes: &Wishes, count: usize) -> Placement {
    let wishes = Wishes { threads: Threads::Count(count), ..wishes.clone() };
    place(topology, &wishes, false).unwrap_or_else(|error| {
        let anywhere = Wishes { cpus: None, ..wishes };
        let mut placement = place(topology, &anywhere, false).unwrap_or_default();
        placement.threads.resize_with(count, ThreadPlace::default);
        placement.warnings.push(format!("{}; threads are on other CPUs", error.with_hint()));
        placement
    })
}

/// The CPUs that threads may be bound to; never empty.
fn usable(
    topology: &Topology,
    wanted: Option<&CpuList>,
    warnings: &mut Vec<String>,
) -> Result<CpuList, Error> {
    let Some(wanted) = wanted else { return Ok(topology.allowed.clone()) };
    let refuse = |text: String| Err(Error::new(ErrorKind::Usage, text));
    let missing = wanted.filter(|cpu| !topology.possible.contains(cpu));
    if !missing.is_empty() {
        return refuse(format!("--cpus {wanted}: this machine has no {}", name(&missing)))
            .map_err(|error| error.hint(format!("its CPUs are {}", topology.possible)));
    }
    let offline = wanted.filter(|cpu| !topology.online.contains(cpu));
    let usable = wanted.filter(|cpu| topology.allowed.contains(cpu));
    let outside = wanted.filter(|cpu| topology.online.contains(cpu) && !usable.contains(cpu));
    let mut reasons = Vec::new();
    if !offline.is_empty() {
        reasons.push(format!("{} offline", are(&offline)));
    }
    if !outside.is_empty() {
        let allowed = &topology.allowed;
        let outside = are(&outside);
        reasons.push(format!("{outside} outside the CPUs that this process may use ({allowed})"));
    }
    if usable.is_empty() {
        return refuse(format!(
            "--cpus {wanted}: none of them can be used: {}",
            reasons.join(", ")
        ));
    }
    warnings.extend(reasons.iter().map(|reason| format!("--cpus {wanted}: left out: {reason}")));
    Ok(usable)
}

/// * `most`: what `auto` takes at most.
fn thread_count(threads: Threads, cpus: usize, most: usize, warnings: &mut Vec<String>) -> usize {
    match threads {
        Threads::Auto => cpus.clamp(1, most),
        Threads::Count(count) if count > THREADS_MAX => {
            warnings.push(format!(
                "{THREADS_MAX} threads instead of {count}, which is the most there can be"
            ));
            THREADS_MAX
        }
        Threads::Count(count) => count.max(1),
    }
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

/// `CPU 3`, `CPUs 3-4`.
fn name(cpus: &CpuList) -> String {
    if cpus.len() == 1 { format!("CPU {cpus}") } else { format!("CPUs {cpus}") }
}

/// `CPU 3 is`, `CPUs 3-4 are`.
fn are(cpus: &CpuList) -> String {
    format!("{} {}", name(cpus), if cpus.len() == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests;
