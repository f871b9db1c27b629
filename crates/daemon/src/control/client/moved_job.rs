//! A job that has moved to the next process of its disk (`--upgrade`, or `--keep` after a kill).
//!
//! Promises: a client that waits for a job waits on, in the next process, also where the process
//! before could not tell: for that job, never for another one of the same name, as its token tells
//! (`Job::token`). It does so for a few lost processes, and gives up then. One that had begun it in
//! the foreground cancels it there when it is given up.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ringdisk_disk::Progress;
use serde_json::Value;

use super::failures::{gone, left};
use super::{ANSWER, Client, NEXT, POLL_INTERVAL, Timeout};
use crate::control::protocol::Command;
use crate::control::protocol::jobs::{JobCommand, Named};
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

/// How long a next process is waited for after one that ended without an answer: one that goes on
/// with the jobs is there within some seconds.
const REPLACED: Duration = Duration::from_secs(10);
/// So many lost processes are one too many.
const LOSSES_MAX: u32 = 5;

/// The name of a job, and its token; `None`: its process told none.
type Wanted<'a> = (&'a str, Option<String>);

impl Client {
    /// The token of a job that is about to be waited for; `None`: the server has no such job, or
    /// tells no tokens.
    ///
    /// Errors: as [`Client::answer`].
    pub(super) fn token_of(
        &mut self,
        id: &str,
        progress: &Progress,
        timeout: Timeout,
    ) -> Result<Option<String>, Failure> {
        let told = self.call(&Command::Job(JobCommand::List), progress, timeout)?;
        let named = jobs(&told).find(|job| job["id"] == id);
        Ok(named.and_then(|job| job["token"].as_str()).map(str::to_owned))
    }

    /// Waits for a job again: the process that was asked has ended without an answer.
    ///
    /// * `failure`: how that was seen.
    ///
    /// Errors: no process has the job, which `failure` says; those of the job.
    pub(super) fn wait_again(
        &mut self,
        (id, token): Wanted<'_>,
        mut failure: Failure,
        progress: &Progress,
        timeout: Timeout,
    ) -> Result<Value, Failure> {
        let wait = Command::Job(JobCommand::Wait(Named { id: id.to_owned() }));
        let line = format!("{}\n", wait.line());
        self.losses += 1;
        let mut end = Instant::now() + REPLACED;
        let may_be_there = |client: &Client| token.is_some() && client.losses < LOSSES_MAX;
        while may_be_there(self) && Instant::now() < end && !progress.is_cancelled() {
            // One that ends just now may answer once more.
            if !self.is_where_it_goes_on(id, token.as_deref()) {
                sleep(POLL_INTERVAL);
                continue;
            }
            let told = match self.send(&line, &[], None, false) {
                Ok(_) => self.answer(progress, timeout),
                Err(error) => Err(gone(&error)),
            };
            match told {
                Err(again) if again.exit == Exit::Halted => {
                    failure = again;
                    self.losses += 1;
                    end = Instant::now() + REPLACED;
                }
                Ok(told) if told["state"] == "moved" => {
                    return self.follow_job((id, token), &wait, progress, timeout);
                }
                told => return told,
            }
        }
        Err(if progress.is_cancelled() { left() } else { failure })
    }

    /// Waits for a job where it goes on.
    ///
    /// * `command`: what was asked of the process before.
    ///
    /// Errors: nobody goes on with it; those of the job.
    pub(super) fn follow_job(
        &mut self,
        (id, token): Wanted<'_>,
        command: &Command,
        progress: &Progress,
        timeout: Timeout,
    ) -> Result<Value, Failure> {
        let named = || Named { id: id.to_owned() };
        let only_waits = matches!(command, Command::Job(_));
        let end = Instant::now() + NEXT;
        while !self.is_where_it_goes_on(id, token.as_deref()) {
            if progress.is_cancelled() {
                return Err(left());
            }
            if Instant::now() >= end {
                let text = format!(
                    "the job '{}' moved to the next process of '{}', which does not answer",
                    visible(id),
                    self.target_name
                );
                return Err(
                    Failure::new(Exit::General, text).hint("`ringdisk job list` lists jobs")
                );
            }
            sleep(POLL_INTERVAL);
        }
        let told = self.call(&Command::Job(JobCommand::Wait(named())), progress, timeout);
        if told.is_err() && progress.is_cancelled() && !only_waits {
            // Its client has begun it, and it ends with that.
            let mut again = Client::connect(Path::new(&self.target_name), ANSWER)?;
            let cancel = Command::Job(JobCommand::Cancel(named()));
            again.call(&cancel, &Progress::new(), Timeout::Answer(ANSWER))?;
        }
        let told = told?;
        Ok(if only_waits { told } else { told["result"].clone() })
    }

    /// Connects anew. Returns whether the server has the job, and has it no less than others.
    fn is_where_it_goes_on(&mut self, id: &str, token: Option<&str>) -> bool {
        let Ok(mut client) = Client::connect(Path::new(&self.target_name), ANSWER) else {
            return false;
        };
        let list = Command::Job(JobCommand::List);
        let told = client.call(&list, &Progress::new(), Timeout::Answer(ANSWER));
        let is_there = told.is_ok_and(|told| jobs(&told).any(|job| is_it(job, id, token)));
        if is_there {
            client.losses = self.losses;
            *self = client;
        }
        is_there
    }
}

/// The jobs of a list.
fn jobs(told: &Value) -> impl Iterator<Item = &Value> {
    told["jobs"].as_array().into_iter().flatten()
}

/// Whether a job of a list is the one that is waited for, and has not moved.
///
/// * `token`: `None`: only the name is known.
fn is_it(job: &Value, id: &str, token: Option<&str>) -> bool {
    let is_same = token.is_none_or(|token| job["token"] == token);
    job["id"] == id && is_same && job["state"] != "moved"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_of_the_same_name_is_another_one() {
        let job = json!({ "id": "commit-1", "token": "0a", "state": "running" });
        assert!(is_it(&job, "commit-1", Some("0a")) && is_it(&job, "commit-1", None));
        assert!(!is_it(&job, "commit-1", Some("0b")) && !is_it(&job, "commit-2", Some("0a")));
        let moved = json!({ "id": "commit-1", "token": "0a", "state": "moved" });
        assert!(!is_it(&moved, "commit-1", Some("0a")));
        let older = json!({ "id": "commit-1", "state": "running" });
        assert!(is_it(&older, "commit-1", None) && !is_it(&older, "commit-1", Some("0a")));
        let told = json!({ "jobs": [job, moved] });
        assert_eq!(jobs(&told).count(), 2);
        assert_eq!(jobs(&json!({})).count(), 0);
    }
}
