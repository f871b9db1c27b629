//! The kernel's threads for virtqueues: how many there are, and where they run.

use std::path::Path;

use ringdisk_testkit::mount::text;

use crate::common::accel::{PLAIN, REQUIRED, accel, becomes, counted, has_module};
use crate::common::numa::{allowed, guest_on, two_nodes};
use crate::common::serving::{Place, ctl, load, meanwhile};

/// CPUs of each of the kernel's threads.
fn cpus_of_workers(place: &Place, pid: u32) -> Vec<Vec<usize>> {
    let shown = accel(place);
    let workers = shown["workers"].as_array().expect("workers");
    let status = |tid: &serde_json::Value| format!("/proc/{pid}/task/{tid}/status");
    workers.iter().map(|tid| allowed(Path::new(&status(tid)))).collect()
}

#[test]
fn threads_are_made_when_a_disk_has_become_plain() {
    if !has_module() {
        return;
    }
    let place = Place::new("raw");
    let overlay = place.path("overlay.qcow2");
    let words = ["--packed", "off", "--cpus", "0-1", "--overlay", text(&overlay)];
    let daemon = place.start(&[&PLAIN[..], &words].concat());
    let pid = daemon.process.pid();
    let mut vm = place.vm(true);
    let mut load = load(31);
    load.run(&mut vm, 100);
    let shown = becomes(&place, false);
    let is_told = shown["reason"].as_str().is_some_and(|reason| reason.contains("an overlay"));
    assert!(is_told, "{shown}");
    meanwhile(&mut vm, &mut load, || {
        ctl(&place.socket, &["commit", "--quiet"]).ok();
        becomes(&place, true);
    });
    // One for each virtqueue, each where the queue thread is that it works in place of.
    assert_eq!(cpus_of_workers(&place, pid), [[0], [1]]);
    load.run(&mut vm, 200);
    load.drain(&mut vm);
    let shown = accel(&place);
    for queue in 0..2 {
        assert!(shown["queues"][queue]["reads"].as_u64() > Some(0), "{shown}");
    }
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn threads_go_to_the_node_of_their_virtqueues() {
    let Some(nodes) = two_nodes() else { return };
    if !has_module() {
        return;
    }
    for node in [0, 1] {
        let (here, there) = (&nodes[node], nodes[1 - node][0].to_string());
        for words in [&[][..], &["--cpus", &there]] {
            let place = Place::new("raw");
            let daemon = place.start(&[&REQUIRED, words].concat());
            let mut vm = guest_on(here, &place);
            becomes(&place, true);
            let bound = cpus_of_workers(&place, daemon.process.pid());
            // Where the user has said which CPUs, they stay.
            let is_right =
                |cpus: &Vec<usize>| cpus.iter().all(|cpu| here.contains(cpu)) == words.is_empty();
            assert!(
                bound.len() == 2 && bound.iter().all(is_right),
                "node {node}, {words:?}: {bound:?}"
            );
            let mut load = load(32);
            load.run(&mut vm, 50);
            load.drain(&mut vm);
            assert!(counted(&accel(&place), "reads") > 0);
            daemon.stop(&[&place.socket]);
        }
    }
}
