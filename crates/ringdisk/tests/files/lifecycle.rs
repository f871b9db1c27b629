//! How a mount begins and ends: signals, unmounting from outside, clients that are killed; and that
//! nothing stays behind.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{self, Holds, mount_at, needs, needs_root, stop_signals};
use ringdisk_testkit::mount::{Cleared, Mounted, STOP, scratch, text, unmount};
use ringdisk_testkit::process::{LIMIT, Process, command, has, ok_words, patient, run, until};
use rustix::process::Signal;

use crate::common::{MIB, mount, open, program, raw_image, refused, serve_raw};

#[test]
fn signals_end_a_mount_cleanly() {
    if !needs_root() {
        return;
    }
    for signal in stop_signals() {
        let disk = serve_raw(MIB, &[]);
        open(disk.mounted.path()).write_all_at(b"kept", 10).expect("write");
        let finished = disk.mounted.stop_by(signal);
        assert_eq!(finished.code(), Some(0), "{signal:?}: {}", finished.output());
        assert_eq!(piece(&disk.image, 10, 4), b"kept");
    }
}

#[test]
fn unmounting_from_outside_ends_the_process() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &[]);
    ok_words(&["umount", disk.mounted.text()]);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn ringdisk_umount_ends_the_process() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &[]);
    ok_words(&[&program(), "umount", disk.mounted.text()]);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_ne!(run(command(&[&program(), "umount", text(&disk.image)])).code(), Some(0));
}

#[test]
fn an_image_that_lost_its_name_is_told_of() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &[]);
    let said = |words: &[&str]| {
        let done = run(command(&[&[program().as_str()][..], words].concat()));
        assert_eq!(done.code(), Some(0), "{}", done.output());
        done.output()
    };
    let stats = ["ctl", disk.mounted.text(), "stats"];
    assert!(!said(&stats).contains("warning"), "its name is there");
    std::fs::remove_file(&disk.image).expect("delete");
    let lost = format!("'{}' was deleted", text(&disk.image));
    let now = said(&stats);
    assert!(now.contains(&lost), "{now}");
    let unmounted = said(&["umount", disk.mounted.text()]);
    assert!(unmounted.contains(&format!("warning: {lost}")), "{unmounted}");
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(finished.output().contains(&lost), "{}", finished.output());
}

#[test]
fn a_lazy_unmount_serves_open_files_to_their_end() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &[]);
    let file = open(disk.mounted.path());
    ok_words(&["umount", "-l", disk.mounted.text()]);
    assert_eq!(mount_at(disk.mounted.path()), None);
    let mut bytes = [0; 100];
    file.read_exact_at(&mut bytes, 5000).expect("read after umount -l");
    assert_eq!(bytes[..], pattern(1, 5000, 100));
    assert_eq!(disk.mounted.process().ended(), None);
    drop(file);
    let finished = disk.mounted.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn a_forced_unmount_ends_clients_with_errors_and_the_process() {
    if !needs_root() {
        return;
    }
    let mut disk = mount(&["--null", "1G", "--latency", "30s"]);
    let mut client = reader(disk.text());
    client.has_begun(disk.path());
    let start = Instant::now();
    let _ = run(command(&["umount", "-f", disk.text()]));
    let status = client.wait(STOP).expect("the client ends");
    assert!(!status.success());
    // `umount -f` aborts the connection and may yet be busy; the mount goes then.
    unmount(disk.path());
    assert!(disk.process().wait(STOP).is_some(), "{}", disk.output());
    assert!(start.elapsed() < patient(Duration::from_secs(6)), "{:?}", start.elapsed());
}

/// A client that reads one block and waits for it.
fn reader(path: &str) -> Process {
    let input = format!("if={path}");
    Process::spawn(&mut command(&[
        "dd",
        &input,
        "of=/dev/null",
        "bs=4k",
        "count=1",
        "iflag=direct",
    ]))
}

#[test]
fn a_slow_request_does_not_hold_up_a_forced_end() {
    if !needs_root() {
        return;
    }
    let disk = mount(&["--null", "1G", "--latency", "60s", "--threads", "2"]);
    let mut clients = [reader(disk.text()), reader(disk.text()), reader(disk.text())];
    clients.iter_mut().for_each(|client| client.has_begun(disk.path()));
    disk.force_stop();
    let ended = clients.each_mut().map(|c| c.wait(STOP).is_some_and(|status| !status.success()));
    assert_eq!(ended, [true; 3]);
}

#[test]
fn a_killed_server_leaves_errors_not_hangs() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &[]);
    let file = open(disk.mounted.path());
    disk.mounted.process().signal(Signal::KILL);
    assert!(disk.mounted.process().wait(STOP).is_some());
    let mut bytes = [0; 4];
    assert!(file.read_exact_at(&mut bytes, 0).is_err());
    // The stale mount is replaced by the next one at the same place.
    let path = disk.mounted.path().to_owned();
    unmount(&path);
    assert_eq!(mount_at(&path), None);
    assert_eq!(piece(&disk.image, 0, 100), pattern(1, 0, 100));
}

#[test]
fn the_mount_of_a_killed_server_is_replaced_by_the_next_one() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &[]);
    let path = disk.mounted.path().to_owned();
    disk.mounted.process().signal(Signal::KILL);
    assert!(disk.mounted.process().wait(STOP).is_some());
    let args = ["--format", "raw", text(&disk.image)];
    let next = Mounted::start_at(&program(), &args, &path);
    assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100));
    let ended = next.stop();
    assert_eq!(ended.code(), Some(0), "{}", ended.output());
    assert!(ended.stderr.contains("it is replaced"), "{}", ended.output());
    assert_eq!(mount_at(&path), None);
}

#[test]
fn clients_killed_at_depth_64_do_no_harm() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    let disk = mount(&["--null", "1G", "--latency", "20ms", "--threads", "2"]);
    for engine in ["libaio", "io_uring"] {
        let (file, engine) =
            (format!("--filename={}", disk.text()), format!("--ioengine={engine}"));
        let words = [
            "fio",
            "--name=k",
            "--rw=randrw",
            "--bs=64k",
            "--direct=1",
            "--iodepth=64",
            "--size=1G",
        ];
        let more = ["--time_based", "--runtime=30", "--numjobs=2", "--thread", &file, &engine];
        let mut client = Process::spawn(&mut command(&[&words[..], &more].concat()));
        client.has_begun(disk.path());
        kill_group(&mut client);
    }
    let start = Instant::now();
    assert_eq!(reader(disk.text()).finish(LIMIT).code(), Some(0));
    assert!(start.elapsed() < patient(Duration::from_secs(5)));
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

/// Kills a client with all its processes; each process of the kit has a group of its own.
fn kill_group(client: &mut Process) {
    let group = rustix::process::Pid::from_raw(i32::try_from(client.pid()).expect("a pid"));
    let _ = rustix::process::kill_process_group(group.expect("not 0"), Signal::KILL);
    assert!(client.wait(STOP).is_some(), "a killed client does not end");
}

#[test]
fn a_forced_stop_under_load_is_orderly() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    for args in [&["--null", "64M", "--threads", "2"][..], &["--null", "64M", "--latency", "5ms"]] {
        let disk = mount(args);
        let file = format!("--filename={}", disk.text());
        let words = [
            "fio",
            "--name=k",
            "--rw=randrw",
            "--bs=4k",
            "--direct=1",
            "--iodepth=32",
            "--size=64m",
        ];
        let more =
            ["--time_based", "--runtime=60", "--ioengine=libaio", "--thread", "--numjobs=2", &file];
        let mut client = Process::spawn(&mut command(&[&words[..], &more].concat()));
        client.has_begun(disk.path());
        let finished = disk.force_stop();
        assert_eq!(finished.code(), Some(13), "{args:?}: {}", finished.output());
        let status = client.wait(STOP).expect("the client ends");
        assert!(!status.success(), "{args:?}");
    }
}

#[test]
fn a_busy_mount_holds_no_more_after_many_clients() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &["--threads", "2"]);
    let read = || assert_eq!(piece(disk.mounted.path(), 0, 100), pattern(1, 0, 100));
    (0..50).for_each(|_| read());
    let before = Holds::of(disk.mounted.pid());
    (0..500).for_each(|_| read());
    let after = Holds::of(disk.mounted.pid());
    assert_eq!(before.descriptors, after.descriptors);
    assert!(after.threads <= before.threads + 2, "{before:?} {after:?}");
}

/// Waits for 2 s in which a process uses less than 20 ms of CPU, 1 % of one. What it does before it
/// rests may take longer on a machine that is busy.
fn becomes_idle(pid: u32) {
    let mut used_ms = 0;
    let is_idle = until(Duration::from_secs(20), || {
        let before = limits::cpu_ns(pid);
        std::thread::sleep(Duration::from_secs(2));
        used_ms = (limits::cpu_ns(pid) - before) / 1_000_000;
        (used_ms < 20).then_some(())
    });
    assert_eq!(is_idle, Some(()), "{used_ms} ms of CPU in 2 s");
}

#[test]
fn an_idle_mount_is_small_and_uses_no_cpu() {
    if !needs_root() {
        return;
    }
    let disk = serve_raw(MIB, &["--threads", "2"]);
    assert_eq!(piece(disk.mounted.path(), 0, 64), pattern(1, 0, 64));
    becomes_idle(disk.mounted.pid());
    // The bound of the benchmark is for the release build; this one has debug information and no
    // optimisation to speak of.
    let resident = limits::resident_bytes(disk.mounted.pid()) / MIB;
    assert!(resident < 24, "{resident} MiB");
}

#[test]
fn memory_of_large_requests_goes_back_when_nobody_asks_any_more() {
    if !needs_root() || !needs("fio", has("fio")) {
        return;
    }
    let disk = mount(&["--null", "1G", "--read-zeroes", "--threads", "2"]);
    let resident = || limits::resident_bytes(disk.pid()) / MIB;
    let file = format!("--filename={}", disk.text());
    let mut load = Process::spawn(&mut command(&[
        "fio",
        "--name=t",
        &file,
        "--direct=1",
        "--size=1g",
        "--rw=read",
        "--bs=1m",
        "--ioengine=libaio",
        "--iodepth=64",
        "--numjobs=2",
        "--time_based",
        "--runtime=2",
    ]));
    let mut most = 0;
    let ended = until(Duration::from_secs(60), || {
        most = most.max(resident());
        load.ended()
    });
    assert!(ended.is_some_and(|status| status.success()));
    let transport = std::env::var("RINGDISK_TEST_TRANSPORT");
    if crate::common::kernel_is(7, 3) && transport.is_ok_and(|transport| transport == "uring") {
        // Pools keep what they have used; they have a bound.
        assert!(most < 160, "{most} MiB");
        return;
    }
    let small = until(Duration::from_secs(10), || (resident() < 40).then_some(()));
    assert!(small.is_some(), "{} MiB of {most}", resident());
    // Small requests afterwards take small pages.
    let idle = resident();
    let few = run(command(&["fio", "--name=t", &file]).args([
        "--direct=1",
        "--size=1g",
        "--rw=randread",
        "--bs=4k",
        "--ioengine=libaio",
        "--iodepth=16",
        "--numjobs=4",
        "--number_ios=5000",
    ]));
    assert_eq!(few.code(), Some(0), "{}", few.output());
    assert!(resident() < idle + 6, "{} MiB after {idle}", resident());
    assert_eq!(piece(disk.path(), 12_345, 100_000), vec![0; 100_000]);
    // And then the queues sleep again.
    becomes_idle(disk.pid());
}

#[test]
fn in_the_background_the_mount_answers_when_the_command_returns() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let (path, pidfile) = (directory.path().join("disk"), directory.path().join("pid"));
    let _cleared = Cleared(path.clone());
    let words = ["mount", "--daemonize", "--format", "raw", "--pidfile", text(&pidfile)];
    let finished = run(command(&[&program()]).args(words).args([&image, &path]));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_eq!(piece(&path, 5, 100), pattern(1, 5, 100));
    let pid = std::fs::read_to_string(&pidfile).expect("a pid file");
    let mode = std::fs::metadata(&pidfile).expect("stat").permissions().mode() & 0o777;
    assert!(mode & 0o022 == 0, "{mode:o}");
    ok_words(&[&program(), "umount", text(&path)]);
    let pid: u32 = pid.trim().parse().expect("a number");
    let gone = until(STOP, || (limits::threads(pid) == 0 && !pidfile.exists()).then_some(()));
    assert_eq!((gone, mount_at(&path)), (Some(()), None));
}

#[test]
fn in_the_background_an_error_is_still_reported() {
    refused(
        &["--daemonize", "--format", "raw", "/nonexistent/disk.img"],
        &["/nonexistent/disk.img"],
    );
}

#[test]
fn closed_or_broken_standard_output_does_not_matter() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    for redirection in [">&-", ">&- 2>&-", "<&- >&- 2>&-"] {
        let path = directory.path().join("disk");
        let script = format!("exec \"$0\" mount --format raw \"$1\" \"$2\" {redirection}");
        let mut shell = command(&["sh", "-c", &script, &program()]);
        let disk = Mounted::from_command(shell.args([&image, &path]), &path);
        assert_eq!(piece(&path, 7, 10), pattern(1, 7, 10), "{redirection}");
        assert_eq!(disk.stop().code(), Some(0), "{redirection}");
    }
    assert_eq!(std::fs::read(&image).expect("read"), pattern(1, 0, 1 << 20));
}

#[test]
fn a_reader_of_our_output_that_goes_away_does_not_matter() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    let _cleared = Cleared(path.clone());
    let mut command = Command::new(program());
    command
        .args(["mount", "--stats", "--format", "raw"])
        .args([&image, &path])
        .stdout(Stdio::piped());
    let process = Process::spawn_as_is(&mut command);
    drop(process);
    unmount(&path);
    let script = "\"$0\" mount --format raw \"$1\" \"$2\" | true; exit 0";
    let mut shell = command_of(script, &image, &path);
    let disk = Mounted::from_command(&mut shell, &path);
    assert_eq!(piece(&path, 7, 10), pattern(1, 7, 10));
    ok_words(&["umount", disk.text()]);
    assert_eq!(disk.finish().code(), Some(0));
}

fn command_of(script: &str, image: &std::path::Path, path: &std::path::Path) -> Command {
    let mut shell = command(&["sh", "-c", script, &program()]);
    shell.args([image, path]);
    shell
}

#[test]
fn the_counters_of_each_queue_are_printed_on_request_and_at_the_end() {
    if !needs_root() {
        return;
    }
    let mut disk = serve_raw(MIB, &["--stats", "--threads", "2"]);
    assert_eq!(piece(disk.mounted.path(), 0, 64), pattern(1, 0, 64));
    disk.mounted.process().signal(Signal::USR1);
    let printed = until(STOP, || disk.mounted.output().contains("queue").then_some(()));
    assert_eq!(printed, Some(()), "{}", disk.mounted.output());
    let finished = disk.mounted.stop();
    assert_eq!(finished.code(), Some(0));
    assert!(finished.stderr.contains("IOPS"), "{}", finished.stderr);
}

#[test]
fn a_mountpoint_that_we_made_is_removed_again() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = scratch().path().join("nowhere");
    refused(&["--format", "raw", text(&image), text(&path)], &[]);
    let path = directory.path().join("made");
    let _cleared = Cleared(path.clone());
    let words = ["mount", "--daemonize", "--format", "raw"];
    ringdisk_testkit::process::ok(command(&[&program()]).args(words).args([&image, &path]));
    ok_words(&[&program(), "umount", text(&path)]);
    assert_eq!(until(STOP, || (!path.exists()).then_some(())), Some(()));
}
