//! The feature matrix: every cell, or few that hold every pair of values.

use std::collections::BTreeSet;

/// One kind of image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) version: u32,
    pub(crate) cluster: u64,
    pub(crate) refcount_bits: u32,
    pub(crate) extended: bool,
    pub(crate) data_file: bool,
    pub(crate) lazy: bool,
    pub(crate) backing: bool,
    pub(crate) zstd: bool,
}

impl Cell {
    fn is_possible(&self) -> bool {
        let old = self.version == 2;
        let new_feature = self.extended || self.data_file || self.lazy || self.zstd;
        !(old && (new_feature || self.refcount_bits != 16))
            && !(self.extended && self.cluster < 16384)
            // An external data file counts nothing, so there is nothing to be lazy about.
            && !(self.data_file && self.backing && self.lazy)
    }

    /// `-o` of `qemu-img create`.
    pub(crate) fn options(&self, data_file: &str) -> String {
        let mut options = format!(
            "compat={},cluster_size={}",
            if self.version == 2 { "0.10" } else { "1.1" },
            self.cluster
        );
        if self.version == 3 {
            options += &format!(",refcount_bits={}", self.refcount_bits);
            for (wanted, option) in [
                (self.extended, "extended_l2=on"),
                (self.lazy, "lazy_refcounts=on"),
                (self.zstd, "compression_type=zstd"),
            ] {
                options += &if wanted { format!(",{option}") } else { String::new() };
            }
            if self.data_file {
                options += &format!(",data_file={data_file}");
            }
        }
        options
    }

    /// What the crate `imago` opens.
    pub(crate) fn is_for_imago(&self) -> bool {
        self.version == 3 && !self.extended && !self.zstd
    }

    /// Compressed clusters share host clusters, and a snapshot counts each of them once more:
    /// together they want wide refcounts, and of the cells with narrow ones each has one of the
    /// two.
    pub(crate) fn packs(&self) -> bool {
        !self.data_file && (self.refcount_bits == 1 || self.refcount_bits >= 16 || self.lazy)
    }

    /// Snapshots are made.
    pub(crate) fn has_snapshots(&self) -> bool {
        !self.data_file && self.refcount_bits > 1 && (self.refcount_bits >= 16 || !self.lazy)
    }

    /// Size of the disk in bytes: two and a half L2 tables where they are small, some clusters
    /// where those are large.
    pub(crate) fn size(&self) -> u64 {
        let entry = if self.extended { 16 } else { 8 };
        let covered = self.cluster / entry * self.cluster;
        let few = (24 * (64 << 10)).max(6 * self.cluster);
        (covered * 5 / 2).min(few) / 512 * 512 + 512 * 3
    }

    fn values(&self) -> [u64; 8] {
        [
            self.version.into(),
            self.cluster,
            self.refcount_bits.into(),
            self.extended.into(),
            self.data_file.into(),
            self.lazy.into(),
            self.backing.into(),
            self.zstd.into(),
        ]
    }
}

/// Every cell that there can be.
pub(crate) fn all() -> Vec<Cell> {
    let both = [false, true];
    let mut cells = Vec::new();
    for version in [2, 3] {
        for cluster in [512, 4096, 65536, 2 << 20] {
            for refcount_bits in [1, 2, 4, 8, 16, 32, 64] {
                for (extended, data_file, lazy, backing, zstd) in (0..32).map(|bits: usize| {
                    let bit = |at: usize| both[bits >> at & 1];
                    (bit(0), bit(1), bit(2), bit(3), bit(4))
                }) {
                    let cell = Cell {
                        version,
                        cluster,
                        refcount_bits,
                        extended,
                        data_file,
                        lazy,
                        backing,
                        zstd,
                    };
                    cells.extend(Some(cell).filter(Cell::is_possible));
                }
            }
        }
    }
    cells
}

type Pair = (usize, u64, usize, u64);

fn pairs(cell: &Cell) -> Vec<Pair> {
    let values = cell.values();
    let mut out = Vec::new();
    for first in 0..values.len() {
        for second in first + 1..values.len() {
            out.push((first, values[first], second, values[second]));
        }
    }
    out
}

/// Cells that together hold every pair of values that goes together: always the one with the most
/// that are missing.
pub(crate) fn pairwise() -> Vec<Cell> {
    let all = all();
    let mut missing: BTreeSet<Pair> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let count = |cell: &&Cell| pairs(cell).iter().filter(|pair| missing.contains(pair)).count();
        let best = *all.iter().max_by_key(count).expect("cells");
        pairs(&best).iter().for_each(|pair| {
            missing.remove(pair);
        });
        chosen.push(best);
    }
    chosen
}
