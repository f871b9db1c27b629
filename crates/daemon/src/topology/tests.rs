use std::collections::BTreeMap;

use ringdisk_export::{ThreadOptions, Threads};
use ringdisk_fuse::Transport;
use ringdisk_fuse::topology::preview;
use ringdisk_ring::Errno;
use ringdisk_testkit::machine::Machine;

use super::*;

fn dev(machine: &Topology, threads: usize) -> MountTopology {
    let options = ThreadOptions { threads: Threads::Count(threads), ..ThreadOptions::default() };
    preview(machine, &options, Transport::Dev, Some(8)).expect("a placement")
}

#[test]
fn a_machine_and_a_mount_that_is_not_there_yet() {
    let machine = Machine::new("0-7", "0-3", &[(0, "0-1"), (2, "2-3")]).allow("1-2", "2");
    let machine = machine.topology();
    let value = to_json(&machine, &dev(&machine, 2));
    assert_eq!(value["machine"]["allowed"], json!([1, 2]));
    assert_eq!(value["machine"]["nodes"][1]["memory-bytes"], 1 << 30);
    assert_eq!(value["mount"]["threads"][1]["cpus"], json!([2]));
    assert_eq!(value["mount"]["threads"][1].get("tid"), None);
    let text = value["text"].as_str().expect("a text");
    for line in [
        "  CPUs       8 possible (0-7), 4 online (0-3), 2 for this process (1-2)\n",
        "  node 0     CPUs 0-1, no memory for this process\n",
        "  node 2     CPUs 2-3, 1 GiB\n",
        "a mount here would get\n",
        "  transport  /dev/fuse (one input queue for all threads)\n",
        "  thread 0   CPU 1, node 0, 8 entries, buffers where it runs\n",
        "  thread 1   CPU 2, node 2, 8 entries, buffers bound to node 2\n",
        "  note       no memory of node 0",
    ] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
}

#[test]
fn what_is_seen_of_a_thread_is_told_even_when_it_is_little() {
    let machine = Machine::even(2, 1).topology();
    let mut mount = dev(&machine, 2);
    let pages = NodePages { by_node: BTreeMap::from([(0, 256), (3, 2)]), untouched: 5 };
    let allowed = Some("0-1".parse().expect("a list"));
    mount.threads[0].seen = Some(Seen { id: 77, allowed, memory: Ok(pages) });
    mount.threads[1].seen = Some(Seen { id: 78, allowed: None, memory: Err(Errno::PERM) });
    let value = to_json(&machine, &mount);
    let threads = &value["mount"]["threads"];
    assert_eq!(threads[0]["memory"]["nodes"], json!({ "0": 1 << 20, "3": 8192 }));
    assert_eq!(threads[0]["memory"]["untouched-bytes"], 5 * 4096);
    assert_eq!((&threads[0]["tid"], &threads[1]["memory"]), (&json!(77), &json!("unknown")));
    let text = value["text"].as_str().expect("a text");
    assert!(text.contains("CPU 0 (may run on 0-1), node 0"), "{text}");
    assert!(text.contains("buffers: 1 MiB on node 0 + 8 KiB on node 3"), "{text}");
    assert!(text.contains("CPU 1 (ended)") && text.contains("unknown nodes"), "{text}");
}
