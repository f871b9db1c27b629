//! Upgrades in which the old or the new process is killed at any moment, under load: one of them
//! serves, or, as after every kill, the next mount does; what was answered (qcow2: flushed) is in
//! the image.
//! `RINGDISK_KILLS=N` for more kills.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{full, needs};
use ringdisk_testkit::mount::{Cleared, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has};
use ringdisk_testkit::sim::Prng;
use rustix::fs::OFlags;
use rustix::process::Signal;

use super::upgraded_mount::ready;
use crate::common::{Aligned, BLOCK, MIB, program};

const BLOCKS: u64 = 4 * MIB / BLOCK as u64;

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|number| number.parse().ok());
    wanted.unwrap_or(if full() { 400 } else { 8 })
}

/// Numbers of blocks: the last one that was answered, and a later one that may be there, too.
#[derive(Default)]
struct Known(HashMap<u64, (u64, Option<u64>)>);

impl Known {
    /// Writes and reads until it is told to stop or the mount is gone.
    ///
    /// * `syncs`: a write counts as answered when it was flushed.
    fn work(
        &mut self,
        (path, syncs): (&Path, bool),
        prng: &mut Prng,
        stop: &AtomicBool,
        done: &AtomicU64,
    ) {
        // It may be gone already.
        let Ok(file) = try_open_direct(path) else { return };
        while !stop.load(Ordering::Relaxed) {
            let at = prng.below(BLOCKS);
            let number = done.load(Ordering::Relaxed) + 1;
            let known = self.0.entry(at).or_default();
            known.1 = Some(number);
            let bytes = Aligned::of(&number.to_le_bytes().repeat(BLOCK / 8));
            if file.write_all_at(bytes.bytes(), at * BLOCK as u64).is_err()
                || syncs && file.sync_data().is_err()
            {
                return;
            }
            *known = (number, None);
            let at = prng.below(BLOCKS);
            let mut seen = Aligned::new(BLOCK);
            if file.read_exact_at(seen.bytes_mut(), at * BLOCK as u64).is_err() {
                return;
            }
            self.check(at, seen.bytes());
            done.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn check(&self, at: u64, seen: &[u8]) {
        let number = u64::from_le_bytes(seen[..8].try_into().expect("eight"));
        assert!(seen.chunks(8).all(|word| word == number.to_le_bytes()), "block {at} is torn");
        let (answered, later) = self.0.get(&at).copied().unwrap_or_default();
        let fits = number == answered || later == Some(number);
        assert!(fits, "block {at} is number {number}, not {answered} or {later:?}");
    }

    fn check_all(&mut self, path: &Path) {
        let file = try_open_direct(path).expect("it is served");
        let mut seen = Aligned::new(BLOCK);
        for at in 0..BLOCKS {
            file.read_exact_at(seen.bytes_mut(), at * BLOCK as u64).expect("a read");
            self.check(at, seen.bytes());
            let number = u64::from_le_bytes(seen.bytes()[..8].try_into().expect("eight"));
            self.0.insert(at, (number, None));
        }
    }
}

fn try_open_direct(path: &Path) -> std::io::Result<File> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag of open");
    File::options().read(true).write(true).custom_flags(flags).open(path)
}

/// `ringdisk mount WORDS… IMAGE MOUNTPOINT`.
fn spawn(image: &Path, path: &Path, words: &[&str]) -> Process {
    let mut mount = command(&[&program(), "mount", "--transport", "dev"]);
    mount.args(words).arg(image).arg(path).env_remove("NOTIFY_SOCKET");
    Process::spawn(&mut mount)
}

/// Whether the mount is served by this process: clients get on, or the process has ended.
fn serves(process: &mut Process, done: &AtomicU64) -> bool {
    let (before, begun) = (done.load(Ordering::Relaxed), Instant::now());
    loop {
        // A request may have been answered just before.
        if done.load(Ordering::Relaxed) > before + 2 {
            return true;
        }
        if process.ended().is_some() {
            return false;
        }
        assert!(begun.elapsed() < LIMIT, "it hangs: {}", process.output());
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn kill(process: &mut Process) {
    if process.ended().is_none() {
        process.signal(Signal::KILL);
    }
    process.wait(LIMIT).expect("it was killed");
}

/// One upgrade with a kill. Gives the process that serves; `None`: the mount is gone.
fn survive(
    (image, path, words): (&Path, &Path, &[&str]),
    mut old: Process,
    (kills_old, moment): (bool, Duration),
    done: &AtomicU64,
) -> Option<Process> {
    let mut new = spawn(image, path, &[&["--upgrade"], words].concat());
    std::thread::sleep(moment);
    let (killed, other) = if kills_old { (&mut old, &mut new) } else { (&mut new, &mut old) };
    kill(killed);
    let serves = serves(other, done);
    let output = other.output();
    assert!(!output.contains("panicked"), "{output}");
    assert!(serves || kills_old || output.contains("handed over to"), "it ended: {output}");
    serves.then_some(if kills_old { new } else { old })
}

/// * `format`: a write to a raw image is answered when the kernel has it; one to a qcow2 image,
///   whose tables are in the memory of the process, counts when it was flushed.
fn survives(format: &str) {
    let directory = scratch();
    let image = directory.path().join("disk.img");
    match format {
        "raw" => images::sparse(&image, 4 * MIB),
        _ => images::qcow2(&image, "4M", ""),
    }
    let path: PathBuf = directory.path().join("disk");
    let _cleared = Cleared(path.clone());
    let words: &[&str] = &["--threads", "2", "--format", format];
    let (mut known, mut prng) = (Known::default(), Prng::new(format.len() as u64));
    let mut counts = [0_u64; 3];
    let mut process = ready(spawn(&image, &path, words));
    let mut usual = Duration::from_millis(60);
    for number in 0..kills() {
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(number << 32));
        let kills_old = prng.coin();
        let micros = u64::try_from(usual.as_micros()).unwrap_or(0);
        let moment = Duration::from_micros(prng.below(micros * 5 / 4));
        let served = std::thread::scope(|scope| {
            let (known, stop, done, path) = (&mut known, &stop, &done, path.as_path());
            let mut clients = Prng::new(number);
            let how = (path, format != "raw");
            let client = scope.spawn(move || known.work(how, &mut clients, stop, done));
            let place = (image.as_path(), path, words);
            let served = survive(place, process, (kills_old, moment), done);
            stop.store(true, Ordering::Relaxed);
            client.join().expect("wrong bytes");
            served
        });
        counts[if served.is_none() { 2 } else { usize::from(kills_old) }] += 1;
        // A mount that is gone is made anew; one that is there can be handed over without a kill.
        process = match served {
            None => ready(spawn(&image, &path, words)),
            Some(process) => {
                let old = ready(process);
                ringdisk_testkit::process::ok_words(&[&program(), "ctl", text(&path), "stats"]);
                let begun = Instant::now();
                let new = ready(spawn(&image, &path, &[&["--upgrade"], words].concat()));
                usual = begun.elapsed();
                let old = old.finish(LIMIT);
                assert_eq!(old.code(), Some(0), "{}\n{}", old.output(), new.output());
                new
            }
        };
        known.check_all(&path);
    }
    println!("{format}: old serves, new serves, nobody: {counts:?}; usual {usual:?}");
    process.signal(Signal::TERM);
    assert_eq!(process.finish(LIMIT).code(), Some(0));
}

#[test]
fn what_was_answered_of_a_raw_image_is_there_whoever_is_killed() {
    survives("raw");
}

#[test]
fn what_was_flushed_of_a_qcow2_image_is_there_whoever_is_killed() {
    if needs("qemu-img", has("qemu-img")) {
        survives("qcow2");
    }
}
