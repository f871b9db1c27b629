//! The table of changes: every change of a disk in use × every storage operation of it that fails or is held
//! for a while × every kind of request that a client has in flight.
//!
//! Whatever fails: a change that is refused leaves the disk as it was (its bytes, its size; it takes writes; its
//! bitmaps record and are valid after the close; the images are sound), and made again it succeeds. A change
//! that succeeds is complete. A bitmap that says that it is valid has a bit wherever the content differs from
//! what it was when the bitmap was made.
//!
//! A seeded part of the table runs in each test run, all of it with `RINGDISK_FULL=1`.

mod clients;
mod judge;
mod world;

use ringdisk_testkit::sim::Prng;

use super::run;
use clients::Request;
use world::{Cell, Change, Fixture, Injected, Victim};

/// Cells of the seeded part, for each change.
const CELLS: u64 = 24;
/// Operations of a storage that no change makes: a table longer than this is a loop that does not end.
const OPERATIONS_MAX: u64 = 2000;

/// Runs the cells of one change.
fn table(change: Change) {
    let is_full = std::env::var_os("RINGDISK_FULL").is_some();
    let fixture = Fixture::new(change);
    run(async |ring| {
        let mut prng = Prng::new(15 + change as u64);
        let mut reached = 0u64;
        for victim in [Victim::Top, Victim::Base] {
            let quiet = Cell {
                change,
                request: Request::Read,
                victim,
                number: u64::MAX,
                injected: Injected::Hold,
            };
            let operations = judge::judge(&ring, &fixture, quiet).await.operations;
            assert!(operations < OPERATIONS_MAX, "{change:?} makes {operations} operations");
            // What clients do in between shifts the numbers a little.
            let numbers = if operations == 0 { 0 } else { operations + 8 };
            let all = numbers * Request::ALL.len() as u64 * Injected::ALL.len() as u64;
            let wanted = if is_full { all } else { CELLS.min(all) };
            for index in 0..wanted {
                let index = if is_full { index } else { prng.below(all) };
                let requests = Request::ALL.len() as u64;
                let cell = Cell {
                    change,
                    victim,
                    request: Request::ALL[usize::try_from(index % requests).expect("small")],
                    injected: Injected::ALL[usize::try_from(index / requests % 3).expect("small")],
                    number: index / requests / 3,
                };
                reached += u64::from(judge::judge(&ring, &fixture, cell).await.reached);
            }
        }
        assert!(reached > 0, "{change:?}: no operation failed");
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
fn another_backing_file_is_taken_or_refused() {
    table(Change::Backing);
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
fn a_disk_is_closed_or_goes_on() {
    table(Change::Close);
}
