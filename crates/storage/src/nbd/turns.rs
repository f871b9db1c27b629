//! Drivers that wait for a link, in the order in which they came.
//!
//! Promises: a link that is released goes to the driver that has waited longest, unless that one
//! does not take it in time (its thread stands still). While no driver waits, this costs one load
//! of a value that does not change.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// A driver that could have a link and does not take it for so long is passed over.
const CLAIM_LIMIT: Duration = Duration::from_millis(500);
/// How often a waiting driver looks by itself.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct Waiting {
    driver: u64,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// When the driver in front could have a link for the first time.
    offered: Option<Instant>,
}

/// The queue of one export.
#[derive(Debug, Default)]
pub(super) struct Turns {
    count: AtomicUsize,
    queue: Mutex<Queue>,
}

impl Turns {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a driver waits.
    pub(super) fn is_anyone_waiting(&self) -> bool {
        self.count.load(SeqCst) > 0
    }

    /// Whether a driver may take a link that is free.
    pub(super) fn may_take(&self, driver: u64) -> bool {
        if !self.is_anyone_waiting() {
            return true;
        }
        let queue = self.queue();
        match queue.waiting.front() {
            Some(front) if front.driver != driver => {
                queue.offered.is_some_and(|offered| offered.elapsed() > CLAIM_LIMIT)
            }
            _ => true,
        }
    }

    /// Puts a driver at the end of the queue, if it is not in it.
    pub(super) fn enter(&self, driver: u64, waker: &Waker) {
        let mut queue = self.queue();
        match queue.waiting.iter_mut().find(|it| it.driver == driver) {
            Some(it) => it.waker.clone_from(waker),
            None => queue.waiting.push_back(Waiting { driver, waker: waker.clone() }),
        }
        self.count.store(queue.waiting.len(), SeqCst);
    }

    /// A driver does not wait any more.
    pub(super) fn leave(&self, driver: u64) {
        if !self.is_anyone_waiting() {
            return;
        }
        let mut queue = self.queue();
        queue.waiting.retain(|it| it.driver != driver);
        queue.offered = None;
        self.count.store(queue.waiting.len(), SeqCst);
        let wakers: Vec<Waker> = queue.waiting.iter().map(|it| it.waker.clone()).collect();
        drop(queue);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// A link is free, or may be opened: all who wait look again.
    pub(super) fn offer(&self) {
        if !self.is_anyone_waiting() {
            return;
        }
        let mut queue = self.queue();
        queue.offered.get_or_insert_with(Instant::now);
        let wakers: Vec<Waker> = queue.waiting.iter().map(|it| it.waker.clone()).collect();
        drop(queue);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_waited_longest_comes_first() {
        let turns = Turns::default();
        assert!(turns.may_take(1) && turns.may_take(2));
        turns.enter(1, Waker::noop());
        turns.enter(2, Waker::noop());
        turns.enter(1, Waker::noop());
        turns.offer();
        assert!(turns.may_take(1) && !turns.may_take(2) && !turns.may_take(3));
        turns.leave(1);
        assert!(!turns.may_take(1) && turns.may_take(2));
        turns.leave(2);
        assert!(!turns.is_anyone_waiting() && turns.may_take(3));
    }

    #[test]
    fn one_that_does_not_take_its_turn_is_passed_over() {
        let turns = Turns::default();
        turns.enter(1, Waker::noop());
        turns.offer();
        assert!(!turns.may_take(2));
        turns.queue().offered = Instant::now().checked_sub(CLAIM_LIMIT * 2);
        assert!(turns.may_take(2));
    }
}
