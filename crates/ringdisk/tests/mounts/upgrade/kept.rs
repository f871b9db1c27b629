//! `--keep-mount` and `--upgrade` together: a mount goes to a successor whose parent keeps it, or
//! to one that nobody keeps, and back. Whichever process is killed meanwhile, one goes on, and no
//! client sees an error. `RINGDISK_KILLS=N` or `RINGDISK_FULL=1` for more kills.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{full, mount_at};
use ringdisk_testkit::mount::{Cleared, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, run, until};
use ringdisk_testkit::sim::Prng;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::common::{MIB, program};
use crate::keep::client::{get_on, judge, load};
use crate::keep::kept::{child_of, kill};

/// Bytes of the disk.
const SIZE: u64 = 8 * MIB;
/// Clients at work.
const DEPTH: u64 = 3;

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if full() { 200 } else { 8 })
}

/// A mount, and the process that was started for it.
struct Disk {
    process: Process,
    path: PathBuf,
    image: PathBuf,
    format: &'static str,
    _cleared: Cleared,
    directory: TempDir,
}

impl Disk {
    fn start(format: &'static str, words: &[&str]) -> Disk {
        let directory = scratch();
        let (image, path) = (directory.path().join("disk.img"), directory.path().join("disk"));
        match format {
            "raw" => images::sparse(&image, SIZE),
            _ => images::qcow2(&image, "8M", ""),
        }
        let process = mount(&image, &path, &[&["--format", format], words].concat());
        let disk =
            Disk { process, _cleared: Cleared(path.clone()), path, image, format, directory };
        disk.ready();
        disk
    }

    /// Waits until `ringdisk ctl` reaches the process that serves.
    fn ready(&self) {
        let words = [&program(), "ctl", text(&self.path), "stats"];
        let answers = || (run(command(&words)).code() == Some(0)).then_some(());
        assert!(until(LIMIT, answers).is_some(), "{}", self.process.output());
    }

    fn successor(&self, words: &[&str]) -> Process {
        let words = [&["--upgrade", "--format", self.format], words].concat();
        mount(&self.image, &self.path, &words)
    }

    /// The next process takes the mount over; those before it end without a complaint.
    fn upgrade(&mut self, words: &[&str]) {
        let before = mount_at(&self.path).expect("a mount").minor;
        let new = self.successor(words);
        let old = std::mem::replace(&mut self.process, new).finish(LIMIT);
        let (code, old, new) = (old.code(), old.output(), self.process.output());
        assert_eq!(code, Some(0), "the old: {old}\nthe new: {new}");
        assert!(!complains(&old) && !complains(&new), "the old: {old}\nthe new: {new}");
        self.ready();
        assert_eq!(mount_at(&self.path).expect("a mount").minor, before, "another mount");
    }

    /// Kills the server of a kept mount, and waits for clients to go on.
    fn kill_server(&self, done: &AtomicU64) {
        let server = until(LIMIT, || child_of(self.process.pid())).expect("a server");
        kill(server, Signal::KILL);
        get_on(done, 2 * DEPTH, || self.process.output());
    }

    /// A clean end, of which nothing stays.
    fn stop(self) -> (TempDir, PathBuf) {
        self.process.signal(Signal::TERM);
        let finished = self.process.finish(LIMIT);
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert!(mount_at(&self.path).is_none(), "{}", finished.output());
        assert!(!self.path.exists(), "the mountpoint is left");
        (self.directory, self.image)
    }
}

/// Whether a process says more than that a server was killed, or a successor.
fn complains(said: &str) -> bool {
    let expected = ["was killed by signal 9", "was not handed over", "ended while it handed"];
    let mut lines = said.lines().filter(|line| !expected.iter().any(|it| line.contains(it)));
    lines.any(|line| ["warning", "error", "panicked"].iter().any(|word| line.contains(word)))
}

fn mount(image: &Path, path: &Path, words: &[&str]) -> Process {
    let mut mount = command(&[&program(), "mount", "--transport", "dev", "--threads", "2"]);
    mount.args(words).arg(image).arg(path).env_remove("NOTIFY_SOCKET");
    Process::spawn(&mut mount)
}

/// From hand to hand: kept or not, killed where it is kept.
fn travels(format: &'static str) {
    let mut disk = Disk::start(format, &["--keep-mount"]);
    let pidfile = disk.directory.path().join("pid");
    let path = disk.path.clone();
    let written = load(&path, SIZE, DEPTH, |done| {
        for words in [&["--keep-mount"][..], &[], &["--keep-mount"]] {
            get_on(done, 2 * DEPTH, || disk.process.output());
            disk.upgrade(&[words, &["--pidfile", text(&pidfile)]].concat());
            let pid = || std::fs::read_to_string(&pidfile).ok()?.trim().parse().ok();
            // The file names the process that was started, however often another one serves.
            let is_named = || (pid() == Some(disk.process.pid())).then_some(());
            assert!(until(LIMIT, is_named).is_some(), "{:?}", pid());
            if !words.is_empty() {
                (0..2).for_each(|_| disk.kill_server(done));
                assert_eq!(pid(), Some(disk.process.pid()));
            }
        }
    });
    judge(&path, &written);
    let (_directory, image) = disk.stop();
    assert!(!pidfile.exists(), "the pid file is left");
    assert!(image.exists());
}

#[test]
fn a_raw_image() {
    travels("raw");
}

#[test]
fn a_qcow2_image() {
    travels("qcow2");
}

/// What commands have changed goes along, and is there after a kill.
#[test]
fn an_overlay_and_limits() {
    let mut disk = Disk::start("qcow2", &["--limit", "iops=100000"]);
    let overlay = disk.directory.path().join("overlay.qcow2");
    let path = disk.path.clone();
    let ctl = |words: &[&str]| ok_words(&[&[&*program(), "ctl", text(&path)], words].concat());
    let written = load(&path, SIZE, DEPTH, |done| {
        get_on(done, 2 * DEPTH, || disk.process.output());
        ctl(&["snapshot", text(&overlay)]);
        ctl(&["limit", "iops=200000"]);
        disk.upgrade(&["--keep-mount", "--limit", "iops=100000"]);
        for _ in 0..2 {
            disk.kill_server(done);
            disk.ready();
            assert_eq!(ctl(&["limit"]).trim(), "iops=200000");
            assert!(ctl(&["stats"]).contains("overlay.qcow2"));
        }
    });
    judge(&path, &written);
    disk.stop();
}

/// A process of the old pair or of the new one is killed at any moment of a hand-over: no client
/// sees an error, and no process has to be started for that.
#[test]
fn clients_go_on_whoever_is_killed() {
    let (mut prng, mut counts) = (Prng::new(7), [[0_u64; 2]; 2]);
    let mut disk = Disk::start("raw", &["--keep-mount"]);
    let path = disk.path.clone();
    let mut usual = Duration::from_millis(200);
    let written = load(&path, SIZE, DEPTH, |done| {
        for number in 0..kills() {
            disk.ready();
            let kills_old = prng.coin();
            let mut new = disk.successor(&["--keep-mount"]);
            std::thread::sleep(usual * u32::try_from(prng.below(100)).unwrap_or(0) / 80);
            let helper = if kills_old { disk.process.pid() } else { new.pid() };
            // It may not have started one yet, or have ended.
            child_of(helper).into_iter().for_each(|pid| kill(pid, Signal::KILL));
            // One of the two pairs ends; the other one serves.
            let begun = Instant::now();
            let new_serves = loop {
                if disk.process.ended().is_some() {
                    break true;
                }
                if new.ended().is_some() {
                    break false;
                }
                let said =
                    || format!("the old: {}\nthe new: {}", disk.process.output(), new.output());
                assert!(begun.elapsed() < LIMIT, "kill {number}: both go on: {}", said());
                std::thread::sleep(Duration::from_millis(2));
            };
            counts[usize::from(kills_old)][usize::from(new_serves)] += 1;
            let other = if new_serves { std::mem::replace(&mut disk.process, new) } else { new };
            for said in [other.output(), disk.process.output()] {
                assert!(!said.contains("panicked"), "kill {number}: {said}");
            }
            get_on(done, 2 * DEPTH, || disk.process.output());
            if number % 4 == 1 {
                disk.ready();
                let begun = Instant::now();
                disk.upgrade(&["--keep-mount"]);
                usual = begun.elapsed();
            }
        }
    });
    println!("new killed, old killed: [old serves, new serves] {counts:?}; usual {usual:?}");
    judge(&path, &written);
    disk.ready();
    disk.stop();
}
