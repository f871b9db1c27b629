//! The rule that chooses which queues fetch and whether they poll.
//!
//! Promises: pure: it sees the load in windows of 2 ms and says what to do, so that it can be
//! tested by a simulation of loads. Called by one queue at a time.
//!
//! The rule. Work is counted in requests, plus one for each 64 KiB moved. While the work per time
//! is steady, another mode is tried now and then: one window passes for the client to settle, three
//! are measured. The trial is kept if it did at least 10 % more than the windows before it, and
//! does so again in a second trial (once is enough for half as much again): a few ms are noisy. A
//! lost trial doubles the pause before the next (8 ms to 512 ms), a change of the load makes the
//! next one due at once. So a wrong trial costs at most 8 ms in 512, less than 2 %, and a better
//! mode is found after a few tens of ms.

use std::time::Duration;

use ringdisk_export::{Measured, Pause, Trial, TrialRule, per_second};

/// Length of a window.
pub(super) const WINDOW_NS: u64 = 2_000_000;
/// A window that lasted longer than this saw the client stop: it says nothing about the mode.
const IDLE_NS: u64 = 10 * WINDOW_NS;
/// A window with less work than this says nothing either: at 4000 requests per second nobody waits
/// for the daemon's CPU.
const WORK_MIN: u64 = 8;
/// Windows between trials after one that was won.
const PAUSE_MIN: u64 = 4;
/// Windows between trials when none is won: 512 ms.
const PAUSE_MAX: u64 = 256;
/// Windows of a trial that are measured.
const RULE: TrialRule = TrialRule { windows_min: 3, windows_max: 3 };
/// A trial is kept from this gain on, in percent of the rate before.
const GAIN_PERCENT: u64 = 110;
/// A trial with this gain needs no second one.
const CLEAR_GAIN_PERCENT: u64 = 150;
/// The load has changed when the rate leaves this band around its mean, in percent.
const CHANGED_PERCENT: (u64, u64) = (60, 170);
/// Bytes that count as much as one request.
const BYTES_OF_A_REQUEST: u64 = 64 * 1024;

/// One choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mode {
    /// The one queue that fetches; `None`: all do.
    pub(super) queue: Option<usize>,
    /// How long the fetching queues poll before they sleep.
    pub(super) polls: Polls,
}

/// How long a queue polls before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polls {
    Off,
    /// 50 µs: longer than a client on another CPU needs for its next request (a few µs and its own
    /// wake-up), shorter than two wake-ups of an idle CPU.
    Short,
    /// 200 µs: bridges the gap between two bursts of a disk or a deep client.
    Long,
}

impl Polls {
    const ALL: [Polls; 3] = [Polls::Short, Polls::Off, Polls::Long];

    pub(super) fn cap(self) -> Duration {
        match self {
            Polls::Off => Duration::ZERO,
            Polls::Short => Duration::from_micros(50),
            Polls::Long => Duration::from_micros(200),
        }
    }
}

/// Totals of all queues at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    /// Nanoseconds.
    pub(super) now: u64,
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

impl Load {
    fn work(&self) -> u64 {
        self.requests + self.bytes / BYTES_OF_A_REQUEST
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Windows left until the next trial.
    Steady(u64),
    /// Another mode is tried.
    Trial(Trial<Mode>),
}

/// Chooses a mode by trial.
#[derive(Debug)]
pub(super) struct Policy {
    queues: usize,
    mode: Mode,
    state: State,
    last: Load,
    /// Mean rate of the present mode; 0: not known.
    mean: u64,
    pause: Pause,
    /// Number of the mode to try next.
    next: usize,
    /// A mode that has won one trial.
    won: Option<Mode>,
    /// Changes the mode at every step.
    restless: bool,
}

impl Policy {
    pub(super) fn new(queues: usize) -> Policy {
        Policy {
            queues: queues.max(1),
            mode: Mode { queue: Some(0), polls: Polls::Short },
            state: State::Steady(PAUSE_MIN),
            last: Load::default(),
            mean: 0,
            pause: Pause::new(PAUSE_MIN, PAUSE_MAX),
            next: 0,
            won: None,
            restless: false,
        }
    }

    /// One that never stays, to test that changes lose no request.
    pub(super) fn restless(queues: usize) -> Policy {
        Policy { restless: true, ..Policy::new(queues) }
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// One queue was not enough for the requests in flight.
    pub(super) fn spread(&mut self) {
        if self.queues > 1 {
            self.mode.queue = None;
            self.settle();
        }
    }

    /// A window has passed.
    pub(super) fn step(&mut self, load: &Load) {
        if self.restless {
            self.mode = self.candidate();
            return;
        }
        let nanos = load.now.saturating_sub(self.last.now);
        let work = load.work().saturating_sub(self.last.work());
        self.last = *load;
        if nanos > IDLE_NS || work < WORK_MIN {
            // A pause of the client ends a trial without a verdict.
            if let State::Trial(trial) = self.state {
                self.mode = trial.from;
            }
            self.pause.reset();
            self.settle();
            return;
        }
        match &mut self.state {
            State::Steady(left) => {
                let left = *left;
                self.steady(left, per_second(work, nanos));
            }
            State::Trial(trial) => {
                if let Some(Measured { rate, .. }) = trial.window(RULE, work, nanos) {
                    let trial = *trial;
                    self.judge(trial.from, trial.before, rate);
                }
            }
        }
    }

    fn steady(&mut self, left: u64, rate: u64) {
        let (low, high) = CHANGED_PERCENT;
        let changed =
            self.mean != 0 && (rate * 100 < self.mean * low || rate * 100 > self.mean * high);
        if changed {
            self.pause.reset();
            self.won = None;
            self.mean = rate;
            self.state = State::Steady(left.min(PAUSE_MIN));
            return;
        }
        self.mean = if self.mean == 0 { rate } else { (self.mean * 3 + rate) / 4 };
        if left > 0 {
            self.state = State::Steady(left - 1);
            return;
        }
        let from = self.mode;
        self.mode = self.won.unwrap_or_else(|| self.candidate());
        self.state = State::Trial(Trial::new(from, self.mean));
    }

    fn judge(&mut self, from: Mode, before: u64, after: u64) {
        let tried = self.mode;
        let is_second = self.won.take() == Some(tried);
        if after * 100 < before * GAIN_PERCENT {
            self.mode = from;
            self.pause.lost(PAUSE_MIN);
        } else if is_second || after * 100 >= before * CLEAR_GAIN_PERCENT {
            self.pause.won(PAUSE_MIN);
        } else {
            self.mode = from;
            self.won = Some(tried);
        }
        self.settle();
        if self.won.is_some() {
            self.state = State::Steady(PAUSE_MIN);
        }
    }

    fn settle(&mut self) {
        self.mean = 0;
        self.state = State::Steady(self.pause.length());
    }

    /// The next mode to try: all but the present one, in turn.
    fn candidate(&mut self) -> Mode {
        loop {
            let places = if self.queues == 1 { 1 } else { self.queues + 1 };
            let number = self.next % (places * Polls::ALL.len());
            self.next = number + 1;
            let place = number / Polls::ALL.len();
            let queue = (place < self.queues).then_some(place);
            let mode = Mode { queue, polls: Polls::ALL[number % Polls::ALL.len()] };
            if mode != self.mode {
                return mode;
            }
        }
    }
}

#[cfg(test)]
mod tests;
