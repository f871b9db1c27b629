//! A server that does not run (SIGSTOP, a debugger, a frozen cgroup) while its mount goes, on both transports: who takes the mount away may
//! have to wait until the server runs again or is killed, and then everything ends.

mod common;

use std::os::unix::fs::FileExt;
use std::time::Duration;

use common::{MIB, open, serve_raw};
use ringdisk_testkit::limits::{UringParameter, mount_at, needs_root};
use ringdisk_testkit::process::{LIMIT, Process, command, pause, until};
use rustix::process::Signal;

/// Enough for an unmount to get where it has to wait.
const WHILE: Duration = Duration::from_millis(300);
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
        pause(WHILE);
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
        let mut umount = Process::spawn(command(way).arg(disk.mounted.path()));
        pause(WHILE);
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
