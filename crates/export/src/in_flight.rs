//! The requests in flight of one queue, for the watchdog of the export.
//!
//! Promises: the queue thread writes one word when a request begins and one when it ends; any
//! thread reads them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The clock of an export: all of its queues count from the same moment.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Counts from now.
    #[must_use]
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    /// Nanoseconds since the start of the export, never 0.
    #[inline]
    #[must_use]
    pub fn nanos(self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.0).as_nanos()).unwrap_or(u64::MAX).max(1)
    }
}

/// Start times by the number of the entry (of the slot, of the buffer), as [`Clock::nanos`]; 0 for
/// an entry without a request.
#[derive(Debug)]
pub struct InFlight(Box<[AtomicU64]>);

impl InFlight {
    /// * `entries`: that the queue may ever have.
    #[must_use]
    pub fn new(entries: usize) -> InFlight {
        InFlight((0..entries).map(|_| AtomicU64::new(0)).collect())
    }

    /// A request is in this entry since `nanos`. Queue thread.
    #[inline]
    pub fn begin(&self, entry: usize, nanos: u64) {
        self.0[entry].store(nanos, Ordering::Relaxed);
    }

    /// The request of this entry is done. Queue thread.
    #[inline]
    pub fn end(&self, entry: usize) {
        self.0[entry].store(0, Ordering::Relaxed);
    }

    /// Age of the oldest request at `now` (as [`Clock::nanos`]). Any thread.
    #[must_use]
    pub fn oldest(&self, now: u64) -> Option<Duration> {
        let started = self.0.iter().map(|started| started.load(Ordering::Relaxed));
        let first = started.filter(|&started| started != 0).min()?;
        Some(Duration::from_nanos(now.saturating_sub(first)))
    }

    /// Requests in flight. Any thread.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.iter().filter(|started| started.load(Ordering::Relaxed) != 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_request_is_found_and_all_are_counted() {
        let (clock, in_flight) = (Clock::start(), InFlight::new(3));
        assert_eq!((in_flight.count(), in_flight.oldest(9)), (0, None));
        in_flight.begin(2, 400);
        in_flight.begin(0, 100);
        let age = Duration::from_nanos(500);
        assert_eq!((in_flight.count(), in_flight.oldest(600)), (2, Some(age)));
        in_flight.end(0);
        assert_eq!((in_flight.count(), in_flight.oldest(300)), (1, Some(Duration::ZERO)));
        assert!(clock.nanos(Instant::now()) > 0);
    }
}
