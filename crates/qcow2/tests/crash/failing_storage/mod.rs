//! Storage that fails: each single operation in turn, a full disk at each length, and faults at
//! random under many clients.
//!
//! Whatever fails, the client of what failed sees it, nothing hangs, what was flushed stays, the
//! image is sound, and it can be opened again. A failed flush is not forgotten until then; a full
//! disk is, once there is room.
//!
//! (`SetLen` and `Preallocate` are asked of direct regular files only, by `engine/grow_ahead.rs`,
//! which goes on without them; simulated storage sees none.)

mod warnings;

use ringdisk_ring::Errno;
use ringdisk_testkit::layout::Shape;
use ringdisk_testkit::sim::{Fault, OpKind, Record, SimStorage, When};
use warnings::Warnings;

use crate::client::{SHORT, WRITE_BACK};
use crate::common::runtime;
use crate::config::{Between, Config, Wanted};
use crate::judge::Judge;
use crate::world::{Taken, World};

/// Images and clients that the sweeps are made with.
const SEEDS: u64 = 6;
/// Storage operations of a run that fail in turn, unless `RINGDISK_FULL=1` asks for every one.
const PLACES: usize = 60;

/// Operations after one that failed in which it is done again.
const REPEATED_WITHIN: usize = 4;

fn full() -> bool {
    std::env::var_os("RINGDISK_FULL").is_some()
}

/// Which storage fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// The image file.
    Image,
    /// The external data file.
    Data,
}

/// One client after the other, so that the number of an operation says which it is.
fn config(seed: u64, side: Side) -> Config {
    let between = match side {
        Side::Image if seed.is_multiple_of(2) => Between::Both,
        _ => Between::Reopen,
    };
    let wanted = Wanted {
        between: Some(between),
        backing: seed.is_multiple_of(3),
        data_file: side == Side::Data,
        ..Wanted::default()
    };
    let mut config = Config::new(seed, wanted);
    // Zeroes are written to such a data file.
    config.shape.data_file_raw =
        side == Side::Data && config.shape.backing.is_none() && seed.is_multiple_of(2);
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
    warnings: Warnings,
}

impl Run {
    fn storage(&self, side: Side) -> &SimStorage {
        match side {
            Side::Image => &self.world.file,
            Side::Data => self.world.data.as_ref().expect("asked for"),
        }
    }

    /// Whether a client, or the flush at the end, got this error.
    fn is_told(&self, errno: Errno) -> bool {
        let text = format!(": {errno}");
        let errors = self.world.shore.errors.borrow();
        self.flushes.contains(&Err(errno)) || errors.iter().any(|error| error.ends_with(&text))
    }

    /// Whether the next operations of the only client include one that does the same again.
    fn was_repeated(&self, side: Side, record: Record) -> bool {
        let log = self.storage(side).log();
        let next = log.iter().filter(|next| next.number > record.number).take(REPEATED_WITHIN);
        next.into_iter().any(|next| next.kind == record.kind && next.len >= record.len)
    }

    fn has_traced(&self, what: &str) -> bool {
        self.world.shore.trace.borrow().iter().any(|line| line.starts_with(what))
    }
}

fn run(config: Config, side: Side, fault: Option<(When, Fault)>) -> Result<Run, String> {
    let mut runtime = runtime();
    let mut world = World::new(runtime.ring().clone(), config, Taken::Honest);
    world.tolerate_faults();
    let mut run =
        Run { world, flushes: Vec::new(), finished: false, warnings: Warnings::default() };
    if let Some((when, fault)) = fault {
        run.storage(side).on(when, fault);
    }
    let storage = run.storage(side).clone();
    let _seen = run.warnings.watch(&storage);
    let result = runtime.block_on(async {
        let world = &mut run.world;
        // An image that cannot be opened, closed or changed is an answer too.
        for stream in 0..world.config.streams {
            let Ok(image) = world.open().await else { return Ok(false) };
            world.stream(&image).await?;
            if stream + 1 < world.config.streams {
                if world.close(image).await.is_err() || world.between().await.is_err() {
                    return Ok(false);
                }
            } else {
                for _ in 0..2 {
                    run.flushes.push(world.flush(&image).await?);
                }
            }
        }
        Ok::<_, String>(true)
    });
    run.finished = result?;
    Ok(run)
}

/// The states that the run may have left are all good, and the image goes on without the fault.
fn judge(judge: &mut Judge, run: &mut Run) -> Result<(), String> {
    run.world.file.clear_rules();
    run.world.data.iter().for_each(SimStorage::clear_rules);
    run.world.cut("end");
    for case in &run.world.cases {
        judge.judge(&run.world.config, case).map_err(|error| format!("{}: {error}", case.label))?;
    }
    Ok(())
}

/// The operations of a run without faults.
fn log(seed: u64, side: Side) -> Vec<Record> {
    let run = run(config(seed, side), side, None).expect("nothing fails");
    assert!(run.finished && run.flushes == [Ok(()), Ok(())], "seed {seed}");
    run.storage(side).log()
}

/// Every place, or some that differ from seed to seed.
fn places(seed: u64, count: usize) -> Vec<usize> {
    if full() {
        return (0..count).collect();
    }
    let step = (count / PLACES).max(1);
    (0..count).skip(usize::try_from(seed).unwrap_or(0) % step).step_by(step).collect()
}

/// Lets operations of these kinds fail in turn. Each kind must be there.
fn sweep(side: Side, errno: Errno, kinds: &[OpKind]) {
    let mut judging = Judge::new();
    let mut hit = Vec::new();
    let (mut failed, mut told) = (0u64, 0);
    for seed in 1..=SEEDS {
        let log = log(seed, side);
        let wanted: Vec<Record> =
            log.into_iter().filter(|record| kinds.contains(&record.kind)).collect();
        for place in places(seed, wanted.len()) {
            let record = wanted[place];
            let fault = (When::number(record.number), Fault::Fail(errno));
            let checked = run(config(seed, side), side, Some(fault)).and_then(|mut run| {
                let again = run.storage(side).log();
                if again.contains(&record) && !hit.contains(&record.kind) {
                    hit.push(record.kind);
                }
                judge(&mut judging, &mut run)?;
                told += u64::from(run.is_told(errno));
                failed += 1;
                consequences(&run, side, record, errno)
            });
            checked.unwrap_or_else(|error| {
                panic!("seed {seed}, {side:?}, {record:?} fails with {errno}: {error}")
            });
        }
    }
    let states = judging.judged;
    println!(
        "{states} states; {hit:?} of {side:?}: {failed} failed with {errno}, {told} told by name"
    );
    for kind in kinds {
        assert!(hit.contains(kind), "no run has an operation of the kind {kind:?}");
    }
}

/// What must follow from the failure of one operation.
fn consequences(run: &Run, side: Side, record: Record, errno: Errno) -> Result<(), String> {
    if !run.finished {
        // Who opened, closed or changed the image was told.
        return Ok(());
    }
    let flushed = &run.flushes;
    let lasts = errno != Errno::NOSPC || record.kind == OpKind::Flush;
    if flushed[0].is_err() && flushed[1] != Err(Errno::IO) && lasts {
        return Err(format!("a failed flush was forgotten: {flushed:?}"));
    }
    let errors = run.world.shore.errors.borrow();
    if errno == Errno::NOSPC && record.kind != OpKind::Flush && flushed[1].is_err() {
        return Err(format!("there is room again and it does not go on: {flushed:?}, {errors:?}"));
    }
    match record.kind {
        OpKind::Flush => {
            let noticed = flushed.iter().any(Result::is_err)
                || !errors.is_empty()
                || run.warnings.tell_of(record.number);
            if noticed { Ok(()) } else { Err("nobody was told that a flush failed".into()) }
        }
        OpKind::Write | OpKind::WriteZeroes => {
            // A write that failed after some progress is not over: the engine, or the client that
            // is told how far it came, does the rest, and meets the fault again if it is still
            // there. A write-back that finds no room loses nothing: all of it is dirty again, and
            // the next flush was good.
            let excused = run.has_traced(SHORT)
                || run.warnings.tell_of(record.number)
                || run.was_repeated(side, record)
                || errno == Errno::NOSPC && run.has_traced(WRITE_BACK) && flushed[1].is_ok();
            if run.is_told(errno) || excused {
                Ok(())
            } else {
                Err(format!("nobody was told of it: {flushed:?}, {errors:?}"))
            }
        }
        // Giving space back, reserving it ahead and cutting off what is left of that may fail: the
        // disk reads the same. A read may have been for counts of clusters that are to be freed:
        // they are leaked.
        _ => Ok(()),
    }
}

#[test]
fn any_operation_that_fails_with_eio_leaves_a_sound_image() {
    use OpKind::{Discard, Read, Write};
    sweep(Side::Image, Errno::IO, &[Read, Write, Discard]);
}

#[test]
fn any_operation_of_a_data_file_that_fails_with_eio_leaves_a_sound_image() {
    use OpKind::{Discard, Read, Write, WriteZeroes};
    sweep(Side::Data, Errno::IO, &[Read, Write, Discard, WriteZeroes]);
}

#[test]
fn any_flush_that_fails_is_told_and_not_forgotten() {
    for side in [Side::Image, Side::Data] {
        sweep(side, Errno::IO, &[OpKind::Flush]);
        // Whatever it says: what it was to make durable may be lost.
        sweep(side, Errno::NOSPC, &[OpKind::Flush]);
    }
}

#[test]
fn any_operation_that_finds_no_space_leaves_an_image_that_goes_on() {
    sweep(Side::Image, Errno::NOSPC, &[OpKind::Write]);
    sweep(Side::Data, Errno::NOSPC, &[OpKind::Write, OpKind::WriteZeroes]);
}

/// Nothing fits behind `limit` until there is room again; the image stays open. Returns whether a
/// client was told.
fn full_at(seed: u64, limit: u64) -> Result<(bool, Run), String> {
    use OpKind::{Preallocate, SetLen, Write, WriteZeroes};
    let mut runtime = runtime();
    let mut world = World::new(runtime.ring().clone(), config(seed, Side::Image), Taken::Honest);
    world.tolerate_faults();
    for kind in [Write, WriteZeroes, SetLen, Preallocate] {
        world.file.on(When::kind(kind).at(limit..u64::MAX), Fault::Fail(Errno::NOSPC));
    }
    let warnings = Warnings::default();
    let mut run = Run { world, flushes: Vec::new(), finished: true, warnings };
    let told = runtime.block_on(async {
        let world = &mut run.world;
        let image = world.open().await?;
        world.stream(&image).await?;
        let _ = world.flush(&image).await?;
        let errors = std::mem::take(&mut *world.shore.errors.borrow_mut());
        let no_space = format!(": {}", Errno::NOSPC);
        if let Some(other) = errors.iter().find(|error| !error.ends_with(&no_space)) {
            return Err(format!("a full disk is told as {other:?}"));
        }
        world.file.clear_rules();
        world.stream(&image).await?;
        if let Some(error) = world.shore.errors.borrow().first() {
            return Err(format!("there is room again: {error}"));
        }
        let flushed = world.flush(&image).await?;
        flushed.map_err(|errno| format!("there is room again: flush: {errno}"))?;
        world.close(image).await?;
        Ok::<_, String>(!errors.is_empty())
    });
    Ok((told?, run))
}

#[test]
fn disk_that_is_full_at_any_length_goes_on_when_there_is_room() {
    let mut judging = Judge::new();
    for seed in 1..=SEEDS {
        let log = log(seed, Side::Image);
        let end = log.iter().map(|record| record.offset + record.len).max().unwrap_or(0);
        let start = Shape::make(&config(seed, Side::Image).shape).len() as u64;
        let step = ((end - start) / if full() { 400 } else { 25 }).max(512);
        let mut told = 0;
        for limit in (start..end).step_by(usize::try_from(step).expect("small")) {
            let checked = full_at(seed, limit).and_then(|(is_told, mut run)| {
                told += u64::from(is_told);
                judge(&mut judging, &mut run)
            });
            checked.unwrap_or_else(|error| panic!("seed {seed}, full at {limit:#x}: {error}"));
        }
        assert!(told > 0, "seed {seed}: no client met the full disk");
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
            let warnings = Warnings::default();
            let mut run = Run { world, flushes: Vec::new(), finished: false, warnings };
            judge(&mut judging, &mut run)
        });
        checked.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    println!("{} states", judging.judged);
}
