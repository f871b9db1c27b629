//! Points in time for people.
//!
//! Promises: pure; a time before 1970 is shown as the beginning of 1970. UTC, as the time zone of
//! the reader of a log or of a report is not known.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY_SECONDS: u64 = 24 * 60 * 60;

/// Such as `2026-11-27 21:13:10 UTC`.
pub fn utc_time(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let [year, month, day, hour, minute, second] = calendar(seconds);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Year, month, day (both from 1), hour, minute and second.
///
/// * `seconds`: since the beginning of 1970, UTC.
pub fn calendar(seconds: u64) -> [u64; 6] {
    let (year, month, day) = date(seconds / DAY_SECONDS);
    [year, month, day, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60]
}

/// The date of a day; year, month from 1 and day from 1.
///
/// * `days`: since 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // 400 years have 146097 days; without them the loop is short for any time.
    let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
    loop {
        let len = if is_leap(year) { 366 } else { 365 };
        if left < len {
            break;
        }
        left -= len;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < len {
            break;
        }
        left -= len;
        month += 1;
    }
    (year, month, left + 1)
}

/// How long something takes or has lasted, in its two largest units: `3d 4h`, `2h 5m`, `1m 7s`,
/// `12s`.
pub fn long_time(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours) = (seconds / DAY_SECONDS, seconds / 3600 % 24);
    let (minutes, rest) = (seconds / 60 % 60, seconds % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{rest}s"),
        (0, 0, _) => format!("{minutes}m {rest}s"),
        (0, _, _) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_date() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_795_813_990, "2026-11-27 21:13:10 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
            (253_402_300_799, "9999-12-31 23:59:59 UTC"),
        ] {
            assert_eq!(utc_time(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn long_times_have_two_units() {
        for (seconds, text) in
            [(0, "0s"), (67, "1m 7s"), (7500, "2h 5m"), (3 * DAY_SECONDS + 4 * 3600, "3d 4h")]
        {
            assert_eq!(long_time(Duration::from_secs(seconds)), text);
        }
    }
}
