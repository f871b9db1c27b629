//! How a kept mount ends: whichever process is killed, and whenever it is taken away.

use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_testkit::limits::{mount_at, needs_root, stop_signals};
use ringdisk_testkit::mount::{Cleared, Mounted, STOP, text, unmount, wait_for_requests};
use ringdisk_testkit::process::{Process, command, ok_words, patient, run, until};
use rustix::process::{Pid, Signal, kill_process_group};

use ringdisk_testkit::images::{pattern, piece};

use crate::common::{MIB, assert_refused, open, program, raw_image, refused, try_mount};
use crate::keep::kept::{Kept, child_of, kill, lives, reader};

#[test]
fn over_io_uring_it_is_refused_with_the_reason() {
    let words = ["--keep-mount", "--transport", "uring", "--null", "1M"];
    refused(&words, &["cannot be kept", "rings", "--transport dev"]);
    let directory = ringdisk_testkit::mount::scratch();
    let finished = try_mount(&words, &directory.path().join("disk"));
    assert_eq!(finished.code(), Some(11), "{}", finished.output());
}

#[test]
fn what_goes_past_the_process_or_needs_rings_is_refused_with_the_reason() {
    let (_directory, image) = raw_image(MIB, 1);
    for (option, word) in [
        (&["--passthrough"][..], "holds its locks"),
        (&["--zero-copy", "on"][..], "rings"),
        (&["--transport", "uring"][..], "rings"),
    ] {
        let words = [&["--keep-mount", "--format", "raw"], option, &[text(&image)]].concat();
        let directory = ringdisk_testkit::mount::scratch();
        let finished = try_mount(&words, &directory.path().join("disk"));
        assert_eq!(finished.code(), Some(11), "{}", finished.output());
        assert!(finished.stderr.contains(word), "{}", finished.output());
        assert!(finished.stderr.contains("cannot be kept"), "{}", finished.output());
    }
}

#[test]
fn the_transport_that_was_left_to_us_is_dev_and_the_reason_is_told() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let words = ["--keep-mount", "--transport", "auto", "--format", "raw", text(&image)];
    let disk = crate::common::mount(&words);
    let told = ok_words(&[&program(), "topology", disk.text()]);
    assert!(told.contains("/dev/fuse") && told.contains("--keep-mount"), "{told}");
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn an_overlay_that_goes_with_its_process_is_refused() {
    let (_directory, image) = raw_image(MIB, 1);
    let directory = ringdisk_testkit::mount::scratch();
    let finished =
        try_mount(&["--keep-mount", "--snapshot", text(&image)], &directory.path().join("disk"));
    assert_refused(&finished, &["--snapshot"]);
    assert_eq!(finished.code(), Some(2));
}

#[test]
fn an_error_at_the_start_is_said_once_with_its_code() {
    let directory = ringdisk_testkit::mount::scratch();
    let finished = try_mount(
        &["--keep-mount", "--transport", "dev", "/nonexistent.img"],
        &directory.path().join("disk"),
    );
    assert_refused(&finished, &["/nonexistent.img"]);
    assert_eq!((finished.code(), finished.stderr.matches("error:").count()), (Some(3), 1));
}

#[test]
fn the_mount_goes_on_when_the_process_that_keeps_it_is_killed_and_an_unmount_ends_it_cleanly() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let (path, server) = (disk.path(), disk.server().expect("somebody serves"));
    let file = open(&path);
    disk.0.process().signal(Signal::KILL);
    let told = || disk.0.output().contains("that keeps the mount is gone").then_some(());
    assert_eq!(until(STOP, told), Some(()), "{}", disk.0.output());
    // Who has it open, and who opens it now.
    std::os::unix::fs::FileExt::write_all_at(&file, b"open", 4).expect("write");
    drop(file);
    std::os::unix::fs::FileExt::write_all_at(&open(&path), b"kept", 0).expect("write");
    let stats = ok_words(&[&program(), "ctl", text(&path), "stats"]);
    assert!(stats.contains("helper process is gone"), "{stats}");
    ok_words(&[&program(), "umount", text(&path)]);
    assert_eq!(until(STOP, || (!lives(server)).then_some(())), Some(()), "{}", disk.0.output());
    assert_eq!(mount_at(&path), None);
    assert_eq!(piece(&image, 0, 8), b"keptopen");
}

#[test]
fn a_server_that_nobody_keeps_any_more_flushes_at_a_stop_and_the_next_mount_takes_the_place() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let (path, server) = (disk.path(), disk.server().expect("somebody serves"));
    std::fs::write(&path, "kept").expect("write");
    disk.0.process().signal(Signal::KILL);
    let told = || disk.0.output().contains("that keeps the mount is gone").then_some(());
    assert_eq!(until(STOP, told), Some(()), "{}", disk.0.output());
    kill(server, Signal::TERM);
    assert_eq!(until(STOP, || (!lives(server)).then_some(())), Some(()), "{}", disk.0.output());
    assert_eq!(piece(&image, 0, 4), b"kept");
    let next = Mounted::start_at(&program(), &["--format", "raw", text(&image)], &path);
    assert_eq!(piece(&path, 0, 4), b"kept");
    drop(next);
}

#[test]
fn when_both_are_killed_clients_get_errors_and_the_next_mount_takes_the_place() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    let disk = Kept::start_at(&["--format", "raw", text(&image)], &path);
    let slow = Kept::start(&["--null", "1G", "--latency", "30s"]);
    let mut client = reader(&slow.path());
    wait_for_requests(&slow.path(), 1);
    for kept in [&disk, &slow] {
        let group = i32::try_from(kept.0.pid()).ok().and_then(Pid::from_raw).expect("a pid");
        kill_process_group(group, Signal::KILL).expect("both are there");
    }
    assert!(client.wait(STOP).is_some_and(|status| !status.success()), "the client hangs");
    let next = Mounted::start_at(&program(), &["--format", "raw", text(&image)], &path);
    assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100));
    drop(next);
}

#[test]
fn who_dies_too_often_is_given_up_and_clients_get_errors() {
    if !needs_root() {
        return;
    }
    let directory = ringdisk_testkit::mount::scratch();
    let (path, pidfile) = (directory.path().join("made"), directory.path().join("pid"));
    let _cleared = Cleared(path.clone());
    let words = ["mount", "--keep-mount", "--transport", "dev", "--latency", "30s", "--null", "1G"];
    let mut command = command(&[&program()]);
    command.args(words).arg("--pidfile").args([&pidfile, &path]);
    let mut process = ringdisk_testkit::process::Process::spawn(&mut command);
    until(STOP, || pidfile.exists().then_some(())).expect("a pid file");
    let mut client = reader(&path);
    wait_for_requests(&path, 1);
    let mut killed = Vec::new();
    let ended = until(Duration::from_secs(15), || {
        if let Some(pid) = child_of(process.pid()).filter(|pid| !killed.contains(pid)) {
            killed.push(pid);
            kill(pid, Signal::KILL);
        }
        process.ended()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(7), "{}", process.output());
    assert!(process.output().contains("given up"), "{}", process.output());
    assert_eq!(killed.len(), 6, "the first and five more");
    assert!(client.wait(STOP).is_some_and(|status| !status.success()), "the client hangs");
    assert_eq!((mount_at(&path), path.exists(), pidfile.exists()), (None, false, false));
}

/// Runs `meanwhile` while nobody serves: the process that keeps the mount is stopped, and cannot
/// start another one.
fn while_nobody_serves(disk: &mut Kept, meanwhile: impl FnOnce()) {
    let server = disk.server().expect("somebody serves");
    disk.0.process().signal(Signal::STOP);
    kill(server, Signal::KILL);
    until(STOP, || disk.server().is_none().then_some(())).expect("a killed process ends");
    meanwhile();
    disk.0.process().signal(Signal::CONT);
}

#[test]
fn an_unmount_while_nobody_serves_does_not_hang() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let path = disk.path();
    while_nobody_serves(&mut disk, || {
        // What the kernel knows of the file by heart is old by then: `umount` without options would
        // look at it, and wait.
        std::thread::sleep(Duration::from_millis(1500));
        let begun = Instant::now();
        // It waits for the image to be let go of, which the stopped process does not do.
        let words = [&program(), "umount", "--timeout", "2s", text(&path)];
        let unmounted = run(command(&words));
        assert_eq!(unmounted.code(), Some(14), "{}", unmounted.output());
        assert!(begun.elapsed() < patient(Duration::from_secs(8)));
        assert_eq!(mount_at(&path), None);
    });
    let finished = disk.0.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn an_abort_while_nobody_serves_ends_waiting_clients() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let path = disk.path();
    let mut client = None;
    while_nobody_serves(&mut disk, || {
        let mut waits = reader(&path);
        wait_for_requests(&path, 1);
        assert_eq!(waits.ended(), None, "it waits for a server");
        let _ = run(command(&["umount", "-f", text(&path)]));
        assert!(waits.wait(STOP).is_some_and(|status| !status.success()), "it hangs");
        client = Some(waits);
        unmount(&path);
    });
    // Who only waited to open it leaves no trace.
    let finished = disk.0.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

/// A program has the file of a kept mount open; something is done to the mount while nobody serves
/// it; clients get errors by that.
///
/// The program is another one: who has the file open for writing and starts a program waits for a
/// server, since that closes it.
fn ends_by_abort(write: bool, abort: impl Fn(&Path)) {
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let path = disk.path();
    let script = match write {
        true => "exec 3<>\"$0\"; printf kept >&3; exec sleep 600",
        false => "exec 3<\"$0\"; exec sleep 600",
    };
    let mut client = Process::spawn(&mut command(&["sh", "-c", script, text(&path)]));
    let sleeps = || {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", client.pid())).ok()?;
        (name.trim() == "sleep").then_some(())
    };
    assert_eq!(until(STOP, sleeps), Some(()), "{}", client.output());
    while_nobody_serves(&mut disk, || abort(&path));
    let finished = disk.0.finish();
    assert_eq!(finished.code(), Some(13), "{}", finished.output());
    assert!(finished.stderr.contains("aborted"), "{}", finished.output());
    client.signal(Signal::KILL);
    assert!(client.wait(STOP).is_some());
    assert!(!write || piece(&image, 0, 4) == b"kept");
}

#[test]
fn an_abort_of_a_mount_in_use_while_nobody_serves_is_no_clean_end() {
    if !needs_root() {
        return;
    }
    let force = |path: &Path| {
        let _ = run(command(&["umount", "-f", text(path)]));
    };
    for write in [false, true] {
        // The mount stays.
        ends_by_abort(write, force);
        // It goes as well.
        ends_by_abort(write, |path| {
            let words = [&program(), "umount", "--force", "--timeout", "1s", text(path)];
            let _ = run(command(&words));
            assert_eq!(mount_at(path), None);
        });
    }
    ends_by_abort(true, |path| {
        force(path);
        unmount(path);
    });
}

#[test]
fn an_abort_that_ends_who_waits_while_nobody_serves_is_no_clean_end() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let path = disk.path();
    while_nobody_serves(&mut disk, || {
        let mut waits = reader(&path);
        wait_for_requests(&path, 1);
        let words = [&program(), "umount", "--force", "--timeout", "1s", text(&path)];
        let _ = run(command(&words));
        assert!(waits.wait(STOP).is_some_and(|status| !status.success()), "it hangs");
    });
    let finished = disk.0.finish();
    // Newer kernels forget the abort with the file system, and nothing tells of a client that was
    // not served.
    let is_forgotten = crate::common::kernel_is(6, 19) && finished.code() == Some(0);
    assert!(is_forgotten || finished.code() == Some(13), "{}", finished.output());
}

#[test]
fn a_client_of_a_mount_that_was_lazily_removed_is_still_served() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = raw_image(MIB, 1);
    let mut disk = Kept::raw(&image, &[]);
    let path = disk.path();
    let mut client = None;
    while_nobody_serves(&mut disk, || {
        let waits = reader(&path);
        wait_for_requests(&path, 1);
        ok_words(&["umount", "-l", text(&path)]);
        client = Some(waits);
    });
    let client = client.expect("it was started").finish(STOP);
    assert_eq!(client.code(), Some(0), "{}", client.output());
    assert_eq!(disk.0.finish().code(), Some(0));
}

#[test]
fn signals_end_it_cleanly_also_after_a_restart() {
    if !needs_root() {
        return;
    }
    for signal in stop_signals() {
        let (_directory, image) = raw_image(MIB, 1);
        let disk = Kept::raw(&image, &[]);
        disk.kill_server();
        let file = open(&disk.path());
        std::os::unix::fs::FileExt::write_all_at(&file, b"kept", 10).expect("write");
        drop(file);
        let finished = disk.0.stop_by(signal);
        assert_eq!(finished.code(), Some(0), "{signal:?}: {}", finished.output());
        assert_eq!(piece(&image, 10, 4), b"kept");
    }
}
