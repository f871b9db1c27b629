//! Changes of damaged images, each damage × each change: what can be read before shows the same afterwards, what cannot be read does not
//! become bytes of somebody else, or the change is refused.

// Test images are small.
#![allow(clippy::cast_possible_truncation, clippy::large_futures)]

use std::collections::HashSet;

mod common;
#[path = "common/live.rs"]
mod live;

use common::{Images, KIB, MIB, runtime};
use live::{buffer, read, writable};
use ringdisk_qcow2::{Error, ErrorKind, Nothing, Preallocation, Qcow2, ResizeOptions};
use ringdisk_ring::{Errno, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

const CLUSTER: u64 = 4 * KIB;
const SIZE: u64 = 8 * MIB;
const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Where data begins, each in an L2 table of its own; 64 KiB each.
const PLACES: [u64; 3] = [0, 2 * MIB, 4 * MIB];

/// What a cluster of a disk shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// Its first bytes.
    Bytes([u8; 32]),
    /// The entry cannot be right.
    Nothing,
    /// It names metadata, which is rewritten.
    Metadata,
}

/// Where an L1 table lies, and its length.
type L1 = (u64, u32);

/// The bytes of an image.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn word(&self, at: u64) -> u64 {
        let raw = self.0.get(at as usize..at as usize + 8);
        raw.map_or(0, |raw| u64::from_be_bytes(raw.try_into().expect("8 bytes")))
    }

    fn set(&mut self, at: u64, word: u64) {
        self.0[at as usize..at as usize + 8].copy_from_slice(&word.to_be_bytes());
    }

    fn half(&self, at: u64) -> u32 {
        (self.word(at) >> 32) as u32
    }

    /// Clusters of the file.
    fn clusters(&self) -> u64 {
        (self.0.len() as u64).div_ceil(CLUSTER)
    }

    fn active(&self) -> L1 {
        (self.word(40), self.half(36))
    }

    /// The names of all snapshots, one letter each, and their L1 tables.
    fn snapshots(&self) -> Vec<(char, L1)> {
        let mut at = self.word(64);
        let each = |_| {
            at = at.next_multiple_of(8);
            let lens = self.half(at + 12);
            let (id, name) = (u64::from(lens >> 16), u64::from(lens & 0xffff));
            let name_at = at + 40 + u64::from(self.half(at + 36)) + id;
            let entry = (char::from(self.0[name_at as usize]), (self.word(at), self.half(at + 8)));
            at = name_at + name;
            entry
        };
        (0..self.half(60)).map(each).collect()
    }

    fn snapshot(&self, name: char) -> Option<L1> {
        self.snapshots().into_iter().find(|(its, _)| *its == name).map(|(_, l1)| l1)
    }

    /// Where metadata lies that tables name: the tables themselves, and the reference counts.
    fn metadata(&self) -> HashSet<u64> {
        let all = self.snapshots().into_iter().map(|(_, l1)| l1).chain([self.active()]);
        let l1s: Vec<L1> = all.collect();
        let entries = l1s.iter().flat_map(|l1| (0..u64::from(l1.1)).map(|i| l1.0 + 8 * i));
        let tables = entries.map(|at| self.word(at) & OFFSET);
        let others = [self.word(48), self.word(self.word(48)), self.word(64)];
        tables.chain(others).chain(l1s.iter().map(|l1| l1.0)).collect()
    }

    /// What a disk shows, by a reader of its own.
    fn show(&self, l1: L1) -> Vec<Shown> {
        let (len, metadata) = (self.0.len() as u64, self.metadata());
        let mut shown = Vec::new();
        let entries = CLUSTER / 8;
        for table in 0..u64::from(l1.1) {
            let l2 = self.word(l1.0 + 8 * table) & OFFSET;
            for entry in 0..entries {
                if l2 >= len {
                    shown.push(Shown::Nothing);
                    continue;
                }
                let host = if l2 == 0 { 0 } else { self.word(l2 + 8 * entry) & OFFSET };
                let is_zero = host == 0 || self.word(l2 + 8 * entry) & 1 != 0;
                let bytes = self.0.get(host as usize..host as usize + 32);
                shown.push(match bytes {
                    _ if is_zero => Shown::Bytes([0; 32]),
                    _ if metadata.contains(&host) => Shown::Metadata,
                    Some(bytes) => Shown::Bytes(bytes.try_into().expect("32 bytes")),
                    None => Shown::Nothing,
                });
            }
        }
        shown
    }

    /// The host clusters that the entries of a disk name.
    fn hosts(&self, l1: L1) -> Vec<u64> {
        let entries = CLUSTER / 8;
        let all = 0..u64::from(l1.1) * entries;
        let host = |number: u64| {
            let l2 = self.word(l1.0 + 8 * (number / entries)) & OFFSET;
            if l2 == 0 { 0 } else { self.word(l2 + 8 * (number % entries)) & OFFSET }
        };
        all.map(host).collect()
    }

    /// Metadata that an entry names stays that, or belongs to the entry: nobody else gets it.
    fn assert_counted(&self, before: &[Shown], l1: L1, what: &str) {
        for (cluster, (before, host)) in before.iter().zip(self.hosts(l1)).enumerate() {
            if *before == Shown::Metadata && host != 0 {
                assert!(self.count(host) > 0, "{what}: cluster {cluster} names {host:#x}");
            }
        }
    }

    fn count_at(&self, host: u64) -> u64 {
        self.word(self.word(48)) + host / CLUSTER * 2
    }

    fn count(&self, host: u64) -> u16 {
        let at = self.count_at(host) as usize;
        u16::from_be_bytes(self.0[at..at + 2].try_into().expect("2 bytes"))
    }

    fn set_count(&mut self, host: u64, count: u16) {
        let at = self.count_at(host) as usize;
        self.0[at..at + 2].copy_from_slice(&count.to_be_bytes());
    }

    fn free(&self) -> u64 {
        (0..self.clusters()).map(|c| c * CLUSTER).find(|host| self.count(*host) == 0).expect("one")
    }

    /// The file gets one cluster more, a copy.
    fn copy_to_end(&mut self, host: u64) {
        let copy = self.0[host as usize..(host + CLUSTER) as usize].to_vec();
        self.0.extend(copy);
    }

    /// Where the table of the only bitmap lies, if there is one that may be believed.
    fn bitmap_table(&self) -> Option<u64> {
        const MAGIC: [u8; 4] = [0x23, 0x85, 0x28, 0x75];
        let extension = self.0[..CLUSTER as usize].windows(4).position(|four| four == MAGIC)?;
        let directory = self.word(extension as u64 + 24);
        let (is_valid, in_use) = (self.word(88) & 1 != 0, self.half(directory + 12) & 1 != 0);
        (is_valid && !in_use).then(|| self.word(directory))
    }

    /// The first `len` bytes of its bits.
    fn bits(&self, len: usize) -> Option<&[u8]> {
        let at = (self.word(self.bitmap_table()?) & OFFSET) as usize;
        self.0.get(at..at + len)
    }

    /// Where the L2 entry of a place is.
    fn entry_at(&self, l1: L1, place: u64) -> u64 {
        let entries = CLUSTER / 8;
        let table = self.word(l1.0 + 8 * (place / CLUSTER / entries)) & OFFSET;
        table + 8 * (place / CLUSTER % entries)
    }
}

/// Three pieces of 64 KiB that snapshot s has, of which the disk has overwritten the first half before snapshot t, and the first
/// quarter after it; two free clusters.
fn good() -> Bytes {
    scene(false)
}

/// As [`good`], with a bitmap that has recorded the last writes, or without.
fn scene(with_bitmap: bool) -> Bytes {
    let images = Images::new();
    let path = images.create("image", "cluster_size=4096", SIZE);
    let write = |fill: u8, len: u64| {
        move |place: &u64| format!("write -q -P {} {} {len}k", fill + (place / MIB) as u8, place)
    };
    images.qemu_io("image", &PLACES.iter().map(write(0x10, 64)).collect::<Vec<_>>());
    images.qemu_img(&["snapshot", "-c", "s", "image"]);
    images.qemu_io("image", &PLACES.iter().map(write(0x20, 32)).collect::<Vec<_>>());
    images.qemu_img(&["snapshot", "-c", "t", "image"]);
    if with_bitmap {
        images.qemu_img(&["bitmap", "--add", "-g", "512", "image", "b"]);
    }
    images.qemu_io("image", &PLACES.iter().map(write(0x30, 16)).collect::<Vec<_>>());
    let mut bytes = Bytes(std::fs::read(path).expect("the image"));
    // The free clusters.
    bytes.0.resize(bytes.0.len().next_multiple_of(CLUSTER as usize) + 2 * CLUSTER as usize, 0);
    bytes
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Disk,
    Snapshot(char),
}

#[derive(Clone, Copy, Debug)]
enum Damage {
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
    /// An L2 entry, or an L1 entry, names what the disk has 2 MiB further on (behind the last place: at the first).
    EntryOther,
    TableOther,
    /// A cluster of data lies at the end of the file, and is not counted.
    DataLast,
    /// An L2 table lies there, counted once whoever uses it.
    TableLast,
}

const DAMAGES: [Damage; 16] = [
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
    /// * `place`: of the cluster; the disk has those of its own there, 20 KiB on one that it shares with snapshot t, 40 KiB on one
    ///   that it shares with both.
    fn make(self, good: &Bytes, of: Of, place: u64) -> Bytes {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Create,
    Apply(char),
    Delete(char),
    Grow,
    Shrink,
    Empty,
    /// On a full file system: in place.
    EmptyFull,
    /// A bitmap more.
    Bitmap,
}

const CHANGES: [Change; 10] = [
    Change::Create,
    Change::Apply('s'),
    Change::Apply('t'),
    Change::Delete('s'),
    Change::Delete('t'),
    Change::Grow,
    Change::Shrink,
    Change::Empty,
    Change::EmptyFull,
    Change::Bitmap,
];

impl Change {
    async fn make(self, ring: &Ring, image: &mut Qcow2) -> Result<(), Error> {
        let resize = |preallocation| ResizeOptions { shrink: true, preallocation };
        match self {
            Change::Create => image.snapshot_create(ring, "n").await.map(drop),
            Change::Apply(name) => image.snapshot_apply(ring, &name.to_string()).await,
            Change::Delete(name) => image.snapshot_delete(ring, &name.to_string()).await,
            Change::Grow => {
                let options = resize(Preallocation::Metadata);
                image.resize(ring, 3 * SIZE, &options, &Nothing).await
            }
            Change::Shrink => {
                image.resize(ring, SIZE / 2 + 8 * KIB, &resize(Preallocation::Off), &Nothing).await
            }
            Change::Empty | Change::EmptyFull => image.make_empty(ring).await,
            Change::Bitmap => image.bitmap_add(ring, "new", Some(64 * KIB)).await,
        }
    }
}

/// Every cluster that shows something shows it still. What shows nothing, since the file ends before it, may become zeroes when the file has
/// grown over it, and never somebody else's bytes.
fn assert_same(before: &[Shown], after: &[Shown], what: &str) {
    const ZEROES: Shown = Shown::Bytes([0; 32]);
    for (cluster, (before, after)) in before.iter().zip(after).enumerate() {
        let is_hole = *before == Shown::Nothing && *after == ZEROES;
        if *before != Shown::Metadata && !is_hole {
            assert_eq!(before, after, "{what}: cluster {cluster}");
        }
    }
}

/// Returns whether the change was made.
///
/// * `is_known`: all of the disk was read before.
fn judge(damaged: &Bytes, change: Change, is_known: bool, what: &str) -> bool {
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let result = runtime.block_on(async {
        let mut image = live::open(&ring, &sim, None, &writable()).await?;
        if is_known {
            for at in (0..SIZE).step_by(CLUSTER as usize) {
                let _ = read(&ring, &image, &Nothing, at, &mut [0; 512]).await;
            }
        }
        if change == Change::EmptyFull {
            sim.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
            sim.on(When::any().at(sim.len()..u64::MAX), Fault::Fail(Errno::NOSPC));
        }
        let result = change.make(&ring, &mut image).await.map_err(|error| error.to_string());
        let _ = image.close(&ring).await;
        result
    });
    let after = Bytes(sim.image());
    let disk = damaged.show(damaged.active());
    let shown = after.show(after.active());
    match (change, &result) {
        (Change::Apply(name), Ok(())) => {
            let l1 = damaged.snapshot(name).expect("there is one");
            assert_same(&damaged.show(l1), &shown, what);
        }
        (Change::Empty | Change::EmptyFull, Ok(())) => {
            assert!(shown.iter().all(|it| *it == Shown::Bytes([0; 32])), "{what}");
        }
        (Change::Shrink, Ok(())) => {
            let left = (SIZE / 2 + 8 * KIB) / CLUSTER;
            assert_same(&disk[..left as usize], &shown, what);
        }
        _ => assert_same(&disk, &shown, what),
    }
    judge_bitmap(damaged, &after, change, what);
    // What was applied, or emptied, is another disk.
    if !matches!(change, Change::Apply(_) | Change::Empty | Change::EmptyFull) || result.is_err() {
        after.assert_counted(&disk, after.active(), what);
    }
    for (name, l1) in damaged.snapshots() {
        let is_gone = change == Change::Delete(name) && result.is_ok();
        let now = after.snapshot(name);
        assert_eq!(now.is_none(), is_gone, "{what}, snapshot {name}");
        if let Some(now) = now {
            let before = damaged.show(l1);
            assert_same(&before, &after.show(now), &format!("{what}, snapshot {name}"));
            after.assert_counted(&before, now, &format!("{what}, snapshot {name}"));
        }
    }
    result.is_ok()
}

/// What the bitmap says, where it is believed, is what it said before.
fn judge_bitmap(before: &Bytes, after: &Bytes, change: Change, what: &str) {
    // A bit for each sector that stays.
    let len = if change == Change::Shrink { SIZE / 2 + 8 * KIB } else { SIZE } / 512 / 8;
    let len = len as usize;
    if change == Change::Bitmap && before.bits(len).is_none() {
        return;
    }
    if let Some(now) = after.bits(len) {
        assert!(Some(now) == before.bits(len), "{what}: the bitmap");
    }
}

/// Of all tests below: a table in which every change is refused, or none is, says nothing.
fn assert_some_of(done: usize, cases: usize) {
    assert!(done > 0 && done < cases, "{done} of {cases} were made");
}

#[test]
fn a_damaged_image_shows_the_same_after_a_change_of_it_or_refuses_the_change() {
    let good = good();
    let (mut cases, mut done) = (0, 0);
    for damage in DAMAGES {
        for place in PLACES.iter().flat_map(|place| [0, 20, 40].map(|kib| place + kib * KIB)) {
            for of in [Of::Disk, Of::Snapshot('s'), Of::Snapshot('t')] {
                let damaged = damage.make(&good, of, place);
                for change in CHANGES {
                    let what = format!("{damage:?} of {of:?} at {place:#x}, {change:?}");
                    done += usize::from(judge(&damaged, change, false, &what));
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 16 * 9 * 3 * 10);
    assert_some_of(done, cases);
}

/// Bitmaps and what is on the disk share clusters, or those of the bitmap are not counted. (A snapshot is not applied beside a bitmap.)
#[test]
fn a_bitmap_loses_nothing_by_a_change_and_takes_nothing_with_it() {
    let good = scene(true);
    let table = good.bitmap_table().expect("a bitmap");
    let bits = good.word(table) & OFFSET;
    assert!(good.bits(2048).expect("bits").iter().any(|byte| *byte != 0));
    let mut damaged: Vec<(String, Bytes)> = Vec::new();
    for (name, host) in [("bits", bits), ("table", table)] {
        let mut one = good.clone();
        one.set_count(host, 0);
        damaged.push((format!("{name} not counted"), one));
    }
    let mut last = good.clone();
    let end = last.clusters() * CLUSTER;
    last.copy_to_end(bits);
    last.set_count(bits, 0);
    last.set(table, end);
    damaged.push((String::from("bits at the end, not counted"), last));
    for place in PLACES.iter().flat_map(|place| [0, 20, 40].map(|kib| place + kib * KIB)) {
        for l1 in [good.active(), good.snapshot('s').expect("s"), good.snapshot('t').expect("t")] {
            let entry_at = good.entry_at(l1, place);
            let (mut entry, mut word) = (good.clone(), good.clone());
            entry.set(entry_at, bits | COPIED);
            word.set(table, good.word(entry_at) & OFFSET);
            damaged.push((format!("the entry of {place:#x} in {l1:?} names the bits"), entry));
            damaged.push((format!("the bitmap names what {place:#x} in {l1:?} has"), word));
        }
    }
    let mut done = 0;
    for (what, damaged) in &damaged {
        for change in CHANGES {
            done += usize::from(judge(damaged, change, false, &format!("{what}, {change:?}")));
        }
    }
    assert_some_of(done, damaged.len() * CHANGES.len());
}

/// Two entries name a cluster that is counted once, and one of them lets it go: a change looks again, also after one that has looked.
#[test]
fn a_change_looks_again_at_what_was_let_go_since_the_last_one() {
    for change in [Change::Create, Change::Delete('s'), Change::Shrink] {
        let mut damaged = Damage::EntryOther.make(&good(), Of::Disk, PLACES[0]);
        // The only free one then, so that it would be taken first.
        for cluster in 0..damaged.clusters() {
            if damaged.count(cluster * CLUSTER) == 0 {
                damaged.set_count(cluster * CLUSTER, 1);
            }
        }
        let sim = SimStorage::from_image(&damaged.0, 1);
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        // Nobody reads there, so that only the change itself can know what the other entry names.
        let other = |bytes: &Bytes| bytes.show(bytes.active())[(PLACES[1] / CLUSTER) as usize];
        runtime.block_on(async {
            let mut image = live::open(&ring, &sim, None, &writable()).await.expect("open");
            Change::Grow.make(&ring, &mut image).await.expect("it grows");
            image.discard(&ring, PLACES[0], CLUSTER, &Nothing).await.expect("discard");
            assert_eq!(image.flush(&ring).await, Ok(()));
            let before = other(&Bytes(sim.image()));
            // It may be refused.
            let _ = change.make(&ring, &mut image).await;
            let _ = image.close(&ring).await;
            assert_eq!(before, other(&Bytes(sim.image())), "{change:?}");
        });
    }
}

/// What a snapshot names past the end of the file is in nobody's way: not in that of writes after a change either.
#[test]
fn writes_go_round_what_a_snapshot_names_past_the_end_of_the_file() {
    let damaged = Damage::EntryPast(12).make(&good(), Of::Snapshot('s'), PLACES[1]);
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut image = live::open(&ring, &sim, None, &writable()).await.expect("open");
        image.snapshot_create(&ring, "n").await.expect("a snapshot");
        let full = buffer(&[0x77; CLUSTER as usize]);
        for at in (7 * MIB..7 * MIB + 256 * KIB).step_by(CLUSTER as usize) {
            let written = image.write(&ring, at, &full, &Nothing).await;
            assert_eq!(written, Ok(CLUSTER as usize), "at {at:#x}");
        }
        assert_eq!(image.flush(&ring).await, Ok(()));
        assert_eq!(image.fault(), None);
        image.close(&ring).await.expect("close");
    });
    let after = Bytes(sim.image());
    let before = damaged.show(damaged.snapshot('s').expect("s"));
    assert_same(&before, &after.show(after.snapshot('s').expect("s")), "snapshot s");
}

/// Each change opens the image again; what reads had shown to be in use is not forgotten.
#[test]
fn what_was_read_before_a_change_is_not_given_away_by_it() {
    let good = good();
    let (mut cases, mut done) = (0, 0);
    for damage in DAMAGES {
        for place in PLACES.iter().flat_map(|place| [*place, place + 40 * KIB]) {
            let damaged = damage.make(&good, Of::Disk, place);
            let changes = [Change::Create, Change::Grow, Change::Shrink, Change::Empty];
            for change in changes {
                let what = format!("{damage:?} at {place:#x}, {change:?}, read");
                done += usize::from(judge(&damaged, change, true, &what));
                cases += 1;
            }
        }
    }
    assert_some_of(done, cases);
}

/// And not by the writes that come after it.
#[test]
fn what_was_read_before_a_change_is_not_given_away_after_it() {
    let good = good();
    for change in [Change::Grow, Change::Shrink] {
        let mut damaged = good.clone();
        let host = damaged.word(damaged.entry_at(damaged.active(), PLACES[1])) & OFFSET;
        // The only free one, so that it would be taken first.
        for cluster in 0..damaged.clusters() {
            if damaged.count(cluster * CLUSTER) == 0 {
                damaged.set_count(cluster * CLUSTER, 1);
            }
        }
        damaged.set_count(host, 0);
        let sim = SimStorage::from_image(&damaged.0, 1);
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            let mut image = live::open(&ring, &sim, None, &writable()).await.expect("open");
            let mut bytes = [0; 512];
            read(&ring, &image, &Nothing, PLACES[1], &mut bytes).await.expect("read");
            assert_eq!(bytes, [0x32; 512]);
            // It may be refused.
            let _ = change.make(&ring, &mut image).await;
            let full = buffer(&[0x77; CLUSTER as usize]);
            let written = image.write(&ring, MIB, &full, &Nothing).await;
            let expected = [Err(Errno::IO), Err(Errno::ROFS), Ok(CLUSTER as usize)];
            assert!(expected.contains(&written), "{change:?}: {written:?}");
            read(&ring, &image, &Nothing, PLACES[1], &mut bytes).await.expect("read");
            assert_eq!(bytes, [0x32; 512], "{change:?}");
            let _ = image.close(&ring).await;
        });
        let after = Bytes(sim.image());
        let at = after.word(after.entry_at(after.active(), PLACES[1])) & OFFSET;
        assert_eq!(after.0[at as usize], 0x32, "{change:?}");
    }
}

/// Where the file ends is found by the counts; a cluster that an entry names is no end.
#[test]
fn a_cluster_in_use_that_is_not_counted_is_not_cut_off_the_file() {
    let images = Images::new();
    let path = images.create("image", "cluster_size=4096", SIZE);
    // Free clusters in front, for what the change writes; in the last one data.
    let commands = ["write -q -P 1 6M 128k", "write -q -P 2 0 64k", "discard -q 6M 128k"];
    images.qemu_io("image", &commands.map(String::from));
    let mut damaged = Bytes(std::fs::read(path).expect("the image"));
    let last = (damaged.clusters() - 1) * CLUSTER;
    assert_eq!(damaged.word(damaged.entry_at(damaged.active(), 60 * KIB)) & OFFSET, last);
    damaged.set_count(last, 0);
    for is_known in [false, true] {
        assert!(judge(&damaged, Change::Shrink, is_known, &format!("known: {is_known}")));
    }
}

/// The last cluster of the disk, which is not a whole one, cannot be right: the disk does not grow, and reads go on.
#[test]
fn a_disk_whose_last_cluster_is_damaged_does_not_grow_and_is_still_read() {
    let images = Images::new();
    let path = images.create("image", "cluster_size=4096", SIZE + 512);
    images.qemu_io("image", &["write -q -P 7 0 64k", "write -q -P 8 8M 512"].map(String::from));
    let mut damaged = Bytes(std::fs::read(path).expect("the image"));
    let l1 = damaged.active();
    damaged.set(damaged.entry_at(l1, SIZE), l1.0 | COPIED);
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut image = live::open(&ring, &sim, None, &writable()).await.expect("open");
        for preallocation in [Preallocation::Off, Preallocation::Metadata] {
            let options = ResizeOptions { shrink: false, preallocation };
            let result = image.resize(&ring, SIZE + 64 * KIB, &options, &Nothing).await;
            let error = result.expect_err("damage");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!(image.virtual_size(), SIZE + 512);
            let mut bytes = [0; 512];
            read(&ring, &image, &Nothing, 4096, &mut bytes).await.expect("read");
            assert_eq!(bytes, [7; 512]);
        }
        let _ = image.close(&ring).await;
    });
    assert_eq!(Bytes(sim.image()).word(24), SIZE + 512);
}

/// Thousands of bitmaps that all name one table: it is read once.
#[test]
fn a_change_does_not_read_a_table_of_bitmaps_more_often_than_the_file_is_long() {
    const BITMAPS: u64 = 5000;
    let mut damaged = scene(true);
    let table = damaged.bitmap_table().expect("a bitmap");
    let extension = damaged.0.windows(4).position(|four| four == [0x23, 0x85, 0x28, 0x75]);
    let extension = extension.expect("a bitmap") as u64;
    let directory = damaged.word(extension + 24);
    // 24 bytes and a name of up to 8.
    let entry = damaged.0[directory as usize..directory as usize + 32].to_vec();
    let at = damaged.clusters() * CLUSTER;
    for number in 0..BITMAPS {
        // Place and length of the table, no flags: they do not record.
        damaged.0.extend_from_slice(&entry[..12]);
        damaged.0.extend_from_slice(&[0, 0, 0, 0, entry[16], entry[17], 0, 8, 0, 0, 0, 0]);
        damaged.0.extend_from_slice(format!("{number:08}").as_bytes());
    }
    damaged.set(extension + 8, BITMAPS << 32);
    damaged.set(extension + 16, BITMAPS * 32);
    damaged.set(extension + 24, at);
    assert_eq!(damaged.bitmap_table(), Some(table));
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut image = live::open(&ring, &sim, None, &writable()).await.expect("open");
        let before = sim.count(OpKind::Read);
        let _ = image.snapshot_create(&ring, "n").await;
        let reads = sim.count(OpKind::Read) - before;
        assert!((reads as u64) < BITMAPS / 2, "{reads} reads");
        let _ = image.close(&ring).await;
    });
}
