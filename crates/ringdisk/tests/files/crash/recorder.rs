//! Runs that are recorded below the storage layer and lived through again.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use ringdisk_disk::{Bytes, Disk, ImageOptions};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions};
use ringdisk_qcow2::{CheckVerdict, ImageBytes, check_bytes};
use ringdisk_testkit::fio::Verify;
use ringdisk_testkit::layout::{Guest, Layout, Shape};
use ringdisk_testkit::limits::{full, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::oracle::Oracle;
use ringdisk_testkit::process::has;
use ringdisk_testkit::sim::SimStorage;
use tempfile::TempDir;

use crate::common::{MIB, open, serve};
use crate::crash::client::{Witness, work};

/// States of a run that are judged, unless `RINGDISK_FULL=1` asks for every moment.
const STATES: usize = 1500;

/// An image on a recorded storage, served as a file.
struct Recorded {
    sim: SimStorage,
    export: Option<Export>,
    directory: TempDir,
}

impl Recorded {
    fn new(shape: &Shape) -> Recorded {
        let sim = SimStorage::from_image(&shape.make(), 1);
        sim.record();
        let directory = scratch();
        let path = directory.path().join("image.qcow2");
        std::fs::write(&path, "").expect("a mountpoint");
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        let options = ExportOptions {
            growable: true,
            resizable: true,
            common: CommonOptions::with_threads(1),
            ..ExportOptions::new(path)
        };
        let export = Export::start(disk, options).expect("an export of the test itself");
        Recorded { sim, export: Some(export), directory }
    }

    /// The program under test, on that file.
    fn serve(&self, args: &[&str]) -> Mounted {
        serve(Path::new(text(&self.directory.path().join("image.qcow2"))), args)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            export.stop_handle().stop();
            let _ = export.wait();
        }
    }
}

/// A state, as our check wants it.
#[derive(Debug)]
struct Look<'a>(&'a SimStorage);

impl ImageBytes for Look<'_> {
    fn image_len(&self) -> Bytes {
        Bytes(self.0.len())
    }

    fn read_into(&self, offset: u64, out: &mut [u8]) {
        let count = self.0.peek(offset, out);
        out[count..].fill(0);
    }
}

/// A state is sound, and holds what it must.
fn judge(state: &SimStorage, oracle: Option<&Oracle>) -> Result<(), String> {
    let layout = Layout::of(state);
    if !layout.is_sound() {
        return Err(format!("{:?}", layout.problems));
    }
    let report = check_bytes(&Look(state)).map_err(|error| error.to_string())?;
    if !matches!(report.verdict(), CheckVerdict::Clean | CheckVerdict::Leaks) {
        return Err(format!("{report:?}"));
    }
    let Some(oracle) = oracle else { return Ok(()) };
    let guest = Guest::active(state, state)?;
    let seen = oracle.judge_crash(|at, bytes| guest.read(at, bytes, &|_, out| out.fill(0)));
    seen.map_err(|mismatch| mismatch.to_string())
}

/// Every moment of a run: what a killed process leaves, and what a power cut may leave.
fn live_again(sim: &SimStorage, witness: Option<&Witness>) {
    let events = sim.recorded();
    let step = if full() { 1 } else { (events * 2 / STATES).max(1) };
    let mut replay = sim.replay().expect("recorded");
    let mut again = witness.map(Witness::again);
    let mut judged = 0;
    loop {
        if let Some(again) = &mut again {
            again.advance_to(replay.at);
        }
        if replay.at.is_multiple_of(step) {
            let oracle = again.as_ref().map(|again| &again.oracle);
            let seed = replay.at as u64;
            for (what, state) in
                [("killed", replay.sim().fork(1)), ("power cut", replay.sim().crash_state(seed))]
            {
                judged += 1;
                judge(&state, oracle).unwrap_or_else(|error| {
                    let path = std::env::temp_dir().join("ringdisk-e2e-crash.qcow2");
                    std::fs::write(&path, state.image()).expect("room");
                    panic!(
                        "{what} after {} of {events} events: {error}\n  the image is in {}",
                        replay.at,
                        path.display()
                    )
                });
            }
        }
        if !replay.advance() {
            break;
        }
    }
    println!("{judged} states of {events} events");
    assert!(events > 100, "only {events} events were recorded");
}

fn shape(cluster_bits: u32, lazy: bool) -> Shape {
    Shape { cluster_bits, size: 32 * MIB, lazy, ..Shape::default() }
}

#[test]
fn every_moment_of_a_run_of_fio_leaves_a_sound_image() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    for (cluster_bits, args) in
        [(12, vec!["--threads", "2"]), (16, vec!["--threads", "2", "--direct"])]
    {
        let recorded = Recorded::new(&shape(cluster_bits, false));
        let disk = recorded.serve(&args);
        Verify { jobs: 2, size_kib: 6 << 10, ..Verify::default() }.run(disk.path());
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        live_again(&recorded.sim, None);
        let layout = Layout::of(&recorded.sim);
        assert!(layout.is_sound() && layout.leaks == 0, "{layout}");
    }
}

#[test]
fn every_flushed_byte_of_a_mounted_run_is_there_at_every_moment_after() {
    if !needs_root() {
        return;
    }
    for (cluster_bits, args) in [
        (9, vec!["--threads", "2"]),
        (12, vec!["--threads", "2", "--direct"]),
        (16, vec!["--threads", "1"]),
    ] {
        let recorded = Recorded::new(&shape(cluster_bits, false));
        let sim = recorded.sim.clone();
        let witness = Witness::new(32 * MIB, move || sim.recorded());
        let disk = recorded.serve(&args);
        let never = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (file, witness, never) = (open(disk.path()), &witness, &never);
                scope.spawn(move || work(&file, witness, seed, 60, MIB, never));
            }
        });
        let finished = disk.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        live_again(&recorded.sim, Some(&witness));
    }
}
