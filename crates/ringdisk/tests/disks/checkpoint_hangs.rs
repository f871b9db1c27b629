//! Storage that does not answer while several disks of several processes come to one instant: the
//! checkpoint is given up within its limits, nothing of it is left, and no disk but the one that
//! hangs feels more than a pause.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::{Request, Vm};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words, until};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::serving::{Daemon, Place, ctl, serve_command, stats};
use crate::common::tools::Ran;
use crate::common::{BLOCK, open, program, serve};

/// The drain of a disk may take so long (docs/backup.md), and with it the requests of the others.
const DRAIN: Duration = Duration::from_secs(2);
/// No disk is held for longer.
const HOLD: Duration = Duration::from_secs(3);
/// For what a busy machine adds.
const BUSY: Duration = Duration::from_secs(5);

fn checkpoint(target: &Path, words: &[&str]) -> Ran {
    ctl(target, &[&["checkpoint"], words].concat())
}

/// What the list says: no checkpoint, and so many bitmaps.
#[track_caller]
fn assert_has(target: &Path, checkpoints: usize, bitmaps: usize) {
    let list = checkpoint(target, &["--list", "--json"]).ok().json();
    let count = |value: &Value| value.as_array().map_or(0, Vec::len);
    let counts = (count(&list["checkpoints"]), count(&list["image"]["bitmaps"]));
    assert_eq!(counts, (checkpoints, bitmaps), "{}: {list}", target.display());
}

/// How many bitmaps the list has.
fn bitmaps(target: &Path) -> usize {
    let list = checkpoint(target, &["--list", "--json"]).ok().json();
    list["image"]["bitmaps"].as_array().map_or(0, Vec::len)
}

/// A disk whose image is an export of a server that can be stopped.
struct Hanging {
    below: Place,
    server: Daemon,
    place: Place,
    daemon: Daemon,
}

impl Hanging {
    /// * `format`: of the image in the export.
    fn new(format: &'static str) -> Hanging {
        let (below, place) = (Place::new(format), Place::new("raw"));
        // The export is the bytes of the file, and does not grow.
        let file = std::fs::File::options().write(true).open(&below.image).expect("the image");
        file.set_len(16 << 20).expect("room");
        let words = [text(&below.image), "-f", "raw", "--nbd", text(&below.socket)];
        let server = Daemon::of(&mut serve_command(&words));
        let image = format!("nbd+unix:///?socket={}", text(&below.socket));
        let words = [&image, "-f", format, "--nbd", text(&place.socket)];
        let daemon = Daemon::of(&mut serve_command(&words));
        Hanging { below, server, place, daemon }
    }

    fn socket(&self) -> &Path {
        &self.place.socket
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.place.socket))
    }

    /// Its storage stands still, with a write of a client in flight.
    fn hang(&self) -> Process {
        self.server.process.signal(Signal::STOP);
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", "-c", "write -P 9 0 64k", &self.uri()]);
        let client = Process::spawn(&mut command);
        let in_flight = || {
            let total = &stats(self.socket())["total"];
            (total["in-flight"].as_u64() > Some(0)).then_some(())
        };
        until(LIMIT, in_flight).expect("a request in flight");
        client
    }

    /// It goes on, and so does the client.
    fn go_on(&self, mut client: Process) {
        self.server.process.signal(Signal::CONT);
        let ended = client.wait(LIMIT).expect("the request ends");
        assert!(ended.success(), "{}", client.output());
    }

    fn stop(self) {
        self.daemon.stop(&[&self.place.socket]);
        self.server.stop(&[&self.below.socket]);
        let format = self.below.format;
        if format == "qcow2" {
            images::assert_clean(&self.below.image);
        }
        images::qemu_io(&self.below.image, format, &["read -P 9 0 64k"]);
    }
}

/// A mount, and an image with a directory.
fn mounted() -> (Mounted, PathBuf, TempDir) {
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    (serve(&image, &["--sandbox", "on"]), image, directory)
}

/// Writes one block after the other until it is done. Gives the longest time that one took.
fn longest_write(is_done: &AtomicBool, mut write: impl FnMut(u64)) -> Duration {
    let mut longest = Duration::ZERO;
    for count in 0.. {
        if is_done.load(Ordering::Relaxed) {
            break;
        }
        let begun = Instant::now();
        write(count % 64);
        longest = longest.max(begun.elapsed());
    }
    longest
}

#[test]
fn several_disks_of_several_processes_go_on_when_one_does_not_drain() {
    if !needs_root() {
        return;
    }
    let (a, image, _directory) = mounted();
    // A process with two disks of guests.
    let (b, c) = (Place::new("qcow2"), Place::new("qcow2"));
    let spec = |place: &Place| {
        format!("image={},format=qcow2,socket={}", text(&place.image), text(&place.socket))
    };
    let daemon = Daemon::of(&mut serve_command(&["--disk", &spec(&b), "--disk", &spec(&c)]));
    let hanging = Hanging::new("raw");
    let (mut on_b, mut on_c) = (b.vm(true), c.vm(true));
    let is_done = AtomicBool::new(false);
    let block = || vec![5; BLOCK];
    let on_a = open(a.path());
    let guest = |vm: &mut Vm, at: u64| {
        assert_eq!(vm.status(0, Request::write(at * BLOCK as u64 / 512, block())), 0);
    };
    std::thread::scope(|scope| {
        let on_a = scope.spawn(|| {
            longest_write(&is_done, |at| {
                on_a.write_all_at(&block(), at * BLOCK as u64).expect("write A");
            })
        });
        let on_b = scope.spawn(|| longest_write(&is_done, |at| guest(&mut on_b, at)));
        let on_c = scope.spawn(|| longest_write(&is_done, |at| guest(&mut on_c, at)));
        let others = ["--with", text(&b.socket), "--with", text(&c.socket)];
        for round in 0..2 {
            let client = hanging.hang();
            let begun = Instant::now();
            let words = [&["c1"], &others[..], &["--with", text(hanging.socket())]].concat();
            checkpoint(a.path(), &words).ends(5).says("did not end within");
            let took = begun.elapsed();
            assert!(took >= DRAIN && took < DRAIN + HOLD + BUSY, "round {round}: {took:?}");
            for target in [a.path(), &b.socket, &c.socket, hanging.socket()] {
                assert_has(target, 0, 0);
            }
            hanging.go_on(client);
        }
        // With bitmaps, without the disk that cannot have one: nothing is in the way.
        let words = [&["c2", "--bitmap", "b2"], &others[..]].concat();
        checkpoint(a.path(), &words).ok();
        for target in [a.path(), &b.socket, &c.socket] {
            assert_has(target, 1, 1);
        }
        checkpoint(&c.socket, &["--end", "c2"]).ok();
        is_done.store(true, Ordering::Relaxed);
        for (disk, writer) in ["a", "b", "c"].into_iter().zip([on_a, on_b, on_c]) {
            let longest = writer.join().expect("no panic");
            assert!(longest < HOLD + BUSY, "a write to {disk} took {longest:?}");
        }
    });
    drop((on_a, on_b, on_c));
    assert_eq!(a.stop().code(), Some(0));
    daemon.stop(&[&b.socket, &c.socket]);
    for image in [&image, &b.image, &c.image] {
        images::assert_clean(image);
    }
    hanging.stop();
}

/// Writes to a mount are answered as ever, for longer than a disk may be held.
fn assert_no_pause(disk: &Mounted) {
    let begun = Instant::now();
    while begun.elapsed() < DRAIN + HOLD {
        let write = Instant::now();
        open(disk.path()).write_all_at(&[7; BLOCK], 0).expect("write");
        assert!(write.elapsed() < DRAIN, "a write took {:?}", write.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn bitmaps_whose_storage_hangs_hold_no_other_disk() {
    if !needs_root() {
        return;
    }
    let (a, image, _directory) = mounted();
    let hanging = Hanging::new("qcow2");
    let both = ["--with", text(hanging.socket())];
    // The image has its tables for what is written below.
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 1 0 64k", &hanging.uri()]);
    checkpoint(a.path(), &[&["c1", "--bitmap", "b1"], &both[..]].concat()).ok();
    let client = hanging.hang();
    // The disk that hangs is waited for; requests to the other one are not.
    let end = ["ctl", a.text(), "checkpoint", "--end", "c1"];
    let mut end = Process::spawn(Command::new(program()).args(end));
    assert_no_pause(&a);
    hanging.go_on(client);
    let ended = end.wait(LIMIT).expect("an end");
    assert!(ended.success(), "{}", end.output());
    for target in [a.path(), hanging.socket()] {
        assert_has(target, 0, 1);
    }
    // A new bitmap is made before any disk is held; where that takes too long, none stays.
    let client = hanging.hang();
    let words = [&["c2", "--since", "b1", "--bitmap", "b2"], &both[..]].concat();
    let words = [&["ctl", a.text(), "checkpoint"], &words[..]].concat();
    let begin = Process::spawn(Command::new(program()).args(words));
    assert_no_pause(&a);
    let refused = begin.finish(BUSY);
    assert_eq!(refused.code(), Some(5), "{}", refused.output());
    assert!(refused.stderr.contains("did not end within 5000 ms"), "{}", refused.stderr);
    assert_has(a.path(), 0, 1);
    hanging.go_on(client);
    // What came too late goes once the storage answers.
    let is_one = || {
        std::thread::sleep(Duration::from_millis(100));
        bitmaps(hanging.socket()) == 1
    };
    // It may be added only now.
    let is_gone = || (0..5).all(|_| is_one()).then_some(());
    until(LIMIT, is_gone).expect("the bitmap that came too late is removed");
    assert_has(hanging.socket(), 0, 1);
    assert_eq!(a.stop().code(), Some(0));
    images::assert_clean(&image);
    hanging.stop();
}
