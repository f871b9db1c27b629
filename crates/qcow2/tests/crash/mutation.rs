//! Every barrier has a use: without it some state is wrong, and these tests see that.
//!
//! The states are those that could be left if the last flush of the image file had been a lie: any
//! part of what it covered may be missing although something that came after it is there. A barrier
//! is told by what was written before it and after it.

use std::rc::Rc;

use ringdisk_testkit::layout::Class;

use crate::common::runtime;
use crate::config::{Between, Config, Medium, Wanted};
use crate::judge::Judge;
use crate::world::{Taken, World};

/// A barrier that must be there.
struct Needed {
    name: &'static str,
    /// What it makes durable …
    before: &'static [Class],
    /// … before one of these is written; empty: before a flush is answered.
    after: &'static [Class],
    /// Runs in which it is needed.
    runs: Wanted,
}

const PLAIN: Wanted = Wanted {
    between: None,
    lazy: false,
    data_file: false,
    backing: false,
    compressed: false,
    bitmap: false,
    full_table: false,
    medium: Medium::File,
    data_raw: false,
    live: false,
};
const CHANGES: Wanted = Wanted { between: Some(Between::Both), ..PLAIN };
const LAZY: Wanted = Wanted { between: Some(Between::Reopen), lazy: true, ..PLAIN };
const FULL_TABLE: Wanted = Wanted { full_table: true, ..PLAIN };
const DATA_FILE: Wanted = Wanted { data_file: true, ..PLAIN };
const BITMAP: Wanted = Wanted { between: Some(Between::Reopen), bitmap: true, ..PLAIN };

use Class::{Bitmaps, Data, Free, Header, L1, L2, RefcountBlock, RefcountTable, SnapshotTable};

/// The barriers of `docs/qcow2.md`. (Not the one behind the dirty bit alone: the first barrier of
/// the checkpoint that brings the first table covers that bit too, so no state can miss it. The
/// same write takes back autoclear bits, which need it.)
const NEEDED: [Needed; 18] = [
    Needed {
        name: "data, the table that links it",
        before: &[Data],
        after: &[L2, L1],
        runs: PLAIN,
    },
    Needed {
        name: "counts, the table that refers",
        before: &[RefcountBlock],
        after: &[L2, L1],
        runs: PLAIN,
    },
    Needed {
        name: "a new refcount block, the table that names it",
        before: &[RefcountBlock],
        after: &[RefcountTable],
        runs: FULL_TABLE,
    },
    Needed {
        name: "a larger refcount table, the header",
        before: &[RefcountTable],
        after: &[Header],
        runs: FULL_TABLE,
    },
    Needed {
        name: "data in a data file, the table that links it",
        before: &[Data],
        after: &[L2],
        runs: DATA_FILE,
    },
    Needed {
        name: "data in a data file, the answer to a flush",
        before: &[Data],
        after: &[],
        runs: DATA_FILE,
    },
    Needed { name: "a new table, the one that links it", before: &[L2], after: &[L1], runs: PLAIN },
    Needed { name: "data, the answer to a flush", before: &[Data], after: &[], runs: PLAIN },
    Needed { name: "tables, the answer to a flush", before: &[L2], after: &[], runs: PLAIN },
    Needed { name: "the L1 table, the answer to a flush", before: &[L1], after: &[], runs: PLAIN },
    Needed {
        name: "tables, other use of what they left",
        before: &[L2],
        after: &[Data, Free],
        runs: PLAIN,
    },
    Needed {
        name: "new counts, the header",
        before: &[RefcountBlock, RefcountTable],
        after: &[Header],
        runs: CHANGES,
    },
    Needed { name: "new tables, the header", before: &[L1, L2], after: &[Header], runs: CHANGES },
    Needed {
        name: "a new snapshot table, the header",
        before: &[SnapshotTable],
        after: &[Header],
        runs: CHANGES,
    },
    Needed {
        name: "the header, other use of what it left",
        before: &[Header],
        after: &[Free],
        runs: CHANGES,
    },
    Needed {
        name: "counts, the header without the dirty bit",
        before: &[RefcountBlock],
        after: &[Header],
        runs: LAZY,
    },
    Needed {
        name: "the mark of a bitmap, the first write",
        before: &[Bitmaps],
        after: &[L2, Data, Free],
        runs: BITMAP,
    },
    Needed {
        name: "the contents of a bitmap, the header that calls it good",
        before: &[Bitmaps],
        after: &[Header],
        runs: BITMAP,
    },
];

/// States without a barrier that are looked at before it counts as one that nobody misses.
const STATES_MAX: u64 = 60_000;

/// Runs before one that is never seen counts so too.
const SEEDS: u64 = 2000;

/// Takes runs of one kind until each of `needed` was missed. Returns the states and wrong states
/// for each.
fn miss(needed: &[&Needed]) -> Vec<(u64, u64)> {
    let mut judge = Judge::new();
    let mut seed = 1;
    let mut found = vec![(0, 0); needed.len()];
    while judge.judged < STATES_MAX && seed < SEEDS && found.iter().any(|(_, wrong)| *wrong == 0) {
        let mut runtime = runtime();
        let config = Config::new(seed, needed[0].runs);
        let mut world = World::new(runtime.ring().clone(), config, Taken::WithoutLastFlush);
        runtime.block_on(world.run()).expect("the engine itself sees no lie");
        let config: Rc<Config> = world.config.clone();
        for case in &world.cases {
            let barrier = case.barrier.as_ref().expect("asked for");
            let about = |n: &&Needed| barrier.is_between(n.before, n.after);
            if !needed.iter().any(about) {
                continue;
            }
            let wrong = judge.judge(&config, case).is_err();
            for (needed, found) in needed.iter().zip(&mut found) {
                let counts = u64::from(about(needed));
                *found = (found.0 + counts, found.1 + counts * u64::from(wrong));
            }
        }
        seed += 1;
    }
    found
}

fn no_barrier_is_missed(runs: Wanted) {
    let needed: Vec<&Needed> = NEEDED.iter().filter(|needed| needed.runs == runs).collect();
    let found = miss(&needed);
    for (needed, (seen, wrong)) in needed.iter().zip(&found) {
        println!("{wrong} of {seen} states are wrong without the barrier between {}", needed.name);
    }
    for (needed, (seen, wrong)) in needed.iter().zip(&found) {
        assert!(*wrong > 0, "{}: no test misses this barrier ({seen} states)", needed.name);
    }
}

#[test]
fn no_barrier_of_plain_writing_is_missed() {
    no_barrier_is_missed(PLAIN);
}

#[test]
fn no_barrier_of_snapshots_and_resizes_is_missed() {
    no_barrier_is_missed(CHANGES);
}

#[test]
fn no_barrier_of_lazy_refcounts_is_missed() {
    no_barrier_is_missed(LAZY);
}

#[test]
fn no_barrier_of_a_larger_refcount_table_is_missed() {
    no_barrier_is_missed(FULL_TABLE);
}

#[test]
fn no_barrier_of_a_data_file_is_missed() {
    no_barrier_is_missed(DATA_FILE);
}

#[test]
fn no_barrier_of_a_bitmap_is_missed() {
    no_barrier_is_missed(BITMAP);
}
