//! `ringdisk serve --accel` where the module is (tests/vm/run vhost-blk), and what is asked of it.

use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::limits::needs;
use ringdisk_testkit::model::{BaseRule, Discards, FrontEnd, Load, LoadOptions, Segment, Vm};
use ringdisk_testkit::process::{Finished, LIMIT, run, until};
use ringdisk_testkit::sim::Prng;
use serde_json::Value;

use super::serving::{Daemon, Place, SIZE, load_of, serve_command, stats};

/// Words with which the kernel serves a raw disk.
pub(crate) const PLAIN: [&str; 2] = ["--cache", "none"];
/// The same, and nobody else does.
pub(crate) const REQUIRED: [&str; 4] = ["--cache", "none", "--accel", "require"];

pub(crate) fn has_module() -> bool {
    needs("kernel module vhost_blk", Path::new("/dev/vhost-blk").exists())
}

/// How it is with the kernel.
pub(crate) fn accel(place: &Place) -> Value {
    stats(&place.socket)["accel"].clone()
}

/// Waits until the kernel serves, or does not.
pub(crate) fn becomes(place: &Place, on: bool) -> Value {
    let shown = until(LIMIT, || Some(accel(place)).filter(|accel| accel["on"] == on));
    shown.unwrap_or_else(|| panic!("it should be {on}: {}", accel(place)))
}

/// A counter of the kernel, of all virtqueues.
pub(crate) fn counted(accel: &Value, name: &str) -> u64 {
    let queues = accel["queues"].as_array().expect("virtqueues");
    queues.iter().map(|it| it[name].as_u64().expect("a counter")).sum()
}

/// Requests that the kernel has answered.
pub(crate) fn answered(accel: &Value) -> u64 {
    counted(accel, "reads") + counted(accel, "writes")
}

/// Requests that queue threads have answered.
pub(crate) fn by_threads(counters: &Value) -> u64 {
    let queues = counters["queues"].as_array().expect("queue threads");
    queues.iter().map(|it| it["requests"].as_u64().expect("a counter")).sum()
}

/// The kernel has answered at least so many reads and writes, and queue threads none. Gives what is
/// shown of it.
#[track_caller]
pub(crate) fn assert_by_kernel(place: &Place, at_least: u64) -> Value {
    let counters = stats(&place.socket);
    let shown = counters["accel"].clone();
    assert!(answered(&shown) >= at_least, "{shown}");
    assert_eq!(by_threads(&counters), 0, "queue threads have served: {counters}");
    assert!(counters["total"]["requests"].as_u64() >= Some(at_least), "{counters}");
    shown
}

/// A disk that the kernel serves, and a machine on it.
pub(crate) fn accelerated(words: &[&str]) -> (Place, Daemon, Vm) {
    let place = Place::new("raw");
    let (daemon, vm) = accelerated_at(&place, words);
    (place, daemon, vm)
}

/// The same of a disk that there is.
pub(crate) fn accelerated_at(place: &Place, words: &[&str]) -> (Daemon, Vm) {
    let daemon = place.start(&[&REQUIRED, words].concat());
    let vm = place.vm(true);
    let shown = becomes(place, true);
    assert_eq!(shown["reason"], Value::Null, "{shown}");
    (daemon, vm)
}

/// `ringdisk serve` ends with this code and these words, and leaves no socket.
#[track_caller]
pub(crate) fn assert_refused(
    place: &Place,
    mut command: std::process::Command,
    code: i32,
    why: &str,
) -> Finished {
    let finished = run(&mut command);
    assert_eq!(finished.code(), Some(code), "{why}: {}", finished.output());
    assert!(finished.stderr.contains(why), "{why}: {}", finished.output());
    let lines = finished.stderr.lines().filter(|line| line.contains(why)).count();
    assert_eq!(lines, 1, "it is said once: {}", finished.output());
    assert!(!place.socket.exists(), "{why}");
    finished
}

/// `--accel require` on a disk, to be refused.
pub(crate) fn required(place: &Place, words: &[&str]) -> std::process::Command {
    let socket = ["--vhost-user-blk", place.socket.to_str().expect("a path of a test")];
    let words = [&place.words()[..], &["--accel", "require"], &socket, words].concat();
    serve_command(&words)
}

/// Queue threads serve a disk, and say why. It holds what was written afterwards.
#[track_caller]
pub(crate) fn assert_by_threads(place: &Place, daemon: Daemon, why: &str) {
    assert_by_threads_where(place, daemon, why, Discards::Zero);
}

/// The same where discards leave something else.
#[track_caller]
pub(crate) fn assert_by_threads_where(
    place: &Place,
    daemon: Daemon,
    why: &str,
    discards: Discards,
) {
    let mut vm = place.vm(true);
    let mut load = load_of(20, discards);
    load.run(&mut vm, 200);
    load.drain(&mut vm);
    let counters = stats(&place.socket);
    let shown = &counters["accel"];
    assert_eq!(shown["on"], false, "{shown}");
    assert!(shown["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{shown}");
    assert!(by_threads(&counters) >= 150, "{counters}");
    drop(vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// Requests at once in each of the two virtqueues when a daemon is killed: 20 in all.
const KILL_DEPTH: usize = 10;

/// Kills the daemon again and again with requests in flight, and goes on with another one each
/// time; nothing is lost.
///
/// * `most_us`: a kill comes so long after the requests, at most.
pub(crate) fn kills(place: &Place, count: u64, requests: u64, most_us: u64, seed: u64) {
    let (mut daemon, mut vm) = accelerated_at(place, &[]);
    let (block, bytes_max) = (4096, 64 << 10);
    let mut load = Load::new(LoadOptions {
        size: SIZE,
        block,
        bytes_max,
        // So many always fit the ring.
        segments: 6,
        depth: KILL_DEPTH,
        // What the kernel had not begun when it was killed is not done any more.
        discards: Discards::Hint,
        seed,
    });
    let mut prng = Prng::new(seed);
    let (mut asked, mut left) = (0, 0);
    for kill in 0..count {
        load.run(&mut vm, prng.below(requests));
        (0..2).for_each(|queue| {
            load.fill(&mut vm, queue);
        });
        asked += load.in_flight();
        std::thread::sleep(Duration::from_micros(prng.below(most_us)));
        daemon.kill();
        load.reap(&mut vm);
        left += load.in_flight();
        (0..2).for_each(|queue| {
            load.fill(&mut vm, queue);
        });
        daemon = place.start(&REQUIRED);
        let rule = if prng.coin() { BaseRule::Used } else { BaseRule::Avail };
        vm.resume(FrontEnd::connect(&place.socket), rule).unwrap_or_else(|refused| {
            panic!("kill {kill}: {refused:?}: {}", daemon.process.output())
        });
        becomes(place, true);
    }
    println!(
        "{count} kills with {asked} requests in flight, of which {left} were left to the next \
         process; {} in all",
        load.answered
    );
    assert!(asked as u64 >= count * 2 * KILL_DEPTH as u64, "{asked}");
    load.drain(&mut vm);
    load.read_all(&mut vm);
    let finished = daemon.stop(&[&place.socket]);
    assert!(!finished.output().contains("given up"), "{}", finished.output());
    place.judge(&mut load);
}

/// Reads (`kind` 0) or writes (1) a page by a request of three pages, as drivers do, with `before`
/// in its second page. Gives the status, and what the page holds afterwards. Such a page is not
/// copied on its way; those of a [`Load`] mostly are.
pub(crate) fn aligned(
    vm: &mut Vm,
    queue: usize,
    kind: u32,
    sector: u64,
    before: &[u8],
) -> (u8, Vec<u8>) {
    let at = vm.ram.take(3 * 4096, 4096).expect("room");
    let (page, status) = (at + 4096, at + 2 * 4096);
    let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
    vm.ram.write(at, &header);
    vm.ram.write(page, before);
    vm.ram.write(status, &[0xff]);
    let segments = [(at, 16), (page, 4096), (status, 1)];
    let segments = segments.map(|(addr, len)| Segment { addr, len });
    let readable = if kind == 0 { 1 } else { 2 };
    vm.queues[queue].driver.add(&segments, readable).expect("room");
    vm.queues[queue].driver.publish();
    vm.queues[queue].kick_anyway();
    until(LIMIT, || vm.queues[queue].driver.pop_used()).expect("an answer");
    let mut bytes = vec![0; 4097];
    vm.ram.read(page, &mut bytes);
    (bytes.pop().expect("a status"), bytes)
}
