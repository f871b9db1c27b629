//! Storage that fails while it is in use: no space, I/O errors, a file that shrinks, requests that
//! never complete.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::{UringParameter, mount_at, needs_root, part_needs};
use ringdisk_testkit::model::Request;
use ringdisk_testkit::mount::{
    ECHO, FileSystem, Loop, Mounted, STOP, scratch, text, wait_for_requests,
};
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, patient, until};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::common::serving::Place;
use crate::common::tools::ringdisk;
use crate::common::{BLOCK, MIB, Served, errno, mount, open, open_direct, serve, serve_raw};

/// Writes until the first error; returns how many bytes were accepted, and the error.
fn write_until_full(file: &std::fs::File, step: usize, limit: u64) -> (u64, Option<Errno>) {
    let mut done = 0;
    while done < limit {
        match file.write_at(&pattern(3, done, step), done) {
            Ok(n) if n > 0 => done += n as u64,
            outcome => return (done, errno(outcome)),
        }
    }
    (done, None)
}

#[test]
fn a_full_disk_in_the_middle_of_writing_is_enospc_and_loses_nothing() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let small = FileSystem::tmpfs(&directory.path().join("small"), 8 * MIB);
    let image = small.path().join("disk.img");
    images::sparse(&image, 64 * MIB);
    let disk = serve(&image, &["--format", "raw"]);
    let file = open(disk.path());
    let (done, error) = write_until_full(&file, 100_000, 64 * MIB);
    assert_eq!(error, Some(Errno::NOSPC));
    assert!(done > 6 * MIB && done <= 8 * MIB, "{done}");
    let len = usize::try_from(done).expect("small");
    assert!(piece(disk.path(), 0, len) == pattern(3, 0, len));
    // What has its space can be written again, and what is punched makes room.
    file.write_all_at(b"again", 1000).expect("write inside");
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, 4 * MIB).expect("punch");
    file.write_all_at(&[9; BLOCK], 32 * MIB).expect("write after punching");
    file.sync_all().expect("fsync");
    drop(file);
    assert_eq!(disk.stop().code(), Some(0));
}

/// Nothing is wrong with the image, so the exit code is not that of one that is damaged.
#[test]
fn a_command_that_finds_no_room_says_so_by_its_exit_code() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let small = FileSystem::tmpfs(&directory.path().join("small"), 4 * MIB);
    let at = |name: &str| small.path().join(name);
    images::qcow2(&at("disk.qcow2"), "64M", "");
    let disk = serve(&at("disk.qcow2"), &[]);
    let mut filler = std::fs::File::create(at("filler")).expect("a file");
    while filler.write_all(&[1; BLOCK]).is_ok() {}
    drop(filler);
    let (new, overlay) = (at("new.qcow2"), at("overlay.qcow2"));
    let d = small.path();
    let full = ["create", "-f", "qcow2", "-o", "preallocation=full", text(&new), "8M"];
    ringdisk(d, &full).ends(12).says("No space left");
    ringdisk(d, &["create", "-f", "raw", "-o", "preallocation=full", text(&new), "8M"]).ends(12);
    ringdisk(d, &["ctl", disk.text(), "snapshot", text(&overlay)]).ends(12).says("No space left");
    assert!(!new.exists() && !overlay.exists());
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_full_file_system_with_many_requests_in_flight() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let (host, inside) = (directory.path().join("host.img"), directory.path().join("host"));
    images::sparse(&host, 24 * MIB);
    ringdisk_testkit::process::ok_words(&["mkfs.ext4", "-q", "-F", text(&host)]);
    let small = FileSystem::of(&host, &inside, "loop");
    let image = small.path().join("disk.img");
    images::sparse(&image, 64 * MIB);
    let disk = serve(&image, &["--format", "raw", "--direct", "--threads", "2"]);
    let (file, engine) = (format!("--filename={}", disk.text()), "--ioengine=libaio");
    let words = [
        "fio",
        "--name=f",
        "--rw=write",
        "--bs=64k",
        "--direct=1",
        "--iodepth=32",
        "--size=64m",
        engine,
    ];
    let client = Process::spawn(&mut command(&[&words[..], &[&file]].concat())).finish(LIMIT);
    assert!(
        client.code() != Some(0) && client.output().contains("No space left"),
        "{}",
        client.output()
    );
    assert_eq!(piece(disk.path(), 63 * MIB, 512), [0; 512]);
    let finished = disk.stop();
    assert!(finished.code().is_some(), "{finished:?}");
    small.unmount();
}

/// A loop device whose second half has lost its storage: reads and writes there are I/O errors.
fn half_gone(directory: &std::path::Path) -> Option<Loop> {
    let backing = directory.join("backing.img");
    images::raw(&backing, 8 * MIB, 1);
    let device = Loop::attach(&backing, &["--direct-io=on"])?;
    let file = std::fs::File::options().write(true).open(&backing).expect("open");
    file.set_len(4 * MIB).expect("shrink");
    Some(device)
}

/// The process in the background has nobody else to tell.
#[test]
fn who_asks_for_the_end_hears_that_the_last_flush_failed() {
    if !needs_root() {
        return;
    }
    for words in [["ctl", "DISK", "stop"].as_slice(), &["umount", "DISK"]] {
        let directory = scratch();
        // A file system that has less room than it thinks: writes get as far as its page cache.
        let memory = FileSystem::tmpfs(&directory.path().join("memory"), 12 * MIB);
        let host = memory.path().join("host.img");
        images::sparse(&host, 64 * MIB);
        ok_words(&["mkfs.ext4", "-q", "-F", "-O", "^has_journal", text(&host)]);
        let small = FileSystem::of(&host, &directory.path().join("host"), "loop");
        let image = small.path().join("disk.img");
        images::sparse(&image, 40 * MIB);
        let disk = serve(&image, &["--format", "raw"]);
        let file = open(disk.path());
        (0..30).for_each(|at| {
            file.write_all_at(&pattern(3, at * MIB, 1 << 20), at * MIB).expect("it is in memory");
        });
        drop(file);
        let words: Vec<&str> =
            words.iter().map(|word| if *word == "DISK" { disk.text() } else { word }).collect();
        let ran = ringdisk(directory.path(), &words);
        assert_eq!(ran.code, 12, "{words:?}: {}{}", ran.out, ran.err);
        assert!(ran.err.contains("flush"), "{words:?}: {}", ran.err);
        assert_eq!(disk.finish().code(), Some(12));
        small.unmount();
    }
}

#[test]
fn read_errors_of_the_device_are_eio_there_and_nowhere_else() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let Some(device) = half_gone(directory.path()) else { return };
    let disk = mount(&["--format", "raw", "--direct", text(device.device())]);
    let file = open_direct(disk.path());
    let mut block = crate::common::Aligned::new(BLOCK);
    assert_eq!(errno(file.read_exact_at(block.bytes_mut(), 6 * MIB)), Some(Errno::IO));
    file.read_exact_at(block.bytes_mut(), MIB).expect("the first half is well");
    assert!(block.bytes() == pattern(1, MIB, BLOCK));
    // A request over the edge: the part before it, or an error; never rubbish.
    let mut across = crate::common::Aligned::new(2 * BLOCK);
    let edge = 4 * MIB - BLOCK as u64;
    let n = file.read_at(across.bytes_mut(), edge).unwrap_or(0);
    assert!(across.bytes()[..n] == pattern(1, edge, n)[..] && n <= BLOCK, "{n}");
    drop(file);
    assert_eq!(disk.stop().code(), Some(0));
}

/// A user who looks for the reason of an error finds it in the log: where it was, and which
/// operation on which file.
#[test]
fn errors_of_clients_are_in_the_log_the_first_of_a_kind_with_its_cause_and_the_others_counted() {
    if !needs_root() {
        return;
    }
    for transport in ["dev", "uring"] {
        // It is never switched off here: other tests of this program may be run over io_uring.
        let switch = (transport == "uring").then(|| UringParameter::set(true));
        let is_there = switch.as_ref().is_none_or(Option::is_some);
        if !part_needs("FUSE over io_uring", is_there) {
            continue;
        }
        let directory = scratch();
        let Some(device) = half_gone(directory.path()) else { return };
        let words = ["--format", "raw", "--direct", "--transport", transport];
        let disk = mount(&[&words[..], &[text(device.device())]].concat());
        let file = open_direct(disk.path());
        let mut block = crate::common::Aligned::new(BLOCK);
        for n in 0..20 {
            let at = 6 * MIB + n * BLOCK as u64;
            assert_eq!(errno(file.read_exact_at(block.bytes_mut(), at)), Some(Errno::IO));
        }
        drop(file);
        let finished = disk.stop();
        let node = text(device.device());
        let read = format!(
            "a read of 4096 bytes at {} failed for a client: Input/output error (os error 5) (a \
             read of '{node}', 4096 bytes at {})",
            6 * MIB,
            6 * MIB
        );
        assert!(finished.stderr.contains(&read), "{transport}: {}", finished.output());
        assert_eq!(errors_counted(&finished.stderr), 19, "{transport}: {}", finished.output());
    }
}

/// Errors that the log counts after the first one, in one line. A queue thread that meets the
/// thread of the log at the table counts an error without its kind, in a second line.
fn errors_counted(log: &str) -> u64 {
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("failed for")).collect();
    let number = |line: &str, before: &str, behind: &str| -> u64 {
        let (text, _) = line.split_once(behind).unwrap_or_else(|| panic!("{behind}: {log}"));
        let (_, number) = text.rsplit_once(before).unwrap_or_else(|| panic!("{before}: {log}"));
        number.parse().expect("a number")
    };
    let (others, kinds): (Vec<&str>, Vec<&str>) =
        lines[1..].iter().partition(|line| line.contains("of other kinds"));
    assert!(others.len() <= 1 && kinds.len() == 1, "{log}");
    let others = others.iter().map(|line| number(line, " ", " requests of other kinds"));
    number(kinds[0], "a read failed for clients ", " more times") + others.sum::<u64>()
}

#[test]
fn errors_of_guests_are_in_the_log_in_the_same_way() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let Some(device) = half_gone(directory.path()) else { return };
    let place = Place::on(device.device());
    let daemon = place.start(&["--cache", "none"]);
    let mut vm = place.vm(false);
    let read = |at: u64| Request::read(at / 512, BLOCK);
    for n in 0..20 {
        let done = vm.run(0, read(6 * MIB + n * BLOCK as u64));
        assert_eq!(done.status, 1, "an I/O error");
    }
    let done = vm.run(0, read(MIB));
    assert!(done.status == 0 && done.data == pattern(1, MIB, BLOCK), "the first half is well");
    drop(vm);
    let finished = daemon.stop(&[&place.socket]);
    let node = text(device.device());
    let first = format!(
        "a read of 4096 bytes at {} failed for a client: Input/output error (os error 5) (a read \
         of '{node}', 4096 bytes at {})",
        6 * MIB,
        6 * MIB
    );
    assert!(finished.stderr.contains(&first), "{}", finished.output());
    assert_eq!(errors_counted(&finished.stderr), 19, "{}", finished.output());
}

#[test]
fn a_file_that_shrinks_in_use_gives_short_reads_or_errors() {
    if !needs_root() {
        return;
    }
    for way in [&[][..], &["--direct"], &["--kernel-cache"]] {
        let Served { mut mounted, image, directory } = serve_raw(8 * MIB, way);
        let file = open(mounted.path());
        std::fs::File::options()
            .write(true)
            .open(&image)
            .expect("open")
            .set_len(MIB)
            .expect("shrink");
        let mut bytes = [0xee; 512];
        let outcome = file.read_at(&mut bytes, 6 * MIB);
        assert!(
            outcome.as_ref().map_or(true, |n| bytes[..*n].iter().all(|b| *b == 0)),
            "{way:?} {outcome:?}"
        );
        assert_eq!(piece(mounted.path(), 5000, 100), pattern(1, 5000, 100), "{way:?}");
        let _ = file.write_at(&[1; 512], 6 * MIB);
        assert_eq!(mounted.process().ended(), None, "{way:?}");
        drop(file);
        let finished = mounted.stop();
        assert!(finished.signal().is_none(), "{way:?}: {}", finished.output());
        drop(directory);
    }
}

/// A served disk whose storage is the file of another server that is stopped: its requests never
/// complete.
struct Stuck {
    upper: Mounted,
    lower: Mounted,
}

impl Stuck {
    fn new(args: &[&str]) -> Stuck {
        let mut lower = mount(&["--null", "64M"]);
        let upper = serve(lower.path(), &[&["--format", "raw", "--direct"], args].concat());
        // What the kernel knows of both files is fresh, so that mostly a read is what is stuck.
        ok_words(&["stat", "--cached=never", lower.text(), upper.text()]);
        lower.process().signal(Signal::STOP);
        Stuck { upper, lower }
    }

    fn clients(&self) -> [Process; 3] {
        let clients = [1, 2, 3].map(|at| {
            let words = [format!("if={}", self.upper.text()), format!("skip={at}")];
            let more = ["of=/dev/null", "bs=4k", "count=1", "iflag=direct"];
            Process::spawn(command(&["dd"]).args(words).args(more))
        });
        // In a read, or before it: whose attributes are old by then is asked for new ones, which
        // never come either.
        wait_for_requests(self.upper.path(), 3);
        clients
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        self.lower.process().signal(Signal::CONT);
    }
}

fn assert_ended_with_errors(mut clients: [Process; 3]) {
    let ended = clients.each_mut().map(|c| c.wait(STOP).is_some_and(|status| !status.success()));
    assert_eq!(ended, [true; 3]);
}

#[test]
fn a_second_sigterm_ends_a_mount_whose_storage_never_completes() {
    if !needs_root() {
        return;
    }
    let mut stuck = Stuck::new(&[]);
    let clients = stuck.clients();
    let start = Instant::now();
    stuck.upper.process().signal(Signal::TERM);
    let path = stuck.upper.path().to_owned();
    let gone = until(STOP, || mount_at(&path).is_none().then_some(()));
    // The clients wait for storage: it goes on for them until it is told not to.
    std::thread::sleep(ECHO);
    stuck.upper.process().signal(Signal::TERM);
    assert_ended_with_errors(clients);
    assert!(
        gone.is_some() && start.elapsed() < patient(Duration::from_secs(6)),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_forced_unmount_ends_a_mount_whose_storage_never_completes() {
    if !needs_root() {
        return;
    }
    let stuck = Stuck::new(&["--threads", "2"]);
    let clients = stuck.clients();
    let start = Instant::now();
    let _ = ringdisk_testkit::process::run(command(&["umount", "-f", stuck.upper.text()]));
    assert_ended_with_errors(clients);
    assert!(start.elapsed() < patient(Duration::from_secs(6)), "{:?}", start.elapsed());
}

#[test]
fn a_time_limit_ends_a_mount_whose_storage_never_completes() {
    if !needs_root() {
        return;
    }
    let mut stuck = Stuck::new(&["--io-timeout", "3s"]);
    let clients = stuck.clients();
    assert_ended_with_errors(clients);
    let gone = until(STOP, || mount_at(stuck.upper.path()).is_none().then_some(()));
    assert_eq!(gone, Some(()));
    // The kernel does not let a process go before its requests have come back, so the exit code
    // comes later.
    stuck.lower.process().signal(Signal::CONT);
    let status = stuck.upper.process().wait(STOP);
    assert_eq!(status.and_then(|s| s.code()), Some(12), "{}", stuck.upper.output());
}

#[test]
fn storage_that_is_only_slow_is_not_given_up() {
    if !needs_root() {
        return;
    }
    let disk = mount(&["--null", "1M", "--latency", "300ms", "--io-timeout", "5s"]);
    assert_eq!(piece(disk.path(), 0, 512).len(), 512);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn a_block_device_is_served_and_its_discards_reach_the_file_below() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let backing = directory.path().join("backing.img");
    images::raw(&backing, 8 * MIB, 1);
    let Some(device) = Loop::attach(&backing, &[]) else { return };
    let disk = mount(&["--format", "raw", "--direct", "--resizable", text(device.device())]);
    assert_eq!(std::fs::metadata(disk.path()).expect("stat").len(), 8 * MIB);
    let file = open(disk.path());
    file.write_all_at(b"unaligned", 12_345).expect("write");
    file.sync_all().expect("fsync");
    assert_eq!(piece(disk.path(), 12_344, 10)[1..], *b"unaligned");
    let before = images::allocated(&backing);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 4 * MIB, 2 * MIB).expect("punch");
    assert!(images::allocated(&backing) < before);
    assert_eq!(piece(disk.path(), 4 * MIB, BLOCK), [0; BLOCK]);
    assert_eq!(errno(file.set_len(16 * MIB)), Some(Errno::OPNOTSUPP));
    drop(file);
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn writethrough_and_unsafe_serve_the_same_bytes() {
    if !needs_root() {
        return;
    }
    for cache in ["writeback", "none", "writethrough", "unsafe"] {
        let disk = serve_raw(MIB, &["--cache", cache]);
        let file = open(disk.mounted.path());
        file.write_all_at(&pattern(4, 0, 70_000), 999).expect("write");
        assert!(piece(disk.mounted.path(), 999, 70_000) == pattern(4, 0, 70_000), "{cache}");
        file.sync_all().expect("fsync");
        drop(file);
        assert_eq!(disk.mounted.stop().code(), Some(0), "{cache}");
        assert!(piece(&disk.image, 999, 70_000) == pattern(4, 0, 70_000), "{cache}");
    }
}
