//! Rounds of `ringdisk backup` under load: of several disks at one instant, with an order of writes
//! across them; and beside what readers of the same checkpoint see.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringdisk_testkit::images::{assert_clean, qcow2};
use ringdisk_testkit::limits::needs;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, has, ok_words, until};

use super::backup::{BLOCKS, instant, stamp};
use crate::common::nbd_client::NbdClient;
use crate::common::nbd_storage::NbdStorage;
use crate::common::serving::{Daemon, Place, ctl, load, meanwhile, serve_command};
use crate::common::tools::{names, ringdisk};
use crate::common::{BLOCK, program};

/// The backups of a directory by their times, and whether each is a full one.
fn rounds(directory: &Path) -> BTreeMap<String, bool> {
    let all = names(directory);
    all.iter().map(|name| (stamp(name).to_owned(), name.starts_with("FULL"))).collect()
}

/// The bytes of the disk by a backup of a directory.
fn restored(directory: &Path, time: &str) -> Vec<u8> {
    let d = scratch();
    ringdisk(d.path(), &["restore", text(directory), "restored.img", "--at", time]).ok();
    fs::read(d.path().join("restored.img")).expect("the restored disk")
}

/// Disks of which each has a name at an address of its process.
struct Disks {
    daemons: Vec<(Daemon, PathBuf)>,
    /// Socket and name of each.
    exports: Vec<(PathBuf, &'static str)>,
    images: Vec<PathBuf>,
}

impl Disks {
    /// Three disks: the first and the last one of one process, the second one of another.
    fn start(d: &Path) -> Disks {
        let mut images = Vec::new();
        let mut daemons = Vec::new();
        let mut exports = Vec::new();
        for (process, disks) in [("one", &["a", "c"][..]), ("b", &["b"])] {
            let socket = d.join(process);
            let spec = |name: &&'static str| {
                let image = d.join(format!("{name}.qcow2"));
                qcow2(&image, "2M", "cluster_size=4k");
                images.push(image.clone());
                format!("--disk=image={},format=qcow2,export-name={name}", text(&image))
            };
            let specs: Vec<String> = disks.iter().map(spec).collect();
            let mut words: Vec<&str> = specs.iter().map(String::as_str).collect();
            words.extend(["--nbd", text(&socket), "--sandbox", "on"]);
            daemons.push((Daemon::of(&mut serve_command(&words)), socket.clone()));
            exports.extend(disks.iter().map(|name| (socket.clone(), *name)));
        }
        exports.sort_by_key(|(_, name)| *name);
        Disks { daemons, exports, images }
    }

    fn clients(&self) -> Vec<NbdClient> {
        self.exports.iter().map(|(socket, name)| NbdClient::connect(socket, name)).collect()
    }

    /// As commands name them: the only disk of a process by its socket.
    fn targets(&self) -> [String; 3] {
        let [a, b, c] = [0, 1, 2].map(|number| {
            let (socket, name) = &self.exports[number];
            (text(socket).to_owned(), *name)
        });
        [format!("{}/{}", a.0, a.1), b.0, format!("{}/{}", c.0, c.1)]
    }

    fn stop(self) {
        for (daemon, socket) in self.daemons {
            daemon.stop(&[&socket]);
        }
        self.images.iter().for_each(|image| assert_clean(image));
    }
}

/// Writes the numbers 1, 2, 3… to all disks, each to the next disk when the one before has
/// answered, until it is told to end.
fn count(clients: &mut [NbdClient], written: &AtomicU64, is_done: &AtomicBool) {
    while !is_done.load(Ordering::Relaxed) {
        let number = written.load(Ordering::Relaxed) + 1;
        let mut block = vec![0; BLOCK];
        block[..8].copy_from_slice(&number.to_le_bytes());
        for client in &mut *clients {
            client.write(number % BLOCKS * BLOCK as u64, &block).expect("a server");
        }
        written.store(number, Ordering::Relaxed);
    }
}

/// Ends the writer also when a round fails.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_disk_of_a_round_is_ahead_of_one_that_is_written_before_it() {
    let directory = scratch();
    let d = directory.path();
    let disks = Disks::start(d);
    let (written, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut clients = disks.clients();
    let mut counts = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| count(&mut clients, &written, &is_done));
        let _done = Done(&is_done);
        let [a, b, c] = disks.targets();
        for _ in 0..3 {
            // So that the round has something to say.
            let before = written.load(Ordering::Relaxed);
            let goes_on = || (written.load(Ordering::Relaxed) > before + 20).then_some(());
            until(LIMIT, goes_on).expect("the client writes");
            let from = written.load(Ordering::Relaxed);
            ringdisk(d, &["backup", &a, "backups/", "--with", &b, "--with", &c]).ok();
            counts.push((from, written.load(Ordering::Relaxed)));
        }
    });
    drop(clients);
    let backups = d.join("backups");
    let times: Vec<String> = rounds(&backups.join("a")).into_keys().collect();
    assert_eq!(times.len(), counts.len());
    for name in ["a", "b", "c"] {
        let all = rounds(&backups.join(name));
        assert_eq!(all.values().copied().collect::<Vec<_>>(), [true, false, false], "{name}");
        assert!(all.keys().eq(&times), "{name}: {all:?}, {times:?}");
    }
    for (time, (from, to)) in times.iter().zip(counts) {
        let of = |name: &str| instant(&restored(&backups.join(name), time));
        let (a, b, c) = (of("a"), of("b"), of("c"));
        assert!(c <= b && b <= a && a <= c + 1, "{time}: A has {a}, B {b}, C {c}");
        assert!(from <= c && a <= to + 1, "{time}: from {from} to {to}, and A has {a}, C {c}");
    }
    disks.stop();
}

/// A second disk of each round, whose copy stands still in its middle, so that readers can look at
/// the checkpoint of that round.
struct Second {
    storage: NbdStorage,
    socket: PathBuf,
    daemon: Daemon,
}

impl Second {
    fn start(d: &Path) -> Second {
        let storage = NbdStorage::new(vec![5; 256 << 10]);
        let socket = d.join("second");
        let words = [&storage.uri(), "-f", "raw", "--nbd", text(&socket)];
        let daemon = Daemon::of(&mut serve_command(&words));
        Second { storage, socket, daemon }
    }

    /// A round of backup of the disk at `socket`, to `backups`. Gives what its checkpoint shows.
    fn round(&self, d: &Path, socket: &Path) -> Vec<u8> {
        self.storage.hold_reads_over(0);
        let mut command = Command::new(program());
        let words = ["backup", text(socket), "backups/", "--with", text(&self.socket)];
        let backup = Process::spawn(command.current_dir(d).args(words));
        // The first disk has been copied when the second one is.
        until(LIMIT, || (self.storage.held_reads() > 0).then_some(())).expect("the second disk");
        let list = ctl(socket, &["checkpoint", "--list", "--json"]).ok().json();
        let uri = list["checkpoints"][0]["uri"].as_str().expect("a URI");
        let copy = d.join("shown");
        ok_words(&["nbdcopy", uri, text(&copy)]);
        self.storage.go_on();
        let ended = backup.finish(LIMIT);
        assert_eq!(ended.code(), Some(0), "{}", ended.output());
        let shown = fs::read(&copy).expect("the copy");
        fs::remove_file(copy).expect("removed");
        shown
    }

    /// Each round gives back what its checkpoint showed.
    ///
    /// * `shown`: a full round, and incremental ones.
    fn judge(self, d: &Path, shown: &[Vec<u8>]) {
        self.daemon.stop(&[&self.socket]);
        let backups = d.join("backups/socket");
        let rounds = rounds(&backups);
        assert_eq!(
            rounds.values().copied().collect::<Vec<_>>(),
            [true, false, false],
            "{rounds:?}"
        );
        assert!(shown[0] != shown[1] && shown[1] != shown[2], "the load has changed nothing");
        for (time, shown) in rounds.keys().zip(shown) {
            assert!(restored(&backups, time) == *shown, "{time}: not what its checkpoint showed");
        }
        let last = rounds.keys().next_back().expect("rounds");
        assert!(restored(&d.join("backups/second"), last) == self.storage.bytes());
    }
}

/// The load verifies what it reads.
#[test]
fn a_full_round_and_two_incremental_ones_are_what_their_checkpoints_showed() {
    let directory = scratch();
    let d = directory.path();
    let place = Place::new("qcow2");
    let daemon = place.start(&["--sandbox", "on"]);
    let second = Second::start(d);
    let (mut vm, mut load) = (place.vm(true), load(23));
    load.run(&mut vm, 300);
    let shown: Vec<_> =
        (0..3).map(|_| meanwhile(&mut vm, &mut load, || second.round(d, &place.socket))).collect();
    load.read_all(&mut vm);
    drop(vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
    second.judge(d, &shown);
}

/// One pass of fio, with its own NBD client: writes the whole disk in random order, reads it back
/// and compares.
fn fio_pass(uri: &str, number: u64) {
    let (uri, seed) = (format!("--uri={uri}"), format!("--randseed={}", number + 1));
    // Slow enough that rounds come in its middle: a second of writes, and as much of reads.
    let shape = ["--rw=randwrite", "--bs=4k", "--size=8M", "--iodepth=16", "--rate_iops=2000,2000"];
    let verify = ["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0"];
    let words = ["fio", "--name=load", "--ioengine=nbd", "--thread", &uri, &seed];
    ok_words(&[&words[..], &shape, &verify].concat());
}

#[test]
fn rounds_beside_fio_are_what_their_checkpoints_showed() {
    let has_engine = has("fio") && ok_words(&["fio", "--enghelp"]).contains("nbd");
    if !needs("fio with its engine nbd", has_engine) {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let place = Place::new("qcow2");
    let words = [text(&place.image), "-f", "qcow2", "--nbd", text(&place.socket)];
    let daemon = Daemon::of(&mut serve_command(&[&words[..], &["--sandbox", "on"]].concat()));
    let uri = format!("nbd+unix:///?socket={}", text(&place.socket));
    let second = Second::start(d);
    let (passes, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
    let shown: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                fio_pass(&uri, passes.load(Ordering::Relaxed));
                passes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _done = Done(&is_done);
        let changes =
            || ctl(&place.socket, &["stats", "--json"]).ok().json()["total"]["writes"].as_u64();
        let round = |_| {
            // So that the round has something to say.
            let before = changes().expect("a count");
            until(LIMIT, || (changes()? > before + 100).then_some(())).expect("fio writes");
            second.round(d, &place.socket)
        };
        (0..3).map(round).collect()
    });
    assert!(passes.load(Ordering::Relaxed) > 0);
    daemon.stop(&[&place.socket]);
    assert_clean(&place.image);
    second.judge(d, &shown);
}
