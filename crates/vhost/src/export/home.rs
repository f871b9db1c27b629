//! Queue threads on the node of their virtqueues.
//!
//! The front end chooses where the memory of its guest is, and says so to nobody; the pages of the
//! rings tell. When a virtqueue starts and its pages lie on another node than the CPUs of its
//! thread, the thread moves to the CPUs of that node: every request touches the rings several
//! times, and the guest's own CPU, which touches them too, is most likely there. What the thread
//! uses for every request goes with it (`worker::memory` says what, and what cannot). Buffers of
//! the guest may be on any node.
//!
//! Promises: never leaves the CPUs that the user named or that the process may use; a machine with
//! one node, `--numa off`, and a system that does not tell where pages are (a container without
//! `move_pages`) keep threads where they are. Control thread; one system call for each start of a
//! virtqueue.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_export::Numa;
use ringdisk_export::stats::QueueView;
use ringdisk_guest::{Areas, RingMemory};
use ringdisk_ring::{CpuList, Topology, pages_by_node};

/// What is known of the threads, for whoever reads their counters.
pub(super) type Views = Arc<Mutex<Vec<QueueView>>>;

/// The views; a panic elsewhere leaves them valid.
pub(super) fn locked(views: &Views) -> MutexGuard<'_, Vec<QueueView>> {
    views.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where virtqueues are, and what follows for their threads.
#[derive(Debug)]
pub(super) struct Homes {
    topology: Topology,
    /// CPUs that queue threads may be on.
    usable: CpuList,
    is_off: bool,
    /// CPUs of each thread; empty: it runs where the scheduler wants.
    threads: Vec<CpuList>,
    /// Node of each virtqueue that has been started, as far as it is known.
    rings: BTreeMap<u16, usize>,
    views: Views,
}

impl Homes {
    /// * `usable`: CPUs that queue threads may be on.
    /// * `threads`: CPUs that each was started on; empty: where the scheduler wants.
    pub(super) fn new(
        topology: Topology,
        usable: CpuList,
        numa: Numa,
        threads: Vec<CpuList>,
        views: Views,
    ) -> Homes {
        let is_off = numa == Numa::Off || topology.nodes.len() < 2;
        Homes { topology, usable, is_off, threads, rings: BTreeMap::new(), views }
    }

    /// A virtqueue runs: looks where its rings are. Gives the node and its CPUs that its thread has
    /// to move to, if it has to.
    pub(super) fn started(&mut self, index: u16, areas: &Areas) -> Option<(usize, CpuList)> {
        if self.is_off {
            return None;
        }
        let range = |part: &RingMemory| (part.address(), part.len());
        let ranges = [&areas.descriptors, &areas.driver, &areas.device].map(range);
        match pages_by_node(&ranges) {
            // Those that this process has not touched yet are not told of; the start has touched
            // the indexes.
            Ok(pages) => self.found(index, &pages.by_node),
            Err(errno) => {
                tracing::debug!("virtqueue {index}: nobody tells where its rings are: {errno}");
                self.is_off = true;
                None
            }
        }
    }

    /// As [`Homes::started`].
    ///
    /// * `pages`: how many pages of the rings are on each node.
    fn found(&mut self, index: u16, pages: &BTreeMap<usize, u64>) -> Option<(usize, CpuList)> {
        let (node, _) = pages.iter().max_by_key(|(_, count)| **count)?;
        self.rings.insert(index, *node);
        let thread = self.thread_of(index);
        // A thread with virtqueues of several nodes goes where most of them are, and stays where it
        // is when that is nowhere.
        let mut wanted = BTreeMap::<usize, usize>::new();
        for (_, node) in self.rings.iter().filter(|(other, _)| self.thread_of(**other) == thread) {
            *wanted.entry(*node).or_default() += 1;
        }
        let most = wanted.values().copied().max()?;
        let mut homes = wanted.iter().filter(|(_, count)| **count == most);
        let (Some((home, _)), None) = (homes.next(), homes.next()) else { return None };
        let is_there = |cpu| self.topology.node_of(cpu) == Some(*home);
        let now = &self.threads[thread];
        if !now.is_empty() && now.iter().all(is_there) {
            return None;
        }
        // All of them: the scheduler knows which of them are free.
        let cpus = self.usable.filter(is_there);
        if cpus.is_empty() || cpus == *now {
            return None;
        }
        tracing::debug!("virtqueue {index} is on node {home}: its thread goes to CPUs {cpus}");
        Some((*home, cpus))
    }

    /// Node of a virtqueue whose thread was there from the start: what others have made for it may
    /// not be. `None`: it is elsewhere, or nobody knows.
    pub(super) fn shared(&self, index: u16) -> Option<usize> {
        let node = *self.rings.get(&index).filter(|_| !self.is_off)?;
        let cpus = &self.threads[self.thread_of(index)];
        let is_there = cpus.iter().all(|cpu| self.topology.node_of(cpu) == Some(node));
        (is_there && !cpus.is_empty()).then_some(node)
    }

    /// CPUs of the thread of a virtqueue; empty: it runs where the scheduler wants.
    pub(super) fn cpus_of(&self, index: u16) -> CpuList {
        self.threads[self.thread_of(index)].clone()
    }

    /// The thread has moved.
    pub(super) fn moved(&mut self, index: u16, cpus: CpuList) {
        let thread = self.thread_of(index);
        if let Some(view) = locked(&self.views).get_mut(thread) {
            view.cpu = cpus.only();
        }
        self.threads[thread] = cpus;
    }

    /// As `Control` gives virtqueues to threads.
    fn thread_of(&self, index: u16) -> usize {
        usize::from(index) % self.threads.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringdisk_ring::Node;

    fn cpus(text: &str) -> CpuList {
        CpuList::of_kernel(text)
    }

    /// Two nodes of two CPUs each.
    fn topology() -> Topology {
        let node = |id, list: &str| Node { id, cpus: cpus(list), ..Node::default() };
        Topology {
            possible: cpus("0-3"),
            online: cpus("0-3"),
            allowed: cpus("0-3"),
            nodes: vec![node(0, "0-1"), node(1, "2-3")],
            has_memory_policy: false,
        }
    }

    fn homes(usable: &str, threads: &[&str]) -> Homes {
        let threads = threads.iter().map(|list| cpus(list)).collect();
        Homes::new(topology(), cpus(usable), Numa::Auto, threads, Views::default())
    }

    /// Where a thread has to go.
    fn to(node: usize, list: &str) -> Option<(usize, CpuList)> {
        Some((node, cpus(list)))
    }

    fn on(node: usize) -> BTreeMap<usize, u64> {
        [(node, 3), (1 - node, 1)].into_iter().collect()
    }

    #[test]
    fn a_thread_goes_to_the_node_of_its_virtqueue_and_stays_there() {
        let mut homes = homes("0-3", &["0", "2"]);
        assert_eq!(homes.shared(0), None, "nobody has looked");
        assert_eq!(homes.found(0, &on(0)), None);
        assert_eq!(homes.shared(0), Some(0));
        assert_eq!(homes.found(1, &on(0)), to(0, "0-1"));
        assert_eq!(homes.shared(1), None, "it has to move");
        homes.moved(1, cpus("0-1"));
        assert_eq!(homes.shared(1), Some(0));
        assert_eq!(homes.found(1, &on(0)), None);
        // The guest is started anew with other memory.
        assert_eq!(homes.found(1, &on(1)), to(1, "2-3"));
    }

    #[test]
    fn a_thread_without_a_cpu_of_its_own_is_bound_to_the_node() {
        assert_eq!(homes("0-3", &[""]).found(0, &on(1)), to(1, "2-3"));
        assert_eq!(homes("0-3", &["0-1"]).found(0, &on(1)), to(1, "2-3"));
        assert_eq!(homes("0-3", &["0-1"]).found(0, &on(0)), None);
    }

    #[test]
    fn only_cpus_that_may_be_used_are() {
        assert_eq!(homes("0-2", &["0"]).found(0, &on(1)), to(1, "2"));
        assert_eq!(homes("0-1", &["0"]).found(0, &on(1)), None);
        // It may be nowhere else anyway.
        assert_eq!(homes("2-3", &["2-3"]).found(0, &on(1)), None);
    }

    #[test]
    fn several_virtqueues_of_a_thread_vote() {
        let mut homes = homes("0-3", &["0"]);
        assert_eq!(homes.found(0, &on(0)), None);
        assert_eq!(homes.found(1, &on(1)), None, "one against one");
        assert_eq!(homes.found(2, &on(1)), to(1, "2-3"));
    }

    #[test]
    fn where_nothing_is_known_nothing_moves() {
        let mut homes = homes("0-3", &["0"]);
        assert_eq!(homes.found(0, &BTreeMap::new()), None);
        let nodes = vec![Node { cpus: cpus("0-3"), ..Node::default() }];
        let single = Topology { nodes, ..topology() };
        let new = |topology, numa| {
            Homes::new(topology, cpus("0-3"), numa, vec![cpus("0")], Views::default())
        };
        assert!(new(single, Numa::Auto).is_off && new(topology(), Numa::Off).is_off);
        assert!(!new(topology(), Numa::Auto).is_off);
    }
}
