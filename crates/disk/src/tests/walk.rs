//! A random walk: changes of a disk one after the other, and some at the same time, in an order
//! that a seed decides, while clients write, zero, discard and read.
//!
//! The bytes are those that the clients know after each few steps, and QEMU finds nothing wrong
//! with the images whenever the disk is closed. What is given up, refused or has failed leaves the
//! disk as it was.
//!
//! `RINGDISK_WALK_SEED=N` runs another walk; with `RINGDISK_FULL=1` there are more and longer ones.

mod jobs;
mod steps;

use ringdisk_qcow2::Bytes;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;
use ringdisk_testkit::limits::{full, quick};
use ringdisk_testkit::process::{LIMIT, patient};
use ringdisk_testkit::sim::Prng;
use tempfile::TempDir;

use super::load::Load;
use super::{assert_same, buffer, directory, open, qemu_img, read_steps, run};
use crate::{Checkpoint, CheckpointEnd, CheckpointState, Disk, Format, ImageOptions};

/// Steps of a walk, and seeds.
const STEPS: u32 = 100;
const STEPS_IN_FULL: u32 = 1500;
const SEEDS: [u64; 2] = [1, 2];
const SEEDS_IN_FULL: u64 = 10;
/// Clients work on the first bytes of the disk, which is never smaller.
const CLIENTS: usize = 4 << 20;
/// Bytes of the disk at the beginning, and at most.
const SIZE: usize = 6 << 20;
const SIZE_MAX: usize = 12 << 20;
/// Steps until the bytes are compared, and until the disk is closed and opened again.
const LOOK: u32 = 6;
const RESTART: u32 = 18;
/// Layers at most.
const DEPTH_MAX: usize = 6;

/// The disk, and what is known of it.
struct Walk {
    ring: Ring,
    directory: TempDir,
    disk: Arc<Disk>,
    load: Option<Load>,
    /// What the disk holds; of the first [`CLIENTS`] bytes the clients know it while they work.
    bytes: Vec<u8>,
    prng: Prng,
    /// Number of the next file.
    next: u32,
    /// Internal snapshots of the image on top.
    snapshots: Vec<String>,
    frozen: Option<(Arc<Checkpoint>, Vec<u8>)>,
    /// Images that were in use when the process was killed: space may be lost in them.
    killed: Vec<PathBuf>,
}

impl Walk {
    async fn start(ring: Ring, seed: u64) -> Walk {
        let directory = directory();
        let (name, format) = match seed % 2 {
            0 => ("0.qcow2", "qcow2"),
            _ => ("0.raw", "raw"),
        };
        qemu_img(&directory, &["create", "-q", "-f", format, name, &SIZE.to_string()]);
        let disk = opened(&ring, directory.path().join(name)).await;
        let mut walk = Walk {
            ring,
            directory,
            disk,
            load: None,
            bytes: vec![0; SIZE],
            prng: Prng::new(seed),
            next: 1,
            snapshots: Vec::new(),
            frozen: None,
            killed: Vec::new(),
        };
        walk.go_on();
        walk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn new_name(&mut self, format: &str) -> String {
        self.next += 1;
        format!("{}.{format}", self.next)
    }

    fn depth(&self) -> usize {
        self.disk.layers().len()
    }

    fn is_raw(&self) -> bool {
        self.disk.layers()[0].format() == Some(Format::Raw)
    }

    fn names(&self) -> Vec<PathBuf> {
        self.disk.layers().iter().map(|layer| layer.name().to_owned()).collect()
    }

    /// Clients work.
    pub(super) fn go_on(&mut self) {
        let seed = self.prng.below(1 << 40);
        self.load = Some(Load::start(&self.disk, &self.bytes[..CLIENTS], seed));
    }

    /// Clients stand still; what the disk holds is known.
    pub(super) async fn halt(&mut self) {
        if let Some(load) = self.load.take() {
            self.bytes[..CLIENTS].copy_from_slice(&load.halt(&self.ring).await);
        }
    }

    /// Clients make some requests.
    async fn some(&mut self) {
        let requests = self.prng.below(60);
        self.load.as_ref().expect("clients work").progress(&self.ring, requests).await;
    }

    /// Writes past the part of the clients.
    async fn write_behind(&mut self) {
        let room = self.bytes.len() - CLIENTS;
        if room == 0 {
            return;
        }
        let at = CLIENTS + self.below(room);
        let len = (1 + self.below(1 << 20)).min(self.bytes.len() - at);
        let data: Vec<u8> = match self.prng.below(4) {
            0 => vec![0; len],
            _ => vec![u8::try_from(1 + self.prng.below(255)).expect("a byte"); len],
        };
        let wanted = self.prng.coin();
        if data[0] == 0 && wanted {
            let zeroed = self.disk.write_zeroes(&self.ring, at as u64, Bytes::of(len), true).await;
            assert_eq!(zeroed, Ok(()));
        } else {
            let written = self.disk.write(&self.ring, at as u64, &buffer(&data)).await;
            assert_eq!(written, Ok(len));
        }
        self.bytes[at..at + len].copy_from_slice(&data);
    }

    /// The disk holds what is known, and a state that is kept is what it was.
    async fn look(&mut self) {
        self.halt().await;
        assert_eq!(self.disk.fault(), None);
        assert_same(&read_steps(&self.ring, &self.disk, 1 << 20).await, &self.bytes);
        if let Some((checkpoint, bytes)) = &self.frozen {
            assert!(matches!(checkpoint.state(), CheckpointState::Running));
            assert_same(&read_steps(&self.ring, checkpoint.disk(), 1 << 20).await, bytes);
        }
        self.go_on();
    }

    async fn end_checkpoint(&mut self) {
        if let Some((checkpoint, _)) = self.frozen.take() {
            checkpoint.end(&self.ring, CheckpointEnd::Drop).await.expect("it ends");
        }
    }

    /// The disk ends, or its process does, and its images are opened again by their names.
    async fn restart(&mut self) {
        self.end_checkpoint().await;
        self.halt().await;
        let names = self.names();
        let is_killed = self.prng.below(3) == 0;
        if is_killed {
            assert_eq!(self.disk.flush(&self.ring).await, Ok(()));
        } else {
            assert_eq!(self.disk.close(&self.ring).await, Ok(()));
        }
        let nothing = Disk::null(&crate::NullOptions::default());
        let old = std::mem::replace(&mut self.disk, nothing);
        let ended = Arc::downgrade(&old);
        drop(old);
        // A task that was about to write metadata back lets go of the disk.
        let begun = Instant::now();
        while ended.strong_count() > 0 {
            assert!(begun.elapsed() < patient(LIMIT), "somebody keeps the disk");
            self.ring.sleep(Duration::from_millis(1)).await;
        }
        if is_killed {
            self.killed.extend_from_slice(&names);
        } else {
            self.check(&names);
        }
        self.disk = opened(&self.ring, names[0].clone()).await;
        assert_eq!(self.names(), names);
        self.go_on();
    }

    /// QEMU finds nothing wrong, but for lost space in an image whose process was killed.
    fn check(&mut self, names: &[PathBuf]) {
        let is_qcow2 = |name: &&PathBuf| name.extension().is_some_and(|it| it == "qcow2");
        for path in names.iter().filter(is_qcow2) {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            let repairs: &[&str] = match self.killed.contains(path) {
                true => &["-r", "leaks"],
                false => &[],
            };
            let words = [&["check", "-q", "-f", "qcow2"], repairs, &[&name]].concat();
            qemu_img(&self.directory, &words);
        }
        self.killed.clear();
    }

    /// Removes what the chain has no longer.
    fn remove(&self, before: &[PathBuf]) {
        let now = self.names();
        for gone in before.iter().filter(|name| !now.contains(name)) {
            std::fs::remove_file(gone).expect("nobody needs it");
        }
    }
}

async fn opened(ring: &Ring, path: PathBuf) -> Arc<Disk> {
    let is_raw = path.extension().is_some_and(|extension| extension == "raw");
    let format = if is_raw { Format::Raw } else { Format::Qcow2 };
    let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
    open(ring, path, &options).await.expect("open")
}

fn walk(seed: u64) {
    println!("seed {seed}: RINGDISK_WALK_SEED={seed} runs this walk again");
    let steps = match (full(), quick()) {
        (true, _) => STEPS_IN_FULL,
        (_, true) => STEPS / 4,
        (false, false) => STEPS,
    };
    let begun = Instant::now();
    run(async |ring| {
        let mut walk = Walk::start(ring, seed).await;
        for step in 1..=steps {
            let what = walk.step().await;
            println!("{step}: {what}; {} layers", walk.depth());
            if step % LOOK == 0 {
                walk.look().await;
            }
            if step % RESTART == 0 {
                walk.restart().await;
            }
        }
        walk.look().await;
        walk.restart().await;
        walk.halt().await;
        assert_eq!(walk.disk.close(&walk.ring).await, Ok(()));
    });
    println!("seed {seed}: {steps} steps in {:.1} s", begun.elapsed().as_secs_f64());
}

#[test]
fn a_disk_walks_through_changes_under_clients() {
    let seed = std::env::var("RINGDISK_WALK_SEED").ok().and_then(|seed| seed.parse().ok());
    match (seed, full()) {
        (Some(seed), _) => walk(seed),
        (None, true) => (1..=SEEDS_IN_FULL).for_each(walk),
        (None, false) => SEEDS.into_iter().for_each(walk),
    }
}
