//! Where threads and memory of a mount over io_uring are: each thread on its CPU, each queue's
//! memory on the node of its CPU.
//!
//! The second needs two nodes; `tests/vm/run fuse` has them. An emulated machine shows where things
//! are, never how fast.

use std::path::Path;

use ringdisk_testkit::limits::{Sysctl, UringParameter, needs_root};
use ringdisk_testkit::process::ok_words;

use crate::common::numa::{allowed, guest_on, stack_pages_on, threads, threads_named, two_nodes};
use crate::common::serving::Place;
use crate::common::{MIB, serve_raw};

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
    // One for each CPU, wherever there is time: the queue thread that started them is bound to its
    // own.
    assert!(helpers.len() >= ours.len().min(2), "{threads:?}");
    assert!(helpers.iter().all(|(_, cpus)| *cpus == ours), "{threads:?}");
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
        let elsewhere = stack_pages_on(daemon.process.pid(), "vq-", 1 - node);
        assert_eq!(elsewhere, [0, 0], "pages of stacks that are not on node {node}");
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

#[test]
fn payloads_are_on_the_node_of_the_client() {
    let Some([near, far]) = &two_nodes() else { return };
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    // A huge page that the start took would hold payloads of the client already.
    let Some(_small_pages) = Sysctl::set("/sys/kernel/mm/transparent_hugepage/enabled", "never")
    else {
        return;
    };
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
