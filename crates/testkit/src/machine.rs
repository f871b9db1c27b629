//! Machines that are not there: the files of /sys and /proc from which a topology is read.
//!
//! Promises: what a kernel would say, nothing more: the list of a node names CPUs that run, its
//! links also those that are offline.

use std::fs;
use std::path::Path;

use ringdisk_ring::{CpuList, Topology};
use tempfile::TempDir;

/// Files of a machine, removed when this is dropped.
#[derive(Debug)]
pub struct Machine {
    directory: TempDir,
}

/// CPUs in the kernel's list format; an empty text is none.
fn cpus(list: &str) -> CpuList {
    CpuList::of_kernel(list)
}

impl Machine {
    /// A machine of one thread that may use all CPUs and nodes; each node has memory.
    ///
    /// * `possible`, `online`: lists of CPUs.
    /// * `nodes`: the number of each, and all CPUs on it that are there, also those that are
    ///   offline.
    #[must_use]
    pub fn new(possible: &str, online: &str, nodes: &[(usize, &str)]) -> Machine {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let machine = Machine { directory };
        machine.write("sys/devices/system/cpu/possible", possible);
        machine.write("sys/devices/system/cpu/online", online);
        let numbers: CpuList = nodes.iter().map(|(id, _)| *id).collect();
        machine.write("sys/devices/system/node/has_memory", &numbers.to_string());
        for (place, (id, list)) in nodes.iter().enumerate() {
            let node = format!("sys/devices/system/node/node{id}");
            let running = cpus(list).filter(|cpu| cpus(online).contains(cpu));
            let running = if running.is_empty() { String::new() } else { running.to_string() };
            machine.write(&format!("{node}/cpulist"), &running);
            machine.write(&format!("{node}/meminfo"), &format!("Node {id} MemTotal:  1048576 kB"));
            // Nodes in pairs, as the halves of two sockets are: 12 inside, 21 outside.
            let far = |other: usize| match (place == other, place / 2 == other / 2) {
                (true, _) => "10",
                (_, true) => "12",
                _ => "21",
            };
            let row: Vec<&str> = (0..nodes.len()).map(far).collect();
            machine.write(&format!("{node}/distance"), &row.join(" "));
            for cpu in cpus(list).iter() {
                let link = machine.path().join(format!("{node}/cpu{cpu}"));
                fs::create_dir(link).expect("a directory in place of a link");
            }
        }
        machine.allow(possible, &numbers.to_string())
    }

    /// So many CPUs, all running, in blocks of the same size on each of `nodes` nodes.
    #[must_use]
    pub fn even(count: usize, nodes: usize) -> Machine {
        let all = format!("0-{}", count - 1);
        let each = count / nodes;
        let block = |node: usize| format!("{}-{}", node * each, (node + 1) * each - 1);
        let lists: Vec<String> = (0..nodes).map(block).collect();
        let lists: Vec<(usize, &str)> = lists.iter().map(String::as_str).enumerate().collect();
        Machine::new(&all, &all, &lists)
    }

    /// Restricts the thread to CPUs and memory, as taskset(1) and cpusets do.
    #[must_use]
    pub fn allow(self, cpus: &str, nodes: &str) -> Machine {
        let status = format!("Name:\tx\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{nodes}\n");
        self.write("proc/thread-self/status", &status);
        self
    }

    /// Writes a file of the machine.
    pub fn write(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("a name below")).expect("directories");
        fs::write(&path, format!("{}\n", text.trim_end())).expect("a file");
    }

    /// Takes a file or directory of the machine away.
    pub fn remove(&self, name: &str) {
        let path = self.path().join(name);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect(name);
    }

    /// The directory that stands for `/`.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// What is read from it.
    #[must_use]
    pub fn topology(&self) -> Topology {
        Topology::read_under(self.path())
    }
}
