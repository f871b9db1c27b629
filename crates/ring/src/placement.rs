//! CPUs and nodes: which there are, and binding a thread to some.
//!
//! A refusal (cpuset, container) is for the caller to log as a warning: a thread that runs
//! elsewhere is slower, not wrong.

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Errno;

/// CPUs by node, as /sys/devices/system/node tells; one node where it does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// (node id, its CPUs); ids need not be dense.
    pub nodes: Vec<(usize, Vec<usize>)>,
}

impl Topology {
    /// Reads the machine's topology. CPUs that this process may not use are left out.
    pub fn read() -> Topology {
        let allowed = allowed_cpus();
        let mut nodes = Vec::new();
        for entry in std::fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|n| n.strip_prefix("node")?.parse().ok()) else {
                continue;
            };
            let list = std::fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
            let cpus: Vec<usize> =
                cpus_of_list(&list).into_iter().filter(|cpu| allowed.contains(cpu)).collect();
            if !cpus.is_empty() {
                nodes.push((id, cpus));
            }
        }
        nodes.sort();
        if nodes.is_empty() {
            nodes.push((0, allowed));
        }
        Topology { nodes }
    }
}

impl Topology {
    /// All CPUs, taken from the nodes in turn: the first `n` of them are spread over all nodes.
    pub fn spread(&self) -> Vec<usize> {
        let longest = self.nodes.iter().map(|(_, cpus)| cpus.len()).max().unwrap_or(0);
        (0..longest)
            .flat_map(|place| {
                self.nodes.iter().filter_map(move |(_, cpus)| cpus.get(place).copied())
            })
            .collect()
    }
}

/// CPUs in a kernel list such as `0-3,8`. Rubbish is skipped.
pub fn cpus_of_list(text: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last.min(first + CpuSet::MAX_CPU));
        }
    }
    cpus
}

/// CPUs that the calling thread may run on, ascending; never empty.
pub fn allowed_cpus() -> Vec<usize> {
    cpus_of(None)
}

/// CPUs that the main thread may run on, which binds itself to none.
pub(crate) fn process_cpus() -> Vec<usize> {
    cpus_of(Some(rustix::process::getpid()))
}

fn cpus_of(thread: Option<Pid>) -> Vec<usize> {
    let Ok(set) = sched_getaffinity(thread) else { return vec![0] };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Binds the calling thread to one CPU. Errors: `EINVAL` when it is offline or not allowed.
pub fn pin_to_cpu(cpu: usize) -> Result<(), Errno> {
    pin_to_cpus(&[cpu])
}

/// Binds the calling thread to a set of CPUs. Errors: `EINVAL` when none of them is allowed.
pub fn pin_to_cpus(cpus: &[usize]) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(Errno::INVAL);
        }
        set.set(cpu);
    }
    sched_setaffinity(None, &set)
}

/// The CPU that the calling thread runs on at this moment.
pub fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

#[cfg(test)]
mod tests {
    use super::{Topology, cpus_of_list};

    #[test]
    fn the_first_cpus_of_a_spread_lie_on_all_nodes() {
        let topology = Topology { nodes: vec![(0, vec![0, 1, 2]), (3, vec![8, 9])] };
        assert_eq!(topology.spread(), [0, 8, 1, 9, 2]);
    }

    #[test]
    fn lists_of_the_kernel_are_understood() {
        assert_eq!(cpus_of_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(cpus_of_list("7"), [7]);
        assert_eq!(cpus_of_list("\n"), [] as [usize; 0]);
        assert_eq!(cpus_of_list("x,3-,1"), [1]);
    }
}
