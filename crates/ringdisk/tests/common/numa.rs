//! Where threads and memory are.

use std::path::Path;

use ringdisk_ring::{CpuList, pin_to_cpus};
use ringdisk_testkit::limits::needs;
use ringdisk_testkit::model::Vm;

use super::serving::Place;

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
pub(crate) fn allowed(status: &Path) -> Vec<usize> {
    let status = std::fs::read_to_string(status).unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.map(cpus).unwrap_or_default()
}

/// Name and CPUs of each thread.
pub(crate) fn threads(pid: u32) -> Vec<(String, Vec<usize>)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let thread = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        (name.trim().to_owned(), allowed(&task.path().join("status")))
    };
    tasks.flatten().map(thread).collect()
}

/// CPUs of two nodes; `None` on a machine that has one.
pub(crate) fn two_nodes() -> Option<[Vec<usize>; 2]> {
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
pub(crate) fn guest_on(cpus: &[usize], place: &Place) -> Vm {
    let cpus: CpuList = cpus.iter().copied().collect();
    let start = || {
        pin_to_cpus(&cpus).expect("CPUs of this machine");
        let mut vm = place.vm(false);
        // Memory comes from the node of the thread that touches it first. The virtqueues of the
        // next start are behind all that was taken.
        let taken = usize::try_from(vm.ram.taken()).expect("64 bits");
        vm.ram.memory().write_bytes(taken, &vec![0; 4 << 20]);
        vm.reset().expect("a reset");
        vm
    };
    // A thread of its own: this one stays where it may be now.
    std::thread::scope(|scope| scope.spawn(start).join().expect("a guest"))
}

/// CPUs of all threads with such names.
pub(crate) fn threads_named(pid: u32, start: &str) -> Vec<Vec<usize>> {
    let all = threads(pid).into_iter();
    all.filter(|(name, _)| name.starts_with(start)).map(|(_, cpus)| cpus).collect()
}

/// Pages on a node of the stack of each thread with such a name.
pub(crate) fn stack_pages_on(pid: u32, start: &str, node: usize) -> Vec<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("NUMA");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let stack = |task: std::fs::DirEntry| {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).ok();
        let _queue_thread = read("comm").filter(|name| name.starts_with(start))?;
        // A thread that sleeps: its call, six arguments, stack pointer and program counter.
        let call = read("syscall")?;
        let pointer = call.split_whitespace().rev().nth(1)?.strip_prefix("0x")?;
        let pointer = u64::from_str_radix(pointer, 16).ok()?;
        let of = |line: &str| u64::from_str_radix(line.split(' ').next().unwrap_or(""), 16).ok();
        let line =
            maps.lines().take_while(|line| of(line).is_some_and(|at| at <= pointer)).last()?;
        let key = format!("N{node}=");
        let pages = line.split_whitespace().find_map(|word| word.strip_prefix(&key)?.parse().ok());
        Some(pages.unwrap_or(0))
    };
    tasks.flatten().filter_map(stack).collect()
}
