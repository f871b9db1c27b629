//! The table of changes as NBD clients meet it: every change of a disk in use × every request of
//! the protocol that is in flight then × every storage operation that fails or is held for a while.
//! (What becomes of images and bitmaps: the table of the crate `disk`, which has the same changes.)
//!
//! Four connections, spread over two queue threads, are at work while the change runs. Whatever
//! fails: each request gets one reply with its cookie, with an error only where an operation of the
//! disk's own storage failed (or the disk takes no requests, closed or not active); all connections
//! go on; what was answered is there, also through connections that were open before the change; a
//! change that was refused can be made again.
//!
//! A seeded part runs each time. With `RINGDISK_FULL=1` all cells of the first disk of each change
//! do, and a larger part of those of the other ones.

mod apply;
mod clients;
mod judge;
mod world;

use ringdisk_testkit::limits::full;
use ringdisk_testkit::sim::Prng;

use clients::REQUESTS;
use judge::judge;
use world::{Cell, Change, Fixture, Injected, Shape};

/// Cells of the seeded part, for each change, disk and storage.
const CELLS: u64 = 5;
/// Of the disks that are not the first of a change, with `RINGDISK_FULL=1`.
const CELLS_OF_OTHERS_IN_FULL: u64 = 300;
/// Operations of a storage that no change makes: a table longer than this is a loop that does not
/// end.
const OPERATIONS_MAX: u64 = 2000;

/// Runs the cells of some changes.
fn table(changes: &[Change]) {
    for change in changes {
        for (index, shape) in change.shapes().iter().enumerate() {
            table_of(*change, *shape, index == 0);
        }
    }
}

fn table_of(change: Change, shape: Shape, is_first: bool) {
    let fixture = Fixture::new(change, shape);
    let mut prng = Prng::new(18 + change as u64 + 100 * shape as u64);
    let mut reached = 0u64;
    for victim in fixture.victims(change) {
        let quiet =
            Cell { shape, change, victim, request: 2, injected: Injected::Hold, number: u64::MAX };
        let operations = judge(&fixture, quiet).operations;
        assert!(operations < OPERATIONS_MAX, "{quiet:?} makes {operations} operations");
        let (requests, injected) = (REQUESTS.len() as u64, Injected::ALL.len() as u64);
        let all = operations * requests * injected;
        let wanted = match (full(), is_first) {
            (true, true) => all,
            (true, false) => CELLS_OF_OTHERS_IN_FULL.min(all),
            (false, _) => CELLS.min(all),
        };
        for index in 0..wanted {
            let index = if wanted == all { index } else { prng.below(all) };
            let cell = Cell {
                request: (index % requests) as usize,
                injected: Injected::ALL[(index / requests % injected) as usize],
                number: index / requests / injected,
                ..quiet
            };
            reached += u64::from(judge(&fixture, cell).reached);
        }
    }
    assert!(reached > 0, "{change:?}, {shape:?}: no operation failed");
}

/// A change that the crate `disk` learns has to be met by clients, too.
#[test]
fn the_table_has_all_changes_of_the_crate_disk() {
    let source = include_str!("../../../disk/src/tests/change_table/world.rs");
    let (_, rest) = source.split_once("pub(super) enum Change {").expect("the list");
    let (list, _) = rest.split_once("\n}").expect("its end");
    let lines = list.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let mut theirs: Vec<_> = lines.filter_map(|line| line.strip_suffix(',')).collect();
    let mut ours: Vec<_> = Change::ALL.iter().map(|change| format!("{change:?}")).collect();
    theirs.sort_unstable();
    ours.sort_unstable();
    assert_eq!(ours, theirs);
}

#[test]
fn clients_go_on_while_snapshots_are_made() {
    table(&[Change::External, Change::Create, Change::Apply, Change::Delete]);
}

#[test]
fn clients_go_on_while_the_disk_gets_another_size() {
    table(&[Change::Grow, Change::GrowFalloc, Change::GrowFull, Change::Shrink]);
}

#[test]
fn clients_go_on_while_images_are_committed() {
    table(&[Change::Commit, Change::CommitThrough, Change::CommitBelow]);
}

#[test]
fn clients_go_on_while_images_below_go_away() {
    table(&[Change::Backing, Change::Stream, Change::StreamDown, Change::CopyOnRead]);
}

#[test]
fn clients_go_on_while_a_checkpoint_begins_and_ends() {
    table(&[Change::Checkpoint]);
}

#[test]
fn clients_go_on_while_the_disk_switches_over() {
    table(&[Change::Mirror, Change::MirrorRaw, Change::MirrorTop, Change::MirrorNone]);
}

#[test]
fn clients_go_on_while_a_copy_is_made() {
    table(&[Change::MirrorLeft, Change::Backup, Change::BackupRaw]);
}

#[test]
fn clients_are_answered_while_the_disk_is_given_away_or_closed() {
    table(&[Change::Deactivate, Change::HandOver, Change::Close]);
}
