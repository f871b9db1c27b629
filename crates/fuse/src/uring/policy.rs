//! The rule by which the entries of a queue move between the thread on its own CPU and the one beside it.
//!
//! Pure: it sees the load in windows of 2 ms, so that it can be tested by a simulation of loads. Called by one thread at a time.
//!
//! Why: a client that waits for each reply is served best on its own CPU (to wake an idle one costs tens of µs); one that keeps many
//! requests in flight is served best on another (on its own they take turns); large requests want two threads, since a ring's thread
//! does all the copying of its entries.
//!
//! The rule. At home, with more than 9/8 requests for each turn of the loop (clients that wait show at most one) another spot is tried:
//! split for large requests, else away. Elsewhere home is tried when the rate fell below what home had, or the pause is over. A trial
//! skips one window and measures the next: home is kept with 9/10 of the rate before, another spot with 23/20. After a trial there
//! is a pause of 8 ms, which each lost trial doubles up to 128 ms.

/// Length of a window.
pub(super) const WINDOW_NS: u64 = 2_000_000;
/// A window that lasted longer than this saw the client stop.
const IDLE_NS: u64 = 10 * WINDOW_NS;
/// A window with fewer requests says nothing yet.
const REQUESTS_MIN: u64 = 8;
const PAUSE_MIN_NS: u64 = 8_000_000;
const PAUSE_MAX_NS: u64 = 128_000_000;
/// From this mean on requests are large: copying them takes longer than handing them over.
const LARGE_BYTES: u64 = 64 * 1024;

/// Where the entries of a queue are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Spot {
    /// With the thread on the queue's own CPU.
    #[default]
    Home = 0,
    /// With the thread beside it.
    Away = 1,
    /// Half and half.
    Split = 2,
}

impl From<u8> for Spot {
    fn from(number: u8) -> Spot {
        match number {
            1 => Spot::Away,
            2 => Spot::Split,
            _ => Spot::Home,
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
    /// The thread that looks, its requests, and the turns of its loop.
    pub(super) thread: usize,
    pub(super) own: u64,
    pub(super) turns: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Steady,
    /// Back to `from` unless this does better than `rate`.
    Trial {
        from: Spot,
        rate: u64,
        skipped: bool,
    },
}

/// Chooses a spot by trial.
#[derive(Debug)]
pub(super) struct Policy {
    can_move: bool,
    spot: Spot,
    state: State,
    last: Option<Load>,
    /// Rate that home had last.
    home_rate: u64,
    pause: u64,
    /// No trial before this moment.
    not_before: u64,
}

impl Policy {
    pub(super) fn new(can_move: bool) -> Policy {
        Policy {
            can_move,
            spot: Spot::Home,
            state: State::Steady,
            last: None,
            home_rate: 0,
            pause: PAUSE_MIN_NS,
            not_before: 0,
        }
    }

    pub(super) fn spot(&self) -> Spot {
        self.spot
    }

    /// A window has passed.
    pub(super) fn step(&mut self, load: &Load) {
        let Some(last) = self.last.replace(*load) else { return };
        let nanos = load.now.saturating_sub(last.now).max(1);
        let requests = load.requests.saturating_sub(last.requests);
        if !self.can_move {
            return;
        }
        if requests < REQUESTS_MIN && nanos <= IDLE_NS {
            // Too few to say anything: a longer window.
            self.last = Some(last);
            return;
        }
        if nanos > IDLE_NS {
            // A client that pauses ends a trial without a verdict, and begins at home again.
            self.spot = Spot::Home;
            self.state = State::Steady;
            self.pause = PAUSE_MIN_NS;
            self.not_before = 0;
            return;
        }
        let rate = requests.saturating_mul(1_000_000_000) / nanos;
        match self.state {
            State::Steady => self.steady(load, &last, rate),
            State::Trial { from, rate: before, skipped: false } => {
                self.state = State::Trial { from, rate: before, skipped: true };
            }
            State::Trial { from, rate: before, .. } => self.judge(load.now, from, before, rate),
        }
    }

    fn steady(&mut self, load: &Load, last: &Load, rate: u64) {
        if self.spot == Spot::Home {
            self.home_rate = rate;
        }
        let is_time = load.now >= self.not_before;
        let next = match self.spot {
            Spot::Home if is_time && several_at_once(load, last) => {
                let bytes = load.bytes.saturating_sub(last.bytes);
                let requests = load.requests.saturating_sub(last.requests).max(1);
                if bytes / requests >= LARGE_BYTES { Spot::Split } else { Spot::Away }
            }
            Spot::Home => return,
            _ if is_time || rate < self.home_rate => Spot::Home,
            _ => return,
        };
        self.state = State::Trial { from: self.spot, rate, skipped: false };
        self.spot = next;
    }

    fn judge(&mut self, now: u64, from: Spot, before: u64, rate: u64) {
        let won = match self.spot {
            Spot::Home => {
                self.home_rate = rate;
                rate * 10 > before * 9
            }
            _ => rate * 20 > before * 23,
        };
        if won {
            self.pause = PAUSE_MIN_NS;
        } else {
            self.spot = from;
            self.pause = (self.pause * 2).min(PAUSE_MAX_NS);
        }
        self.not_before = now + self.pause;
        self.state = State::Steady;
    }
}

/// Whether the client keeps several requests in flight: more than one came in a turn of the loop.
fn several_at_once(load: &Load, last: &Load) -> bool {
    let turns = load.turns.saturating_sub(last.turns);
    let own = load.own.saturating_sub(last.own);
    load.thread == last.thread && own * 8 >= turns * 9
}

#[cfg(test)]
mod tests;
