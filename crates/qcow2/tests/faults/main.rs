//! Storage that fails: each single operation in turn, a full disk at each length, and faults at random under many clients.
//!
//! Whatever fails, the client of what failed sees it, nothing hangs, what was flushed stays, the image is sound, and it can be opened
//! again. A failed flush is not forgotten until then; a full disk is, once there is room.

#![allow(clippy::large_futures)]

// Parts of the crash simulation, of which this program does not use everything.
#[allow(dead_code)]
#[path = "../crash/barrier.rs"]
mod barrier;
#[path = "../crash/between.rs"]
mod between;
#[allow(dead_code)]
#[path = "../crash/bitmap.rs"]
mod bitmap;
#[path = "../crash/client.rs"]
mod client;
#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code)]
#[path = "../crash/config.rs"]
mod config;
#[path = "../crash/judge.rs"]
mod judge;
#[path = "../common/live.rs"]
mod live;
#[allow(dead_code)]
#[path = "../crash/world.rs"]
mod world;

use std::collections::BTreeSet;

use common::runtime;
use config::{Between, Config, Wanted};
use judge::Judge;
use ringdisk_ring::Errno;
use ringdisk_testkit::sim::{Fault, OpKind, Record, When};
use world::{Taken, World};

/// Images and clients that the sweeps are made with.
const SEEDS: u64 = 6;
/// Storage operations of a run that fail in turn, unless `RINGDISK_FULL=1` asks for every one.
const PLACES: usize = 60;

fn full() -> bool {
    std::env::var_os("RINGDISK_FULL").is_some()
}

/// One client after the other, so that the number of an operation says which it is.
fn config(seed: u64) -> Config {
    let between = if seed.is_multiple_of(2) { Between::Both } else { Between::Reopen };
    let wanted =
        Wanted { between: Some(between), backing: seed.is_multiple_of(3), ..Wanted::default() };
    let mut config = Config::new(seed, wanted);
    config.clients = 1;
    config.operations = 25;
    config.streams = 2;
    config.held_per_mille = 0;
    config
}

/// What a run with a fault left.
struct Run {
    world: World,
    /// What the flushes answered that were made at the end, while the image was still open.
    flushes: Vec<Result<(), Errno>>,
    /// The run came to its end: no operation on the whole image failed.
    finished: bool,
}

fn run(config: Config, fault: Option<(When, Fault)>) -> Result<Run, String> {
    let mut runtime = runtime();
    let mut world = World::new(runtime.ring().clone(), config, Taken::Honest);
    world.tolerate_faults();
    if let Some((when, fault)) = fault {
        world.file.on(when, fault);
    }
    let result = runtime.block_on(async {
        let mut flushes = Vec::new();
        // An image that cannot be opened, closed or changed is an answer too.
        for stream in 0..world.config.streams {
            let Ok(image) = world.open().await else { return Ok((flushes, false)) };
            world.stream(&image).await?;
            if stream + 1 < world.config.streams {
                if world.close(image).await.is_err() || world.between().await.is_err() {
                    return Ok((flushes, false));
                }
            } else {
                for _ in 0..2 {
                    flushes.push(world.flush(&image).await?);
                }
            }
        }
        Ok::<_, String>((flushes, true))
    });
    let (flushes, finished) = result?;
    Ok(Run { world, flushes, finished })
}

/// The states that the run may have left are all good, and the image goes on without the fault.
fn judge(judge: &mut Judge, run: &mut Run) -> Result<(), String> {
    run.world.file.clear_rules();
    run.world.cut("end");
    for case in &run.world.cases {
        judge.judge(&run.world.config, case).map_err(|error| format!("{}: {error}", case.label))?;
    }
    Ok(())
}

/// The operations of a run without faults.
fn log(seed: u64) -> Vec<Record> {
    let run = run(config(seed), None).expect("nothing fails");
    assert!(run.finished && run.flushes == [Ok(()), Ok(())], "seed {seed}");
    run.world.file.log()
}

/// Every place, or some that differ from seed to seed.
fn places(seed: u64, count: usize) -> Vec<usize> {
    if full() {
        return (0..count).collect();
    }
    let step = (count / PLACES).max(1);
    (0..count).skip(usize::try_from(seed).unwrap_or(0) % step).step_by(step).collect()
}

fn sweep(errno: Errno, kinds: &[OpKind]) {
    let mut judging = Judge::new();
    let mut hit = BTreeSet::new();
    for seed in 1..=SEEDS {
        let log = log(seed);
        let wanted: Vec<Record> =
            log.into_iter().filter(|record| kinds.contains(&record.kind)).collect();
        for place in places(seed, wanted.len()) {
            let record = wanted[place];
            let fault = (When::number(record.number), Fault::Fail(errno));
            let checked = run(config(seed), Some(fault)).and_then(|mut run| {
                hit.insert(format!("{:?}", record.kind));
                judge(&mut judging, &mut run)?;
                consequences(&run, record, errno)
            });
            checked.unwrap_or_else(|error| {
                panic!("seed {seed}, {record:?} fails with {errno}: {error}")
            });
        }
    }
    println!("{} states; {hit:?} failed with {errno}", judging.judged);
}

/// What must follow from the failure of one operation.
fn consequences(run: &Run, record: Record, errno: Errno) -> Result<(), String> {
    if !run.finished {
        return Ok(());
    }
    let flushed = &run.flushes;
    let lasts = errno != Errno::NOSPC || record.kind == OpKind::Flush;
    if flushed[0].is_err() && flushed[1] != Err(Errno::IO) && lasts {
        return Err(format!("a failed flush was forgotten: {flushed:?}"));
    }
    let errors = run.world.shore.errors.borrow();
    match record.kind {
        OpKind::Flush => {
            let noticed = flushed.iter().any(Result::is_err) || !errors.is_empty();
            if noticed { Ok(()) } else { Err("nobody was told that a flush failed".into()) }
        }
        _ if errno == Errno::NOSPC && flushed[1].is_err() => {
            Err(format!("there is room again and it does not go on: {flushed:?}, {errors:?}"))
        }
        _ => Ok(()),
    }
}

#[test]
fn any_operation_that_fails_with_eio_leaves_a_sound_image() {
    use OpKind::{Discard, Preallocate, Read, SetLen, Write, WriteZeroes};
    sweep(Errno::IO, &[Read, Write, Discard, WriteZeroes, SetLen, Preallocate]);
}

#[test]
fn any_flush_that_fails_is_told_and_not_forgotten() {
    sweep(Errno::IO, &[OpKind::Flush]);
    // Whatever it says: what it was to make durable may be lost.
    sweep(Errno::NOSPC, &[OpKind::Flush]);
}

#[test]
fn any_operation_that_finds_no_space_leaves_an_image_that_goes_on() {
    use OpKind::{Preallocate, SetLen, Write, WriteZeroes};
    sweep(Errno::NOSPC, &[Write, WriteZeroes, SetLen, Preallocate]);
}

#[test]
fn disk_that_is_full_at_any_length_goes_on_when_there_is_room() {
    let mut judging = Judge::new();
    for seed in 1..=SEEDS {
        let end = log(seed).iter().map(|record| record.offset + record.len).max().unwrap_or(0);
        let start = ringdisk_testkit::layout::Shape::make(&config(seed).shape).len() as u64;
        let step = ((end - start) / if full() { 400 } else { 25 }).max(512);
        for limit in (start..end).step_by(usize::try_from(step).expect("small")) {
            let full = When::kind(OpKind::Write).at(limit..u64::MAX);
            let checked = run(config(seed), Some((full, Fault::Fail(Errno::NOSPC))))
                .and_then(|mut run| judge(&mut judging, &mut run));
            checked.unwrap_or_else(|error| panic!("seed {seed}, full at {limit:#x}: {error}"));
        }
    }
    println!("{} states", judging.judged);
}

#[test]
fn many_clients_on_storage_that_fails_at_random() {
    let mut judging = Judge::new();
    for seed in 1..=if full() { 500 } else { 30 } {
        let mut config = Config::new(seed, Wanted { backing: seed % 2 == 0, ..Wanted::default() });
        config.held_per_mille = 0;
        let errno = if seed % 3 == 0 { Errno::NOSPC } else { Errno::IO };
        let mut runtime = runtime();
        let mut world = World::new(runtime.ring().clone(), config, Taken::Honest);
        world.tolerate_faults();
        world.file.on(When::any().skip(30).chance(8), Fault::Fail(errno));
        world.file.on(When::any().chance(600), Fault::Hold);
        let ended = runtime.block_on(async {
            let Ok(image) = world.open().await else { return Ok(()) };
            world.stream(&image).await?;
            let _ = world.flush(&image).await?;
            Ok::<(), String>(())
        });
        let checked = ended.and_then(|()| {
            let mut run = Run { world, flushes: Vec::new(), finished: false };
            judge(&mut judging, &mut run)
        });
        checked.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    println!("{} states", judging.judged);
}
