//! `ringdisk job`: jobs of one disk, or of all.

use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::control::client::{ANSWER, Client, Timeout};
use ringdisk_daemon::control::jobs::words::{JobCommand, Named, NewSpeed};
use ringdisk_daemon::control::many::{Answer, Asked};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::control::registry::Found;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::job_text;
use ringdisk_daemon::processes;
use ringdisk_daemon::terminal::{self, shell_word, visible, visible_lines};
use ringdisk_disk::Progress;
use serde_json::{Value, json};

use crate::cli::{JobArgs, JobWork, ProgressArgs};
use crate::commands::operation::Operation;
use crate::commands::output::json_text;

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
        Some(target) => Client::connect(Path::new(target), ANSWER)?,
        None => find(job.id())?,
    };
    let (timeout, show) = match &command {
        JobCommand::Wait(_) => (Timeout::Work(ANSWER), ProgressArgs::default()),
        _ => (Timeout::Answer(ANSWER), QUIET),
    };
    let operation = Operation::start(job.id(), show)?;
    let progress = Arc::clone(operation.progress());
    let told = client.call(&Command::Job(command), &progress, timeout);
    let told = operation.end(told, "the job goes on")?;
    match (&args.work, told["text"].as_str()) {
        (JobWork::Cancel(_), Some(text)) => terminal::note(visible_lines(text)),
        (JobWork::Cancel(_), None) => {}
        (JobWork::Wait(_), _) => said_ready(&told, job.target()),
        _ => terminal::say(job_text::line(&told)),
    }
    Ok(())
}

/// Waits for a job that this client has begun in the background: until it is ready, or has ended.
///
/// Errors: as [`run`].
pub(crate) fn wait(client: &mut Client, id: &str, progress: &Progress) -> Result<Value, Failure> {
    let command = Command::Job(JobCommand::Wait(named(id)));
    client.call(&command, progress, Timeout::Work(ANSWER))
}

/// Says of a mirror that it is ready, and what comes next.
///
/// * `target`: the disk, if it was named.
pub(crate) fn said_ready(told: &Value, target: Option<&str>) {
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

fn named(id: &str) -> Named {
    Named { id: id.to_owned() }
}

/// Says which job was begun in the background.
pub(crate) fn begun(value: &Value, quiet: bool) {
    let id = value["id"].as_str().map(visible).unwrap_or_default();
    terminal::say(&id);
    if !quiet {
        terminal::note(format_args!(
            "the job goes on in the serving process; `ringdisk job wait {id}` waits for its end"
        ));
    }
}

/// What the servers of all disks say of their jobs.
fn all() -> Vec<(Found, Value)> {
    let answers = processes::ask_all(&Command::Job(JobCommand::List), ANSWER);
    let of = |(found, asked): (Found, Asked)| match asked.answer {
        Answer::Value(value) => Some((found, value)),
        // Gone, silent, or of a version without jobs.
        _ => None,
    };
    answers.into_iter().filter_map(of).collect()
}

/// The server of the one disk that has a job of this name.
///
/// Errors: none has; several have.
fn find(id: &str) -> Result<Client, Failure> {
    let jobs = |value: &Value| value["jobs"].as_array().cloned().unwrap_or_default();
    let has = |(_, value): &(Found, Value)| jobs(value).iter().any(|job| job["id"] == id);
    let mut with: Vec<(Found, Value)> = all().into_iter().filter(has).collect();
    let is_under_way = |(_, value): &(Found, Value)| {
        let goes_on =
            |job: &&Value| !["concluded", "moved"].iter().any(|state| job["state"] == *state);
        jobs(value).iter().filter(goes_on).any(|job| job["id"] == id)
    };
    // Of jobs that have ended one that has not is meant.
    if with.len() > 1 && with.iter().any(is_under_way) {
        with.retain(is_under_way);
    }
    let target = |value: &Value| value["target"].as_str().map(visible).unwrap_or_default();
    match with.as_slice() {
        [(found, value)] => Client::at(found, &target(value), ANSWER),
        [] => {
            let text = format!("no disk that is served here has a job '{}'", visible(id));
            Err(Failure::new(Exit::Usage, text).hint("`ringdisk job list` lists them"))
        }
        several => {
            let targets: Vec<String> = several.iter().map(|(_, value)| target(value)).collect();
            let text =
                format!("several disks have a job '{}': {}", visible(id), targets.join(", "));
            Err(Failure::new(Exit::Usage, text).hint(format!(
                "name the disk: `ringdisk job … {} {}`",
                terminal::shell_word(&targets[0]),
                visible(id)
            )))
        }
    }
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

/// One list of all jobs, each with its disk.
fn flat(lists: &[Value]) -> Value {
    let of = |list: &Value| {
        let jobs = list["jobs"].as_array().cloned().unwrap_or_default();
        let target = list["target"].clone();
        jobs.into_iter().map(move |mut job| {
            if let Value::Object(job) = &mut job {
                job.insert(String::from("target"), target.clone());
            }
            job
        })
    };
    let all: Vec<Value> = lists.iter().flat_map(of).collect();
    json!(all)
}
