//! How far the stop of a mount has come, and when asking again means "now".
//!
//! Promises: any thread; nothing here waits. The thread that owns the export writes here what a
//! stop waits for, and the threads of the control socket read it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A second signal that comes so soon is the same one: a terminal, `timeout` and service managers
/// signal a process and its group.
const BOUNCE: Duration = Duration::from_millis(300);

/// How far a mount is on its way to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    #[default]
    /// It answers requests, and no stop was asked for.
    Serving,
    /// A stop was asked for, and it serves these users (as text) until they have closed the file.
    InUse(String),
    /// It is served no longer.
    Ended,
}

/// The stage, shared.
#[derive(Debug, Default)]
pub struct Stopping(Mutex<Stage>);

impl Stopping {
    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stage at this moment.
    pub fn stage(&self) -> Stage {
        self.lock().clone()
    }

    /// A stop waits for these users.
    pub fn wait_for(&self, users: String) {
        let mut stage = self.lock();
        if *stage != Stage::Ended {
            *stage = Stage::InUse(users);
        }
    }

    /// It is served no longer.
    pub fn end(&self) {
        *self.lock() = Stage::Ended;
    }
}

/// A stop that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// The end, once no client uses the export.
    Clean,
    /// The end at once, also while clients use it.
    AtOnce,
}

/// The stop that was asked for so far, shared.
#[derive(Debug, Default)]
pub struct StopAsked(Mutex<Option<Stop>>);

impl StopAsked {
    /// Records a request for a stop. A request for the end at once is never weakened.
    pub fn ask(&self, stop: Stop) {
        let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *asked = (*asked).max(Some(stop));
    }

    /// The strongest request so far.
    pub fn get(&self) -> Option<Stop> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a signal that asks for a stop means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The end, once no client uses the mount.
    First,
    /// A repetition of the signal before.
    Echo,
    /// The end at once.
    Again,
}

/// Counts the signals that ask for a stop.
#[derive(Debug, Default)]
pub struct Insist(Mutex<Option<Instant>>);

impl Insist {
    /// * `may_insist`: whether a second signal of this kind asks for the end at once. A hang-up
    ///   does not: a shell and the kernel both send it.
    pub fn count(&self, may_insist: bool) -> Asked {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *first {
            None => {
                *first = Some(Instant::now());
                Asked::First
            }
            Some(at) if may_insist && at.elapsed() >= BOUNCE => Asked::Again,
            Some(_) => Asked::Echo,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_signal_means_now() {
        let insist = Insist::default();
        assert_eq!(insist.count(true), Asked::First);
        assert_eq!(insist.count(true), Asked::Echo, "too soon");
        *insist.0.lock().expect("no panic") = Instant::now().checked_sub(BOUNCE);
        assert_eq!(insist.count(false), Asked::Echo, "a hang-up");
        assert_eq!(insist.count(true), Asked::Again);
    }

    #[test]
    fn the_end_at_once_stays_asked_for() {
        let asked = StopAsked::default();
        assert_eq!(asked.get(), None);
        for (stop, now) in
            [(Stop::Clean, Stop::Clean), (Stop::AtOnce, Stop::AtOnce), (Stop::Clean, Stop::AtOnce)]
        {
            asked.ask(stop);
            assert_eq!(asked.get(), Some(now));
        }
    }

    #[test]
    fn an_end_is_the_last_stage() {
        let stopping = Stopping::default();
        stopping.wait_for(String::from("dd"));
        assert_eq!(stopping.stage(), Stage::InUse(String::from("dd")));
        stopping.end();
        stopping.wait_for(String::from("dd"));
        assert_eq!(stopping.stage(), Stage::Ended);
    }
}
