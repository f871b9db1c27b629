//! Deaths and signals around a start: before the mount is ready, between two processes, again and
//! again.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::{mount_at, needs_root};
use ringdisk_testkit::mount::{Cleared, Mounted, STOP, scratch, text, wait_for_requests};
use ringdisk_testkit::process::{Process, command, run, until};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::common::{MIB, open, program, raw_image};
use crate::keep::device::{AT, Device};
use crate::keep::kept::{Kept, child_of, kill, reader};

/// A kept mount on a file that ringdisk makes and has to remove.
struct Made {
    process: Process,
    path: PathBuf,
    pidfile: PathBuf,
    _cleared: Cleared,
    _directory: TempDir,
}

impl Made {
    /// Started; nothing is waited for.
    fn start(args: &[&str]) -> Made {
        let directory = scratch();
        let (path, pidfile) = (directory.path().join("made"), directory.path().join("pid"));
        let words = ["mount", "--keep-mount", "--transport", "dev"];
        let mut command = command(&[&program()]);
        command.args(words).args(args).arg("--pidfile").args([&pidfile, &path]);
        let process = Process::spawn(&mut command);
        let _cleared = Cleared(path.clone());
        Made { process, path, pidfile, _cleared, _directory: directory }
    }

    fn wait_until_ready(&self) {
        let ready = until(STOP, || self.pidfile.exists().then_some(()));
        assert_eq!(ready, Some(()), "{}", self.process.output());
    }

    /// Its code; nothing of it may be left.
    fn end(mut self) -> Option<i32> {
        let status = self.process.wait(Duration::from_secs(10));
        let said = self.process.output();
        let code = status.unwrap_or_else(|| panic!("it does not end: {said}")).code();
        assert_eq!(mount_at(&self.path), None, "{said}");
        assert_eq!((self.path.exists(), self.pidfile.exists()), (false, false), "{said}");
        code
    }
}

#[test]
fn an_image_that_is_gone_ends_the_mount_and_its_clients() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let made = Made::start(&["--format", "raw", text(&image)]);
    made.wait_until_ready();
    std::fs::remove_file(&image).expect("remove");
    // Stopped first: a client that comes when the mount is gone may find the empty file below it.
    let server = child_of(made.process.pid()).expect("somebody serves");
    kill(server, Signal::STOP);
    let mut client = reader(&made.path);
    wait_for_requests(&made.path, 1);
    kill(server, Signal::KILL);
    assert_eq!(made.end(), Some(3));
    let status = client.wait(STOP);
    assert!(status.is_some_and(|it| !it.success()), "{status:?} of a client: {}", client.output());
}

/// Clients have open files of the disk that was: they get errors, and no other disk.
#[test]
fn an_image_that_was_replaced_is_not_served_in_its_place() {
    if !needs_root() {
        return;
    }
    for (is_overlay, is_below) in [(false, false), (true, false), (true, true)] {
        let (directory, image) = raw_image(MIB, 1);
        let overlay = directory.path().join("overlay.qcow2");
        let mut words = vec!["--format", "raw"];
        if is_overlay {
            words.extend(["--overlay", text(&overlay)]);
        }
        let made = Made::start(&[&words[..], &[text(&image)]].concat());
        made.wait_until_ready();
        if is_overlay && !is_below {
            std::fs::remove_file(&overlay).expect("remove");
        } else {
            let other = directory.path().join("other");
            images::raw(&other, MIB, 2);
            std::fs::rename(&other, &image).expect("rename");
        }
        let file = std::fs::File::open(&made.path).expect("open");
        let server = child_of(made.process.pid()).expect("somebody serves");
        kill(server, Signal::KILL);
        let read = file.read_exact_at(&mut [0; 4096], 0);
        assert!(read.is_err(), "another disk");
        drop(file);
        assert_eq!(made.end(), Some(3));
        assert_eq!(overlay.exists(), is_below);
    }
}

#[test]
fn who_dies_before_it_answers_again_and_again_is_given_up() {
    if !needs_root() {
        return;
    }
    // A process that waits for the image of the one before it is never ready.
    let device = Device::new();
    let mut disk = Kept::raw(&device.path(), &["--direct", "--threads", "1"]);
    device.hold_next_write();
    // A process of its own: a file that this one has open would hold up each process that another
    // test starts, since its copy is closed then, and a close asks the server.
    let (output, seek) = (format!("of={}", text(&disk.path())), format!("seek={}", AT / 4096));
    let words = ["dd", "if=/dev/zero", &output, "bs=4k", "count=1", &seek];
    let mut client = Process::spawn(command(&words).args(["oflag=direct", "conv=notrunc,nocreat"]));
    device.wait_for_held();
    let mut killed = Vec::new();
    let helper = disk.0.pid();
    let ended = until(Duration::from_secs(40), || {
        if let Some(pid) = child_of(helper).filter(|pid| !killed.contains(pid)) {
            // Slower than five times in ten seconds.
            std::thread::sleep(Duration::from_millis(if killed.is_empty() { 0 } else { 2500 }));
            killed.push(pid);
            kill(pid, Signal::KILL);
        }
        disk.0.process().ended()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(7), "{}", disk.0.output());
    assert_eq!(killed.len(), 6, "the first and five more");
    assert!(client.wait(STOP).is_some_and(|status| !status.success()), "the client hangs");
}

#[test]
fn a_stop_between_two_processes_is_a_clean_end() {
    if !needs_root() {
        return;
    }
    for delay_ms in [0, 2, 5, 10, 20, 40, 80] {
        let (_directory, image) = raw_image(MIB, 1);
        let mut disk = Kept::raw(&image, &[]);
        let file = open(&disk.path());
        std::os::unix::fs::FileExt::write_all_at(&file, b"kept", 10).expect("write");
        drop(file);
        kill(disk.server().expect("somebody serves"), Signal::KILL);
        std::thread::sleep(Duration::from_millis(delay_ms));
        disk.0.process().signal(Signal::TERM);
        let finished = disk.0.finish();
        assert_eq!(finished.code(), Some(0), "{delay_ms} ms: {}", finished.output());
        assert_eq!(piece(&image, 10, 4), b"kept");
    }
}

#[test]
fn a_stop_at_the_first_start_leaves_nothing() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    for delay_ms in [0, 3, 6, 10, 20, 40] {
        let made = Made::start(&["--format", "raw", text(&image)]);
        let serves = until(STOP, || child_of(made.process.pid()));
        assert!(serves.is_some(), "{}", made.process.output());
        std::thread::sleep(Duration::from_millis(delay_ms));
        made.process.signal(Signal::TERM);
        let code = made.end();
        assert!(matches!(code, Some(0 | 1)), "{delay_ms} ms: {code:?}");
    }
}

#[test]
fn who_is_killed_at_the_first_start_leaves_nothing() {
    if !needs_root() {
        return;
    }
    let mut early = 0;
    for delay_ms in 0..24 {
        // Its own: the one of a process that was just killed may be locked for a moment.
        let (_directory, image) = raw_image(MIB, 1);
        let made = Made::start(&["--format", "raw", text(&image)]);
        let server = until(STOP, || child_of(made.process.pid()));
        let server = server.unwrap_or_else(|| panic!("nobody serves: {}", made.process.output()));
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(server, Signal::KILL);
        // Ready, if it was by then; else it is at its end.
        until(STOP, || {
            let is_over = child_of(made.process.pid()).is_none() && !made.pidfile.exists();
            (made.pidfile.exists() || is_over).then_some(())
        })
        .expect("one or the other");
        made.process.signal(Signal::TERM);
        let code = made.end();
        assert!(matches!(code, Some(0 | 7)), "{delay_ms} ms: {code:?}");
        early += usize::from(code == Some(7));
    }
    assert!(early > 0, "none was killed before it was ready");
}

#[test]
fn a_plain_mount_that_is_killed_at_its_start_ends() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let path = directory.path().join("disk");
    let _cleared = Cleared(path.clone());
    for delay_ms in 0..24 {
        let (_directory, image) = raw_image(MIB, 1);
        let words = ["mount", "--transport", "dev", "--format", "raw", text(&image), text(&path)];
        let mut process = Process::spawn(command(&[&program()]).args(words));
        std::thread::sleep(Duration::from_millis(delay_ms));
        process.signal(Signal::KILL);
        assert!(process.wait(STOP).is_some(), "{delay_ms} ms: it hangs");
    }
    let (_directory, image) = raw_image(MIB, 1);
    let next = Mounted::start_at(&program(), &["--format", "raw", text(&image)], &path);
    assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100));
    drop(next);
}

#[test]
fn both_killed_one_after_the_other_leave_a_mount_that_answers_with_errors() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    let mut disk = Kept::start_at(&["--format", "raw", text(&image)], &path);
    disk.0.process().signal(Signal::STOP);
    kill(disk.server().expect("somebody serves"), Signal::KILL);
    let mut client = reader(&path);
    wait_for_requests(&path, 1);
    assert_eq!(client.ended(), None, "it waits for a server");
    disk.0.process().signal(Signal::KILL);
    assert!(client.wait(STOP).is_some_and(|status| !status.success()), "the client hangs");
    let next = Mounted::start_at(&program(), &["--format", "raw", text(&image)], &path);
    assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100));
    drop(next);
}

#[test]
fn limits_that_a_command_has_set_outlive_the_server() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let kept = Kept::raw(&image, &["--limit", "iops=1000"]);
    let path = kept.path();
    let ctl = |words: &[&str]| {
        let program = program();
        let words = [&[program.as_str(), "ctl", text(&path), "limit"], words].concat();
        let answer = || Some(run(command(&words))).filter(|it| it.code() == Some(0));
        until(STOP, answer).expect("an answer").stdout
    };
    for wanted in ["iops=2000", "none"] {
        assert_eq!(ctl(&[wanted]).trim(), wanted);
        kept.kill_server();
        assert_eq!(ctl(&[]).trim(), wanted);
    }
    kept.stop();
}

#[test]
fn copy_on_read_that_a_command_has_switched_outlives_the_server() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let kept = Kept::start(&[text(&image)]);
    let path = kept.path();
    let ctl = |words: &[&str]| {
        let program = program();
        let words = [&[program.as_str(), "ctl", text(&path)], words].concat();
        let answer = || Some(run(command(&words))).filter(|it| it.code() == Some(0));
        until(STOP, answer).expect("an answer").stdout
    };
    for (wanted, is_on) in [("on", true), ("off", false)] {
        ctl(&["copy-on-read", wanted]);
        kept.kill_server();
        let stats: serde_json::Value =
            serde_json::from_str(&ctl(&["stats", "--json"])).expect("JSON");
        assert_eq!(stats["copy-on-read"], is_on, "{stats}");
    }
    kept.stop();
}
