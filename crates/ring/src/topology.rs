//! The machine: its CPUs, and which memory is near them.
//!
//! Promises: whatever /sys and /proc say or do not say, there is a node, and a CPU that may be
//! used. Control path; blocks for some reads of small files.

use std::fs;
use std::path::Path;

use crate::{CpuList, numa};

/// CPUs and nodes, as the calling thread sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// CPUs that there are or may ever be. Their number need not be one more than the largest of
    /// them.
    pub possible: CpuList,
    /// Those that run now, also where we may not.
    pub online: CpuList,
    /// Those of them that the calling thread may run on (affinity, cpuset); never empty.
    pub allowed: CpuList,
    /// Ascending numbers, which need not be dense; at least one node.
    pub nodes: Vec<Node>,
    /// The user chose where the memory of this process comes from (`numactl`), so that it is not
    /// for us to choose.
    pub has_memory_policy: bool,
}

/// A node: CPUs, and the memory next to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: usize,
    /// CPUs on it, also those that are offline if the kernel knows where they belong.
    pub cpus: CpuList,
    /// Memory on it, bytes; 0: none, or not told.
    pub memory_bytes: u64,
    /// It has memory, and this process may use it.
    pub is_memory_usable: bool,
    /// Distance to each node in the order of [`Topology::nodes`]; 10 is the node itself. Empty
    /// where the kernel does not tell.
    pub distances: Vec<u32>,
}

impl Topology {
    /// Reads the topology of this machine, for the calling thread.
    pub fn read() -> Topology {
        // A kernel that does not tell (no NUMA, or forbidden by a filter) has no policy that we
        // could break.
        let has_memory_policy = numa::has_policy().unwrap_or(false);
        Topology { has_memory_policy, ..Topology::read_under(Path::new("/")) }
    }

    /// The same from another place.
    ///
    /// * `root`: has `sys/devices/system/cpu`, `sys/devices/system/node` and
    ///   `proc/thread-self/status` below it.
    pub fn read_under(root: &Path) -> Topology {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let list = |path: &str| CpuList::of_kernel(&text(path));
        let status = text("proc/thread-self/status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(CpuList::of_kernel)
        };

        let mut online = list("sys/devices/system/cpu/online");
        let allowed = field("Cpus_allowed_list").unwrap_or_else(|| online.clone());
        if online.is_empty() {
            online = if allowed.is_empty() { [0].into_iter().collect() } else { allowed.clone() };
        }
        // A thread's mask may name CPUs that are offline, or not there at all.
        let mut allowed = allowed.filter(|cpu| online.contains(cpu));
        if allowed.is_empty() {
            allowed = online.clone();
        }
        let mut possible = list("sys/devices/system/cpu/possible");
        if possible.is_empty() {
            possible = online.clone();
        }

        let with_memory = list("sys/devices/system/node/has_memory");
        let usable = field("Mems_allowed_list");
        let mut nodes: Vec<Node> = fs::read_dir(root.join("sys/devices/system/node"))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| numbered(&entry.file_name(), "node").map(|id| (id, entry.path())))
            .map(|(id, path)| Node {
                is_memory_usable: with_memory.contains(id)
                    && usable.as_ref().is_none_or(|usable| usable.contains(id)),
                ..read_node(id, &path)
            })
            .collect();
        nodes.sort_by_key(|node| node.id);
        if nodes.is_empty() {
            nodes.push(Node { cpus: possible.clone(), is_memory_usable: true, ..Node::default() });
        }
        Topology { possible, online, allowed, nodes, has_memory_policy: false }
    }

    /// The node of a CPU; `None` where the kernel does not tell, as of a CPU that has never been
    /// there. A machine with one node has them all on it.
    pub fn node_of(&self, cpu: usize) -> Option<usize> {
        if let [node] = &self.nodes[..] {
            return Some(node.id);
        }
        self.nodes.iter().find(|node| node.cpus.contains(cpu)).map(|node| node.id)
    }

    /// The node on which all of some CPUs are; `None` for CPUs of several nodes.
    pub fn node_of_all(&self, cpus: &CpuList) -> Option<usize> {
        let node = self.node_of(cpus.first()?)?;
        cpus.iter().all(|cpu| self.node_of(cpu) == Some(node)).then_some(node)
    }

    /// How far one node is from another: 10 for the same, more for others; `u32::MAX` where that is
    /// not known.
    pub fn distance(&self, from: usize, to: usize) -> u32 {
        let place = |id| self.nodes.iter().position(|node| node.id == id);
        match (place(from), place(to)) {
            (Some(from), Some(to)) if from == to => 10,
            (Some(from), Some(to)) => {
                self.nodes[from].distances.get(to).copied().unwrap_or(u32::MAX)
            }
            _ => u32::MAX,
        }
    }

    /// CPUs, taken from their nodes in turn: the first `n` of them are spread over all nodes.
    pub fn spread(&self, cpus: &CpuList) -> Vec<usize> {
        let of_node = |node: &Node| cpus.filter(|cpu| self.node_of(cpu) == Some(node.id));
        let mut groups: Vec<CpuList> = self.nodes.iter().map(of_node).collect();
        groups.push(cpus.filter(|cpu| self.node_of(cpu).is_none()));
        let groups: Vec<Vec<usize>> = groups.iter().map(|group| group.iter().collect()).collect();
        let longest = groups.iter().map(Vec::len).max().unwrap_or(0);
        (0..longest)
            .flat_map(|place| groups.iter().filter_map(move |group| group.get(place).copied()))
            .collect()
    }
}

/// What a directory of the kernel says about a node.
fn read_node(id: usize, path: &Path) -> Node {
    let text = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
    // The list names CPUs that run; the links name all that are there.
    let links = fs::read_dir(path).into_iter().flatten().flatten();
    let linked = links.filter_map(|entry| numbered(&entry.file_name(), "cpu"));
    let listed = CpuList::of_kernel(&text("cpulist"));
    let total = text("meminfo");
    let total = total.lines().find_map(|line| line.split_once("MemTotal:")).map(|(_, rest)| rest);
    let kib = total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    Node {
        id,
        cpus: linked.chain(listed.iter()).collect(),
        memory_bytes: kib.unwrap_or(0).saturating_mul(1024),
        is_memory_usable: false,
        distances: text("distance")
            .split_whitespace()
            .map_while(|number| number.parse().ok())
            .collect(),
    }
}

/// The number in a name such as `node12`.
fn numbered(name: &std::ffi::OsStr, word: &str) -> Option<usize> {
    name.to_str()?.strip_prefix(word)?.parse().ok()
}
