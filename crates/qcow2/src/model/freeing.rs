//! Model of how clusters become free: discards, flushes, a write that waits for space and reads,
//! all at once.
//!
//! Promises: a failure prints the schedule, which repeats it; only tests build it. Real code:
//! `unlinked.rs`, `grace.rs`, `registry.rs` (the gate of the checkpoints), `slices.rs` (the table,
//! and what is dirty in it) and the reference counts, behind a simulated lock. `checkpoint.rs` and
//! `reclaim.rs` need a ring and a storage: in [`image`] each of their steps has a method of the
//! same name that does the same in the same order, on a disk in memory ([`world`]). A change of
//! them is made there too.
//!
//! For each [`Mistake`] the model finds a schedule that goes wrong: that it sees what it is to see.

mod image;
mod world;

use shuttle::future::block_on;
use shuttle::rand::{Rng, thread_rng};
use shuttle::{check_random, thread};

use super::WORDS;
use image::Image;
use world::host;

/// Schedules to try: about a second. Ten times as many with `RINGDISK_FULL=1`.
const SCHEDULES: usize = 2000;
/// Schedules in which a mistake has to show: many more than any of them took.
const SCHEDULES_OF_MISTAKE: usize = 20_000;

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A cluster is unlinked before its entry is changed.
    UnlinkFirst,
    /// A checkpoint copies the tables before it takes what is unlinked.
    CopyFirst,
    /// What is unlinked counts as durable before the last barrier.
    DurableEarly,
    /// Clusters are freed without a look at the graces.
    NoGrace,
    /// The counts of what is linked are not waited for.
    NoFirstBarrier,
    /// A checkpoint serves the flushes that came while it ran.
    ServesLate,
    /// A checkpoint that fails has served.
    ServesFailed,
    /// A checkpoint settles the changes that were made while it ran.
    SettlesLate,
    /// How often clusters were freed is asked after the attempt to get one.
    SeenLate,
    /// A write that waits looks at the unlinked clusters while a checkpoint runs.
    NoGate,
}

/// Lets other threads run for up to about `most` steps each: what takes long meets each step of
/// theirs.
fn pause(most: usize) {
    let steps = thread_rng().gen_range(0..=most);
    (0..steps).for_each(|_| thread::yield_now());
}

/// Flushes: all that was answered before is on the disk.
fn flush(image: &Image) {
    pause(60);
    let answered = image.world(|world| world.answered);
    if block_on(image.flush()).is_ok() {
        image.world(|world| world.require_stable(answered));
    }
}

/// Reads, and makes durable what was seen.
fn read(image: &Image, word: usize) {
    pause(60);
    let mut seen = [0; WORDS];
    seen[word] = image.read(word);
    if block_on(image.flush_mapping()).is_ok() {
        image.world(|world| world.require_stable(seen));
    }
}

/// * `failures`: checkpoints that fail, the first ones.
fn all_at_once(failures: u64, mistake: Mistake, schedules: usize) {
    let run = move || {
        let image = Image::new(failures, mistake);
        let spawn = |work: fn(&Image)| {
            let image = image.clone();
            thread::spawn(move || work(&image))
        };
        let threads = [
            spawn(|image| (0..2).for_each(|word| image.discard(word))),
            spawn(|image| (0..4).for_each(|_| flush(image))),
            spawn(|image| (0..2).for_each(|_| flush(image))),
            spawn(|image| [0, 2, 1].into_iter().for_each(|word| read(image, word))),
            spawn(|image| [1, 2, 2].into_iter().for_each(|word| read(image, word))),
            spawn(|image| (0..3).for_each(|_| _ = block_on(image.write(2)))),
        ];
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        // No request is in flight: all that was unlinked becomes free, and the two clusters can be
        // had.
        if host(image.entry(2)) != 0 {
            image.discard(2);
        }
        (0..=failures).for_each(|_| flush(&image));
        assert_eq!(image.world(|world| world.on_their_way()), 0, "a cluster is lost");
        assert!(!image.unlinked.is_busy());
        assert!(block_on(image.write(0)), "a cluster is lost");
        assert!(block_on(image.write(1)), "a cluster is lost");
    };
    check_random(run, schedules);
}

fn schedules() -> usize {
    if std::env::var_os("RINGDISK_FULL").is_some() { SCHEDULES * 10 } else { SCHEDULES }
}

#[test]
fn clusters_become_free_when_nobody_can_use_them_and_are_never_lost() {
    all_at_once(0, Mistake::None, schedules());
}

#[test]
fn a_checkpoint_that_fails_loses_nothing() {
    all_at_once(2, Mistake::None, schedules());
}

macro_rules! mistakes {
    ($($name:ident: $failures:literal, $mistake:ident, $message:literal;)*) => {$(
        #[test]
        #[should_panic(expected = $message)]
        fn $name() {
            all_at_once($failures, Mistake::$mistake, SCHEDULES_OF_MISTAKE);
        }
    )*};
}

// That the model sees them.
mistakes! {
    unlinked_before_its_entry_is_changed: 0, UnlinkFirst, "is named and";
    tables_copied_before_the_unlinked: 0, CopyFirst, "is named and";
    durable_before_the_barrier: 0, DurableEarly, "is named and";
    freed_within_a_grace: 0, NoGrace, "is read and free";
    linked_before_it_is_counted: 0, NoFirstBarrier, "is named and not counted";
    a_flush_served_by_a_checkpoint_before_it: 0, ServesLate, "a flush left changes out";
    a_flush_served_by_a_checkpoint_that_failed: 4, ServesFailed, "a flush left changes out";
    settled_without_being_written: 0, SettlesLate, "a flush left changes out";
    freed_between_attempt_and_look: 0, SeenLate, "full, and clusters are free";
    a_look_at_unlinked_clusters_out_of_turn: 0, NoGate, "full, and clusters are";
}
