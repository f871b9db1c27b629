//! The metrics of all processes, as `ringdisk metrics` prints them.
//!
//! Promises: a process that does not answer in time has the sample `ringdisk_up 0` and no others.

use std::io::Write as _;

use ringdisk_daemon::control::ask_all::Answer;
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::metrics::{self, Sample};
use ringdisk_daemon::processes;
use ringdisk_daemon::terminal::{Results, ended};

/// Prints those of all processes.
///
/// Errors: standard output cannot be written.
pub fn print() -> Result<(), Failure> {
    let mut samples = Vec::new();
    for (found, asked) in processes::ask_all(&Command::Metrics, processes::ANSWER_LIMIT) {
        let of_disk = match &asked.answer {
            Answer::Value(value) => metrics::from_json(value),
            _ => Vec::new(),
        };
        // The place that the disk itself says, where it does.
        let said = of_disk.iter().flat_map(|sample| &sample.labels);
        let said = said.into_iter().find(|(name, _)| name == "target").map(|(_, value)| value);
        let path = found.path.display().to_string();
        samples.push(Sample::up(said.unwrap_or(&path), !of_disk.is_empty()));
        samples.extend(of_disk);
    }
    let mut out = Results::lock();
    ended(write!(out, "{}", metrics::render(&samples)))?;
    out.finish()
}
