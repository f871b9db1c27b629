//! FUSE over io_uring: when it is taken and when not, what is said about it, and how such mounts
//! end. That it serves the same bytes as `/dev/fuse` is for the other suites, which `./test` runs
//! on both (`RINGDISK_TEST_TRANSPORT`).

use std::os::unix::fs::FileExt;
use std::time::Duration;

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{UringParameter, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{STOP, scratch, text};
use ringdisk_testkit::process::{Process, command, has, pause, until};
use rustix::process::Signal;

use crate::common::tools::ringdisk;
use crate::common::{MIB, assert_refused, open, open_direct, serve_raw, try_mount};

/// Root, and the kernel's switch.
fn with_switch(enabled: bool) -> Option<UringParameter> {
    if !needs_root() {
        return None;
    }
    UringParameter::set(enabled)
}

#[test]
fn auto_takes_it_once_the_kernel_may() {
    let Some(_switch) = with_switch(true) else { return };
    let disk = serve_raw(MIB, &["-v", "--transport", "auto"]);
    assert_eq!(piece(disk.mounted.path(), 5000, 3000), pattern(1, 5000, 3000));
    let finished = disk.mounted.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(finished.stderr.contains("requests travel over io_uring"), "{}", finished.stderr);
}

#[test]
fn when_it_is_switched_off_auto_says_how_to_switch_it_on_and_uring_is_refused() {
    let Some(_switch) = with_switch(false) else { return };
    let disk = serve_raw(MIB, &["-v", "--transport", "auto"]);
    let finished = disk.mounted.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    for words in ["echo Y > /sys/module/fuse/parameters/enable_uring", "over /dev/fuse"] {
        assert!(finished.stderr.contains(words), "{}", finished.stderr);
    }
    let directory = scratch();
    let mountpoint = directory.path().join("disk");
    std::fs::write(&mountpoint, "").expect("a mountpoint");
    let refused = try_mount(&["--null", "1M", "--transport", "uring"], &mountpoint);
    assert_refused(&refused, &["switched off", "enable_uring"]);
    assert_eq!(refused.code(), Some(9), "{}", refused.output());
    assert!(mount_at(&mountpoint).is_none());
}

#[test]
fn a_mount_that_runs_does_not_mind_the_switch() {
    let Some(switch) = with_switch(true) else { return };
    let disk = serve_raw(MIB, &["--transport", "uring"]);
    drop(switch);
    let Some(_switch) = with_switch(false) else { return };
    open(disk.mounted.path()).write_all_at(b"later", 10).expect("write");
    assert_eq!(piece(disk.mounted.path(), 10, 5), b"later");
    assert_eq!(disk.mounted.stop().code(), Some(0));
}

#[test]
fn fewer_threads_than_cpus_and_more_serve_every_cpu() {
    let Some(_switch) = with_switch(true) else { return };
    for (threads, depth) in [("1", "1"), ("1", "64"), ("2", "3"), ("5", "2")] {
        let args = ["--transport", "uring", "--threads", threads, "--queue-depth", depth];
        let disk = serve_raw(4 * MIB, &args);
        for cpu in allowed_cpus() {
            let seek = format!("skip={cpu}");
            let input = format!("if={}", disk.mounted.text());
            let words =
                ["-c", &cpu.to_string(), "dd", &input, "of=/dev/null", "bs=64k", "count=8", &seek];
            let ran =
                Process::spawn(command(&["taskset"]).args(words)).finish(Duration::from_secs(20));
            assert_eq!(ran.code(), Some(0), "{threads} {depth} {cpu}: {}", ran.output());
        }
        assert_eq!(piece(disk.mounted.path(), 1000, 100_000), pattern(1, 1000, 100_000));
        assert_eq!(disk.mounted.stop().code(), Some(0), "{threads} {depth}");
    }
}

/// CPUs that this process may use.
fn allowed_cpus() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let mut cpus = Vec::new();
    for part in list.expect("a list").trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<usize>().expect("a number");
        cpus.extend(number(first)..=number(last));
    }
    cpus
}

#[test]
fn kill_9_under_load_leaves_no_client_hanging_and_the_next_mount_serves() {
    let Some(_switch) = with_switch(true) else { return };
    if !needs("fio", has("fio")) {
        return;
    }
    for _ in 0..5 {
        let mut disk = serve_raw(16 * MIB, &["--transport", "uring"]);
        let file = format!("--filename={}", disk.mounted.text());
        let mut client = Process::spawn(&mut command(&[
            "fio",
            "--name=t",
            &file,
            "--direct=1",
            "--size=16m",
            "--rw=randrw",
            "--bs=16k",
            "--iodepth=32",
            "--ioengine=libaio",
            "--numjobs=3",
            "--time_based",
            "--runtime=60",
        ]));
        pause(Duration::from_millis(400));
        disk.mounted.process().signal(Signal::KILL);
        let ended = client.wait(Duration::from_secs(20));
        assert!(ended.is_some_and(|status| !status.success()), "{ended:?}");
        let again =
            ["mount", "--daemonize", "--transport", "uring", "-f", "raw", text(&disk.image)];
        let mountpoint = disk.mounted.path().to_owned();
        let ran =
            ringdisk(disk.directory.path(), &[&again[..], &[text(&mountpoint)]].concat()).ok();
        assert!(
            open_direct(&mountpoint).metadata().expect("it answers").len() == 16 * MIB,
            "{ran:?}"
        );
        ringdisk(disk.directory.path(), &["umount", text(&mountpoint)]).ok();
        assert!(until(STOP, || mount_at(&mountpoint).is_none().then_some(())).is_some());
    }
}
