//! How many queue threads a disk has, and the CPUs of each.
//!
//! Promises: a thread has a CPU of its own only where the user named CPUs
//! ([`ringdisk_export::OwnCpu`]); the threads of the next disk of this process go on behind those
//! of the one before.

use std::sync::atomic::AtomicUsize;

use ringdisk_export::{PlacementRule, ThreadPlaces, place_threads};
use ringdisk_ring::Topology;

use super::options::ExportOptions;
use crate::Error;

/// Threads that have been placed in this process.
pub(super) static PLACED: AtomicUsize = AtomicUsize::new(0);

/// Places the queue threads of a disk.
///
/// * `placed`: threads of other disks, to which these are added.
///
/// Errors: [`crate::ErrorKind::Usage`] for a list of CPUs of which none can be used.
pub(super) fn place(
    topology: &Topology,
    options: &ExportOptions,
    placed: &AtomicUsize,
    notes: &mut Vec<String>,
) -> Result<ThreadPlaces, Error> {
    let queues = usize::from(options.queues);
    let rule = PlacementRule {
        auto_max: queues,
        most: queues,
        why_most: "one for each virtqueue",
        placed: Some(placed),
        ..PlacementRule::default()
    };
    place_threads(topology, &options.common.threads, &rule, notes)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use ringdisk_export::{Numa, Threads};
    use ringdisk_ring::{CpuList, Node};

    use super::super::options::Listen;
    use super::*;
    use crate::ErrorKind;

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
        let mut options = ExportOptions { queues, ..ExportOptions::new(listen) };
        options.common.threads.cpus = named.map(cpus);
        options
    }

    /// The CPUs of the threads of one disk after another.
    fn placed<const N: usize>(topology: &Topology, disks: [ExportOptions; N]) -> Vec<String> {
        let before = AtomicUsize::new(0);
        let places = disks.iter().flat_map(|options| {
            place(topology, options, &before, &mut Vec::new()).expect("places").threads
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
        let off = disks().map(|mut options| {
            options.common.threads.numa = Numa::Off;
            options
        });
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
        let mut more = options(9, Some("0-1"));
        more.common.threads.threads = Threads::Count(3);
        assert_eq!(placed(&topology(1), [more]), ["0", "1", "0"]);
    }

    #[test]
    fn cpus_that_cannot_be_used_are_left_out_or_refused() {
        let mut notes = Vec::new();
        let some = options(2, Some("3-9"));
        let places = place(&topology(1), &some, &AtomicUsize::new(0), &mut notes);
        let ThreadPlaces { threads, usable } = places.expect("places");
        assert_eq!((threads, usable), (vec![cpus("3")], cpus("3")));
        let left_out = "--cpus 3-9: left out: this machine has no CPUs 4-9 (its CPUs are 0-3)";
        assert_eq!(notes, [left_out]);
        let none = options(2, Some("8-9"));
        let error = place(&topology(1), &none, &AtomicUsize::new(0), &mut notes).expect_err("none");
        assert_eq!(error.kind(), ErrorKind::Usage);
    }
}
