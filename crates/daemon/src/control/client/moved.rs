//! A job that has moved to the next process of its disk (`--upgrade`).
//!
//! Promises: a client that waits for a job waits on, in the next process; one that had begun it in
//! the foreground cancels it there when it is given up.

use std::path::Path;
use std::thread::sleep;
use std::time::Instant;

use ringdisk_disk::Progress;
use serde_json::Value;

use super::failures::left;
use super::{ANSWER, Client, NEXT, POLL_INTERVAL, Timeout};
use crate::control::jobs::words::{JobCommand, Named};
use crate::control::protocol::Command;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

impl Client {
    /// Waits for a job where it goes on.
    ///
    /// * `command`: what was asked of the process before.
    ///
    /// Errors: nobody goes on with it; those of the job.
    pub(super) fn follow_job(
        &mut self,
        id: &str,
        command: &Command,
        progress: &Progress,
        timeout: Timeout,
    ) -> Result<Value, Failure> {
        let named = || Named { id: id.to_owned() };
        let only_waits = matches!(command, Command::Job(_));
        let end = Instant::now() + NEXT;
        while !self.is_where_it_goes_on(id) {
            if progress.is_cancelled() {
                return Err(left());
            }
            if Instant::now() >= end {
                let text = format!(
                    "the job '{}' moved to the next process of '{}', which does not answer",
                    visible(id),
                    self.shown
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
            let mut again = Client::connect(Path::new(&self.shown), ANSWER)?;
            let cancel = Command::Job(JobCommand::Cancel(named()));
            again.call(&cancel, &Progress::new(), Timeout::Answer(ANSWER))?;
        }
        let told = told?;
        Ok(if only_waits { told } else { told["result"].clone() })
    }

    /// Connects anew. Returns whether the server has the job, and has it no less than others.
    fn is_where_it_goes_on(&mut self, id: &str) -> bool {
        let Ok(mut client) = Client::connect(Path::new(&self.shown), ANSWER) else { return false };
        let list = Command::Job(JobCommand::List);
        let told = client.call(&list, &Progress::new(), Timeout::Answer(ANSWER));
        let jobs = told.ok().and_then(|told| told["jobs"].as_array().cloned());
        let mut named = jobs.into_iter().flatten().filter(|job| job["id"] == id);
        let is_there = named.any(|job| job["state"] != "moved");
        if is_there {
            *self = client;
        }
        is_there
    }
}
