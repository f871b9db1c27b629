//! Whose turn it is among the virtqueues of a thread.
//!
//! Promises: each virtqueue gets an equal share of a batch, if it has so many requests; what others
//! leave goes to those that have more. The next batch begins with another one. So a virtqueue that
//! has requests is served at least once in as many batches as there are virtqueues, however much
//! the others ask for.

use std::cell::Cell;

/// The turns of one thread.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Which virtqueue the next batch begins with.
    first: Cell<usize>,
}

impl Turns {
    /// Takes a batch of requests. Returns how many there were.
    ///
    /// * `count`: virtqueues.
    /// * `room`: requests that may be taken.
    /// * `take`: takes one request of the virtqueue with this number; `false`: it has none.
    #[inline]
    pub(super) fn take(&self, count: usize, room: u32, mut take: impl FnMut(usize) -> bool) -> u32 {
        if count == 0 || room == 0 {
            return 0;
        }
        // No remainders: a thread that polls comes here all the time, and a division takes as long
        // as much of the rest.
        let first = self.first.get();
        let first = if first < count { first } else { 0 };
        let number_of = |step: usize| {
            let number = first + step;
            if number < count { number } else { number - count }
        };
        let share = match u32::try_from(count) {
            Ok(1) => room,
            Ok(count) => (room / count).max(1),
            Err(_) => 1,
        };
        let mut taken = 0;
        // First to each its share, then the rest to the one that asks first. One place that takes,
        // so that it is compiled into the loop.
        for share in [share, room] {
            let mut is_more = false;
            for step in 0..count {
                let number = number_of(step);
                let mut own = 0;
                while own < share.min(room - taken) && take(number) {
                    own += 1;
                }
                taken += own;
                is_more |= own == share;
                if taken == room {
                    // With less room than virtqueues those behind this one were not asked.
                    self.first.set(if share == 1 { number + 1 } else { first + 1 });
                    return taken;
                }
            }
            if !is_more {
                break;
            }
        }
        self.first.set(first + 1);
        taken
    }
}

#[cfg(test)]
mod tests;
