//! Waits for a state that no event announces: of another process, or of the kernel.
//!
//! Promises: the state is looked at once at least, and once more after the time limit. Control
//! path: the thread sleeps between two looks.

use std::time::{Duration, Instant};

/// Tries again while a result is a temporary one. Gives the first one that is not, or the last one
/// after `limit`.
///
/// * `interval`: pause between two attempts.
pub fn retry_while<T>(
    limit: Duration,
    interval: Duration,
    is_temporary: impl Fn(&T) -> bool,
    mut attempt: impl FnMut() -> T,
) -> T {
    let end = Instant::now() + limit;
    loop {
        // The last attempt begins after the end.
        let is_last = Instant::now() >= end;
        let result = attempt();
        if is_last || !is_temporary(&result) {
            return result;
        }
        std::thread::sleep(interval);
    }
}

/// Waits until something is so. Returns whether it is, within `limit`.
///
/// * `interval`: pause between two looks.
pub fn wait_until(limit: Duration, interval: Duration, is_so: impl FnMut() -> bool) -> bool {
    retry_while(limit, interval, |is_so| !is_so, is_so)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);
    const INTERVAL: Duration = Duration::from_millis(1);

    #[test]
    fn an_attempt_is_repeated_while_its_result_is_temporary() {
        let mut attempts = 0;
        let result = retry_while(
            LONG,
            INTERVAL,
            |count| *count < 3,
            || {
                attempts += 1;
                attempts
            },
        );
        assert_eq!((result, attempts), (3, 3));
    }

    #[test]
    fn the_last_result_is_given_when_the_time_is_over() {
        let begun = Instant::now();
        assert!(!wait_until(SHORT, INTERVAL, || false));
        assert!(begun.elapsed() >= SHORT);
    }

    #[test]
    fn without_time_there_is_one_look() {
        let mut looks = 0;
        assert!(!wait_until(Duration::ZERO, INTERVAL, || {
            looks += 1;
            false
        }));
        assert_eq!(looks, 1);
        assert!(wait_until(Duration::ZERO, INTERVAL, || true));
    }
}
