//! Power cuts, simulated: random clients, storage operations that overtake each other, and every
//! state that may be left is judged. `failing_storage` has errors of storage for the same clients.
//!
//! `RINGDISK_CRASH_STATES=N` judges N states in all (10,000; 100,000 with `RINGDISK_FULL=1`);
//! `RINGDISK_CRASH_SEED=N` begins with another seed. A failure prints the seed of its run:
//! `RINGDISK_CRASH_SEED=SEED RINGDISK_CRASH_STATES=1` runs it again.

// The engine's futures are large, and these are tests.
#![allow(clippy::large_futures)]

mod barrier;
mod between;
mod bitmap;
mod client;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod failing_storage;
mod judge;
#[path = "../common/live.rs"]
mod live;
mod mutation;
mod world;

use common::runtime;
use config::{Between, Config, Medium, Wanted};
use judge::Judge;
use world::{Taken, World};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// States of a test that has this share of all, in percent.
fn states(percent: u64) -> u64 {
    let full = std::env::var_os("RINGDISK_FULL").is_some();
    let all = number("RINGDISK_CRASH_STATES").unwrap_or(if full { 100_000 } else { 10_000 });
    (all * percent / 100).max(1)
}

/// Runs seeds until enough states were judged.
fn simulate(name: &str, percent: u64, wanted: Wanted) {
    let mut judge = Judge::new();
    let first = number("RINGDISK_CRASH_SEED").unwrap_or(1);
    let mut seed = first;
    while judge.judged < states(percent) {
        run(&mut judge, name, Config::new(seed, wanted));
        seed += 1;
    }
    let (judged, shown, leaks) = (judge.judged, judge.shown, judge.leaks);
    println!(
        "{name}: {judged} states of seeds {first}..{seed}, {leaks} with leaks, {shown} shown to \
         qemu-img"
    );
}

/// One seed: the run, then its states.
fn run(judge: &mut Judge, name: &str, config: Config) {
    let seed = config.seed;
    let mut runtime = runtime();
    let mut world = World::new(runtime.ring().clone(), config, Taken::Honest);
    let result = runtime.block_on(world.run());
    let config = world.config.clone();
    let failed = |what: String| {
        let trace = world.shore.trace.borrow();
        let from = trace.len().saturating_sub(if number("RINGDISK_CRASH_TRACE").is_some() {
            trace.len()
        } else {
            30
        });
        panic!(
            "{name}: {what}\n  run again: RINGDISK_CRASH_SEED={seed} RINGDISK_CRASH_STATES=1 \
             cargo test -p ringdisk-qcow2 --test crash {name}\n  {config:#?}\n  the last \
             operations: {:#?}",
            &trace[from..],
        );
    };
    if let Err(error) = result {
        failed(error);
    }
    for case in &world.cases {
        if let Err(error) = judge.judge(&config, case) {
            let path = std::env::temp_dir().join(format!("ringdisk-crash-{name}-{seed}.qcow2"));
            std::fs::write(&path, case.file.image()).expect("room for an image");
            failed(format!("{}: {error}\n  the image is in {}", case.label, path.display()));
        }
    }
}

#[test]
fn any_client() {
    simulate("any_client", 25, Wanted::default());
}

#[test]
fn over_a_backing_file() {
    simulate("over_a_backing_file", 10, Wanted { backing: true, ..Wanted::default() });
}

#[test]
fn with_compressed_clusters() {
    let wanted = Wanted { compressed: true, backing: true, ..Wanted::default() };
    simulate("with_compressed_clusters", 10, wanted);
}

#[test]
fn opened_again_and_again() {
    let wanted = Wanted { between: Some(Between::Reopen), ..Wanted::default() };
    simulate("opened_again_and_again", 10, wanted);
}

#[test]
fn with_snapshots() {
    let between = Some(Between::Snapshots);
    simulate("with_snapshots", 10, Wanted { between, ..Wanted::default() });
}

#[test]
fn with_resizes() {
    let between = Some(Between::Resize);
    simulate("with_resizes", 5, Wanted { between, backing: true, ..Wanted::default() });
}

#[test]
fn with_snapshots_and_resizes_over_a_backing_file() {
    let wanted = Wanted {
        between: Some(Between::Both),
        backing: true,
        compressed: true,
        ..Wanted::default()
    };
    simulate("with_snapshots_and_resizes_over_a_backing_file", 10, wanted);
}

#[test]
fn with_lazy_refcounts() {
    let between = Some(Between::Reopen);
    simulate("with_lazy_refcounts", 5, Wanted { lazy: true, between, ..Wanted::default() });
}

#[test]
fn with_an_external_data_file() {
    simulate("with_an_external_data_file", 5, Wanted { data_file: true, ..Wanted::default() });
}

#[test]
fn with_a_data_file_that_is_a_raw_image() {
    let wanted = Wanted { data_file: true, data_raw: true, ..Wanted::default() };
    simulate("with_a_data_file_that_is_a_raw_image", 4, wanted);
}

#[test]
fn on_a_block_device() {
    let wanted =
        Wanted { medium: Medium::Device, between: Some(Between::Reopen), ..Wanted::default() };
    simulate("on_a_block_device", 4, wanted);
}

#[test]
fn on_a_block_device_that_gets_full() {
    let wanted = Wanted { medium: Medium::FullDevice, ..Wanted::default() };
    simulate("on_a_block_device_that_gets_full", 4, wanted);
}

#[test]
fn on_a_file_with_direct_io() {
    let wanted =
        Wanted { medium: Medium::Direct, between: Some(Between::Reopen), ..Wanted::default() };
    simulate("on_a_file_with_direct_io", 4, wanted);
}

#[test]
fn with_changes_of_an_open_image() {
    let wanted = Wanted { between: Some(Between::Both), live: true, ..Wanted::default() };
    simulate("with_changes_of_an_open_image", 6, wanted);
}

#[test]
fn with_changes_of_an_open_image_on_a_block_device() {
    let wanted = Wanted {
        between: Some(Between::Both),
        live: true,
        medium: Medium::Device,
        ..Wanted::default()
    };
    simulate("with_changes_of_an_open_image_on_a_block_device", 4, wanted);
}

#[test]
fn with_a_recording_bitmap() {
    let wanted = Wanted { bitmap: true, between: Some(Between::Reopen), ..Wanted::default() };
    simulate("with_a_recording_bitmap", 10, wanted);
}

#[test]
fn with_a_refcount_table_that_grows() {
    let wanted = Wanted { full_table: true, between: Some(Between::Reopen), ..Wanted::default() };
    simulate("with_a_refcount_table_that_grows", 5, wanted);
}

#[test]
fn a_seed_repeats_itself() {
    repeats(Wanted { between: Some(Between::Resize), ..Wanted::default() });
}

#[test]
fn a_seed_with_compressed_clusters_repeats_itself() {
    // The large clusters among them would be decompressed by helper threads.
    let wanted = Wanted { compressed: true, backing: true, ..Wanted::default() };
    repeats(Wanted { between: Some(Between::Reopen), ..wanted });
}

#[test]
fn a_seed_of_a_block_device_repeats_itself() {
    repeats(Wanted { medium: Medium::FullDevice, ..Wanted::default() });
}

/// Two runs of some seeds are the same. Not with snapshots, which would bring the time of day into
/// the images.
fn repeats(wanted: Wanted) {
    let run = |seed| {
        let mut runtime = runtime();
        let mut world =
            World::new(runtime.ring().clone(), Config::new(seed, wanted), Taken::Honest);
        runtime.block_on(world.run()).expect("a sound run");
        let states: Vec<Vec<u8>> = world.cases.iter().map(|case| case.file.image()).collect();
        (world.shore.trace.borrow().clone(), world.file.log(), states)
    };
    for seed in 1..4 {
        let (first, second) = (run(seed), run(seed));
        assert_eq!(first.0, second.0, "seed {seed}: what the clients did");
        assert_eq!(first.1, second.1, "seed {seed}: what the storage was asked");
        assert!(first.2 == second.2, "seed {seed}: what power cuts left");
    }
}
