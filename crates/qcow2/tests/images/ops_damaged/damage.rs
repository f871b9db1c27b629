//! What can be wrong with an image.

use crate::common::MIB;
use crate::ops_damaged::image::{CLUSTER, COPIED, Contents, OFFSET};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    Disk,
    Snapshot(char),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Damage {
    /// A cluster of data is counted once less.
    DataCount,
    /// And an L2 table.
    TableCount,
    /// An L2 entry names a free cluster, or so many clusters past the end of the file.
    EntryFree,
    EntryPast(u64),
    /// An L1 entry does.
    TableFree,
    TablePast(u64),
    /// An L2 entry names the L2 table that it is in, the L1 table of the disk, a refcount block.
    EntryTable,
    EntryL1,
    EntryBlock,
    /// And the refcount table.
    EntryCounts,
    /// An L2 entry, or an L1 entry, names what the disk has 2 MiB further on (past the last
    /// place: at the first).
    EntryOther,
    TableOther,
    /// A cluster of data lies at the end of the file, and is not counted.
    DataLast,
    /// An L2 table lies there, counted once however many use it.
    TableLast,
}

pub(crate) const DAMAGES: [Damage; 16] = [
    Damage::DataCount,
    Damage::TableCount,
    Damage::EntryFree,
    Damage::EntryPast(0),
    Damage::EntryPast(1),
    Damage::TableFree,
    Damage::TablePast(0),
    Damage::TablePast(1),
    Damage::EntryTable,
    Damage::EntryL1,
    Damage::EntryBlock,
    Damage::EntryCounts,
    Damage::EntryOther,
    Damage::TableOther,
    Damage::DataLast,
    Damage::TableLast,
];

impl Damage {
    /// * `place`: of the cluster; the disk has those of its own there, 20 KiB on one that it shares
    ///   with snapshot t, 40 KiB on one that it shares with both.
    pub(crate) fn make(self, good: &Contents, of: Of, place: u64) -> Contents {
        let mut bytes = good.clone();
        let l1 = match of {
            Of::Disk => bytes.active(),
            Of::Snapshot(name) => bytes.snapshot(name).expect("there is one"),
        };
        let entry_at = bytes.entry_at(l1, place);
        let table_at = l1.0 + 8 * (place / CLUSTER / (CLUSTER / 8));
        let end = bytes.clusters() * CLUSTER;
        let host = |at| bytes.word(at) & OFFSET;
        let (l1_of_disk, block) = (bytes.active().0, bytes.word(bytes.word(48)));
        let (data, table, free) = (host(entry_at), host(table_at), bytes.free());
        match self {
            Damage::DataCount => bytes.set_count(data, bytes.count(data) - 1),
            Damage::TableCount => bytes.set_count(table, bytes.count(table) - 1),
            Damage::EntryFree => bytes.set(entry_at, free | COPIED),
            Damage::EntryPast(by) => bytes.set(entry_at, (end + by * CLUSTER) | COPIED),
            Damage::TableFree => bytes.set(table_at, free | COPIED),
            Damage::TablePast(by) => bytes.set(table_at, (end + by * CLUSTER) | COPIED),
            Damage::EntryTable => bytes.set(entry_at, table | COPIED),
            Damage::EntryL1 => bytes.set(entry_at, l1_of_disk | COPIED),
            Damage::EntryBlock => bytes.set(entry_at, block | COPIED),
            Damage::EntryCounts => bytes.set(entry_at, bytes.word(48) | COPIED),
            Damage::EntryOther | Damage::TableOther => {
                let other = (place + 2 * MIB) % (6 * MIB);
                let disk = bytes.active();
                let table = disk.0 + 8 * (other / CLUSTER / (CLUSTER / 8));
                let is_table = matches!(self, Damage::TableOther);
                let (at, from) = if is_table {
                    (table_at, table)
                } else {
                    (entry_at, bytes.entry_at(disk, other))
                };
                bytes.set(at, bytes.word(from));
            }
            Damage::DataLast => {
                bytes.copy_to_end(data);
                bytes.set_count(data, bytes.count(data) - 1);
                bytes.set(entry_at, end);
            }
            Damage::TableLast => {
                bytes.copy_to_end(table);
                bytes.set_count(table, 0);
                bytes.set_count(end, 1);
                let l1s = bytes.snapshots().into_iter().map(|(_, l1)| l1).chain([bytes.active()]);
                let entries = l1s.flat_map(|l1| (0..u64::from(l1.1)).map(move |i| l1.0 + 8 * i));
                for at in entries.collect::<Vec<_>>() {
                    if bytes.word(at) & OFFSET == table {
                        bytes.set(at, end | bytes.word(at) & COPIED);
                    }
                }
            }
        }
        bytes
    }
}
