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
    /// A full storage makes it rest; other errors end it.
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
    /// The storage that is written failed.
    Error(Errno),
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

    pub(super) fn resume(&mut self) {
        self.paused = None;
        self.wake();
    }

    pub(super) fn paused(&self) -> Option<Pause> {
        self.paused
    }

    /// Takes an error; gives whether the piece is tried again, after a pause if there is one now.
    pub(super) fn fail(&mut self, errno: Errno) -> bool {
        let is_full = matches!(errno, Errno::NOSPC | Errno::DQUOT);
        let stops = match self.on_error {
            OnError::Report | OnError::Ignore => false,
            OnError::Stop => true,
            OnError::StopWhenFull => is_full,
        };
        if stops {
            self.paused = Some(Pause::Error(errno));
            self.wake();
        }
        stops
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
