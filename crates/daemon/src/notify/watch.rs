//! How long a service manager waits for a sign of life (sd_watchdog_enabled(3)).
//!
//! Promises: words of the environment that mean nothing are as none.

use std::ffi::OsStr;
use std::time::Duration;

/// The manager's time, µs.
pub(crate) const USEC: &str = "WATCHDOG_USEC";
/// The process that it is for.
pub(crate) const PID: &str = "WATCHDOG_PID";

/// How long the manager waits for a sign of life of this process; `None`: it does not.
pub fn wanted() -> Option<Duration> {
    let var = |name: &str| std::env::var_os(name);
    read(var(USEC).as_deref(), var(PID).as_deref(), std::process::id())
}

fn read(usec: Option<&OsStr>, pid: Option<&OsStr>, own: u32) -> Option<Duration> {
    let number = |text: &OsStr| text.to_str()?.parse::<u64>().ok();
    let usec = number(usec?).filter(|usec| *usec > 0 && *usec < u64::MAX)?;
    let is_ours = pid.is_none_or(|pid| number(pid) == Some(own.into()));
    is_ours.then(|| Duration::from_micros(usec))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_that_of_the_environment_where_it_is_for_this_process() {
        let read =
            |usec: &str, pid: Option<&str>| read(Some(usec.as_ref()), pid.map(OsStr::new), 7);
        let second = Some(Duration::from_secs(1));
        assert_eq!((read("1000000", None), read("1000000", Some("7"))), (second, second));
        assert_eq!((read("1000000", Some("8")), read("1000000", Some("x"))), (None, None));
        for usec in ["0", "", "-1", "x", "18446744073709551615"] {
            assert_eq!(read(usec, Some("7")), None, "{usec}");
        }
        assert_eq!(super::read(None, Some(OsStr::new("7")), 7), None);
    }
}
