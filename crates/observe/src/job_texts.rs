//! What commands say of jobs: begun, ready, ended.
//!
//! Promises: prints only; what a server says cannot control a terminal. Asks no server.

use ringdisk_daemon::terminal::{self, shell_word, visible, visible_lines};
use serde_json::Value;

/// Says of a mirror that it is ready, and what comes next.
///
/// * `target`: the disk, if it was named.
pub fn ready(told: &Value, target: Option<&str>) {
    if told["state"] != "ready" {
        return;
    }
    let id = told["id"].as_str().map(visible).unwrap_or_default();
    let target = target.map(|target| format!("{} ", shell_word(target))).unwrap_or_default();
    terminal::note(format_args!(
        "the job '{id}' is ready: `ringdisk job complete {target}{id}` switches over to the copy, \
         `ringdisk job cancel {target}{id}` leaves it"
    ));
}

/// Says which job was begun in the background.
pub fn begun(value: &Value, quiet: bool) {
    let id = value["id"].as_str().map(visible).unwrap_or_default();
    terminal::say(&id);
    if !quiet {
        terminal::note(format_args!(
            "the job goes on in the serving process; `ringdisk job wait {id}` waits for its end"
        ));
    }
}

/// Says that a job has ended, and what it has done.
pub fn ended(said: &str, value: &Value) {
    terminal::say(said);
    if let Some(text) = value.get("text").and_then(Value::as_str) {
        terminal::note(visible_lines(text));
    }
}
