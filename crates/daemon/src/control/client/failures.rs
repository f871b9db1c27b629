//! Why a server cannot be asked, in words.
//!
//! Promises: each says what helps, where something does. Nothing that is served is touched.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::failure::{Exit, Failure};
use crate::terminal::shell_word;
use crate::timestamp::utc_time;

/// The server of a mount that is there still was killed.
///
/// * `since`: when it was started.
pub(super) fn dead(path: &Path, since: Option<SystemTime>) -> Failure {
    let shown = path.display().to_string();
    let since = since.map(|since| format!(" (started {})", utc_time(since)));
    let text = format!(
        "the server of '{shown}' is dead{}: it was killed, or crashed, and its mount is left",
        since.unwrap_or_default()
    );
    Failure::new(Exit::Mountpoint, text)
        .hint(format!("`ringdisk umount {}` clears it away", shell_word(&shown)))
}

/// A server that does not answer in time.
pub(super) fn late(shown: &str, limit: Duration, pid: Option<i32>) -> Failure {
    let who = pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
    let message = format!("the server of '{shown}'{who} does not answer within {limit:?}");
    let failure = Failure::new(Exit::Timeout, message);
    match pid {
        Some(pid) if is_stopped(pid) => {
            failure.hint(format!("it is stopped; `kill -CONT {pid}` lets it go on"))
        }
        _ => failure.hint("it may be stopped or overloaded; --timeout waits longer"),
    }
}

/// Whether a process was stopped by a signal or by a debugger.
pub(super) fn is_stopped(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| state.trim().starts_with(['T', 't']))
}

pub(super) fn left() -> Failure {
    Failure::new(Exit::General, "nobody waits any longer")
}

pub(super) fn rubbish() -> Failure {
    Failure::new(Exit::General, "what the server said makes no sense")
}

pub(super) fn gone(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset => {
            Failure::new(Exit::Halted, "the server ended before it answered")
        }
        _ => Failure::system("cannot talk to the server", error, Exit::Halted),
    }
}
