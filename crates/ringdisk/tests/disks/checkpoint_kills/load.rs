//! Kills under the load of a client, at steps that can be seen from outside: while another disk is
//! being prepared, while the disk is held, with a reader, and while the checkpoint ends.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, pause, until};
use ringdisk_testkit::sim::Prng;
use rustix::process::Signal;
use tempfile::TempDir;

use super::judge::{BLOCK, Base, Known, judge};
use super::{BEGIN, NEW, OLD, SIZE, Template, end, serve};
use crate::common::nbd_client::{NbdClient, READ, WRITE};
use crate::common::nbd_storage::{NbdStorage, with_room};
use crate::common::program;
use crate::common::serving::{Daemon, ctl};

/// Writes in flight.
const DEPTH: usize = 8;

/// A disk whose server is killed.
struct Victim {
    daemon: Daemon,
    socket: PathBuf,
    known: Known,
    bases: Vec<Base>,
    directory: TempDir,
    /// Writes that were answered.
    written: AtomicUsize,
}

/// Writes until the server is gone.
fn work(mut client: NbdClient, mut known: Known, written: &AtomicUsize) -> Known {
    let mut prng = Prng::new(5);
    let mut blocks = std::collections::HashMap::new();
    loop {
        while known.in_flight.len() < DEPTH {
            let block = usize::try_from(prng.below((SIZE / BLOCK) as u64)).expect("small");
            if known.in_flight.contains_key(&block) {
                continue;
            }
            let byte = u8::try_from(1 + prng.below(255)).expect("a byte");
            known.in_flight.insert(block, byte);
            let len = u32::try_from(BLOCK).expect("small");
            match client.ask(WRITE, (block * BLOCK) as u64, len, &[byte; BLOCK]) {
                Ok(cookie) => blocks.insert(cookie, (block, byte)),
                Err(_) => return known,
            };
        }
        let Ok((cookie, error)) = client.answer() else { return known };
        assert_eq!(error, 0, "a write failed");
        let (block, byte) = blocks.remove(&cookie).expect("a request of ours");
        known.answered(block, byte);
        written.fetch_add(1, Ordering::Relaxed);
    }
}

impl Victim {
    fn new(template: &Template) -> Victim {
        let (directory, bases) = template.copy();
        let [image, socket] = ["disk.qcow2", "disk.sock"].map(|name| directory.path().join(name));
        std::fs::copy(template.path("disk.qcow2"), &image).expect("a copy");
        let daemon = serve(text(&image), &socket);
        let (known, written) = (template.known.clone(), AtomicUsize::new(0));
        Victim { daemon, socket, known, bases, directory, written }
    }

    /// Does something while a client writes, kills the server in it, and judges what is left.
    ///
    /// * `until_killed`: what is to be killed when it returns; with the base of [`NEW`], if the
    ///   instant of the checkpoint was seen, and what is to be kept until then.
    fn killed<T>(mut self, at: &str, until_killed: impl FnOnce(&Victim) -> (Option<PathBuf>, T)) {
        let client = NbdClient::connect(&self.socket, "");
        let known = self.known.clone();
        let (instant, known) = std::thread::scope(|scope| {
            let working = scope.spawn(|| work(client, known, &self.written));
            let kills = Kills(&self.daemon.process);
            self.goes_on();
            let (instant, kept) = until_killed(&self);
            drop(kills);
            let known = working.join().expect("no panic");
            drop(kept);
            (instant, known)
        });
        self.daemon.process.wait(LIMIT).expect("it was killed");
        self.bases.extend(instant.map(|backup| Base { bitmap: NEW, backup }));
        let bitmaps = judge(self.directory.path(), &known, &self.bases, at);
        // All that are there were recording.
        assert!(bitmaps.contains_key(OLD) || bitmaps.contains_key(NEW), "{at}: {bitmaps:?}");
    }

    /// Waits until the client has written some more.
    fn goes_on(&self) {
        let before = self.written.load(Ordering::Relaxed);
        let goes_on = || (self.written.load(Ordering::Relaxed) >= before + 50).then_some(());
        until(LIMIT, goes_on).expect("writes are answered");
    }

    /// Waits until no write is answered.
    fn stands_still(&self) {
        let stands = || {
            let before = self.written.load(Ordering::Relaxed);
            pause(Duration::from_millis(100));
            (self.written.load(Ordering::Relaxed) == before).then_some(())
        };
        until(LIMIT, stands).expect("writes wait");
    }

    /// Starts a command about its checkpoint.
    fn start(&self, words: &[&str]) -> Process {
        let mut command = Command::new(program());
        command.args(["ctl", text(&self.socket)]).args(words).env_remove("NOTIFY_SOCKET");
        Process::spawn(&mut command)
    }

    /// Begins a checkpoint, and reads it. Gives the copy, and where readers find it.
    fn begin(&self) -> (PathBuf, String) {
        let readers = self.directory.path().join("readers");
        let words = ["--nbd", text(&readers), "--json"];
        let begun = ctl(&self.socket, &[&BEGIN[..], &words].concat()).ok().json();
        let uri = begun["disks"][0]["uri"].as_str().expect("a URI").to_owned();
        let copy = self.directory.path().join("instant.raw");
        ok_words(&["nbdcopy", &uri, text(&copy)]);
        (copy, uri)
    }
}

/// Kills a process when it is dropped, also where a step fails: its client ends then.
struct Kills<'a>(&'a Process);

impl Drop for Kills<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::KILL);
    }
}

/// Another disk, which keeps all disks of a checkpoint waiting: its image is an export.
struct Other {
    daemon: Daemon,
    socket: PathBuf,
    storage: NbdStorage,
    _directory: TempDir,
}

impl Other {
    fn new(template: &Template) -> Other {
        let (directory, _) = template.copy();
        let socket = directory.path().join("other.sock");
        let storage = NbdStorage::new(with_room(&template.path("disk.qcow2"), 8 << 20));
        let daemon = serve(&storage.uri(), &socket);
        Other { daemon, socket, storage, _directory: directory }
    }
}

#[test]
fn while_another_disk_is_being_prepared() {
    let template = Template::new();
    let other = Other::new(&template);
    // The next thing that changes is its new bitmap.
    other.storage.stop_at(other.storage.changes());
    Victim::new(&template).killed("another disk is being prepared", |victim| {
        let begin = victim.start(&[&BEGIN[..], &["--with", text(&other.socket)]].concat());
        let is_added = || {
            let list = ctl(&victim.socket, &["checkpoint", "--list", "--json"]).ok().json();
            let bitmaps = list["image"]["bitmaps"].as_array().expect("a list").clone();
            let is_new = bitmaps.iter().any(|bitmap| bitmap["name"] == NEW);
            (is_new && other.storage.has_stopped()).then_some(())
        };
        until(LIMIT, is_added).expect("the bitmap is added, and the other disk is waited for");
        victim.goes_on();
        (None, begin)
    });
    other.daemon.kill();
}

#[test]
fn while_the_disk_is_held() {
    let template = Template::new();
    let other = Other::new(&template);
    // A long read of the other disk does not end; its bitmaps can be changed all the same.
    other.storage.hold_reads_over(64 << 10);
    let mut reader = NbdClient::connect(&other.socket, "");
    reader.ask(READ, 0, 1 << 20, &[]).expect("a server");
    until(LIMIT, || (other.storage.held_reads() > 0).then_some(())).expect("a read in flight");
    Victim::new(&template).killed("the disk is held", |victim| {
        let begin = victim.start(&[&BEGIN[..], &["--with", text(&other.socket)]].concat());
        victim.stands_still();
        assert!(begin.output().is_empty(), "{}", begin.output());
        (None, begin)
    });
    other.storage.go_on();
    // Its own part of the checkpoint is given up.
    let is_quiet = || {
        let list = ctl(&other.socket, &["checkpoint", "--list", "--json"]).ok().json();
        let bitmaps = list["image"]["bitmaps"].as_array().expect("a list").len();
        (list["checkpoints"].as_array().is_some_and(Vec::is_empty) && bitmaps == 1).then_some(())
    };
    until(LIMIT, is_quiet).expect("nothing of it is left");
    drop(reader);
    other.daemon.stop(&[&other.socket]);
}

#[test]
fn with_a_reader_in_the_middle() {
    let template = Template::new();
    Victim::new(&template).killed("a reader reads", |victim| {
        let (copy, uri) = victim.begin();
        let script = "
h.connect_uri(uri)
assert h.is_read_only()
print('reads', flush=True)
try:
    while True:
        assert len(h.pread(262144, 1048576)) == 262144
except nbd.Error:
    print('its server is gone')
";
        let connect = format!("uri = '{uri}'");
        let words = ["/usr/bin/python3", "-m", "nbd", "-c", &connect, "-c", script];
        let reader = Process::spawn(&mut command(&words));
        until(LIMIT, || reader.output().contains("reads").then_some(())).expect("a reader");
        victim.goes_on();
        (Some(copy), Ends(reader))
    });
}

/// A reader that hears of the end of its server.
struct Ends(Process);

impl Drop for Ends {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let ended = self.0.wait(LIMIT).expect("it ends");
            assert!(ended.success() && self.0.output().contains("is gone"), "{}", self.0.output());
        }
    }
}

fn while_it_ends(words: &[&str]) {
    let template = Template::new();
    let mut prng = Prng::new(9);
    for round in 0..2 {
        let at = format!("round {round}, the end by {words:?}");
        Victim::new(&template).killed(&at, |victim| {
            let (copy, _) = victim.begin();
            victim.goes_on();
            let end = victim.start(&[&["checkpoint", "--end", "c1"], words].concat());
            // Anywhere in it: no place is better than another one.
            pause(Duration::from_micros(prng.below(30_000)));
            (Some(copy), end)
        });
    }
    // When it has ended, and the client goes on.
    Victim::new(&template).killed("after the end", |victim| {
        let (copy, _) = victim.begin();
        victim.goes_on();
        end(&victim.socket, words).ok();
        victim.goes_on();
        (Some(copy), ())
    });
}

#[test]
fn while_it_ends_with_success() {
    while_it_ends(&[]);
}

#[test]
fn while_it_ends_without_success() {
    while_it_ends(&["--merge"]);
}

#[test]
fn while_both_bitmaps_are_kept() {
    while_it_ends(&["--keep-bitmap"]);
}

/// Also the image that nobody has touched since it was opened, whose bitmaps are valid then.
#[test]
fn with_nothing_written() {
    let template = Template::new();
    let (directory, mut bases) = template.copy();
    let [image, socket] = ["disk.qcow2", "disk.sock"].map(|name| directory.path().join(name));
    std::fs::copy(template.path("disk.qcow2"), &image).expect("a copy");
    let readers = directory.path().join("readers");
    let daemon = serve(text(&image), &socket);
    ctl(&socket, &[&BEGIN[..], &["--nbd", text(&readers)]].concat()).ok();
    daemon.kill();
    let instant = directory.path().join("instant.raw");
    std::fs::write(&instant, &template.known.bytes).expect("room");
    bases.push(Base { bitmap: NEW, backup: instant });
    let bitmaps = judge(directory.path(), &template.known, &bases, "nothing was written");
    assert!(bitmaps[OLD] && bitmaps[NEW], "{bitmaps:?}");
    images::qemu_io(&image, "qcow2", &["write -P 9 0 4k"]);
    // Where readers came is free for the next checkpoint.
    let daemon = serve(text(&image), &socket);
    ctl(&socket, &["checkpoint", "c1", "--nbd", text(&readers)]).ok();
    end(&socket, &[]).ok();
    assert!(!readers.exists());
    daemon.stop(&[&socket]);
}
