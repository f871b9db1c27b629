//! Changes of a disk in use that are given up in their middle: by the client that asked for them,
//! by a stop of the server, and because the server stands still. The chain, the size and the bytes
//! are those of before, and the images are sound.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::images::{assert_clean, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, until};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::common::tools::{Ran, qemu_img, ringdisk};
use crate::common::{MIB, open, program, serve};

const SIZE: u64 = 64 * MIB;
/// Every second one has data.
const PIECE: u64 = 4 * MIB;

/// Another command is changing the disk.
const BUSY: i32 = 5;
/// The server does not answer.
const LATE: Option<i32> = Some(14);

/// What takes long, as each request of the images below does.
#[derive(Clone, Copy, Debug)]
enum Change {
    Commit,
    Backing,
    /// Writes far more zeroes than are written before it is given up.
    Resize,
}

const CHANGES: [Change; 3] = [Change::Commit, Change::Backing, Change::Resize];

/// A served overlay, its backing file, and another one that holds the same: disks of zeroes that
/// take long for each request.
struct Chain {
    disk: Mounted,
    top: PathBuf,
    _below: [Mounted; 2],
    _directory: TempDir,
}

fn chain() -> Chain {
    let directory = scratch();
    let below = ["base", "other"].map(|name| {
        let at = directory.path().join(name);
        std::fs::write(&at, "").expect("a mountpoint");
        Mounted::start_at(
            &program(),
            &["--null", "64M", "--read-zeroes", "--latency", "200ms"],
            &at,
        )
    });
    let top = directory.path().join("top.qcow2");
    let words = ["create", "-q", "-f", "qcow2", "-b", below[0].text(), "-F", "raw", text(&top)];
    qemu_img(Path::new("/"), &words).ok();
    let disk = serve(&top, &["--allow-path", below[1].text()]);
    let file = open(disk.path());
    for at in pieces() {
        file.write_all_at(&bytes(at), at).expect("write");
    }
    file.sync_all().expect("flush");
    Chain { disk, top, _below: below, _directory: directory }
}

fn pieces() -> impl Iterator<Item = u64> {
    (0..SIZE / PIECE).step_by(2).map(|number| number * PIECE)
}

fn bytes(at: u64) -> Vec<u8> {
    pattern(5, at, usize::try_from(PIECE).expect("small"))
}

impl Chain {
    fn ctl(&self, words: &[&str]) -> Ran {
        ringdisk(Path::new("/"), &[&["ctl", self.disk.text()], words].concat())
    }

    /// Begins a change, and returns when it is in its middle.
    fn begin(&self, change: Change) -> Process {
        let program = program();
        let other = self.top.with_file_name("other");
        let words: &[&str] = match change {
            Change::Commit => &["commit"],
            Change::Backing => &["backing", "-F", "raw", text(&other)],
            Change::Resize => &["resize", "+16G", "--preallocation", "full"],
        };
        let first = [program.as_str(), "ctl", "--timeout", "3s", self.disk.text()];
        let taken = self.taken();
        under_way(&mut command(&[&first[..], words].concat()), || match change {
            Change::Resize => self.taken() > taken + 16 * MIB,
            _ => self.ctl(&["resize", "+0"]).code == BUSY,
        })
    }

    /// Bytes that the top takes on its file system.
    fn taken(&self) -> u64 {
        std::fs::metadata(&self.top).expect("stat").blocks() * 512
    }

    /// What a change may leave of itself comes to its end; then nothing has changed.
    fn assert_as_before(self, what: &str) {
        let settled = || (self.ctl(&["resize", "+0"]).code == 0).then_some(());
        assert!(until(LIMIT, settled).is_some(), "{what}: {}", self.disk.output());
        let stats = stats(&self.disk);
        let layers = stats["layers"].as_array().expect("layers").len();
        assert_eq!((layers, stats["size"].as_u64()), (2, Some(SIZE)), "{what}: {stats}");
        assert_bytes(&self.disk, what);
        let finished = self.disk.stop();
        assert_eq!(finished.code(), Some(0), "{what}: {}", finished.output());
        assert_clean(&self.top);
        assert_backing(&self.top, what);
    }
}

fn stats(disk: &Mounted) -> serde_json::Value {
    ringdisk(Path::new("/"), &["ctl", disk.text(), "stats", "--json"]).ok().json()
}

/// Starts a command that changes a disk, again when it was refused since `is_busy` was asking just
/// then, and returns when it is in its middle.
///
/// * `is_busy`: whether the disk is being changed. It may ask for a change of its own.
fn under_way(command: &mut Command, is_busy: impl Fn() -> bool) -> Process {
    let mut client = Process::spawn(command);
    let found = until(LIMIT, || {
        if client.ended().is_some() {
            let refused = std::mem::replace(&mut client, Process::spawn(command)).finish(LIMIT);
            assert_eq!(refused.code(), Some(BUSY), "too quick: {}", refused.output());
        }
        is_busy().then_some(())
    });
    assert!(found.is_some(), "it does not begin: {}", client.output());
    assert!(client.ended().is_none(), "too quick: {}", client.output());
    client
}

fn assert_bytes(disk: &Mounted, what: &str) {
    for at in pieces() {
        let len = usize::try_from(PIECE).expect("small");
        assert!(piece(disk.path(), at, len) == bytes(at), "{what}: at {at}");
    }
    assert_eq!(std::fs::metadata(disk.path()).expect("stat").len(), SIZE, "{what}");
}

/// It is above the first of the two.
fn assert_backing(top: &Path, what: &str) {
    let info = qemu_img(Path::new("/"), &["info", "--output", "json", text(top)]).ok().json();
    let base = top.with_file_name("base");
    assert_eq!(info["backing-filename"], text(&base), "{what}");
}

#[test]
fn a_change_whose_client_is_interrupted_is_given_up() {
    if !needs_root() {
        return;
    }
    for change in CHANGES {
        let what = format!("{change:?} with an interrupt");
        let chain = chain();
        let client = chain.begin(change);
        client.signal(Signal::INT);
        let finished = client.finish(LIMIT);
        let by = finished.signal().or(finished.code().map(|code| code - 128));
        assert_eq!(by, Some(2), "{what}: {}", finished.output());
        chain.assert_as_before(&what);
    }
}

#[test]
fn a_stop_in_the_middle_of_a_change_gives_it_up_and_ends_well() {
    if !needs_root() {
        return;
    }
    for change in CHANGES {
        let what = format!("{change:?} with a stop");
        let chain = chain();
        let client = chain.begin(change);
        // The directory goes last: disks are mounted in it.
        let Chain { _directory, _below, disk, top } = chain;
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{what}: {}", finished.output());
        let client = client.finish(LIMIT);
        assert_ne!(client.code(), Some(0), "{what}: {}", client.output());
        assert_clean(&top);
        assert_backing(&top, &what);
        let disk = serve(&top, &[]);
        assert_bytes(&disk, &what);
        assert_eq!(disk.stop().code(), Some(0), "{what}");
    }
}

#[test]
fn a_server_that_stands_still_in_the_middle_of_a_change_is_not_waited_for() {
    if !needs_root() {
        return;
    }
    for change in CHANGES {
        let what = format!("{change:?} with a server that stands still");
        let mut chain = chain();
        let client = chain.begin(change);
        chain.disk.process().signal(Signal::STOP);
        let finished = client.finish(LIMIT);
        assert_eq!(finished.code(), LATE, "{what}: {}", finished.output());
        assert!(finished.stderr.contains("kill -CONT"), "{what}: {}", finished.output());
        assert!(
            finished.stderr.contains("was asked to give it up"),
            "{what}: {}",
            finished.output()
        );
        chain.disk.process().signal(Signal::CONT);
        chain.assert_as_before(&what);
    }
}

/// A disk above one whose requests take 5 s. A change has to wait for a read of it, and the server
/// is stopped meanwhile.
struct Waiting {
    disk: Mounted,
    top: PathBuf,
    directory: TempDir,
    below: Mounted,
}

impl Waiting {
    /// * `words`: of `ctl`, behind the mountpoint.
    /// * `left`: what the command says of the change when it has ended.
    fn stopped(words: &[&str], left: &str) -> Waiting {
        let directory = scratch();
        let (base, top) = (directory.path().join("base"), directory.path().join("top.qcow2"));
        std::fs::write(&base, "").expect("a mountpoint");
        let below = Mounted::start_at(&program(), &["--null", "64M", "--latency", "5s"], &base);
        let create = ["create", "-q", "-f", "qcow2", "-b", below.text(), "-F", "raw", text(&top)];
        qemu_img(Path::new("/"), &create).ok();
        let disk = serve(&top, &[]);
        open(disk.path()).write_all_at(&[7; 65536], 40 * MIB).expect("write");
        let mut waiting = Waiting { disk, top, directory, below };

        let reads_below = || stats(&waiting.below)["total"]["reads"].as_u64();
        let before = reads_below();
        // A process of its own: commands that start while this one has the file open would close it
        // once more, and a close waits for the change, as the read does.
        let from = format!("if={}", waiting.disk.text());
        let reader = Process::spawn(&mut command(&[
            "dd",
            &from,
            "of=/dev/null",
            "bs=1M",
            "skip=32",
            "count=1",
        ]));
        let is_in_flight = || (reads_below() > before).then_some(());
        assert!(until(LIMIT, is_in_flight).is_some(), "{}", waiting.disk.output());
        let program = program();
        let first = [program.as_str(), "ctl", "--timeout", "2s", waiting.disk.text()];
        let mut begun = command(&[&first[..], words].concat());
        let client = under_way(begun.current_dir(waiting.directory.path()), || {
            // Refused at once, for whichever reason.
            waiting.ctl(&["snapshot", "top.qcow2"]).code == BUSY
        });
        waiting.disk.process().signal(Signal::STOP);
        let finished = client.finish(LIMIT);
        assert_eq!(finished.code(), LATE, "{words:?}: {}", finished.output());
        assert!(finished.stderr.contains(left), "{words:?}: {}", finished.output());

        waiting.disk.process().signal(Signal::CONT);
        let read = reader.finish(LIMIT);
        assert_eq!(read.code(), Some(0), "{words:?}: {}", read.output());
        let is_over = || (waiting.ctl(&["resize", "+0"]).code == 0).then_some(());
        assert!(until(LIMIT, is_over).is_some(), "{words:?}: {}", waiting.disk.output());
        waiting
    }

    fn ctl(&self, words: &[&str]) -> Ran {
        ringdisk(self.directory.path(), &[&["ctl", self.disk.text()], words].concat())
    }

    fn layers(&self) -> usize {
        stats(&self.disk)["layers"].as_array().expect("layers").len()
    }
}

/// What cannot be given up half way goes on with the server.
#[test]
fn a_snapshot_of_a_server_that_stands_still_is_taken_when_that_goes_on() {
    if !needs_root() {
        return;
    }
    for (words, layers) in [(&["new.qcow2"][..], 3), (&["--internal", "inside"], 2)] {
        let snapshot = [&["snapshot"], words].concat();
        let waiting = Waiting::stopped(&snapshot, "does it all the same");
        assert_eq!(waiting.layers(), layers, "{words:?}");
        let Waiting { disk, top, directory, below: _below } = waiting;
        assert_eq!(disk.stop().code(), Some(0), "{words:?}");
        assert_clean(&top);
        let listed = qemu_img(directory.path(), &["snapshot", "-l", text(&top)]).ok().out;
        assert_eq!(listed.contains("inside"), layers == 2, "{words:?}: {listed}");
    }
}

/// What was still waiting for its turn is not done.
#[test]
fn a_resize_that_a_server_had_not_begun_when_it_was_stopped_is_given_up() {
    if !needs_root() {
        return;
    }
    for words in [&["--shrink", "16M"][..], &["+64M"]] {
        let resize = [&["resize"], words].concat();
        let Waiting { directory: _directory, below: _below, disk, top } =
            Waiting::stopped(&resize, "was asked to give it up");
        assert_eq!(std::fs::metadata(disk.path()).expect("stat").len(), SIZE, "{words:?}");
        let bytes = piece(disk.path(), 40 * MIB, 65536);
        assert!(bytes == [7; 65536], "{words:?}");
        assert_eq!(disk.stop().code(), Some(0), "{words:?}");
        assert_clean(&top);
    }
}
