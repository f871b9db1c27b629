//! Short timed sleeps (naps) in place of polling, while the client of a source is busy by itself.
//!
//! Promises: a nap is given up when requests come less often because of it.
//!
//! A client at high depth is a pipeline: it handles our answers one after the other, and sends a
//! new request each time. A thread that polls takes these one by one, burns a CPU for the time
//! between, and fights with the client over the cache lines of the ring. One that sleeps for a set
//! time finds a batch, and the client notices nothing as long as it still has answers to handle. So
//! the length is learnt from the one thing that must not suffer: how often requests come. No kick
//! is asked for meanwhile, since the timer ends the sleep.

use std::time::Duration;

/// Requests in a window: the clock is read once for all of them.
const WINDOW: u32 = 128;
/// Windows in a row that are taken together while it naps: a nap is about as long as a window.
const NAPPING_WINDOWS: u32 = 4;
/// Naps are tried when requests come at least this often.
const GAP_MAX: Duration = Duration::from_micros(4);
/// The first nap. A shorter one costs more for its timer (about 7 µs) than a poll.
const FIRST: Duration = Duration::from_micros(8);
/// Naps that have to be shorter are given up.
const SHORTEST: Duration = Duration::from_micros(5);
/// Longest nap: what a single request of another client waits at most for a deep one.
const LONGEST: Duration = Duration::from_micros(40);
/// Good measurements after one that was not, before naps get longer again.
const HOLD: u32 = 64;
/// Windows until the next trial after the first that failed, and at most.
const PAUSE_FIRST: u32 = 16;
const PAUSE_MAX: u32 = 4096;

/// Learns how long to nap. Owned by the ring thread.
#[derive(Clone, Debug)]
pub(crate) struct Nap {
    /// Zero: no naps.
    length: Duration,
    /// Requests since `since`.
    requests: u32,
    /// When the current window began; `None` after a sleep, which is no part of one.
    since: Option<Duration>,
    /// Nanoseconds between two requests when the client never waited, as far as we know.
    best: u64,
    /// The last measurement was bad.
    missed: bool,
    /// Good measurements left until naps get longer.
    hold: u32,
    /// Windows left until the next trial.
    pause: u32,
    pause_next: u32,
}

impl Nap {
    pub(crate) fn new() -> Nap {
        Nap {
            length: Duration::ZERO,
            requests: 0,
            since: None,
            best: u64::MAX,
            missed: false,
            hold: 0,
            pause: 0,
            pause_next: PAUSE_FIRST,
        }
    }

    /// Length of the next nap. Zero: poll.
    pub(crate) fn length(&self) -> Duration {
        self.length
    }

    /// The loop took `count` requests.
    ///
    /// * `clock`: the time since some fixed moment; asked at the end of a window only.
    pub(crate) fn took(&mut self, count: u32, clock: impl FnOnce() -> Duration) {
        self.requests += count;
        let napping = !self.length.is_zero();
        let window = if napping { WINDOW * NAPPING_WINDOWS } else { WINDOW };
        if self.requests < window && self.since.is_some() {
            return;
        }
        let now = clock();
        let requests = std::mem::take(&mut self.requests);
        let Some(since) = self.since.replace(now) else { return };
        let nanos = u64::try_from(now.saturating_sub(since).as_nanos()).unwrap_or(u64::MAX);
        let gap = nanos / u64::from(requests.max(1));
        if napping {
            self.napped(gap);
        } else if u128::from(gap) > GAP_MAX.as_nanos() {
            self.pause = self.pause.saturating_sub(1);
        } else if self.pause > 0 {
            self.pause -= 1;
        } else {
            self.best = gap;
            self.missed = false;
            self.hold = 0;
            self.length = FIRST;
        }
    }

    /// A measurement with naps.
    fn napped(&mut self, gap: u64) {
        let missed = gap > self.best.saturating_add(self.best / 10);
        // Once is chance: an interrupt, another thread of the client's CPU.
        let again = std::mem::replace(&mut self.missed, missed);
        if missed && !again {
            return;
        }
        if missed {
            // The client had nothing left to handle.
            self.length = self.length * 3 / 4;
            self.hold = HOLD;
            if self.length < SHORTEST {
                self.length = Duration::ZERO;
                self.pause = self.pause_next;
                self.pause_next = (self.pause_next * 2).min(PAUSE_MAX);
            }
            return;
        }
        // Forgets slowly, for a client that has become slower by itself.
        self.best = self.best.min(gap) + self.best / 1024;
        self.hold = self.hold.saturating_sub(1);
        if self.hold == 0 {
            self.length = (self.length + self.length / 8).min(LONGEST);
            self.pause_next = PAUSE_FIRST;
        }
    }

    /// The thread has slept until it was woken: the client was idle.
    pub(crate) fn slept(&mut self) {
        self.length = Duration::ZERO;
        self.since = None;
        self.requests = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client with `depth` requests that handles each answer in `cost`, and a thread that looks,
    /// serves for nothing and naps. Returns requests for each millisecond of virtual time, and what
    /// part of it was not slept.
    fn simulate(nap: &mut Nap, depth: u64, cost: Duration, time: Duration) -> (f64, f64) {
        let timer = Duration::from_micros(6);
        let poll = Duration::from_nanos(200);
        let (mut now, mut awake, mut served) = (Duration::ZERO, Duration::ZERO, 0u64);
        // Answers that the client has not handled; when it will have handled the next.
        let (mut answers, mut next) = (depth, cost);
        while now < time {
            let step = match nap.length() {
                Duration::ZERO => poll,
                length => length + timer,
            };
            awake += if nap.length().is_zero() { poll } else { timer };
            now += step;
            let mut came = 0u32;
            while answers > 0 && next <= now {
                answers -= 1;
                came += 1;
                next += cost;
            }
            if answers == 0 {
                // It waits for us.
                next = now + cost;
            }
            if came > 0 {
                nap.took(came, || now);
                answers += u64::from(came);
                served += u64::from(came);
            }
        }
        (served as f64 / (now.as_secs_f64() * 1e3), awake.as_secs_f64() / now.as_secs_f64())
    }

    #[test]
    fn a_deep_client_loses_nothing_and_we_sleep_most_of_the_time() {
        let cost = Duration::from_nanos(1200);
        for depth in [32, 64, 128, 256] {
            let (rate, awake) = simulate(&mut Nap::new(), depth, cost, Duration::from_secs(1));
            let full = 1e6 / 1200.0;
            assert!(rate > full * 0.95, "depth {depth}: {rate} of {full} for each ms");
            assert!(awake < 0.45, "depth {depth}: {awake}");
        }
    }

    #[test]
    fn a_client_that_waits_for_us_is_polled_for() {
        for depth in [1, 2, 4] {
            let mut nap = Nap::new();
            let cost = Duration::from_nanos(1500);
            simulate(&mut nap, depth, cost, Duration::from_millis(200));
            let (rate, _) = simulate(&mut nap, depth, cost, Duration::from_secs(1));
            let full = 1e6 / 1700.0;
            assert!(rate > full * 0.8, "depth {depth}: {rate} of {full} for each ms");
        }
    }

    #[test]
    fn a_client_that_becomes_slower_is_not_taken_for_one_that_waits_for_ever() {
        let mut nap = Nap::new();
        simulate(&mut nap, 128, Duration::from_nanos(800), Duration::from_secs(1));
        let slow = Duration::from_nanos(1600);
        simulate(&mut nap, 128, slow, Duration::from_secs(1));
        let (rate, awake) = simulate(&mut nap, 128, slow, Duration::from_secs(1));
        assert!(rate > 1e6 / 1600.0 * 0.95 && awake < 0.5, "{rate} for each ms, {awake} awake");
    }

    #[test]
    fn a_rare_request_never_makes_it_nap() {
        let mut nap = Nap::new();
        for at in 0..100_000u64 {
            nap.took(1, || Duration::from_micros(10 * at));
            assert!(nap.length().is_zero());
        }
    }

    #[test]
    fn a_sleep_ends_naps() {
        let mut nap = Nap::new();
        simulate(&mut nap, 128, Duration::from_nanos(1000), Duration::from_millis(100));
        assert!(!nap.length().is_zero());
        nap.slept();
        assert!(nap.length().is_zero());
    }
}
