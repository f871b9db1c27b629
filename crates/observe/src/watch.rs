//! `ringdisk ctl DISK stats` and `ringdisk ctl DISK events`: what a disk does, now and as it
//! happens.
//!
//! Promises: nothing is changed, and a server that stands still is left in time.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_console::output::json_line;
use ringdisk_daemon::control::client::{Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::mount_users::{self, Place};
use ringdisk_daemon::stats::summary;
use ringdisk_daemon::terminal::{Results, ended, visible_lines};
use serde_json::Value;

/// How often a signal is looked for between two screens.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What the server says of itself, for people: its counters, in words.
///
/// * `before`: what it said before.
pub fn text_of(client: &Client, stats: &Value, before: Option<&Value>) -> String {
    // A server of an older version says nothing of where it serves.
    if stats.get("serving").is_none() {
        return visible_lines(stats.get("text").and_then(Value::as_str).unwrap_or_default());
    }
    let connection = stats["serving"]["connection"].as_u64();
    let connection = connection.and_then(|number| u32::try_from(number).ok());
    let users = match (&client.mountpoint, connection) {
        (Some(mountpoint), Some(connection)) => {
            mount_users::look(&Place::of(mountpoint, connection)).names()
        }
        _ => Vec::new(),
    };
    summary(stats, before, &users)
}

/// Shows the counters again and again, until a signal comes or the server has gone.
///
/// Errors: the server's; it is gone.
pub fn repeat(client: &mut Client, every: Duration, limit: Duration) -> Result<(), Failure> {
    let job = Operation::start("stats", Showing::QUIET)?;
    let progress = Arc::clone(job.progress());
    let mut before: Option<Value> = None;
    while !progress.is_cancelled() {
        let stats = match client.call(&Command::Stats, &progress, Timeout::Answer(limit)) {
            Err(_) if progress.is_cancelled() => return Ok(()),
            stats => stats?,
        };
        let space = if before.is_some() { "\n" } else { "" };
        if !printed(&format!("{space}{}\n", text_of(client, &stats, before.as_ref())))? {
            return Ok(());
        }
        before = Some(stats);
        let begun = std::time::Instant::now();
        while begun.elapsed() < every && !progress.is_cancelled() {
            std::thread::sleep(POLL_INTERVAL.min(every));
        }
    }
    Ok(())
}

/// Prints at once what programs and people wait for. `false`: nobody reads any more.
///
/// Errors: standard output cannot be written.
pub fn printed(text: &str) -> Result<bool, Failure> {
    let mut out = Results::lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) => ended(Err(error)).map(|()| false),
    }
}

/// Prints events as they happen.
///
/// * `target`: the disk, as the user named it.
///
/// Errors: the server refuses, or is gone.
pub fn events(target: &Path, client: &mut Client) -> Result<(), Failure> {
    tracing::debug!("events of '{}'", target.display());
    let job = Operation::start("events", Showing::QUIET)?;
    let progress = Arc::clone(job.progress());
    let mut failed = None;
    client.follow(&progress, |event| match printed(&(json_line(event) + "\n")) {
        Ok(goes_on) => goes_on,
        Err(failure) => {
            failed = Some(failure);
            false
        }
    })?;
    failed.map_or(Ok(()), Err)
}
