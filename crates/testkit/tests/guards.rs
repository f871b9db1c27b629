//! The guards of the test kit themselves: nothing outlives them, and the limits hold.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ringdisk_testkit::limits::{Holds, mount_at, needs_root};
use ringdisk_testkit::mount::{FileSystem, scratch};
use ringdisk_testkit::process::{Process, command, ok_words, run, until};
use ringdisk_testkit::{images, limits};

#[test]
fn a_command_tells_status_and_both_outputs() {
    let finished = run(command(&["sh", "-c", "echo out; echo err >&2; exit 3"]));
    assert_eq!((finished.code(), finished.stdout.as_str()), (Some(3), "out\n"));
    assert_eq!(finished.stderr, "err\n");
}

#[test]
#[should_panic(expected = "did not end")]
fn a_command_that_hangs_fails_in_time() {
    Process::spawn(&mut command(&["sleep", "1000"])).finish(Duration::from_millis(50));
}

#[test]
fn a_dropped_process_takes_its_children_along() {
    let process = Process::spawn(&mut command(&["sh", "-c", "sleep 1000 & echo $!; wait"]));
    let child = until(Duration::from_secs(5), || process.output().trim().parse::<u32>().ok());
    drop(process);
    let gone = until(Duration::from_secs(5), || (limits::threads(child?) == 0).then_some(()));
    assert_eq!(gone, Some(()));
}

#[test]
fn a_dropped_file_system_is_unmounted() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let path = directory.path().join("small");
    let mounted = FileSystem::tmpfs(&path, 1 << 20);
    let kind = mount_at(&path).map(|m| m.kind);
    drop(mounted);
    assert_eq!((kind.as_deref(), mount_at(&path)), (Some("tmpfs"), None));
}

#[test]
fn waiting_ends_at_its_limit() {
    let start = Instant::now();
    let found = until::<()>(Duration::from_millis(30), || None);
    assert!(found.is_none() && start.elapsed() < Duration::from_secs(2));
}

#[test]
fn pieces_of_the_pattern_fit_together() {
    let whole = images::pattern(7, 0, 100);
    assert_eq!(images::pattern(7, 13, 50), &whole[13..63]);
}

#[test]
fn the_first_difference_is_found() {
    let directory = scratch();
    let (a, b) = (directory.path().join("a"), directory.path().join("b"));
    images::raw(&a, 3 << 20, 1);
    std::fs::copy(&a, &b).expect("a copy");
    assert_eq!(images::first_difference(&a, &b), None);
    ok_words(&["truncate", "-s", "2000000", b.to_str().expect("text")]);
    assert_eq!(images::first_difference(&a, &b), Some(2_000_000));
}

#[test]
fn own_limits_are_counted() {
    let counted = Holds::of(std::process::id());
    assert!(counted.descriptors > 2 && counted.threads >= 1);
}

#[test]
fn who_does_not_end_is_shown_with_its_threads() {
    let waits = Process::spawn(&mut command(&["sh", "-c", "sleep 600; true"]));
    let children = format!("/proc/{0}/task/{0}/children", waits.pid());
    let name = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let sleeps = until(Duration::from_secs(20), || {
        let pids = std::fs::read_to_string(&children).unwrap_or_default();
        pids.split_whitespace().any(|pid| name(pid).trim() == "sleep").then_some(())
    });
    assert!(sleeps.is_some(), "{}", waits.output());
    let told = catch_unwind(AssertUnwindSafe(|| waits.finish(Duration::from_millis(50))));
    let told = told.expect_err("it does not end").downcast::<String>().expect("a message");
    assert!(told.contains(" sh: ") && told.contains(" sleep: "), "{told}");
}
