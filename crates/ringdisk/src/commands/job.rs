//! `ringdisk job`: jobs of one disk, or of all.
//!
//! Promises: asks servers and prints their answers; it does nothing to a disk itself.

use std::path::Path;
use std::sync::Arc;

use ringdisk_console::operation::Operation;
use ringdisk_console::output::json_text;
use ringdisk_daemon::control::client::{ANSWER, Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::control::protocol::jobs::{JobCommand, NewSpeed};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::job_text;
use ringdisk_daemon::terminal::{self, visible_lines};
use ringdisk_observe::job_texts;
use ringdisk_observe::jobs::{all, connect_for_waiting, find, flat, named};
use serde_json::Value;

use crate::cli::{JobArgs, JobWork, ProgressArgs};

const QUIET: ProgressArgs = ProgressArgs { progress: false, quiet: true };

/// Does one thing with jobs.
///
/// Errors: no such disk or job; the server's reason; of `wait`, those of the job.
pub(crate) fn run(args: &JobArgs) -> Result<(), Failure> {
    let (job, command) = match &args.work {
        JobWork::List { target, json } => return list(target.as_deref(), *json),
        JobWork::Limit { job, speed } => {
            (job, JobCommand::Limit(NewSpeed { id: job.id().to_owned(), speed: *speed }))
        }
        JobWork::Pause(job) => (job, JobCommand::Pause(named(job.id()))),
        JobWork::Resume(job) => (job, JobCommand::Resume(named(job.id()))),
        JobWork::Cancel(job) => (job, JobCommand::Cancel(named(job.id()))),
        JobWork::Complete(job) => (job, JobCommand::Complete(named(job.id()))),
        JobWork::Wait(job) => (job, JobCommand::Wait(named(job.id()))),
    };
    let mut client = match job.target() {
        Some(target) if matches!(command, JobCommand::Wait(_)) => connect_for_waiting(target)?,
        Some(target) => Client::connect(Path::new(target), ANSWER)?,
        None => find(job.id())?,
    };
    let (timeout, progress) = match &command {
        JobCommand::Wait(_) => (Timeout::Work(ANSWER), ProgressArgs::default()),
        _ => (Timeout::Answer(ANSWER), QUIET),
    };
    let operation = Operation::start(job.id(), progress)?;
    let progress = Arc::clone(operation.progress());
    let told = client.call(&Command::Job(command), &progress, timeout);
    let told = operation.end(told, "the job goes on")?;
    match (&args.work, told["text"].as_str()) {
        (JobWork::Cancel(_), Some(text)) => terminal::note(visible_lines(text)),
        (JobWork::Cancel(_), None) => {}
        (JobWork::Wait(_), _) => {
            job_texts::ready(&told, job.target());
            if let Some(text) = told["result"]["text"].as_str() {
                terminal::note(visible_lines(text));
            }
        }
        _ => terminal::say(job_text::line(&told)),
    }
    Ok(())
}

/// Lists them.
///
/// Errors: the one server that is asked does not answer.
fn list(target: Option<&str>, as_json: bool) -> Result<(), Failure> {
    let lists: Vec<Value> = match target {
        None => all().into_iter().map(|(_, value)| value).collect(),
        Some(target) => {
            let mut client = Client::connect(Path::new(target), ANSWER)?;
            let operation = Operation::start("job", QUIET)?;
            let progress = Arc::clone(operation.progress());
            let command = Command::Job(JobCommand::List);
            let told = client.call(&command, &progress, Timeout::Answer(ANSWER));
            vec![operation.end(told, "nothing was changed")?]
        }
    };
    if as_json {
        terminal::say(json_text(&flat(&lists)));
        return Ok(());
    }
    match job_text::lists(&lists) {
        empty if empty.is_empty() => terminal::say("No jobs."),
        text => terminal::say(text.trim_end()),
    }
    Ok(())
}
