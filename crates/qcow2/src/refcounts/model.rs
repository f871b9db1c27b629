//! Random calls, compared with a model that keeps one number for each cluster and a "disk" of
//! refcount blocks.
//!
//! Promises: each call gives what the model gives, and no cluster is handed out twice. A failure is
//! cut down to a few calls. Only tests build it.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::{Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::Config;

use super::tests::small;
use super::{Blocked, DirtyTable, Refcounts, Run};
use crate::units::{Bytes, HostCluster, HostOffset};

#[derive(Clone, Debug)]
enum Call {
    Allocate { count: u64, goal: Option<usize>, contiguous: bool },
    Increment { which: usize },
    Decrement { which: usize },
    Release { which: usize, zeroed: bool },
    GiveBack { which: usize },
    Checkpoint { ok: bool },
}

fn call() -> impl Strategy<Value = Call> {
    let which = || 0..1000usize;
    prop_oneof![
        4 => (1..40u64, prop::option::of(which()), any::<bool>())
            .prop_map(|(count, goal, contiguous)| Call::Allocate { count, goal, contiguous }),
        4 => (1..2u64).prop_map(|count| Call::Allocate { count, goal: None, contiguous: false }),
        2 => which().prop_map(|which| Call::Increment { which }),
        5 => which().prop_map(|which| Call::Decrement { which }),
        4 => (which(), any::<bool>()).prop_map(|(which, zeroed)| Call::Release { which, zeroed }),
        1 => which().prop_map(|which| Call::GiveBack { which }),
        1 => any::<bool>().prop_map(|ok| Call::Checkpoint { ok }),
    ]
}

struct Model {
    real: Refcounts,
    /// Counts that are not 0.
    counts: BTreeMap<HostCluster, u64>,
    /// Freed, not released.
    held: Vec<Run>,
    /// Handed out at some time.
    touched: BTreeSet<HostCluster>,
    /// Released as zeroes and not handed out since.
    zeroed: BTreeSet<HostCluster>,
    /// Blocks as last written.
    disk: BTreeMap<HostOffset, Vec<u8>>,
    cluster_bits: u32,
    used: u64,
}

impl Model {
    fn new(cluster_bits: u32, order: u32, can_grow: bool) -> Model {
        let used = 20;
        let real = small(cluster_bits, order, used, can_grow);
        Model {
            real,
            counts: (0..3 + used).map(|cluster| (HostCluster(cluster), 1)).collect(),
            held: Vec::new(),
            touched: HostCluster(0).up_to(HostCluster(3 + used)).collect(),
            zeroed: BTreeSet::new(),
            disk: BTreeMap::new(),
            cluster_bits,
            used,
        }
    }

    /// Loads and makes the blocks that a call asks for.
    fn run<T>(
        &mut self,
        mut call: impl FnMut(&mut Refcounts) -> Result<T, Blocked>,
    ) -> Result<T, Blocked> {
        for _ in 0..10_000 {
            let index = match call(&mut self.real) {
                Err(Blocked::Create(index)) => index,
                Err(Blocked::Load(index)) => {
                    let offset = self.real.block_offset(index).expect("there is a block");
                    self.real.put_block(index, &self.disk[&offset]);
                    continue;
                }
                other => return other,
            };
            let mut index = index;
            let cluster = loop {
                match self.real.begin_block(index) {
                    Ok(cluster) => break cluster,
                    Err(Blocked::Create(first)) => index = first,
                    Err(Blocked::Load(index)) => {
                        let offset = self.real.block_offset(index).expect("there is a block");
                        self.real.put_block(index, &self.disk[&offset]);
                    }
                    Err(blocked) => return Err(blocked),
                }
            };
            self.fresh(Run::new(cluster, 1));
            self.real.finish_block(index, cluster);
        }
        panic!("no end in sight");
    }

    /// Clusters that were handed out: free until now, and zero only if nobody had them before.
    fn fresh(&mut self, run: Run) {
        for cluster in run.clusters() {
            assert!(!self.held.iter().any(|held| (held.start..held.end()).contains(&cluster)));
            assert_eq!(self.counts.insert(cluster, 1), None, "cluster {cluster} was in use");
            let zero = self.zeroed.remove(&cluster) || !self.touched.contains(&cluster);
            assert!(zero || !run.zeroed, "cluster {cluster} is not zero");
            self.touched.insert(cluster);
        }
    }

    /// A cluster of data that is in use.
    fn pick(&self, which: usize) -> Option<HostCluster> {
        let data: Vec<HostCluster> = self
            .counts
            .keys()
            .copied()
            .filter(|cluster| !self.real.is_metadata(*cluster))
            .collect();
        (!data.is_empty()).then(|| data[which % data.len()])
    }

    fn apply(&mut self, call: &Call) {
        match *call {
            Call::Allocate { count, goal, contiguous } => {
                let goal = goal.and_then(|which| self.pick(which)).map(|cluster| cluster + 1);
                match self.run(|real| real.allocate(count, goal, contiguous)) {
                    Ok(run) => {
                        assert!(run.count >= 1 && run.count <= count);
                        assert!(!contiguous || run.count == count);
                        self.fresh(run);
                    }
                    Err(blocked) => assert_eq!(blocked, Blocked::Full),
                }
            }
            Call::Increment { which } => {
                let Some(cluster) = self.pick(which) else { return };
                match self.run(|real| real.increment(cluster, 1)) {
                    Ok(()) => *self.counts.get_mut(&cluster).expect("in use") += 1,
                    Err(blocked) => assert_eq!(blocked, Blocked::Overflow),
                }
            }
            Call::Decrement { which } => {
                let Some(cluster) = self.pick(which) else { return };
                let mut freed = Vec::new();
                self.run(|real| real.decrement(cluster, 1, &mut freed)).expect("in use");
                let count = self.counts.get_mut(&cluster).expect("in use");
                *count -= 1;
                assert_eq!(freed.len(), usize::from(*count == 0));
                if *count == 0 {
                    self.counts.remove(&cluster);
                    self.held.append(&mut freed);
                }
            }
            Call::Release { which, zeroed } => {
                if self.held.is_empty() {
                    return;
                }
                let run = self.held.swap_remove(which % self.held.len());
                if zeroed {
                    self.zeroed.extend(run.clusters());
                }
                self.real.release(Run { zeroed, ..run });
            }
            Call::GiveBack { which } => {
                let Some(cluster) = self.pick(which) else { return };
                if self.counts[&cluster] == 1 {
                    self.real.give_back(cluster, 1, false);
                    if self.real.get(cluster) == Ok(0) {
                        self.counts.remove(&cluster);
                    }
                }
            }
            Call::Checkpoint { ok } => self.checkpoint(ok),
        }
    }

    fn checkpoint(&mut self, ok: bool) {
        while let Some(wants) = self.real.table_wants() {
            let Ok(run) = self.run(|real| real.allocate(wants, None, true)) else { return };
            self.fresh(run);
            if self.real.table_wants() == Some(wants) {
                if let Some(skipped) = self.real.move_table(run.start, wants) {
                    self.real.unmark_metadata(skipped.start, skipped.count);
                    self.real.give_back(skipped.start, skipped.count, false);
                }
            } else {
                self.real.give_back(run.start, run.count, false);
                self.counts.retain(|cluster, _| !(run.start..run.end()).contains(cluster));
            }
        }
        let dirty = self.real.take_dirty();
        if ok {
            for block in &dirty.blocks {
                let cluster_size = Bytes(1 << self.cluster_bits);
                let start = block.offset.align_down(cluster_size);
                let at = usize::try_from(block.offset - start).expect("small");
                let cluster_bytes = usize::try_from(cluster_size).expect("small");
                let bytes = self.disk.entry(start).or_insert_with(|| vec![0; cluster_bytes]);
                bytes[at..at + block.bytes.len()].copy_from_slice(&block.bytes);
            }
        }
        self.real.written(&dirty, ok);
        if ok && let DirtyTable::Whole { old, .. } = dirty.table {
            let mut freed = Vec::new();
            self.run(|real| real.decrement(old.start, old.count, &mut freed)).expect("in use");
            self.counts.retain(|cluster, _| !(old.start..old.end()).contains(cluster));
            self.held.append(&mut freed);
        }
    }

    fn compare(&mut self) {
        let last = self.counts.keys().next_back().copied().unwrap_or_default();
        for cluster in HostCluster(0).up_to(last + 10 + self.used) {
            let real = self.run(|real| real.get(cluster));
            assert_eq!(real, Ok(self.counts.get(&cluster).copied().unwrap_or(0)), "{cluster}");
        }
    }
}

proptest! {
    #![proptest_config(Config { cases: 200, failure_persistence: None, ..Config::default() })]

    #[test]
    fn any_calls_agree_with_the_model(
        order in 0..=6u32,
        cluster_bits in prop_oneof![2 => 9..10u32, 1 => 10..14u32],
        can_grow in any::<bool>(),
        calls in prop::collection::vec(call(), 1..120),
    ) {
        let mut model = Model::new(cluster_bits, order, can_grow);
        for call in &calls {
            model.apply(call);
        }
        model.compare();
        model.checkpoint(true);
        model.compare();
    }
}
