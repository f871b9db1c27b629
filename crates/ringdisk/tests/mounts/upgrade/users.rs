//! What users of a mount have of it stays theirs: open files, modes, locks, mappings, overlays of
//! this minute, sizes; and what the process had goes to the next one: pid file, users to wait for.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{mount_at, needs};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, ok_words, run, until};
use rustix::fs::{FlockOperation, OFlags, fcntl_lock, flock};

use super::upgraded_mount::{ASK, Taken};
use crate::common::mapping::Mapping;
use crate::common::{MIB, open, program};

fn image_of(directory: &Path) -> std::path::PathBuf {
    let image = directory.join("disk.img");
    images::raw(&image, 8 * MIB, 1);
    image
}

#[test]
fn limits_that_a_command_has_set_stay_and_the_hand_over_is_an_event() {
    let directory = scratch();
    let image = image_of(directory.path());
    let mut disk = Taken::start(&["--limit", "iops=1000", "--format", "raw", text(&image)]);
    disk.ctl(&["limit", "iops=0,bps-write=50M"]);
    let limits = disk.ctl(&["limit"]).stdout;
    let words = [program(), "ctl".into(), text(disk.path()).into(), "events".into()];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let follower = Process::spawn(&mut command(&words));
    let follows = until(LIMIT, || {
        disk.ctl(&["limit", "bps-write=49M"]);
        disk.ctl(&["limit", "bps-write=50M"]);
        follower.output().contains("limited").then_some(())
    });
    follows.expect("events");
    for _ in 0..2 {
        disk.upgrade(&[]);
        assert_eq!(disk.ctl(&["limit"]).stdout, limits);
    }
    let events = follower.finish(LIMIT).output();
    assert!(events.lines().any(|line| line.contains(r#""event":"handed-over""#)), "{events}");
    disk.stop();
}

/// At this rate those that wait would take longer than a successor waits.
#[test]
fn requests_that_wait_for_a_low_limit_do_not_keep_a_mount_from_its_successor() {
    let directory = scratch();
    let image = image_of(directory.path());
    let mut disk = Taken::start(&["--limit", "iops=4", "--format", "raw", text(&image)]);
    let direct = OFlags::DIRECT.bits().cast_signed();
    let file = File::options().read(true).custom_flags(direct).open(disk.path()).expect("open");
    let file = Arc::new(file);
    let readers: Vec<_> = (0..64u64)
        .map(|number| {
            let file = Arc::clone(&file);
            std::thread::spawn(move || {
                file.read_exact_at(&mut [0; 4096], number * 65536).expect("a read");
            })
        })
        .collect();
    let waiting = || {
        let stats = disk.ctl(&["stats", "--json"]).stdout;
        let stats: serde_json::Value = serde_json::from_str(&stats).expect("JSON");
        stats["waited-for-limits"]["now"].as_u64().filter(|count| *count >= 48)
    };
    until(LIMIT, waiting).expect("requests that wait");
    disk.upgrade(&[]);
    disk.ctl(&["limit", "iops=0"]);
    readers.into_iter().for_each(|reader| reader.join().expect("a reader"));
    drop(file);
    disk.stop();
}

#[test]
fn copy_on_read_that_a_command_has_switched_stays() {
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let mut disk = Taken::start(&[text(&image)]);
    for (wanted, is_on) in [("on", true), ("off", false)] {
        disk.ctl(&["copy-on-read", wanted]);
        disk.upgrade(&[]);
        let stats = disk.ctl(&["stats", "--json"]).stdout;
        let stats: serde_json::Value = serde_json::from_str(&stats).expect("JSON");
        assert_eq!(stats["copy-on-read"], is_on, "{stats}");
    }
    disk.stop();
}

#[test]
fn open_files_modes_and_locks_stay_and_the_last_user_is_waited_for() {
    let directory = scratch();
    let image = image_of(directory.path());
    let mut disk = Taken::start(&["--allow-other", "--format", "raw", text(&image)]);
    let file = open(disk.path());
    flock(&file, FlockOperation::NonBlockingLockExclusive).expect("nobody has it");
    let mode = |path: &Path| std::fs::metadata(path).expect("stat").mode() & 0o777;
    std::fs::set_permissions(disk.path(), Permissions::from_mode(0o640)).expect("chmod");
    file.write_all_at(b"before", 4096).expect("a write");
    for _ in 0..2 {
        disk.upgrade(&[]);
    }
    assert_eq!(mode(disk.path()), 0o640);
    let mut seen = [0; 6];
    file.read_exact_at(&mut seen, 4096).expect("a read");
    assert_eq!(&seen, b"before");
    let other = open(disk.path());
    assert!(flock(&other, FlockOperation::NonBlockingLockExclusive).is_err(), "it is locked");
    assert!(fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).is_ok());
    drop(other);
    // The file that the first process saw opened is known to the third: it has a user.
    let umount = [program(), String::from("umount"), text(disk.path()).to_owned()];
    let umount: Vec<&str> = umount.iter().map(String::as_str).collect();
    let busy = run(command(&umount));
    assert_eq!(busy.code(), Some(5), "{}", busy.output());
    disk.process.signal(rustix::process::Signal::TERM);
    let path = disk.path().to_owned();
    assert!(until(LIMIT, || mount_at(&path).is_none().then_some(())).is_some());
    file.write_all_at(b"after", 8192).expect("it is served until it is closed");
    assert!(disk.process.ended().is_none(), "{}", disk.process.output());
    drop(file);
    let finished = disk.process.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    let mut seen = [0; 5];
    File::open(&image).expect("the image").read_exact_at(&mut seen, 8192).expect("a read");
    assert_eq!(&seen, b"after");
}

#[test]
fn a_mount_that_stops_is_not_handed_over() {
    let directory = scratch();
    let image = image_of(directory.path());
    let disk = Taken::start(&["--format", "raw", text(&image)]);
    let file = open(disk.path());
    let socket = disk.socket();
    disk.process.signal(rustix::process::Signal::TERM);
    let path = disk.path().to_owned();
    assert!(until(LIMIT, || mount_at(&path).is_none().then_some(())).is_some());
    let refused = run(&mut disk.successor(&[]));
    assert_eq!(refused.code(), Some(4), "{}", refused.output());
    assert!(refused.stderr.contains("nothing to take over"), "{}", refused.output());
    let mut stream = UnixStream::connect(&socket).expect("it listens");
    stream.write_all(ASK).expect("it listens");
    let mut said = Vec::new();
    stream.read_to_end(&mut said).expect("a refusal");
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("it was stopped, and ends when its last user"), "{said}");
    drop(file);
    let finished = disk.process.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn a_stop_in_the_middle_of_it_is_the_successors() {
    let disk = Taken::start(&["--null", "1M"]);
    let mut stream = UnixStream::connect(disk.socket()).expect("it listens");
    stream.write_all(ASK).expect("it listens");
    // The length of the words; the number of descriptors, which come with one byte.
    let mut numbers = [0; 8];
    stream.read_exact(&mut numbers).expect("a state");
    let len = u32::from_le_bytes(numbers[..4].try_into().expect("four"));
    stream.read_exact(&mut vec![0; len as usize + 1]).expect("a state");
    disk.process.signal(rustix::process::Signal::TERM);
    std::thread::sleep(std::time::Duration::from_millis(200));
    stream.write_all(b"R").expect("it waits");
    let mut said = Vec::new();
    stream.read_to_end(&mut said).expect("its end");
    assert_eq!(said, b"GS");
    let finished = disk.process.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn mappings_are_written_by_both_processes() {
    let directory = scratch();
    let image = image_of(directory.path());
    let mut disk = Taken::start(&["--kernel-cache", "--format", "raw", text(&image)]);
    let file = open(disk.path());
    let mapping = Mapping::new(&file, 64 << 10);
    mapping.write(0, b"first");
    disk.upgrade(&[]);
    mapping.write(4096, b"second");
    mapping.sync();
    let mut seen = vec![0; 8192];
    File::open(&image).expect("the image").read_exact_at(&mut seen, 0).expect("a read");
    assert_eq!((&seen[..5], &seen[4096..4102]), (&b"first"[..], &b"second"[..]));
    drop((mapping, file));
    drop(disk.stop());
}

#[test]
fn an_overlay_of_this_minute_and_a_new_size_go_with_it() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let mut disk = Taken::start(&[text(&image)]);
    open(disk.path()).write_all_at(b"below", 0).expect("a write");
    let overlay = directory.path().join("overlay.qcow2");
    disk.ctl(&["snapshot", text(&overlay)]);
    open(disk.path()).write_all_at(b"above", 5).expect("a write");
    disk.ctl(&["resize", "32M"]);
    for _ in 0..2 {
        disk.upgrade(&[]);
        assert_eq!(std::fs::metadata(disk.path()).expect("stat").len(), 32 * MIB);
        let mut seen = [0; 10];
        open(disk.path()).read_exact_at(&mut seen, 0).expect("a read");
        assert_eq!(&seen, b"belowabove");
    }
    // The next process can make one, too.
    let second = directory.path().join("second.qcow2");
    disk.ctl(&["snapshot", text(&second)]);
    open(disk.path()).write_all_at(b"on top", 20).expect("a write");
    disk.upgrade(&[]);
    drop(disk.stop());
    for image in [&image, &overlay, &second] {
        ok_words(&["qemu-img", "check", "-q", "-f", "qcow2", text(image)]);
    }
    let map = ok_words(&["qemu-img", "info", "--backing-chain", text(&second)]);
    assert!(map.contains("overlay.qcow2") && map.contains("disk.qcow2"), "{map}");
}

#[test]
fn disks_of_every_kind_are_taken_over() {
    let directory = scratch();
    let image = image_of(directory.path());
    let raw = ["--format", "raw", text(&image)];
    for words in [
        &["--null", "1G", "--read-zeroes"][..],
        &[&["--read-only"][..], &raw].concat(),
        &[&["--snapshot"][..], &raw].concat(),
        &[&["--direct", "--growable"][..], &raw].concat(),
        &[&["--offset", "1M", "--size", "2M"][..], &raw].concat(),
        &[&["--sandbox", "off"][..], &raw].concat(),
    ] {
        let mut disk = Taken::start(words);
        let mut before = [0; 512];
        let first = File::open(disk.path()).expect("open");
        let is_written = !words.contains(&"--read-only");
        if is_written {
            open(disk.path()).write_all_at(&[7; 512], 512).expect("a write");
        }
        first.read_exact_at(&mut before, 512).expect("a read");
        let (len, mode) = (std::fs::metadata(disk.path()).expect("stat").len(), first.metadata());
        let since = mode.expect("stat").mtime();
        disk.upgrade(&[]);
        let mut after = [0; 512];
        first.read_exact_at(&mut after, 512).expect("a read");
        assert!(before == after, "{words:?}");
        let now = std::fs::metadata(disk.path()).expect("stat");
        assert_eq!(now.len(), len, "{words:?}");
        assert!(is_written || now.mtime() == since, "a read-only file shows one time: {words:?}");
        drop(first);
        drop(disk.stop());
    }
}

#[test]
fn in_the_background_the_pid_file_goes_to_the_new_process() {
    let directory = scratch();
    let image = image_of(directory.path());
    let (pidfile, path) = (directory.path().join("pid"), directory.path().join("disk"));
    let program = program();
    let words = [
        &program,
        "mount",
        "--transport",
        "dev",
        "--daemonize",
        "--pidfile",
        text(&pidfile),
        "-f",
        "raw",
        text(&image),
        text(&path),
    ];
    let _cleared = ringdisk_testkit::mount::Cleared(path.clone());
    ok_words(&words);
    let pid = || std::fs::read_to_string(&pidfile).expect("a pid file");
    let mut before = pid();
    let file = open(&path);
    for _ in 0..2 {
        ok_words(&[&words[..], &["--upgrade"]].concat());
        let now = pid();
        assert_ne!(now, before, "another process");
        file.write_all_at(b"still here", 0).expect("a write");
        let gone = until(LIMIT, || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", before.trim()));
            stat.map_or(true, |stat| stat.contains(") Z ")).then_some(())
        });
        assert!(gone.is_some(), "{before} is still there");
        before = now;
    }
    drop(file);
    ok_words(&[&program, "umount", text(&path)]);
    assert!(!path.exists() && !pidfile.exists());
}
