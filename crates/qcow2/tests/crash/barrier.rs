//! Barriers, told by what they made durable and what came after.

use std::collections::BTreeSet;

use ringdisk_testkit::layout::{Class, Layout};
use ringdisk_testkit::sim::{Prng, Ranges, SimStorage};

use crate::config::index;

/// What a barrier stands between: what it made durable, and what came after it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Barrier {
    /// The class that it is to leave out.
    pub(crate) lost: Class,
    /// It is a flush of the external data file; `after` is what came after the last one of the
    /// image file.
    pub(crate) in_data_file: bool,
    pub(crate) after: BTreeSet<Class>,
}

impl Barrier {
    /// One of the things that the last flush of a storage was for.
    pub(crate) fn choose(
        file: &SimStorage,
        data: Option<&SimStorage>,
        layout: &Layout,
        prng: &mut Prng,
    ) -> Option<Barrier> {
        let classes = |ranges: &Ranges| -> BTreeSet<Class> {
            ranges.iter().map(|range| layout.class_at(range.0)).collect()
        };
        let (before, after) = file.around_last_flush();
        if let Some(data) = data.filter(|_| prng.coin()) {
            // An idle one came with what is in `after`; the one before it is another barrier.
            let is_one = !data.around_last_flush().0.is_empty() && !data.was_flushed_idly();
            let after = classes(&after);
            return is_one.then_some(Barrier { lost: Class::Data, in_data_file: true, after });
        }
        let before: Vec<Class> = classes(&before).into_iter().collect();
        let lost = *before.get(index(prng, before.len() as u64))?;
        Some(Barrier { lost, in_data_file: false, after: classes(&after) })
    }

    pub(crate) fn is_between(&self, lost: &[Class], after: &[Class]) -> bool {
        let comes = after.is_empty() || after.iter().any(|class| self.after.contains(class));
        lost.contains(&self.lost) && comes
    }
}
