//! Where a mount is served: threads on the CPUs that were asked for, every CPU's callers served,
//! what is refused and how, and what `ringdisk topology` says. Machines that are not at hand are in
//! `crates/fuse/src/placement/tests.rs`.

use std::path::Path;
use std::time::Duration;

use ringdisk_ring::{CpuList, Topology};
use ringdisk_testkit::cpuset::Cpuset;
use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{
    UringParameter, mount_at, needs, needs_root, part_needs, resident_bytes,
};
use ringdisk_testkit::machine::Machine;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, until};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::tools::{Ran, ringdisk};
use crate::common::{MIB, assert_refused, mount, program, raw_image, serve_raw, try_mount};

/// Root, and the kernel's switch for io_uring.
fn with_switch(enabled: bool) -> Option<UringParameter> {
    if !needs_root() {
        return None;
    }
    UringParameter::set(enabled)
}

/// What `ringdisk topology` says of a mount.
fn topology(disk: &Mounted) -> Value {
    ringdisk(Path::new("/"), &["topology", "--json", disk.text()]).ok().json()
}

/// What a mount would get.
fn foreseen(words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["topology"], words].concat())
}

/// The CPUs of a process or thread, as the kernel says.
fn allowed(status: &str) -> CpuList {
    let text = std::fs::read_to_string(status).expect(status);
    let list = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    CpuList::of_kernel(list.expect("a list"))
}

fn numbers(value: &Value) -> CpuList {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| usize::try_from(number.as_u64().expect("a number")).expect("small")).collect()
}

/// Each queue thread runs where the mount says that it does, and there is no other.
fn assert_threads(disk: &Mounted, mount: &Value, cpus: &[usize]) {
    let threads = mount["threads"].as_array().expect("threads");
    let asked: Vec<CpuList> = threads.iter().map(|thread| numbers(&thread["cpus"])).collect();
    let wanted: Vec<CpuList> = cpus.iter().map(|cpu| [*cpu].into_iter().collect()).collect();
    assert_eq!(asked, wanted, "{mount}");
    for thread in threads {
        let status = format!("/proc/{}/task/{}/status", disk.pid(), thread["tid"]);
        let name = std::fs::read_to_string(&status).expect("a thread of the server");
        assert!(name.contains(&format!("Name:\tqueue-{}\n", thread["thread"])), "{name}");
        assert_eq!(allowed(&status), numbers(&thread["cpus"]), "{thread}");
        assert_eq!(numbers(&thread["cpus-allowed"]), numbers(&thread["cpus"]), "{thread}");
    }
    let tasks = std::fs::read_dir(format!("/proc/{}/task", disk.pid())).expect("tasks").flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    assert_eq!(names.filter(|name| name.starts_with("queue-")).count(), cpus.len());
}

/// A client on each CPU that this test may use reads what it should.
fn assert_all_callers_served(disk: &Mounted) {
    for cpu in allowed("/proc/self/status").iter() {
        let input = format!("if={}", disk.text());
        let words = ["-c", &cpu.to_string(), "dd", &input, "of=/dev/null", "bs=64k", "count=8"];
        let ran = Process::spawn(command(&["taskset"]).args(words)).finish(Duration::from_secs(20));
        assert_eq!(ran.code(), Some(0), "CPU {cpu}: {}", ran.output());
    }
    assert_eq!(piece(disk.path(), 1000, 100_000), pattern(1, 1000, 100_000));
}

/// Two CPUs of this machine; says that the test is left out when there are fewer.
fn two_cpus() -> Option<[usize; 2]> {
    let all: Vec<usize> = allowed("/proc/self/status").iter().collect();
    let two = all.first_chunk::<2>().copied();
    (needs("second CPU", two.is_some()) && needs("taskset", has("taskset"))).then_some(two?)
}

#[test]
fn threads_are_on_the_cpus_of_the_list_over_both_transports() {
    let Some(_switch) = with_switch(true) else { return };
    let Some([a, b]) = two_cpus() else { return };
    let both = format!("{a},{b}");
    for transport in ["dev", "uring"] {
        for (list, threads, cpus) in [
            (a.to_string(), "2", vec![a, a]),
            (b.to_string(), "auto", vec![b]),
            (b.to_string(), "1", vec![b]),
            (both.clone(), "2", vec![a, b]),
            (both.clone(), "auto", vec![a, b]),
            (both.clone(), "5", vec![a, b, a, b, a]),
        ] {
            let words = ["--transport", transport, "--cpus", &list, "--threads", threads];
            let disk = serve_raw(4 * MIB, &words);
            assert_all_callers_served(&disk.mounted);
            let value = topology(&disk.mounted);
            assert_eq!(value["mount"]["transport"], transport);
            assert_threads(&disk.mounted, &value["mount"], &cpus);
            assert_eq!(disk.mounted.stop().code(), Some(0), "{words:?}");
        }
    }
}

/// Each queue thread of a mount: its own CPU, and the file that says where it may run. A thread in
/// a trial is elsewhere for some ms, and a program that is asked takes longer than that: so the
/// kernel is.
fn queue_threads(disk: &Mounted) -> Vec<(usize, String)> {
    let value = topology(disk);
    let threads = value["mount"]["threads"].as_array().expect("threads").iter();
    let of_thread = |thread: &Value| {
        let own = numbers(&thread["cpus"]).only().expect("one CPU");
        (own, format!("/proc/{}/task/{}/status", disk.pid(), thread["tid"]))
    };
    threads.map(of_thread).collect()
}

/// Whether a thread may run on more CPUs than its own, which are all in `within`.
fn is_free((_, status): &(usize, String), within: &[usize]) -> bool {
    let now = allowed(status);
    // Not always its own: a thread that begins to roam is bound to the other CPU for a moment.
    assert!(now.iter().all(|cpu| within.contains(&cpu)), "{now}");
    now.iter().count() > 1
}

/// A trial comes once a second at least.
const MOVES: Duration = Duration::from_secs(30);

/// What the rule chooses is for the rates of the machine to say (its tests are a simulation of
/// loads, `crates/fuse/src/uring/policy`); that it tries another spot for several requests at once,
/// and home for one, is so on each machine, and that the threads then are where it says.
#[test]
fn threads_leave_their_cpu_for_a_deep_client_and_come_back_for_one_that_waits() {
    let Some(_switch) = with_switch(true) else { return };
    let Some([a, b]) = two_cpus() else { return };
    if !needs("fio", has("fio")) {
        return;
    }
    let list = format!("{a},{b}");
    let words = ["--null", "1G", "--transport", "uring", "--cpus", &list, "--threads", "2"];
    let disk = mount(&words);
    let threads = queue_threads(&disk);
    assert!(!threads.iter().any(|thread| is_free(thread, &[a, b])), "{}", topology(&disk));
    let file = format!("--filename={}", disk.text());
    let fio = |cpus: &str, engine: &str, depth: &str| {
        let words =
            ["--direct=1", "--size=1g", "--rw=randread", "--bs=4k", "--time_based", "--thread"];
        // Longer than any test here waits.
        let mut fio = command(&["taskset", "-c", cpus, "fio", "--name=t", &file, "--runtime=3600"]);
        Process::spawn(fio.args(words).args([engine, depth]))
    };
    let begins = |client: &mut Process| {
        client.has_begun(disk.path());
        assert!(client.ended().is_none(), "{}", client.output());
    };
    let mut deep = fio(&list, "--ioengine=libaio", "--iodepth=32");
    begins(&mut deep);
    let has_left = || threads.iter().any(|thread| is_free(thread, &[a, b])).then_some(());
    let left = until(MOVES, has_left);
    assert!(left.is_some(), "{} {}", deep.output(), topology(&disk));
    deep.signal(Signal::TERM);
    assert!(deep.wait(LIMIT).is_some());
    // Only a thread with requests comes back.
    for (cpu, status) in &threads {
        let mut client = fio(&cpu.to_string(), "--ioengine=psync", "--iodepth=1");
        begins(&mut client);
        let is_home = || (allowed(status).only() == Some(*cpu)).then_some(());
        let home = until(MOVES, is_home);
        assert!(home.is_some(), "{} {}", client.output(), topology(&disk));
        client.signal(Signal::TERM);
        assert!(client.wait(LIMIT).is_some());
    }
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn threads_that_somebody_else_binds_are_left_alone() {
    let Some(_switch) = with_switch(true) else { return };
    let Some([a, _]) = two_cpus() else { return };
    if !needs("fio", has("fio")) {
        return;
    }
    let disk = mount(&["--null", "1G", "--transport", "uring", "--threads", "2"]);
    let (cpu, pid) = (a.to_string(), disk.pid().to_string());
    let bound = Process::spawn(&mut command(&["taskset", "-a", "-cp", &cpu, &pid])).finish(LIMIT);
    assert_eq!(bound.code(), Some(0), "{}", bound.output());
    let file = format!("--filename={}", disk.text());
    let words = ["--direct=1", "--size=1g", "--rw=randread", "--bs=4k", "--ioengine=libaio"];
    // Two clients: each CPU's thread has work.
    let mut fio = command(&["fio", "--name=t", &file, "--iodepth=32", "--number_ios=50000"]);
    let ran = Process::spawn(fio.args(words).arg("--numjobs=2")).finish(Duration::from_secs(60));
    assert_eq!(ran.code(), Some(0), "{}", ran.output());
    // The thread whose own CPU it is has been bound to what it was bound to anyway.
    let value = topology(&disk);
    let threads = value["mount"]["threads"].as_array().expect("threads").iter();
    let others = threads.filter(|thread| numbers(&thread["cpus"]).only() != Some(a));
    for thread in others {
        assert_eq!(numbers(&thread["cpus-allowed"]).only(), Some(a), "{thread}");
    }
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_single_thread_is_bound_to_the_whole_list_and_without_one_not_at_all() {
    if !needs_root() {
        return;
    }
    let Some([a, b]) = two_cpus() else { return };
    let list = format!("{a},{b}");
    for (words, cpus) in [
        (&["--threads", "1", "--cpus", &list][..], json!([a, b])),
        (&["--threads", "1"], json!([])),
    ] {
        let disk = serve_raw(MIB, words);
        let thread = &topology(&disk.mounted)["mount"]["threads"][0];
        assert_eq!(thread["cpus"], cpus);
        let mine = allowed("/proc/self/status");
        let expected = if cpus == json!([]) { mine } else { numbers(&cpus) };
        assert_eq!(numbers(&thread["cpus-allowed"]), expected);
        assert_eq!(disk.mounted.stop().code(), Some(0));
    }
}

#[test]
fn under_a_mask_without_a_cpu_its_callers_are_served_and_one_line_says_so() {
    let Some(_switch) = with_switch(true) else { return };
    let Some([a, b]) = two_cpus() else { return };
    for (kept, lost) in [(b, a), (a, b)] {
        let (directory, image) = raw_image(4 * MIB, 1);
        let path = directory.path().join("disk");
        let cpu = kept.to_string();
        let mut words = command(&["taskset", "-c", &cpu, &program(), "-v", "mount"]);
        words.args(["--transport", "uring", "-f", "raw"]).arg(&image).arg(&path);
        let disk = Mounted::from_command(&mut words, &path);
        assert_all_callers_served(&disk);
        let value = topology(&disk);
        assert_eq!(value["machine"]["allowed"], json!([kept]));
        let queues = value["mount"]["queues"].as_array().expect("queues");
        assert!(queues.len() >= 2 && queues.iter().all(|queue| queue["thread"] == 0), "{value}");
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        let lines: Vec<&str> =
            finished.stderr.lines().filter(|line| line.contains("outside the CPU mask")).collect();
        assert_eq!(lines.len(), 1, "{}", finished.stderr);
        assert!(lines[0].contains(&format!("CPU {lost}")) || queues.len() > 2, "{lines:?}");
        assert!(lines[0].contains(&format!("threads on {kept}")), "{lines:?}");
    }
}

#[test]
fn in_a_cpuset_threads_are_on_its_cpus_and_obey_when_it_changes() {
    let Some(_switch) = with_switch(true) else { return };
    let Some([a, b]) = two_cpus() else { return };
    let assert_all_on = |disk: &Mounted, cpu: usize| {
        let value = topology(disk);
        let threads = value["mount"]["threads"].as_array().expect("threads");
        assert!(!threads.is_empty());
        for thread in threads {
            assert_eq!(numbers(&thread["cpus-allowed"]).only(), Some(cpu), "{thread}");
        }
    };
    for transport in ["dev", "uring"] {
        let Some(set) = Cpuset::new(&b.to_string()) else { return };
        let (directory, image) = raw_image(4 * MIB, 1);
        let path = directory.path().join("disk");
        let mut words = set.command(&[&program(), "mount", "--transport", transport, "-f", "raw"]);
        let disk = Mounted::from_command(words.arg(&image).arg(&path), &path);
        assert_eq!(topology(&disk)["machine"]["allowed"], json!([b]));
        assert_all_on(&disk, b);
        assert_all_callers_served(&disk);
        // The CPU that its threads run on is taken away.
        set.set_cpus(&a.to_string());
        assert_all_callers_served(&disk);
        assert_all_on(&disk, a);
        assert_eq!(disk.stop().code(), Some(0));
    }
}

#[test]
fn cpus_that_cannot_be_used_are_refused_before_anything_is_made() {
    let directory = scratch();
    let (image, mountpoint) = (directory.path().join("a.img"), directory.path().join("disk"));
    let last = CpuList::of_kernel(
        &std::fs::read_to_string("/sys/devices/system/cpu/possible").expect("possible CPUs"),
    );
    let beyond = (last.iter().max().expect("a CPU") + 7).to_string();
    for (list, words) in [
        (beyond.as_str(), &["this machine has no CPU", "its CPUs are"][..]),
        ("3-1", &["runs backwards"]),
        ("", &["empty"]),
        ("two", &["'two' is not a CPU number"]),
    ] {
        let refused = try_mount(&["--create", "1M", "--cpus", list, text(&image)], &mountpoint);
        assert_refused(&refused, words);
        assert_eq!(refused.code(), Some(2), "{}", refused.output());
        assert!(!image.exists() && !mountpoint.exists() && mount_at(&mountpoint).is_none());
    }
    let Some([a, b]) = two_cpus() else { return };
    let mask = a.to_string();
    let mut words = command(&["taskset", "-c", &mask, &program(), "mount", "--null", "1M"]);
    words.args(["--cpus", &b.to_string()]).arg(&mountpoint);
    let refused = Process::spawn(&mut words).finish(Duration::from_secs(20));
    assert_refused(&refused, &["none of them can be used", "outside the CPUs"]);
    assert_eq!(refused.code(), Some(2), "{}", refused.output());
}

#[test]
fn a_cpu_of_the_list_outside_the_mask_is_left_out_with_a_warning() {
    if !needs_root() {
        return;
    }
    let Some([a, b]) = two_cpus() else { return };
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    let (mask, list) = (a.to_string(), format!("{a},{b}"));
    let mut words = command(&["taskset", "-c", &mask, &program(), "mount", "--cpus", &list]);
    words.args(["--threads", "2", "-f", "raw"]).arg(&image).arg(&path);
    let disk = Mounted::from_command(&mut words, &path);
    let value = topology(&disk);
    assert_threads(&disk, &value["mount"], &[a, a]);
    let warning = format!("left out: CPU {b} is outside the CPUs that this process may use ({a})");
    assert!(value["mount"]["warnings"].to_string().contains(&warning), "{value}");
    let finished = disk.stop();
    assert!(finished.stderr.contains(&format!(": {warning}")), "{finished:?}");
    assert_eq!(finished.stderr.matches("warning: --cpus").count(), 1, "{finished:?}");
}

#[test]
fn topology_tells_where_the_buffers_of_a_mount_are_once_they_were_used() {
    let Some(_switch) = with_switch(true) else { return };
    for transport in ["dev", "uring"] {
        let disk = serve_raw(8 * MIB, &["--transport", transport, "--queue-depth", "4"]);
        let _ = piece(disk.mounted.path(), 0, 8 << 20);
        let value = topology(&disk.mounted);
        let nodes: Vec<String> = value["machine"]["nodes"]
            .as_array()
            .expect("nodes")
            .iter()
            .map(|node| node["node"].to_string())
            .collect();
        let threads = value["mount"]["threads"].as_array().expect("threads");
        let memory = threads.iter().map(|thread| &thread["memory"]);
        let known: Vec<&Value> = memory.filter(|memory| **memory != json!("unknown")).collect();
        if !needs("leave to ask where pages are", known.len() == threads.len()) {
            return;
        }
        let bytes = |memory: &Value| {
            let object = memory["nodes"].as_object().expect("nodes");
            assert!(object.keys().all(|node| nodes.contains(node)), "{memory}");
            object.values().filter_map(Value::as_u64).sum::<u64>()
        };
        let touched: u64 = known.iter().map(|memory| bytes(memory)).sum();
        let untouched: u64 =
            known.iter().filter_map(|memory| memory["untouched-bytes"].as_u64()).sum();
        // A read of 8 MiB used some of the entries, and none of them twice at once.
        assert!((4096..=9 * MIB).contains(&touched), "{transport}: {touched}: {value}");
        let most = value["mount"]["memory-bytes-max"].as_u64().expect("bytes");
        assert!(touched + untouched >= most, "{transport}: {touched} {untouched} {most}");
        let text = ringdisk(Path::new("/"), &["topology", disk.mounted.text()]).ok().out;
        for words in ["machine\n", "mount\n", "thread 0", "buffers", "node "] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert_eq!(disk.mounted.stop().code(), Some(0));
    }
}

/// One client on each CPU that this test may use, which reads with large requests past the page
/// cache until it is dropped: buffers of clients that have ended are given back a second later.
fn readers_on_all_cpus(disk: &Mounted) -> Vec<Process> {
    let script = "while dd if=\"$0\" of=/dev/null bs=1M iflag=direct; do :; done";
    let reader = |cpu: usize| {
        let words = ["taskset", "-c", &cpu.to_string(), "sh", "-c", script, disk.text()];
        Process::spawn(&mut command(&words))
    };
    allowed("/proc/self/status").iter().map(reader).collect()
}

/// How many threads have used a large buffer.
///
/// Panics: memory of a thread is on another node than its own.
fn threads_with_large_buffers(value: &Value) -> usize {
    let has_large = |thread: &&Value| {
        let memory = thread["memory"]["nodes"].as_object().expect("the kernel tells");
        let own = thread["memory-node"].to_string();
        assert_eq!(thread["memory-node"], thread["node"], "{thread}");
        assert!(memory.keys().all(|node| *node == own), "{thread}");
        memory.get(&own).and_then(Value::as_u64) >= Some(MIB)
    };
    let threads = value["mount"]["threads"].as_array().expect("threads");
    threads.iter().filter(has_large).count()
}

#[test]
fn on_several_nodes_the_buffers_of_each_queue_are_on_the_node_of_its_cpu() {
    let Some(_switch) = with_switch(true) else { return };
    let nodes = Topology::read().nodes;
    if !needs("second NUMA node", nodes.iter().filter(|node| node.is_memory_usable).count() > 1) {
        return;
    }
    // The words, and how many threads serve something of the load at least.
    for (words, busy) in [
        (&["--transport", "uring", "--no-pools"][..], 4),
        (&["--transport", "uring", "--direct"], 4),
        (&["--transport", "uring", "--no-pools", "--threads", "2"], 2),
        (&["--transport", "dev"], 1),
    ] {
        let disk = serve_raw(8 * MIB, &[&["--queue-depth", "4"], words].concat());
        let busy = busy.min(Topology::read().allowed.len());
        let mut readers = readers_on_all_cpus(&disk.mounted);
        let enough = until(LIMIT, || {
            (threads_with_large_buffers(&topology(&disk.mounted)) >= busy).then_some(())
        });
        let ended: Vec<_> = readers.iter_mut().filter_map(Process::ended).collect();
        assert!(ended.is_empty(), "{words:?}: a reader failed: {ended:?}");
        assert!(enough.is_some(), "{words:?}: {}", topology(&disk.mounted));
        drop(readers);
        assert_eq!(disk.mounted.stop().code(), Some(0));
    }
}

#[test]
fn with_numa_off_no_memory_is_bound() {
    let Some(_switch) = with_switch(true) else { return };
    for (numa, prefers) in [("auto", true), ("off", false)] {
        let disk = mount(&["--null", "1M", "--transport", "uring", "--numa", numa]);
        let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", disk.pid()));
        let value = topology(&disk);
        let bound = value["mount"]["threads"].as_array().expect("threads").iter();
        let bound = bound.filter(|thread| thread["memory-node"] != Value::Null).count();
        assert_eq!(
            bound > 0,
            prefers || value.to_string().contains("could not be bound"),
            "{value}"
        );
        if part_needs("numa_maps in /proc", maps.is_ok()) {
            let maps = maps.expect("as seen");
            assert_eq!(maps.contains(" prefer:"), bound > 0, "{numa}: {maps}");
        }
        assert_eq!(disk.stop().code(), Some(0));
    }
}

/// Memory of a mount that has served nothing, bytes.
fn idle_bytes(words: &[&str]) -> u64 {
    let all = [&["--null", "1M", "--no-pools", "--transport", "uring"], words].concat();
    let disk = mount(&all);
    let bytes = resident_bytes(disk.pid());
    assert_eq!(disk.stop().code(), Some(0));
    bytes
}

/// The figures from which the table in docs/transports.md is made: 9 KiB for an entry, 150 KiB for
/// a thread.
#[test]
fn an_idle_mount_takes_what_the_documentation_says() {
    let Some(_switch) = with_switch(true) else { return };
    let few = idle_bytes(&["--threads", "2", "--queue-depth", "16"]);
    let deep = idle_bytes(&["--threads", "2", "--queue-depth", "528"]);
    let wide = idle_bytes(&["--threads", "34", "--queue-depth", "16"]);
    // Queues of this machine: 512 entries more in each; 32 threads more.
    let queues = Topology::read().online.len() as u64;
    let (entry, thread) = ((deep - few) / (queues * 512), (wide - few) / 32);
    assert!((6 << 10..12 << 10).contains(&entry), "{entry} bytes for an entry");
    assert!((75 << 10..300 << 10).contains(&thread), "{thread} bytes for a thread");
}

#[test]
fn what_a_mount_would_get_is_what_it_gets() {
    let Some(_switch) = with_switch(true) else { return };
    for words in [
        &["--transport", "uring"][..],
        &["--transport", "uring", "--threads", "1", "--queue-depth", "3"],
        &["--transport", "dev", "--numa", "off"],
    ] {
        let would = foreseen(&[words, &["--json"]].concat()).ok().json();
        let disk = serve_raw(MIB, words);
        let got = topology(&disk.mounted);
        assert_eq!(would["machine"], got["machine"]);
        for key in ["transport", "numa", "queues", "payload-bytes"] {
            assert_eq!(would["mount"][key], got["mount"][key], "{words:?}: {key}");
        }
        // With buffer pools there are fewer buffers than entries.
        let most = |value: &Value| value["mount"]["memory-bytes-max"].as_u64().expect("bytes");
        let is_less = got["mount"]["ring-mode"] != json!("entries") && most(&got) < most(&would);
        assert!(is_less || most(&got) == most(&would), "{words:?}: {got}");
        let threads =
            |value: &Value| value["mount"]["threads"].as_array().expect("threads").clone();
        for (would, got) in threads(&would).iter().zip(threads(&got)) {
            for key in ["thread", "cpus", "node", "memory-node", "queues", "entries"] {
                assert_eq!(would[key], got[key], "{words:?}: {key}");
            }
        }
        assert_eq!(threads(&would).len(), threads(&got).len());
        assert_eq!(disk.mounted.stop().code(), Some(0));
    }
}

#[test]
fn a_large_machine_is_shown_as_it_is() {
    let Some(_switch) = with_switch(true) else { return };
    let machine = Machine::even(256, 4);
    let words = ["--transport", "uring", "--root", text(machine.path())];
    let value = foreseen(&[&words[..], &["--json"]].concat()).ok().json();
    let mount = &value["mount"];
    assert_eq!(mount["queues"].as_array().map(Vec::len), Some(256));
    assert_eq!(mount["threads"].as_array().map(Vec::len), Some(64));
    assert_eq!(mount["threads"][5]["queues"].as_array().map(Vec::len), Some(4));
    assert_eq!(mount["memory-bytes-max"], (2u64 << 30) + 256 * 4096);
    let shown = foreseen(&words).ok().out;
    assert!(shown.contains("256 possible (0-255)"), "{shown}");
    assert!(shown.contains("at most 2 GiB for 2048 entries of 1 MiB"), "{shown}");
}

#[test]
fn topology_of_what_is_not_mounted_or_with_options_of_a_mount_is_refused() {
    let directory = scratch();
    std::fs::write(directory.path().join("file"), "").expect("a file");
    ringdisk(directory.path(), &["topology", "file"]).ends(4).says("no disk of ringdisk");
    ringdisk(directory.path(), &["topology", "--threads", "2", "file"]).ends(2).says("--threads");
    foreseen(&["--cpus", "60000"]).ends(2).says("this machine has no CPU 60000");
}
