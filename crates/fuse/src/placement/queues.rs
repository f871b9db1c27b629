//! Which thread serves which queue of the kernel, over io_uring.
//!
//! Promises: pure; every queue that the kernel wants has one thread, also that of a CPU that is
//! offline or does not exist. Control path, before a mount.

use std::cmp::Reverse;

use ringdisk_export::{Numa, ThreadOptions, cpus_are, cpus_named};
use ringdisk_ring::{CpuList, Topology};

use super::{Placement, ThreadPlace};

/// One queue of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueuePlace {
    /// The CPU whose callers use it: its own number. `None`: the machine has no such CPU, and the
    /// kernel wants the queue all the same.
    pub(crate) cpu: Option<usize>,
    /// Requests may come: that CPU runs now.
    pub(crate) is_online: bool,
    /// Number of the thread that serves it.
    pub(crate) thread: usize,
}

/// Adds the queues and what there is to say about them.
///
/// * `usable`: CPUs that threads could be bound to.
pub(super) fn place(
    topology: &Topology,
    options: &ThreadOptions,
    usable: &CpuList,
    placement: &mut Placement,
) {
    // The kernel counts the possible CPUs and numbers the queues from 0, however the CPUs are
    // numbered.
    let count = topology.possible.len().max(1);
    placement.folded = topology.possible.filter(|cpu| cpu >= count);
    placement.queues = queues(topology, options.numa, &placement.threads, count);
    placement.remarks.extend(remarks(topology, options, usable, placement));
    let threads = placement.threads.len();
    if threads > count {
        placement.warnings.push(format!(
            "{threads} threads for {count} queues of the kernel: {} of them serve none",
            threads - count
        ));
    }
}

fn queues(
    topology: &Topology,
    numa: Numa,
    threads: &[ThreadPlace],
    count: usize,
) -> Vec<QueuePlace> {
    let cpu = |number: usize| topology.possible.contains(number).then_some(number);
    let is_online = |number: usize| cpu(number).is_some_and(|cpu| topology.online.contains(cpu));
    let at_home = |number: usize| {
        let own = |thread: &ThreadPlace| thread.cpus.only() == Some(number);
        cpu(number).and_then(|_| threads.iter().position(own))
    };
    // Queues of each thread: those that are used, and all.
    let mut loads = vec![(0, 0); threads.len()];
    let mut chosen: Vec<Option<usize>> = (0..count).map(at_home).collect();
    for (number, thread) in chosen.iter().enumerate() {
        if let Some(thread) = thread {
            add(&mut loads[*thread], is_online(number));
        }
    }
    // Those that are used first, so that they are spread evenly.
    let mut unassigned: Vec<usize> =
        (0..count).filter(|number| chosen[*number].is_none()).collect();
    unassigned.sort_by_key(|number| (Reverse(is_online(*number)), *number));
    for number in unassigned {
        let distance = |thread: &ThreadPlace| match (numa, cpu(number)) {
            (Numa::Auto, Some(cpu)) => match (topology.node_of(cpu), thread.node) {
                (Some(from), Some(to)) => topology.distance(from, to),
                (Some(_), None) => u32::MAX,
                (None, _) => 0,
            },
            _ => 0,
        };
        let near = |index: &usize| (distance(&threads[*index]), loads[*index]);
        // There is at least one thread.
        let nearest = (0..threads.len()).min_by_key(near).unwrap_or(0);
        add(&mut loads[nearest], is_online(number));
        chosen[number] = Some(nearest);
    }
    let queue = |(number, thread): (usize, &Option<usize>)| QueuePlace {
        cpu: cpu(number),
        is_online: is_online(number),
        thread: thread.unwrap_or(0),
    };
    chosen.iter().enumerate().map(queue).collect()
}

fn add(load: &mut (usize, usize), is_online: bool) {
    load.0 += usize::from(is_online);
    load.1 += 1;
}

/// One line for each group of CPUs that has no thread of its own for another reason than their
/// number.
fn remarks(
    topology: &Topology,
    options: &ThreadOptions,
    usable: &CpuList,
    placement: &Placement,
) -> Vec<String> {
    let mut lines = Vec::new();
    let outside = topology.online.filter(|cpu| !usable.contains(cpu));
    if !outside.is_empty() {
        let why = match options.cpus {
            Some(_) => "left out by --cpus",
            None => "outside the CPU mask of this process",
        };
        let (are, whose) = (cpus_are(&outside), whose(&outside));
        lines.push(format!("{are} {why}: {whose} callers are served by threads on {usable}"));
    }
    let offline = topology.possible.filter(|cpu| !topology.online.contains(cpu));
    if !offline.is_empty() {
        let (possible, online) = (topology.possible.len(), topology.online.len());
        let are = cpus_are(&offline);
        lines.push(format!(
            "{are} offline ({possible} possible, {online} online): queues are ready for their \
             callers"
        ));
    }
    if !placement.folded.is_empty() {
        lines.push(format!(
            "{} past the {} queues of the kernel: queue 0 takes their requests",
            cpus_named(&placement.folded),
            placement.queues.len()
        ));
    }
    lines
}

fn whose(cpus: &CpuList) -> &'static str {
    if cpus.len() == 1 { "its" } else { "their" }
}

/// For each queue thread the two after it that run on other CPUs: of its own node where there are
/// any. One twice, or itself, where there are fewer.
pub(super) fn beside(threads: &[ThreadPlace], numa: Numa) -> Vec<[usize; 2]> {
    let count = threads.len();
    let near = |index: usize| {
        let is_elsewhere = |other: &usize| threads[*other].cpus != threads[index].cpus;
        let others =
            || (1..count).map(|step| (index + step) % count).filter(|other| is_elsewhere(other));
        let is_near =
            |other: &usize| numa == Numa::Off || threads[*other].node == threads[index].node;
        let mut near = others().filter(is_near);
        let first = near.next().or_else(|| others().next()).unwrap_or(index);
        [first, near.next().unwrap_or(first)]
    };
    (0..count).map(near).collect()
}
