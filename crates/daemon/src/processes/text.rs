//! The list for people: a table, and what is wrong with the command that helps.
//!
//! Promises: pure; nothing in the text controls a terminal.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Entry;
use crate::job_text;
use crate::size::human_size;
use crate::timestamp::long_time;

/// The headings, of columns in this order.
const HEADINGS: [&str; 8] = ["PID", "USER", "STATE", "SINCE", "SIZE", "WHERE", "IMAGE", "USED BY"];

/// A table with a line of headings.
///
/// * `now`: the time that "since" is counted to.
pub fn table(entries: &[Entry], now: SystemTime) -> String {
    let rows: Vec<[String; 8]> = entries.iter().map(|entry| row(entry, now)).collect();
    let mut widths = HEADINGS.map(str::len);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let headings = HEADINGS.map(str::to_owned);
    for cells in std::iter::once(&headings).chain(&rows) {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn row(entry: &Entry, now: SystemTime) -> [String; 8] {
    let dash = || String::from("-");
    let since = entry.since.map(|since| UNIX_EPOCH + Duration::from_secs(since));
    let since = since.map(|since| long_time(now.duration_since(since).unwrap_or_default()));
    let format = entry.format.as_deref().map(|format| format!(" ({format})"));
    let mode = if entry.is_read_only { " read-only" } else { "" };
    let users = match entry.users.as_slice() {
        [] => dash(),
        users => users.join(", "),
    };
    [
        entry.pid.map_or_else(dash, |pid| pid.to_string()),
        entry.user_text(),
        entry.state.word().to_owned(),
        since.filter(|_| entry.is_alive()).unwrap_or_else(dash),
        entry.size.map_or_else(dash, human_size),
        [Some(entry.place.as_str()), entry.also.as_deref()]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(", "),
        format!("{}{}{mode}", entry.image, format.unwrap_or_default()),
        users,
    ]
}

/// The jobs that are under way, one line each.
pub fn jobs(entries: &[Entry]) -> Vec<String> {
    let of = |entry: &Entry| {
        let lines = entry.jobs.iter().map(job_text::line);
        lines.map(|line| format!("{}: job {line}", entry.place)).collect::<Vec<_>>()
    };
    entries.iter().flat_map(of).collect()
}

/// What is wrong, one line each; with the command that helps.
pub fn problems(entries: &[Entry]) -> Vec<String> {
    let wrong = entries.iter().filter(|entry| entry.why.is_some());
    wrong
        .map(|entry| {
            let why = entry.why.as_deref().unwrap_or_default();
            match &entry.command {
                Some(command) => format!("{}: {why}: `{command}`", entry.place),
                None => format!("{}: {why}", entry.place),
            }
        })
        .collect()
}
