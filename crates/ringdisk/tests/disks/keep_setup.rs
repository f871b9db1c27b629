//! `ringdisk serve --keep` is killed at each system call of its control thread while a front end
//! sets the device up, uses it and stops it: before and after a message is looked at, recorded,
//! taken, carried out and answered. Nothing is carried out twice, answered twice, or lost.
//! `RINGDISK_FULL=1` for all calls in place of a part of them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::limits::{full, needs, needs_root};
use ringdisk_testkit::model::{FrontEnd, Refused, Vm, bits};
use ringdisk_testkit::process::{LIMIT, Process, command, has, until};
use ringdisk_testkit::sim::Prng;

use crate::common::tools::child_of;
use crate::keep::{Server, judge, load, options};

/// System calls of the control thread in all that the front end does, and some more.
const CALLS: u64 = 900;
/// The message that asks for nothing but an answer.
const GET_FEATURES: u32 = 1;
/// Kills of the processes of one disk.
const KILLS: u64 = 4;

/// The control thread of a process.
fn control_thread(pid: u32) -> Option<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut threads = threads.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let tid = threads.find(|tid| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"));
        name.is_ok_and(|name| name.trim() == "vhost")
    })?;
    tid.parse().ok()
}

fn is_traced(tid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
}

/// Sees to it that the process that serves is killed when its control thread begins its `call`th
/// system call from now on. Gives the process, and the one that sees to it.
fn kill_at(helper: u32, call: u64) -> Option<(u32, Process)> {
    let (pid, tid) = until(LIMIT, || {
        let pid = child_of(helper)?;
        Some((pid, control_thread(pid)?))
    })?;
    let inject = format!("inject=all:signal=KILL:when={call}");
    let tid_word = tid.to_string();
    let words =
        ["strace", "-qq", "-o", "/dev/null", "-e", "trace=all", "-e", &inject, "-p", &tid_word];
    let tracer = Process::spawn(&mut command(&words));
    until(LIMIT, || (is_traced(tid) || !lives(pid)).then_some(()))?;
    Some((pid, tracer))
}

fn lives(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// All that a front end does with a device; under load in between.
fn use_it(server: &Server, front: FrontEnd, packed: bool, seed: u64) -> Result<(), Refused> {
    let protocol = !bits::P_DEVICE_STATE & !bits::P_LOG_SHMFD;
    let protocol = if seed.is_multiple_of(2) { protocol } else { protocol & !bits::P_REPLY_ACK };
    let mut options = options(packed, seed.is_multiple_of(3), seed);
    options.protocol &= protocol;
    let mut vm = Vm::start(front, options)?;
    let mut load = load(seed);
    for _ in 0..2 {
        load.run(&mut vm, 60);
        vm.change_call(1)?;
        load.run(&mut vm, 20);
        load.drain(&mut vm);
        vm.front.config(0, 60)?;
        for index in 0..3 {
            let base = vm.front.vring_base(index)?;
            let queue = usize::try_from(index).expect("few");
            assert_eq!(base, vm.queues[queue].driver.base(true), "where virtqueue {index} stands");
            vm.start_queue(queue, Some(base))?;
        }
        load.run(&mut vm, 20);
        load.drain(&mut vm);
        vm.reset()?;
    }
    load.read_all(&mut vm);
    drop(vm);
    judge(&mut load, &server.image, "raw");
    Ok(())
}

fn survive(packed: bool, seed: u64) {
    if !needs_root() || !needs("strace", has("strace")) {
        return;
    }
    let (rounds, mut prng) = (if full() { CALLS.div_ceil(KILLS) } else { 10 }, Prng::new(seed));
    let mut killed = 0;
    for round in 0..rounds {
        let server = Server::start("raw", &[]);
        let helper = server.helper.pid();
        let over = AtomicBool::new(false);
        // A connection that the kernel has just given to the process ends with it: it is no other
        // process's yet.
        let mut first = FrontEnd::connect(&server.socket);
        first.ask(GET_FEATURES, &[], &[]).expect("a reply");
        let result = std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                let mut killed = 0;
                while killed < KILLS && !over.load(Ordering::Acquire) {
                    let call = match full() {
                        true => 1 + (round * KILLS + killed) % CALLS,
                        false => 1 + prng.below(CALLS / KILLS),
                    };
                    let Some((pid, mut tracer)) = kill_at(helper, call) else { break };
                    while lives(pid) && !over.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    killed += u64::from(!lives(pid));
                    tracer.signal(rustix::process::Signal::KILL);
                    tracer.wait(LIMIT);
                }
                killed
            });
            let result = use_it(&server, first, packed, seed + round);
            over.store(true, Ordering::Release);
            killed += killer.join().expect("the killer");
            result
        });
        assert!(result.is_ok(), "round {round}: {result:?}: {}", server.helper.output());
        server.stop();
    }
    println!("packed {packed}: {killed} kills");
    assert!(killed >= rounds, "only {killed} kills");
}

#[test]
fn a_front_end_is_set_up_once_with_split_rings_whenever_the_process_is_killed() {
    survive(false, 10);
}

#[test]
fn a_front_end_is_set_up_once_with_packed_rings_whenever_the_process_is_killed() {
    survive(true, 20);
}
