//! How many I/O errors the host kernel has given a guest, and what was said of them.
//!
//! The module counts them; it keeps neither the place nor the reason, which the log of the kernel
//! may have. So the control thread has to look: every [`KERNEL_POLL_INTERVAL`], when virtqueues
//! come back, and when the front end is gone.
//!
//! Promises: control thread; no error is counted twice, and the log is told at most as often as a
//! limit allows.

use std::time::{Duration, Instant};

/// How often the counters are looked at. An idle disk is to cost nothing that could be measured.
pub(in crate::export) const KERNEL_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// After a line the next one comes so much later.
const WINDOW: Duration = Duration::from_secs(10);

/// Why the control thread looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::export) enum Occasion {
    /// Now and then, while the kernel has virtqueues or something is left to tell.
    Regular,
    /// Virtqueues have come back. A guest may do that as often as it likes, so the last line may be
    /// too fresh: the next look reports what is left.
    Stopped,
    /// The front end is gone. No look follows soon.
    Last,
}

/// What was counted, and what was said of it.
#[derive(Debug, Default)]
pub(in crate::export) struct KernelErrors {
    looked: Option<Instant>,
    logged: u64,
    logged_at: Option<Instant>,
    /// There is more to tell, later.
    pub(in crate::export) is_behind: bool,
}

impl KernelErrors {
    /// Whether it is time to look.
    pub(in crate::export) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.looked.is_none_or(|then| now - then >= KERNEL_POLL_INTERVAL);
        if is_due {
            self.looked = Some(now);
        }
        is_due
    }

    /// How many requests to tell of; 0: nothing is new, or the last line is too fresh.
    ///
    /// * `counted`: since the module's device was opened.
    pub(in crate::export) fn news(
        &mut self,
        counted: u64,
        occasion: Occasion,
        now: Instant,
    ) -> u64 {
        let new = counted.saturating_sub(self.logged);
        if occasion != Occasion::Last && self.logged_at.is_some_and(|then| now - then < WINDOW) {
            self.is_behind = new > 0;
            return 0;
        }
        self.is_behind = false;
        if new > 0 {
            (self.logged, self.logged_at) = (counted, Some(now));
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_errors_are_told_at_once_and_the_others_now_and_then() {
        let mut errors = KernelErrors::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(errors.news(0, Occasion::Regular, at(0)), 0);
        assert_eq!(errors.news(3, Occasion::Regular, at(1)), 3);
        assert_eq!(errors.news(3, Occasion::Regular, at(2)), 0);
        assert_eq!(errors.news(5, Occasion::Regular, at(3)), 0, "the last line is too fresh");
        assert_eq!(errors.news(9, Occasion::Regular, at(12)), 6);
        assert_eq!(errors.news(9, Occasion::Regular, at(40)), 0);
        assert_eq!(errors.news(10, Occasion::Regular, at(41)), 1);
        assert_eq!(errors.news(12, Occasion::Last, at(42)), 2, "the front end is gone");
        assert_eq!(errors.news(0, Occasion::Last, at(43)), 0, "a counter that went back");
    }

    /// A guest that stops its virtqueues all the time does not fill the log.
    #[test]
    fn what_a_guest_does_often_is_told_now_and_then() {
        let mut errors = KernelErrors::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(errors.news(1, Occasion::Stopped, at(0)), 1);
        let lines =
            (1..=100).filter(|i| errors.news(1 + i, Occasion::Stopped, at(i / 10)) > 0).count();
        assert_eq!(lines, 1);
        assert_eq!(errors.news(103, Occasion::Stopped, at(11)), 0);
        assert!(errors.is_behind, "it is looked at again, though no virtqueue is in the kernel");
        assert_eq!(errors.news(105, Occasion::Last, at(11)), 4, "what was left");
        assert!(!errors.is_behind);
    }

    #[test]
    fn one_looks_every_few_seconds() {
        let mut errors = KernelErrors::default();
        let start = Instant::now();
        assert!(errors.is_due(start));
        assert!(!errors.is_due(start + KERNEL_POLL_INTERVAL / 2));
        assert!(errors.is_due(start + KERNEL_POLL_INTERVAL));
        assert!(!errors.is_due(start + KERNEL_POLL_INTERVAL));
    }
}
