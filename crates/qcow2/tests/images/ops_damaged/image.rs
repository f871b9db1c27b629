//! Images that are going to be damaged, and what they show, by a reader of its own.

use std::collections::HashSet;

use crate::common::{Images, KIB, MIB};

pub(crate) const CLUSTER: u64 = 4 * KIB;
pub(crate) const SIZE: u64 = 8 * MIB;
pub(crate) const COPIED: u64 = 1 << 63;
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Where data begins, each in an L2 table of its own; 64 KiB each.
pub(crate) const PLACES: [u64; 3] = [0, 2 * MIB, 4 * MIB];

/// What a cluster of a disk shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Its first bytes.
    Contents([u8; 32]),
    /// The entry cannot be right.
    Nothing,
    /// It names metadata, which is rewritten.
    Metadata,
}

/// Where an L1 table lies, and its length.
pub(crate) type L1 = (u64, u32);

/// The bytes of an image.
#[derive(Clone)]
pub(crate) struct Contents(pub(crate) Vec<u8>);

impl Contents {
    pub(crate) fn word(&self, at: u64) -> u64 {
        let raw = self.0.get(at as usize..at as usize + 8);
        raw.map_or(0, |raw| u64::from_be_bytes(raw.try_into().expect("8 bytes")))
    }

    pub(crate) fn set(&mut self, at: u64, word: u64) {
        self.0[at as usize..at as usize + 8].copy_from_slice(&word.to_be_bytes());
    }

    pub(crate) fn half(&self, at: u64) -> u32 {
        (self.word(at) >> 32) as u32
    }

    /// Clusters of the file.
    pub(crate) fn clusters(&self) -> u64 {
        (self.0.len() as u64).div_ceil(CLUSTER)
    }

    pub(crate) fn active(&self) -> L1 {
        (self.word(40), self.half(36))
    }

    /// The names of all snapshots, one letter each, and their L1 tables.
    pub(crate) fn snapshots(&self) -> Vec<(char, L1)> {
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

    pub(crate) fn snapshot(&self, name: char) -> Option<L1> {
        self.snapshots().into_iter().find(|(its, _)| *its == name).map(|(_, l1)| l1)
    }

    /// Where metadata lies that tables name: the tables themselves, and the reference counts.
    pub(crate) fn metadata(&self) -> HashSet<u64> {
        let all = self.snapshots().into_iter().map(|(_, l1)| l1).chain([self.active()]);
        let l1s: Vec<L1> = all.collect();
        let entries = l1s.iter().flat_map(|l1| (0..u64::from(l1.1)).map(|i| l1.0 + 8 * i));
        let tables = entries.map(|at| self.word(at) & OFFSET);
        let others = [self.word(48), self.word(self.word(48)), self.word(64)];
        tables.chain(others).chain(l1s.iter().map(|l1| l1.0)).collect()
    }

    /// What a disk shows, by a reader of its own.
    pub(crate) fn show(&self, l1: L1) -> Vec<Shown> {
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
                    _ if is_zero => Shown::Contents([0; 32]),
                    _ if metadata.contains(&host) => Shown::Metadata,
                    Some(bytes) => Shown::Contents(bytes.try_into().expect("32 bytes")),
                    None => Shown::Nothing,
                });
            }
        }
        shown
    }

    /// The host clusters that the entries of a disk name.
    pub(crate) fn hosts(&self, l1: L1) -> Vec<u64> {
        let entries = CLUSTER / 8;
        let all = 0..u64::from(l1.1) * entries;
        let host = |number: u64| {
            let l2 = self.word(l1.0 + 8 * (number / entries)) & OFFSET;
            if l2 == 0 { 0 } else { self.word(l2 + 8 * (number % entries)) & OFFSET }
        };
        all.map(host).collect()
    }

    /// Metadata that an entry names stays that, or belongs to the entry: nobody else gets it.
    pub(crate) fn assert_counted(&self, before: &[Shown], l1: L1, what: &str) {
        for (cluster, (before, host)) in before.iter().zip(self.hosts(l1)).enumerate() {
            if *before == Shown::Metadata && host != 0 {
                assert!(self.count(host) > 0, "{what}: cluster {cluster} names {host:#x}");
            }
        }
    }

    pub(crate) fn count_at(&self, host: u64) -> u64 {
        self.word(self.word(48)) + host / CLUSTER * 2
    }

    pub(crate) fn count(&self, host: u64) -> u16 {
        let at = self.count_at(host) as usize;
        u16::from_be_bytes(self.0[at..at + 2].try_into().expect("2 bytes"))
    }

    pub(crate) fn set_count(&mut self, host: u64, count: u16) {
        let at = self.count_at(host) as usize;
        self.0[at..at + 2].copy_from_slice(&count.to_be_bytes());
    }

    pub(crate) fn free(&self) -> u64 {
        (0..self.clusters()).map(|c| c * CLUSTER).find(|host| self.count(*host) == 0).expect("one")
    }

    /// The file gets one cluster more, a copy.
    pub(crate) fn copy_to_end(&mut self, host: u64) {
        let copy = self.0[host as usize..(host + CLUSTER) as usize].to_vec();
        self.0.extend(copy);
    }

    /// Where the table of the only bitmap lies, if there is one that may be believed.
    pub(crate) fn bitmap_table(&self) -> Option<u64> {
        const MAGIC: [u8; 4] = [0x23, 0x85, 0x28, 0x75];
        let extension = self.0[..CLUSTER as usize].windows(4).position(|four| four == MAGIC)?;
        let directory = self.word(extension as u64 + 24);
        let (is_valid, in_use) = (self.word(88) & 1 != 0, self.half(directory + 12) & 1 != 0);
        (is_valid && !in_use).then(|| self.word(directory))
    }

    /// The first `len` bytes of its bits.
    pub(crate) fn bits(&self, len: usize) -> Option<&[u8]> {
        let at = (self.word(self.bitmap_table()?) & OFFSET) as usize;
        self.0.get(at..at + len)
    }

    /// Where the L2 entry of a place is.
    pub(crate) fn entry_at(&self, l1: L1, place: u64) -> u64 {
        let entries = CLUSTER / 8;
        let table = self.word(l1.0 + 8 * (place / CLUSTER / entries)) & OFFSET;
        table + 8 * (place / CLUSTER % entries)
    }
}

/// Three pieces of 64 KiB that snapshot s has, of which the disk has overwritten the first half
/// before snapshot t, and the first quarter after it; two free clusters.
pub(crate) fn good() -> Contents {
    scene(false)
}

/// As [`good`], with a bitmap that has recorded the last writes, or without.
pub(crate) fn scene(with_bitmap: bool) -> Contents {
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
    let mut bytes = Contents(std::fs::read(path).expect("the image"));
    // The free clusters.
    bytes.0.resize(bytes.0.len().next_multiple_of(CLUSTER as usize) + 2 * CLUSTER as usize, 0);
    bytes
}
