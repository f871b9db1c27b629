//! Choosing by trial: another choice is taken for a few windows of time, measured, and kept or
//! left.
//!
//! Promises: pure, so that a simulation of loads can test it: a policy sees the load in windows and
//! says what to do. A transport adds what it can choose (who fetches, where entries are, how long
//! to poll), when a trial is due, and the gain from which a choice is kept. Never on the path of a
//! request: one queue thread at a time makes a step, every few milliseconds.

/// Work per second.
///
/// * `work`: requests, or what counts as much.
#[must_use]
pub fn per_second(work: u64, nanos: u64) -> u64 {
    work.saturating_mul(1_000_000_000) / nanos.max(1)
}

/// How long a trial lasts.
#[derive(Clone, Copy, Debug)]
pub struct TrialRule {
    /// Windows that are measured at least.
    pub windows_min: u32,
    /// Windows that are measured at most, while the verdict is not clear.
    pub windows_max: u32,
}

/// A choice that is being tried.
#[derive(Clone, Copy, Debug)]
pub struct Trial<C> {
    /// Back to this choice unless the new one does better.
    pub from: C,
    /// What that one had, work per second.
    pub before: u64,
    windows: u32,
    work: u64,
    nanos: u64,
}

/// What a trial has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Work per second with the new choice.
    pub rate: u64,
    /// It is a fifth less than before, or a quarter more: hardly by chance.
    pub is_clear: bool,
}

impl<C> Trial<C> {
    /// Begins now.
    #[must_use]
    pub fn new(from: C, before: u64) -> Trial<C> {
        Trial { from, before, windows: 0, work: 0, nanos: 0 }
    }

    /// A window has passed. Gives what was found, once the rule is met.
    ///
    /// The first window is not measured: it belongs to the change itself.
    pub fn window(&mut self, rule: TrialRule, work: u64, nanos: u64) -> Option<Measured> {
        let is_first = self.windows == 0;
        self.windows += 1;
        if is_first {
            return None;
        }
        self.work += work;
        self.nanos += nanos;
        let rate = per_second(self.work, self.nanos);
        let is_clear = rate * 5 <= self.before * 4 || rate * 4 >= self.before * 5;
        let measured = self.windows - 1;
        let is_over = measured >= rule.windows_max || (is_clear && measured >= rule.windows_min);
        is_over.then_some(Measured { rate, is_clear })
    }
}

/// The pause between trials: short after one that was won, longer after each that was lost.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    now: u64,
    min: u64,
    max: u64,
}

impl Pause {
    /// In any unit: windows, nanoseconds.
    #[must_use]
    pub fn new(min: u64, max: u64) -> Pause {
        Pause { now: min, min, max }
    }

    /// Its length.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.now
    }

    /// The load is another one, or nothing is known of it: the next trial may come soon.
    pub fn reset(&mut self) {
        self.now = self.min;
    }

    /// A trial was won.
    ///
    /// * `shortest`: of the pause after it.
    pub fn won(&mut self, shortest: u64) {
        self.now = shortest;
    }

    /// A trial was lost: the pause doubles.
    ///
    /// * `shortest`: of the pause after it.
    pub fn lost(&mut self, shortest: u64) {
        self.now = (self.now * 2).clamp(shortest, self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn found(rule: TrialRule, windows: &[u64]) -> Option<(usize, Measured)> {
        let mut trial = Trial::new((), 1000);
        windows.iter().enumerate().find_map(|(number, work)| {
            trial.window(rule, *work, MS).map(|measured| (number + 1, measured))
        })
    }

    #[test]
    fn the_first_window_does_not_count_and_the_others_are_added() {
        let rule = TrialRule { windows_min: 3, windows_max: 3 };
        assert_eq!(
            found(rule, &[500, 1, 2, 3]),
            Some((4, Measured { rate: 2000, is_clear: true }))
        );
        assert_eq!(found(rule, &[0, 1, 1]), None);
    }

    #[test]
    fn a_trial_ends_when_it_is_clear_or_has_taken_long_enough() {
        let rule = TrialRule { windows_min: 1, windows_max: 4 };
        assert_eq!(found(rule, &[9, 2]), Some((2, Measured { rate: 2000, is_clear: true })));
        let unclear = Measured { rate: 1000, is_clear: false };
        assert_eq!(found(rule, &[9, 1, 1, 1, 1, 1]), Some((5, unclear)));
    }

    #[test]
    fn pauses_double_while_trials_are_lost() {
        let mut pause = Pause::new(4, 30);
        let lost: Vec<u64> = (0..4)
            .map(|_| {
                pause.lost(4);
                pause.length()
            })
            .collect();
        assert_eq!(lost, [8, 16, 30, 30]);
        pause.won(6);
        assert_eq!(pause.length(), 6);
        pause.reset();
        assert_eq!(pause.length(), 4);
    }
}
