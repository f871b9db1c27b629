//! `ringdisk top`: what all disks of the machine do, live.
//!
//! Promises: on a terminal a screen that keys sort and filter ([`screen`]); elsewhere, and with
//! `--plain`, a table for each interval, which fits the width: columns that have no room are left
//! out, the last ones first. Below it a line for each job.

mod columns;
mod screen;
mod state;
mod view;

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::control::ask_all::Answer;
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::job_text;
use ringdisk_daemon::metrics::{self, Sample};
use ringdisk_daemon::processes;
use ringdisk_daemon::rates::{self, Order};
use rustix::termios::tcgetwinsize;

use crate::watch::printed;

/// How long servers may take to answer for one screen (1 s).
const SCREEN_LIMIT: Duration = Duration::from_secs(1);
/// How often a signal is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Width of the table where standard output is no terminal.
const PLAIN_COLUMNS: usize = 120;

/// What is shown, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long an interval is.
    pub every: Duration,
    /// What is sorted by.
    pub sort: Order,
    /// Only disks whose name holds it.
    pub filter: String,
    /// Tables one below the other, on a terminal, too.
    pub plain: bool,
    /// Ends after so many intervals; `None`: when the user ends it.
    pub count: Option<u32>,
}

/// Shows it until the user ends it, or as often as was asked for.
///
/// Errors: standard output or the terminal cannot be written.
pub fn run(options: &Options) -> Result<(), Failure> {
    let job = Operation::start("top", Showing::QUIET)?;
    let progress = Arc::clone(job.progress());
    // Keys come from standard input, and a dumb terminal cannot move its cursor.
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
    let is_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if is_terminal && !is_dumb && !options.plain {
        return screen::run(options, &progress);
    }
    let (mut before, mut since) = (samples(), Instant::now());
    let mut left = options.count;
    while left != Some(0) {
        while since.elapsed() < options.every {
            if progress.is_cancelled() {
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL.min(options.every));
        }
        let (now, seconds) = (samples(), since.elapsed().as_secs_f64());
        since = Instant::now();
        let mut rows = rates::rates(&before, &now, seconds);
        rates::arrange(&mut rows, options.sort, &options.filter);
        let mut jobs = job_text::of_samples(&now);
        jobs.retain(|job| job.contains(&options.filter));
        before = now;
        // Asked for each time: the terminal may have another size by now.
        let width = tcgetwinsize(rustix::stdio::stdout()).ok().map(|size| size.ws_col.into());
        let width = width.filter(|width| *width > 0).unwrap_or(PLAIN_COLUMNS);
        let mut lines = columns::lines(&rows, width);
        lines.extend(jobs.iter().map(|job| job.chars().take(width).collect::<String>()));
        if !printed(&(lines.join("\n") + "\n"))? {
            return Ok(());
        }
        left = left.map(|left| left - 1);
    }
    Ok(())
}

/// What all processes say now.
fn samples() -> Vec<Sample> {
    let asked = processes::ask_all(&Command::Metrics, SCREEN_LIMIT);
    let of = |answer: Answer| match answer {
        Answer::Value(value) => metrics::from_json(&value),
        _ => Vec::new(),
    };
    asked.into_iter().flat_map(|(_, asked)| of(asked.answer)).collect()
}
