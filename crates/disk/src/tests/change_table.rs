//! The table of changes: every change of a disk in use × every storage operation of it that fails
//! or is held for a while × every kind of request that a client has in flight. The disks: chains of
//! qcow2 images, of both versions; with a layer between, over a raw image, with an external data
//! file, raw or not; and a raw image. Operations of all of their files fail, and those of a new
//! overlay.
//!
//! Whatever fails: a change that is refused leaves the disk as it was (its bytes, its size; it
//! takes writes; its bitmaps record and are valid after the close; the images are sound), and made
//! again it succeeds. A change that succeeds is complete. A bitmap that says that it is valid has a
//! bit wherever the content differs from what it was when the bitmap was made.
//!
//! Where a change allows it, some of its cells have a checkpoint running, and its fleecing file is
//! one of the storages whose operations fail: the frozen state is what it was, or the checkpoint
//! has failed; no request of a client has. In some cells clients wait for a limit of the disk.
//!
//! A mirror is a change with one storage more, its target: no failure of that is one of a client,
//! until the disk has switched over to it. So is a backup, whose disk stays where it is. Where a
//! mirror copies what the top has, or nothing, a client writes once more while the target is in
//! step. A read of the whole disk that keeps what it reads (copy-on-read) is a change, too, and
//! fails only where a read of a storage does.
//!
//! Two failures may leave a disk that answers with errors until it is opened again, and a change
//! that was made although an error was told; never wrong bytes, damaged images, or a bitmap that is
//! wrong.
//!
//! A seeded part of the table runs in each test run, a quarter of it with `RINGDISK_QUICK=1`. With
//! `RINGDISK_FULL=1` all of it for the usual chain, and a larger part for the other disks and for
//! pairs.

mod changes;
mod clients;
mod frozen;
mod judge;
mod world;

use ringdisk_testkit::limits::{full, quick};
use ringdisk_testkit::sim::Prng;

use super::run;
use clients::Request;
use world::{Cell, Change, Fixture, Injected, Shape, Victim};

/// Cells of the seeded part, for each change and storage: of the usual chain, and of each other
/// disk.
const CELLS: u64 = 24;
const CELLS_OF_OTHERS: u64 = 8;
/// All cells of the usual chain run with `RINGDISK_FULL=1`, and so many of each other disk.
const CELLS_OF_OTHERS_IN_FULL: u64 = 300;
/// Cells with two failures, and how many operations apart these are at most.
const PAIRS: u64 = 6;
const PAIRS_IN_FULL: u64 = 200;
const APART: u64 = 24;
/// The part of these with `RINGDISK_QUICK=1`.
const QUICK: u64 = 4;
/// One of so many cells has a disk with a limit, for which its clients wait.
const LIMITED: u64 = 8;
/// Operations of a storage that no change makes: a table longer than this is a loop that does not
/// end.
const OPERATIONS_MAX: u64 = 2000;

/// Runs the cells of one change.
fn table(change: Change) {
    for shape in change.shapes() {
        table_of(change, *shape);
    }
}

fn table_of(change: Change, shape: Shape) {
    let is_full = full();
    let part = if quick() { QUICK } else { 1 };
    let fixture = Fixture::new(change, shape);
    run(async |ring| {
        let mut prng = Prng::new(15 + change as u64 + 100 * shape as u64);
        let mut reached = 0u64;
        for victim in fixture.world(change).victims() {
            let quiet = Cell {
                change,
                shape,
                request: Request::Read,
                victim,
                number: u64::MAX,
                again: None,
                injected: Injected::Hold,
                is_frozen: victim == Victim::Fleece,
                is_limited: false,
            };
            let operations = judge::judge(&ring, &fixture, quiet).await.operations;
            assert!(operations < OPERATIONS_MAX, "{change:?} makes {operations} operations");
            // What clients do in between shifts the numbers a little.
            let numbers = if operations == 0 { 0 } else { operations + 8 };
            let all = numbers * Request::ALL.len() as u64 * Injected::ALL.len() as u64;
            let (wanted, pairs) = match (shape, is_full) {
                (Shape::Chain, true) => (all, PAIRS_IN_FULL),
                (_, true) => (CELLS_OF_OTHERS_IN_FULL.min(all), PAIRS_IN_FULL),
                (Shape::Chain, false) => ((CELLS / part).min(all), PAIRS / part),
                (_, false) => ((CELLS_OF_OTHERS / part).min(all), PAIRS / part),
            };
            for index in 0..wanted + pairs.min(all) {
                let is_pair = index >= wanted;
                let index = if wanted == all && !is_pair { index } else { prng.below(all) };
                let requests = Request::ALL.len() as u64;
                let request = Request::ALL[usize::try_from(index % requests).expect("small")];
                // An image of version 2 with snapshots keeps its size.
                // During a mirror every disk does.
                let keeps_size =
                    change.target().is_some() || shape == Shape::Old && shape.has_snapshots(change);
                let cannot = request == Request::Append && keeps_size;
                let cell = Cell {
                    request: if cannot { Request::Allocate } else { request },
                    injected: match is_pair {
                        true => [Injected::Io, Injected::NoSpace][usize::from(prng.coin())],
                        false => {
                            Injected::ALL[usize::try_from(index / requests % 3).expect("small")]
                        }
                    },
                    number: index / requests / 3,
                    again: is_pair.then(|| prng.below(APART)),
                    is_frozen: victim == Victim::Fleece
                        || change.can_meet_a_checkpoint() && prng.coin(),
                    // Each wait takes real time.
                    is_limited: prng.below(LIMITED) == 0,
                    ..quiet
                };
                reached += u64::from(judge::judge(&ring, &fixture, cell).await.reached);
            }
        }
        // Of the few cells of a quick run all may be behind the last operation.
        assert!(reached > 0 || quick(), "{change:?}: no operation failed");
    });
}

#[test]
fn an_external_snapshot_is_made_or_refused() {
    table(Change::External);
}

#[test]
fn an_internal_snapshot_is_taken_or_refused() {
    table(Change::Create);
}

#[test]
fn an_internal_snapshot_is_applied_or_refused() {
    table(Change::Apply);
}

#[test]
fn an_internal_snapshot_is_deleted_or_refused() {
    table(Change::Delete);
}

#[test]
fn a_commit_is_made_or_refused() {
    table(Change::Commit);
}

#[test]
fn a_commit_through_the_chain_is_made_or_refused() {
    table(Change::CommitThrough);
}

#[test]
fn a_commit_below_the_top_is_made_or_refused() {
    table(Change::CommitBelow);
}

#[test]
fn another_backing_file_is_taken_or_refused() {
    table(Change::Backing);
}

#[test]
fn a_stream_is_made_or_refused() {
    table(Change::Stream);
}

#[test]
fn a_stream_down_to_a_base_is_made_or_refused() {
    table(Change::StreamDown);
}

#[test]
fn a_disk_switches_over_to_another_image_or_stays() {
    table(Change::Mirror);
}

#[test]
fn a_disk_switches_over_to_a_raw_image_in_step_or_stays() {
    table(Change::MirrorRaw);
}

#[test]
fn a_copy_is_left_or_refused() {
    table(Change::MirrorLeft);
}

#[test]
fn a_disk_switches_over_to_another_top_or_stays() {
    table(Change::MirrorTop);
}

#[test]
fn a_disk_switches_over_to_a_target_that_has_it_all_or_stays() {
    table(Change::MirrorNone);
}

#[test]
fn what_is_read_is_kept_or_only_read() {
    table(Change::CopyOnRead);
}

#[test]
fn a_backup_is_made_or_refused() {
    table(Change::Backup);
}

#[test]
fn a_backup_to_a_raw_image_is_made_or_refused() {
    table(Change::BackupRaw);
}

#[test]
fn a_disk_grows_or_stays() {
    table(Change::Grow);
}

#[test]
fn a_disk_grows_with_space_reserved_or_stays() {
    table(Change::GrowFalloc);
}

#[test]
fn a_disk_grows_with_zeroes_written_or_stays() {
    table(Change::GrowFull);
}

#[test]
fn a_disk_shrinks_or_stays() {
    table(Change::Shrink);
}

#[test]
fn a_disk_is_given_away_and_taken_back_or_stays() {
    table(Change::Deactivate);
}

#[test]
fn a_hand_over_that_is_refused_changes_nothing() {
    table(Change::HandOver);
}

#[test]
fn a_checkpoint_is_made_or_refused() {
    table(Change::Checkpoint);
}

#[test]
fn a_disk_is_closed_or_goes_on() {
    table(Change::Close);
}

/// A raw data file is used by itself, too, so a disk that stays as it is must not leave it longer.
#[test]
fn a_raw_data_file_is_as_long_as_the_disk_wherever_a_growth_fails() {
    let (change, shape) = (Change::Grow, Shape::DataRaw);
    let fixture = Fixture::new(change, shape);
    run(async |ring| {
        for number in 0..OPERATIONS_MAX {
            let cell = Cell {
                change,
                shape,
                request: Request::Read,
                victim: Victim::Top,
                number,
                again: None,
                injected: Injected::NoSpace,
                is_frozen: false,
                is_limited: false,
            };
            if !judge::judge(&ring, &fixture, cell).await.reached {
                assert!(number > 0, "no operation failed");
                break;
            }
        }
    });
}
