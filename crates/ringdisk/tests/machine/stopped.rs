//! A server that does not run (SIGSTOP, a debugger, a frozen cgroup) while its mount goes, on both
//! transports: who takes the mount away may have to wait until the server runs again or is killed,
//! and then everything ends. And one that runs so slowly that it can be killed in a moment that is
//! short otherwise.

use std::os::unix::fs::FileExt;

use ringdisk_testkit::limits::{UringParameter, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, scratch};
use ringdisk_testkit::process::{LIMIT, Process, command, has, until};
use rustix::process::Signal;

use crate::common::{MIB, open, program, serve_raw};

const WAYS: [&[&str]; 2] = [&["umount"], &["umount", "-l"]];

/// Each transport that there is, with the switch held.
fn on_each(mut test: impl FnMut(&str, &[&str])) {
    if !needs_root() {
        return;
    }
    for transport in ["dev", "uring"] {
        let switch = UringParameter::set(transport == "uring");
        if transport == "uring" && switch.is_none() {
            return;
        }
        for way in WAYS {
            test(transport, way);
        }
    }
}

#[test]
fn a_server_that_is_stopped_while_its_mount_goes_ends_once_it_runs_again() {
    on_each(|transport, way| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        open(disk.mounted.path()).write_all_at(b"kept", 10).expect("write");
        disk.mounted.process().signal(Signal::STOP);
        let mut umount = Process::spawn(command(way).arg(disk.mounted.path()));
        umount.rests();
        disk.mounted.process().signal(Signal::CONT);
        let ended = umount.wait(LIMIT).expect("umount ends");
        assert!(ended.success(), "{transport} {way:?}: {}", umount.output());
        let finished = disk.mounted.finish();
        assert_eq!(finished.code(), Some(0), "{transport} {way:?}: {}", finished.output());
        assert_eq!(std::fs::read(&disk.image).expect("the image")[10..14], *b"kept");
    });
}

#[test]
fn a_server_that_is_killed_while_it_is_stopped_lets_everybody_go() {
    on_each(|transport, way| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let input = format!("if={}", disk.mounted.text());
        disk.mounted.process().signal(Signal::STOP);
        let words = ["dd", &input, "of=/dev/null", "bs=4k", "count=1", "iflag=direct"];
        let mut client = Process::spawn(&mut command(&words));
        client.rests();
        let mut umount = Process::spawn(command(way).arg(disk.mounted.path()));
        umount.rests();
        disk.mounted.process().signal(Signal::KILL);
        assert!(client.wait(LIMIT).is_some(), "{transport} {way:?}: a client hangs");
        assert!(umount.wait(LIMIT).is_some(), "{transport} {way:?}: umount hangs");
        assert!(disk.mounted.process().wait(LIMIT).is_some(), "{transport} {way:?}");
        let path = disk.mounted.path().to_owned();
        drop(disk.mounted);
        let gone = until(LIMIT, || mount_at(&path).is_none().then_some(()));
        assert!(gone.is_some(), "{transport} {way:?}");
    });
}

/// Processes that a process has started.
fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn a_server_that_is_killed_while_it_looks_at_its_own_mount_ends() {
    if !needs_root() || !needs("strace", has("strace")) {
        return;
    }
    let traces = command(&["strace", "-o", "/dev/null", "true"]).status();
    if !needs("right to trace", traces.is_ok_and(|status| status.success())) {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    let directory = scratch();
    let path = directory.path().join("disk");
    // Each enter of a ring takes so long; the tracer is not the parent.
    let mut slow = command(&["strace", "-D", "-f", "-qq", "-o", "/dev/null"]);
    slow.args(["-e", "trace=io_uring_enter", "-e", "inject=io_uring_enter:delay_enter=400000"]);
    slow.args([&program(), "mount", "--null", "1M", "--transport", "uring", "--threads", "1"]);
    let mut server = Process::spawn(slow.arg(&path));
    let is_server = |pid: u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "ringdisk"
    };
    let pid = server.pid();
    let looks = || (is_server(pid) && children(pid).into_iter().any(is_server)).then_some(());
    assert!(until(LIMIT, looks).is_some(), "{}", server.output());
    server.signal(Signal::KILL);
    assert!(server.wait(LIMIT).is_some(), "the server hangs");
    // What it left is replaced.
    let disk = Mounted::start_at(&program(), &["--null", "1M", "--transport", "uring"], &path);
    assert_eq!(disk.stop().code(), Some(0));
}
