//! Gate that the pieces of a long operation pass: pause, speed limit, and rest after an error.
//!
//! Promises: pure but for the wakers; times are given by the caller. Every change wakes all who
//! wait, and each of them looks again, so no wake-up is lost.

use ringdisk_qcow2::Bytes;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringdisk_ring::Errno;

/// What an operation may have saved while it was slower than its limit: it may catch up that much,
/// so a timer that fires late costs nothing.
const CATCH_UP: Duration = Duration::from_millis(100);
/// Longest wait that is computed: one piece at a limit of a byte per second takes longer.
const WAIT_MAX: Duration = Duration::from_secs(86_400);

/// What an error of the storage that is written does to an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// It ends with the error.
    #[default]
    Report,
    /// It rests until it is resumed, then tries the failed piece again.
    Stop,
    /// A full storage makes it wait for space; other errors end it.
    StopWhenFull,
    /// The piece counts as not copied yet, and the operation goes on. Only for an operation that
    /// records which pieces are left; elsewhere as [`OnError::Report`].
    Ignore,
}

/// Why an operation rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// A user asked for it.
    Asked,
    /// The storage that is written is full: the pieces that failed are tried again by themselves,
    /// and it goes on when all of them are written.
    Full(Errno),
    /// The storage that is written failed.
    Error(Errno),
}

/// What a failed piece has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// The operation ends with the error.
    Ends,
    /// It waits until the operation is resumed.
    Rests,
    /// It waits for space ([`Gate::look_for_space`]), with the number of requests to try at once
    /// that there were so far.
    WaitsForSpace(u64),
}

/// What a piece has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing.
    Go,
    /// A change after this turn: the operation is paused.
    Resume(u64),
    /// A change after this turn, or so much time.
    Until(u64, Duration),
}

/// The gate.
#[derive(Debug, Default)]
pub(super) struct Gate {
    paused: Option<Pause>,
    /// Bytes per second; 0: no limit.
    speed: u64,
    /// When the next piece may pass.
    free_at: Duration,
    pub(super) on_error: OnError,
    /// Pieces that failed as the storage was full, and are not written yet.
    without_space: u32,
    /// How often they were told to try at once.
    asked_to_try: u64,
    /// Counts the changes.
    turn: u64,
    waiting: Vec<Waker>,
}

impl Gate {
    /// Lets a piece pass, or says what it waits for.
    pub(super) fn enter(&mut self, now: Duration, bytes: Bytes) -> Wait {
        if self.paused.is_some() {
            return Wait::Resume(self.turn);
        }
        if self.speed == 0 {
            return Wait::Go;
        }
        if now < self.free_at {
            return Wait::Until(self.turn, self.free_at - now);
        }
        self.charge(now, bytes);
        Wait::Go
    }

    /// Has later pieces wait for these bytes.
    pub(super) fn charge(&mut self, now: Duration, bytes: Bytes) {
        if self.speed > 0 {
            let from = self.free_at.max(now.saturating_sub(CATCH_UP));
            self.free_at = from.saturating_add(time_of(bytes, self.speed));
        }
    }

    /// Lets no piece pass from now on. A pause that was asked for outlives one after an error.
    pub(super) fn pause(&mut self, why: Pause) {
        if self.paused != Some(Pause::Asked) {
            self.paused = Some(why);
        }
        self.wake();
    }

    /// Lets pieces pass again. Those that wait for space try at once, and the others wait for them.
    pub(super) fn resume(&mut self) {
        match self.paused {
            Some(Pause::Full(_)) => self.asked_to_try += 1,
            _ => self.paused = None,
        }
        self.wake();
    }

    /// One more piece waits for space.
    pub(super) fn add_without_space(&mut self) {
        self.without_space += 1;
    }

    /// A piece that waited for space is written. The others pass when it was the last one: where
    /// only a little has become free, the operation does not go on and stop again all the time.
    pub(super) fn has_space(&mut self) {
        self.without_space = self.without_space.saturating_sub(1);
        if self.without_space == 0 {
            self.forget_full();
        }
    }

    /// No piece waits for space any more.
    pub(super) fn forget_full(&mut self) {
        self.without_space = 0;
        if matches!(self.paused, Some(Pause::Full(_))) {
            self.paused = None;
            self.wake();
        }
    }

    pub(super) fn paused(&self) -> Option<Pause> {
        self.paused
    }

    /// Takes an error of a piece. A pause that was asked for outlives it.
    pub(super) fn fail(&mut self, errno: Errno) -> Failed {
        let is_full = matches!(errno, Errno::NOSPC | Errno::DQUOT);
        let (failed, pause) = match self.on_error {
            OnError::StopWhenFull if is_full => {
                (Failed::WaitsForSpace(self.asked_to_try), Pause::Full(errno))
            }
            OnError::Stop => (Failed::Rests, Pause::Error(errno)),
            OnError::Report | OnError::Ignore | OnError::StopWhenFull => return Failed::Ends,
        };
        if self.paused != Some(Pause::Asked) && self.paused != Some(pause) {
            self.paused = Some(pause);
            self.wake();
        }
        failed
    }

    /// Lets a piece that waits for space try again, or says what it waits for.
    ///
    /// * `until`: when it tries by itself.
    /// * `asked_to_try`: as it failed.
    pub(super) fn look_for_space(&self, now: Duration, until: Duration, asked_to_try: u64) -> Wait {
        match self.paused {
            None => Wait::Go,
            Some(Pause::Full(_)) if now >= until || self.asked_to_try != asked_to_try => Wait::Go,
            Some(Pause::Full(_)) => Wait::Until(self.turn, until - now),
            Some(Pause::Asked | Pause::Error(_)) => Wait::Resume(self.turn),
        }
    }

    /// Changes the limit; what is left to wait for is stretched or shortened.
    pub(super) fn set_speed(&mut self, now: Duration, speed: u64) {
        let left = self.free_at.saturating_sub(now);
        let bytes = left.as_secs_f64() * self.speed as f64;
        let left = match speed {
            0 => Duration::ZERO,
            speed => seconds(bytes / speed as f64),
        };
        self.free_at = now.saturating_add(left);
        self.speed = speed;
        self.wake();
    }

    pub(super) fn speed(&self) -> u64 {
        self.speed
    }

    /// The number of the last change.
    pub(super) fn turn(&self) -> u64 {
        self.turn
    }

    /// Wakes all who wait.
    pub(super) fn wake(&mut self) {
        self.turn += 1;
        self.waiting.drain(..).for_each(Waker::wake);
    }

    /// Ready when something has changed since `turn`. A task that stops waiting leaves its waker
    /// behind until the next change; there is one for each task at most.
    pub(super) fn poll_change(&mut self, turn: u64, context: &Context<'_>) -> Poll<()> {
        if self.turn != turn {
            return Poll::Ready(());
        }
        if !self.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
            self.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }
}

/// The time that a piece takes at a limit.
fn time_of(bytes: Bytes, speed: u64) -> Duration {
    seconds(bytes.0 as f64 / speed as f64)
}

/// A time; at most [`WAIT_MAX`].
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).map_or(WAIT_MAX, |time| time.min(WAIT_MAX))
}
