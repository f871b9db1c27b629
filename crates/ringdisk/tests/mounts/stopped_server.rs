//! Commands and mounts that meet a server that was stopped by a signal: none of them waits longer
//! than its limit says.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use ringdisk_testkit::limits::mount_at;
use ringdisk_testkit::mount::{Mounted, STOP, text};
use ringdisk_testkit::process::{Process, command, until};
use rustix::process::Signal;

use super::busy::on_each;
use crate::common::{MIB, program, serve_raw};

/// Stops a server, with all its threads.
fn stand_still(disk: &mut Mounted) {
    disk.process().signal(Signal::STOP);
    let threads = format!("/proc/{}/task", disk.pid());
    let stands = |thread: std::fs::DirEntry| {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        status.contains("State:\tT")
    };
    let all = || std::fs::read_dir(&threads).ok()?.flatten().all(stands).then_some(());
    assert_eq!(until(STOP, all), Some(()), "it runs still");
}

/// The limit of commands for a server that does not run.
const STOPPED: Duration = Duration::from_secs(4);

#[test]
fn commands_do_not_wait_for_a_server_that_stands_still() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        stand_still(&mut disk.mounted);
        let limits: [&[&str]; 5] = [
            &["topology", text(&path)],
            &["ctl", "--timeout", "300ms", text(&path), "stats"],
            &["ctl", "--timeout", "300ms", text(&path), "stop"],
            &["ctl", "--timeout", "300ms", text(&path), "resize", "+1M"],
            &["umount", "--timeout", "300ms", text(&path)],
        ];
        for words in limits {
            let program = program();
            let mut client = Process::spawn(command(&[program.as_str()]).args(words));
            let ended = client.wait(STOPPED + Duration::from_secs(20));
            let code = ended.and_then(|status| status.code());
            assert_eq!(code, Some(14), "{transport} {words:?}: {}", client.output());
        }
        // The last of them takes the name away, which is all that can be done without the server;
        // where that takes longer than its limit, a process that it has started goes on.
        let gone = until(STOP, || mount_at(&path).is_none().then_some(()));
        assert!(gone.is_some(), "{}", disk.mounted.output());
        disk.mounted.process().signal(Signal::CONT);
        assert!(disk.mounted.process().wait(STOP).is_some(), "{}", disk.mounted.output());
    });
}

#[test]
fn a_mount_over_a_server_that_stands_still_is_refused_and_ends() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        stand_still(&mut disk.mounted);
        let program = program();
        let words = [program.as_str(), "mount", "--null", "1M", text(&path)];
        let mut next = Process::spawn(&mut command(&words));
        let ended = next.wait(STOPPED + Duration::from_secs(20));
        let code = ended.and_then(|status| status.code());
        assert_eq!(code, Some(4), "{transport}: {}", next.output());
        disk.mounted.process().signal(Signal::CONT);
        assert_eq!(disk.mounted.stop().code(), Some(0));
    });
}

#[test]
fn signals_end_commands_that_wait_for_a_server_that_stands_still() {
    on_each(|transport| {
        let mut disk = serve_raw(MIB, &["--transport", transport]);
        let path = disk.mounted.path().to_owned();
        stand_still(&mut disk.mounted);
        let program = program();
        for words in [["ctl", "--timeout", "600s", text(&path), "stats"].as_slice()] {
            for signal in [Signal::TERM, Signal::INT] {
                let mut client = Process::spawn(command(&[program.as_str()]).args(words));
                let sleeps = || connected(client.pid()).then_some(());
                assert_eq!(until(STOP, sleeps), Some(()), "{}", client.output());
                client.signal(signal);
                assert!(client.wait(STOP).is_some(), "{transport} {words:?}");
            }
        }
        disk.mounted.process().signal(Signal::CONT);
        assert_eq!(disk.mounted.stop().code(), Some(0));
        for signal in [Signal::TERM, Signal::INT] {
            ends_an_unmount(transport, signal);
        }
    });
}

/// An unmount that waits for a server that stands still is ended by a signal, and the mount is gone
/// as it was to be.
fn ends_an_unmount(transport: &str, signal: Signal) {
    let mut disk = serve_raw(MIB, &["--transport", transport]);
    let path = disk.mounted.path().to_owned();
    stand_still(&mut disk.mounted);
    let program = program();
    let words = [program.as_str(), "umount", "--timeout", "600s", text(&path)];
    let mut client = Process::spawn(&mut command(&words));
    // From here on it waits for the server.
    let is_off = || mount_at(&path).is_none().then_some(());
    assert_eq!(until(STOP, is_off), Some(()), "{}", client.output());
    assert_eq!(client.ended(), None, "{transport}: {}", client.output());
    client.signal(signal);
    let ended = client.wait(STOP).and_then(|status| status.signal());
    assert_eq!(ended, Some(signal.as_raw()), "{transport}: {}", client.output());
    disk.mounted.process().signal(Signal::CONT);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{transport}: {}", finished.output());
}

/// Whether a process has a socket.
fn connected(pid: u32) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut names = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    names.any(|name| name.to_string_lossy().starts_with("socket:"))
}
