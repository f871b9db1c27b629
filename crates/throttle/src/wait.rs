//! The wait of one request.
//!
//! Promises: dropping it takes the request out of the queue, and another one keeps the time.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringdisk_ring::{Ring, Sleep};

use crate::Kind;
use crate::buckets::lock;
use crate::group::Group;
use crate::queue::Ticket;

/// Shortest sleep of a timekeeper, nanoseconds: what it sleeps too long is there for the requests
/// after it, so it costs them nothing.
const SLEEP_MIN: u64 = 20_000;
/// Longest sleep, nanoseconds: a moment that cannot be computed is looked for again.
const SLEEP_MAX: u64 = 1_000_000_000;

/// The future; it is ready when the request may go on.
pub(crate) struct Wait<'a> {
    group: &'a Group,
    /// Its number in the group.
    member: usize,
    /// Not 0: the limits of the member are lifted.
    lifts: &'a AtomicUsize,
    ring: &'a Ring,
    ticket: Arc<Ticket>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Wait<'_> {
    pub(crate) fn new<'a>(
        group: &'a Group,
        (member, lifts): (usize, &'a AtomicUsize),
        ring: &'a Ring,
        (kind, bytes): (Kind, u64),
    ) -> Wait<'a> {
        let ticket = Arc::new(Ticket { kind, bytes, has_passed: AtomicBool::new(false) });
        Wait { group, member, lifts, ring, ticket, sleep: None }
    }

    fn has_passed(&self) -> bool {
        self.ticket.has_passed.load(Ordering::Acquire)
    }
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let group = self.group;
        loop {
            if self.has_passed() {
                return Poll::Ready(());
            }
            if self.lifts.load(Ordering::Acquire) > 0 {
                group.shared.count(group.now(), self.ticket.kind, self.ticket.bytes);
                return Poll::Ready(());
            }
            let admitted = {
                let mut queue = lock(&group.queues[self.ticket.kind as usize]);
                if self.has_passed() {
                    return Poll::Ready(());
                }
                queue.put(self.member, &self.ticket, context.waker(), &group.shared);
                queue.admit(&group.shared, group.now(), &self.ticket)
            };
            admitted.wakers.into_iter().for_each(Waker::wake);
            if self.has_passed() {
                return Poll::Ready(());
            }
            let Some(nanos) = admitted.sleep else { return Poll::Pending };
            let nanos = nanos.clamp(SLEEP_MIN, SLEEP_MAX);
            let mut sleep = Box::pin(self.ring.sleep(Duration::from_nanos(nanos)));
            if sleep.as_mut().poll(context).is_pending() {
                self.sleep = Some(sleep);
                return Poll::Pending;
            }
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let group = self.group;
        let waker = {
            let mut queue = lock(&group.queues[self.ticket.kind as usize]);
            queue.remove(self.member, &self.ticket, &group.shared)
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
