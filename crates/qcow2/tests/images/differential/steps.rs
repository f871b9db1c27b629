//! Operations, and what they make of a disk.

use std::collections::BTreeSet;

use proptest::prelude::{Just, Strategy, any, prop, prop_oneof};

use crate::differential::cells::Cell;
use crate::differential::engines::fill;

/// One operation of a client. Bytes.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Write {
        at: u64,
        len: u64,
        byte: u8,
    },
    Zero {
        at: u64,
        len: u64,
        unmap: bool,
    },
    /// Whole clusters.
    Discard {
        at: u64,
        len: u64,
    },
    /// One whole cluster that nothing was done to before; else nothing happens.
    Packed {
        at: u64,
        byte: u8,
    },
    Flush,
}

/// What happens to an image before the next engine gets it.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Ops(Vec<Op>),
    /// Makes a snapshot, unless there is one.
    Snapshot,
    /// Goes back to the snapshot, if there is one.
    Apply,
    /// Deletes the snapshot, if there is one.
    Delete,
    /// New size in units of 512 bytes, in thousandths of the first size.
    Resize(u64),
}

/// The disk as it should be.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) disk: Vec<u8>,
    pub(crate) snapshot: Option<Vec<u8>>,
    /// Clusters that something was done to.
    touched: BTreeSet<u64>,
    cluster: u64,
}

impl Model {
    pub(crate) fn new(cell: &Cell, base: &[u8]) -> Model {
        let mut disk = vec![0; usize::try_from(cell.size()).expect("small")];
        fill(base, 0, &mut disk);
        Model { disk, snapshot: None, touched: BTreeSet::new(), cluster: cell.cluster }
    }

    /// Fits an operation to the disk as it is now. `None`: it cannot be done.
    pub(crate) fn fit(&self, op: &Op) -> Option<Op> {
        let size = self.disk.len() as u64;
        let cut = |at: u64, len: u64| (at < size).then(|| len.min(size - at));
        Some(match *op {
            Op::Write { at, len, byte } => Op::Write { at, len: cut(at, len)?, byte },
            Op::Zero { at, len, unmap } => Op::Zero { at, len: cut(at, len)?, unmap },
            Op::Discard { at, len } => Op::Discard { at, len: cut(at, len)? },
            Op::Packed { at, byte } => {
                let free = !self.touched.contains(&(at / self.cluster));
                (free && cut(at, self.cluster)? == self.cluster)
                    .then_some(Op::Packed { at, byte })?
            }
            Op::Flush => Op::Flush,
        })
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        let (at, len, byte) = match *op {
            Op::Write { at, len, byte } => (at, len, byte),
            Op::Zero { at, len, .. } | Op::Discard { at, len } => (at, len, 0),
            Op::Packed { at, byte } => (at, self.cluster, byte),
            Op::Flush => return,
        };
        let start = usize::try_from(at).expect("small");
        self.disk[start..start + usize::try_from(len).expect("small")].fill(byte);
        self.touched.extend(at / self.cluster..(at + len).div_ceil(self.cluster));
    }

    /// Back to the snapshot. What was done since is not free for packing again: an expectation that
    /// asks for little is never wrong.
    pub(crate) fn restore(&mut self) {
        self.disk = self.snapshot.clone().unwrap_or_else(|| self.disk.clone());
    }

    pub(crate) fn resize(&mut self, size: u64) {
        let size = usize::try_from(size).expect("small");
        let (old, cluster) = (self.disk.len() as u64, self.cluster);
        self.disk.resize(size, 0);
        // What was cut off and what is new may have been zeroed.
        self.touched.extend(old.min(size as u64) / cluster..=old.max(size as u64) / cluster);
    }
}

fn op(cell: Cell) -> impl Strategy<Value = Op> {
    let (size, cluster) = (cell.size(), cell.cluster);
    let clusters = size / cluster + 1;
    let sectors = (0..size / 512, 1..=3 * cluster.min(128 << 10) / 512)
        .prop_map(|(at, len)| (at * 512, len * 512));
    let bytes = (0..size, 1..2 * cluster.min(128 << 10));
    let whole = (0..clusters, 1..4u64).prop_map(move |(at, len)| (at * cluster, len * cluster));
    let range = prop_oneof![4 => sectors, 1 => bytes, 2 => whole.clone()].boxed();
    // A version 2 image cannot say that a cluster above a backing file reads as zeroes, so QEMU
    // shows the backing file there.
    let discards = u32::from(!(cell.version == 2 && cell.backing));
    let packs = u32::from(cell.packs());
    prop_oneof![
        6 => (range.clone(), 1..=255u8).prop_map(|((at, len), byte)| Op::Write { at, len, byte }),
        3 => (range, any::<bool>()).prop_map(|((at, len), unmap)| Op::Zero { at, len, unmap }),
        2 * discards => whole.clone().prop_map(|(at, len)| Op::Discard { at, len }),
        2 * packs => (whole, any::<u8>()).prop_map(|((at, _), byte)| Op::Packed { at, byte }),
        1 => Just(Op::Flush),
    ]
}

/// Steps for an image of this kind: some operations, something else, and so on.
pub(crate) fn steps(cell: &Cell) -> impl Strategy<Value = Vec<Step>> + use<> {
    let cell = *cell;
    let snapshots = u32::from(cell.has_snapshots());
    let other = prop_oneof![
        2 => Just(Step::Resize(1000)),
        2 * snapshots => Just(Step::Snapshot),
        snapshots => Just(Step::Apply),
        snapshots => Just(Step::Delete),
        2 => (300..1500u64).prop_map(Step::Resize),
    ];
    let ops = prop::collection::vec(op(cell), 1..14).prop_map(Step::Ops);
    prop::collection::vec((ops, other), 2..4)
        .prop_map(|pairs| pairs.into_iter().flat_map(|(ops, other)| [ops, other]).collect())
}
