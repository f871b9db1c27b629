//! The rule by which a queue thread follows the load: where it may run, and where its entries are.
//!
//! Promises: pure: it sees the load in windows of 2 ms, so that it can be tested by a simulation of
//! loads. Called by one thread at a time.
//!
//! Why: a client that waits for each reply is served best on its own CPU (to wake an idle one costs
//! tens of µs); one that keeps several requests in flight is served best from any CPU that is idle
//! just then, which the scheduler knows (on the client's own they take turns, and a fixed other one
//! is often asleep or taken); large requests want two threads, since a ring's thread does all the
//! copying of its entries; requests that wait for storage want two as well, since each polls for
//! its own while they do.
//!
//! The rule. At home, with several requests at once another spot is tried: split for large requests
//! and those that wait for storage, else free. Several: more than 9/8 for each turn of the loop
//! (clients that wait show at most one), or, where requests take 20 µs and more, more than 3/2 in
//! flight on the average. Elsewhere home is tried when the pause is over, or when the rate has
//! fallen by half for four windows. A trial skips one window and measures the next; if that is not
//! clear (a fifth less, a quarter more), up to three more. Home is kept with 97/100 of the rate
//! before, another spot with 21/20. After a clear trial there is a pause of 64 ms, else of 8 ms;
//! each trial that leads back doubles it, up to a second, or until the rate is another one for four
//! windows. A thread that wakes up after 20 ms without requests begins where the last trial of any
//! thread ended, if that was within a second: a client that moved to another CPU is the same
//! client; a client that waits is not.
//!
//! The rates of disks vary by themselves. Where requests wait for storage a trial measures up to
//! eight windows, split is kept with 19/20, and home after it with 11/10: on files split was better
//! nearly always. Home after free, where a load was before it began to wait, is kept with 3/4:
//! split is tried from home only.
//!
//! `bench/loads --tables placement,mixed` measures what this reaches beside the fixed spots.

use ringdisk_export::{Measured, Pause, Trial, TrialRule, per_second};

/// Length of a window.
pub(super) const WINDOW_NS: u64 = 2_000_000;
/// When nothing came for longer than this the client had stopped.
const IDLE_NS: u64 = 10 * WINDOW_NS;
/// A window with fewer requests says nothing yet.
const REQUESTS_MIN: u64 = 8;
const PAUSE_MIN_NS: u64 = 8_000_000;
const PAUSE_CLEAR_NS: u64 = 64_000_000;
const PAUSE_MAX_NS: u64 = 1_024_000_000;
/// Windows that a trial measures.
const RULE: TrialRule = TrialRule { windows_min: 1, windows_max: 4 };
/// The same where requests wait for storage.
const RULE_SLOW: TrialRule = TrialRule { windows_min: 1, windows_max: 8 };
/// Requests that wait for something, and take longer on the average, wait for storage. Those that
/// are served in one go do not count: on a slow or busy machine they take as long.
const SLOW_NS: u64 = 20_000;
/// Windows in a row that show another load.
const CHANGED_WINDOWS: u32 = 4;
/// Windows in a row without several requests at once, after which a client counts as one that
/// waits.
const WAITING_WINDOWS: u32 = 4;
/// From this mean on requests are large: copying them takes longer than handing them over.
const LARGE_BYTES: u64 = 64 * 1024;

/// Where a thread runs and its entries are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Spot {
    /// The thread is bound to its CPU and has its entries.
    #[default]
    Home = 0,
    /// The thread has its entries and runs where the scheduler wants, on its node.
    Free = 1,
    /// Each is bound to its CPU, and the thread beside has half of the entries.
    Split = 2,
    /// The thread beside has them all. Only to compare: the rule never chooses it.
    Away = 3,
}

impl From<u8> for Spot {
    fn from(number: u8) -> Spot {
        match number {
            1 => Spot::Free,
            2 => Spot::Split,
            3 => Spot::Away,
            _ => Spot::Home,
        }
    }
}

/// A spot that is not left. For measurements of just that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// Threads and entries on the CPU of their callers.
    Home,
    /// Threads run where the scheduler wants.
    Free,
    /// Half of the entries at the thread beside.
    Split,
    /// All entries at the thread beside.
    Away,
}

impl Stay {
    pub(super) fn spot(self) -> Spot {
        match self {
            Stay::Home => Spot::Home,
            Stay::Free => Spot::Free,
            Stay::Split => Spot::Split,
            Stay::Away => Spot::Away,
        }
    }
}

/// Totals at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    /// Nanoseconds.
    pub(super) now: u64,
    /// Requests of both threads.
    pub(super) requests: u64,
    /// Bytes of both threads.
    pub(super) bytes: u64,
    /// The thread that looks, its requests, the nanoseconds that those of them were here which
    /// waited, and the turns of its loop.
    pub(super) thread: usize,
    pub(super) own: u64,
    pub(super) own_ns: u64,
    pub(super) turns: u64,
    /// Where a thread begins that was idle.
    pub(super) begin: Spot,
    /// The thread beside is in a trial: one at a time, since both see the requests of both.
    pub(super) must_wait: bool,
}

/// A spot is being tried.
#[derive(Clone, Copy, Debug)]
struct SpotTrial {
    trial: Trial<Spot>,
    /// Requests wait for storage.
    is_slow: bool,
}

/// Chooses a spot by trial.
#[derive(Debug)]
pub(super) struct Policy {
    can_move: bool,
    spot: Spot,
    trial: Option<SpotTrial>,
    last: Option<Load>,
    /// When the last look was, nanoseconds; a window may be longer.
    seen: u64,
    /// Smoothed rate in this spot, requests per second; 0: not known yet.
    rate: u64,
    /// Windows in a row whose rate was another one.
    changed: u32,
    /// Windows in a row in which clients waited.
    waiting: u32,
    /// This spot is what another thread has found.
    is_guess: bool,
    pause: Pause,
    /// No trial before this moment.
    not_before: u64,
}

/// What a step has led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing.
    Same,
    /// To another spot, for a trial or after an idle time.
    Moved,
    /// A trial has ended.
    Judged,
}

impl Policy {
    /// * `stay`: the spot that is never left.
    pub(super) fn new(can_move: bool, stay: Option<Spot>) -> Policy {
        Policy {
            can_move: can_move && stay.is_none(),
            spot: stay.unwrap_or_default(),
            trial: None,
            last: None,
            seen: 0,
            rate: 0,
            changed: 0,
            waiting: 0,
            is_guess: false,
            pause: Pause::new(PAUSE_MIN_NS, PAUSE_MAX_NS),
            not_before: 0,
        }
    }

    pub(super) fn spot(&self) -> Spot {
        self.spot
    }

    /// Whether a trial is going on.
    pub(super) fn is_trying(&self) -> bool {
        self.trial.is_some()
    }

    /// The next window begins with these totals.
    pub(super) fn begin_window(&mut self, load: &Load) {
        self.last = Some(*load);
    }

    /// A window has passed.
    pub(super) fn step(&mut self, load: &Load) -> Step {
        let quiet = load.now.saturating_sub(std::mem::replace(&mut self.seen, load.now));
        let Some(last) = self.last.replace(*load) else { return Step::Same };
        if !self.can_move {
            return Step::Same;
        }
        let nanos = load.now.saturating_sub(last.now).max(1);
        let requests = load.requests.saturating_sub(last.requests);
        if quiet > IDLE_NS {
            return self.wake(load);
        }
        if requests < REQUESTS_MIN {
            // Too few to say anything: a longer window.
            self.last = Some(last);
            return Step::Same;
        }
        match self.trial.take() {
            Some(trial) => self.measure(trial, load.now, requests, nanos),
            None => self.steady(load, &last, per_second(requests, nanos)),
        }
    }

    /// After a pause of the client, which ends a trial without a verdict.
    fn wake(&mut self, load: &Load) -> Step {
        let before = self.spot;
        self.trial = None;
        self.go(load.begin);
        self.pause.reset();
        self.is_guess = load.begin != Spot::Home;
        self.not_before = if self.is_guess { load.now + PAUSE_CLEAR_NS } else { 0 };
        if self.spot == before { Step::Same } else { Step::Moved }
    }

    fn steady(&mut self, load: &Load, last: &Load, rate: u64) -> Step {
        let before = self.rate;
        let is_changed = self.follow(rate);
        let has_collapsed = is_changed && rate * 2 < before;
        let own = Own::new(load, last);
        let several = own.several_at_once();
        let is_slow = own.is_slow();
        if has_collapsed || (is_changed && self.spot == Spot::Home) {
            self.pause.reset();
            self.not_before = 0;
        }
        let is_time = load.now >= self.not_before;
        let mean = load.bytes.saturating_sub(last.bytes)
            / load.requests.saturating_sub(last.requests).max(1);
        let is_large = mean >= LARGE_BYTES;
        match self.spot {
            Spot::Home if !several => {
                self.waiting += 1;
                if self.waiting >= WAITING_WINDOWS {
                    // The next client has not lost a trial yet.
                    self.pause.reset();
                    self.not_before = 0;
                }
                return Step::Same;
            }
            Spot::Home => self.waiting = 0,
            _ => {}
        }
        // A guess that does not fit this client is given up at once.
        let is_misplaced = self.is_guess && self.spot != Spot::Home && !several;
        if load.must_wait || (!is_time && !is_misplaced) {
            return Step::Same;
        }
        self.is_guess = false;
        let next = match self.spot {
            Spot::Home if is_large || is_slow => Spot::Split,
            Spot::Home => Spot::Free,
            _ => Spot::Home,
        };
        let from = self.spot;
        let rate = self.rate;
        self.go(next);
        self.trial = Some(SpotTrial { trial: Trial::new(from, rate), is_slow });
        Step::Moved
    }

    /// Smooths the rate; true when it is another one than before.
    fn follow(&mut self, rate: u64) -> bool {
        if self.rate == 0 {
            self.rate = rate;
            return false;
        }
        if rate * 4 > self.rate * 3 && rate * 3 < self.rate * 4 {
            self.changed = 0;
            self.rate = (self.rate * 3 + rate) / 4;
            return false;
        }
        self.changed += 1;
        if self.changed < CHANGED_WINDOWS {
            return false;
        }
        self.changed = 0;
        self.rate = rate;
        true
    }

    fn measure(&mut self, mut tried: SpotTrial, now: u64, requests: u64, nanos: u64) -> Step {
        let SpotTrial { trial, is_slow } = &mut tried;
        let rule = if *is_slow { RULE_SLOW } else { RULE };
        let Some(Measured { rate, is_clear }) = trial.window(rule, requests, nanos) else {
            self.trial = Some(tried);
            return Step::Same;
        };
        let SpotTrial { trial, is_slow } = tried;
        let has_won = match self.spot {
            Spot::Home if is_slow && trial.from == Spot::Split => rate * 10 >= trial.before * 11,
            // The way from free to split.
            Spot::Home if is_slow => rate * 4 >= trial.before * 3,
            Spot::Home => rate * 100 >= trial.before * 97,
            _ if is_slow => rate * 20 >= trial.before * 19,
            _ => rate * 20 >= trial.before * 21,
        };
        let shortest = if is_clear { PAUSE_CLEAR_NS } else { PAUSE_MIN_NS };
        if has_won {
            self.rate = rate;
            // Perhaps by chance: looked at again soon.
            self.pause.won(shortest);
        } else {
            self.go(trial.from);
            self.rate = trial.before;
            self.pause.lost(shortest);
        }
        self.not_before = now + self.pause.length();
        Step::Judged
    }

    fn go(&mut self, spot: Spot) {
        self.spot = spot;
        self.rate = 0;
        self.changed = 0;
        self.waiting = 0;
    }
}

/// What the thread that looks did in a window.
struct Own {
    requests: u64,
    turns: u64,
    /// That requests were here which waited, added up.
    waited_ns: u64,
    window_ns: u64,
}

impl Own {
    fn new(load: &Load, last: &Load) -> Own {
        let is_same = load.thread == last.thread;
        let since = |now: u64, then: u64| if is_same { now.saturating_sub(then) } else { 0 };
        Own {
            requests: since(load.own, last.own),
            turns: since(load.turns, last.turns),
            waited_ns: since(load.own_ns, last.own_ns),
            window_ns: load.now.saturating_sub(last.now).max(1),
        }
    }

    /// Whether requests wait for storage.
    fn is_slow(&self) -> bool {
        self.requests > 0 && self.waited_ns >= self.requests * SLOW_NS
    }

    /// Whether clients keep several requests in flight.
    fn several_at_once(&self) -> bool {
        let is_batch = self.requests > 0 && self.requests * 8 >= self.turns * 9;
        is_batch || (self.is_slow() && self.waited_ns * 2 >= self.window_ns * 3)
    }
}

#[cfg(test)]
mod tests;
