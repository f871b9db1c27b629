//! Calls of io_uring that are forbidden, as containers do (seccomp): what can be served without
//! them is served, and everything else is refused with one error that names io_uring and what
//! allows it. Nothing hangs.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{UringParameter, mount_at, needs_root};
use ringdisk_testkit::mount::{Mounted, text};
use ringdisk_testkit::process::{Finished, Process};
use rustix::io::Errno;

use crate::common::forbid::{Call, Forbidden, launch};
use crate::common::{MIB, assert_refused, program, raw_image};

/// Enough for a refusal; what hangs does not end at all.
const LIMIT: Duration = Duration::from_secs(20);

#[test]
#[ignore = "run by the others: becomes the program from which calls were taken away"]
fn launcher() {
    launch();
}

fn forbidden(calls: &[Call], errno: Errno) -> Forbidden<'_> {
    Forbidden { calls, errno, above: None }
}

fn with(forbidden: &Forbidden, words: &[&str]) -> Command {
    forbidden.command("forbidden::launcher", &[&[program().as_str()], words].concat())
}

/// Lines that begin with the name of the program and say that something failed.
fn errors(finished: &Finished) -> usize {
    finished.stderr.lines().filter(|line| line.starts_with("ringdisk: error")).count()
}

/// One error, which names what is missing; nothing is mounted.
fn assert_one_refusal(command: &mut Command, path: &Path, what: &str) {
    let finished = Process::spawn(command).finish(LIMIT);
    assert_refused(&finished, &["io_uring", "seccomp"]);
    assert_eq!(errors(&finished), 1, "{what}: {}", finished.output());
    assert!(finished.stderr.lines().count() <= 6, "{what}: {}", finished.output());
    assert_eq!(mount_at(path), None, "{what}");
}

#[test]
fn without_a_call_of_io_uring_every_transport_is_refused_with_one_error() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    std::fs::write(&path, "").expect("a mountpoint");
    let image = text(&image);
    for transport in ["dev", "auto", "uring"] {
        let _switch = UringParameter::set(transport != "dev");
        for calls in
            [&[Call::Setup][..], &[Call::Enter], &[Call::Setup, Call::Enter, Call::Register]]
        {
            for errno in [Errno::PERM, Errno::NOSYS] {
                for disk in [&["-f", "raw", image][..], &["--null", "1M"]] {
                    let what = format!("{transport} {calls:?} {errno:?} {disk:?}");
                    let words =
                        [&["mount", "--transport", transport], disk, &[text(&path)]].concat();
                    assert_one_refusal(&mut with(&forbidden(calls, errno), &words), &path, &what);
                }
            }
        }
    }
}

/// Tools work with rings too.
#[test]
fn tools_say_it_as_well() {
    let (_directory, image) = raw_image(MIB, 1);
    for call in [Call::Setup, Call::Enter] {
        let finished = Process::spawn(&mut with(
            &forbidden(&[call], Errno::PERM),
            &["map", "-f", "raw", text(&image)],
        ))
        .finish(LIMIT);
        assert_refused(&finished, &["io_uring", "seccomp"]);
    }
}

/// A profile that forgets io_uring_register: slower, where it can be done without, never a hang.
#[test]
fn without_registering_it_is_served_or_refused() {
    if !needs_root() {
        return;
    }
    for transport in ["dev", "auto", "uring"] {
        let Some(_switch) = UringParameter::set(transport != "dev") else { return };
        for errno in [Errno::PERM, Errno::NOSYS] {
            let (directory, image) = raw_image(MIB, 1);
            let path = directory.path().join("disk");
            let words = ["mount", "--transport", transport, "-f", "raw", text(&image), text(&path)];
            let mut command = with(&forbidden(&[Call::Register], errno), &words);
            match Mounted::try_from_command(&mut command, &path) {
                Ok(disk) => {
                    assert_eq!(piece(&path, 5000, 3000), pattern(1, 5000, 3000));
                    assert_eq!(disk.stop().code(), Some(0));
                }
                Err(finished) => assert_refused(&finished, &["io_uring"]),
            }
            assert_eq!(mount_at(&path), None);
        }
    }
}

/// A limit on the size of rings hits the larger ones of io_uring, and not those of `/dev/fuse`.
#[test]
fn where_the_rings_of_the_transport_are_refused_dev_serves_and_one_line_says_so() {
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    // Rings for both kinds of requests, of a thread with one queue or more: beyond 2 × 128 entries.
    let small = Forbidden { calls: &[Call::Setup], errno: Errno::NOMEM, above: Some(256) };
    let depth = ["--queue-depth", "128", "-f", "raw", text(&image), text(&path)];
    let words = |transport| [&["mount", "--transport", transport][..], &depth].concat();
    let disk = Mounted::from_command(&mut with(&small, &words("auto")), &path);
    assert_eq!(piece(&path, 5000, 3000), pattern(1, 5000, 3000));
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    let lines: Vec<&str> =
        finished.stderr.lines().filter(|line| line.contains("served over /dev/fuse")).collect();
    assert_eq!(lines.len(), 1, "{}", finished.output());
    assert!(lines[0].contains("RLIMIT_MEMLOCK"), "{lines:?}");
    let finished = Process::spawn(&mut with(&small, &words("uring"))).finish(LIMIT);
    assert_refused(&finished, &["io_uring", "RLIMIT_MEMLOCK"]);
    assert_eq!(errors(&finished), 1, "{}", finished.output());
    assert_eq!(mount_at(&path), None);
}
