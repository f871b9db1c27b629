//! Random walks of the program: commands and jobs one after the other, in an order that a seed
//! decides, while a client works on the disk: on a mount, on a disk of a virtual machine, over NBD;
//! with upgrades, and with kills where the disk is kept. The bytes are those that the client knows,
//! after each step, and QEMU finds nothing wrong with the images in the end.
//!
//! Each walk is made with clients of ours, which zero and discard, too, and know all bytes, and
//! with fio, which verifies what it reads.
//!
//! `RINGDISK_WALK_SEED=N` runs another walk; with `RINGDISK_FULL=1` they are longer. (Walks of the
//! disk alone, with many more steps for each second: `crates/disk/src/tests/walk`.)

mod clients;
mod fio;
mod steps;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{full, mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Cleared, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, has, until};
use ringdisk_testkit::sim::Prng;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use self::fio::Fio;
use crate::common::program;
use crate::common::serving::{Daemon, SIZE, serve_command};
use crate::common::tools::{Ran, child_of, ringdisk};
use clients::Client;

const STEPS: u32 = 20;
const STEPS_IN_FULL: u32 = 300;
/// Layers at most.
const DEPTH_MAX: usize = 4;

/// How the disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Mount,
    KeptMount,
    Machine,
    KeptMachine,
    Nbd,
}

impl How {
    fn is_mount(self) -> bool {
        matches!(self, How::Mount | How::KeptMount)
    }

    fn is_kept(self) -> bool {
        matches!(self, How::KeptMount | How::KeptMachine)
    }

    fn can_be_upgraded(self) -> bool {
        matches!(self, How::Mount | How::Machine)
    }
}

/// A disk that walks.
struct Walk {
    how: How,
    /// What the client has of the disk goes first.
    client: Client,
    server: Option<Process>,
    /// Ends a mount that is left behind.
    _cleared: Option<Cleared>,
    /// Where the disk is served.
    target: PathBuf,
    /// The image that commands name, and its format.
    named: (PathBuf, &'static str),
    prng: Prng,
    next: u32,
    killed: Option<Instant>,
    directory: TempDir,
}

impl Walk {
    fn start(how: How, seed: u64) -> Walk {
        let directory = scratch();
        let path = |name: &str| directory.path().join(name);
        let (image, format) = match seed % 2 {
            0 => (path("first.qcow2"), "qcow2"),
            _ => (path("first.raw"), "raw"),
        };
        match format {
            "raw" => images::sparse(&image, SIZE),
            _ => images::qcow2(&image, "8M", "cluster_size=4k"),
        }
        let target = match how {
            How::Mount | How::KeptMount => path("mountpoint"),
            How::Machine | How::KeptMachine | How::Nbd => path("socket"),
        };
        let mut walk = Walk {
            how,
            client: Client::None,
            server: None,
            _cleared: how.is_mount().then(|| Cleared(target.clone())),
            target,
            named: (image, format),
            prng: Prng::new(seed),
            next: 0,
            killed: None,
            directory,
        };
        walk.server = Some(walk.serve(&[]));
        walk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn new_path(&mut self, format: &str) -> PathBuf {
        self.next += 1;
        self.path(&format!("{}.{format}", self.next))
    }

    fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.prng.below(most as u64)).expect("small")
    }

    /// Starts a process that serves the disk.
    fn serve(&self, more: &[&str]) -> Process {
        let (image, format) = &self.named;
        let allow = ["--allow-path", text(self.directory.path())];
        let words = [&["--format", *format], &allow[..], more].concat();
        let socket = |option| [option, text(&self.target), text(image)];
        let vhost = [&words[..], &["--queues", "2", "--threads", "2"]].concat();
        match self.how {
            How::Mount | How::KeptMount => {
                let keep: &[&str] = if self.how.is_kept() { &["--keep-mount"] } else { &[] };
                let own = ["--transport", "dev", text(image)];
                let words = [keep, &words, &own].concat();
                let mut command = Command::new(program());
                command.arg("mount").args(words).arg(&self.target).env_remove("NOTIFY_SOCKET");
                mounted(Process::spawn(&mut command))
            }
            How::Machine => {
                let words = [&vhost[..], &socket("--vhost-user-blk")].concat();
                Daemon::of(&mut serve_command(&words)).process
            }
            How::KeptMachine => {
                let words = [&["--keep"], &vhost[..], &socket("--vhost-user-blk")].concat();
                let process = Process::spawn(&mut serve_command(&words));
                until(LIMIT, || self.target.exists().then_some(())).expect("it listens");
                process
            }
            How::Nbd => {
                let words = [&words[..], &socket("--nbd")].concat();
                Daemon::of(&mut serve_command(&words)).process
            }
        }
    }

    fn ctl(&self, words: &[&str]) -> Ran {
        ringdisk(Path::new("/"), &[&["ctl", text(&self.target)], words].concat())
    }

    /// The images, the one on top first.
    fn chain(&self) -> Vec<PathBuf> {
        let value = self.ctl(&["stats", "--json"]).ok().json();
        let layers = value["layers"].as_array().expect("layers").clone();
        let name = |layer: &Value| PathBuf::from(layer["filename"].as_str().expect("a name"));
        layers.iter().map(name).collect()
    }

    /// The process that serves, of a kept disk.
    fn serving(&self) -> u32 {
        let helper = self.server.as_ref().expect("it is served");
        until(LIMIT, || child_of(helper.pid())).expect("somebody serves")
    }

    /// Ends everything; the images are what the client knows.
    fn finish(mut self) {
        let chain = self.chain();
        self.client.leave();
        let process = self.server.take().expect("it is served");
        process.signal(Signal::TERM);
        let ended = process.finish(LIMIT);
        assert_eq!(ended.code(), Some(0), "{}", ended.output());
        assert!(!ended.output().contains("panicked"), "{}", ended.output());
        if self.how.is_mount() {
            assert!(mount_at(&self.target).is_none(), "{}", ended.output());
        }
        let is_qcow2 = |path: &Path| path.extension().is_some_and(|it| it == "qcow2");
        for image in chain.iter().filter(|path| is_qcow2(path)) {
            match self.how.is_kept() {
                // A kill may lose space.
                true => drop(images::qemu_img(&["check", "-q", "-r", "leaks", text(image)])),
                false => images::assert_clean(image),
            }
        }
        let content = match is_qcow2(&chain[0]) {
            true => images::reference(&chain[0], "qcow2"),
            false => chain[0].clone(),
        };
        let bytes = images::piece(&content, 0, usize::try_from(SIZE).expect("small"));
        self.client.judge(&bytes);
    }
}

/// Waits until a process says that its mount answers.
fn mounted(mut process: Process) -> Process {
    let is_ready = until(LIMIT, || match process.output().contains("is served as") {
        true => Some(true),
        false => process.ended().map(|_| false),
    });
    assert_eq!(is_ready, Some(true), "{}", process.output());
    process
}

/// Who works on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Ours,
    Fio,
}

fn walk(how: How, by: By) {
    if matches!(how, How::Mount | How::KeptMount | How::Nbd) && !needs_root() {
        return;
    }
    let wanted = std::env::var("RINGDISK_WALK_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = wanted.unwrap_or(1 + how as u64 + 5 * by as u64);
    println!("{how:?}, {by:?}: RINGDISK_WALK_SEED={seed} runs this walk again");
    let begun = Instant::now();
    let steps = if full() { STEPS_IN_FULL } else { STEPS };
    let mut walk = Walk::start(how, seed);
    walk.client = match by {
        By::Ours => Client::of(how, &walk.target, seed),
        By::Fio => match Fio::on(how, &walk.target, seed) {
            Some(fio) => Client::Fio(Box::new(fio)),
            None => return,
        },
    };
    for step in 1..=steps {
        println!("{step}: …");
        let what = walk.step();
        println!("{step}: {what}");
        walk.client.look();
    }
    walk.finish();
    println!("{how:?}, {by:?}: {steps} steps in {:.1} s", begun.elapsed().as_secs_f64());
}

fn walk_under_fio(how: How) {
    if needs("fio", has("fio")) {
        walk(how, By::Fio);
    }
}

#[test]
fn a_mount_walks_through_commands_and_upgrades() {
    walk(How::Mount, By::Ours);
}

#[test]
fn a_kept_mount_walks_through_commands_and_kills() {
    walk(How::KeptMount, By::Ours);
}

#[test]
fn a_disk_of_a_machine_walks_through_commands_and_upgrades() {
    walk(How::Machine, By::Ours);
}

#[test]
fn a_kept_disk_of_a_machine_walks_through_commands_and_kills() {
    walk(How::KeptMachine, By::Ours);
}

#[test]
fn an_nbd_export_walks_through_commands() {
    walk(How::Nbd, By::Ours);
}

#[test]
fn a_mount_walks_through_commands_and_upgrades_under_fio() {
    walk_under_fio(How::Mount);
}

#[test]
fn a_kept_mount_walks_through_commands_and_kills_under_fio() {
    walk_under_fio(How::KeptMount);
}

#[test]
fn a_disk_of_a_machine_walks_through_commands_and_upgrades_under_fio() {
    walk_under_fio(How::Machine);
}

#[test]
fn a_kept_disk_of_a_machine_walks_through_commands_and_kills_under_fio() {
    walk_under_fio(How::KeptMachine);
}

#[test]
fn an_nbd_export_walks_through_commands_under_fio() {
    walk_under_fio(How::Nbd);
}
