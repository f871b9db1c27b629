//! The watchdog of a service manager (`WatchdogSec=`): what is said as long as queue threads
//! answer, from inside of the sandbox, and what becomes of a server of which one does not.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Cleared, Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, patient, stop, until};
use rustix::process::{Pid, Signal, kill_process};

use super::manager::Manager;
use super::traced::{Traced, threads};
use crate::common::serving::{Place, load, meanwhile};
use crate::common::tools::child_of;
use crate::common::{MIB, program, raw_image};

const ALIVE: &str = "WATCHDOG=1";

/// The manager's time. A machine under load has to keep it, too.
fn time() -> Duration {
    patient(Duration::from_secs(2))
}

/// With a manager that waits for signs of life.
fn watched(command: &mut Command) -> &mut Command {
    let usec = time().as_micros().to_string();
    command.env("WATCHDOG_USEC", usec).env_remove("WATCHDOG_PID")
}

fn count(manager: &Manager) -> usize {
    manager.said.iter().filter(|(_, text)| text.contains(ALIVE)).count()
}

/// So many signs of life more.
fn lives(manager: &mut Manager, times: usize, process: &Process) {
    let before = count(manager);
    let come = until(LIMIT, || {
        manager.hear();
        (count(manager) >= before + times).then_some(())
    });
    assert!(come.is_some(), "{:?} {}", manager.said, process.output());
}

/// Stops one queue thread of a process; the others go on.
fn hang(pid: u32) -> Traced {
    let name = |tid: &i32| fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"));
    let is_queue =
        |name: String| ["queue-", "vq-", "nbd-"].iter().any(|words| name.starts_with(words));
    let queue = threads(pid).into_iter().find(|tid| name(tid).is_ok_and(is_queue));
    Traced::stop(queue.expect("a queue thread")).expect("it stands still")
}

/// Nothing is heard while a queue thread hangs, and again when it goes on. What was on its way is
/// heard.
fn silent_while_hung(manager: &mut Manager, pid: u32, process: &Process) {
    lives(manager, 2, process);
    let hung = hang(pid);
    let begun = Instant::now();
    let told = || process.output().contains("queue threads do not answer");
    let is_told = until(LIMIT, || {
        manager.hear();
        told().then_some(())
    });
    assert!(is_told.is_some(), "{}", process.output());
    let before = count(manager);
    while begun.elapsed() < 3 * time() {
        manager.hear();
    }
    assert_eq!(count(manager), before, "{:?}", manager.said);
    drop(hung);
    lives(manager, 2, process);
}

#[test]
fn a_mount_says_that_it_lives_as_long_as_its_queue_threads_answer() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    let mut manager = Manager::named("watchdog-mount");
    let mut command = Command::new(program());
    command.args(["mount", "--format", "raw", "--sandbox", "on", "--threads", "2"]);
    let process = manager.start(watched(command.args([&image, &path])));
    let _cleared = Cleared(path.clone());
    let pid = process.pid();
    manager.wait_for("READY=1", &process);
    silent_while_hung(&mut manager, pid, &process);
    let heard = manager.said.iter().filter(|(_, text)| text.contains(ALIVE));
    assert!(heard.clone().count() > 3 && heard.clone().all(|(sender, _)| *sender == pid));
    process.signal(Signal::TERM);
    assert_eq!(process.finish(LIMIT).code(), Some(0));
}

#[test]
fn a_storage_that_does_not_answer_leaves_the_server_alive() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let inner = Mounted::start(&program(), &["--format", "raw", text(&image)]);
    let path = directory.path().join("disk");
    let mut manager = Manager::named("watchdog-storage");
    let mut outer = Command::new(program());
    outer.args(["mount", "--format", "raw", "--allow-other"]);
    let process = manager.start(watched(outer.arg(inner.path()).arg(&path)));
    let _cleared = Cleared(path.clone());
    manager.wait_for("READY=1", &process);
    let pid = Pid::from_raw(inner.pid().cast_signed()).expect("a pid");
    stop(pid);
    // Reads, writes and flushes that come to nothing.
    let name = text(&path);
    let (input, output) = (format!("if={name}"), format!("of={name}"));
    let reads = ["dd", &input, "of=/dev/null", "bs=4k", "count=64", "iflag=direct"];
    let writes = ["dd", "if=/dev/zero", &output, "bs=4k", "count=8", "conv=notrunc,fsync"];
    let clients = [&reads[..], &writes].map(|words| Process::spawn(&mut command(words)));
    lives(&mut manager, 5, &process);
    kill_process(pid, Signal::CONT).expect("it is there");
    for client in clients {
        assert_eq!(client.finish(LIMIT).code(), Some(0));
    }
    process.signal(Signal::TERM);
    assert_eq!(process.finish(LIMIT).code(), Some(0));
    assert_eq!(inner.stop().code(), Some(0));
}

/// Its guest goes on with the next process, and the manager hears of no trouble.
#[test]
fn a_kept_disk_goes_on_in_another_process_when_its_server_hangs() {
    if !needs_root() {
        return;
    }
    let place = Place::new("qcow2");
    let mut manager = Manager::named("watchdog-keep");
    let mut command = Command::new(program());
    command.args(["serve", "--keep"]).args(place.words());
    let process = manager.start(watched(command.arg("--vhost-user-blk").arg(&place.socket)));
    manager.wait_for("READY=1", &process);
    let (mut vm, mut load) = (place.vm(false), load(1));
    load.run(&mut vm, 100);
    let server = child_of(process.pid()).expect("a server");
    lives(&mut manager, 2, &process);
    kill_process(Pid::from_raw(server.cast_signed()).expect("a pid"), Signal::STOP)
        .expect("it is there");
    let came = meanwhile(&mut vm, &mut load, || {
        until(LIMIT, || {
            manager.hear();
            child_of(process.pid()).filter(|pid| *pid != server)
        })
    });
    assert!(came.is_some(), "{}", process.output());
    load.read_all(&mut vm);
    lives(&mut manager, 2, &process);
    let senders = manager.said.iter().filter(|(_, text)| text.contains(ALIVE)).map(|(pid, _)| *pid);
    assert!(senders.clone().all(|pid| pid == process.pid()), "{:?}", manager.said);
    let words = "does not say that it lives";
    assert!(process.output().contains(words), "{}", process.output());
    process.signal(Signal::TERM);
    assert_eq!(process.finish(LIMIT).code(), Some(0));
    // A kill may lose space.
    drop(images::qemu_img(&["check", "-q", "-r", "leaks", text(&place.image)]));
    place.judge(&mut load);
}

#[test]
fn a_manager_that_waits_for_another_process_hears_nothing() {
    let directory = scratch();
    let socket = directory.path().join("socket");
    let mut manager = Manager::named("watchdog-other");
    let mut command = Command::new(program());
    command.args(["serve", "--null", "1M", "--vhost-user-blk"]).arg(&socket);
    let process = manager.start(watched(&mut command).env("WATCHDOG_PID", "1"));
    manager.wait_for("READY=1", &process);
    let names = threads(process.pid()).into_iter().map(|tid| {
        fs::read_to_string(format!("/proc/{}/task/{tid}/comm", process.pid())).unwrap_or_default()
    });
    assert!(names.into_iter().all(|name| name.trim() != "watchdog"));
    process.signal(Signal::TERM);
    assert_eq!(process.finish(LIMIT).code(), Some(0));
    assert_eq!(count(&manager), 0, "{:?}", manager.said);
}
