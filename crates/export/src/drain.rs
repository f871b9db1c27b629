//! Stop and wait: a queue takes no more requests, and those in flight are waited for.
//!
//! Promises: a request that was admitted is counted until it is done; a queue that is held admits
//! none. [`Admission`] belongs to one queue thread: plain cells, no atomics.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ringdisk_ring::{Parker, Ring};

use crate::retry::retry_while;

/// How often the control thread looks whether requests are still in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Which requests a queue takes: all, or none while it is held.
///
/// Taking and ending a request allocates nothing; what waits here allocates.
#[derive(Debug, Default)]
pub struct Admission {
    holds: Cell<u32>,
    in_flight: Cell<u32>,
    /// Tasks that wait until nothing is in flight.
    draining: Waiters,
    /// Tasks that wait until the queue is not held.
    held: Waiters,
}

/// Tasks that wait for the same thing. They are few and rare: each allocates.
#[derive(Debug, Default)]
struct Waiters(RefCell<Vec<Rc<Parker>>>);

impl Waiters {
    async fn wait(&self, ring: &Ring) {
        let parker = Rc::new(Parker::default());
        self.0.borrow_mut().push(Rc::clone(&parker));
        parker.park(ring).await;
    }

    fn wake_all(&self, ring: &Ring) {
        self.0.take().iter().for_each(|parker| parker.unpark(ring));
    }
}

impl Admission {
    /// Whether the queue is held.
    #[inline]
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.holds.get() > 0
    }

    /// A request is taken. Not while the queue is held.
    #[inline]
    pub fn begin(&self, ring: &Ring) {
        ring.begin_request();
        self.in_flight.set(self.in_flight.get() + 1);
    }

    /// It is done.
    #[inline]
    pub fn end(&self, ring: &Ring) {
        ring.end_request();
        let left = self.in_flight.get() - 1;
        self.in_flight.set(left);
        if left == 0 && self.is_held() {
            self.draining.wake_all(ring);
        }
    }

    /// Waits until the queue is not held, then takes a request. For queues whose tasks fetch by
    /// themselves.
    pub async fn admit(&self, ring: &Ring) {
        while self.is_held() {
            self.held.wait(ring).await;
        }
        self.begin(ring);
    }

    /// Takes no more requests, and waits until none is in flight. Holds add up.
    pub async fn hold(&self, ring: &Ring) {
        self.holds.set(self.holds.get() + 1);
        while self.in_flight.get() > 0 {
            self.draining.wait(ring).await;
        }
    }

    /// Ends one [`Admission::hold`], also one that still waits.
    pub fn release(&self, ring: &Ring) {
        self.holds.set(self.holds.get() - 1);
        if !self.is_held() {
            self.held.wake_all(ring);
        }
    }
}

/// Waits, on the control thread, until no request is in flight.
///
/// * `in_flight`: how many there are now.
///
/// Errors: how many did not end in time.
pub fn wait_drained(in_flight: impl Fn() -> usize, limit: Duration) -> Result<(), usize> {
    match retry_while(limit, POLL_INTERVAL, |count| *count > 0, in_flight) {
        0 => Ok(()),
        count => Err(count),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ringdisk_ring::{Config, Runtime};

    use super::*;

    const TICK: Duration = Duration::from_millis(2);

    #[test]
    fn a_hold_waits_for_what_is_in_flight_and_keeps_the_rest_out() {
        let mut runtime = Runtime::new(Config::default()).expect("a ring");
        let ring = runtime.ring().clone();
        let (queue, seen) = (Rc::new(Admission::default()), Rc::new(RefCell::new(Vec::new())));
        queue.begin(&ring);
        for holder in ["first", "second"] {
            let (queue, ring, seen) = (Rc::clone(&queue), ring.clone(), Rc::clone(&seen));
            runtime.ring().spawn(async move {
                queue.hold(&ring).await;
                seen.borrow_mut().push(holder);
            });
        }
        for _ in 0..2 {
            let (queue, ring, seen) = (Rc::clone(&queue), ring.clone(), Rc::clone(&seen));
            runtime.ring().spawn(async move {
                ring.sleep(TICK).await;
                queue.admit(&ring).await;
                seen.borrow_mut().push("admitted");
                queue.end(&ring);
            });
        }
        runtime.block_on(async {
            ring.sleep(4 * TICK).await;
            assert!(seen.borrow().is_empty(), "a request is in flight");
            queue.end(&ring);
            ring.sleep(4 * TICK).await;
            assert_eq!(*seen.borrow(), ["first", "second"]);
            queue.release(&ring);
            ring.sleep(4 * TICK).await;
            assert_eq!(seen.borrow().len(), 2, "it is held by the second");
            queue.release(&ring);
            ring.sleep(4 * TICK).await;
            assert_eq!(seen.borrow()[2..], ["admitted", "admitted"]);
        });
    }

    #[test]
    fn requests_that_do_not_end_are_counted() {
        let left = AtomicUsize::new(3);
        let count =
            || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        assert_eq!(wait_drained(|| count().unwrap_or(0), Duration::from_secs(20)), Ok(()));
        assert_eq!(wait_drained(|| 2, TICK), Err(2));
    }
}
