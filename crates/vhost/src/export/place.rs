//! Where queue threads run.
//!
//! A thread has a CPU to itself only where the user said which CPUs are for disks (`--cpus`).
//! Otherwise nobody here knows what else runs: other processes like this one choose by the same
//! rule, so that all of them would meet on the same few CPUs while others idle. The scheduler
//! knows; threads are spread over the nodes, and are otherwise free.

use std::sync::atomic::{AtomicUsize, Ordering};

use ringdisk_ring::{CpuList, Topology};

use super::options::{ExportOptions, Numa, Threads};
use crate::{Error, ErrorKind};

/// Threads that have been placed in this process: those of the next disk go on behind them.
pub(super) static PLACED: AtomicUsize = AtomicUsize::new(0);

/// The CPUs of each queue thread, an empty list: where the scheduler wants; and all CPUs that queue
/// threads may be on.
///
/// With CPUs that were named each of several threads has one, as long as there are enough; a single
/// thread has them all. Else each has those of a node, the nodes in turn; on a machine with one
/// node, and for a single thread, nothing is bound.
///
/// * `placed`: threads of other disks, to which these are added.
///
/// Errors: CPUs that the machine does not have, or of which none can be used.
pub(super) fn place(
    topology: &Topology,
    options: &ExportOptions,
    placed: &AtomicUsize,
    notes: &mut Vec<String>,
) -> Result<(Vec<CpuList>, CpuList), Error> {
    let usable = match &options.cpus {
        None => topology.allowed.clone(),
        Some(wanted) => {
            let usable = wanted.filter(|cpu| topology.allowed.contains(cpu));
            if usable.is_empty() {
                let text = format!("--cpus {wanted}: none of them can be used");
                let hint = format!("this process may use {}", topology.allowed);
                return Err(Error::new(ErrorKind::Usage, text).hint(hint));
            }
            if usable != *wanted {
                notes.push(format!("--cpus {wanted}: only {usable} can be used"));
            }
            usable
        }
    };
    let count = count(options, usable.len().max(1), notes);
    let first = placed.fetch_add(count, Ordering::Relaxed);
    let looks_at_nodes = options.numa == Numa::Auto && topology.nodes.len() > 1;
    let is_named = options.cpus.is_some();
    let places = if count == 1 {
        vec![if is_named { usable.clone() } else { CpuList::default() }]
    } else if is_named || looks_at_nodes {
        let order: Vec<usize> = match options.numa {
            Numa::Auto => topology.spread(&usable),
            Numa::Off => usable.iter().collect(),
        };
        let cpus = (first..first + count).map(|number| order[number % order.len()]);
        let near = |cpu| usable.filter(|other| topology.node_of(other) == topology.node_of(cpu));
        cpus.map(|cpu| if is_named { [cpu].into_iter().collect() } else { near(cpu) }).collect()
    } else {
        vec![CpuList::default(); count]
    };
    Ok((places, usable))
}

/// How many threads there are, at least one.
fn count(options: &ExportOptions, cpus: usize, notes: &mut Vec<String>) -> usize {
    let queues = usize::from(options.queues);
    match options.threads {
        Threads::Auto => queues.min(cpus),
        Threads::Count(count) => {
            let count = usize::from(count);
            if count > queues {
                notes.push(format!(
                    "{queues} queue threads instead of {count}: one for each virtqueue"
                ));
            }
            count.min(queues)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use ringdisk_ring::Node;

    use super::super::options::Listen;
    use super::*;

    fn cpus(text: &str) -> CpuList {
        CpuList::of_kernel(text)
    }

    /// Nodes of four CPUs each.
    fn topology(nodes: usize) -> Topology {
        let all: CpuList = (0..4 * nodes).collect();
        let node = |id| Node { id, cpus: (4 * id..4 * id + 4).collect(), ..Node::default() };
        Topology {
            possible: all.clone(),
            online: all.clone(),
            allowed: all,
            nodes: (0..nodes).map(node).collect(),
            has_memory_policy: false,
        }
    }

    fn options(queues: u16, named: Option<&str>) -> ExportOptions {
        let listen = Listen::Connect(PathBuf::from("socket"));
        ExportOptions { queues, cpus: named.map(cpus), ..ExportOptions::new(listen) }
    }

    /// The CPUs of the threads of one disk after another.
    fn placed<const N: usize>(topology: &Topology, disks: [ExportOptions; N]) -> Vec<String> {
        let before = AtomicUsize::new(0);
        let places = disks.iter().flat_map(|options| {
            place(topology, options, &before, &mut Vec::new()).expect("places").0
        });
        places.map(|cpus| cpus.to_string()).collect()
    }

    #[test]
    fn on_one_node_the_scheduler_chooses() {
        assert_eq!(placed(&topology(1), [options(2, None), options(1, None)]), ["none"; 3]);
    }

    #[test]
    fn nodes_take_threads_in_turn_and_the_next_disk_goes_on() {
        let topology = topology(2);
        let disks = || [options(3, None), options(2, None)];
        assert_eq!(placed(&topology, disks()), ["0-3", "4-7", "0-3", "4-7", "0-3"]);
        let off = disks().map(|options| ExportOptions { numa: Numa::Off, ..options });
        assert_eq!(placed(&topology, off), ["none"; 5]);
    }

    #[test]
    fn named_cpus_have_a_thread_each_and_the_next_disk_goes_on() {
        let topology = topology(1);
        let disks = || [options(2, Some("1-3")), options(2, Some("1-3"))];
        assert_eq!(placed(&topology, disks()), ["1", "2", "3", "1"]);
        assert_eq!(placed(&topology, [options(1, Some("1-3"))]), ["1-3"]);
    }

    #[test]
    fn automatic_threads_are_as_many_as_virtqueues_or_cpus() {
        assert_eq!(placed(&topology(1), [options(9, None)]).len(), 4);
        assert_eq!(placed(&topology(1), [options(9, Some("0-1"))]), ["0", "1"]);
        let more = ExportOptions { threads: Threads::Count(3), ..options(9, Some("0-1")) };
        assert_eq!(placed(&topology(1), [more]), ["0", "1", "0"]);
    }

    #[test]
    fn cpus_that_cannot_be_used_are_left_out_or_refused() {
        let mut notes = Vec::new();
        let some = options(2, Some("3-9"));
        let (places, usable) =
            place(&topology(1), &some, &AtomicUsize::new(0), &mut notes).expect("places");
        assert_eq!((places, usable), (vec![cpus("3")], cpus("3")));
        assert_eq!(notes, ["--cpus 3-9: only 3 can be used"]);
        let none = options(2, Some("8-9"));
        let error = place(&topology(1), &none, &AtomicUsize::new(0), &mut notes).expect_err("none");
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}
