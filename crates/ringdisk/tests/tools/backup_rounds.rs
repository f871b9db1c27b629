//! Rounds of `ringdisk backup` under load: of several disks at one instant, with an order of writes
//! across them; and beside what readers of the same checkpoint see.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringdisk_testkit::images::{assert_clean, qcow2};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words, until};

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

/// The copy of a second disk stands still in the middle of each round, so that readers can look at
/// the checkpoint of that round. The load verifies what it reads.
#[test]
fn a_full_round_and_two_incremental_ones_are_what_their_checkpoints_showed() {
    let directory = scratch();
    let d = directory.path();
    let place = Place::new("qcow2");
    let daemon = place.start(&["--sandbox", "on"]);
    let storage = NbdStorage::new(vec![5; 256 << 10]);
    let second = d.join("second");
    let words = [&storage.uri(), "-f", "raw", "--nbd", text(&second)];
    let second_daemon = Daemon::of(&mut serve_command(&words));
    let (mut vm, mut load) = (place.vm(true), load(23));
    load.run(&mut vm, 300);
    let mut shown = Vec::new();
    for round in 0..3 {
        shown.push(meanwhile(&mut vm, &mut load, || {
            storage.hold_reads_over(0);
            let mut command = Command::new(program());
            let words = ["backup", text(&place.socket), "backups/", "--with", text(&second)];
            let backup = Process::spawn(command.current_dir(d).args(words));
            // The first disk has been copied when the second one is.
            until(LIMIT, || (storage.held_reads() > 0).then_some(())).expect("the second disk");
            let list = ctl(&place.socket, &["checkpoint", "--list", "--json"]).ok().json();
            let uri = list["checkpoints"][0]["uri"].as_str().expect("a URI");
            let copy = d.join(format!("shown-{round}"));
            ok_words(&["nbdcopy", uri, text(&copy)]);
            storage.go_on();
            let ended = backup.finish(LIMIT);
            assert_eq!(ended.code(), Some(0), "{}", ended.output());
            fs::read(copy).expect("the copy")
        }));
    }
    load.read_all(&mut vm);
    drop(vm);
    daemon.stop(&[&place.socket]);
    second_daemon.stop(&[&second]);
    place.judge(&mut load);
    let backups = d.join("backups/socket");
    let rounds = rounds(&backups);
    assert_eq!(rounds.values().copied().collect::<Vec<_>>(), [true, false, false], "{rounds:?}");
    assert!(shown[0] != shown[1] && shown[1] != shown[2], "the load has changed nothing");
    for (time, shown) in rounds.keys().zip(&shown) {
        assert!(restored(&backups, time) == *shown, "{time}: not what its checkpoint showed");
    }
    let second = restored(&d.join("backups/second"), rounds.keys().next_back().expect("rounds"));
    assert!(second == storage.bytes());
}
