//! Jobs of one disk, or of all that are served on this machine.
//!
//! Promises: a job is found by its name alone where one disk has one of that name; a job that has
//! not ended comes before those that have.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ringdisk_daemon::control::ask_all::{Answer, Asked};
use ringdisk_daemon::control::client::{ANSWER, Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::control::protocol::jobs::{JobCommand, Named};
use ringdisk_daemon::control::registry::Found;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::processes;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::Progress;
use serde_json::{Value, json};

/// How long the control socket of a disk may be away while its server is replaced.
const REPLACED: Duration = Duration::from_secs(2);
/// How often it is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The name of a job, as commands have it.
pub fn named(id: &str) -> Named {
    Named { id: id.to_owned() }
}

/// Connects to the server of a disk, which may just be replaced by the next one: that takes a
/// moment in which a mount is there and its control socket is not.
///
/// Errors: as [`Client::connect`].
pub fn connect_for_waiting(target: &str) -> Result<Client, Failure> {
    let end = Instant::now() + REPLACED;
    loop {
        match Client::connect(Path::new(target), ANSWER) {
            Err(failure) if failure.exit == Exit::Mountpoint && Instant::now() < end => {
                sleep(POLL_INTERVAL);
            }
            connected => return connected,
        }
    }
}

/// Waits for a job that this client has begun in the background: until it is ready, or has ended.
///
/// Errors: no such job; those of the job; the server's reason.
pub fn wait(client: &mut Client, id: &str, progress: &Progress) -> Result<Value, Failure> {
    let command = Command::Job(JobCommand::Wait(named(id)));
    client.call(&command, progress, Timeout::Work(ANSWER))
}

/// What the servers of all disks say of their jobs.
pub fn all() -> Vec<(Found, Value)> {
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
pub fn find(id: &str) -> Result<Client, Failure> {
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

/// One list of all jobs, each with its disk.
///
/// * `lists`: what servers say of their jobs.
pub fn flat(lists: &[Value]) -> Value {
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
