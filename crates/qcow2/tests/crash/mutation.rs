//! Every barrier has a use: without it some state is wrong, and these tests see that.
//!
//! The states are those that could be left if the last flush of the image file had been a lie: any part of what it covered may be
//! missing although something that came after it is there. A barrier is told by what was written before it and after it.

use std::collections::BTreeMap;
use std::rc::Rc;

use ringdisk_testkit::layout::Class;

use crate::barrier::Barrier;
use crate::common::runtime;
use crate::config::{Between, Config, Wanted};
use crate::judge::Judge;
use crate::states;
use crate::world::{Taken, World};

/// States of each barrier, and how many of them were seen to be wrong.
#[derive(Debug, Default)]
struct Tally(BTreeMap<Barrier, (u64, u64)>);

impl Tally {
    fn collect(&mut self, seeds: u64, wanted: Wanted) {
        let mut judge = Judge::new();
        let mut seed = 1;
        while judge.judged < seeds {
            let mut runtime = runtime();
            let config = Config::new(seed, wanted);
            let mut world = World::new(runtime.ring().clone(), config, Taken::WithoutLastFlush);
            runtime.block_on(world.run()).expect("the engine itself sees no lie");
            let config: Rc<Config> = world.config.clone();
            for case in &world.cases {
                let entry = self.0.entry(case.barrier.clone().expect("asked for")).or_default();
                entry.0 += 1;
                entry.1 += u64::from(judge.judge(&config, case).is_err());
            }
            seed += 1;
        }
    }

    /// States and wrong ones of the barriers between these classes.
    fn between(&self, lost: &[Class], after: &[Class]) -> (u64, u64) {
        let all = self.0.iter().filter(|(barrier, _)| barrier.is_between(lost, after));
        all.fold((0, 0), |sum, (_, each)| (sum.0 + each.0, sum.1 + each.1))
    }
}

#[test]
fn no_barrier_is_missed() {
    let mut tally = Tally::default();
    tally.collect(states(10), Wanted::default());
    tally.collect(states(5), Wanted { between: Some(Between::Reopen), ..Wanted::default() });
    for (barrier, (seen, wrong)) in &tally.0 {
        println!("{wrong:6} of {seen:6} wrong: {:?} | {:?}", barrier.lost, barrier.after);
    }
    use Class::{Data, Free, L1, L2, RefcountBlock};
    let tables: &[Class] = &[L2, L1];
    let barriers: [(&str, &[Class], &[Class]); 7] = [
        ("data before the table that links it", &[Data], tables),
        ("reference counts before the table that refers", &[RefcountBlock], tables),
        ("a new table before the one that links it", &[L2], &[L1]),
        ("data before the flush is answered", &[Data], &[]),
        ("tables before the flush is answered", &[L2], &[]),
        ("the L1 table before the flush is answered", &[L1], &[]),
        ("tables before their old clusters are used again", &[L2], &[Data, Free]),
    ];
    for (name, before, after) in barriers {
        let (seen, wrong) = tally.between(before, after);
        println!("{name}: {wrong} of {seen} states are wrong without it");
        assert!(wrong > 0, "{name}: no test misses this barrier ({seen} states)");
    }
}
