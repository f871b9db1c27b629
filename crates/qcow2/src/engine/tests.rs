//! What a write to a part of a cluster needs, for each kind of entry.

use crate::concurrent::region::Region;
use crate::engine::action::{Action, Copy, Words, bitmap};
use crate::entry::{COMPRESSED, COPIED, Rules, ZERO};
use crate::geometry::Geometry;
use crate::units::{Bytes, HostCluster, HostOffset};

const CLUSTER: u64 = 64 << 10;
const SUBCLUSTER: u64 = CLUSTER / 32;
const HOST: u64 = 16 * CLUSTER;

fn rules(extended: bool) -> Rules {
    Rules::new(&Geometry::new(Bytes(1 << 30), 16, extended), 3, false, [Region::default(); 3])
}

fn words(entry: u64, bitmap: u64) -> Words {
    Words { entry, bitmap }
}

#[test]
fn own_data_is_overwritten_in_place() {
    let action = rules(false).action(words(HOST | COPIED, 0), Bytes(100), Bytes(200));
    assert_eq!(action, Action::InPlace { host: HostOffset(HOST) });
}

#[test]
fn reserved_zeroes_keep_their_place_and_the_rest_of_them_is_written() {
    let action = rules(false).action(words(HOST | COPIED | ZERO, 0), Bytes(100), Bytes(200));
    let copy = Copy { head: Bytes::ZERO..Bytes(100), tail: Bytes(200)..Bytes(CLUSTER), bitmap: 0 };
    assert_eq!(action, Action::Reuse { host: HostOffset(HOST), copy });
}

#[test]
fn what_a_snapshot_has_too_or_is_compressed_or_missing_gets_a_new_cluster() {
    for entry in [HOST, HOST | ZERO, COMPRESSED | HOST, 0, ZERO] {
        let action = rules(false).action(words(entry, 0), Bytes(100), Bytes(200));
        let copy =
            Copy { head: Bytes::ZERO..Bytes(100), tail: Bytes(200)..Bytes(CLUSTER), bitmap: 0 };
        assert_eq!(action, Action::Fresh { copy }, "{entry:#x}");
    }
}

#[test]
fn subclusters_are_filled_up_to_their_borders_only() {
    let from = Bytes(3 * SUBCLUSTER + 512);
    let to = Bytes(5 * SUBCLUSTER + 512);
    let copy = Copy {
        head: Bytes(3 * SUBCLUSTER)..from,
        tail: to..Bytes(6 * SUBCLUSTER),
        bitmap: bitmap(0b11_1000, 0b1),
    };
    let nothing = rules(true).action(words(0, bitmap(0, 0b1_0001)), from, to);
    assert_eq!(nothing, Action::Fresh { copy: copy.clone() });
    let own = rules(true).action(words(HOST | COPIED, bitmap(0, 0b1_0001)), from, to);
    assert_eq!(own, Action::Reuse { host: HostOffset(HOST), copy });
}

#[test]
fn subclusters_that_are_there_are_not_written_again() {
    let from = Bytes(3 * SUBCLUSTER + 512);
    let to = Bytes(5 * SUBCLUSTER + 512);
    let own = rules(true).action(words(HOST | COPIED, bitmap(0b10_1000, 0)), from, to);
    let copy = Copy { head: from..from, tail: to..to, bitmap: bitmap(0b11_1000, 0) };
    assert_eq!(own, Action::Reuse { host: HostOffset(HOST), copy });
    let all = rules(true).action(words(HOST | COPIED, bitmap(0b11_1000, 0)), from, to);
    assert_eq!(all, Action::InPlace { host: HostOffset(HOST) });
}

#[test]
fn subclusters_of_a_snapshot_move_along() {
    let (from, to) = (Bytes(3 * SUBCLUSTER + 512), Bytes(4 * SUBCLUSTER));
    let shared = rules(true).action(words(HOST, bitmap(0b1000_0010, 0b100)), from, to);
    let copy = Copy {
        head: Bytes(SUBCLUSTER)..from,
        tail: to..Bytes(8 * SUBCLUSTER),
        bitmap: bitmap(0b1000_1010, 0b100),
    };
    assert_eq!(shared, Action::Fresh { copy });
}

#[test]
fn a_compressed_entry_refers_to_every_cluster_that_it_touches() {
    let rules = rules(false);
    let entry = rules.compressed_entry(HostOffset(HOST + CLUSTER - 100), Bytes(5000));
    let reference = rules.reference(words(entry, 0)).expect("a reference");
    assert_eq!((reference.start, reference.count), (HostCluster(16), 2));
    assert_eq!(rules.compressed_place(entry).0, HostOffset(HOST + CLUSTER - 100));
}

#[test]
fn entries_that_cannot_be_right_are_refused() {
    for entry in [HOST | COPIED | 2, HOST + 512, COMPRESSED | COPIED | HOST, 1 << 57] {
        assert!(rules(false).check_words(words(entry, 0)).is_err(), "{entry:#x}");
    }
    assert!(rules(true).check_words(words(0, 1)).is_err(), "data without a cluster");
    assert!(
        rules(true).check_words(words(HOST | COPIED, (1 << 32) | 1)).is_err(),
        "data and zeroes"
    );
}
