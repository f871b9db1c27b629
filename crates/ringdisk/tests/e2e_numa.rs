//! Where threads and memory of a mount over io_uring are: each thread on its CPU, each queue's memory on the node of its CPU.
//!
//! The second needs two nodes; `tests/vm/run fuse` has them. An emulated machine shows where things are, never how fast.

mod common;

use std::path::Path;

use common::serving::Place;
use common::{MIB, serve_raw};
use ringdisk_ring::{CpuList, pin_to_cpus};
use ringdisk_testkit::limits::{Sysctl, UringParameter, needs, needs_root};
use ringdisk_testkit::model::Vm;
use ringdisk_testkit::process::ok_words;

/// CPUs of a list such as `0-1,3`.
fn cpus(list: &str) -> Vec<usize> {
    let number = |text: &str| text.trim().parse::<usize>().expect("a number");
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        (number(first)..=number(last)).collect::<Vec<_>>()
    };
    list.trim().split(',').flat_map(part).collect()
}

/// CPUs that a thread may use, from its `status`.
fn allowed(status: &Path) -> Vec<usize> {
    let status = std::fs::read_to_string(status).unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.map(cpus).unwrap_or_default()
}

/// Name and CPUs of each thread.
fn threads(pid: u32) -> Vec<(String, Vec<usize>)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let thread = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        (name.trim().to_owned(), allowed(&task.path().join("status")))
    };
    tasks.flatten().map(thread).collect()
}

/// Bytes of anonymous memory of a process on a node, as numastat -p counts them.
fn bytes_on(pid: u32, node: usize) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("NUMA");
    let field = |line: &str, key: &str| {
        let words = line.split_whitespace();
        words.filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok()).sum::<u64>()
    };
    let anonymous = maps.lines().filter(|line| line.contains(" anon="));
    anonymous
        .map(|line| field(line, &format!("N{node}=")) * field(line, "kernelpagesize_kB=") * 1024)
        .sum()
}

/// One client that waits for each reply, on one CPU.
fn read_on(cpu: usize, file: &str) {
    let input = format!("if={file}");
    let words = ["taskset", "-c", &cpu.to_string(), "dd", &input, "of=/dev/null"];
    ok_words(&[&words[..], &["bs=1M", "count=8", "iflag=direct"]].concat());
}

#[test]
fn each_cpu_has_a_queue_thread_and_helpers_run_anywhere() {
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    let disk = serve_raw(MIB, &["--transport", "uring"]);
    let threads = threads(disk.mounted.pid());
    let ours = allowed(Path::new("/proc/self/status"));
    let named = |start: &str| threads.iter().filter(|(name, _)| name.starts_with(start)).collect();
    let (queues, helpers): (Vec<_>, Vec<_>) = (named("queue-"), named("helper-"));
    for cpu in &ours {
        let bound = queues.iter().filter(|(_, cpus)| cpus == &[*cpu]).count();
        assert_eq!(bound, 1, "CPU {cpu}: {threads:?}");
    }
    // One for each CPU, wherever there is time: the queue thread that started them is bound to its own.
    assert!(helpers.len() >= ours.len().min(2), "{threads:?}");
    assert!(helpers.iter().all(|(_, cpus)| *cpus == ours), "{threads:?}");
}

/// CPUs of two nodes; `None` on a machine that has one.
fn two_nodes() -> Option<[Vec<usize>; 2]> {
    let nodes = [0, 1].map(|node| {
        let list = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"));
        list.ok().filter(|list| !list.trim().is_empty()).map(|list| cpus(&list))
    });
    let [Some(near), Some(far)] = nodes else {
        assert!(!needs("second NUMA node", false));
        return None;
    };
    Some([near, far])
}

/// A guest whose virtqueues are in memory near some CPUs.
fn guest_on(cpus: &[usize], place: &Place) -> Vm {
    let cpus: CpuList = cpus.iter().copied().collect();
    let start = || {
        pin_to_cpus(&cpus).expect("CPUs of this machine");
        let mut vm = place.vm(false);
        // Memory comes from the node of whoever touches it first. The virtqueues of the next start are behind all that was taken.
        let taken = usize::try_from(vm.ram.taken()).expect("64 bits");
        vm.ram.memory().write_bytes(taken, &vec![0; 4 << 20]);
        vm.reset().expect("a reset");
        vm
    };
    // A thread of its own: this one stays where it may be now.
    std::thread::scope(|scope| scope.spawn(start).join().expect("a guest"))
}

#[test]
fn queue_threads_go_to_the_node_of_their_virtqueues() {
    let Some(nodes) = two_nodes() else { return };
    for node in [0, 1, 0] {
        let (here, there) = (&nodes[node], nodes[1 - node][0]);
        let place = Place::new("raw");
        let daemon = place.start(&[]);
        let vm = guest_on(here, &place);
        // The one that was there has a CPU of its own, the other one all of the node.
        let bound = threads_named(daemon.process.pid(), "vq-");
        let is_here = |cpus: &Vec<usize>| cpus.iter().all(|cpu| here.contains(cpu));
        assert!(bound.len() == 2 && bound.iter().all(is_here), "node {node}: {bound:?}");
        drop(vm);
        daemon.stop(&[&place.socket]);
        // Where the user has said which CPUs, or that nodes do not matter, they stay.
        for words in [["--cpus", &there.to_string()], ["--numa", "off"]] {
            let daemon = place.start(&words);
            let before = threads_named(daemon.process.pid(), "vq-");
            let vm = guest_on(here, &place);
            assert_eq!(threads_named(daemon.process.pid(), "vq-"), before, "{words:?}");
            drop(vm);
            daemon.stop(&[&place.socket]);
        }
    }
}

/// CPUs of all threads with such names.
fn threads_named(pid: u32, start: &str) -> Vec<Vec<usize>> {
    let all = threads(pid).into_iter();
    all.filter(|(name, _)| name.starts_with(start)).map(|(_, cpus)| cpus).collect()
}

#[test]
fn payloads_are_on_the_node_of_the_client() {
    let Some([near, far]) = &two_nodes() else { return };
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    // A huge page that the start took would hold payloads of the client already.
    let _small_pages = Sysctl::set("/sys/kernel/mm/transparent_hugepage/enabled", "never");
    for (used, spared, cpu) in [(0, 1, near[0]), (1, 0, far[0]), (1, 0, far[far.len() - 1])] {
        let disk = serve_raw(8 * MIB, &["--transport", "uring"]);
        let pid = disk.mounted.pid();
        let before = [bytes_on(pid, used), bytes_on(pid, spared)];
        read_on(cpu, disk.mounted.text());
        let grown =
            [bytes_on(pid, used) - before[0], bytes_on(pid, spared).saturating_sub(before[1])];
        // A payload is 1 MiB, of which the start may have used the first pages.
        assert!(grown[0] >= MIB / 4 * 3 && grown[1] < MIB / 4, "CPU {cpu}: {grown:?}");
    }
}
