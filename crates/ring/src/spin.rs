//! Decides when a thread polls before it sleeps.
//!
//! Promises: an idle export is never polled; polls that keep missing become rare. A thread that
//! sleeps pays a wake-up; one that polls takes a CPU that its client may need. Which
//! is cheaper depends on the client, so the policy tries and learns: a poll that found work pays,
//! one that did not costs. After misses it pauses, each time for longer; after a long sleep (an
//! idle export) it does not poll at all. Where threads that need the CPU all the time take it from
//! a poll, the thread sleeps: the scheduler lets a thread that wakes up go before those, and one
//! that polls wait for all of them.

use std::time::{Duration, Instant};

/// Polls in a row that must miss before the pause starts. More than one, since clients and disks
/// answer in bursts: a poll between two bursts misses, those inside one pay.
const MISSES_ALLOWED: u32 = 8;
/// Longest pause, in sleeps. At one sleep for each request this is one trial in 1024 requests.
const PAUSE_MAX: u32 = 1024;
/// A pause after the first failed trial, in sleeps.
const PAUSE_FIRST: u32 = 16;
/// After a poll that lost its CPU for some time there is no poll for so many times that: the next
/// one may lose it again.
const REST_FACTOR: u32 = 32;
/// The longest time without a poll for that reason.
const REST_MAX: Duration = Duration::from_secs(1);

/// Learns whether polling for a while before sleeping pays. Owned by the ring thread.
#[derive(Clone, Debug)]
pub struct SpinPolicy {
    cap: Duration,
    /// Misses since the last poll that paid.
    misses: u32,
    /// Sleeps left before the next trial.
    pause: u32,
    /// Length of the next pause.
    pause_next: u32,
    /// The last sleep was long: the export is idle.
    idle: bool,
    /// No poll before this time: other threads need the CPU.
    rests_until: Option<Instant>,
}

impl SpinPolicy {
    /// Never polls.
    pub fn off() -> SpinPolicy {
        SpinPolicy::adaptive(Duration::ZERO)
    }

    /// Polls for at most `cap` before a sleep, as long as that pays.
    pub fn adaptive(cap: Duration) -> SpinPolicy {
        SpinPolicy {
            cap,
            misses: 0,
            pause: 0,
            pause_next: PAUSE_FIRST,
            idle: false,
            rests_until: None,
        }
    }

    /// The longest poll.
    pub fn cap(&self) -> Duration {
        self.cap
    }

    /// Sets the longest poll, and forgets what was learned with another one.
    pub(crate) fn set_cap(&mut self, cap: Duration) {
        if cap != self.cap {
            *self = SpinPolicy::adaptive(cap);
        }
    }

    /// Time to poll now; zero: sleep at once.
    pub(crate) fn budget(&mut self) -> Duration {
        if self.cap.is_zero() || self.idle {
            return Duration::ZERO;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return Duration::ZERO;
        }
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return Duration::ZERO;
        }
        self.rests_until = None;
        self.cap
    }

    /// A poll found work.
    pub(crate) fn paid(&mut self) {
        self.misses = 0;
        self.pause_next = PAUSE_FIRST;
    }

    /// A poll ran out of its budget.
    pub(crate) fn missed(&mut self) {
        self.misses += 1;
        if self.misses >= MISSES_ALLOWED {
            self.pause = self.pause_next;
            self.pause_next = (self.pause_next * 2).min(PAUSE_MAX);
        }
    }

    /// Other threads had the CPU during a poll, for `lost` at once; the poll ended at `now`.
    pub(crate) fn displaced(&mut self, lost: Duration, now: Instant) {
        self.rests_until = Some(now + (lost * REST_FACTOR).min(REST_MAX));
    }

    /// A sleep took `slept`. One that is much longer than the cap marks the export idle: the next
    /// request does not make the thread poll, the one after it may.
    pub(crate) fn slept(&mut self, slept: Duration) {
        self.idle = slept > self.cap * 20;
    }
}
