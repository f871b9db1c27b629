//! The same operations on our engine, on QEMU and on imago: same bytes, sound images, and each goes
//! on with the image of another.
//!
//! Every image gets every operation; who does it changes from step to step. `RINGDISK_FULL=1` takes
//! every cell of the feature matrix, else every pair of values is in some cell. A failure prints
//! the cell and the operations, made as short as possible.

#![allow(clippy::large_futures)]

mod cells;
mod engines;
mod steps;

use std::path::PathBuf;

use cells::Cell;
use engines::Engine;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use ringdisk_testkit::images::{differs_at, pattern};
use ringdisk_testkit::layout::{Guest, Layout};
use ringdisk_testkit::process::{command, run};
use steps::{Model, Step, steps};

use crate::common::Images;

/// An image that all engines work on in turn.
struct Image {
    name: &'static str,
    path: PathBuf,
}

struct Bench {
    cell: Cell,
    images: Images,
    base: Vec<u8>,
    each: Vec<Image>,
}

impl Bench {
    fn new(cell: Cell, with_imago: bool) -> Bench {
        let images = Images::new();
        let base = if cell.backing {
            // Ends inside a cluster, before the disk does.
            let len = usize::try_from(cell.size() * 2 / 3 / 512 * 512).expect("small");
            pattern(1, 0, len)
        } else {
            Vec::new()
        };
        std::fs::write(images.path("base"), &base).expect("room");
        let names = ["ours", "qemu", "imago"];
        let count = if with_imago { 3 } else { 2 };
        let mut bench = Bench { cell, images, base, each: Vec::new() };
        for name in &names[..count] {
            bench.create(name);
        }
        bench
    }

    fn create(&mut self, name: &'static str) {
        let (options, size) =
            (self.cell.options(&format!("{name}.data")), self.cell.size().to_string());
        let mut words = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if self.cell.backing {
            words.extend(["-b", "base", "-F", "raw"]);
        }
        words.extend([name, &size]);
        self.images.qemu_img(&words);
        self.each.push(Image { name, path: self.images.path(name) });
    }

    /// One step on every image. Errors: what differs.
    fn step(&self, number: usize, step: &Step, model: &mut Model) -> Result<(), String> {
        let before = model.clone();
        for (place, image) in self.each.iter().enumerate() {
            let engine = Engine::ALL[(place + number) % self.each.len()];
            *model = before.clone();
            let result = engine.work(self, image, step, model);
            result.map_err(|error| format!("{engine:?} on {}: {error}", image.name))?;
            self.look(image, engine, model)
                .map_err(|error| format!("{} after {engine:?}: {error}", image.name))?;
        }
        Ok(())
    }

    /// The image is sound and holds what it should.
    fn look(&self, image: &Image, engine: Engine, model: &Model) -> Result<(), String> {
        let bytes = std::fs::read(&image.path).expect("readable");
        let data = match self.cell.data_file {
            true => std::fs::read(image.path.with_extension("data")).expect("readable"),
            false => bytes.clone(),
        };
        let layout = Layout::of(&bytes[..]);
        if !layout.is_sound() {
            return Err(format!("{:?}", layout.problems));
        }
        if layout.leaks > 0 && engine == Engine::Ours {
            return Err(format!("{} leaks", layout.leaks));
        }
        let guest = Guest::active(&bytes[..], &data[..])?;
        if guest.size != model.disk.len() as u64 {
            return Err(format!("size {} and {}", guest.size, model.disk.len()));
        }
        let mut seen = vec![0; model.disk.len()];
        guest.read(0, &mut seen, &|at, out| engines::fill(&self.base, at, out))?;
        if let Some(at) = differs_at(&seen, &model.disk) {
            return Err(format!("byte {at:#x} is {:#x}, not {:#x}", seen[at], model.disk[at]));
        }
        if engine != Engine::Ours {
            return Ok(());
        }
        let mut check = command(&["qemu-img", "check", "-q", "-f", "qcow2", image.name]);
        let finished = run(check.current_dir(self.images.0.path()));
        match finished.code() {
            Some(0) => Ok(()),
            _ => Err(format!("qemu-img check: {}", finished.output())),
        }
    }
}

fn play(cell: Cell, with_imago: bool, all: &[Step]) -> Result<(), String> {
    let bench = Bench::new(cell, with_imago);
    let mut model = Model::new(&cell, &bench.base);
    for (number, step) in all.iter().enumerate() {
        bench.step(number, step, &mut model).map_err(|error| format!("step {number}: {error}"))?;
    }
    Ok(())
}

/// Every `of`-th cell, beginning with `first`.
fn compare(first: usize, of: usize) {
    let full = std::env::var_os("RINGDISK_FULL").is_some();
    let cells = if full { cells::all() } else { cells::pairwise() };
    let seed = std::env::var("RINGDISK_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1u64);
    println!("{} cells, RINGDISK_SEED={seed}", cells.len());
    // What imago cannot do is left to nobody where it takes part: those cells come a second time,
    // without it.
    let benches = cells.into_iter().flat_map(|cell| {
        let with_imago = cell.is_for_imago().then_some((cell, true));
        with_imago.into_iter().chain([(cell, false)])
    });
    for (number, (cell, with_imago)) in benches.enumerate().skip(first).step_by(of) {
        let mut random = [0; 32];
        random[..8].copy_from_slice(&(seed + number as u64 * 1_000_003).to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &random);
        let config = Config {
            cases: if full { 4 } else { 1 },
            max_shrink_iters: 150,
            failure_persistence: None,
            ..Config::default()
        };
        let mut runner = TestRunner::new_with_rng(config, random);
        let result = runner
            .run(&steps(&cell), |all| play(cell, with_imago, &all).map_err(TestCaseError::fail));
        match result {
            Ok(()) => {}
            Err(TestError::Fail(reason, steps)) => {
                panic!("RINGDISK_SEED={seed}, imago {with_imago}, {cell:?}: {reason}\n{steps:#?}")
            }
            Err(TestError::Abort(reason)) => panic!("{cell:?}: {reason}"),
        }
    }
}

#[test]
fn engines_agree_in_half_of_the_cells() {
    compare(0, 2);
}

#[test]
fn engines_agree_in_the_other_half() {
    compare(1, 2);
}

#[test]
fn pairs_are_covered_by_few_cells() {
    let (all, few) = (cells::all().len(), cells::pairwise().len());
    assert!(few < 50 && all > 500, "{few} of {all}");
}
