//! What clients of the control socket ask of the jobs of a disk.
//!
//! Promises: nothing but `job-wait` waits for a job.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::Progress;
use ringdisk_ring::Ring;
use serde_json::{Value, json};

use super::job::{Job, State};
use super::list::Jobs;
use super::words::JobCommand;
use crate::control::server::{First, first};
use crate::failure::{Exit, Failure};

/// How often a client that waits is told how far the job is.
const REPORT: Duration = Duration::from_millis(200);

impl Jobs {
    /// Does what is asked for.
    ///
    /// * `target`: where the disk is served, for people.
    /// * `progress`: of the client that asks; cancelled when it leaves.
    ///
    /// Errors: no such job; it has ended, or cannot do that.
    pub async fn execute(
        &self,
        ring: &Ring,
        command: &JobCommand,
        target: &str,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let Some(id) = command.id() else {
            let jobs: Value = self.all().iter().map(|job| job.to_json()).collect();
            return Ok(json!({ "target": target, "jobs": jobs }));
        };
        let job = self.find(id)?;
        if let JobCommand::Wait(_) = command {
            return wait(ring, &job, progress).await;
        }
        check_goes_on(&job)?;
        match command {
            JobCommand::Pause(_) => job.progress().pause(),
            JobCommand::Resume(_) if job.progress().paused().is_none() => {
                return Err(Failure::new(Exit::Usage, format!("the job '{id}' is not paused")));
            }
            JobCommand::Resume(_) => job.progress().resume(),
            JobCommand::Limit(wanted) => {
                job.progress().set_speed(wanted.speed);
                job.mark();
            }
            JobCommand::Cancel(_) => job.progress().cancel(),
            JobCommand::List | JobCommand::Wait(_) => {}
        }
        Ok(job.to_json())
    }
}

/// Errors: the job has ended, or was cancelled.
fn check_goes_on(job: &Job) -> Result<(), Failure> {
    let id = job.id();
    match job.state() {
        State::Concluded => {
            Err(Failure::new(Exit::Usage, format!("the job '{id}' has ended already")))
        }
        State::Aborting => {
            Err(Failure::new(Exit::Usage, format!("the job '{id}' was cancelled already")))
        }
        _ => Ok(()),
    }
}

/// Waits for the end of a job.
///
/// Errors: why it failed; the client has left.
async fn wait(ring: &Ring, job: &Job, progress: &Progress) -> Result<Value, Failure> {
    loop {
        progress.set_total(job.progress().total());
        progress.set_done(job.progress().done());
        let turn = progress.turn();
        if progress.is_cancelled() {
            return Err(Failure::new(Exit::General, "nobody waits any longer"));
        }
        let pause = pin!(async {
            let _ = ring.within(REPORT, progress.changed(turn)).await;
        });
        match first(pin!(job.ended()), pause).await {
            First::Left(result) => {
                let mut told = job.to_json();
                told["result"] = result?;
                return Ok(told);
            }
            First::Right(()) => {}
        }
    }
}
