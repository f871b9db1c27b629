//! The machine, and where a mount is served on it: for programs and for people.
//!
//! Promises: pure formatting; the text says what the JSON says.

use std::fmt::Write as _;

use ringdisk_export::Numa;
use ringdisk_fuse::RingMode;
use ringdisk_fuse::topology::{MountTopology, Seen, ThreadTopology};
use ringdisk_ring::{CpuList, NodePages, Topology};
use serde_json::{Map, Value, json};

use crate::size::human_size;

/// Bytes of a page, as nodes are asked for them.
const PAGE_BYTES: u64 = 4096;

/// All that is known; with the text for people under `text`.
pub fn to_json(machine: &Topology, mount: &MountTopology) -> Value {
    json!({
        "machine": machine_json(machine),
        "mount": mount_json(mount),
        "text": format!("{}{}", machine_text(machine), mount_text(mount)).trim_end(),
    })
}

/// The machine alone; with the text for people under `text`.
pub fn machine_to_json(machine: &Topology) -> Value {
    json!({ "machine": machine_json(machine), "text": machine_text(machine).trim_end() })
}

/// How requests travel.
///
/// * `mode`: what the rings do; `None` without rings.
pub fn transport(mode: Option<RingMode>) -> &'static str {
    match mode {
        None => "/dev/fuse",
        Some(RingMode::Entries) => "io_uring",
        Some(RingMode::Pools) => "io_uring with buffer pools",
        Some(RingMode::ZeroCopy) => "io_uring with buffer pools and zero-copy",
    }
}

fn mode(mode: RingMode) -> &'static str {
    match mode {
        RingMode::Entries => "entries",
        RingMode::Pools => "pools",
        RingMode::ZeroCopy => "zero-copy",
    }
}

fn numbers(list: &CpuList) -> Vec<usize> {
    list.iter().collect()
}

fn machine_json(machine: &Topology) -> Value {
    let node = |node: &ringdisk_ring::Node| {
        json!({
            "node": node.id,
            "cpus": numbers(&node.cpus),
            "memory-bytes": node.memory_bytes,
            "memory-usable": node.is_memory_usable,
        })
    };
    json!({
        "possible": numbers(&machine.possible),
        "online": numbers(&machine.online),
        "allowed": numbers(&machine.allowed),
        "nodes": machine.nodes.iter().map(node).collect::<Vec<_>>(),
        "memory-policy": machine.has_memory_policy,
    })
}

fn mount_json(mount: &MountTopology) -> Value {
    let queue = |queue: &ringdisk_fuse::topology::QueueTopology| {
        json!({
            "queue": queue.number,
            "cpu": queue.cpu,
            "online-at-start": queue.is_online,
            "thread": queue.thread,
            "entries": queue.entries,
        })
    };
    json!({
        "transport": mount.transport.name(),
        "ring-mode": mount.ring_mode.map(mode),
        "reason": mount.reason,
        "numa": numa(mount),
        "payload-bytes": mount.payload_bytes,
        "memory-bytes-max": mount.memory_bytes_max,
        "threads": mount.threads.iter().map(thread_json).collect::<Vec<_>>(),
        "queues": mount.queues.iter().map(queue).collect::<Vec<_>>(),
        "cpus-of-queue-0": numbers(&mount.folded),
        "warnings": mount.warnings,
        "remarks": mount.remarks,
    })
}

fn numa(mount: &MountTopology) -> &'static str {
    match mount.numa {
        Numa::Auto => "auto",
        Numa::Off => "off",
    }
}

fn thread_json(thread: &ThreadTopology) -> Value {
    let mut value = json!({
        "thread": thread.number,
        "cpus": numbers(&thread.asked),
        "node": thread.node,
        "memory-node": thread.memory_node,
        "queues": numbers(&thread.queues),
        "entries": thread.entries,
    });
    if let (Some(seen), Value::Object(object)) = (&thread.seen, &mut value) {
        object.insert(String::from("tid"), json!(seen.id));
        object.insert(String::from("cpus-allowed"), json!(seen.allowed.as_ref().map(numbers)));
        object.insert(String::from("memory"), memory_json(seen));
    }
    value
}

/// Bytes on each node; `unknown` where the system does not tell.
fn memory_json(seen: &Seen) -> Value {
    match &seen.memory {
        Ok(pages) => {
            let bytes =
                |(node, pages): (&usize, &u64)| (node.to_string(), json!(pages * PAGE_BYTES));
            let nodes: Map<String, Value> = pages.by_node.iter().map(bytes).collect();
            json!({ "nodes": nodes, "untouched-bytes": pages.untouched * PAGE_BYTES })
        }
        Err(_) => json!("unknown"),
    }
}

fn machine_text(machine: &Topology) -> String {
    let mut text = String::from("machine\n");
    let list = |what: &str, cpus: &CpuList| format!("{} {what} ({cpus})", cpus.len());
    let _ = writeln!(
        text,
        "  CPUs       {}, {}, {}",
        list("possible", &machine.possible),
        list("online", &machine.online),
        list("for this process", &machine.allowed)
    );
    for node in &machine.nodes {
        let memory = match (node.memory_bytes, node.is_memory_usable) {
            (_, false) => String::from("no memory for this process"),
            (0, true) => String::from("memory"),
            (bytes, true) => human_size(bytes),
        };
        let _ = writeln!(text, "  node {:<5} CPUs {}, {memory}", node.id, node.cpus);
    }
    if machine.has_memory_policy {
        text.push_str("  policy     memory is where this process was told to take it (numactl)\n");
    }
    text
}

fn mount_text(mount: &MountTopology) -> String {
    let is_seen = mount.threads.iter().any(|thread| thread.seen.is_some());
    let mut text = String::from(if is_seen { "mount\n" } else { "a mount here would get\n" });
    let shared = if mount.queues.is_empty() { " (one input queue for all threads)" } else { "" };
    let _ = writeln!(text, "  transport  {}{shared}", transport(mount.ring_mode));
    if let Some(reason) = &mount.reason {
        let _ = writeln!(text, "             {reason}");
    }
    let entries: usize = mount.threads.iter().map(|thread| thread.entries).sum();
    let _ = writeln!(
        text,
        "  memory     at most {} for {entries} entries of {}{}",
        human_size(mount.memory_bytes_max),
        human_size(mount.payload_bytes),
        if mount.numa == Numa::Off { "; nodes are not looked at" } else { "" },
    );
    for thread in &mount.threads {
        let _ = writeln!(text, "  thread {:<3} {}", thread.number, thread_text(thread));
    }
    if !mount.folded.is_empty() {
        let _ = writeln!(text, "  queue 0    also for CPUs {}", mount.folded);
    }
    for line in mount.warnings.iter().chain(&mount.remarks) {
        let _ = writeln!(text, "  note       {line}");
    }
    text
}

fn thread_text(thread: &ThreadTopology) -> String {
    let mut parts = Vec::new();
    if let Some(seen) = &thread.seen {
        parts.push(format!("id {}", seen.id));
    }
    let asked = match thread.asked.is_empty() {
        true => String::from("not bound to a CPU"),
        false => format!("CPU {}", thread.asked),
    };
    parts.push(match thread.seen.as_ref().map(|seen| &seen.allowed) {
        None => asked,
        Some(None) => format!("{asked} (ended)"),
        Some(Some(allowed)) if *allowed == thread.asked => asked,
        Some(Some(allowed)) => format!("{asked} (may run on {allowed})"),
    });
    parts.push(match thread.node {
        Some(node) => format!("node {node}"),
        None => String::from("several nodes"),
    });
    if !thread.queues.is_empty() {
        let word = if thread.queues.len() == 1 { "queue" } else { "queues" };
        parts.push(format!("{word} {}", thread.queues));
    }
    parts.push(format!("{} entries", thread.entries));
    match (&thread.seen, thread.memory_node) {
        (None, Some(node)) => parts.push(format!("buffers bound to node {node}")),
        (None, None) => parts.push(String::from("buffers where it runs")),
        (Some(seen), _) => parts.push(memory_text(seen)),
    }
    parts.join(", ")
}

fn memory_text(seen: &Seen) -> String {
    match &seen.memory {
        Err(errno) => format!("buffers on unknown nodes ({errno})"),
        Ok(pages) if pages.touched() == 0 => String::from("buffers untouched"),
        Ok(NodePages { by_node, .. }) => {
            let one = |(node, pages): (&usize, &u64)| {
                format!("{} on node {node}", human_size(pages * PAGE_BYTES))
            };
            format!("buffers: {}", by_node.iter().map(one).collect::<Vec<_>>().join(" + "))
        }
    }
}

#[cfg(test)]
mod tests;
